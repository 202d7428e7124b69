"""What may be trained on, and what it becomes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evsys_sdk.protocols import Rollout, Turn
from evsys_sdk.training.rollout_data import (
    entropy_of,
    gate,
    length_of,
    policy_datum,
    reason_to_drop,
    rollout_metrics,
    sampling_drift,
    soft_target_datum,
    with_failing_reward,
)
from evsys_sdk.training_api import ForwardBackwardOutput


def _turn(prompt=(1, 2, 3), completion=(4, 5), logprobs=(-0.5, -1.0)):
    return Turn(prompt_tokens=[*prompt], completion_tokens=[*completion], logprobs=[*logprobs], text="?")


def _rollout(*turns, reward=1.0, **fields):
    return Rollout(task_id="t", turns=[*turns] or [_turn()], reward=reward, **fields)


@pytest.mark.parametrize(
    ("rollout", "reason"),
    [
        (_rollout(), None),
        (_rollout(reward=0.0), None),
        (_rollout(status="timeout"), None),
        (_rollout(status="timeout", reward=None), "no_reward"),
        (_rollout(status="infra_error", reward=None), "infra_error"),
        (_rollout(status="agent_error"), None),
        (Rollout(task_id="t", status="agent_error", reward=0.0), None),
        (Rollout(task_id="t", status="timeout", reward=0.0), None),
        (Rollout(task_id="t", status="agent_error", reward=None), "no_reward"),
        (Rollout(task_id="t", status="infra_error", reward=0.0), "infra_error"),
        (_rollout(status="cancelled"), "cancelled"),
        (_rollout(reward=None), "no_reward"),
        (_rollout(reward=math.nan), "no_reward"),
        (_rollout(reward=math.inf), "no_reward"),
        (_rollout(_turn(completion=(), logprobs=())), None),
        (_rollout(_turn(completion=(), logprobs=()), status="agent_error"), None),
        (_rollout(_turn(prompt=()), status="agent_error"), "no_tokens"),
        (_rollout(_turn(prompt=())), "no_tokens"),
        (_rollout(_turn(), _turn(logprobs=(-0.5,))), "unequal_lengths"),
        (_rollout(_turn(logprobs=(-0.5, math.nan))), "bad_logprobs"),
        (_rollout(_turn(logprobs=(-0.5, -math.inf))), "bad_logprobs"),
    ],
)
def test_a_rollout_passes_only_when_it_is_whole(rollout, reason):
    assert reason_to_drop(rollout) == reason


def test_a_rollout_without_turns_has_no_tokens():
    assert reason_to_drop(Rollout(task_id="t", reward=1.0)) == "no_tokens"


def test_a_reward_is_asked_for_only_where_it_is_used():
    assert reason_to_drop(_rollout(reward=None), rewards=False) is None


@pytest.mark.parametrize("status", ["ok", "agent_error", "timeout"])
def test_without_rewards_nothing_can_be_learnt_from_a_rollout_that_wrote_nothing(status):
    silent = _rollout(_turn(completion=(), logprobs=()), status=status)
    assert reason_to_drop(silent, rewards=False) == "no_tokens"


def test_rollouts_without_tokens_have_rewards_and_no_length_or_entropy():
    silent = Rollout(task_id="t", status="agent_error", reward=0.0)
    groups = [[_rollout(), silent], [silent, silent]]
    metrics = rollout_metrics(groups, gate(groups))
    assert metrics["reward/mean"] == 0.25 and metrics["rollouts_dropped"] == 0 and metrics["failed/agent_error"] == 3
    assert metrics["rollouts_without_tokens"] == 3 and metrics["groups_without_tokens"] == 1
    assert metrics["completion_tokens"] == 2 and metrics["entropy"] == 0.75
    only = rollout_metrics(groups[1:], gate(groups[1:]))
    assert only["reward/mean"] == 0.0 and not {"completion_tokens", "entropy"} & set(only)
    assert "rollouts_without_tokens" not in rollout_metrics([[_rollout()]], gate([[_rollout()]]))


def test_the_gate_counts_each_drop_by_its_reason_and_forgets_empty_groups():
    bad = _rollout(status="infra_error", reward=None, error="lost")
    gated = gate([[_rollout(), bad], [bad, _rollout(reward=None)]])
    assert [len(group) for group in gated.groups] == [1]
    assert gated.dropped == {"infra_error": 2, "no_reward": 1} and gated.first_error == "lost"


@pytest.mark.parametrize(
    ("rollout", "reward"),
    [
        (_rollout(status="agent_error", reward=None), -1.0),
        (_rollout(status="timeout", reward=None), -1.0),
        (_rollout(status="timeout", reward=math.nan), -1.0),
        (_rollout(status="timeout", reward=0.5), 0.5),
        (_rollout(status="infra_error", reward=None), None),
        (_rollout(status="cancelled", reward=None), None),
        (_rollout(reward=None), None),
    ],
)
def test_only_what_the_model_did_wrong_gets_the_failing_reward(rollout, reward):
    assert with_failing_reward(rollout, -1.0).reward == reward


def test_reward_mean_is_over_all_rollouts_that_have_one_and_a_missing_one_is_no_zero():
    groups = [[_rollout(reward=1.0), _rollout(reward=0.5, status="timeout")], [_rollout(reward=None)]]
    metrics = rollout_metrics(groups, gate(groups))
    assert metrics["reward/mean"] == 0.75 and metrics["reward/std"] == 0.25
    assert metrics["rollouts"] == 3 and metrics["rollouts_dropped"] == 1
    assert metrics["failed/timeout"] == 1 and metrics["dropped/no_reward"] == 1
    assert metrics["entropy"] == 0.75 and metrics["completion_tokens"] == 2


def test_rollouts_that_all_failed_have_no_reward_at_all():
    groups = [[_rollout(reward=None, status="infra_error")]]
    assert "reward/mean" not in rollout_metrics(groups, gate(groups))


def test_a_policy_datum_is_shifted_and_only_written_tokens_pull():
    datum = policy_datum(_turn(), [0.7, 0.9])
    assert datum.model_input.tokens == (1, 2, 3, 4)
    inputs = {key: value.tolist() for key, value in datum.loss_fn_inputs.items()}
    assert inputs["target_tokens"] == [2, 3, 4, 5]
    assert inputs["logprobs"] == [0, 0, -0.5, -1.0]
    assert inputs["advantages"] == pytest.approx([0, 0, 0.7, 0.9])


def test_soft_targets_stand_where_the_answer_is_and_add_up_to_one():
    rows = [None, [(7, math.log(0.6)), (8, math.log(0.2))]]
    datum = soft_target_datum(_turn(), rows, 3)
    targets, weights = (datum.loss_fn_inputs[key].to_numpy() for key in ("target_tokens", "weights"))
    assert targets.shape == weights.shape == (4, 3) and targets.dtype == np.int64
    assert targets[3].tolist() == [7, 8, 0] and weights[3].tolist() == pytest.approx([0.75, 0.25, 0.0])
    assert not weights[:3].any(), "neither the prompt nor a skipped token pulls"


def test_more_than_k_targets_are_cut_to_the_best():
    row = [(token, math.log(0.2)) for token in range(5)]
    datum = soft_target_datum(_turn(), [row, row], 2)
    assert datum.loss_fn_inputs["weights"].to_numpy()[2].tolist() == pytest.approx([0.5, 0.5])


def test_entropy_is_that_of_the_normalised_distribution():
    assert entropy_of([(0, math.log(0.25)), (1, math.log(0.25))]) == pytest.approx(math.log(2))


def test_the_length_of_a_rollout_counts_all_turns():
    assert length_of(_rollout(_turn(), _turn(completion=(9,), logprobs=(-0.1,)))) == 3


def test_sampling_drift_looks_at_written_tokens_alone():
    data = [policy_datum(_turn(), [1.0, 1.0])]
    outputs = [ForwardBackwardOutput(metrics={}, logprobs=[[-9.0, -9.0, -0.7, -1.4]])]
    assert sampling_drift(data, outputs) == {"kl_sampling": pytest.approx(0.3)}
    assert sampling_drift([], []) == {}
