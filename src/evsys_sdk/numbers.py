"""Numbers as people read them in conclusions and tables.

In: a score or a difference. Out: three decimals; a smaller number, such as dollars, in its own size.
"""

from __future__ import annotations


def shown(value: float, *, signed: bool = False) -> str:
    """`0.938`, `+0.050`, `6.5e-06`."""
    sign = "+" if signed else ""
    return f"{value:{sign}.3f}" if value == 0 or abs(value) >= 0.001 else f"{value:{sign}.2g}"


def span(low: float | None, high: float | None, *, signed: bool = False) -> str:
    """` [0.832, 0.979]`, or nothing where there is no interval."""
    if low is None or high is None:
        return ""
    return f" [{shown(low, signed=signed)}, {shown(high, signed=signed)}]"
