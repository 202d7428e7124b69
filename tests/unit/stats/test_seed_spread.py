"""How much seeds matter, and from whom an arm may borrow that."""

from __future__ import annotations

import numpy as np
import pytest

from evsys_sdk.stats.comparison import SeedSpread, borrow_spread, borrows, pooled_spread, seed_spread


def spread(scatter, degrees=1.0, noise=1.0):
    return SeedSpread(scatter=scatter, noise=noise, degrees=degrees)


def test_it_comes_from_the_mean_squares_of_a_two_way_analysis():
    values = np.array([[0.2, 0.5, 0.9, 0.4, 0.7], [0.3, 0.45, 0.8, 0.6, 0.75], [0.1, 0.6, 0.95, 0.35, 0.5]])
    found = seed_spread(values)
    # statsmodels' anova_lm: seeds 0.008, rest 0.0121666..., both over 5 tasks
    assert (found.scatter * 5, found.noise * 5) == pytest.approx((0.008, 0.01216666666666666), abs=1e-9)
    assert found.degrees == 2


@pytest.mark.parametrize("shape", [(1, 5), (3, 1)])
def test_one_seed_or_one_task_tells_nothing(shape):
    assert seed_spread(np.ones(shape)) is None


def test_one_arm_gone_wild_does_not_spoil_what_is_said_of_the_others():
    usual, wild = [spread(4.0, 2) for _ in range(5)], spread(4e6, 2)
    found = pooled_spread([*usual, wild, None])
    assert found.scatter == pytest.approx((5 * 4 + 40) / 6) and found.degrees == 12
    assert pooled_spread([None]) is None


def test_two_seeds_borrow_unless_they_stand_out_and_three_do_not():
    usual = pooled_spread(spread(4.0) for _ in range(6))
    assert borrows(None, usual) and borrows(spread(0.1), usual) and borrows(spread(4.0), usual)
    assert not borrows(spread(0.1, 2), usual)
    wild = pooled_spread([*(spread(4.0) for _ in range(5)), spread(90.0)])
    assert not borrows(spread(90.0), wild)


def test_two_seeds_within_the_noise_do_not_stand_out_however_calm_the_others_are():
    calm = pooled_spread([*(spread(0.01) for _ in range(5)), spread(1.9)])
    assert borrows(spread(1.9), calm)


def test_an_arm_alone_has_nobody_to_borrow_from():
    own = spread(4.0)
    assert not borrows(own, pooled_spread([own]))
    assert borrows(None, None)


def test_what_is_borrowed_is_brought_to_the_scale_of_the_arm():
    all_arms = spread(6.0, 6, noise=2.0)
    assert borrow_spread(spread(0.1, noise=0.2), all_arms) == spread(0.6, 6, noise=0.2).__class__(
        scatter=pytest.approx(0.6), noise=0.2, degrees=6
    )
    assert borrow_spread(None, all_arms) == all_arms
