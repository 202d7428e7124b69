"""Metrics fold rewards into one number, whichever way they are written."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import ClassVar

import pytest

from evsys_sdk.errors import ConfigError, EvsysError, UnknownKind
from evsys_sdk.eval.metrics import as_metric, metric_family, samples_needed
from evsys_sdk.eval.scoring import score_one, scores_of_task
from evsys_sdk.protocols import Rollout, TaskScores, Turn
from evsys_sdk.registry import get_metric, metrics, register_metric, schema_for


@pytest.fixture(autouse=True)
def registry_as_before():
    metrics.names()
    before = dict(metrics.entries)
    yield
    metrics.entries.clear()
    metrics.entries.update(before)


def tasks_of(*rewards: list[float]) -> list[TaskScores]:
    return [TaskScores(task_id=str(i), rewards=r, predictions=[""] * len(r)) for i, r in enumerate(rewards)]


def answers(*pairs) -> list[TaskScores]:
    return [TaskScores(task_id=str(i), rewards=[0.0], predictions=[p], target=t) for i, (p, t) in enumerate(pairs)]


def value(name: str, tasks: list[TaskScores], **params) -> float:
    return as_metric(metrics.build(name, params))(tasks)


def test_the_pass_at_2_of_the_walkthrough_works_as_printed():
    @register_metric("pass@2")
    class PassAt2:
        name: ClassVar[str] = "pass@2"

        def compute(self, task_rewards: Sequence[Sequence[float]]) -> float:
            hits = sum(any(r >= 1.0 for r in task[:2]) for task in task_rewards)
            return hits / len(task_rewards)

    assert get_metric("pass@2") is PassAt2
    # The family's unbiased estimate would be 1 - 1/3 for the first task; the registered class sees only two tries.
    assert value("pass@2", tasks_of([0.0, 0.0, 1.0], [1.0, 0.0, 0.0])) == 0.5
    assert samples_needed("pass@2", PassAt2()) == 2


@pytest.mark.parametrize(("n", "passed", "k"), [(5, 2, 1), (5, 2, 3), (6, 1, 4), (4, 4, 2), (4, 0, 2), (3, 2, 3)])
def test_pass_at_k_and_pass_hat_k_are_the_share_of_all_draws_of_k(n, passed, k):
    rewards = [1.0] * passed + [0.0] * (n - passed)
    draws = list(itertools.combinations(rewards, k))
    assert value(f"pass@{k}", tasks_of(rewards)) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)
    assert value(f"pass^{k}", tasks_of(rewards)) == pytest.approx(sum(map(all, draws)) / len(draws), abs=1e-12)


def test_pass_at_k_and_pass_hat_k_are_hypergeometric():
    scipy_stats = pytest.importorskip("scipy.stats")
    for n, passed, k in itertools.product((1, 2, 7, 64, 500), (0, 1, 2, 7, 63), (1, 2, 7, 50)):
        if passed > n or k > n:
            continue
        rewards = [1.0] * passed + [0.0] * (n - passed)
        drawn = scipy_stats.hypergeom(n, passed, k)  # passes among k tries drawn from the n
        assert value(f"pass@{k}", tasks_of(rewards)) == pytest.approx(1 - drawn.pmf(0), abs=1e-9)
        assert value(f"pass^{k}", tasks_of(rewards)) == pytest.approx(drawn.pmf(k), abs=1e-9)


def test_pass_at_k_has_no_bias():
    """Over every outcome of 4 tries with p = 0.3 the estimate's mean is 1 - 0.7**k, and pass^k's is 0.3**k."""
    for k in (1, 2, 3, 4):
        at = hat = 0.0
        for outcome in itertools.product((0.0, 1.0), repeat=4):
            weight = math.prod(0.3 if passed else 0.7 for passed in outcome)
            at += weight * value(f"pass@{k}", tasks_of(list(outcome)))
            hat += weight * value(f"pass^{k}", tasks_of(list(outcome)))
        assert at == pytest.approx(1 - 0.7**k) and hat == pytest.approx(0.3**k)


def rollout(seconds=0.0, cost=0.0, turns=(), status="ok", **metadata) -> Rollout:
    made = [Turn(prompt_tokens=[0] * p, completion_tokens=[0] * c, logprobs=[0.0] * c, text="") for p, c in turns]
    return Rollout(
        task_id="t", turns=made, reward=0.0, status=status, seconds=seconds, cost_usd=cost, metadata=metadata
    )


def used(*groups: list[Rollout]) -> list[TaskScores]:
    return [scores_of_task(str(index), group) for index, group in enumerate(groups)]


def test_what_a_try_costs_is_the_mean_over_tasks_of_the_mean_over_tries():
    tasks = used([rollout(seconds=1, cost=0.1), rollout(seconds=3, cost=0.3)], [rollout(seconds=10, cost=1.0)])
    assert value("latency", tasks) == pytest.approx((2 + 10) / 2)
    assert value("cost", tasks) == pytest.approx((0.2 + 1.0) / 2)


def test_tokens_are_those_of_all_turns_or_what_the_agent_reported():
    turns = rollout(turns=[(10, 5), (20, 5)], n_input_tokens=7, n_output_tokens=7)
    assert value("tokens", used([turns])) == 40
    assert value("tokens", used([rollout(n_input_tokens=100, n_output_tokens=20)])) == 120


def test_what_infrastructure_broke_off_is_not_measured():
    broken = [rollout(seconds=900, status="infra_error"), rollout(seconds=900, status="cancelled")]
    slow = rollout(seconds=60, status="timeout")
    assert value("latency", used([*broken, rollout(seconds=2)], [slow], broken)) == 31
    with pytest.raises(EvsysError, match="nothing to measure"):
        value("latency", used(broken))


def test_a_score_of_seconds_has_an_interval_that_is_not_bound_to_1():
    tasks = used(*([rollout(seconds=s)] for s in (10, 12, 14, 16)))
    score = score_one("latency", metrics.build("latency", {}), tasks)
    assert score.value == 13 and score.low is not None and 5 < score.low < 13 < score.high < 21


def test_a_metric_of_ones_own_may_look_at_the_rollouts():
    @register_metric("turns_per_try")
    class Turns:
        def compute(self, *, rollouts):
            return sum(len(one.turns) for group in rollouts for one in group) / sum(map(len, rollouts))

    assert value("turns_per_try", used([rollout(turns=[(1, 1)] * 3), rollout(turns=[(1, 1)])])) == 2.0
    with pytest.raises(EvsysError, match="without them"):
        value("turns_per_try", tasks_of([1.0]))


def test_a_reward_of_one_or_more_is_a_pass_and_less_is_not():
    assert value("pass@1", tasks_of([1.0], [1.5], [0.999])) == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", ["pass@3", "pass^3"])
def test_a_k_beyond_the_rollouts_is_refused_and_num_samples_named(name):
    with pytest.raises(EvsysError, match=r"needs 3 rollouts per task and there are 2: set num_samples to at least 3"):
        value(name, tasks_of([1.0, 0.0, 1.0], [1.0, 0.0]))


@pytest.mark.parametrize("name", ["pass@0", "pass@", "pass@-1", "pass@1.5", "pass@01", "passes", "pass@x"])
def test_other_names_are_no_members_of_the_family(name):
    assert metric_family(name) is None
    with pytest.raises(UnknownKind):
        get_metric(name)


def test_a_look_up_gives_the_same_class_each_time():
    assert get_metric("pass@7") is get_metric("pass@7")
    assert get_metric("pass@7").name == "pass@7"


def test_pass_at_k_takes_k_from_its_params():
    tasks = tasks_of([1.0, 0.0, 0.0, 0.0])
    assert value("pass_at_k", tasks) == value("pass@1", tasks) == 0.25
    assert value("pass_at_k", tasks, k=2) == value("pass@2", tasks) == 0.5
    assert samples_needed("pass_at_k", metrics.build("pass_at_k", {"k": 3})) == 3


def test_metrics_without_a_config_take_no_params():
    with pytest.raises(ConfigError, match="unknown key"):
        metrics.build("mean_reward", {"k": 3})
    assert schema_for("metric", "pass@3")["properties"] == {}
    assert "k" in schema_for("metric", "pass_at_k")["properties"]


def test_mean_reward_counts_each_task_the_same():
    assert value("mean_reward", tasks_of([1.0, 0.0], [1.0])) == 0.75


def test_pass_rate_is_the_share_of_passing_rollouts():
    assert value("pass_rate", tasks_of([1.0, 0.0], [1.0, 1.0])) == 0.75


def test_the_predictions_form_gets_each_rollout_beside_its_tasks_target():
    seen = {}

    class Spy:
        def compute(self, *, predictions, targets):
            seen.update(predictions=predictions, targets=targets)
            return 0.0

    tasks = [
        TaskScores(task_id="a", rewards=[0, 0], predictions=["x", "y"], target=1),
        TaskScores(task_id="b", rewards=[0, 0], predictions=["z", "w"], target=2),
    ]
    as_metric(Spy())(tasks)
    assert seen == {"predictions": ["x", "y", "z", "w"], "targets": [1, 1, 2, 2]}


def test_answers_are_taken_out_of_their_tags_in_targets_as_in_predictions():
    class Same:
        def compute(self, *, predictions, targets):
            return sum(p == t for p, t in zip(predictions, targets, strict=True)) / len(targets)

    said = "so it is <answer> 4 </answer>"
    pairs = [(said, said), ("4", said), (said, "4"), ("<answer>5</answer>", said)]
    assert as_metric(Same)(answers(*pairs)) == 0.75
    seen = []

    class Keep:
        def compute(self, *, predictions, targets):
            seen.extend(targets)
            return 0.0

    nested = {"answer": "<answer>a</answer>", "n": 3}
    as_metric(Keep)(answers(("a", ["<answer>a</answer>", "b"]), ("a", nested), ("a", None)))
    assert seen == [["a", "b"], {"answer": "a", "n": 3}, None]


def test_exact_match_compares_answers_with_targets():
    tasks = answers(("<answer>A</answer>", "A"), ("B", {"tool_slug": "B", "toolkit": "t"}), ("C", "D"), ("", "E"))
    assert value("exact_match", tasks) == 0.5


def test_exact_match_without_targets_is_an_error_and_not_a_zero():
    with pytest.raises(EvsysError, match="needs a target"):
        value("exact_match", answers(("A", None)))


@pytest.mark.parametrize(
    ("prediction", "matches"),
    [
        ("GMAIL_SEND_EMAIL", True),
        ("<answer>gmail_fetch</answer>", True),
        ("Gmail", True),
        ("GMAILER_SEND", False),
        ("SLACK_SEND", False),
        ('{"tool_slug": "X", "toolkit": "GMAIL"}', True),
        ('{"tool_slug": "GMAIL_SEND"}', True),
        ('{"toolkit": "slack", "tool_slug": "GMAIL_SEND"}', False),
        ("", False),
    ],
)
def test_toolkit_match_looks_only_at_the_toolkit(prediction, matches):
    target = {"tool_slug": "GMAIL_REPLY", "toolkit": "gmail"}
    assert value("toolkit_match", answers((prediction, target))) == float(matches)


def test_toolkit_match_without_a_toolkit_says_what_a_target_looks_like():
    with pytest.raises(EvsysError, match="toolkit: gmail"):
        value("toolkit_match", answers(("GMAIL_SEND", "GMAIL_SEND")))


@pytest.mark.parametrize("bad", [math.nan, None, "0.5", math.inf])
def test_a_metric_that_returns_no_finite_number_is_refused(bad):
    class Broken:
        def compute(self, task_rewards):
            return bad

    with pytest.raises(EvsysError, match="a metric is a finite number"):
        as_metric(Broken)(tasks_of([1.0]))


class NoCompute: ...


class ComputeTakesNothing:
    def compute(self):
        return 1.0


class ComputeTakesHalf:
    def compute(self, *, predictions):
        return 1.0


class ComputeIsAsync:
    async def compute(self, task_rewards):
        return 1.0


@pytest.mark.parametrize("target", [NoCompute, ComputeTakesNothing, ComputeTakesHalf, ComputeIsAsync, 3])
def test_what_is_no_metric_is_refused_at_registration_with_the_forms(target):
    with pytest.raises(TypeError, match=r"compute\(task_rewards\)"):
        register_metric("never_there")(target)
