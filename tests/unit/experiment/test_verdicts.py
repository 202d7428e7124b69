"""What the scores of an experiment's arms come to, task by task."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evsys_sdk.config.metadata import Metadata, SuccessMetric
from evsys_sdk.experiment.search import final_value
from evsys_sdk.experiment.verdict import judge_experiment
from evsys_sdk.protocols import EvalResult, Rollout, RunResult, Score
from evsys_sdk.report.conclusion import VerdictFindings, conclude


def _eval(rewards, *, split="val", name="t", step=None, metric="pass@1", error=None):
    value = sum(rewards) / len(rewards) if rewards else None
    score = Score(metric=metric, value=value, n_tasks=len(rewards), n_rollouts=len(rewards))
    rollouts = [Rollout(task_id=f"task{index}", reward=float(reward)) for index, reward in enumerate(rewards)]
    scores = [] if error else [score]
    return EvalResult(name=name, split=split, scores=scores, step=step, rollouts=rollouts, error=error)


def _run(*evals, status="completed", seed=1, error=None, **numbers):
    metrics = {f"{e.split}/{e.name}/{s.metric}": s.value for e in evals if e.step != 0 for s in e.scores}
    return RunResult(
        run_id=f"x/{seed}", status=status, metrics={**metrics, **numbers}, error=error,
        evals=list(evals),
        seed=seed,
    )  # fmt: skip


def _judged(arms, metric="val.pass@1", mode="max", **metadata):
    return judge_experiment(arms, Metadata(success_metric={"name": metric, "mode": mode}, **metadata))


LOW, HIGH = [1, 0, 0, 0] * 25, [1, 1, 1, 0] * 25


def test_an_arm_is_best_when_it_is_better_than_the_baseline_task_by_task():
    found = _judged({"base": [_run(_eval(LOW))], "up": [_run(_eval(HIGH))]})
    assert found.best_arm == "up"
    [base, up] = found.as_dict()["verdict"]["arms"]
    assert (base["mean"], up["mean"]) == (0.25, 0.75) and up["vs_baseline"]["n_tasks"] == 100
    assert up["vs_baseline"]["low"] > 0.3 and "Best arm by val.pass@1: up" in found.lines[0]


def test_of_two_steps_with_one_mean_the_tasks_of_the_chosen_one_are_judged():
    chosen, later = [1, 0] * 50, [0, 1] * 50
    run = replace(_run(_eval(chosen, step=4), _eval(later, step=8)), chosen_steps={"": 4})
    found = _judged({"base": [_run(_eval(chosen))], "best": [run]})
    assert found.verdict is not None and found.verdict.arms[1].vs_baseline is not None
    # On the tasks of the later step the arms differ on every one, and the interval is ten times as wide.
    assert found.verdict.arms[1].vs_baseline.high == pytest.approx(0.027, abs=0.001)


def test_the_higher_mean_alone_makes_no_best_arm():
    slightly = [1, *HIGH[1:-1], 1]
    found = _judged({"base": [_run(_eval(HIGH))], "up": [_run(_eval(slightly))]})
    assert found.best_arm is None and "no arm beats the baseline" in found.lines[0]


def test_the_baseline_arm_can_be_named_and_lower_can_be_better():
    arms = {"slow": [_run(_eval(HIGH))], "quick": [_run(_eval(LOW))]}
    assert _judged(arms, mode="min").best_arm == "quick"
    named = _judged(arms, baseline_arm="quick")
    assert named.best_arm == "slow" and named.as_dict()["verdict"]["baseline_arm"] == "quick"


def test_failed_and_unscored_arms_are_never_ranked_and_say_why():
    arms = {
        "base": [_run(_eval(LOW))],
        "up": [_run(_eval(HIGH))],
        "crashed": [_run(_eval([1] * 100), status="failed", error="boom")],
        "unscored": [_run(_eval([], error="no server"))],
    }
    found = _judged(arms)
    assert found.best_arm == "up"
    why = {arm["arm"]: arm["why_unranked"] for arm in found.as_dict()["verdict"]["arms"]}
    assert why == {"base": None, "up": None, "crashed": "boom", "unscored": "no server"}


def test_seeds_count_by_the_arms_mean_not_by_the_luckiest():
    lucky = [_run(_eval([1] * 90 + [0] * 10), seed=1), _run(_eval([1] * 10 + [0] * 90), seed=2)]
    steady = [_run(_eval([1] * 60 + [0] * 40), seed=1), _run(_eval([1] * 60 + [0] * 40), seed=2)]
    found = _judged({"lucky": lucky, "steady": steady})
    means = {arm["arm"]: arm["mean"] for arm in found.as_dict()["verdict"]["arms"]}
    assert means == {"lucky": 0.5, "steady": 0.6} and found.as_dict()["verdict"]["winner"]["arm"] == "steady"


def test_test_scores_select_nothing_unless_that_is_allowed_and_then_it_is_admitted():
    arms = {"base": [_run(_eval(LOW, split="test"))], "up": [_run(_eval(HIGH, split="test"))]}
    found = _judged(arms, "pass@1")
    assert found.best_arm is None and "test scores do not select" in found.lines[0]
    allowed = _judged(arms, "pass@1", allow_test_selection=True)
    assert allowed.best_arm == "up" and allowed.lines[0].startswith("Arms were picked on test")


def test_an_arm_with_test_scores_only_does_not_bring_the_others_test_scores_in():
    arms = {
        "base": [_run(_eval(LOW), _eval(HIGH, split="test"))],
        "up": [_run(_eval(HIGH), _eval(LOW, split="test"))],
        "unscored": [_run(_eval([1] * 100, split="test"))],
    }
    found = _judged(arms, "pass@1")
    assert found.best_arm == "up" and found.as_dict()["verdict"]["arms"][0]["n_tasks"] == 100
    assert found.as_dict()["verdict"]["arms"][2]["why_unranked"] == "it was not scored by val/t/pass@1"


def test_the_trials_of_a_search_have_no_baseline():
    arms = {"t0": [_run(_eval(LOW, step=0), _eval(LOW))], "t1": [_run(_eval(HIGH))]}
    success = {"name": "val.pass@1", "mode": "max"}
    prediction = {"claim": "it learns", "prediction": {"arm": "t1", "direction": "higher"}}
    found = judge_experiment(arms, Metadata(success_metric=success, hypothesis=prediction), searched=True)
    assert found.best_arm == "t1" and found.as_dict()["verdict"]["baseline_arm"] is None
    assert found.as_dict()["hypothesis_result"]["vs"] == "untrained" and found.lines[0].startswith(
        "The hypothesis is supp"
    )
    assert found.lines[1].startswith("t1 scored 0.750, the highest of 2 scored arms; ") and "baseline" not in " ".join(
        found.lines
    )


def test_one_number_for_one_metric_where_benchmarks_differ_in_size():
    small, large = _eval([1, 1, 1, 0], name="small"), _eval(LOW, name="large")
    run = _run(small, large)
    [told] = conclude(
        {"a": [run]}, hypothesis="", success=SuccessMetric(name="val/*/pass@1"), findings=VerdictFindings()
    ).arms
    judged = _judged({"a": [run]}, "val/*/pass@1").as_dict()["verdict"]["arms"][0]["mean"]
    assert told.scores == [pytest.approx(28 / 104)] and judged == pytest.approx(28 / 104)
    assert final_value("val/*/pass@1", [run]) == pytest.approx(28 / 104), "a search goes by the same"
    assert "ambiguous: it can mean val/small/pass@1, or val/large/pass@1" in _judged({"a": [run]}, "pass@1").why_not


def test_validation_comes_before_test():
    arms = {
        "base": [_run(_eval(LOW), _eval(HIGH, split="test"))],
        "up": [_run(_eval(HIGH), _eval(LOW, split="test"))],
    }
    assert _judged(arms, "pass@1").best_arm == "up"


def test_of_several_scores_those_of_the_weights_the_run_ended_with_count():
    loop, final = _eval(HIGH, step=5), _eval(LOW)
    run = _run(loop, final)
    assert run.metrics == {"val/t/pass@1": 0.25}
    assert _judged({"a": [run]}).as_dict()["verdict"]["arms"][0]["mean"] == 0.25


def test_the_untrained_model_is_compared_with_too():
    found = _judged({"a": [_run(_eval(LOW, step=0), _eval(HIGH))]})
    assert found.best_arm == "a" and not any("nothing to compare" in line for line in found.lines)
    compared = found.as_dict()["verdict"]["arms"][0]["vs_untrained"]
    assert compared["verdict"] == "better" and compared["difference"] == 0.5


def test_a_number_that_no_benchmark_measured_is_told_and_not_taken_for_proof():
    found = _judged({"a": [_run(final_loss=2.0)], "b": [_run(final_loss=1.0)]}, "final_loss", "min")
    assert found.best_arm is None
    assert [arm["mean"] for arm in found.as_dict()["verdict"]["arms"]] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("direction", "at_least", "outcome"),
    [("higher", 0.2, "supported"), ("lower", 0.0, "refuted"), ("higher", 0.5, "inconclusive")],
)
def test_a_prediction_is_judged(direction, at_least, outcome):
    prediction = {"arm": "up", "vs": "base", "direction": direction, "at_least": at_least}
    hypothesis = {"claim": "up is up", "prediction": prediction, "confidence": 0.8}
    found = _judged({"base": [_run(_eval(LOW))], "up": [_run(_eval(HIGH))]}, hypothesis=hypothesis)
    assert found.as_dict()["hypothesis_result"]["outcome"] == outcome
    assert found.lines[0].startswith(f"The hypothesis is {outcome}: ")


def test_without_a_success_metric_or_a_score_it_says_so():
    assert "no success_metric" in judge_experiment({"a": [_run()]}, Metadata()).why_not
    assert "no arm has a score for val.pass@1" in _judged({"a": [_run()]}).why_not


def test_a_prediction_about_what_nobody_scored_is_inconclusive():
    prediction = {"arm": "up", "vs": "base", "metric": "pass@1"}
    found = _judged({"base": [_run()], "up": [_run()]}, hypothesis={"claim": "c", "prediction": prediction})
    assert found.lines == ["The hypothesis is inconclusive: no arm has a score for pass@1."]
    assert found.as_dict()["hypothesis_result"]["outcome"] == "inconclusive" and found.why_not


@pytest.mark.parametrize("metric", ["test.pass@1", "test/t/pass@1"])
def test_a_prediction_is_judged_by_its_own_metric_whatever_the_arms_are_ranked_by(metric):
    arms = {
        "base": [_run(_eval(LOW), _eval(LOW, split="test"))],
        "up": [_run(_eval(LOW), _eval(HIGH, split="test"))],
    }
    prediction = {"claim": "c", "prediction": {"arm": "up", "metric": metric, "at_least": 0.1}, "confidence": 0.9}
    found = _judged(arms, hypothesis=prediction)
    assert found.best_arm is None and found.lines[0].startswith(
        "The hypothesis is supported: measured +50.0 points (95 %"
    )
    assert found.as_dict()["hypothesis_result"]["metric"] == metric
    assert found.as_dict()["verdict"]["metric"] == "val.pass@1"


def test_a_prediction_that_names_its_metric_needs_no_success_metric():
    arms = {"base": [_run(_eval(LOW))], "up": [_run(_eval(HIGH))]}
    prediction = {"claim": "c", "prediction": {"arm": "up", "metric": "val.pass@1"}}
    found = judge_experiment(arms, Metadata(hypothesis=prediction))
    assert "no success_metric" in found.why_not and found.best_arm is None
    assert found.as_dict()["hypothesis_result"]["outcome"] == "supported"


def test_dollars_between_nothing_and_one_are_judged_as_dollars():
    def run(costs):
        rollouts = [Rollout(task_id=str(i), reward=1.0, cost_usd=usd) for i, usd in enumerate(costs)]
        value = sum(costs) / len(costs)
        score = Score(metric="cost", value=value, n_tasks=len(costs))
        return _run(EvalResult(name="t", split="val", scores=[score], rollouts=rollouts))

    cheap, dear = [1e-6, 2e-6, 3e-6] * 10, [5e-6, 4e-6, 3e-6] * 10
    found = _judged({"dear": [run(dear)], "cheap": [run(cheap)]}, "val.cost", "min")
    assert found.best_arm == "cheap" and found.as_dict()["verdict"]["arms"][1]["high"] < 4e-6
    assert "cheap, 2e-06 below dear (95 % CI 1.4e-06 to 2.6e-06; p < 0.001" in found.lines[0]


def _fail(*_args, **_kwargs):
    raise ZeroDivisionError("float division by zero")


@pytest.mark.parametrize("place", ["judge_arms", "verdict_lines", "task_values", "is_share_of_tasks", "resolve"])
def test_an_error_of_the_statistics_is_a_recorded_reason(monkeypatch, place):
    monkeypatch.setattr(f"evsys_sdk.experiment.verdict.{place}", _fail)
    found = _judged({"base": [_run(_eval(LOW))], "up": [_run(_eval(HIGH))]})
    assert "could not be judged: ZeroDivisionError: float division by zero" in found.why_not
    assert found.best_arm is None and "verdict" not in found.as_dict()


def test_an_error_in_judging_the_hypothesis_leaves_the_verdict(monkeypatch):
    monkeypatch.setattr("evsys_sdk.experiment.verdict.judge_hypothesis", _fail)
    claim = {"claim": "up is better", "prediction": {"arm": "up"}, "confidence": 0.9}
    found = _judged({"base": [_run(_eval(LOW))], "up": [_run(_eval(HIGH))]}, hypothesis=claim)
    told = found.as_dict()["hypothesis_result"]
    assert found.best_arm == "up" and told["outcome"] == "inconclusive" and told["brier"] is None
    assert "could not be judged: ZeroDivisionError" in told["why"]


def test_a_hypothesis_in_words_is_answered_with_the_numbers_and_a_hint():
    arms = {"base": [_run(_eval(LOW))], "up": [_run(_eval(HIGH))]}
    found = _judged(arms, hypothesis="Up goes up.")
    assert found.lines[0] == found.as_dict()["hypothesis_in_words"]
    assert found.lines[0].startswith(
        "The hypothesis is in words, so it is not judged. Measured: up is 50.0 points above base (95 % CI "
    )
    assert found.lines[0].endswith(
        "Holm-corrected), better. To have the next one judged: metadata.hypothesis: "
        "{claim: ..., prediction: {arm: up, vs: base}}."
    )
    parsed = Metadata(
        success_metric="val.pass@1", hypothesis={"claim": "...", "prediction": {"arm": "up", "vs": "base"}}
    )
    assert judge_experiment(arms, parsed).as_dict()["hypothesis_result"]["outcome"] == "supported", "the hint works"
    best = _judged({"base": [_run(_eval(HIGH))], "down": [_run(_eval(LOW))]}, hypothesis="Down goes up.")
    assert "Measured: down is 50.0 points below base" in best.lines[0] and ", worse. " in best.lines[0]
    same = _judged({"a": [_run(_eval([1, 0] * 9))], "b": [_run(_eval([0, 1] * 9))]}, hypothesis="B is better.")
    assert "Measured: b has the same mean as a (95 % CI " in same.lines[0]
    alone = _judged({"a": [_run(_eval(LOW, step=0), _eval(HIGH))]}, hypothesis="It learns.")
    assert "Measured: a is 50.0 points above untrained" in alone.lines[0]
    nothing = _judged({"a": [_run(_eval(HIGH))]}, hypothesis="It learns.")
    assert (
        "Measured: a scored 0.750 [0.657, 0.825], 100 tasks, 1 seed. To have the next one judged: " in nothing.lines[0]
    )
    assert nothing.lines[0].endswith("vs: untrained}} and `baseline: true` in its benchmark.")
    full = _judged({"a": [_run(_eval(LOW, step=0), _eval([1] * 100))]}, hypothesis="It learns.")
    assert "Measured: a is 75.0 points above untrained (95 % CI " in full.lines[0], "at 1.000 it was not answered"
    assert full.lines[0].endswith("prediction: {arm: a, vs: untrained}}.")
    flat = _judged({"a": [_run(_eval([1] * 9))], "b": [_run(_eval([1] * 9))]}, hypothesis="B is better.")
    assert "Measured: every arm solved every task. To have" in flat.lines[0] and "{arm: b, vs: a}}" in flat.lines[0]
    once = _judged({"a": [_run(final_loss=0.5)]}, "final_loss", "min", hypothesis="It learns.")
    assert "Measured: a scored 0.500, 1 seed. " in once.lines[0] and "vs: <another arm>}}." in once.lines[0]
    failed = _judged({"a": [_run(status="failed", error="no disk")]}, hypothesis="It learns.")
    none = judge_experiment(arms, Metadata(hypothesis="It learns."))
    for told, needs in ((failed, ""), (none, "metadata.success_metric and ")):
        assert f"To have the next one judged: {needs}metadata.hypothesis: {{claim: ..." in told.lines[0]
    assert "hypothesis_in_words" not in _judged(arms).as_dict()


def test_errored_rollouts_are_counted_beside_the_scores_of_the_final_weights():
    def broken(rewards, n_errors, **fields):
        found = _eval(rewards, **fields)
        for number in range(n_errors):
            found.rollouts[number] = Rollout(task_id=f"task{number}", status="infra_error", error="no server")
        return found

    run = _run(broken(HIGH, 50, step=5), broken([0] * 20 + HIGH[20:], 20))
    found = _judged({"base": [_run(_eval(HIGH))], "broken": [run]})
    base, other = found.as_dict()["verdict"]["arms"]
    assert (base["n_rollouts"], base["n_errors"]) == (100, 0)
    assert (other["n_rollouts"], other["n_errors"], other["first_error"]) == (100, 20, "no server")
    assert found.lines[0].startswith("Warning: 20 of 100 rollouts errored in broken (20 %; first error: no server)")
    start = _judged({"a": [_run(broken([0] * 100, 3, step=0), _eval(HIGH))]})
    assert start.lines[-1] == "Note: before training: 3 of 100 rollouts errored and count as failures."


def test_without_a_scored_baseline_the_command_that_names_another_is_told():
    arms = {
        "base": [_run(status="failed", error="boom")],
        "low": [_run(_eval(LOW, step=0), _eval(LOW))],
        "up": [_run(_eval(HIGH))],
    }
    found = judge_experiment(arms, Metadata(success_metric="val.pass@1"), name="sweep")
    assert found.best_arm == "up" and found.lines[0].startswith("Best of the 2 scored arms by val.pass@1: up, better ")
    assert (
        found.lines[-1] == "To judge against another arm without training again: evsys judge sweep --baseline-arm low"
    )
    assert any(line.startswith("up: 0.750") and "better: 50.0 points above untrained" in line for line in found.lines)


def test_each_arm_is_compared_with_the_weights_that_it_started_from():
    """An arm that starts from a checkpoint at 0.750 and falls to 0.500 was called better than untrained."""
    half = [1, 0] * 50
    on = _run(replace(_eval(HIGH, step=0), start="first@final"), _eval(half))
    found = _judged({"on": [on]})
    [arm] = found.as_dict()["verdict"]["arms"]
    assert arm["vs_untrained"]["difference"] == pytest.approx(-0.25) and arm["vs_untrained"]["verdict"] == "worse"
    assert any("worse: 25.0 points below its starting weights (95 % CI " in line for line in found.lines)
    base = _run(_eval(LOW, step=0), _eval(half))
    both = _judged({"base": [base], "on": [on]}).as_dict()["verdict"]
    assert [arm["vs_untrained"]["difference"] for arm in both["arms"]] == [0.25, -0.25]
    lost = _run(status="failed", error="no disk")
    shared = _judged({"lost": [lost], "on": [on], "other": [_run(_eval(HIGH))]}).as_dict()["verdict"]["arms"]
    assert shared[2]["vs_untrained"]["difference"] == 0.0, "one model, though only one run has scored it"


def test_an_arm_with_many_errors_says_so_before_the_hypothesis_is_answered():
    broken = _eval([0] * 20 + HIGH[20:])
    for number in range(20):
        broken.rollouts[number] = Rollout(task_id=f"task{number}", status="infra_error", error="no server")
    found = _judged({"base": [_run(_eval(HIGH))], "broken": [_run(broken)]}, hypothesis="It helps.")
    assert found.lines[0].startswith("Warning: 20 of 100 rollouts errored in broken")
    assert found.lines[1].startswith("The hypothesis is in words") and found.lines[2].startswith("Best arm by")
    assert sum(line.startswith("Warning: ") for line in found.lines) == 1
