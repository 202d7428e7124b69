"""Advantages and token weights, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from evsys_sdk.training.advantages import (
    ADVANTAGES,
    USUAL_NORMALISATION,
    centred,
    differences,
    dr_grpo,
    grpo,
    is_constant,
    kl_penalty,
    mean_of,
    reward_alone,
    rloo,
    token_weights,
)

REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0]  # mean 0.6, sample variance 0.3


def test_centred_is_the_distance_from_the_groups_mean():
    assert centred(REWARDS) == pytest.approx([0.4, -0.6, -0.6, 0.4, 0.4])


def test_grpo_also_divides_by_the_sample_deviation():
    spread = math.sqrt(0.3) + 1e-4
    assert grpo(REWARDS) == pytest.approx([0.4 / spread, -0.6 / spread, -0.6 / spread, 0.4 / spread, 0.4 / spread])


def test_grpo_of_equal_rewards_is_zero_not_a_division_by_zero():
    assert grpo([0.5, 0.5]) == [0.0, 0.0] and grpo([1.0]) == [0.0]


def test_dr_grpo_leaves_the_deviation_out():
    assert dr_grpo(REWARDS) == centred(REWARDS)
    assert USUAL_NORMALISATION["dr_grpo"] == "constant" and USUAL_NORMALISATION["grpo"] == "sequence"


def test_rloo_compares_with_the_mean_of_the_others():
    # others of the first: 0, 0, 1, 1 -> mean 0.5; others of the second: 1, 0, 1, 1 -> mean 0.75
    assert rloo(REWARDS) == pytest.approx([0.5, -0.75, -0.75, 0.5, 0.5])
    assert rloo([1.0]) == [0.0]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_advantages_of_a_group_add_up_to_nothing(name):
    assert sum(ADVANTAGES[name]([0.1, 0.7, 0.2, 3.0])) == pytest.approx(0.0, abs=1e-9)


def test_a_group_of_one_is_plain_reinforce():
    assert reward_alone([0.7]) == [0.7]


def test_a_constant_group_has_one_reward():
    assert is_constant([0.5, 0.5]) and is_constant([1.0]) and not is_constant([0.5, 0.5, 0.6])


def test_token_weights_let_tokens_rollouts_or_neither_count_the_same():
    lengths = [1, 3]
    assert token_weights(lengths, "token", asked=4, max_tokens=10) == [0.25, 0.25]
    assert token_weights(lengths, "sequence", asked=4, max_tokens=10) == pytest.approx([0.5, 0.5 / 3])
    assert token_weights(lengths, "constant", asked=4, max_tokens=10) == [0.025, 0.025]
    assert token_weights([1], "constant", asked=4, max_tokens=10) == [0.025]  # whatever became of the others


@pytest.mark.parametrize("how", ["token", "sequence"])
def test_all_weight_of_a_batch_is_one(how):
    lengths = [2, 5, 9]
    weights = token_weights(lengths, how, asked=4, max_tokens=10)
    assert sum(w * n for w, n in zip(weights, lengths, strict=True)) == pytest.approx(1.0)


def test_the_kl_penalty_is_what_a_token_drifts_less_than_the_average():
    drift = differences([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-4.0]])
    assert drift == [[0.5, 0.0], [1.0]] and mean_of(drift) == 0.5
    assert kl_penalty(drift, 0.2) == [[0.0, 0.1], [pytest.approx(-0.1)]]
    assert kl_penalty(drift, 0.2, centre=False) == [[-0.1, 0.0], [-0.2]]


def test_lists_of_unequal_length_are_an_error_not_a_shorter_result():
    with pytest.raises(ValueError):
        differences([[1.0, 2.0]], [[1.0]])


def test_the_mean_of_no_tokens_is_not_a_number():
    assert math.isnan(mean_of([[], []]))
