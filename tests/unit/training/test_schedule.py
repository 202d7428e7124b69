"""Learning rates over the steps of a run."""

from __future__ import annotations

import pytest

from evsys_sdk.training.batch import learning_rate, warmup_length


def _curve(shape, total, warmup=0):
    return [learning_rate(s, peak=1.0, total_steps=total, shape=shape, warmup=warmup) for s in range(1, total + 1)]


def test_a_constant_rate_stays():
    assert _curve("constant", 4) == [1.0] * 4


def test_a_linear_rate_falls_evenly_and_never_wastes_a_step():
    assert _curve("linear", 4) == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_a_cosine_rate_is_half_way_down_in_the_middle():
    curve = _curve("cosine", 10)
    assert curve[0] == 1.0 and curve[5] == pytest.approx(0.5) and 0 < curve[-1] < 0.05


def test_warm_up_climbs_to_the_peak_and_the_shape_begins_there():
    assert _curve("linear", 6, warmup=2) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_warm_up_is_given_in_steps_or_as_a_fraction():
    assert warmup_length(50, warmup_steps=5) == 5
    assert warmup_length(50, warmup_fraction=0.1) == 5
    assert warmup_length(3, warmup_steps=5) == 3
