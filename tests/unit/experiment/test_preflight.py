"""What is refused before anything is spent."""

from __future__ import annotations

import difflib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evsys_sdk.checks import blocks, preflight, rows
from evsys_sdk.config.load import parse_config
from evsys_sdk.config.yaml_io import Document
from evsys_sdk.errors import Problem

TASK = {"instruction": "hi", "verifier": {"fn_name": "exact_match", "expected": "ho"}}
TASKS = {"source_kind": "in_memory", "rows": [TASK]}


def _problems(tmp_path, *, whole_files=False, **run):
    chat = {"messages": [{"role": "user", "content": "hi"}], "target_assistant": "ho"}
    settings = {
        "name": "r",
        "data": {"source_kind": "in_memory", "rows": [chat]},
        "model": {"name": "m"},
        "algorithm": {"kind": "sft"},
        "backend": {"kind": "mock"},
        **run,
    }
    config = parse_config(Document(label="config", data={"name": "x", "run": settings}), folder=tmp_path)
    return [(problem.path, problem.message) for problem in preflight.deep_problems(config, whole_files=whole_files)]


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
    monkeypatch.setattr(blocks, "find_spec", lambda module: None if module == "torch" else object())
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


@pytest.mark.parametrize(("key", "count"), [("", 1), ("sk-x", 0)])
def test_a_hosted_model_of_the_eval_block_needs_its_key(tmp_path, monkeypatch, key, count):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    block = {"enabled": True, "metrics": [{"kind": "exact_match"}]}
    found = _problems(tmp_path, eval={**block, "inference": {"kind": "openai", "params": {"model": "m"}}})
    assert [path for path, _ in found] == ["run.eval.inference"] * count
    assert all("OPENAI_API_KEY" in message for _, message in found)
    assert _problems(tmp_path, eval={**block, "inference": {"kind": "mock"}}) == []


def test_one_mistake_in_a_file_is_told_once_at_the_nearest_place(tmp_path):
    row = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n'
    (tmp_path / "rows.jsonl").write_text(row * 3 + "{broken\n")
    [(path, message)] = _problems(tmp_path, whole_files=True, data={"path": str(tmp_path / "rows.jsonl")})
    assert path == "run.data.path" and "rows.jsonl:4: not valid JSON" in message


PLACES = st.lists(st.sampled_from(["a", "b", "a[0]", "ab"]), min_size=1, max_size=4).map(".".join)


@given(st.lists(st.tuples(PLACES, st.sampled_from(["m", "n"]))))
def test_of_two_places_with_the_same_words_the_nearer_is_told(pairs):
    unique = set(pairs)
    expected = {
        (path, message)
        for path, message in unique
        if not any(same == message and near.startswith(f"{path}.") for near, same in unique)
    }
    kept = preflight.nearest_places([Problem(path=path, message=message) for path, message in pairs])
    assert [(p.path, p.message) for p in kept] == [pair for pair in dict.fromkeys(pairs) if pair in expected]


def test_many_problems_are_sorted_out_in_time_that_grows_with_their_number():
    problems = [Problem(path=f"runs[{n}].data{end}", message="m") for n in range(30_000) for end in ("", ".path")]
    begin = time.process_time()
    kept = preflight.nearest_places(problems)
    assert time.process_time() - begin < 20, "CPU seconds, below 1; where each is compared with each it is minutes"
    assert [p.path for p in kept] == [f"runs[{n}].data.path" for n in range(30_000)]


def test_thousands_of_arms_with_one_mistake_cost_one_look(tmp_path, monkeypatch):
    """A comparison with every known word, and the opening of a file, happen once and not for each arm."""
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    compared, opened = [], []
    compare, open_source = difflib.get_close_matches, rows.open_source
    monkeypatch.setattr(difflib, "get_close_matches", lambda *a, **k: compared.append(a) or compare(*a, **k))
    monkeypatch.setattr(rows, "open_source", lambda *a, **k: opened.append(a) or open_source(*a, **k))
    arm = {
        "data": {"path": "rows.jsonl"},
        "model": {"name": "m"},
        "algorithm": {"kind": "sft_with_a_mistake"},
        "backend": {"kind": "a_backend_with_a_mistake"},
    }
    runs = [{"name": f"r{number}", **arm} for number in range(200)]
    config = parse_config(Document(label="config", data={"name": "x", "runs": runs}), folder=tmp_path)
    assert len(preflight.deep_problems(config)) == 400
    assert len(compared) <= 8 and len(opened) == 1
