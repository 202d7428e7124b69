"""A search in the YAML: what it may look like, and where its mistakes are told to be."""

from __future__ import annotations

import pytest

from evsys_sdk.config.load import dump_yaml, load_yaml, parse_config
from evsys_sdk.config.sweep import combinations, count_trials, trial_run
from evsys_sdk.config.yaml_io import parse_document
from evsys_sdk.errors import ConfigError

BASE = """\
name: hunt
base_run:
  name: b
  data: {path: rows.jsonl}
  model: {name: m}
  algorithm: {kind: sft}
search:
"""
RATE = "algorithm.params.learning_rate"


def _load(search, tmp_path, base=BASE):
    return parse_config(parse_document(base + search), folder=tmp_path)


def test_the_arms_of_a_grid_are_those_of_a_matrix(tmp_path):
    axes = f"{{{RATE}: [1e-3, 1e-4], seed: [1, 2]}}"
    grid = _load(f"  kind: grid\n  space: {axes}\n", tmp_path)
    matrix = _load(f"  axes: {axes}\n", tmp_path, base=BASE.replace("search:", "matrix:"))
    assert grid.all_runs() == matrix.all_runs()
    assert grid.all_runs() == [trial_run(grid, picks, n) for n, picks in enumerate(combinations(grid.search))]


def test_the_base_of_a_search_may_be_a_run(tmp_path):
    config = _load("  kind: grid\n  space: {seed: [1, 2]}\n", tmp_path, base=BASE.replace("base_run:", "run:"))
    assert [run.name for run in config.all_runs()] == ["b__seed1", "b__seed2"]


def test_every_value_of_the_space_is_looked_at_beforehand(tmp_path):
    search = f"  kind: random\n  max_trials: 5\n  space: {{{RATE}: {{low: 1, high: 9}}, seed: [1, 2, 3]}}\n"
    runs = _load(search, tmp_path).all_runs()
    seen = [(run.algorithm.params["learning_rate"], run.seed) for run in runs]
    assert seen == [(1.0, 1), (9.0, 1), (1.0, 2), (1.0, 3)]


def test_a_search_survives_writing_and_reading(tmp_path):
    config = _load(f"  kind: tpe\n  max_trials: 5\n  space: {{{RATE}: {{low: 1, high: 9, int: true}}}}\n", tmp_path)
    dump_yaml(config, tmp_path / "again.yaml")
    assert load_yaml(tmp_path / "again.yaml") == config


def test_trials_are_named_by_number_and_values(tmp_path):
    config = _load(
        f"  kind: tpe\n  max_trials: 5\n  space: {{{RATE}: {{low: 1e-5, high: 1e-2, log: true}}}}\n", tmp_path
    )
    assert trial_run(config, {RATE: 0.000123}, 7).name == "b__t007__learning_rate0p000123"
    named = "  name_template: '{base}-{trial}-{seed}'\n"
    config = _load("  kind: random\n  max_trials: 5\n  space: {seed: [1, 2]}\n" + named, tmp_path)
    assert trial_run(config, {"seed": 1}, 3).name == "b-003-2"


def test_no_combination_is_tried_twice(tmp_path):
    config = _load("  kind: random\n  max_trials: 50\n  space: {seed: [1, 2], tags: [[a], [b]]}\n", tmp_path)
    assert count_trials(config.search) == 4


@pytest.mark.parametrize(
    ("search", "line", "path", "message"),
    [
        (
            "  kind: gird\n  space: {seed: [1]}\n",
            8,
            "search.kind",
            "must be one of grid, random, tpe, halving; closest: grid",
        ),
        ("  kind: grid\n  spaces: {seed: [1]}\n", 9, "search.spaces", "unknown key; closest: space"),
        (
            "  kind: grid\n  space: {algoritm.kind: [sft]}\n",
            9,
            "search.space.algoritm.kind",
            "unknown key; closest: algorithm",
        ),
        ("  kind: grid\n  space: {seed: []}\n", 9, "search.space.seed", "has no values; an empty axis makes no runs"),
        ("  kind: grid\n  space: {seed: 4}\n", 9, "search.space.seed", "must be a list"),
        (
            "  kind: grid\n  space:\n    seed:\n      - 1\n      - many\n",
            12,
            "search.space.seed[1]",
            "must be a whole number",
        ),
        (
            "  kind: grid\n  space: {seed: {low: 1, high: 3}}\n",
            7,
            "search",
            "a grid needs lists of values, and seed is a range",
        ),
        (
            "  kind: grid\n  max_trials: 3\n  space: {seed: [1]}\n",
            7,
            "search",
            "for max_trials of them use kind random",
        ),
        ("  kind: tpe\n  space: {seed: [1, 2]}\n", 7, "search", "max_trials is missing"),
        (
            "  kind: tpe\n  max_trials: 3\n  space: {seed: {low: 3, high: 1}}\n",
            10,
            "search.space.seed",
            "low must be below high",
        ),
        (
            "  kind: tpe\n  max_trials: 3\n  space: {seed: {low: 0, high: 1, log: true}}\n",
            10,
            "search.space.seed",
            "low above 0",
        ),
        (
            "  kind: tpe\n  max_trials: 3\n  space: {seed: {low: 0, heigh: 1}}\n",
            10,
            "search.space.seed.heigh",
            "closest: high",
        ),
        (
            "  kind: tpe\n  max_trials: 3\n  space:\n    seed:\n      low: -2\n      high: 5\n      int: true\n",
            12,
            "search.space.seed.low",
            "greater than or equal to 0",
        ),
        ("  kind: halving\n  space: {seed: [1, 2]}\n", 7, "search", "halving needs min_steps"),
        (
            "  kind: grid\n  eta: 2\n  space: {seed: [1]}\n",
            7,
            "search",
            "eta belongs to kind halving, and this is grid",
        ),
        (
            "  kind: random\n  max_trials: 2\n  name_template: '{seed}'\n  space: {seed: [1]}\n",
            7,
            "search",
            "name_template needs {trial}",
        ),
        ("  kind: grid\n  space: {seed: [1, 1]}\n", 9, "search.space", "two runs have this name"),
        (
            "  kind: grid\n  space: {seed: [1]}\n  budget: {step: 3}\n",
            10,
            "search.budget.step",
            "unknown key; closest: steps",
        ),
    ],
)
def test_a_mistake_is_told_with_its_place(tmp_path, search, line, path, message):
    with pytest.raises(ConfigError) as refused:
        _load(search, tmp_path)
    found = {(problem.line, problem.path): problem.message for problem in refused.value.problems}
    assert message in found.get((line, path), found)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("name: hunt\nsearch:\n", "a search needs a base_run, or a run, beside it"),
        (BASE.replace("search:", "run: {name: a, data: {path: p}, model: {name: m}, algorithm: {kind: sft}}\nsearch:"),
         "a search has one base, and found run and base_run; keep one"),
        (BASE.replace("search:", "matrix: {axes: {seed: [1]}}\nsearch:"), "found matrix and search"),
    ],
)  # fmt: skip
def test_one_thing_decides_the_arms(tmp_path, base, message):
    with pytest.raises(ConfigError, match=message):
        _load("  kind: grid\n  space: {seed: [1]}\n", tmp_path, base=base)
