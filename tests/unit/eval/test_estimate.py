"""What a mean and its parts of variance come to: an error, an interval, a p-value that say the same."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from evsys_sdk.eval.estimate import Estimate

TASKS = Estimate(value=0.1, centre=0.1, n_tasks=30, task_variance=0.0025, task_degrees=29)
BOTH = replace(TASKS, seed_scatter=0.0075, seed_noise=0.001, seed_degrees=3)


def test_tasks_alone_are_students():
    assert TASKS.error == pytest.approx(0.05)
    assert TASKS.critical(0.025) == pytest.approx(stats.t.ppf(0.975, 29), abs=1e-9)
    assert TASKS.p_value() == pytest.approx(2 * stats.t.sf(2.0, 29), abs=1e-9)


def test_the_noise_that_tasks_and_seeds_have_in_common_counts_once():
    assert BOTH.variance == pytest.approx(0.0025 - 0.001 + 0.0075)


@pytest.mark.parametrize("degrees", [1, 1.3, 2, 4, 12])
def test_seeds_alone_are_students_with_their_own_degrees(degrees):
    bare = replace(TASKS, task_variance=0.0, seed_scatter=0.0025, seed_degrees=degrees)
    nearly = replace(bare, task_variance=1e-12, seed_noise=1e-12)
    for found in (bare, nearly):  # the second goes through the integral over the seeds' variance
        for distance in (0.05, 0.2, 1.0, 2.0):
            theirs = stats.t.sf(distance / 0.05, degrees)
            assert found.beyond(distance) == pytest.approx(theirs, rel=1e-4, abs=1e-7)
        assert found.critical(0.025) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-4)


def test_tasks_and_seeds_are_averaged_over_what_the_seeds_variance_may_be():
    # The seeds' variance is 3 * 0.0075 / chi-squared(3), at least the noise; the tasks add 0.0015 that is known.
    draws = stats.chi2(3).ppf((np.arange(400_000) + 0.5) / 400_000)
    variance = np.maximum(3 * 0.0075 / draws, 0.001) + 0.0015
    theirs = stats.t.sf(0.3 / np.sqrt(variance), 29 * (variance / 0.0025) ** 2).mean()
    assert BOTH.beyond(0.3) == pytest.approx(theirs, rel=1e-4)


def test_p_is_never_below_what_the_tasks_alone_say_nor_what_the_seeds_alone_do():
    for distance in (0.05, 0.1, 0.2, 0.4):
        alone = stats.t.sf(distance / math.sqrt(BOTH.seed_scatter), BOTH.seed_degrees)
        assert BOTH.beyond(distance) >= max(TASKS.beyond(distance), alone)


def test_p_values_are_the_levels_at_which_intervals_touch():
    assert BOTH.interval(1 - BOTH.p_value())[0] == pytest.approx(0.0, abs=1e-9)
    far = replace(BOTH, value=40.0, centre=40.0)
    assert 0.0 < far.p_value() < 1e-6 and far.interval(1 - far.p_value())[0] == pytest.approx(0.0, abs=1e-3)


def test_equivalence_is_one_sided_and_more_than_a_half_outside_the_margin():
    assert BOTH.p_equivalent(0.1) == pytest.approx(0.5)
    inside, outside = BOTH.p_equivalent(0.3), BOTH.p_equivalent(-0.1)
    assert inside < 0.5 and outside == pytest.approx(1 - inside)


def test_seeds_that_agree_by_chance_are_no_proof_that_seeds_do_not_matter():
    lucky = replace(BOTH, seed_scatter=0.0002)
    assert lucky.variance == TASKS.variance and lucky.critical(0.025) > TASKS.critical(0.025)
    many = replace(lucky, seed_degrees=200)
    assert many.critical(0.025) == pytest.approx(TASKS.critical(0.025), rel=1e-3)


def test_the_width_grows_without_jumps_as_seeds_scatter_more():
    widths = []
    for thousandth in range(1, 4000, 20):
        found = replace(BOTH, seed_scatter=BOTH.seed_noise * thousandth / 1000)
        widths.append(found.critical(0.025) * found.error)
    steps = [later - earlier for earlier, later in pairwise(widths)]
    assert min(steps) >= -1e-9 and max(steps) < 0.01


def test_without_scatter_there_is_no_error_no_interval_and_no_p_value():
    found = replace(TASKS, task_variance=0.0)
    assert found.error is None and found.interval() is None
    assert found.p_value() is None and found.p_equivalent(1.0) is None


def test_an_interval_stays_where_values_can_be():
    found = replace(TASKS, centre=0.99, bounds=(-1.0, 1.0), task_degrees=math.inf)
    assert found.interval() == pytest.approx((0.99 - 1.959963984540054 * 0.05, 1.0))
