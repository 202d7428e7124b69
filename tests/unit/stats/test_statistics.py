"""Intervals agree with scipy's closed forms, and behave where closed forms end."""

from __future__ import annotations

import random
from statistics import fmean, median, stdev

import numpy as np
import pytest

from evsys_sdk.stats.arm_scores import ArmScores
from evsys_sdk.stats.comparison import interval
from evsys_sdk.stats.intervals import jackknife_interval, mean_interval, wilson_around, wilson_interval
from evsys_sdk.stats.judge import judge_arms

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize(("yes", "n"), [(0, 2), (1, 2), (2, 2), (0, 50), (7, 10), (50, 50), (333, 1000), (1, 10**6)])
def test_wilson_is_scipys_to_nine_digits(yes, n):
    theirs = stats.binomtest(yes, n).proportion_ci(confidence_level=0.95, method="wilson")
    assert wilson_interval(yes, n) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


@pytest.mark.parametrize(("share", "n"), [(1 - 2e-13, 7), (1 - 1e-16, 7), (1e-13, 7), (1e-16, 40)])
def test_wilson_stays_between_0_and_1_next_to_its_ends(share, n):
    low, high = wilson_around(share, n, 1.959963984540054)
    assert 0.0 <= low < high <= 1.0


@pytest.mark.filterwarnings("error")
def test_a_mean_of_values_that_cannot_be_squared_has_no_interval():
    assert interval(fmean, [1e300, 0.5, -3.0], share=False) is None
    assert interval(fmean, [1e60, 0.5, -3.0], share=False) is not None


def normal(n: int, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [chance.gauss(0.4, 0.3) for _ in range(n)]


def t_interval(values: list[float]) -> tuple[float, float]:
    n = len(values)
    return stats.t.interval(0.95, n - 1, loc=fmean(values), scale=stdev(values) / n**0.5)


@pytest.mark.parametrize("n", [2, 3, 17, 200, 1001])
def test_a_mean_gets_students_interval_to_nine_digits(n):
    assert mean_interval(normal(n)) == pytest.approx(t_interval(normal(n)), abs=1e-9)
    assert interval(fmean, normal(n)) == pytest.approx(t_interval(normal(n)), abs=1e-9)


@pytest.mark.parametrize("n", [2, 17, 200])
def test_deleting_one_task_at_a_time_is_exact_for_a_mean(n):
    assert jackknife_interval(fmean, normal(n)) == pytest.approx(t_interval(normal(n)), abs=1e-9)


def test_a_jackknife_over_unequal_groups_is_near_the_exact_interval():
    values = normal(1130)
    exact, grouped = t_interval(values), jackknife_interval(fmean, values)
    assert grouped[1] - grouped[0] == pytest.approx(exact[1] - exact[0], rel=0.15)
    assert sum(grouped) / 2 == pytest.approx(fmean(values), abs=1e-12)


def test_a_jackknife_takes_at_most_two_hundred_looks():
    looks = []

    def counted(values):
        looks.append(len(values))
        return fmean(values)

    jackknife_interval(counted, normal(950))
    assert len(looks) == 201


def test_a_jackknife_of_a_ratio_agrees_with_the_delta_method():
    chance = random.Random(1)
    pairs = [(chance.gauss(4, 1), chance.gauss(2, 0.2)) for _ in range(150)]

    def ratio(rows):
        return sum(a for a, _ in rows) / sum(b for _, b in rows)

    r, n, mean_b = ratio(pairs), len(pairs), fmean(b for _, b in pairs)
    error = stdev([a - r * b for a, b in pairs]) / (mean_b * n**0.5)
    low, high = interval(ratio, pairs)
    assert (high - low) / 2 == pytest.approx(stats.t.ppf(0.975, n - 1) * error, rel=0.02)


def test_yes_or_no_tasks_get_wilsons_interval_and_shares_one_of_as_many_answers_as_they_are_worth():
    assert interval(fmean, [1.0, 0.0, 1.0, 1.0]) == pytest.approx(wilson_interval(3, 4), abs=1e-12)
    parts = [1.0, 0.0, 0.5, 0.5] * 5
    # Variance 0.125 of single values, 0.25 of passes and failures: about twice as many answers, less what Student's t
    # with 19 degrees of freedom takes (Korn and Graubard 1998).
    worth = 0.25 / (0.125 / 19) * (1.959964 / 2.093024) ** 2
    assert interval(fmean, parts) == pytest.approx(wilson_around(0.5, worth, 1.959964), abs=1e-6)


def test_no_share_is_below_nothing_or_above_everything_and_tasks_that_agree_are_no_certainty():
    low, high = interval(fmean, [1.0, 1.0, 0.5, 1.0])
    assert 0.0 < low < 0.875 < high < 1.0
    assert interval(fmean, [3.0, 1.0, 2.5, 2.0]) == pytest.approx(mean_interval([3.0, 1.0, 2.5, 2.0]), abs=1e-12)
    low, high = mean_interval([3.0, 1.0, 0.5, 1.0])
    assert low < 0 and interval(fmean, [3.0, 1.0, 0.5, 1.0]) == (0.0, pytest.approx(high)), "no loss is negative"
    assert interval(fmean, [3.0, -1.0, 0.5])[0] < 0
    low, high = interval(fmean, [0.5] * 10)
    assert low < 0.3 and high > 0.7


@pytest.mark.parametrize("kind", ["passes", "shares", "seconds"])
def test_a_score_has_the_interval_that_a_verdict_gives_its_arm(kind):
    chance = np.random.default_rng(7)
    for tasks in (2, 5, 6, 40):
        values = {
            "passes": (chance.random(tasks) < 0.7).astype(float),
            "shares": chance.integers(0, 5, tasks) / 4,
            "seconds": chance.gamma(2.0, 10.0, tasks),
        }[kind].tolist()
        share = kind != "seconds"
        scores = ArmScores(arm="a", seeds={42: {f"t{i:02d}": value for i, value in enumerate(values)}})
        [arm] = judge_arms([scores], metric="m", share=share).arms
        assert (arm.low, arm.high) == interval(fmean, values, share=share), "one number has one interval"


def test_all_passes_do_not_make_a_certainty():
    low, high = interval(fmean, [1.0] * 10)
    assert (round(low, 3), high) == (0.722, 1.0)


def test_a_statistic_that_is_no_mean_is_not_taken_for_one():
    values = [0.0, 0.0, 0.0, 1.0, 1.0]
    assert interval(median, values) == jackknife_interval(median, values)


def test_a_median_that_no_single_task_moves_is_not_a_certainty():
    assert interval(median, [0.0, 0.1, 0.5, 0.5, 0.5, 0.9, 1.0]) is None


def test_a_statistic_without_a_value_on_one_task_still_has_an_interval():
    values = normal(30)
    assert interval(stdev, values) == jackknife_interval(stdev, values)


@pytest.mark.parametrize("values", [[], [1.0]])
def test_fewer_than_two_tasks_have_no_interval(values):
    assert interval(fmean, values) is None


def test_nineteen_of_twenty_intervals_hold_the_truth():
    chance = random.Random(3)
    hits = 0
    for _ in range(400):
        low, high = interval(fmean, [float(chance.random() < 0.3) for _ in range(40)])
        hits += low <= 0.3 <= high
    assert 0.92 <= hits / 400 <= 0.98
