"""The metric contract, over every built-in, the families, and plain classes that inherit nothing."""

from __future__ import annotations

import pytest

from evsys_sdk.eval.metrics import as_metric
from evsys_sdk.eval.scoring import score_one
from evsys_sdk.protocols import TaskScores
from evsys_sdk.registry import list_metrics, metrics, register_metric

TARGET = {"tool_slug": "GMAIL_SEND", "toolkit": "gmail"}
BUILT_INS = [name for name in list_metrics() if metrics.entries[name].origin.startswith("evsys_sdk.")]
ECONOMICS = {"cost", "latency", "tokens"}  # what a try takes, whether it succeeds or not
NAMES = [name for name in BUILT_INS if name not in ECONOMICS]
NAMES += ["pass@1", "pass@2", "pass^1", "pass^2"]


def task(*rewards: float) -> TaskScores:
    said = ["<answer>GMAIL_SEND</answer>" if reward >= 1 else "I cannot" for reward in rewards]
    return TaskScores(task_id="t", rewards=list(rewards), predictions=said, target=TARGET)


@pytest.fixture(autouse=True)
def registry_as_before(monkeypatch):
    monkeypatch.setattr(metrics, "entries", dict(metrics.entries))


@pytest.mark.parametrize("name", NAMES)
def test_all_right_is_1_and_all_wrong_is_0(name):
    metric = as_metric(metrics.build(name, {}))
    assert metric([task(1.0, 1.0), task(1.0, 1.0)]) == 1.0
    assert metric([task(0.0, 0.0), task(0.0, 0.0)]) == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_tasks_and_rollouts_does_not_matter(name):
    metric = as_metric(metrics.build(name, {}))
    tasks = [task(1.0, 0.0, 0.0), task(1.0, 1.0, 0.0), task(0.0, 0.0, 0.0)]
    turned = [task(0.0, 0.0, 0.0), task(0.0, 0.0, 1.0), task(0.0, 1.0, 1.0)]
    assert metric(tasks) == pytest.approx(metric(turned))


@pytest.mark.parametrize("name", NAMES)
def test_a_score_lies_in_its_interval(name):
    tasks = [task(1.0, 0.0), task(1.0, 1.0), task(0.0, 0.0), task(0.0, 1.0)]
    score = score_one(name, metrics.build(name, {}), tasks)
    assert score.error is None and score.low < score.value < score.high


@pytest.mark.parametrize("name", NAMES)
def test_no_tasks_have_no_score(name):
    score = score_one(name, metrics.build(name, {}), [])
    assert score.value is None and score.error == "no tasks"


def test_a_plain_class_over_rewards_is_a_metric():
    @register_metric("best_reward")
    class Best:
        def compute(self, task_rewards):
            return max(max(rewards) for rewards in task_rewards)

    assert as_metric(metrics.build("best_reward", {}))([task(0.25), task(0.5)]) == 0.5
    assert Best.name == "best_reward"


def test_a_plain_class_over_predictions_is_a_metric():
    @register_metric("share_silent")
    class Silent:
        def compute(self, *, predictions, targets):
            return sum(p == "I cannot" for p in predictions) / len(targets)

    assert as_metric(metrics.build("share_silent", {}))([task(1.0), task(0.0)]) == 0.5
