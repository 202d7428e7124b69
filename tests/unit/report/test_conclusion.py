from __future__ import annotations

import pytest

from evsys_sdk.config.metadata import SuccessMetric
from evsys_sdk.protocols import EvalResult, RunResult, Score
from evsys_sdk.report.conclusion import ModelScore, VerdictFindings, conclude, score_keys, score_lines, stage_matrix
from evsys_sdk.stats.arm_scores import ArmScores
from evsys_sdk.stats.judge import judge_arms


def _run(status: str = "completed", error: str | None = None, **metrics: float) -> RunResult:
    named = {key.replace("__", "/").replace("at", "@"): value for key, value in metrics.items()}
    return RunResult(run_id="x", status=status, metrics=named, error=error)  # type: ignore[arg-type]


def _conclude(arms, findings=None, metric="val.pass@1"):
    return conclude(
        arms,
        hypothesis="h",
        success=SuccessMetric(name=metric),
        findings=findings or VerdictFindings(why_not="not judged"),
    )


def test_the_conclusion_says_what_was_found_and_then_names_arms_that_were_not_judged():
    arms = {
        "good": [_run(val__t__passat1=0.2)],
        "crashed": [_run("failed", "boom", val__t__passat1=0.9)],
        "unscored": [_run()],
    }
    judged = judge_arms([ArmScores(arm="good", seeds={1: {"t": 0.2}})], metric="val.pass@1")
    found = _conclude(arms, VerdictFindings(best_arm="good", lines=["good it is"], verdict=judged))
    assert found.best_arm == "good"
    assert found.text.splitlines() == [
        "Hypothesis: h",
        "good it is",
        "crashed: failed, not ranked: no run completed (boom)",
        "unscored: completed, not ranked: no score for val.pass@1",
    ]
    why = {arm.arm: arm.why_unranked for arm in found.arms}
    assert why == {"good": None, "crashed": "no run completed", "unscored": "no score for val.pass@1"}


def test_an_arm_without_a_score_says_why_it_has_none():
    run = _run()
    run.evals = [EvalResult(name="t", split="val", scores=[], error="all 40 rollouts errored")]
    found = _conclude({"a": [run]})
    assert found.arms[0].why_unranked == "no score for val.pass@1: all 40 rollouts errored"


def test_without_a_verdict_every_arm_has_its_line_and_the_reason_is_told():
    found = _conclude({"a": [_run(val__t__passat1=0.5)], "b": [_run(val__t__passat1=0.6)]})
    assert found.best_arm is None
    assert found.text.splitlines()[1:] == [
        "No verdict: not judged.",
        "a: completed, val.pass@1 0.500",
        "b: completed, val.pass@1 0.600",
    ]


def test_an_arm_that_has_only_a_test_score_is_not_scored_where_others_have_validation():
    arms = {"a": [_run(val__t__passat1=0.5, test__t__passat1=0.4)], "b": [_run(test__t__passat1=0.9)]}
    found = _conclude(arms, metric="pass@1")
    assert [arm.scores for arm in found.arms] == [[0.5], []]


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
    assert score_keys({"a": [_run(val__t__passat1=1.0, test__t__passat1=1.0, final_loss=0.1)]}, name) == keys


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
        "val/t pass@1 = 0.500 [0.100, 0.900], 8 tasks, 2 of 8 rollouts errored",
        "test/u: not scored (no server)",
        "test/v pass@1: not valid (all errored)",
    ]


def test_score_lines_show_rollouts_where_tasks_had_several_and_every_part_of_a_breakdown():
    def score(value, n, errors=0):
        return Score(metric="pass@1", value=value, low=0.1, high=0.9, n_tasks=n, n_rollouts=4 * n, n_errors=errors)

    parts = {"mail": [score(0.5, 2, errors=1)], "maps": [score(0.75, 1)]}
    result = EvalResult(name="t", split="val", scores=[score(0.6, 3, errors=1)], breakdown={"toolkit": parts})
    assert score_lines([result]) == [
        "val/t pass@1 = 0.600 [0.100, 0.900], 3 tasks, 1 of 12 rollouts errored",
        "  by toolkit: mail 0.500 [0.100, 0.900], 2 tasks, 1 of 8 rollouts errored; "
        "maps 0.750 [0.100, 0.900], 1 task, 4 rollouts",
    ]
    many = EvalResult(
        name="t", split="val", scores=[score(0.6, 20)], breakdown={"k": {str(i): [score(0.5, 1)] for i in range(20)}}
    )
    assert score_lines([many])[1].endswith("; and 8 more in the record")


def test_an_arms_line_says_how_sure_its_score_is():
    score = Score(metric="pass@1", value=0.5, low=0.1, high=0.9, n_tasks=8, n_rollouts=8)
    run = _run(val__t__passat1=0.5)
    run.evals = [EvalResult(name="t", split="val", scores=[score])]
    assert "a: completed, val.pass@1 0.500 [0.100, 0.900], 8 tasks" in _conclude({"a": [run]}).text
    both = _conclude({"a": [run, run]}).text
    assert "val.pass@1 0.500, seeds 0.500 [0.100, 0.900], 8 tasks; 0.500 [0.100, 0.900], 8 tasks" in both


def test_models_that_were_not_trained_here_stand_under_the_arms_and_are_none_of_them():
    score = Score(metric="pass@1", value=1.0, low=0.9, high=1.0, n_tasks=8, n_rollouts=8)
    models = [
        ModelScore(model="big", result=EvalResult(name="t", split="val", scores=[score])),
        ModelScore(model="gone", result=EvalResult(name="t", split="val", scores=[], error="no server")),
    ]
    success = SuccessMetric(name="val.pass@1")
    found = conclude(
        {"a": [_run(val__t__passat1=0.5)]}, hypothesis="", success=success, findings=VerdictFindings(), models=models
    )
    assert [arm.arm for arm in found.arms] == ["a"]
    assert found.text.splitlines()[-3:] == [
        "For comparison, models that were not trained here (never ranked):",
        "  big: val/t pass@1 = 1.000 [0.900, 1.000], 8 tasks",
        "  gone: val/t: not scored (no server)",
    ]


def _eval(value, *, name="a", stage=None, step=None):
    score = Score(metric="pass@1", value=value, low=value - 0.1, high=value + 0.1, n_tasks=10)
    return EvalResult(name=name, split="val", scores=[score], stage=stage, step=step)


def test_the_untrained_model_stands_beside_the_trained_one():
    (line,) = score_lines([_eval(0.1, step=0), _eval(0.5, step=5), _eval(0.9)])
    assert line == "val/a pass@1 = 0.900 [0.800, 1.000], 10 tasks (untrained 0.100 [0.000, 0.200])"
    assert score_lines([_eval(0.1, step=0)]) == ["untrained: val/a pass@1 = 0.100 [0.000, 0.200], 10 tasks"]


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


def _scored_on(value: float, *, on_training_rows: bool) -> RunResult:
    run = _run(val__t__passat1=value)
    score = Score(metric="pass@1", value=value, n_tasks=4)
    run.evals = [EvalResult(name="t", split="val", scores=[score], on_training_rows=on_training_rows)]
    return run


@pytest.mark.parametrize(
    ("marks", "told"),
    [
        ({"a": True, "b": True}, "val/t/pass@1. It shows"),
        ({"a": False, "b": True}, "val/t/pass@1 of b. It shows"),
        ({"a": True, "b": False, "c": True}, "val/t/pass@1 of a, c. It shows"),
        ({"a": False, "b": False}, None),
    ],
)
def test_scores_on_training_rows_name_the_arms_where_not_all_have_trained_on_them(marks, told):
    text = _conclude({arm: [_scored_on(1.0, on_training_rows=is_on)] for arm, is_on in marks.items()}).text
    lines = [line for line in text.splitlines() if line.startswith("Scored on training rows: ")]
    assert len(lines) == (told is not None)
    assert told is None or lines[0].startswith(f"Scored on training rows: {told}")
