"""Server-side SVG of the run page: scores over steps.

In: points as plain numbers. Out: one `<svg>` as safe text; each label in it is escaped here. Colours are classes of the
style sheet, so that a page decides about light and dark. The plot of arms is that of `evsys_sdk.report.svg`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe

from evsys_sdk.format import shown, span, visible
from evsys_sdk.report.svg import Axis, ticks


def axis_range(values: Iterable[float], *, is_share: bool) -> tuple[float, float]:
    """A range that holds all values with a margin; shares stay within 0 and 1."""
    found = [value for value in values if math.isfinite(value)]
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    margin = 0.06 * (high - low) or max(0.05, 0.1 * abs(high))
    low, high = low - margin, high + margin
    # The margin must not suggest scores below 0 or above 1.
    return (max(0.0, low), min(1.0, high)) if is_share and high > 0 and low < 1 else (low, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePoint:
    """One evaluation on the axis of steps."""

    step: int
    value: float
    low: float | None = None
    high: float | None = None


def score_plot(points: Sequence[ScorePoint], *, title: str, is_share: bool = False) -> SafeString:
    """Scores of one benchmark over training steps, each with its 95 % interval."""
    width, height, left, bottom, top = 420, 180, 44, 150, 10
    values = [v for point in points for v in (point.value, point.low, point.high) if v is not None]
    low, high = axis_range(values, is_share=is_share)
    steps = [point.step for point in points]
    begin, end = (min(steps), max(steps)) if steps else (0, 1)
    # A single step stands in the middle of an axis that has some width.
    begin, end = (begin - 1, end + 1) if begin == end else (begin, end)

    def x(step: float) -> float:
        return left + 10 + (step - begin) / (end - begin) * (width - left - 24)

    def y(value: float) -> float:
        return bottom - (value - low) / ((high - low) or 1) * (bottom - top)

    parts = []
    for tick in ticks(Axis(low, high, 0, 1), 4):
        parts.append(f'<line class="grid" x1="{left}" x2="{width}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.6g}</text>')
    for tick in ticks(Axis(begin, end, 0, 1), 5):
        if tick == int(tick) and tick >= 0:
            parts.append(f'<text x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{int(tick):,}</text>')
    line = " ".join(f"{x(point.step):.1f},{y(point.value):.1f}" for point in points)
    parts.append(f'<polyline class="best" points="{line}"/>')
    for point in points:
        told = escape(f"step {point.step}: {shown(point.value)}{span(point.low, point.high)}")
        whisker = ""
        if point.low is not None and point.high is not None:
            at = f"{x(point.step):.1f}"
            whisker = f'<line class="whisker" x1="{at}" x2="{at}" y1="{y(point.low):.1f}" y2="{y(point.high):.1f}"/>'
        dot = f'<circle class="dot" cx="{x(point.step):.1f}" cy="{y(point.value):.1f}" r="3.5"/>'
        parts.append(f'<g class="point"><title>{told}</title>{whisker}{dot}</g>')
    parts.append(f'<line class="axis" x1="{left}" x2="{width}" y1="{bottom}" y2="{bottom}"/>')
    head = f'<svg class="chart scores" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(visible(title))}">'
    # Safe: every text in `parts` went through `escape` above.
    return mark_safe(f"{head}{''.join(parts)}</svg>")
