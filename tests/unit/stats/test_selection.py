"""What looking at many arms costs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from evsys_sdk.stats.arm_scores import ArmScores
from evsys_sdk.stats.intervals import wilson_interval
from evsys_sdk.stats.judge import judge_arms
from evsys_sdk.stats.selection import holm, selected_score


def test_holm_is_statsmodels_to_nine_digits():
    # multipletests([...], method="holm") of statsmodels 0.15
    found = holm([0.001, 0.02, 0.04, 0.03, 0.5, 0.0125])
    assert found == pytest.approx([0.006, 0.08, 0.09, 0.09, 0.5, 0.0625], abs=1e-9)


def test_holm_is_the_closed_test_over_bonferroni():
    p = [0.2, 0.011, 0.004, 0.03]
    for index, corrected in enumerate(holm(p)):
        families = [f for size in range(1, 5) for f in itertools.combinations(range(4), size) if index in f]
        assert corrected == pytest.approx(max(min(1.0, len(f) * min(p[i] for i in f)) for f in families), abs=1e-12)


def test_a_test_that_could_not_be_made_counts_and_has_no_p_value():
    assert holm([None, 0.02, None]) == [None, pytest.approx(0.06), None]
    assert holm([]) == []


def test_an_arm_far_ahead_keeps_its_score():
    chance = np.random.default_rng(0)
    arms = [(chance.random((3, 80)) < share).astype(float) for share in (0.2, 0.9, 0.3)]
    assert selected_score(arms) == pytest.approx(arms[1].mean(), abs=1e-12)
    assert selected_score(arms, mode="min") == pytest.approx(arms[0].mean(), abs=0.03)


def test_the_same_values_give_the_same_score_again():
    chance = np.random.default_rng(1)
    arms = [(chance.random((2, 30)) < 0.5).astype(float) for _ in range(4)]
    assert selected_score(arms) == selected_score(arms)


def test_equal_arms_share_the_pick():
    same = (np.random.default_rng(2).random((1, 60)) < 0.5).astype(float)
    assert selected_score([same, same, same]) == pytest.approx(same.mean(), abs=1e-12)


def test_two_tasks_are_the_least():
    assert selected_score([np.ones((1, 1)), np.zeros((1, 1))]) is None
    assert selected_score([np.ones((1, 2)), np.zeros((1, 2))]) == 1.0


def test_two_arms_that_tie_on_other_tasks_keep_their_score_and_its_interval():
    """It was 0.362 [0.178, 0.716]: below every arm, and outside of the arm's own interval."""
    first = np.array([[1.0, 0.0] * 10])
    found = judge_arms(
        [
            ArmScores(arm=name, seeds={0: {f"t{t:02d}": float(v) for t, v in enumerate(row[0])}})
            for name, row in (("a", first), ("b", 1 - first))
        ],
        metric="pass@1",
    )
    assert found.winner.expected == found.winner.observed == 0.5
    assert (found.winner.low, found.winner.high) == pytest.approx((found.arms[0].low, found.arms[0].high))


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize(
    "others",
    [
        [(0.15, 0.9)],
        [(0.5, 0.7), (0.8, 0.45), (0.9, 0.075), (0.0, 0.4)],
        [(0.2, 1.0), (0.1, 0.9)],
        [(0.5, 0.6), (0.1, 0.5), (0.0, 0.9)],
    ],
)
def test_wild_arms_do_not_take_a_calm_one_below_what_its_own_tasks_allow(others, mode):
    """Of two seeds at .800 and .825 it made 0.41 to 0.53, below the baseline at .6."""
    arms = [
        ArmScores(
            arm=f"a{i}", seeds={s: {f"t{t:02d}": turn(t < p * 40) for t in range(40)} for s, p in enumerate(shares)}
        )
        for turn in [(lambda passed: float(passed == (mode == "max")))]
        for i, shares in enumerate([*others, (0.8, 0.825)])
    ]
    winner = judge_arms(arms, metric="pass@1", mode=mode).winner
    low, _ = wilson_interval(32, 40)
    expected = winner.expected if mode == "max" else 1 - winner.expected
    assert winner.arm == f"a{len(others)}" and expected >= low - 1e-9


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_a_corrected_score_lies_between_the_worst_arm_and_the_arms_own_score(mode, seeds):
    chance = np.random.default_rng(7)
    for _ in range(60):
        n_arms = int(chance.integers(2, 7))
        share = np.clip(0.6 + chance.normal(0, 0.1, (n_arms, seeds, 1)), 0, 1)
        values = (chance.random((n_arms, seeds, 40)) < share).astype(float)
        arms = [
            ArmScores(
                arm=f"a{i}",
                seeds={s: {f"t{t:02d}": float(v) for t, v in enumerate(row)} for s, row in enumerate(arm)},
            )
            for i, arm in enumerate(values)
        ]
        winner = judge_arms(arms, metric="pass@1", mode=mode).winner
        means = values.mean(axis=(1, 2))
        best, worst = (means.max(), means.min()) if mode == "max" else (means.min(), means.max())
        low, high = sorted([best, worst])
        assert winner.observed == pytest.approx(best) and low - 1e-12 <= winner.expected <= high + 1e-12


@pytest.mark.parametrize(("seeds", "luck"), [(1, 0.0), (2, 0.05), (3, 0.05), (3, 0.12), (5, 0.1)])
def test_of_six_equal_arms_the_picked_one_is_not_flattered(seeds, luck):
    chance = np.random.default_rng(3)
    highest, corrected = [], []
    for _ in range(800):
        share = 0.7 + chance.normal(0, luck, (6, seeds, 1))
        values = (chance.random((6, seeds, 100)) < share).astype(float)
        highest.append(values.mean(axis=(1, 2)).max())
        corrected.append(selected_score(list(values)))
    assert np.mean(highest) - 0.7 > 0.03
    assert abs(np.mean(corrected) - 0.7) <= 0.005


def test_lower_is_better_is_corrected_upwards():
    chance = np.random.default_rng(4)
    values = [chance.normal(100, 10, (400, 1, 50)) for _ in range(6)]
    lowest = np.mean([min(arm[i].mean() for arm in values) for i in range(400)])
    corrected = np.mean([selected_score([arm[i] for arm in values], mode="min") for i in range(400)])
    assert lowest < 98.5 and abs(corrected - 100) < 0.3


def test_an_arm_that_is_really_ahead_is_not_sold_far_short():
    chance = np.random.default_rng(6)
    share = np.array([0.6, 0.6, 0.6, 0.6, 0.6, 0.7])[:, None, None]
    missed = []
    for _ in range(600):
        values = (chance.random((6, 1, 200)) < share).astype(float)
        top = int(values.mean(axis=(1, 2)).argmax())
        missed.append(selected_score(list(values)) - share[top, 0, 0])
    assert abs(np.mean(missed)) < 0.01


def test_a_lucky_seed_of_another_arm_does_not_cost_the_winner_its_score():
    chance, misses = np.random.default_rng(3), []
    while len(misses) < 60:
        easy = chance.beta(2, 2, 100) * 0.6 + 0.1
        raised = [[0, 0, 0], [0.2, 0.2, 0.2], [0.45, 0, 0], [0, 0, 0]]
        arms = [np.array([chance.random(100) < np.clip(easy + by, 0, 1) for by in arm], dtype=float) for arm in raised]
        if max(range(4), key=lambda index: arms[index].mean()) == 1:
            misses.append(selected_score(arms) - np.clip(easy + 0.2, 0, 1).mean())
    assert abs(np.mean(misses)) < 0.015, "it was 0.08 when the lucky arm was picked by two of its seeds"


def test_a_lone_seed_among_arms_with_several_does_not_flatter_itself():
    chance, corrected = np.random.default_rng(8), []
    for _ in range(600):
        arms = [
            (chance.random((seeds, 100)) < 0.5 + chance.normal(0, 0.08, (seeds, 1))).astype(float)
            for seeds in (1, 3, 3, 1, 3, 3)
        ]
        corrected.append(selected_score(arms))
    assert abs(np.mean(corrected) - 0.5) <= 0.01, "its luck is split off by noise of the size that other seeds have"
