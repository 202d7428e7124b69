"""What is refused before a search begins."""

from __future__ import annotations

import json

import pytest

from evsys_sdk.checks import search as search_checks
from evsys_sdk.checks.search import search_problems
from evsys_sdk.config.load import parse_config
from evsys_sdk.config.yaml_io import Document

VAL = {"name": "tools", "path": "bench", "split": "val"}
TEST = {"name": "exam", "path": "bench", "split": "test"}
HALVING = {"kind": "halving", "min_steps": 10}


@pytest.fixture
def problems(tmp_path):
    def found(search, *, success=None, benchmark=(VAL,), run=None, **metadata):
        base = {
            "name": "b",
            "data": {"path": "rows.jsonl"},
            "model": {"name": "m"},
            "algorithm": {"kind": "sft", "params": {"max_steps": 50}},
            "backend": {"kind": "mock"},
            **(run or {}),
        }
        told = {"benchmark": list(benchmark), **metadata} | ({"success_metric": success} if success else {})
        space = {"algorithm.params.learning_rate": [1e-3, 1e-4]}
        data = {
            "name": "hunt",
            "base_run": base,
            "search": {"kind": "grid", "space": space, **search},
            "metadata": told,
        }
        config = parse_config(Document(label="config", data=json.loads(json.dumps(data))), folder=tmp_path)
        return [(problem.path, problem.message) for problem in search_problems(config)]

    return found


@pytest.mark.parametrize("name", ["val.pass@1", "pass@1", "val/tools/pass@1", "final_loss", "eval.exact_match"])
def test_an_objective_that_will_exist_is_taken(problems, name):
    run = {"eval": {"metrics": [{"kind": "exact_match"}]}}
    assert problems({"objective": name}, run=run) == []
    assert problems({}, success={"name": name, "mode": "min"}, run=run) == []


def test_a_search_for_nothing_is_refused(problems):
    assert problems({}) == [
        ("search.objective", "is missing; name the metric to search for, here or as metadata.success_metric")
    ]


@pytest.mark.parametrize("name", ["val.pass@2", "val.pas@1", "eval.exact_match", "final_los", "score"])
def test_an_objective_that_no_run_will_have_is_refused(problems, name):
    [(path, message)] = problems({"objective": name})
    assert path == "search.objective" and f"{name!r} is not a metric that these runs will have" in message
    [(path, _)] = problems({}, success=name)
    assert path == "metadata.success_metric"


def test_a_test_score_does_not_steer_a_search(problems):
    [(path, message)] = problems({"objective": "pass@1"}, benchmark=[TEST])
    assert path == "search.objective" and "test scores do not select" in message
    assert problems({"objective": "pass@1"}, benchmark=[TEST], allow_test_selection=True) == []
    assert problems({"objective": "pass@1"}, benchmark=[TEST, VAL]) == [], "by a bare name the val score is meant"


def test_halving_needs_a_score_at_its_first_rung(problems):
    search = HALVING | {"objective": "val.pass@1"}
    assert problems(search, benchmark=[VAL | {"run_every": 10}]) == []
    [(path, message)] = problems(search, benchmark=[VAL | {"run_every": 11}])
    assert path == "metadata.benchmark[0].run_every" and "every 11 steps, and halving needs it at step 10" in message
    [(path, message)] = problems(search)
    assert path == "metadata.benchmark[0]" and "only after training" in message
    [(path, message)] = problems(
        HALVING | {"objective": "eval.exact_match"}, run={"eval": {"metrics": [{"kind": "exact_match"}]}}
    )
    assert path == "search.objective" and "only after training" in message
    assert problems(HALVING | {"objective": "final_loss"}) == [], "every step has a loss"


def test_halving_needs_runs_longer_than_its_first_rung(problems):
    [(path, message)] = problems(HALVING | {"objective": "final_loss", "min_steps": 50})
    assert path == "search.min_steps" and "none would be left behind" in message


def test_halving_needs_runs_that_can_go_on(problems):
    run = {"algorithm": {"kind": "local_sft", "params": {"max_steps": 50}}, "backend": {"kind": "local"}}
    told = dict(problems(HALVING | {"objective": "final_loss"}, run=run))
    assert "algorithm 'local_sft' cannot resume from a checkpoint" in told["search.kind"]


def test_optuna_is_asked_for_by_its_extra(problems, monkeypatch):
    monkeypatch.setattr(search_checks, "find_spec", lambda name: None)
    assert ("search.kind", "needs optuna: pip install 'evsys-sdk[search]'") in problems({"objective": "final_loss"})
