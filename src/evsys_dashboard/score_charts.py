"""Server-side SVG of the experiment and run pages: arms with their intervals, and scores over steps.

In: rows and points as plain numbers with their labels. Out: one `<svg>` as safe text; each label in it is escaped here.
Colours are classes of the style sheet, so that a page decides about light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe

from evsys_sdk.format import shown, span, visible
from evsys_sdk.report.svg import Axis, shorten_label, ticks

WIDTH, LABEL_WIDTH, TEXT_WIDTH, ROW_HEIGHT, TOP = 900, 200, 190, 34, 12
LONGEST_LABEL = 26
MOST_ROWS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ForestRow:
    """One line of the plot: an arm, or the untrained model."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    seeds: Sequence[float] = field(default_factory=list)
    """The score of each seed, drawn as a dot where there are several."""
    mark: str = ""
    """`baseline`, `best`, `untrained`: a word behind the name and a class."""
    verdict: str = ""
    """better, worse, equivalent or undecided: the class of the row."""


def axis_range(values: Iterable[float], *, is_share: bool) -> tuple[float, float]:
    """A range that holds all values with a margin; shares stay within 0 and 1."""
    found = [value for value in values if math.isfinite(value)]
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    margin = 0.06 * (high - low) or max(0.05, 0.1 * abs(high))
    low, high = low - margin, high + margin
    return (max(0.0, low), min(1.0, high)) if is_share and high > 0 and low < 1 else (low, high)


def forest_plot(rows: Sequence[ForestRow], *, title: str, is_share: bool = False) -> SafeString:
    """Arms from top to bottom: the mean as a square, its 95 % interval as a line, seeds as dots, and the numbers on the
    right; a vertical line stands at the untrained model, another at the baseline."""
    rows = rows[:MOST_ROWS]
    values = [v for row in rows for v in (row.value, row.low, row.high, *row.seeds) if v is not None]
    low, high = axis_range(values, is_share=is_share)
    left, right = LABEL_WIDTH, WIDTH - TEXT_WIDTH
    bottom = TOP + ROW_HEIGHT * len(rows)

    def x(value: float) -> str:
        share = (value - low) / (high - low) if high > low else 0.5
        return f"{left + min(1.0, max(0.0, share)) * (right - left):.1f}"

    parts = []
    for tick in ticks(Axis(low, high, 0, 1)):
        parts.append(f'<line class="grid" x1="{x(tick)}" x2="{x(tick)}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{x(tick)}" y="{bottom + 16}" text-anchor="middle">{shown_tick(tick)}</text>')
    for row in rows:
        if row.mark in ("baseline", "untrained"):
            parts.append(
                f'<line class="ref is-{row.mark}" x1="{x(row.value)}" x2="{x(row.value)}" y1="{TOP}" y2="{bottom}"/>'
            )
    for index, row in enumerate(rows):
        y = TOP + ROW_HEIGHT * index + ROW_HEIGHT / 2
        word = f' <tspan class="mark">{escape(row.mark)}</tspan>' if row.mark and row.mark != row.label else ""
        name = (
            f'<text class="name" x="0" y="{y + 4:.0f}">{escape(shorten_label(row.label, LONGEST_LABEL))}{word}</text>'
        )
        told = escape(f"{shown(row.value)}{span(row.low, row.high)}")
        text = f'<text class="told" x="{WIDTH}" y="{y + 4:.0f}" text-anchor="end">{told}</text>'
        marks = []
        if row.low is not None and row.high is not None:
            marks.append(f'<line class="interval" x1="{x(row.low)}" x2="{x(row.high)}" y1="{y}" y2="{y}"/>')
            for end in (row.low, row.high):
                marks.append(f'<line class="interval" x1="{x(end)}" x2="{x(end)}" y1="{y - 4}" y2="{y + 4}"/>')
        if len(row.seeds) > 1:
            for place, seed in enumerate(row.seeds):
                height = y + 10 - 3 * list(row.seeds[:place]).count(seed)  # equals in a pile
                marks.append(f'<circle class="seed" cx="{x(seed)}" cy="{height:.1f}" r="2.5"/>')
        marks.append(f'<rect class="mean" x="{float(x(row.value)) - 4.5:.1f}" y="{y - 4.5}" width="9" height="9"/>')
        css = " ".join(["row", *([row.verdict] if row.verdict else []), *([f"is-{row.mark}"] if row.mark else [])])
        hover = f"<title>{escape(visible(row.label))}: {told}</title>"
        parts.append(f'<g class="{escape(css)}">{hover}{name}{"".join(marks)}{text}</g>')
    parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    return _svg("".join(parts), WIDTH, bottom + 24, "chart forest", title)


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
    begin, end = (begin - 1, end + 1) if begin == end else (begin, end)

    def x(step: float) -> float:
        return left + 10 + (step - begin) / (end - begin) * (width - left - 24)

    def y(value: float) -> float:
        return bottom - (value - low) / ((high - low) or 1) * (bottom - top)

    parts = []
    for tick in ticks(Axis(low, high, 0, 1), 4):
        parts.append(f'<line class="grid" x1="{left}" x2="{width}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{shown_tick(tick)}</text>')
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
    return _svg("".join(parts), width, height, "chart scores", title)


def shown_tick(value: float) -> str:
    return f"{value:.6g}"


def _svg(inner: str, width: int, height: float, css: str, title: str) -> SafeString:
    # Safe: every text in `inner` went through `escape` above.
    label = escape(visible(title))
    head = f'<svg class="{css}" viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{label}">'
    return mark_safe(f"{head}{inner}</svg>")
