"""Figures of an experiment: learning curves with the range of their seeds, and the arms with their intervals.

In: the runs of each arm, the verdict, the journal. Out: `<name>.curves.png|svg` and `<name>.arms.png|svg`. matplotlib
(extra `plot`) is loaded only here; without it, or where there is nothing to draw, the page says so. The same numbers
give the same files, byte for byte.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from evsys_sdk.errors import FOREIGN, Cancelled
from evsys_sdk.files import whole_file
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import RunResult
from evsys_sdk.record.callbacks import eval_metrics
from evsys_sdk.record.journal import PAYMENT
from evsys_sdk.record.rollouts import StoredJournal
from evsys_sdk.report.svg import (
    COLOURS,
    GREY,
    MOST_BANDS,
    MOST_COLOURS,
    VERDICTS,
    Curve,
    SeedCurves,
    band,
    colour_order,
    comparison_word,
    difference_heading,
    difference_label,
    in_unit,
    plan_forest,
    short_labels,
    shorten_label,
)
from evsys_sdk.score_names import score_key
from evsys_sdk.stats.verdict import Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What a resumed run did anew counts once: of each run the last attempt, without the steps that were trained again.
_COUNTED = (
    "FROM events AS e WHERE e.superseded = 0 AND e.attempt = (SELECT max(attempt) FROM attempts WHERE run = e.run)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What the runs took."""

    steps: int = 0
    tokens: int = 0
    usd: float = 0.0
    unpriced: int = 0
    """Rollouts whose price is not known."""


def totals(journal: Path, runs: Collection[str]) -> Totals:
    """Steps and tokens of training, and dollars for rollouts of evaluations and for prompt search, of these runs."""
    steps = tokens = unpriced = 0
    usd = 0.0
    for run, data in _step_rows(journal, "step"):
        if run in runs:
            steps, tokens = steps + 1, tokens + int(_number(data["metrics"].get("tokens")) or 0)
    for run, data in _step_rows(journal, PAYMENT):
        if run in runs:
            usd += float(data["cost_usd"])
    for run, data in _step_rows(journal, "rollout"):
        if run in runs:
            usd += float(data.get("cost_usd") or 0.0)
            unpriced += bool((data.get("metadata") or {}).get("unpriced"))
    return Totals(steps=steps, tokens=tokens, usd=usd, unpriced=unpriced)


def step_curves(journal: Path, metrics: Collection[str]) -> dict[str, dict[str, Curve]]:
    """Run -> metric -> curve, of these metrics; values that are no numbers are left out."""
    curves: dict[str, dict[str, Curve]] = {}
    query = f"SELECT e.run, e.at, e.data {_COUNTED} AND e.kind = 'step' ORDER BY e.id"
    with closing(StoredJournal(journal)) as stored:
        for run, at, data in stored.read(query, ()):
            found = json.loads(data)["metrics"]
            for name in metrics:
                if (value := _number(found.get(name))) is not None:
                    curves.setdefault(run, {}).setdefault(name, {})[at] = value
    return curves


def _step_rows(journal: Path, kind: str) -> list[tuple[str, dict[str, Any]]]:
    with closing(StoredJournal(journal)) as stored:
        rows = stored.read(f"SELECT e.run, e.data {_COUNTED} AND e.kind = ?", (kind,))
    return [(run, json.loads(data)) for run, data in rows]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


HOW_TO_GET = (
    "No figures: they need matplotlib. `pip install 'evsys-sdk[plot]'`, then the same command again draws them."
)
STEP_METRICS = ("loss", "reward")
"""What of a step is drawn, where it is there."""
MOST_PANELS = 6
LETTERS_PER_INCH, BOLD_PER_INCH, LINE_POINTS = 15.5, 10.5, 12
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    # Else the ids in an SVG are random, and equal figures differ.
    "svg.hashsalt": "evsys",
    "svg.fonttype": "none",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where figures go and what they are made from."""

    folder: Path
    file_name: str
    journal: Path
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What was drawn."""

    files: dict[str, str] = field(default_factory=dict)
    """What it shows -> the PNG's name."""
    note: str = ""
    """Why there is nothing, where that is so."""


def draw(arms: Mapping[str, Sequence[RunResult]], verdict: Verdict | None, place: Place) -> Drawn:
    """Draw what there is to draw; a figure that fails is a warning and a line, never an error."""
    if find_spec("matplotlib") is None:
        return Drawn(note=HOW_TO_GET)
    files: dict[str, str] = {}
    try:
        import matplotlib

        panels = curves_of(arms, place.journal)
        with matplotlib.rc_context({**STYLE, "text.usetex": False}):
            if panels:
                failed = [arm for arm, runs in arms.items() if all(run.status == "failed" for run in runs)]
                order = colour_order(list(arms), verdict)
                figure = learning_curves(panels, order=order, title=place.title, failed=failed, units=score_units(arms))
                files["Learning curves"] = _save(figure, place, "curves")
            if verdict is not None and sum(arm.mean is not None for arm in verdict.arms) > 1:
                files["Arms with their intervals"] = _save(forest(verdict, title=place.title), place, "arms")
    except Cancelled:
        raise
    except FOREIGN as exc:
        get_logger(__name__).warning("figures could not be drawn: %s: %s", type(exc).__name__, exc)
        return Drawn(note=f"No figures: drawing failed ({type(exc).__name__}: {exc}).")
    return Drawn(files=files, note="" if files else "No figures: fewer than two steps, and fewer than two scored arms.")


def curves_of(arms: Mapping[str, Sequence[RunResult]], journal: Path) -> SeedCurves:
    """The curves of more than one point: of step metrics from the journal, of in-loop scores from the results."""
    steps = step_curves(journal, STEP_METRICS) if journal.exists() else {}
    panels: SeedCurves = {}
    for arm, runs in arms.items():
        # Seeds that did not complete are drawn only where none did.
        for run in [run for run in runs if run.status == "completed"] or runs:
            scores: dict[str, Curve] = {}
            for result in sorted((one for one in run.evals if one.step is not None), key=lambda one: one.step or 0):
                for name, value in eval_metrics(result).items():
                    scores.setdefault(name, {})[result.step or 0] = value
            for name, curve in {**steps.get(run.run_id, {}), **scores}.items():
                if len(curve) > 1:
                    panels.setdefault(name, {}).setdefault(arm, []).append(curve)
    wanted = sorted(panels, key=lambda name: (STEP_METRICS.index(name) if name in STEP_METRICS else 99, name))
    return {name: panels[name] for name in wanted[:MOST_PANELS]}


def score_units(arms: Mapping[str, Sequence[RunResult]]) -> dict[str, str]:
    """Score -> what it is counted in, for those that have a unit."""
    return {
        score_key(result.split, result.name, score.metric): score.unit
        for runs in arms.values()
        for run in runs
        for result in run.evals
        for score in result.scores
        if score.unit
    }


def learning_curves(
    panels: SeedCurves,
    *,
    order: Sequence[str],
    title: str,
    failed: Sequence[str] = (),
    units: Mapping[str, str] = MappingProxyType({}),
) -> Figure:
    """A panel per number: a line per arm, dashed if it failed, with the range from its lowest to its highest seed: as a
    band, or among many arms as a bar at its end. `units` has what numbers are counted in."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    bands = len(order) <= MOST_BANDS
    columns = min(len(panels), 2 if len(panels) in (2, 4) else 3)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns + 0.4, 3.1 * rows + 0.9), layout="constrained")
    for number, (name, arms) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, number + 1)
        for index, arm in reversed(list(enumerate(order))):  # the first arms on top
            if arm not in arms:
                continue
            steps, mean, _, _ = band(arms[arm])
            colour, width = (COLOURS[index], 1.6) if index < MOST_COLOURS else (GREY, 0.8)
            dots, dashes = ("o" if len(steps) <= 12 else None, "-") if arm not in failed else (None, "--")
            axes.plot(steps, mean, color=colour, linewidth=width, marker=dots, markersize=3, linestyle=dashes)
            if arm in failed:
                axes.plot(steps[-1:], mean[-1:], "x", color=colour, markersize=6)
        coloured = [arms.get(arm, []) for arm in order[:MOST_COLOURS]]
        last = max((step for curves in coloured for curve in curves for step in curve), default=0)
        gap = 0.012 * (last - axes.dataLim.x0)  # bars stand side by side
        for index, curves in enumerate(coloured):
            if len(curves) > 1:
                steps, _, low, high = band(curves)
                if bands:
                    axes.fill_between(steps, low, high, color=COLOURS[index], alpha=0.15, linewidth=0)
                else:
                    axes.vlines(steps[-1] + gap * (index + 1), low[-1], high[-1], color=COLOURS[index], linewidth=1.6)
        axes.set_title(_plain_text(in_unit(shorten_label(name), units.get(name, ""))), loc="left", fontsize=10)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.margins(x=0.02)
    seeds = max(len(curves) for arms in panels.values() for curves in arms.values())
    shape = "band" if bands else "bar at its end"
    how = f"line: mean of up to {seeds} seeds, {shape}: lowest to highest seed" if seeds > 1 else "one seed per arm"
    _headings(figure, title, how)
    if len(order) < 2:
        return figure
    lines = []
    for index, (arm, label) in enumerate(zip(order[:MOST_COLOURS], labels(order[:MOST_COLOURS]), strict=True)):
        is_failed = arm in failed
        text = f"{label} (failed)" if is_failed else label
        lines.append(
            Line2D([], [], color=COLOURS[index], linewidth=2, linestyle="--" if is_failed else "-", label=text)
        )
    if len(order) > MOST_COLOURS:
        lines.append(Line2D([], [], color=GREY, linewidth=2, label=f"{len(order) - MOST_COLOURS} other arms"))
    columns = max(1, min(5, 110 // (max(len(str(line.get_label())) for line in lines) + 8)))
    figure.legend(handles=lines, loc="outside lower left", ncols=columns, frameon=False, fontsize=8.5)
    return figure


def _headings(figure: Figure, title: str, how: str) -> None:
    """The title, and below it how to read the figure; at distances in points, whatever the figure's height."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    point, width = 1 / (72 * figure.get_figheight()), figure.get_figwidth()
    lines = wrap(how, int(LETTERS_PER_INCH * width))
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0, 0, 1, 1 - (30 + LINE_POINTS * len(lines)) * point))
    name = _plain_text(shorten_label(title, min(70, int(BOLD_PER_INCH * width))))
    figure.text(0.01, 1 - 7 * point, name, ha="left", va="top", fontsize=11, fontweight="bold")
    figure.text(0.01, 1 - 25 * point, "\n".join(lines), ha="left", va="top", fontsize=8.5, color="#666666")


def forest(verdict: Verdict, *, title: str) -> Figure:
    """A row per scored arm: its mean with 95 % interval and its seeds; beside it its difference to the baseline, or to
    the untrained model where there is none, and the verdict in a column on the right."""
    from matplotlib.figure import Figure

    plan = plan_forest(verdict)
    whom = plan.whom
    rows = plan.rows[::-1]  # matplotlib counts from the lowest row up
    panels = 2 if whom else 1
    figure = Figure(figsize=(9.6 if whom else 6.4, 1.5 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots(1, panels, sharey=True, squeeze=False, width_ratios=[1.15, 1][:panels])[0]
    for row, (arm, found) in enumerate(rows):
        colour = VERDICTS[found.verdict] if found else COLOURS[0]
        colour = "#222222" if arm.arm == verdict.baseline_arm else colour
        seeds = list(arm.seed_means.values())
        if len(seeds) > 1:  # equals in a pile
            heights = [row - 0.2 - 0.07 * seeds[:place].count(seed) for place, seed in enumerate(seeds)]
            axes[0].plot(seeds, heights, "o", color=colour, markersize=3, alpha=0.55, markeredgewidth=0)
        _draw_interval(axes[0], row, arm.mean or 0.0, arm.low, arm.high, colour)
        if whom:
            if found is not None and found.difference is not None:
                _draw_interval(axes[1], row, found.difference, found.low, found.high, colour)
            place = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
            axes[1].annotate(comparison_word(found), (1.03, row), color=colour, fontsize=8.5, **place)
    axes[0].set_yticks(range(len(rows)), labels([arm.arm for arm, _ in rows]))
    axes[0].set_ylim(-0.6, len(rows) - 0.4)
    for one in axes:
        one.tick_params(axis="y", length=0)
    better = "higher" if verdict.mode == "max" else "lower"
    axes[0].set_title(
        _plain_text(f"{in_unit(verdict.metric, verdict.unit)}, {better} is better"), loc="left", fontsize=10
    )
    if whom:
        axes[1].axvline(0, color="#444444", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        axes[1].set_title(_plain_text(difference_heading(whom, verdict, 48)), loc="left", fontsize=10)
        axes[1].xaxis.set_major_formatter(lambda tick, _: difference_label(tick, verdict))
    _headings(figure, title, "; ".join(plan.notes))
    return figure


def _draw_interval(axes: Axes, row: int, middle: float, low: float | None, high: float | None, colour: str) -> None:
    if low is not None and high is not None:
        axes.plot([low, high], [row, row], color=colour, linewidth=2, solid_capstyle="butt")
    axes.plot([middle], [row], "o", color=colour, markersize=6)


def labels(arms: Sequence[str]) -> list[str]:
    """Names that fit, as matplotlib takes them."""
    return [_plain_text(name) for name in short_labels(arms)]


def _plain_text(text: str) -> str:
    return text.replace("$", r"\$")  # a dollar sign would begin a formula


def _save(figure: Figure, place: Place, what: str) -> str:
    """Both files, whole; the name of the PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # what goes where is settled, and need not be found again for each file
    # A date, or matplotlib's version, would make files of the same numbers differ.
    for kind, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
        picture = io.BytesIO()
        figure.savefig(picture, format=kind, dpi=150, metadata=metadata)
        with whole_file(place.folder / f"{place.file_name}.{what}.{kind}") as handle:
            handle.write(picture.getvalue())
    return f"{place.file_name}.{what}.png"
