"""Draws that depend on the seed, the number and the values before, and on nothing else."""

from __future__ import annotations

import math
from statistics import fmean

import pytest

pytest.importorskip("optuna")

from evsys_sdk.config.schema import SearchSpec
from evsys_sdk.experiment.search_sampler import FinishedTrial, TrialSampler

RATE, WIDTH, SHAPE = "rate", "width", "shape"
SPACE = {
    RATE: {"low": 1e-6, "high": 1e-1, "log": True},
    WIDTH: {"low": 1, "high": 64, "int": True},
    SHAPE: ["a", {"kind": "b"}, None],
}


def _surface(params):
    away = (math.log10(params[RATE]) + 3) ** 2 + ((params[WIDTH] - 24) / 16) ** 2 / 2
    return -away - 0.5 * (params[SHAPE] != {"kind": "b"})


def _search(kind, *, trials, seed=0, mode="max", space=SPACE, window=1, **settings):
    """The trials of a search of which `window` run at a time."""
    spec = SearchSpec.model_validate({"kind": kind, "space": space, "max_trials": trials, "seed": seed, **settings})
    sampler, found = TrialSampler(spec=spec, mode=mode), []
    for number in range(trials):
        seen = [
            FinishedTrial(trial=one, value=None if at > number - window else value, under_way=at > number - window)
            for at, (one, value) in enumerate(found)
        ]
        trial = sampler.ask(seen)
        found.append((trial, (1 if mode == "max" else -1) * _surface(trial.params) if space is SPACE else 0.0))
    return found


def test_tpe_beats_random_on_average():
    best = {
        kind: [max(value for _, value in _search(kind, trials=25, seed=seed)) for seed in range(8)]
        for kind in ("random", "tpe")
    }
    assert fmean(best["tpe"]) > fmean(best["random"]) + 0.05


def test_tpe_goes_down_where_less_is_better():
    trials = _search("tpe", trials=25, mode="min")
    assert fmean(value for _, value in trials[15:]) < fmean(value for _, value in trials[:10])


@pytest.mark.parametrize("kind", ["random", "tpe"])
def test_a_draw_is_the_same_in_another_search_that_has_seen_the_same(kind):
    whole = [trial for trial, _ in _search(kind, trials=14, window=3)]
    assert [trial for trial, _ in _search(kind, trials=14, window=3)] == whole
    assert [trial for trial, _ in _search(kind, trials=9, window=3)] == whole[:9], "a longer search begins the same"
    assert [trial for trial, _ in _search(kind, trials=14, window=3, seed=1)] != whole


def test_drawn_numbers_are_within_their_range_and_short():
    trials = _search("random", trials=20)
    assert len({trial.params[RATE] for trial, _ in trials}) == 20
    for trial, _ in trials:
        assert 1e-6 <= trial.params[RATE] <= 1e-1 and trial.params[RATE] == float(f"{trial.params[RATE]:.6g}")
        assert isinstance(trial.params[WIDTH], int) and 1 <= trial.params[WIDTH] <= 64


@pytest.mark.parametrize("kind", ["random", "tpe", "halving"])
def test_a_space_without_ranges_is_drawn_from_without_repeats(kind):
    lists = {"x": [1, 2, 3], "y": ["a", "b"]}
    settings = {"min_steps": 1} if kind == "halving" else {}
    drawn = [tuple(trial.params.values()) for trial, _ in _search(kind, trials=6, space=lists, **settings)]
    assert sorted(drawn) == [(x, y) for x in (1, 2, 3) for y in ("a", "b")]


def test_halving_over_some_of_the_combinations_draws_them():
    lists = {"x": list(range(10)), "y": list(range(10))}
    drawn = [tuple(trial.params.values()) for trial, _ in _search("halving", trials=5, space=lists, min_steps=1)]
    assert len(set(drawn)) == 5 and drawn != [(0, y) for y in range(5)]
