"""How many more tasks or seeds an undecided comparison needs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from evsys_sdk.eval.paired import Estimate, difference
from evsys_sdk.eval.power import Question, is_settled, more_seeds, more_tasks, planned_error


def question(value, *, task=1.0, seed=0.0, noise=0.0, degrees=0, margin=0.0, n=100):
    found = Estimate(
        value=value, centre=value, n_tasks=n, task_variance=task / n, seed_variance=seed, noise_variance=noise / n,
        seed_degrees=degrees, error=math.sqrt(task / n + seed),
    )  # fmt: skip
    return Question(estimate=found, margin=margin, alpha=0.05)


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
    assert not is_settled(Question(estimate=found, margin=1.0, alpha=0.05))


def test_the_promise_is_kept_four_times_in_five():
    chance = np.random.default_rng(0)
    first, second = chance.normal(0.15, 1, (1, 60)), chance.normal(0, 1, (1, 60))
    found = difference(first, second, unit=False)
    n = 60 + more_tasks(Question(estimate=found, margin=0.0, alpha=0.05))
    spread = math.sqrt(found.task_variance * 60)
    deltas = found.value + spread * chance.standard_normal((2000, n))
    p = stats.ttest_1samp(deltas, 0.0, axis=1).pvalue
    assert 0.77 <= (p < 0.05).mean() <= 0.83


def test_with_nothing_added_the_plan_has_the_error_of_the_estimate():
    chance = np.random.default_rng(1)
    quiet, loud = chance.normal(0, 1, (2, 50)), chance.normal(0, 1, (2, 50)) + np.array([[0.9], [-0.9]])
    found = difference(loud, quiet, unit=False)
    assert planned_error(found, 50, 1.0) == pytest.approx((found.error, found.degrees), rel=0.01)
