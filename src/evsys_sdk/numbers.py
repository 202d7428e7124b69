"""Numbers as people read them in conclusions and tables, and what counts as one in the logs.

In: a score or a difference. Out: three decimals; a smaller number, such as dollars, in its own size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evsys_sdk.errors import EvsysError, shorten


def refuse_non_numbers(metrics: Mapping[str, Any], step: int) -> None:
    """Refuse what cannot be logged as a metric: text, None, `...`. NaN and infinities are numbers, and are logged."""
    for name, value in metrics.items():
        if as_number(value) is None:
            raise EvsysError(
                f"metric {name!r} of step {step} is {shorten(repr(value))}, not a number; log an int or a float"
            )


def as_number(value: Any) -> float | None:
    """`value` as a float (whole numbers stay whole); None for what is no number."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if isinstance(value, str | bytes) else value if isinstance(value, int) else number


def shown(value: float, *, signed: bool = False) -> str:
    """`0.938`, `+0.050`, `6.5e-06`."""
    sign = "+" if signed else ""
    return f"{value:{sign}.3f}" if value == 0 or abs(value) >= 0.001 else f"{value:{sign}.2g}"


def span(low: float | None, high: float | None, *, signed: bool = False) -> str:
    """` [0.832, 0.979]`, or nothing where there is no interval."""
    if low is None or high is None:
        return ""
    return f" [{shown(low, signed=signed)}, {shown(high, signed=signed)}]"
