"""What the scores of an experiment's arms come to, task by task."""

from __future__ import annotations

import pytest

from evsys_sdk.config.metadata import Metadata, SuccessMetric
from evsys_sdk.protocols import EvalResult, Rollout, RunResult, Score
from evsys_sdk.record.conclusion import Findings, conclude
from evsys_sdk.running.search_value import final_value
from evsys_sdk.running.verdicts import judge_experiment


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
        extras={"evals": list(evals), "seed": seed},
    )  # fmt: skip


def _judged(arms, metric="val.pass@1", mode="max", **metadata):
    return judge_experiment(arms, Metadata(success_metric={"name": metric, "mode": mode}, **metadata))


LOW, HIGH = [1, 0, 0, 0] * 25, [1, 1, 1, 0] * 25


def test_an_arm_is_best_when_it_is_better_than_the_baseline_task_by_task():
    found = _judged({"base": [_run(_eval(LOW))], "up": [_run(_eval(HIGH))]})
    assert found.best_arm == "up"
    [base, up] = found.data["verdict"]["arms"]
    assert (base["mean"], up["mean"]) == (0.25, 0.75) and up["vs_baseline"]["n_tasks"] == 100
    assert up["vs_baseline"]["low"] > 0.3 and "Best arm by val.pass@1: up" in found.lines[0]


def test_the_higher_mean_alone_makes_no_best_arm():
    slightly = [1, *HIGH[1:-1], 1]
    found = _judged({"base": [_run(_eval(HIGH))], "up": [_run(_eval(slightly))]})
    assert found.best_arm is None and "no arm beats the baseline" in found.lines[0]


def test_the_baseline_arm_can_be_named_and_lower_can_be_better():
    arms = {"slow": [_run(_eval(HIGH))], "quick": [_run(_eval(LOW))]}
    assert _judged(arms, mode="min").best_arm == "quick"
    named = _judged(arms, baseline_arm="quick")
    assert named.best_arm == "slow" and named.data["verdict"]["baseline_arm"] == "quick"


def test_failed_and_unscored_arms_are_never_ranked_and_say_why():
    arms = {
        "base": [_run(_eval(LOW))],
        "up": [_run(_eval(HIGH))],
        "crashed": [_run(_eval([1] * 100), status="failed", error="boom")],
        "unscored": [_run(_eval([], error="no server"))],
    }
    found = _judged(arms)
    assert found.best_arm == "up"
    why = {arm["arm"]: arm["why_unranked"] for arm in found.data["verdict"]["arms"]}
    assert why == {"base": None, "up": None, "crashed": "boom", "unscored": "no server"}


def test_seeds_count_by_the_arms_mean_not_by_the_luckiest():
    lucky = [_run(_eval([1] * 90 + [0] * 10), seed=1), _run(_eval([1] * 10 + [0] * 90), seed=2)]
    steady = [_run(_eval([1] * 60 + [0] * 40), seed=1), _run(_eval([1] * 60 + [0] * 40), seed=2)]
    found = _judged({"lucky": lucky, "steady": steady})
    means = {arm["arm"]: arm["mean"] for arm in found.data["verdict"]["arms"]}
    assert means == {"lucky": 0.5, "steady": 0.6} and found.data["verdict"]["winner"]["arm"] == "steady"


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
    assert found.best_arm == "up" and found.data["verdict"]["arms"][0]["n_tasks"] == 100
    assert found.data["verdict"]["arms"][2]["why_unranked"] == "it was not scored by val/t/pass@1"


def test_the_trials_of_a_search_have_no_baseline():
    arms = {"t0": [_run(_eval(LOW, step=0), _eval(LOW))], "t1": [_run(_eval(HIGH))]}
    success = {"name": "val.pass@1", "mode": "max"}
    prediction = {"claim": "it learns", "prediction": {"arm": "t1", "direction": "higher"}}
    found = judge_experiment(arms, Metadata(success_metric=success, hypothesis=prediction), searched=True)
    assert found.best_arm == "t1" and found.data["verdict"]["baseline_arm"] is None
    assert found.data["hypothesis_result"]["vs"] == "untrained" and found.lines[0].startswith("The hypothesis is supp")
    assert found.lines[1].startswith("t1 scored 0.750, the highest of 2 scored arms; ") and "baseline" not in " ".join(
        found.lines
    )


def test_one_number_for_one_metric_where_benchmarks_differ_in_size():
    small, large = _eval([1, 1, 1, 0], name="small"), _eval(LOW, name="large")
    run = _run(small, large)
    [told] = conclude({"a": [run]}, hypothesis="", success=SuccessMetric(name="val.pass@1"), findings=Findings()).arms
    judged = _judged({"a": [run]}).data["verdict"]["arms"][0]["mean"]
    assert told.scores == [pytest.approx(28 / 104)] and judged == pytest.approx(28 / 104)
    assert final_value("val.pass@1", [run]) == pytest.approx(28 / 104), "a search goes by the same"


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
    assert _judged({"a": [run]}).data["verdict"]["arms"][0]["mean"] == 0.25


def test_the_untrained_model_is_compared_with_too():
    found = _judged({"a": [_run(_eval(LOW, step=0), _eval(HIGH))]})
    assert found.best_arm == "a" and not any("nothing to compare" in line for line in found.lines)
    compared = found.data["verdict"]["arms"][0]["vs_untrained"]
    assert compared["verdict"] == "better" and compared["difference"] == 0.5


def test_a_number_that_no_benchmark_measured_is_told_and_not_taken_for_proof():
    found = _judged({"a": [_run(final_loss=2.0)], "b": [_run(final_loss=1.0)]}, "final_loss", "min")
    assert found.best_arm is None
    assert [arm["mean"] for arm in found.data["verdict"]["arms"]] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("direction", "at_least", "outcome"),
    [("higher", 0.2, "supported"), ("lower", 0.0, "refuted"), ("higher", 0.5, "inconclusive")],
)
def test_a_prediction_is_judged(direction, at_least, outcome):
    prediction = {"arm": "up", "vs": "base", "direction": direction, "at_least": at_least}
    hypothesis = {"claim": "up is up", "prediction": prediction, "confidence": 0.8}
    found = _judged({"base": [_run(_eval(LOW))], "up": [_run(_eval(HIGH))]}, hypothesis=hypothesis)
    assert found.data["hypothesis_result"]["outcome"] == outcome
    assert found.lines[0].startswith(f"The hypothesis is {outcome}: ")


def test_without_a_success_metric_or_a_score_it_says_so():
    assert "no success_metric" in judge_experiment({"a": [_run()]}, Metadata()).why_not
    assert "no arm has a score for val.pass@1" in _judged({"a": [_run()]}).why_not


def test_a_prediction_about_what_nobody_scored_is_inconclusive():
    prediction = {"arm": "up", "vs": "base", "metric": "pass@1"}
    found = _judged({"base": [_run()], "up": [_run()]}, hypothesis={"claim": "c", "prediction": prediction})
    assert found.lines == ["The hypothesis is inconclusive: no arm has a score for pass@1."]
    assert found.data["hypothesis_result"]["outcome"] == "inconclusive" and found.why_not


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
    assert found.data["hypothesis_result"]["metric"] == metric
    assert found.data["verdict"]["metric"] == "val.pass@1"


def test_a_prediction_that_names_its_metric_needs_no_success_metric():
    arms = {"base": [_run(_eval(LOW))], "up": [_run(_eval(HIGH))]}
    prediction = {"claim": "c", "prediction": {"arm": "up", "metric": "val.pass@1"}}
    found = judge_experiment(arms, Metadata(hypothesis=prediction))
    assert "no success_metric" in found.why_not and found.best_arm is None
    assert found.data["hypothesis_result"]["outcome"] == "supported"


def test_dollars_between_nothing_and_one_are_judged_as_dollars():
    def run(costs):
        rollouts = [Rollout(task_id=str(i), reward=1.0, cost_usd=usd) for i, usd in enumerate(costs)]
        value = sum(costs) / len(costs)
        score = Score(metric="cost", value=value, n_tasks=len(costs))
        return _run(EvalResult(name="t", split="val", scores=[score], rollouts=rollouts))

    cheap, dear = [1e-6, 2e-6, 3e-6] * 10, [5e-6, 4e-6, 3e-6] * 10
    found = _judged({"dear": [run(dear)], "cheap": [run(cheap)]}, "val.cost", "min")
    assert found.best_arm == "cheap" and found.data["verdict"]["arms"][1]["high"] < 4e-6
    assert "cheap, 2e-06 below dear (95 % CI 1.4e-06 to 2.6e-06; p < 0.001" in found.lines[0]


def _fail(*_args, **_kwargs):
    raise ZeroDivisionError("float division by zero")


@pytest.mark.parametrize("place", ["judge_arms", "verdict_lines", "task_values", "is_share_of_tasks", "resolve"])
def test_an_error_of_the_statistics_is_a_recorded_reason(monkeypatch, place):
    monkeypatch.setattr(f"evsys_sdk.running.verdicts.{place}", _fail)
    found = _judged({"base": [_run(_eval(LOW))], "up": [_run(_eval(HIGH))]})
    assert "could not be judged: ZeroDivisionError: float division by zero" in found.why_not
    assert found.best_arm is None and "verdict" not in found.data


def test_an_error_in_judging_the_hypothesis_leaves_the_verdict(monkeypatch):
    monkeypatch.setattr("evsys_sdk.running.verdicts.judge_hypothesis", _fail)
    claim = {"claim": "up is better", "prediction": {"arm": "up"}, "confidence": 0.9}
    found = _judged({"base": [_run(_eval(LOW))], "up": [_run(_eval(HIGH))]}, hypothesis=claim)
    told = found.data["hypothesis_result"]
    assert found.best_arm == "up" and told["outcome"] == "inconclusive" and told["brier"] is None
    assert "could not be judged: ZeroDivisionError" in told["why"]


def test_a_hypothesis_in_words_is_answered_with_the_numbers_and_a_hint():
    arms = {"base": [_run(_eval(LOW))], "up": [_run(_eval(HIGH))]}
    found = _judged(arms, hypothesis="Up goes up.")
    assert found.lines[0] == found.data["hypothesis_in_words"]
    assert found.lines[0].startswith(
        "The hypothesis is in words, so it is not judged. Measured: up is 50.0 points above base (95 % CI "
    )
    assert found.lines[0].endswith(
        "Holm-corrected), better. To have the next one judged: metadata.hypothesis: "
        "{claim: ..., prediction: {arm: up, vs: base, direction: higher}}."
    )
    parsed = Metadata(
        success_metric="val.pass@1", hypothesis={"claim": "...", "prediction": {"arm": "up", "vs": "base"}}
    )
    assert judge_experiment(arms, parsed).data["hypothesis_result"]["outcome"] == "supported", "the hint works"
    best = _judged({"base": [_run(_eval(HIGH))], "down": [_run(_eval(LOW))]}, hypothesis="Down goes up.")
    assert "Measured: down is 50.0 points below base" in best.lines[0] and ", worse. " in best.lines[0]
    alone = _judged({"a": [_run(_eval(LOW, step=0), _eval(HIGH))]}, hypothesis="It learns.")
    assert "Measured: a is 50.0 points above untrained" in alone.lines[0]
    nothing = _judged({"a": [_run(_eval(HIGH))]}, hypothesis="It learns.")
    assert nothing.lines[0] == "The hypothesis is in words, and the scores do not answer it: see below."
    assert "hypothesis_in_words" not in _judged(arms).data


def test_errored_rollouts_are_counted_beside_the_scores_of_the_final_weights():
    def broken(rewards, n_errors, **fields):
        found = _eval(rewards, **fields)
        for number in range(n_errors):
            found.rollouts[number] = Rollout(task_id=f"task{number}", status="infra_error", error="no server")
        return found

    run = _run(broken(HIGH, 50, step=5), broken([0] * 20 + HIGH[20:], 20))
    found = _judged({"base": [_run(_eval(HIGH))], "broken": [run]})
    base, other = found.data["verdict"]["arms"]
    assert (base["n_rollouts"], base["n_errors"]) == (100, 0)
    assert (other["n_rollouts"], other["n_errors"], other["first_error"]) == (100, 20, "no server")
    assert found.lines[0].startswith("Warning: 20 of 100 rollouts errored in broken (20 %; first error: no server)")
    start = _judged({"a": [_run(broken([0] * 100, 3, step=0), _eval(HIGH))]})
    assert start.lines[-1] == "Note: untrained: 3 of 100 rollouts errored and count as failures."


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
