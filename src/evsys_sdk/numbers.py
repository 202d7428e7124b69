"""Numbers as people read them in conclusions and tables, and what counts as one in the logs.

In: a score or a difference. Out: three decimals; a smaller number, such as dollars, in its own size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def amount(value: float, *, share: bool, signed: bool = False) -> str:
    """A difference without its unit: `13.3` of a share, which is told in points; else in the metric's own size."""
    if not share:
        return shown(value, signed=signed)
    points = round(100 * value, 1) + 0.0  # no -0.0
    return f"{points:+.1f}" if signed else f"{points:.1f}"


def count(n: int, what: str) -> str:
    """`1 task`, `1,200 tasks`."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def plan_text(tasks: int | None, seeds: int | None, both: Sequence[int] | None) -> str:
    """`about 120 more tasks or 3 more seeds per arm`; empty where no number helps."""
    ways = [count(tasks, "more task")] if tasks is not None else []
    ways += [f"{count(seeds, 'more seed')} per arm"] if seeds is not None else []
    if both is not None:
        ways = [f"{count(both[0], 'more task')} together with {count(both[1], 'more seed')} per arm"]
    return f"about {' or '.join(ways)}" if ways else ""
