from __future__ import annotations

import pytest

from evsys_sdk.config.models import SuccessMetric
from evsys_sdk.protocols import EvalResult, RunResult, Score
from evsys_sdk.record.conclusion import conclude, matching, score_lines, stage_matrix


def _run(status: str = "completed", error: str | None = None, **metrics: float) -> RunResult:
    named = {key.replace("__", "/").replace("at", "@"): value for key, value in metrics.items()}
    return RunResult(run_id="x", status=status, metrics=named, error=error)  # type: ignore[arg-type]


def _conclude(arms, metric="val.pass@1", mode="max"):
    return conclude(arms, hypothesis="h", success=SuccessMetric(name=metric, mode=mode))


def test_seeds_are_ranked_by_the_arms_mean_not_by_the_luckiest():
    lucky = [_run(val__t__passat1=0.9), _run(val__t__passat1=0.1)]
    steady = [_run(val__t__passat1=0.6), _run(val__t__passat1=0.6)]
    found = _conclude({"lucky": lucky, "steady": steady})
    assert found.best_arm == "steady"
    assert "has not been tested" in found.text and "0.900, 0.100" in found.text


def test_lower_is_better_where_it_is_said():
    arms = {"a": [_run(final_loss=2.0)], "b": [_run(final_loss=1.0)]}
    assert _conclude(arms, "final_loss", "min").best_arm == "b"
    assert _conclude(arms, "final_loss").best_arm == "a"


def test_an_unscored_or_failed_arm_is_never_ranked():
    arms = {
        "good": [_run(val__t__passat1=0.2)],
        "crashed": [_run("failed", "boom", val__t__passat1=0.9)],
        "unscored": [_run()],
    }
    found = _conclude(arms)
    assert found.best_arm == "good"
    why = {arm.arm: arm.why_unranked for arm in found.arms}
    assert why == {"good": None, "crashed": "no run completed", "unscored": "no score for val.pass@1"}
    assert "(boom)" in found.text


def test_a_test_score_never_picks_a_winner():
    found = _conclude({"a": [_run(test__t__passat1=0.9)], "b": [_run(test__t__passat1=0.1)]}, "pass@1")
    assert found.best_arm is None and "test scores do not select" in found.text


def test_a_tie_is_no_win():
    found = _conclude({"a": [_run(val__t__passat1=0.5)], "b": [_run(val__t__passat1=0.5)]})
    assert found.best_arm is None and "equal" in found.text


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("pass@1", ["val/t/pass@1"]),
        ("val.pass@1", ["val/t/pass@1"]),
        ("test.pass@1", ["test/t/pass@1"]),
        ("val/t/pass@1", ["val/t/pass@1"]),
        ("final_loss", ["final_loss"]),
        ("nothing", []),
    ],
)
def test_a_success_metric_is_found_by_its_names_and_validation_comes_before_test(name, keys):
    assert matching(_run(val__t__passat1=1.0, test__t__passat1=1.0, final_loss=0.1), name) == keys


def test_score_lines_show_the_last_score_with_n_interval_and_errors():
    def score(value: float) -> list[Score]:
        return [Score(metric="pass@1", value=value, low=0.1, high=0.9, n_tasks=8, n_rollouts=8, n_errors=2)]

    evals = [
        EvalResult(name="t", split="val", scores=score(0.2), step=5),
        EvalResult(name="t", split="val", scores=score(0.5)),
        EvalResult(name="u", split="test", scores=[], error="no server"),
        EvalResult(name="v", split="test", scores=[Score(metric="pass@1", value=None, error="all errored")]),
    ]
    assert score_lines(evals) == [
        "val/t pass@1 = 0.500 [0.100, 0.900], n=8, 2 errors",
        "test/u: not scored (no server)",
        "test/v pass@1: not valid (all errored)",
    ]


def _eval(value, *, name="a", stage=None, step=None):
    score = Score(metric="pass@1", value=value, low=value - 0.1, high=value + 0.1, n_tasks=10)
    return EvalResult(name=name, split="val", scores=[score], stage=stage, step=step)


def test_the_untrained_model_stands_beside_the_trained_one():
    (line,) = score_lines([_eval(0.1, step=0), _eval(0.5, step=5), _eval(0.9)])
    assert line == "val/a pass@1 = 0.900 [0.800, 1.000], n=10 (untrained 0.100 [0.000, 0.200])"
    assert score_lines([_eval(0.1, step=0)]) == ["untrained: val/a pass@1 = 0.100 [0.000, 0.200], n=10"]


def test_a_chain_is_shown_stage_by_benchmark():
    evals = [
        _eval(0.1, step=0),
        _eval(0.5, stage="one", step=3),
        _eval(0.9, stage="one"),
        _eval(0.2, name="b", stage="one"),
        _eval(0.4, stage="two"),
        _eval(0.8, name="b", stage="two"),
    ]
    head, first, second = stage_matrix(evals)
    assert head.split() == ["after", "stage", "untrained", "one", "two"]
    assert first.split("  ")[0] == "val/a pass@1"
    assert [cell.split(" ")[0] for cell in first.split("  ")[1:] if cell] == ["0.100", "0.900", "0.400"]
    assert "-" in second.split()[2] and "0.800" in second
    assert stage_matrix(evals[:4]) == []
