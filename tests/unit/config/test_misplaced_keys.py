"""Every key of the config, put into every block where it does not belong, is answered with the place where it does."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from pydantic import BaseModel

from evsys_sdk.checks.preflight import deep_problems, misplaced_notes
from evsys_sdk.config import metadata, schema
from evsys_sdk.config.load import parse_config
from evsys_sdk.config.yaml_io import Document
from evsys_sdk.errors import ConfigError

RUN = {
    "name": "r", "data": {"path": "p", "transforms": [{"kind": "identity"}]}, "model": {"name": "m"},
    "algorithm": {"kind": "sft"}, "backend": {"kind": "mock"},
    "eval": {"enabled": True, "metrics": [{"kind": "exact_match"}], "inference": {"kind": "mock"},
             "eval_data": {"path": "p"}},
}  # fmt: skip
TOP = {
    "name": "e", "budget": {"steps": 5}, "log_store": {"kind": "jsonl"}, "data_store": {"kind": "local"},
    "launcher": {"kind": "local"}, "callbacks": [{"kind": "csv_metrics"}],
    "metadata": {
        "success_metric": {"name": "pass@1"},
        "hypothesis": {"claim": "c", "prediction": {"arm": "r", "vs": "untrained"}},
        "benchmark": [{"name": "b", "path": "x", "models": [{"kind": "openai"}], "environment": {"kind": "docker"}}],
    },
}  # fmt: skip
FORMS = {
    "run": {**TOP, "run": RUN},
    "matrix": {**TOP, "matrix": {"base_run": RUN, "axes": {"seed": [1, 2]}}},
    "search": {**TOP, "base_run": RUN, "search": {"kind": "grid", "space": {"seed": [1]}, "objective": {"name": "a"}}},
}
KEYS = sorted(
    {
        key
        for module in (schema, metadata)
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, BaseModel) and cls.__module__.startswith("evsys_sdk.config")
        for key in cls.model_fields
    }
)


def _blocks(value, path=()):
    if isinstance(value, dict) and path[-1:] not in (("axes",), ("space",)):
        yield path
        for key, inner in value.items():
            yield from _blocks(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _blocks(inner, (*path, index))


def _problems(form, path, key):
    data = block = copy.deepcopy(form)
    for part in path:
        block = block[part]
    if key in block:
        return []
    block[key] = 1
    try:
        parse_config(Document(label="c", data=data), folder=Path())
    except ConfigError as exc:
        return exc.problems
    return []


@pytest.mark.parametrize("form", FORMS)
def test_every_key_in_every_wrong_block_is_told_where_it_belongs(form):
    unknown = [
        (path, key, problem.message)
        for path in _blocks(FORMS[form])
        for key in KEYS
        for problem in _problems(FORMS[form], path, key)
        if problem.message.startswith("unknown key")
    ]
    assert len(unknown) > 1000
    assert [found for found in unknown if "it belongs" not in found[2]] == []


@pytest.mark.parametrize(
    ("path", "key", "place"),
    [((), "axes", "under `matrix`"), (("run",), "search", "at the top level"), ((), "objective", "under `search`"),
     (("run",), "low", "under `search.space.<setting>`"), ((), "base_url", "under `run.backend.params`"),
     (("run",), "early_stopping", "under `callbacks`"),
     ((), "seed", "under `run` or `search` or `research` and 1 more place;")],
)  # fmt: skip
def test_keys_of_sweeps_and_of_extensions_are_known_too(path, key, place):
    [told] = [problem.message for problem in _problems(FORMS["run"], path, key) if problem.path.endswith(key)]
    assert f"it belongs {place}" in told


def test_a_note_that_looks_like_a_setting_is_a_warning_and_any_other_note_is_none():
    notes = {"n_repeats": 3, "continual": {}, "sucess_metric": "pass@1", "benchmarks": [], "model": "x", "ticket": 7}
    config = parse_config(Document(label="c", data={**TOP, "run": RUN, "metadata": notes}), folder=Path())
    found = {problem.path: problem.message for problem in misplaced_notes(config)}
    assert sorted(found) == [
        "metadata.benchmarks",
        "metadata.continual",
        "metadata.n_repeats",
        "metadata.sucess_metric",
    ]
    assert "belongs under `run`" in found["metadata.continual"] and "top level" in found["metadata.n_repeats"]
    assert "is called success_metric" in found["metadata.sucess_metric"]


def test_a_setting_in_the_params_of_another_block_is_told_its_place():
    run = {**RUN, "backend": {"kind": "mock", "params": {"batch_size": 3}}}
    run["algorithm"] = {"kind": "sft", "params": {"base_url": "http://x", "num_samples": 3}}
    config = parse_config(Document(label="config", data={**TOP, "metadata": {}, "run": run}), folder=Path())
    found = {problem.path: problem.message for problem in deep_problems(config)}
    assert "belongs under `run.algorithm.params`" in found["run.backend.params.batch_size"]
    assert "belongs under `run.backend.params`" in found["run.algorithm.params.base_url"]
    # Another algorithm has it: that is no other place.
    assert "run.algorithm.params" not in found["run.algorithm.params.num_samples"]
