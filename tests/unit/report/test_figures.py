from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from evsys_sdk.protocols import EvalResult, RunResult, Score
from evsys_sdk.record.journal import Journal
from evsys_sdk.report.figures import (
    MOST_BANDS,
    MOST_COLOURS,
    Place,
    band,
    curves_of,
    draw,
    forest,
    labels,
    learning_curves,
    score_units,
)
from evsys_sdk.report.svg import curve_svg, forest_svg
from evsys_sdk.stats.arm_scores import ArmScores
from evsys_sdk.stats.judge import judge_arms
from evsys_sdk.stats.verdict import Comparison, Verdict

JOURNAL = "exp.journal.sqlite"


def place(folder: Path) -> Place:
    return Place(folder=folder, file_name="exp", journal=folder / JOURNAL, title="costs $5 or $6")


def world(folder: Path, n_arms: int = 2) -> dict[str, list[RunResult]]:
    """Arms of two seeds with five steps each, scored at steps 0 and 5."""
    arms = {
        f"arm{a}": [RunResult(run_id=f"exp/arm{a}__s{s}", status="completed", evals=scores(a)) for s in (1, 2)]
        for a in range(n_arms)
    }
    folder.mkdir(exist_ok=True)
    with closing(Journal(folder / JOURNAL)) as journal:
        for number, run in enumerate(run for runs in arms.values() for run in runs):
            line = journal.begin(run.run_id, "f")
            for step in range(1, 6):
                line.add("step", {"metrics": {"loss": number + 1 / step, "lr": 0.1}}, at=step)
    return arms


def scores(arm: int) -> list[EvalResult]:
    def at(step: int | None, value: float) -> EvalResult:
        return EvalResult(name="tools", split="val", step=step, scores=[Score(metric="pass@1", value=value)])

    return [at(5, 0.5 + arm / 10), at(0, 0.0), at(None, 0.9)]


def verdict(n_arms: int = 2) -> Verdict:
    arms = [
        ArmScores(
            arm=f"arm{a}", seeds={s: {f"t{t}": float(t < 5 + 9 * a) for t in range(40)} for s in (1, 2)}, failed={}
        )
        for a in range(n_arms)
    ]
    return judge_arms(arms, metric="val.pass@1", mode="max", baseline_arm=None, untrained=None, also=[])


def test_curves_are_the_loss_of_every_seed_and_the_scores_of_the_loop(tmp_path: Path) -> None:
    panels = curves_of(world(tmp_path), tmp_path / JOURNAL)
    assert list(panels) == ["loss", "val/tools/pass@1"]
    assert panels["loss"]["arm0"][1] == {1: 2.0, 2: 1.5, 3: 1 + 1 / 3, 4: 1.25, 5: 1.2}
    assert panels["val/tools/pass@1"]["arm1"] == [{0: 0.0, 5: 0.6}] * 2  # in order, and without the final score


def test_axes_say_what_their_numbers_are_counted_in(tmp_path: Path) -> None:
    arms = world(tmp_path)
    for run in (run for runs in arms.values() for run in runs):
        for one in run.evals:
            one.scores[:] = [replace(score, metric="latency", unit="s") for score in one.scores]
    units = score_units(arms)
    panels = curves_of(arms, tmp_path / JOURNAL)
    figure = learning_curves(panels, order=list(arms), title="t", units=units)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["loss", "val/tools/latency, in s"]
    assert ">val/tools/latency, in s<" in curve_svg(
        "val/tools/latency", panels["val/tools/latency"], order=["arm0"], unit="s"
    )
    shares, seconds = verdict(), replace(verdict(), metric="val.latency", mode="min", share=False, unit="s")
    for found, titles, tick in (
        (shares, ["val.pass@1, higher is better", "difference to arm0, in points"], "+20.0"),
        (seconds, ["val.latency, in s, lower is better", "difference to arm0, in s"], "+0.200"),
    ):
        drawn = forest(found, title="t")
        assert [axes.get_title(loc="left") for axes in drawn.axes] == titles
        assert drawn.axes[1].xaxis.get_major_formatter()(0.2, 0) == tick
        assert all(f">{title}<" in forest_svg(found) for title in titles)


def test_a_seed_that_failed_does_not_cut_its_arm_short(tmp_path: Path) -> None:
    arms = world(tmp_path)
    arms["arm0"][0].status = "failed"
    assert len(curves_of(arms, tmp_path / JOURNAL)["loss"]["arm0"]) == 1


def test_a_band_is_mean_lowest_and_highest_where_all_seeds_are() -> None:
    assert band([{1: 1.0, 2: 2.0, 3: 9.0}, {1: 3.0, 2: 2.0}]) == ([1, 2], [2.0, 2.0], [1.0, 2.0], [3.0, 2.0])


def test_long_names_are_told_apart() -> None:
    names = [f"algorithm.params.learning_rate={n}e-5,algorithm.params.rank=8" for n in (1, 2)]
    assert labels([*names, "base"]) == ["learning_rate=1e-5,rank=8", "learning_rate=2e-5,rank=8", "base"]
    assert labels(["x" * 50 + "1" + "x" * 20, "x" * 50 + "2" + "x" * 20])[0].endswith(" (1)")


def test_both_figures_are_drawn_as_png_and_svg(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = draw(world(tmp_path), verdict(), place(tmp_path))
    assert drawn.files == {"Learning curves": "exp.curves.png", "Arms with their intervals": "exp.arms.png"}
    for name in ("curves", "arms"):
        assert (tmp_path / f"exp.{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "costs $5 or $6" in (tmp_path / f"exp.{name}.svg").read_text()


def test_the_same_numbers_give_the_same_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for folder in ("a", "b"):
        draw(world(tmp_path / folder), verdict(), place(tmp_path / folder))
    for name in ("exp.curves.png", "exp.curves.svg", "exp.arms.png", "exp.arms.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(("n_arms", "shape"), [(MOST_BANDS, "PolyCollection"), (MOST_BANDS + 1, "LineCollection")])
def test_few_arms_have_bands_and_many_a_bar_at_the_end_of_their_lines(tmp_path: Path, n_arms: int, shape: str) -> None:
    pytest.importorskip("matplotlib")
    arms = world(tmp_path, n_arms)
    figure = learning_curves(curves_of(arms, tmp_path / JOURNAL), order=list(arms), title="t")
    drawn = figure.axes[0].collections
    assert len(drawn) == n_arms and all(type(one).__name__.endswith(shape) for one in drawn)
    if n_arms > MOST_BANDS:
        places = [one.get_segments()[0] for one in drawn]
        assert len({place[0][0] for place in places}) == n_arms and all(place[0][0] > 5 for place in places)
        assert sorted(places[0][:, 1]) == [1 / 5, 1 + 1 / 5], "from the lowest to the highest seed at the last step"


def test_a_line_per_arm_with_the_rest_in_grey(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arms = world(tmp_path, MOST_COLOURS + 2)
    figure = learning_curves(curves_of(arms, tmp_path / JOURNAL), order=list(arms), title="t")
    axes = figure.axes[0]
    assert (len(axes.lines), len(axes.collections)) == (MOST_COLOURS + 2, MOST_COLOURS)
    assert [text.get_text() for text in figure.legends[0].get_texts()][-1] == "2 other arms"


@pytest.mark.parametrize("last", [2, 5, 10, 20, 300])
def test_no_tick_stands_between_two_steps(last: int) -> None:
    pytest.importorskip("matplotlib")
    figure = learning_curves({"loss": {"a": [dict.fromkeys(range(1, last + 1), 1.0)]}}, order=["a"], title="t")
    assert all(float(tick).is_integer() for tick in figure.axes[0].get_xticks())


def test_names_of_any_length_stay_within_the_figure() -> None:
    pytest.importorskip("matplotlib")
    judged = verdict(4)
    names = {f"arm{a}": f"a_rather_long_base_name_for_a_run__learning_rate{a}" * 2 for a in range(4)}
    arms = [replace(arm, arm=names[arm.arm]) for arm in judged.arms]
    arms += [replace(arms[0], arm=names["arm0"] + str(n), mean=None) for n in range(9)]
    figure = forest(replace(judged, baseline_arm=names["arm0"], arms=arms), title="t" * 200)
    figure.draw_without_rendering()
    texts = [*figure.texts, *(text for axes in figure.axes for text in (axes.title, axes._left_title, *axes.texts))]
    edges = [text.get_window_extent().x1 for text in texts]
    assert max(edges) <= figure.bbox.x1
    assert figure.axes[1].get_title(loc="left") == "difference to the baseline, in points"


@pytest.mark.parametrize("unit", ["", "milliseconds of a GPU"])
def test_what_the_differences_are_to_is_never_cut(unit: str) -> None:
    judged = verdict(1)
    against = Comparison(arm="arm0", vs="untrained", verdict="better", difference=0.5)
    arms = [replace(arm, vs_baseline=None, vs_untrained=against) for arm in judged.arms]
    drawn = forest_svg(replace(judged, baseline_arm=None, arms=arms, share=not unit, unit=unit))
    [heading] = re.findall(r">(difference[^<]*)<", drawn)
    assert heading == ("difference" if unit else "difference to untrained, in points")


def test_scores_that_pick_nothing_leave_the_arms_in_their_own_order() -> None:
    pytest.importorskip("matplotlib")
    judged = verdict(3)
    rows = lambda found: [text.get_text() for text in forest(found, title="t").axes[0].get_yticklabels()]  # noqa: E731
    assert rows(judged) == ["arm0", "arm1", "arm2"], "the best, arm2, on top"
    assert rows(replace(judged, winner=None)) == ["arm2", "arm1", "arm0"], "the first on top"


def test_an_arm_that_failed_is_dashed_and_named_so(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arms = world(tmp_path)
    figure = learning_curves(curves_of(arms, tmp_path / JOURNAL), order=list(arms), title="t", failed=["arm1"])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["arm0", "arm1 (failed)"]
    assert "--" in {line.get_linestyle() for line in figure.axes[0].lines}


def test_arms_without_a_score_are_named_in_the_heading_and_seeds_that_agree_lie_in_a_pile() -> None:
    pytest.importorskip("matplotlib")
    judged = verdict()
    judged.arms.append(replace(judged.arms[0], arm="lost", mean=None))
    figure = forest(judged, title="t")
    assert any(text.get_text().endswith("not ranked: lost") for text in figure.texts)
    seeds = next(line for line in figure.axes[0].lines if line.get_markersize() == 3)
    assert len(set(seeds.get_ydata())) == 2 and len(set(seeds.get_xdata())) == 1


def test_without_a_baseline_arms_stand_against_the_untrained_model_or_alone() -> None:
    pytest.importorskip("matplotlib")
    values = {f"t{t}": float(t < 20) for t in range(40)}
    arms = [ArmScores(arm=arm, seeds={1: values}) for arm in "ab"]
    alone = judge_arms(arms, metric="m", searched=True)
    assert len(forest(alone, title="t").axes) == 1
    beside = judge_arms(arms, metric="m", searched=True, untrained=dict.fromkeys(values, 0.0))
    axes = forest(beside, title="t").axes
    assert axes[1].get_title(loc="left") == "difference to the untrained model, in points"


def test_one_arm_of_one_step_has_no_figures_and_says_why(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = draw({"a": [RunResult(run_id="exp/a", status="completed")]}, None, place(tmp_path))
    assert drawn.files == {} and "fewer than two steps" in drawn.note
