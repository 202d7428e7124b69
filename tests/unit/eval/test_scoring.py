"""From rollouts to scores: errors stay in the denominator, and nothing invalid has a value."""

from __future__ import annotations

from statistics import fmean, stdev

import pytest

from evsys_sdk.errors import Cancelled
from evsys_sdk.eval.scoring import break_down, score_one, scores_of_task, why_invalid
from evsys_sdk.protocols import Rollout, TaskScores, Turn
from evsys_sdk.registry import metrics
from evsys_sdk.stats.comparison import interval_of_run
from evsys_sdk.stats.intervals import mean_interval, wilson_interval


def said(text: str, reward: float | None, status="ok", error=None) -> Rollout:
    turn = Turn(prompt_tokens=[], completion_tokens=[], logprobs=[], text=text)
    return Rollout(task_id="t", turns=[turn], reward=reward, status=status, error=error)


def broken(error: str = "lost") -> Rollout:
    return Rollout(task_id="t", status="infra_error", error=error)


def task(*rewards: float, n_errors: int = 0, **metadata) -> TaskScores:
    return TaskScores(task_id="t", rewards=list(rewards), n_errors=n_errors, metadata=metadata)


class MeanReward:
    def compute(self, task_rewards):
        return fmean(fmean(rewards) for rewards in task_rewards)


def test_an_errored_rollout_is_a_failure_in_the_denominator():
    scores = scores_of_task("t", [said("a", 1.0), broken(), said("a", 1.0, status="infra_error"), said("b", None)])
    assert scores.rewards == [1.0, 0.0, 0.0, 0.0] and scores.n_errors == 3


def test_a_timeout_that_a_verifier_has_graded_keeps_its_grade():
    scores = scores_of_task("t", [said("a", 1.0, status="timeout"), said("b", 0.5, status="agent_error")])
    assert scores.rewards == [1.0, 0.5] and scores.n_errors == 0


def test_an_errored_rollout_never_matches_even_an_empty_target():
    scores = scores_of_task("t", [broken(), said("", 1.0)], target="")
    score = score_one("exact_match", metrics.build("exact_match", {}), [scores])
    assert score.value == 0.5


def test_a_score_says_its_interval_and_what_it_was_taken_over():
    tasks = [task(1.0, 0.0), task(1.0, 1.0), task(0.0, 0.0, n_errors=1)] * 4
    score = score_one("mean_reward", MeanReward(), tasks)
    assert (score.low, score.high) == interval_of_run([0.5, 1.0, 0.0] * 4, share=True)
    assert (score.low, score.high) == pytest.approx((0.262, 0.738), abs=0.001)
    assert (score.value, score.n_tasks, score.n_rollouts, score.n_errors) == (0.5, 12, 24, 4)


def test_tasks_are_the_units_of_the_interval_and_not_rollouts():
    # Ten rollouts that always agree are one observation each task, not ten.
    many = score_one("m", MeanReward(), [task(*[1.0] * 10), task(*[0.0] * 10), task(*[1.0] * 10)])
    assert (many.low, many.high) == pytest.approx(wilson_interval(2, 3), abs=1e-12)


def test_one_task_has_a_value_and_no_interval():
    score = score_one("m", MeanReward(), [task(1.0)])
    assert (score.value, score.low, score.high) == (1.0, None, None)


def test_when_everything_errored_there_is_no_value():
    score = score_one("m", MeanReward(), [task(0.0, n_errors=1), task(0.0, n_errors=1)])
    assert score.value is None and score.low is None
    assert score.error == "invalid: all 2 rollouts errored"


def test_an_invalid_eval_tells_its_first_error():
    rollouts = [broken("no such host"), broken("no such host either")]
    assert why_invalid([scores_of_task("t", rollouts)], rollouts) == (
        "invalid: all 2 rollouts errored; the first: no such host"
    )


def test_one_good_rollout_makes_an_eval_valid():
    assert why_invalid([task(0.0, n_errors=1), task(0.0)], [broken(), said("x", 0.0)]) is None


def test_a_raising_metric_has_an_error_and_no_value():
    class Raises:
        def compute(self, task_rewards):
            raise KeyError("reward")

    score = score_one("mine", Raises(), [task(1.0), task(0.0)])
    assert score.value is None and score.error == "metric 'mine' failed: KeyError: 'reward'"
    assert score.n_tasks == 2


def test_a_refusing_metric_is_named_too():
    score = score_one("pass@3", metrics.build("pass@3", {}), [task(1.0)])
    assert score.error == "pass@3 needs 3 rollouts per task and there is 1: set num_samples to at least 3"


def test_a_metric_that_returns_nothing_is_named():
    class Forgets:
        def compute(self, task_rewards):
            pass

    assert (
        score_one("mine", Forgets(), [task(1.0)]).error
        == "metric 'mine': it returned None; a metric is a finite number"
    )


def test_a_cancelled_run_passes_through_a_metric():
    class Stops:
        def compute(self, task_rewards):
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        score_one("mine", Stops(), [task(1.0)])


def test_a_metric_that_needs_all_tasks_has_a_value_without_an_interval():
    class Spread:
        def compute(self, task_rewards):
            return stdev(rewards[0] for rewards in task_rewards)

    score = score_one("spread", Spread(), [task(1.0), task(0.0)])
    assert score.value == pytest.approx(0.5**0.5) and score.low is None and score.error is None


def test_a_breakdown_scores_each_value_of_a_key():
    tasks = [task(1.0, kind="easy"), task(0.0, kind="hard"), task(1.0, kind="hard"), task(0.0)]
    parts = break_down(["kind"], [("mean_reward", MeanReward())], tasks)["kind"]
    assert {value: (scores[0].value, scores[0].n_tasks) for value, scores in parts.items()} == {
        "easy": (1.0, 1),
        "hard": (0.5, 2),
        "(none)": (0.0, 1),
    }


def test_dollars_are_no_share_of_anything():
    def paid(usd):
        return scores_of_task("t", [Rollout(task_id="t", reward=1.0, cost_usd=usd)])

    score = score_one("cost", metrics.build("cost", {}), [paid(0.0), paid(1.0), paid(0.0)])
    low, high = mean_interval([0.0, 1.0, 0.0])
    assert low < 0 and (score.low, score.high) == pytest.approx((0.0, high)), "Student's, and nothing costs less than 0"
    assert score.high > 1
    same = score_one("cost", metrics.build("cost", {}), [paid(2e-6)] * 3)
    assert same.value == 2e-6 and same.low is None, "tasks that cost the same leave nothing to estimate from"
