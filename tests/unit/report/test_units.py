"""Seconds, dollars and tokens are written with their unit, and never as points or as numbers alone."""

from __future__ import annotations

import re

import pytest

from evsys_sdk import registry
from evsys_sdk.eval.scoring import is_share, score_one
from evsys_sdk.format import benchmark_score_text, score_text, shown
from evsys_sdk.protocols import Rollout, Score, TaskScores
from evsys_sdk.report.verdict_text import verdict_lines
from evsys_sdk.stats.arm_scores import ArmScores
from evsys_sdk.stats.judge import judge_arms


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.25, "s", "1.250 s"),
        (0.0004, "s", "0.0004 s"),
        (1204.3, "tokens", "1,204 tokens"),
        (30.0, "tokens", "30 tokens"),
        (30.5, "tokens", "30.5 tokens"),
        (0.0031, "USD", "0.0031 USD"),
        (0.000012, "USD", "0.0000120 USD"),
        (0.0, "USD", "0.0000 USD"),
        (0.938, "", "0.938"),
    ],
)
def test_a_number_is_written_as_its_unit_is_read(value, unit, text):
    assert shown(value, unit=unit) == text


def test_the_interval_of_a_score_is_in_the_unit_of_its_value():
    assert score_text(1.25, 1.1, 1.4, unit="s", counts=["3 tasks"]) == "1.250 [1.100, 1.400] s, 3 tasks"
    score = Score(metric="tokens", value=1500.0, low=1400.0, high=1600.0, n_tasks=3, n_rollouts=3, unit="tokens")
    assert benchmark_score_text(score) == "1,500 [1,400, 1,600] tokens, 3 tasks"


@pytest.mark.parametrize(("name", "unit"), [("latency", "s"), ("cost", "USD"), ("tokens", "tokens"), ("pass@1", "")])
def test_a_score_carries_the_unit_of_its_metric(name, unit):
    rollouts = [Rollout(task_id=str(n), reward=1.0, seconds=2.0) for n in range(3)]
    tasks = [TaskScores(task_id=one.task_id, rewards=[1.0], predictions=[""], rollouts=[one]) for one in rollouts]
    assert score_one(name, registry.metrics.build(name, {}), tasks).unit == unit


def test_a_metric_of_a_project_that_names_a_unit_is_no_share():
    class Wait:
        unit = "s"

        def compute(self, task_rewards):
            return 0.5

    assert not is_share(Wait())


def test_a_difference_of_seconds_is_told_in_seconds():
    slow = {f"t{n}": 0.5 + n / 1000 for n in range(40)}
    quick = {task: value - 0.2 - (index % 3) / 100 for index, (task, value) in enumerate(slow.items())}
    arms = [ArmScores(arm="slow", seeds={1: slow}), ArmScores(arm="quick", seeds={1: quick})]
    lines = verdict_lines(judge_arms(arms, metric="latency", mode="min", share=False, unit="s"))
    text = "\n".join(lines)
    assert lines[0].startswith("Best arm by latency: quick, 0.210 s below slow (95 % CI 0.207 to 0.212; p < 0.001")
    assert "quick scored 0.310 s, the lowest of 2 scored arms" in text
    assert re.search(r"^slow: 0\.5\d\d \[0\.5\d\d, 0\.5\d\d\] s, 40 tasks", text, re.MULTILINE)
    assert "points" not in text


def test_the_same_tokens_everywhere_are_called_tokens():
    values = {f"t{n}": 30.0 for n in range(5)}
    arms = [ArmScores(arm="a", seeds={1: values}), ArmScores(arm="b", seeds={1: values})]
    lines = verdict_lines(judge_arms(arms, metric="tokens", mode="min", share=False, unit="tokens"))
    assert lines[0].startswith("Every arm scored 30 tokens on every task")
