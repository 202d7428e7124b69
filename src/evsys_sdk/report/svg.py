"""Figures as SVG text, without matplotlib: arms with their intervals, learning curves with the range of their seeds.

In: a `Verdict`, or curves by panel and arm. Out: one `<svg>` element as text, each text in it escaped. Colours are CSS
variables with a fallback (`var(--better, #2e7d4f)`), so that a page decides about light and dark; there is no `<style>`
and no script, so that a strict content security policy lets a figure pass. What a figure shows (which arms, in which
order, compared with what) is decided here for `figures` too, which draws PNGs of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

from evsys_sdk.constants import UNTRAINED
from evsys_sdk.format import amount, amount_unit, number_text, score_text, shown, visible
from evsys_sdk.protocols import Score
from evsys_sdk.stats.verdict import ArmVerdict, Comparison, Verdict

Curve = dict[int, float]
"""Step -> value."""
SeedCurves = dict[str, dict[str, list[Curve]]]
"""Panel -> arm -> a curve per seed."""

COLOURS = ("#3264a8", "#d1661f", "#3a8a4d", "#a83f6f", "#6b5bb0", "#8a6d3b", "#2f97a6", "#555555")
GREY = "#b8b8b8"
VERDICTS = {"better": "#2e7d4f", "worse": "#b03a2e", "equivalent": "#3264a8", "undecided": "#8a8a8a"}
MOST_COLOURS = 8
"""Arms beyond these are drawn in grey."""
MOST_BANDS = 4
"""With more arms, bands over seeds would cover each other: a bar at the end of each line stands for them."""
MOST_ROWS = 40
MOST_NAMED = 4
"""Arms without a score that are named in the notes."""
LONGEST_LABEL = 40
LONGEST_HEADING = 38
"""Letters above the right panel, which has little more than a third of the width."""


def short_labels(arms: Sequence[str]) -> list[str]:
    """Names that fit: of `algorithm.params.rank=8` the last part; where two would look the same, with their number."""
    names = [re.sub(r"[\w.]+\.(\w+=)", r"\1", arm) if len(arm) > LONGEST_LABEL else arm for arm in arms]
    short = [shorten_label(name) for name in names]
    return [f"{name} ({i + 1})" if short.count(name) > 1 else name for i, name in enumerate(short)]


def shorten_label(text: str, limit: int = LONGEST_LABEL) -> str:
    """A name with its middle left out where it is too long."""
    text = visible(text)
    return text if len(text) <= limit else f"{text[: limit - 15]}...{text[-12:]}"


def band(curves: Sequence[Curve]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps, mean, lowest and highest over the seeds that have each step. A step that only some of the seeds have is
    left out: a mean over other seeds would look like a jump."""
    # Where the seeds share no step, the first seed stands for the arm.
    steps = [step for step in curves[0] if all(step in curve for curve in curves)] or list(curves[0])
    shared = [curve for curve in curves if all(step in curve for step in steps)]
    columns = [[curve[step] for curve in shared] for step in steps]
    return steps, [fmean(c) for c in columns], [min(c) for c in columns], [max(c) for c in columns]


def colour_order(arms: Sequence[str], verdict: Verdict | None) -> list[str]:
    """The arms as they get their colours: where not all get one, the baseline and the best means do, unless none may be
    picked."""
    if len(arms) <= MOST_COLOURS or verdict is None or verdict.winner is None:
        return list(arms)
    sign = -1 if verdict.mode == "max" else 1
    means = {arm.arm: sign * arm.mean for arm in verdict.arms if arm.mean is not None}
    return sorted(arms, key=lambda arm: (arm != verdict.baseline_arm, means.get(arm, math.inf)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForestPlan:
    """What the plot of the arms shows."""

    rows: list[tuple[ArmVerdict, Comparison | None]]
    """From top to bottom: each scored arm with its comparison."""
    whom: str
    """What the arms are compared with; empty where nothing is compared."""
    notes: list[str]
    """How to read it, and what is left out."""


def plan_forest(verdict: Verdict) -> ForestPlan:
    """The best arm on top, the baseline kept however low it is; arms stay in their own order where none may be
    picked."""
    ranked = [arm for arm in verdict.arms if arm.mean is not None]
    arms = list(ranked)
    if verdict.winner is not None:
        arms.sort(key=lambda arm: (1 if verdict.mode == "min" else -1) * (arm.mean or 0.0))
    lost = [arm for arm in arms[MOST_ROWS:] if arm.arm == verdict.baseline_arm]
    arms = [*arms[: MOST_ROWS - len(lost)], *lost]
    whom, compared = "", [arm.vs_baseline for arm in arms]
    if verdict.baseline_arm and any(arm.vs_baseline for arm in ranked):
        whom = verdict.baseline_arm
    elif any(arm.vs_untrained for arm in ranked):
        whom = "the untrained model" if verdict.start == UNTRAINED else verdict.start
        compared = [arm.vs_untrained for arm in arms]
    notes = ["bars: 95 % intervals", "small dots: seeds"]
    notes += ["colour: verdict after Holm's correction"] if whom else []
    notes += [] if verdict.winner else ["arms in their own order, as nothing is picked by these scores"]
    if left_out := len(ranked) - len(arms):
        notes.append(f"{left_out} {'lower' if verdict.winner else 'more'} arms left out")
    unranked = short_labels([arm.arm for arm in verdict.arms if arm.mean is None])
    more = f" and {len(unranked) - MOST_NAMED} more" if len(unranked) > MOST_NAMED else ""
    notes += [f"not ranked: {', '.join(unranked[:MOST_NAMED])}{more}"] if unranked else []
    return ForestPlan(rows=list(zip(arms, compared, strict=True)), whom=whom, notes=notes)


def comparison_word(found: Comparison | None) -> str:
    """`better`; `the baseline` for the arm that the others are compared with."""
    if found is None:
        return "the baseline"
    return "not compared" if found.difference is None else found.verdict


# Drawing. Lengths are in user units, which are CSS pixels at the figure's own width.

ROW, LETTER = 34, 6.6
"""The height of a row of the forest plot; the width of a letter at 12 px, on the high side."""
MUTED = "var(--muted, #6b7280)"
GRID = "var(--grid, #d9dce1)"


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear scale from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 2)


def make_axis(values: Sequence[float], start: float, end: float, *, margin: float = 0.04) -> Axis:
    """A scale that holds every finite value, with a margin on both sides."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    # Of one value alone the scale is made up; huge values must not be equal after rounding.
    width = high - low or abs(high) * 0.1 or 1.0
    return Axis(low - margin * width, high + margin * width, start, end)


def ticks(axis: Axis, most: int = 6) -> list[float]:
    """Round numbers on a scale: multiples of 1, 2 or 5 times a power of ten."""
    width = axis.high - axis.low
    power = 10.0 ** math.floor(math.log10(width / most))
    step = next((factor * power for factor in (1, 2, 5) if width / (factor * power) <= most), 10 * power)
    first = math.ceil(axis.low / step)
    return [round(number * step, 12) + 0.0 for number in range(first, first + most + 1) if number * step <= axis.high]


def text_element(
    x: float, y: float, text: str, *, anchor: str = "start", size: float = 12, fill: str = "currentColor",
    weight: str = "",
) -> str:  # fmt: skip
    """A `<text>` with its text escaped."""
    bold = f' font-weight="{weight}"' if weight else ""
    inside = escape(visible(text))
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size:g}" fill="{fill}"{bold}>{inside}</text>'


def in_unit(text: str, unit: str) -> str:
    """`val/tools/latency, in s`: an axis says what its numbers are counted in."""
    return f"{text}, in {unit}" if unit else text


def difference_heading(whom: str, verdict: Verdict, longest: int = LONGEST_HEADING) -> str:
    """`difference to lr0p001, in points`: what stands above the differences; shorter where that would be cut."""
    baseline = "the baseline" if whom == verdict.baseline_arm else "untrained"  # its row has the name
    texts = (in_unit(f"difference to {one}", difference_unit(verdict)) for one in (short_labels([whom])[0], baseline))
    return next((text for text in texts if len(text) <= longest), "difference")


def difference_unit(verdict: Verdict) -> str:
    """What a difference between arms is counted in: points for shares, else the metric's own unit."""
    return amount_unit(share=verdict.share, unit=verdict.unit).strip()


def difference_label(tick: float, verdict: Verdict) -> str:
    """A tick of the axis of differences, without its unit."""
    return amount(tick, share=verdict.share, unit=verdict.unit, signed=True) if tick else "0"


def svg_element(parts: Sequence[str], *, width: float, height: float, label: str) -> str:
    """The figure; `label` is what a screen reader says."""
    said = escape(visible(label), quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{said}" font-family="system-ui, sans-serif">'
        f"{''.join(parts)}</svg>"
    )


def forest_svg(
    verdict: Verdict, *, label: str = "Arms with their intervals", untrained: Score | None = None
) -> str:  # fmt: skip
    """A row per scored arm: its mean with interval and seeds; beside it its difference to the baseline, or to the
    untrained model where there is none, and the verdict in words. The score of the untrained model, where it is given,
    is the last row and a dotted line. Empty text where no arm has a score."""
    plan = plan_forest(verdict)
    if not plan.rows:
        return ""
    names = short_labels([arm.arm for arm, _ in plan.rows])
    before = untrained.value if untrained is not None else None
    names += [short_labels([verdict.start])[0]] if before is not None else []
    left = 12 + LETTER * max(map(len, names))
    width, first_end = (left + 640.0, left + 300) if plan.whom else (left + 420.0, left + 400)
    top, bottom = 34.0, 34.0 + ROW * len(names)
    scores = [
        value
        for arm, _ in plan.rows
        for value in (arm.mean, arm.low, arm.high, *arm.seed_means.values())
        if value is not None
    ]
    if untrained is not None:
        scores += [value for value in (before, untrained.low, untrained.high) if value is not None]
    axis = make_axis(scores, left + 10, first_end)
    better = "higher" if verdict.mode == "max" else "lower"
    parts = [*_axis_lines(axis, top, bottom, [number_text(tick, unit=verdict.unit) for tick in ticks(axis)])]
    heading = shorten_label(f"{in_unit(verdict.metric, verdict.unit)}, {better} is better", 52)
    parts.append(text_element(left + 10, 18, heading, weight="600"))
    other: Axis | None = None
    if plan.whom:
        found = [one for _, one in plan.rows if one]
        ends = [end for one in found for end in (one.difference, one.low, one.high) if end is not None]
        other = make_axis([0.0, *ends], first_end + 56, width - 100)
        labels = [difference_label(tick, verdict) for tick in ticks(other, 4)]
        parts += _axis_lines(other, top, bottom, labels, most=4)
        zero = other(0.0)
        parts.append(
            f'<line x1="{zero:g}" x2="{zero:g}" y1="{top:g}" y2="{bottom:g}" stroke="currentColor" '
            'stroke-dasharray="4 3"/>'
        )
        parts.append(text_element(first_end + 56, 18, difference_heading(plan.whom, verdict), weight="600"))
    for number, (arm, comparison) in enumerate(plan.rows):
        y = top + ROW * (number + 0.5)
        colour = "var(--accent, #3264a8)"
        if comparison:
            colour = f"var(--{comparison.verdict}, {VERDICTS[comparison.verdict]})"
        colour = "currentColor" if arm.arm == verdict.baseline_arm else colour
        parts.append(text_element(left, y + 4, names[number], anchor="end"))
        counts = [f"{arm.n_tasks} tasks"] if arm.n_tasks and not verdict.per_run else []
        said = score_text(
            arm.mean, arm.low, arm.high, unit=verdict.unit,
            counts=[*counts, f"{arm.n_seeds} seeds" if arm.n_seeds != 1 else "1 seed"],
            marks=[arm.training_mark], n_errors=arm.n_errors, n_rollouts=arm.n_rollouts,
        )  # fmt: skip
        mark = "baseline" if arm.arm == verdict.baseline_arm else "best" if verdict.winner and number == 0 else "other"
        parts.append(f'<g class="is-{mark}"><title>{escape(visible(f"{arm.arm}: {said}"))}</title>')
        parts += _interval(axis, y, arm.mean, arm.low, arm.high, colour)
        seeds = list(arm.seed_means.values())
        if len(seeds) > 1:
            for place, seed in enumerate(seeds):  # equal ones in a pile
                if math.isfinite(seed):
                    height = y + 8 + 2.5 * seeds[:place].count(seed)
                    parts.append(
                        f'<circle class="seed" cx="{axis(seed):g}" cy="{height:g}" r="2" fill="{colour}" '
                        'fill-opacity="0.6"/>'
                    )
        parts.append("</g>")
        if other is not None:
            if comparison is not None:
                parts += _interval(other, y, comparison.difference, comparison.low, comparison.high, colour)
            parts.append(text_element(width - 92, y + 4, comparison_word(comparison), fill=colour))
    if untrained is not None and before is not None:
        y = bottom - ROW / 2
        said = score_text(before, untrained.low, untrained.high, n_errors=untrained.n_errors)
        parts.append(text_element(left, y + 4, names[-1], anchor="end"))
        if math.isfinite(before):
            parts.append(
                f'<line x1="{axis(before):g}" x2="{axis(before):g}" y1="{top:g}" y2="{bottom:g}" stroke="{MUTED}" '
                'stroke-dasharray="1 4"/>'
            )
        parts.append(f'<g class="is-untrained"><title>{escape(visible(f"{verdict.start}: {said}"))}</title>')
        parts += [*_interval(axis, y, before, untrained.low, untrained.high, MUTED), "</g>"]
    return svg_element(parts, width=width, height=bottom + 26, label=label)


def _axis_lines(axis: Axis, top: float, bottom: float, labels: Sequence[str], *, most: int = 6) -> Iterator[str]:
    for tick, label in zip(ticks(axis, most), labels, strict=True):
        x = axis(tick)
        yield f'<line x1="{x:g}" x2="{x:g}" y1="{top:g}" y2="{bottom:g}" stroke="{GRID}"/>'
        yield text_element(x, bottom + 16, label, anchor="middle", size=11, fill=MUTED)


def _interval(
    axis: Axis, y: float, middle: float | None, low: float | None, high: float | None, colour: str
) -> Iterator[str]:
    if low is not None and high is not None and math.isfinite(low) and math.isfinite(high):
        yield (
            f'<line x1="{axis(low):g}" x2="{axis(high):g}" y1="{y:g}" y2="{y:g}" stroke="{colour}" stroke-width="2.5"/>'
        )
    if middle is not None and math.isfinite(middle):
        yield f'<circle cx="{axis(middle):g}" cy="{y:g}" r="4.5" fill="{colour}"/>'


def colour_of(index: int) -> str:
    """The colour of the arm at this place in the order."""
    return f"var(--series-{index}, {COLOURS[index]})" if index < MOST_COLOURS else f"var(--series-rest, {GREY})"


def curve_svg(
    name: str, arms: Mapping[str, Sequence[Curve]], *, order: Sequence[str], failed: Sequence[str] = (), unit: str = ""
) -> str:
    """One panel: a line per arm over steps, dashed if the arm failed, with the range from its lowest to its highest
    seed: as a band, or among many arms as a bar at its end. `order` gives the arms their colours, `unit` is what the
    number is counted in."""
    width, height, left, right, top, bottom = 440.0, 250.0, 58.0, 428.0, 30.0, 212.0
    drawn = {arm: band(arms[arm]) for arm in order if arms.get(arm)}
    if not drawn:
        return ""
    has_bands = len(order) <= MOST_BANDS
    x = make_axis([step for steps, *_ in drawn.values() for step in steps], left, right, margin=0.02)
    y = make_axis([value for _, *rows in drawn.values() for row in rows for value in row], bottom, top)
    parts = [text_element(left, 18, in_unit(shorten_label(name), unit), weight="600")]
    for tick in ticks(y, 4):
        parts.append(f'<line x1="{left:g}" x2="{right:g}" y1="{y(tick):g}" y2="{y(tick):g}" stroke="{GRID}"/>')
        # Of large numbers three digits after the point say nothing.
        label = number_text(tick, unit=unit) if abs(tick) < 1000 else f"{tick:.4g}"
        parts.append(text_element(left - 6, y(tick) + 4, label, anchor="end", size=11, fill=MUTED))
    for tick in ticks(x, 5):
        if tick == int(tick):
            parts.append(text_element(x(tick), bottom + 16, f"{int(tick):,}", anchor="middle", size=11, fill=MUTED))
    parts.append(text_element(right, bottom + 32, "step", anchor="end", size=11, fill=MUTED))
    for index, arm in reversed(list(enumerate(order))):  # the first arms on top
        if arm not in drawn:
            continue
        steps, mean, low, high = drawn[arm]
        colour = colour_of(index)
        seeds = len(arms[arm])
        if seeds > 1 and index < MOST_COLOURS:
            if has_bands:
                edge = [*zip(steps, high, strict=True), *zip(reversed(steps), reversed(low), strict=True)]
                points = " ".join(f"{x(step):g},{y(value):g}" for step, value in edge)
                parts.append(f'<polygon points="{points}" fill="{colour}" fill-opacity="0.15"/>')
            else:
                end = x(steps[-1]) + 3 * (index + 1)
                parts.append(
                    f'<line x1="{end:g}" x2="{end:g}" y1="{y(low[-1]):g}" y2="{y(high[-1]):g}" stroke="{colour}"/>'
                )
        points = " ".join(f"{x(step):g},{y(value):g}" for step, value in zip(steps, mean, strict=True))
        dashes = ' stroke-dasharray="5 3"' if arm in failed else ""
        thickness = 1.8 if index < MOST_COLOURS else 0.8
        ending = f"{arm}: {shown(mean[-1], unit=unit)} at step {steps[-1]:,}" + (
            f", mean of {seeds} seeds" if seeds > 1 else ""
        )
        parts.append(
            f'<g><title>{escape(visible(ending))}</title><polyline points="{points}" fill="none" stroke="{colour}" '
            f'stroke-width="{thickness}"{dashes}/></g>'
        )
        if len(steps) <= 12 and arm not in failed:
            for step, value in zip(steps, mean, strict=True):
                parts.append(f'<circle cx="{x(step):g}" cy="{y(value):g}" r="2.5" fill="{colour}"/>')
    return svg_element(parts, width=width, height=height, label=f"{name} over steps, a line per arm")


def legend_svg(order: Sequence[str], failed: Sequence[str] = ()) -> str:
    """Which colour is which arm; arms beyond the colours are counted."""
    shown_arms = list(order[:MOST_COLOURS])
    texts = [
        f"{label} (failed)" if arm in failed else label
        for arm, label in zip(shown_arms, short_labels(shown_arms), strict=True)
    ]
    texts += [f"{len(order) - MOST_COLOURS} other arms"] if len(order) > MOST_COLOURS else []
    parts, at, row, most = [], 0.0, 0, 860.0
    for index, text in enumerate(texts):
        needs = 34 + LETTER * len(text) + 18
        if at and at + needs > most:
            at, row = 0.0, row + 1
        y = 14 + 20 * row
        dashes = ' stroke-dasharray="5 3"' if index < len(shown_arms) and shown_arms[index] in failed else ""
        parts.append(
            f'<line x1="{at:g}" x2="{at + 24:g}" y1="{y - 4:g}" y2="{y - 4:g}" stroke="{colour_of(index)}" '
            f'stroke-width="2.5"{dashes}/>'
        )
        parts.append(text_element(at + 30, y, text))
        at += needs
    return svg_element(parts, width=most, height=24 + 20 * row, label="Colours of the arms")
