"""Figures of an experiment: learning curves with a band over seeds, and the arms with their intervals.

In: the runs of each arm, the verdict, the journal. Out: `<name>.curves.png|svg` and `<name>.arms.png|svg`. matplotlib
(extra `plot`) is loaded only here; without it, or where there is nothing to draw, the page says so. The same numbers
give the same files, byte for byte.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from evsys_sdk import atomic
from evsys_sdk.errors import FOREIGN, Cancelled
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import RunResult
from evsys_sdk.record.callbacks import eval_metrics
from evsys_sdk.record.run_steps import Curve, step_curves

HOW_TO_GET = (
    "No figures: they need matplotlib. `pip install 'evsys-sdk[plot]'`, then the same command again draws them."
)
STEP_METRICS = ("loss", "reward")
"""What of a step is drawn, where it is there."""
MOST_PANELS = 6
MOST_COLOURS = 8
"""Arms beyond these are drawn in grey."""
MOST_ROWS = 40
LONGEST_LABEL = 40
COLOURS = ("#3264a8", "#d1661f", "#3a8a4d", "#a83f6f", "#6b5bb0", "#8a6d3b", "#2f97a6", "#555555")
GREY = "#b8b8b8"
VERDICTS = {"better": "#2e7d4f", "worse": "#b03a2e", "equivalent": "#3264a8", "undecided": "#8a8a8a"}
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "svg.hashsalt": "evsys",
    "svg.fonttype": "none",
}

SeedCurves = dict[str, dict[str, list[Curve]]]
"""Panel -> arm -> a curve per seed."""


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


def draw(arms: Mapping[str, Sequence[RunResult]], verdict: Mapping[str, Any] | None, place: Place) -> Drawn:
    """Draw what there is to draw; a figure that fails is a warning and a line, never an error."""
    if find_spec("matplotlib") is None:
        return Drawn(note=HOW_TO_GET)
    try:
        return _draw(arms, verdict, place)
    except Cancelled:
        raise
    except FOREIGN as exc:
        get_logger(__name__).warning("figures could not be drawn: %s: %s", type(exc).__name__, exc)
        return Drawn(note=f"No figures: drawing failed ({type(exc).__name__}: {exc}).")


def _draw(arms: Mapping[str, Sequence[RunResult]], verdict: Mapping[str, Any] | None, place: Place) -> Drawn:
    import matplotlib

    files: dict[str, str] = {}
    panels = curves_of(arms, place.journal)
    ranked = [arm for arm in (verdict or {}).get("arms", []) if arm["mean"] is not None]
    with matplotlib.rc_context({**STYLE, "text.usetex": False}):
        if panels:
            figure = learning_curves(panels, order=_by_interest(list(arms), verdict), title=place.title)
            files["Learning curves"] = _save(figure, place, "curves")
        if verdict is not None and len(ranked) > 1:
            files["Arms with their intervals"] = _save(forest(verdict, ranked, title=place.title), place, "arms")
    return Drawn(files=files, note="" if files else "No figures: fewer than two steps, and fewer than two scored arms.")


def curves_of(arms: Mapping[str, Sequence[RunResult]], journal: Path) -> SeedCurves:
    """The curves of more than one point: of step metrics from the journal, of in-loop scores from the results."""
    steps = step_curves(journal, STEP_METRICS) if journal.exists() else {}
    panels: SeedCurves = {}
    for arm, runs in arms.items():
        for run in [run for run in runs if run.status == "completed"] or runs:
            for name, curve in {**steps.get(run.run_id, {}), **_score_curves(run)}.items():
                if len(curve) > 1:
                    panels.setdefault(name, {}).setdefault(arm, []).append(curve)
    wanted = sorted(panels, key=lambda name: (STEP_METRICS.index(name) if name in STEP_METRICS else 99, name))
    return {name: panels[name] for name in wanted[:MOST_PANELS]}


def _score_curves(run: RunResult) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for result in run.extras.get("evals", []):
        if result.step is not None:
            for name, value in eval_metrics(result).items():
                curves.setdefault(name, {})[result.step] = value
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


def _by_interest(arms: list[str], verdict: Mapping[str, Any] | None) -> list[str]:
    """The arms in their own order if all get a colour; else baseline and best means first."""
    if len(arms) <= MOST_COLOURS or verdict is None:
        return arms
    sign = -1 if verdict["mode"] == "max" else 1
    means = {arm["arm"]: sign * arm["mean"] for arm in verdict["arms"] if arm["mean"] is not None}
    return sorted(arms, key=lambda arm: (arm != verdict["baseline_arm"], means.get(arm, float("inf"))))


def band(curves: Sequence[Curve]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps, mean, lowest and highest over the seeds that have each step. A step that only some of the seeds have is
    left out: a mean over other seeds would look like a jump."""
    steps = [step for step in curves[0] if all(step in curve for curve in curves)] or list(curves[0])
    shared = [curve for curve in curves if all(step in curve for step in steps)]
    columns = [[curve[step] for curve in shared] for step in steps]
    return steps, [fmean(c) for c in columns], [min(c) for c in columns], [max(c) for c in columns]


def learning_curves(panels: SeedCurves, *, order: Sequence[str], title: str) -> Any:
    """A panel per number: a line per arm, its band from the lowest to the highest seed."""
    from matplotlib.figure import Figure

    columns = min(len(panels), 2 if len(panels) in (2, 4) else 3)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns + 0.4, 3.1 * rows + 0.9), layout="constrained")
    for number, (name, arms) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, number + 1)
        for index in reversed(range(len(order))):  # the first arms on top
            if order[index] in arms:
                _draw_arm(axes, arms[order[index]], index, single=len(order) == 1)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xlabel("step")
        axes.margins(x=0.02)
    seeds = max(len(curves) for arms in panels.values() for curves in arms.values())
    how = f"line: mean of up to {seeds} seeds, band: lowest to highest seed" if seeds > 1 else "one seed per arm"
    _headings(figure, title, how)
    _legend(figure, order)
    return figure


def _headings(figure: Any, title: str, how: str) -> None:
    """The title, and below it how to read the figure; at distances in points, whatever the figure's height."""
    point = 1 / (72 * figure.get_figheight())
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - 42 * point))
    name = _short(title, 70)
    figure.text(0.01, 1 - 7 * point, name, ha="left", va="top", fontsize=11, fontweight="bold")
    figure.text(0.01, 1 - 25 * point, how, ha="left", va="top", fontsize=8.5, color="#666666")


def _draw_arm(axes: Any, curves: Sequence[Curve], index: int, *, single: bool) -> None:
    steps, mean, low, high = band(curves)
    coloured = index < MOST_COLOURS
    colour = COLOURS[index] if coloured else GREY
    few = len(steps) <= 12
    axes.plot(steps, mean, color=colour, linewidth=1.6 if coloured else 0.8, marker="o" if few else None, markersize=3)
    if len(curves) > 1 and coloured:
        axes.fill_between(steps, low, high, color=colour, alpha=0.18 if not single else 0.25, linewidth=0)


def _legend(figure: Any, order: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    if len(order) < 2:
        return
    names = labels(order[:MOST_COLOURS])
    lines = [Line2D([], [], color=COLOURS[i], linewidth=2, label=name) for i, name in enumerate(names)]
    if len(order) > MOST_COLOURS:
        lines.append(Line2D([], [], color=GREY, linewidth=2, label=f"{len(order) - MOST_COLOURS} other arms"))
    columns = max(1, min(5, 110 // (max(len(str(line.get_label())) for line in lines) + 8)))
    figure.legend(handles=lines, loc="outside lower left", ncols=columns, frameon=False, fontsize=8.5)


def forest(verdict: Mapping[str, Any], ranked: Sequence[Mapping[str, Any]], *, title: str) -> Any:
    """A row per arm: on the left its mean with 95 % interval and its seeds, on the right its difference to the
    baseline."""
    from matplotlib.figure import Figure

    sign = 1 if verdict["mode"] == "max" else -1
    arms = sorted(ranked, key=lambda arm: sign * arm["mean"])[-MOST_ROWS:]  # the best on top
    figure = Figure(figsize=(9.6, 1.5 + 0.42 * len(arms)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.15, 1])
    right.axvline(0, color="#444444", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    for row, arm in enumerate(arms):
        _mean_row(left, row, arm, verdict)
        _difference_row(right, row, arm, verdict)
    left.set_yticks(range(len(arms)), labels([arm["arm"] for arm in arms]))
    left.set_ylim(-0.6, len(arms) - 0.4)
    left.tick_params(axis="y", length=0)
    right.tick_params(axis="y", length=0)
    _pad(left)
    _pad(right, share=0.28)
    better = "higher is better" if sign > 0 else "lower is better"
    left.set_title(f"{verdict['metric']}, {better}", loc="left", fontsize=10)
    right.set_title(f"difference to {_short(verdict['baseline_arm'], 30)}", loc="left", fontsize=10)
    left_out = f"; {len(ranked) - len(arms)} lower arms left out" if len(ranked) > len(arms) else ""
    how = f"bars: 95 % intervals; small dots: seeds; colour: verdict after Holm's correction{left_out}"
    _headings(figure, title, how)
    return figure


def _mean_row(axes: Any, row: int, arm: Mapping[str, Any], verdict: Mapping[str, Any]) -> None:
    colour = _verdict_colour(arm, verdict)
    seeds = list(arm["seed_means"].values())
    if len(seeds) > 1:
        axes.plot(seeds, [row - 0.22] * len(seeds), "o", color=colour, markersize=3, alpha=0.55, markeredgewidth=0)
    _bar(axes, row, arm["mean"], arm["low"], arm["high"], colour)


def _difference_row(axes: Any, row: int, arm: Mapping[str, Any], verdict: Mapping[str, Any]) -> None:
    found = arm["vs_baseline"]
    if arm["arm"] == verdict["baseline_arm"]:
        axes.annotate("the baseline", (0, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8.5)
        return
    if not found or found["difference"] is None:
        axes.annotate("not compared", (0, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8.5)
        return
    colour = _verdict_colour(arm, verdict)
    _bar(axes, row, found["difference"], found["low"], found["high"], colour)
    end = found["difference"] if found["high"] is None else found["high"]
    axes.annotate(
        found["verdict"], (end, row), xytext=(6, 0), textcoords="offset points", va="center", color=colour, fontsize=8.5
    )


def _bar(axes: Any, row: int, middle: float, low: float | None, high: float | None, colour: str) -> None:
    if low is not None and high is not None:
        axes.plot([low, high], [row, row], color=colour, linewidth=2, solid_capstyle="butt")
    axes.plot([middle], [row], "o", color=colour, markersize=6)


def _verdict_colour(arm: Mapping[str, Any], verdict: Mapping[str, Any]) -> str:
    is_baseline = arm["arm"] == verdict["baseline_arm"]
    return "#222222" if is_baseline else VERDICTS.get(arm["verdict"] or "", VERDICTS["undecided"])


def _pad(axes: Any, share: float = 0.06) -> None:
    """Room beside the bars, on the right for a word."""
    low, high = axes.get_xlim()
    axes.set_xlim(low - 0.04 * (high - low), high + share * (high - low))


def labels(arms: Sequence[str]) -> list[str]:
    """Names that fit: of `algorithm.params.rank=8` the last part; where two would look the same, with their number."""
    short = [_short(_without_places(arm), LONGEST_LABEL) for arm in arms]
    return [f"{name} ({i + 1})" if short.count(name) > 1 else name for i, name in enumerate(short)]


def _without_places(arm: str) -> str:
    return re.sub(r"[\w.]+\.(\w+=)", r"\1", arm) if len(arm) > LONGEST_LABEL else arm


def _short(text: str, limit: int) -> str:
    # A dollar sign would begin a formula.
    return (text if len(text) <= limit else f"{text[: limit - 15]}...{text[-12:]}").replace("$", r"\$")


def _save(figure: Any, place: Place, what: str) -> str:
    """Both files, whole; the name of the PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # what goes where is settled, and need not be found again for each file
    for kind, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
        picture = io.BytesIO()
        figure.savefig(picture, format=kind, dpi=150, metadata=metadata)
        with atomic.whole_file(place.folder / f"{place.file_name}.{what}.{kind}") as handle:
            handle.write(picture.getvalue())
    return f"{place.file_name}.{what}.png"
