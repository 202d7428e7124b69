"""What is refused before anything is spent."""

from __future__ import annotations

import pytest

from evsys_sdk import preflight
from evsys_sdk.config.document import Document
from evsys_sdk.config.files import parse_config

TASK = {"instruction": "hi", "verifier": {"fn_name": "exact_match", "expected": "ho"}}
TASKS = {"source_kind": "in_memory", "rows": [TASK]}


def _problems(tmp_path, **run):
    rows = [{"messages": [{"role": "user", "content": "hi"}], "target_assistant": "ho"}]
    settings = {
        "name": "r",
        "data": {"source_kind": "in_memory", "rows": rows},
        "model": {"name": "m"},
        "algorithm": {"kind": "sft"},
        "backend": {"kind": "mock"},
        **run,
    }
    config = parse_config(Document(label="config", data={"name": "x", "run": settings}), folder=tmp_path)
    return [(problem.path, problem.message) for problem in preflight.deep_problems(config)]


def test_a_recipe_that_fits_has_no_problems(tmp_path):
    assert _problems(tmp_path) == []


def test_an_algorithm_of_one_backend_is_refused_on_another(tmp_path):
    ((path, message),) = _problems(tmp_path, algorithm={"kind": "local_sft"})
    assert path == "run.backend.kind"
    assert message == "local_sft runs on the local backend only, not on 'mock'; on 'mock' use sft"


def test_a_recipe_that_needs_what_the_server_lacks_is_refused_with_the_remedy(tmp_path):
    pytest.importorskip("tinker")
    run = {
        "algorithm": {"kind": "rl", "params": {"loss": "ppo", "max_steps": 1}},
        "data": TASKS,
        "backend": {"kind": "tinker", "params": {"base_url": "http://127.0.0.1:1", "lacks": ["ppo"]}},
    }
    ((path, message),) = _problems(tmp_path, **run)
    assert path == "run.algorithm.kind"
    assert message.startswith("on backend 'tinker': this backend has no ppo loss; set loss to one of cispo")
    run["backend"]["params"]["lacks"] = []
    assert _problems(tmp_path, **run) == []


def test_a_package_that_is_missing_is_named_with_the_extra_that_brings_it(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "_is_installed", lambda module: module != "torch")
    found = _problems(tmp_path, backend={"kind": "local"}, model={"name": "tiny-random"})
    assert found == [("run.backend.kind", "needs torch: pip install 'evsys-sdk[local]'")]


def test_a_model_that_nobody_has_is_said_with_what_would_do(tmp_path):
    pytest.importorskip("torch")
    ((path, message),) = _problems(tmp_path, backend={"kind": "local"}, model={"name": "smollm2-135m"})
    assert path == "run.model.name" and "a built-in model: smollm2-135m-instruct" in message
    assert _problems(tmp_path, backend={"kind": "local"}, model={"name": "Qwen/Qwen3-0.6B"}) == []


@pytest.mark.parametrize(
    ("block", "settings", "place"),
    [
        ("backend", {"kind": "local", "params": {"device": "tpu"}}, "run.backend.params.device"),
        ("algorithm", {"kind": "sft", "params": {"learning_rate": float("inf")}}, "run.algorithm.params.learning_rate"),
        (
            "algorithm",
            {"kind": "rl", "params": {"loss": "ppo", "loss_fn_config": {"clip_low_threshold": 2.0}}},
            "run.algorithm.params",
        ),
    ],
)
def test_a_number_or_word_that_makes_no_sense_is_located(tmp_path, block, settings, place):
    assert [path for path, _ in _problems(tmp_path, **{block: settings})] == [place]


def test_an_agent_that_cannot_be_found_is_said_before_anything_is_spent(tmp_path):
    pytest.importorskip("harbor")
    params = {"max_steps": 1, "agent_import_path": "nope.agents.Gone"}
    ((path, message),) = _problems(tmp_path, algorithm={"kind": "rl", "params": params}, data=TASKS)
    assert path == "run.algorithm.params.agent_import_path" and "No module named 'nope'" in message
