"""Means and differences: equal to closed forms, honest where these end, and their intervals right in 95 of 100."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from evsys_sdk.stats.comparison import arm_interval, arm_mean, difference, pooled_spread, seed_spread
from evsys_sdk.stats.intervals import wilson_around, wilson_interval
from evsys_sdk.stats.selection import penalty_of_look

A = np.array([[0.1, 0.4, 0.35, 0.8, 0.66, 0.2, 0.9, 0.55]])
B = np.array([[0.12, 0.3, 0.35, 0.7, 0.7, 0.1, 0.85, 0.6]])


def test_one_seed_each_is_students_paired_test_to_nine_digits():
    found, theirs = difference(A, B, unit=False), stats.ttest_rel(A[0], B[0])
    assert found.p_value() == pytest.approx(theirs.pvalue, abs=1e-9)
    assert found.interval() == pytest.approx(tuple(theirs.confidence_interval(0.95)), abs=1e-9)
    # and what statsmodels 0.15 says to the same numbers
    assert found.p_value() == pytest.approx(0.23460891530891367, abs=1e-9)
    assert found.interval() == pytest.approx((-0.024547676716005835, 0.08454767671600591), abs=1e-9)


def test_equivalence_is_two_one_sided_tests_to_nine_digits():
    deltas = A[0] - B[0]
    low = stats.ttest_1samp(deltas, -0.1, alternative="greater").pvalue
    high = stats.ttest_1samp(deltas, 0.1, alternative="less").pvalue
    found = difference(A, B, unit=False).p_equivalent(0.1)
    assert found == pytest.approx(max(low, high), abs=1e-9)
    assert found == pytest.approx(0.009497123644154441, abs=1e-9)  # statsmodels' ttost_paired


def test_the_spread_of_seeds_comes_from_the_mean_squares_of_a_two_way_analysis():
    values = np.array([[0.2, 0.5, 0.9, 0.4, 0.7], [0.3, 0.45, 0.8, 0.6, 0.75], [0.1, 0.6, 0.95, 0.35, 0.5]])
    found = seed_spread(values)
    # statsmodels' anova_lm: seeds 0.008, rest 0.0121666..., both over 5 tasks
    assert (found.scatter * 5, found.noise * 5) == pytest.approx((0.008, 0.01216666666666666), abs=1e-9)


def test_without_an_effect_of_tasks_several_seeds_are_students_test_with_fewer_degrees_than_welchs():
    chance = np.random.default_rng(0)
    runs = chance.normal(size=(2, 4))
    values = [np.repeat(run[:, None], 50, axis=1) for run in runs]  # every task says the same: only seeds differ
    found, theirs = difference(*values, unit=False), stats.ttest_ind(*runs, equal_var=False)
    degrees, error = (theirs.df + 3) / 2, abs((runs[0].mean() - runs[1].mean()) / theirs.statistic)
    assert found.p_value() == pytest.approx(2 * stats.t.sf(abs(theirs.statistic), degrees), abs=1e-9)
    reach = stats.t.ppf(0.975, degrees) * error
    assert found.interval() == pytest.approx((found.value - reach, found.value + reach), abs=1e-9)


@pytest.mark.parametrize(("seeds", "times", "most", "tiny"), [(2, 20, 0.058, 0.001), (3, 20, 0.056, 0.0025)])
def test_an_arm_that_scatters_more_is_told_from_its_equal_in_5_of_100(seeds, times, most, tiny):
    """Seeds alone are the hardest case: Welch's degrees of freedom made 6.4 % with 2 seeds, and 0.35 % of p-values
    below 0.001 with 3."""
    chance = np.random.default_rng(11)
    runs = chance.standard_normal((20_000, 2, seeds)) * np.array([times, 1.0])[:, None]
    p = np.array([difference(*pair[:, :, None], unit=False).p_value() for pair in runs])
    assert (p < 0.05).mean() <= most and (p < 0.001).mean() <= tiny


def test_yes_or_no_tasks_get_bonett_and_prices_interval():
    # 100 tasks: 20 only the first passes, 8 only the second
    first = np.array([[1.0] * 20 + [0.0] * 8 + [1.0] * 72])
    second = np.array([[0.0] * 20 + [1.0] * 8 + [1.0] * 72])
    up, down = 21 / 102, 9 / 102
    reach = stats.norm.ppf(0.975) * ((up + down - (up - down) ** 2) / 102) ** 0.5
    found = difference(first, second, unit=True)
    assert found.value == pytest.approx(0.12)
    assert found.interval() == pytest.approx((up - down - reach, up - down + reach), abs=1e-9)
    assert found.interval(1 - found.p_value())[0] == pytest.approx(0.0, abs=1e-9)  # one says what the other says


def test_an_arm_of_one_seed_has_the_interval_its_score_has():
    passes = np.array([[1.0] * 37 + [0.0] * 13])
    assert arm_interval(passes, arm_mean(passes, None), unit=True) == wilson_interval(37, 50)
    assert wilson_interval(37, 50) == pytest.approx((0.6044684273515116, 0.841284725064476), abs=1e-9)  # statsmodels


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_values_that_are_all_alike_are_no_certainty(seeds, value):
    same = np.full((seeds, 40), value)
    low, high = difference(same, same, unit=True).interval()
    assert low < -0.03 and high > 0.03
    low, high = arm_interval(same, arm_mean(same), unit=True)
    assert high - low > 0.05 and low <= value <= high


def test_on_an_open_scale_values_that_are_all_alike_have_no_interval():
    same = np.full((2, 40), 7.0)
    found = difference(same, same + 1, unit=False)
    assert found.interval() is None and found.p_value() is None and found.p_equivalent(1.0) is None


def test_one_task_has_no_interval():
    one = np.array([[1.0], [0.0], [1.0]])
    assert difference(one, one, unit=True).interval() is None
    assert arm_interval(one, arm_mean(one, None), unit=True) is None


def test_pairing_takes_the_difficulty_of_tasks_out():
    chance = np.random.default_rng(1)
    hard = chance.normal(0, 10, 60)
    first, second = hard + chance.normal(1, 0.5, (1, 60)), hard + chance.normal(0, 0.5, (1, 60))
    assert difference(first, second, unit=False).error < 0.2
    assert arm_mean(first, None).error > 1


def test_seeds_that_disagree_widen_the_interval_however_many_tasks_there_are():
    chance = np.random.default_rng(2)
    noise = chance.normal(0, 0.1, (2, 3, 2000))
    quiet = difference(*noise, unit=False).error
    loud = difference(*(noise + np.array([0.0, 0.3, -0.3])[None, :, None]), unit=False).error
    assert loud > 10 * quiet


def test_how_far_a_single_seed_scatters_is_not_known_from_other_arms():
    chance = np.random.default_rng(3)
    several, single = chance.normal(0, 0.1, (4, 500)), chance.normal(1, 0.1, (1, 500))
    for pair in ((single, several), (several, single)):
        found = difference(*pair, unit=False)
        assert found.is_seed_variance_unknown and abs(found.value) > 0.9
        assert found.interval() is None and found.p_value() is None and found.p_equivalent(2.0) is None
    assert difference(single, single, unit=False, recipes=True).is_seed_variance_unknown
    assert difference(single, several, unit=False, other_is_fixed=True).p_value() < 1e-6, "of these weights"
    spread = seed_spread(several)
    fixed = difference(several, single, unit=False, other_is_fixed=True)
    assert fixed.seed_scatter == pytest.approx(spread.scatter / 4) and fixed.p_value() < 1e-3


def test_with_as_many_seeds_two_arms_have_one_variance_and_with_other_numbers_each_its_own():
    chance = np.random.default_rng(3)
    first, second = chance.normal(0, 0.1, (2, 4, 50))
    spreads = seed_spread(first), seed_spread(second)
    [joined] = difference(first, second, unit=False).seeds
    parts = [spread.scatter / 4 for spread in spreads]
    assert joined.scatter == pytest.approx(sum(parts))
    welch = sum(parts) ** 2 / sum(part**2 / 3 for part in parts)
    assert joined.degrees == pytest.approx((welch + 3) / 2)
    apart = difference(first[:2], second, unit=False).seeds
    assert [part.degrees for part in apart] == [1, 3]
    assert [part.noise for part in apart] == pytest.approx([seed_spread(first[:2]).noise / 2, spreads[1].noise / 4])


def test_two_seeds_that_happen_to_agree_borrow_from_the_other_arms_and_three_do_not():
    chance = np.random.default_rng(4)
    luck = np.array([[0.3, -0.3], [0.25, -0.2], [0.2, -0.3], [0.01, -0.01]])
    values = chance.normal(0, 0.1, (4, 2, 200)) + luck[:, :, None]
    pooled = pooled_spread(map(seed_spread, values))
    assert arm_mean(values[3], pooled).error > 0.1 > arm_mean(values[3]).error
    third = np.concatenate([values[3], values[3][:1]])
    assert arm_mean(third, pooled) == arm_mean(third)


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("passed", [0.0, 1.0])
def test_seeds_that_all_fail_or_all_pass_are_worth_their_tasks(seeds, passed):
    same = np.full((seeds, 50), passed)
    low, high = arm_interval(same, arm_mean(same), unit=True)
    assert (low, high) == pytest.approx(wilson_interval(round(50 * passed), 50))
    other = same.copy()
    other[0, 0] = 1 - passed  # one of the runs does one task differently: hardly another picture
    low, high = arm_interval(other, arm_mean(other), unit=True)
    assert high - low < 0.15


def test_where_few_tasks_tell_anything_seeds_are_worth_no_more_than_tasks():
    rare = np.zeros((5, 50))
    rare[[0, 1, 2], [0, 1, 2]] = 1.0  # three tasks, each passed by one seed
    low, high = arm_interval(rare, arm_mean(rare), unit=True)
    assert (low, high) == pytest.approx(wilson_around(0.012, 50, 1.959963984540054))


def world(chance, *, arms, seeds, tasks, seed_effect=0.0):
    """Passes and failures: tasks differ in difficulty, arms in what they find hard, seeds in luck. No arm is better."""
    logit = (
        0.4
        + 1.5 * chance.standard_normal((1, 1, tasks))
        + 0.5 * chance.standard_normal((arms, 1, tasks))
        + seed_effect * chance.standard_normal((arms, seeds, 1))
    )
    return (chance.random((arms, seeds, tasks)) < 1 / (1 + np.exp(-logit))).astype(float)


def true_mean(seed_effect):
    spread = np.sqrt(1.5**2 + 0.5**2 + seed_effect**2)
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    return float(weights @ (1 / (1 + np.exp(-(0.4 + spread * nodes)))) / weights.sum())


@pytest.mark.parametrize(
    ("seeds", "tasks", "seed_effect"),
    [
        (1, 100, 0.0), (1, 400, 0.0), (2, 100, 0.1), (2, 50, 0.5), (2, 300, 1.0), (3, 100, 0.0), (3, 100, 0.3),
        (3, 30, 0.3), (5, 100, 0.3),
    ],
)  # fmt: skip
def test_at_least_93_of_100_intervals_hold_the_truth_and_at_most_97_where_seeds_are_many_or_none(
    seeds, tasks, seed_effect
):
    chance, repeats, truth = np.random.default_rng(7), 1000, true_mean(seed_effect)
    hits = np.zeros(2)
    for _ in range(repeats):
        values = world(chance, arms=3, seeds=seeds, tasks=tasks, seed_effect=seed_effect)
        pooled = pooled_spread(map(seed_spread, values))
        pair = difference(values[0], values[1], unit=True).interval()
        arm = arm_interval(values[0], arm_mean(values[0], pooled), unit=True)
        hits += [pair[0] <= 0.0 <= pair[1], arm[0] <= truth <= arm[1]]
    # Two or three seeds leave open how much seeds matter, and intervals that hold up where they do are wide elsewhere.
    most = {2: 0.997, 3: 0.992}.get(seeds, 0.97)
    assert (hits / repeats).min() >= 0.93 and (hits / repeats).max() <= most, hits / repeats


@pytest.mark.parametrize("seeds", [2, 3])
def test_numbers_of_any_size_are_covered_too(seeds):
    chance, hits = np.random.default_rng(8), 0
    for _ in range(1000):
        tasks = chance.normal(0, 300, (1, 1, 25))
        values = 900 + tasks + chance.normal(0, 20, (2, seeds, 1)) + chance.normal(0, 80, (2, seeds, 25))
        low, high = difference(values[0], values[1], unit=False).interval()
        hits += low <= 0 <= high
    assert 0.93 <= hits / 1000 <= (0.995 if seeds == 2 else 0.985)


def p_of_equals(chance, *, seeds, scatters, tasks):
    """Of two arms with so many seeds each, that scatter so much."""
    hard = chance.normal(0, 0.2, tasks)
    pair = [
        hard + chance.normal(0, 0.15, tasks) + chance.normal(0, 0.3, (n, tasks)) + scatter * chance.normal(size=(n, 1))
        for n, scatter in zip(seeds, scatters, strict=True)
    ]
    return difference(*pair, unit=False).p_value()


@pytest.mark.parametrize(
    ("seeds", "scatters"),
    [
        ((5, 2), (0.02, 0.2)), ((5, 2), (0.02, 0.4)), ((3, 2), (0.02, 0.2)), ((10, 2), (0.1, 0.3)),
        ((5, 3), (0.02, 0.2)),
    ],
)  # fmt: skip
def test_the_arm_with_fewer_seeds_may_scatter_more(seeds, scatters):
    chance = np.random.default_rng(16)
    found = np.array([p_of_equals(chance, seeds=seeds, scatters=scatters, tasks=100) for _ in range(1000)])
    assert (found < 0.05).mean() <= 0.06 and (found < 0.001).mean() <= 0.003, "5 and 2 seeds: 8.5 and 3 %"


def test_an_arm_that_lost_one_of_five_seeds_is_still_told_apart():
    chance, found = np.random.default_rng(17), 0
    for _ in range(100):
        values = chance.normal(0, 0.3, (2, 5, 200)) + 0.05 * chance.normal(size=(2, 5, 1))
        found += difference(values[0, :4] + 0.15, values[1], unit=False).p_value() < 0.05
    assert found >= 75


def smallest_p(chance, *, seeds, scatters, tasks=60):
    """Of all arms against the first, corrected for their number; the arms differ in nothing but how their seeds
    scatter."""
    arms, scatter = len(scatters), np.array(scatters)[:, None, None]
    values = chance.normal(0, 0.2, (1, 1, tasks)) + chance.normal(0, 0.15, (arms, 1, tasks))
    values = values + chance.normal(0, 0.3, (arms, seeds, tasks)) + scatter * chance.standard_normal((arms, seeds, 1))
    found = [difference(arm, values[0], unit=False).p_value() for arm in values[1:]]
    return min(found) * len(found)


@pytest.mark.parametrize(
    ("seeds", "scatters", "repeats"),
    [
        (2, (0.02, 0.2), 600), (2, (0.2, 0.02), 600), (3, (0.2, 0.02), 600),  # one scatters ten times as much
        (3, (0.1,) * 20, 100), (3, (0.02,) * 5 + (0.3,), 150), (3, (0.3,) + (0.02,) * 5, 150),
    ],
)  # fmt: skip
def test_equal_arms_whose_seeds_scatter_are_told_apart_in_6_of_100_at_most(seeds, scatters, repeats):
    chance = np.random.default_rng(11)
    wrong = sum(smallest_p(chance, seeds=seeds, scatters=scatters) < 0.05 for _ in range(repeats))
    assert wrong / repeats <= 0.06, "it was 10 % for two arms and 12 % for twenty"


@pytest.mark.parametrize("seeds", [2, 3, 4])
def test_small_p_values_are_as_rare_as_they_say(seeds):
    chance = np.random.default_rng(12)
    found = np.array([smallest_p(chance, seeds=seeds, scatters=(0.1, 0.1), tasks=30) for _ in range(1000)])
    assert (found < 0.001).mean() <= 0.002 and (found < 0.01).mean() <= 0.012, "0.001 was 1.2 % with two seeds"


def test_three_seeds_still_find_what_is_there():
    chance, found = np.random.default_rng(13), 0
    for _ in range(100):
        values = world(chance, arms=2, seeds=3, tasks=200, seed_effect=0.1)
        better = np.maximum(values[1], chance.random(values[1].shape) < 0.45)
        found += difference(better, values[0], unit=True).p_value() < 0.05
    assert found >= 85


def test_adding_seeds_until_something_is_significant_finds_nothing_among_equals():
    chance, naive, over_looks = np.random.default_rng(14), 0, 0
    for _ in range(200):
        values = chance.normal(0, 0.3, (2, 9, 40)) + 0.1 * chance.standard_normal((2, 9, 1))
        found = [difference(values[1, :n], values[0, :n], unit=False).p_value() for n in range(3, 10)]
        naive += min(found) < 0.05
        over_looks += min(p * penalty_of_look(look) for look, p in enumerate(found, start=1)) < 0.05
    assert naive >= 16 and over_looks <= 12, "look k is judged at alpha / k^3"


def test_values_whose_squared_variance_overflows_are_compared():
    values = np.random.default_rng(1).random((2, 3, 12)) * 1e100
    assert difference(*values, unit=False).p_value() == pytest.approx(
        difference(*(values / 1e100), unit=False).p_value(), rel=1e-6
    )


FEW_REWARDS = np.array([[0.1, 0.15, 0.2, 0.05], [0.95, 0.9, 0.97, 1.0]])[:, None, :]


def test_a_large_gain_on_every_one_of_a_few_tasks_is_more_certain_than_a_mixed_one():
    """Differences that are nearly alike are less scatter than tasks of which one arm solves some and loses others."""
    low, high = FEW_REWARDS
    alike = difference(high, low, unit=True)
    mixed = difference(np.array([[1.0, 1.0, 0.0, 1.0]]), np.array([[0.0, 0.0, 0.5, 0.9]]), unit=True)
    assert alike.p_value() < 0.05 < mixed.p_value()
    back = difference(low, high, unit=True)
    assert back.p_value() == alike.p_value() and back.error == alike.error, "whichever arm is named first"
    flat = difference(np.full((1, 4), 0.52), np.full((1, 4), 0.5), unit=True)
    assert flat.p_value() > 0.5, "tasks that all agree are still few"
