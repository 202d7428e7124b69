"""What a mean and its parts of variance come to: an error, an interval, a p-value that say the same."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from evsys_sdk.stats.intervals import Estimate, SeedVariance

TASKS = Estimate(value=0.1, centre=0.1, n_tasks=30, task_variance=0.0025, task_degrees=29)
SEEDS = SeedVariance(scatter=0.0075, noise=0.001, degrees=3)
BOTH = replace(TASKS, seeds=(SEEDS,))


def test_tasks_alone_are_students():
    assert TASKS.error == pytest.approx(0.05)
    assert TASKS.critical(0.025) == pytest.approx(stats.t.ppf(0.975, 29), abs=1e-9)
    assert TASKS.p_value() == pytest.approx(2 * stats.t.sf(2.0, 29), abs=1e-9)


def test_the_noise_that_tasks_and_seeds_have_in_common_counts_once():
    assert BOTH.variance == pytest.approx(0.0025 - 0.001 + 0.0075)


@pytest.mark.parametrize("degrees", [1, 1.3, 2, 4, 12])
def test_seeds_alone_are_students_with_their_own_degrees(degrees):
    seeds = SeedVariance(scatter=0.0025, noise=0.0, degrees=degrees)
    bare = replace(TASKS, task_variance=0.0, seeds=(seeds,))
    nearly = replace(bare, task_variance=1e-12, seeds=(replace(seeds, noise=1e-12),))
    for found in (bare, nearly):  # the second goes through the integral over the seeds' variance
        for distance in (0.05, 0.2, 1.0, 2.0):
            theirs = stats.t.sf(distance / 0.05, degrees)
            assert found.beyond(distance) == pytest.approx(theirs, rel=1e-4, abs=1e-7)
        assert found.critical(0.025) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-4)


@pytest.mark.parametrize(("degrees", "variances"), [((1, 4), (1.0, 1.0)), ((1, 2), (100.0, 1.0)), ((4, 2), (1.0, 9.0))])
def test_seeds_of_two_arms_alone_are_behrens_and_fishers_test(degrees, variances):
    # The distribution of a T(d1) + b T(d2), by its integral over the first
    places = np.tan((np.arange(400_000) + 0.5) / 400_000 * np.pi - np.pi / 2)
    density = stats.t.pdf(places, degrees[0]) * (1 + places**2) * np.pi / 400_000
    parts = zip(variances, degrees, strict=True)
    seeds = tuple(SeedVariance(scatter=variance, noise=0.0, degrees=degree) for variance, degree in parts)
    found = replace(TASKS, task_variance=0.0, seeds=seeds)
    for distance in (0.5, 2.0, 8.0, 40.0):
        others = stats.t.sf((distance - math.sqrt(variances[0]) * places) / math.sqrt(variances[1]), degrees[1])
        assert found.beyond(distance) == pytest.approx(float(density @ others), rel=1e-3, abs=1e-6)


def test_where_an_arm_has_one_seed_among_arms_with_several_nothing_is_known_of_the_error():
    found = replace(BOTH, is_seed_variance_unknown=True)
    assert found.error is None and found.interval() is None
    assert found.p_value() is None and found.p_equivalent(1.0) is None


def test_tasks_and_seeds_are_averaged_over_what_the_seeds_variance_may_be():
    # The seeds' variance is 3 * 0.0075 / chi-squared(3), at least the noise; the tasks add 0.0015 that is known.
    draws = stats.chi2(3).ppf((np.arange(400_000) + 0.5) / 400_000)
    variance = np.maximum(3 * 0.0075 / draws, 0.001) + 0.0015
    theirs = stats.t.sf(0.3 / np.sqrt(variance), 29 * (variance / 0.0025) ** 2).mean()
    assert BOTH.beyond(0.3) == pytest.approx(theirs, rel=1e-4)


def test_p_is_never_below_what_the_tasks_alone_say_nor_what_the_seeds_alone_do():
    for distance in (0.05, 0.1, 0.2, 0.4):
        alone = stats.t.sf(distance / math.sqrt(SEEDS.scatter), SEEDS.degrees)
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
    lucky = replace(BOTH, seeds=(replace(SEEDS, scatter=0.0002),))
    assert lucky.variance == TASKS.variance and lucky.critical(0.025) > TASKS.critical(0.025)
    many = replace(lucky, seeds=(replace(SEEDS, scatter=0.0002, degrees=200),))
    assert many.critical(0.025) == pytest.approx(TASKS.critical(0.025), rel=1e-3)


def test_the_width_grows_without_jumps_as_seeds_scatter_more():
    widths = []
    for thousandth in range(1, 4000, 20):
        found = replace(BOTH, seeds=(replace(SEEDS, scatter=SEEDS.noise * thousandth / 1000),))
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


@pytest.mark.parametrize("unit", [1e-140, 1e-100, 1e-30, 1e30, 1e100])
def test_intervals_and_p_values_do_not_depend_on_the_unit(unit):
    two = (SEEDS, SeedVariance(scatter=0.002, noise=0.001, degrees=1))
    for found in (BOTH, replace(BOTH, seeds=two)):
        parts = [
            SeedVariance(scatter=part.scatter * unit**2, noise=part.noise * unit**2, degrees=part.degrees)
            for part in found.seeds
        ]
        scaled = replace(
            found, value=0.1 * unit, centre=0.1 * unit, task_variance=found.task_variance * unit**2, seeds=tuple(parts)
        )
        assert scaled.p_value() == pytest.approx(found.p_value(), rel=1e-6)
        assert scaled.interval() == pytest.approx([end * unit for end in found.interval()], rel=1e-6)
