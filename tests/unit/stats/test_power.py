"""How many more tasks or seeds an undecided comparison needs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from evsys_sdk.stats.comparison import difference
from evsys_sdk.stats.intervals import Estimate, SeedVariance
from evsys_sdk.stats.power import PowerQuestion, expected_estimate, is_settled, more_of_both, more_seeds, more_tasks


def question(value, *, task=1.0, seed=0.0, noise=0.0, degrees=0, margin=0.0, n=100):
    seeds = SeedVariance(scatter=seed + noise / n, noise=noise / n, degrees=degrees)
    found = Estimate(
        value=value, centre=value, n_tasks=n, task_variance=task / n, task_degrees=n - 1,
        seeds=(seeds,) if degrees else (),
    )  # fmt: skip
    return PowerQuestion(estimate=found, margin=margin, alpha=0.05)


def test_the_number_of_tasks_is_the_textbooks():
    # (z(0.975) + z(0.8))^2 / 0.2^2 = 196.2 tasks; Student's t asks for two more
    assert more_tasks(question(0.2)) in (98, 99, 100)


def test_a_smaller_difference_needs_more_tasks():
    assert more_tasks(question(0.05)) > 10 * more_tasks(question(0.2))


def test_no_difference_at_all_is_settled_by_showing_that_it_is_small():
    needed = 100 + more_tasks(question(0.0, margin=0.1))
    assert needed == pytest.approx(((stats.norm.ppf(0.95) + stats.norm.ppf(0.8)) / 0.1) ** 2, rel=0.02)


def test_when_seeds_are_what_differs_no_number_of_tasks_helps_and_more_seeds_do():
    asked = question(0.2, task=0.1, seed=0.03, noise=0.1, degrees=4)
    assert more_tasks(asked) is None
    assert 1 <= more_seeds(asked, 3) <= 30


def test_a_single_seed_does_not_tell_how_many_would_do():
    assert more_seeds(question(0.2), 1) is None


def test_what_cannot_be_estimated_cannot_be_planned():
    found = Estimate(value=1.0, centre=1.0, n_tasks=1)
    assert not is_settled(PowerQuestion(estimate=found, margin=1.0, alpha=0.05))


def test_the_promise_is_kept_four_times_in_five():
    chance = np.random.default_rng(0)
    first, second = chance.normal(0.15, 1, (1, 60)), chance.normal(0, 1, (1, 60))
    found = difference(first, second, unit=False)
    n = 60 + more_tasks(PowerQuestion(estimate=found, margin=0.0, alpha=0.05))
    spread = math.sqrt(found.task_variance * 60)
    deltas = found.value + spread * chance.standard_normal((2000, n))
    p = stats.ttest_1samp(deltas, 0.0, axis=1).pvalue
    assert 0.77 <= (p < 0.05).mean() <= 0.83


def test_with_nothing_added_the_plan_is_the_estimate():
    chance = np.random.default_rng(1)
    quiet, loud = chance.normal(0, 1, (2, 50)), chance.normal(0, 1, (2, 50)) + np.array([[0.9], [-0.9]])
    found = difference(loud, quiet, unit=False)
    plan = expected_estimate(found, 50, 1.0)
    assert (plan.error, plan.critical(0.025)) == pytest.approx((found.error, found.critical(0.025)))


def test_twice_the_tasks_halve_their_part_and_twice_the_seeds_halve_the_others():
    found = question(0.2, task=4.0, seed=0.5, noise=1.0, degrees=4).estimate
    assert expected_estimate(found, 200, 1.0).variance == pytest.approx(4.0 / 200 + 0.5)
    assert expected_estimate(found, 100, 2.0).variance == pytest.approx(3.0 / 100 + 0.25 + 1.0 / 200)


def test_where_neither_helps_alone_both_together_do():
    """Noise of tasks and of seeds, each alone too much for the difference."""
    found = Estimate(
        value=0.03, n_tasks=50, centre=0.03, task_variance=0.0009, task_degrees=49,
        seeds=(SeedVariance(scatter=0.0009, noise=0.0, degrees=2),),
    )  # fmt: skip
    asked = PowerQuestion(estimate=found, margin=0.0, alpha=0.05)
    assert more_tasks(asked) is None and more_seeds(asked, 3) is None
    tasks, seeds = more_of_both(asked, 3)
    times = 1 + tasks // 50
    assert (tasks, seeds) == (50 * (times - 1), 3 * (times - 1)) and times > 2
    assert is_settled(asked, tasks=50 * times, times=times)
    assert not is_settled(asked, tasks=50 * (times - 1), times=times - 1)
