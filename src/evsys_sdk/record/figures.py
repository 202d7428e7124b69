"""Figures of an experiment: learning curves with the range of their seeds, and the arms with their intervals.

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
from textwrap import wrap
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
MOST_BANDS = 4
"""With more arms, bands over seeds would cover each other: a bar at the end of each line stands for them."""
MOST_ROWS = 40
MOST_NAMED = 4
"""Arms without a score that are named in the heading."""
LONGEST_LABEL = 40
LONGEST_HEADING = 36
"""Of the right panel, which has little more than a third of the width."""
LETTERS_PER_INCH, BOLD_PER_INCH, LINE_POINTS = 15.5, 10.5, 12
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
            failed = [arm for arm, runs in arms.items() if all(run.status == "failed" for run in runs)]
            order = _by_interest(list(arms), verdict)
            figure = learning_curves(panels, order=order, title=place.title, failed=failed)
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
    """The arms in their own order if all get a colour, or none may be picked; else baseline and best means first."""
    if len(arms) <= MOST_COLOURS or verdict is None or verdict["winner"] is None:
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


def learning_curves(panels: SeedCurves, *, order: Sequence[str], title: str, failed: Sequence[str] = ()) -> Any:
    """A panel per number: a line per arm, dashed if it failed, with the range from its lowest to its highest seed: as a
    band, or among many arms as a bar at its end."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    columns = min(len(panels), 2 if len(panels) in (2, 4) else 3)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns + 0.4, 3.1 * rows + 0.9), layout="constrained")
    for number, (name, arms) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, number + 1)
        for index in reversed(range(len(order))):  # the first arms on top
            if order[index] in arms:
                _draw_arm(axes, arms[order[index]], index, failed=order[index] in failed)
        _draw_ranges(axes, [arms.get(arm, []) for arm in order[:MOST_COLOURS]], bands=len(order) <= MOST_BANDS)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.margins(x=0.02)
    seeds = max(len(curves) for arms in panels.values() for curves in arms.values())
    shape = "band" if len(order) <= MOST_BANDS else "bar at its end"
    how = f"line: mean of up to {seeds} seeds, {shape}: lowest to highest seed" if seeds > 1 else "one seed per arm"
    _headings(figure, title, how)
    _legend(figure, order, failed)
    return figure


def _headings(figure: Any, title: str, how: str) -> None:
    """The title, and below it how to read the figure; at distances in points, whatever the figure's height."""
    point, width = 1 / (72 * figure.get_figheight()), figure.get_figwidth()
    lines = wrap(how, int(LETTERS_PER_INCH * width))
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - (30 + LINE_POINTS * len(lines)) * point))
    name = _short(title, min(70, int(BOLD_PER_INCH * width)))
    figure.text(0.01, 1 - 7 * point, name, ha="left", va="top", fontsize=11, fontweight="bold")
    figure.text(0.01, 1 - 25 * point, "\n".join(lines), ha="left", va="top", fontsize=8.5, color="#666666")


def _draw_arm(axes: Any, curves: Sequence[Curve], index: int, *, failed: bool) -> None:
    steps, mean, _, _ = band(curves)
    coloured = index < MOST_COLOURS
    colour = COLOURS[index] if coloured else GREY
    width, dots = 1.6 if coloured else 0.8, "o" if len(steps) <= 12 and not failed else None
    axes.plot(steps, mean, color=colour, linewidth=width, marker=dots, markersize=3, linestyle="--" if failed else "-")
    if failed:
        axes.plot(steps[-1:], mean[-1:], "x", color=colour, markersize=6)


def _draw_ranges(axes: Any, arms: Sequence[Sequence[Curve]], *, bands: bool) -> None:
    """What lies between the lowest and the highest seed of each coloured arm; bars stand side by side."""
    last = max((step for curves in arms for curve in curves for step in curve), default=0)
    gap = 0.012 * (last - axes.dataLim.x0)
    for index, curves in enumerate(arms):
        if len(curves) > 1:
            steps, _, low, high = band(curves)
            if bands:
                axes.fill_between(steps, low, high, color=COLOURS[index], alpha=0.15, linewidth=0)
            else:
                axes.vlines(steps[-1] + gap * (index + 1), low[-1], high[-1], color=COLOURS[index], linewidth=1.6)


def _legend(figure: Any, order: Sequence[str], failed: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    if len(order) < 2:
        return
    names = zip(order[:MOST_COLOURS], labels(order[:MOST_COLOURS]), strict=True)
    lines = [
        Line2D([], [], color=COLOURS[i], linewidth=2, linestyle="--", label=f"{name} (failed)")
        if arm in failed
        else Line2D([], [], color=COLOURS[i], linewidth=2, label=name)
        for i, (arm, name) in enumerate(names)
    ]
    if len(order) > MOST_COLOURS:
        lines.append(Line2D([], [], color=GREY, linewidth=2, label=f"{len(order) - MOST_COLOURS} other arms"))
    columns = max(1, min(5, 110 // (max(len(str(line.get_label())) for line in lines) + 8)))
    figure.legend(handles=lines, loc="outside lower left", ncols=columns, frameon=False, fontsize=8.5)


def forest(verdict: Mapping[str, Any], ranked: Sequence[Mapping[str, Any]], *, title: str) -> Any:
    """A row per arm: its mean with 95 % interval and its seeds; beside it its difference to the baseline, or to the
    untrained model where there is none."""
    from matplotlib.figure import Figure

    sign = 1 if verdict["mode"] == "max" else -1
    arms = _rows(verdict, ranked)
    whom, key = _compared_with(verdict, ranked)
    panels = 2 if whom else 1
    figure = Figure(figsize=(9.6 if whom else 6.4, 1.5 + 0.42 * len(arms)), layout="constrained")
    axes = figure.subplots(1, panels, sharey=True, squeeze=False, width_ratios=[1.15, 1][:panels])[0]
    for row, arm in enumerate(arms):
        _mean_row(axes[0], row, arm, _colour(arm, key, verdict))
        if whom:
            _difference_row(axes[1], row, arm[key], _colour(arm, key, verdict))
    axes[0].set_yticks(range(len(arms)), labels([arm["arm"] for arm in arms]))
    axes[0].set_ylim(-0.6, len(arms) - 0.4)
    for one in axes:
        one.tick_params(axis="y", length=0)
    better = "higher is better" if sign > 0 else "lower is better"
    axes[0].set_title(f"{verdict['metric']}, {better}", loc="left", fontsize=10)
    if whom:
        axes[1].axvline(0, color="#444444", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        heading = f"difference to {labels([whom])[0]}"
        fits = len(heading) <= LONGEST_HEADING  # else its row has the name
        axes[1].set_title(heading if fits else "difference to the baseline", loc="left", fontsize=10)
    _headings(figure, title, _how_to_read(verdict, len(ranked) - len(arms), compared=bool(whom)))
    return figure


def _rows(verdict: Mapping[str, Any], ranked: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The arms from the lowest row up: the best on top, or the first where none may be picked; the baseline stays."""
    arms = list(ranked)
    if verdict["winner"] is not None:
        arms.sort(key=lambda arm: (1 if verdict["mode"] == "min" else -1) * arm["mean"])
    kept = arms[:MOST_ROWS]
    lost = [arm for arm in arms[MOST_ROWS:] if arm["arm"] == verdict["baseline_arm"]]
    return [*lost, *reversed(kept[: MOST_ROWS - len(lost)])]


def _compared_with(verdict: Mapping[str, Any], ranked: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """With whom the right panel compares, and where an arm's comparison with it is found."""
    for whom, key in ((verdict["baseline_arm"], "vs_baseline"), ("the untrained model", "vs_untrained")):
        if whom and any(arm[key] for arm in ranked):
            return whom, key
    return "", "vs_baseline"


def _how_to_read(verdict: Mapping[str, Any], left_out: int, *, compared: bool) -> str:
    parts = ["bars: 95 % intervals", "small dots: seeds"]
    parts += ["colour: verdict after Holm's correction"] if compared else []
    parts += [] if verdict["winner"] else ["arms in their own order, as nothing is picked by these scores"]
    parts += [f"{left_out} {'lower' if verdict['winner'] else 'more'} arms left out"] if left_out else []
    unranked = labels([arm["arm"] for arm in verdict["arms"] if arm["mean"] is None])
    more = f" and {len(unranked) - MOST_NAMED} more" if len(unranked) > MOST_NAMED else ""
    parts += [f"not ranked: {', '.join(unranked[:MOST_NAMED])}{more}"] if unranked else []
    return "; ".join(parts)


def _mean_row(axes: Any, row: int, arm: Mapping[str, Any], colour: str) -> None:
    seeds = list(arm["seed_means"].values())
    if len(seeds) > 1:
        rows = [row - 0.2 - 0.07 * seeds[:place].count(seed) for place, seed in enumerate(seeds)]  # equals in a pile
        axes.plot(seeds, rows, "o", color=colour, markersize=3, alpha=0.55, markeredgewidth=0)
    _bar(axes, row, arm["mean"], arm["low"], arm["high"], colour)


def _difference_row(axes: Any, row: int, found: Mapping[str, Any] | None, colour: str) -> None:
    """The bar, and the verdict in a column on the right."""
    word = "the baseline" if found is None else found["verdict"]
    if found is not None and found["difference"] is None:
        word = "not compared"
    elif found is not None:
        _bar(axes, row, found["difference"], found["low"], found["high"], colour)
    place = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
    axes.annotate(word, (1.03, row), color=colour, fontsize=8.5, **place)


def _bar(axes: Any, row: int, middle: float, low: float | None, high: float | None, colour: str) -> None:
    if low is not None and high is not None:
        axes.plot([low, high], [row, row], color=colour, linewidth=2, solid_capstyle="butt")
    axes.plot([middle], [row], "o", color=colour, markersize=6)


def _colour(arm: Mapping[str, Any], key: str, verdict: Mapping[str, Any]) -> str:
    if arm["arm"] == verdict["baseline_arm"]:
        return "#222222"
    found = arm[key]
    return VERDICTS[found["verdict"]] if found else COLOURS[0]


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
