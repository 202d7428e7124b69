"""What the keys of a benchmark entry do, and what is refused of them before anything is spent."""

from __future__ import annotations

import json

import pytest

from evsys_sdk.checks import preflight
from evsys_sdk.config.load import parse_config
from evsys_sdk.config.yaml_io import Document
from evsys_sdk.errors import ConfigError
from evsys_sdk.experiment.experiment import Experiment
from evsys_sdk.registry import inference, verifiers
from evsys_sdk.rollout import requirements

WORDS = ("red", "green", "blue")


@pytest.fixture(autouse=True)
def own_registries(monkeypatch):
    for registry in (verifiers, inference):
        registry.names()
        monkeypatch.setattr(registry, "entries", dict(registry.entries))


def suite(folder, fn_name="exact_match", **more):
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"task_id": w, "instruction": f"say {w}", "verifier": {"fn_name": fn_name, "expected": w, **more}}
        for w in WORDS
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config(tmp_path, entry, **run):
    settings = {
        "name": "arm",
        "data": {"source_kind": "in_memory", "rows": [{"prompt": f"say {w}", "completion": w} for w in WORDS]},
        "model": {"name": "table-model"},
        "algorithm": {"kind": "sft", "params": {"max_steps": 2, "batch_size": 3}},
        "backend": {"kind": "mock"},
        **run,
    }
    settings["data"]["transforms"] = [{"kind": "jsonl_to_chat"}]
    data = {
        "name": "x",
        "output_dir": str(tmp_path / "out"),
        "metadata": {"benchmark": {"path": str(tmp_path / "suite"), **entry}},
        "run": settings,
    }
    return parse_config(Document(label="config", data=data), folder=tmp_path)


def problems(tmp_path, entry, **run):
    return [
        (p.path.removeprefix("metadata.benchmark[0]"), p.message)
        for p in preflight.deep_problems(config(tmp_path, entry, **run))
    ]


def refused(tmp_path, entry):
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, entry)
    return str(caught.value)


def directory(root, name, **files):
    texts = {"task.toml": "", "instruction.md": f"Make {name}.\n", "tests/test.sh": "exit 0\n", **files}
    for path, text in texts.items():
        (root / name / path).parent.mkdir(parents=True, exist_ok=True)
        (root / name / path).write_text(text)


def test_an_entry_that_fits_has_no_problems(tmp_path):
    suite(tmp_path / "suite")
    assert problems(tmp_path, {"n_concurrent": 2, "limit": 2, "breakdown_keys": ["x"]}) == []


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"n_concurrent": 0}, "n_concurrent"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"agent_params": {"a": 1}}, "agent_params are those of an agent: set agent_import_path too"),
        ({"models": ["openai/a"], "agent_import_path": "chat"}, "give them a separate entry"),
        (
            {"models": ["openai/a", {"kind": "openai", "params": {"model": "a"}}]},
            "models need distinct names; twice: a",
        ),
        ({"engine": "other"}, "engine"),
        ({"chat_templat": "x"}, "closest: chat_template"),
    ],
)
def test_what_makes_no_sense_in_an_entry_is_said(tmp_path, entry, said):
    assert said in refused(tmp_path, entry)


def test_the_short_form_of_a_model_is_its_client_and_its_name():
    from evsys_sdk.config.metadata import BenchmarkEntry

    entry = BenchmarkEntry(name="x", models=["openai/meta/llama-3", {"kind": "mine", "name": "ours"}, "mine"])
    assert [(model.kind, model.params, model.label) for model in entry.models] == [
        ("openai", {"model": "meta/llama-3"}, "meta/llama-3"),
        ("mine", {}, "ours"),
        ("mine", {}, "mine"),
    ]


def test_an_agent_that_cannot_be_found_is_said(tmp_path):
    pytest.importorskip("harbor")
    suite(tmp_path / "suite")
    ((path, message),) = problems(tmp_path, {"agent_import_path": "chatt"})
    assert path == ".agent_import_path" and "'chatt' is not an agent; closest: chat" in message
    ((path, message),) = problems(tmp_path, {"agent_import_path": "chat", "agent_params": {"max_turn": 2}})
    assert path == ".agent_params.max_turn" and "max_turns" in message


def test_all_mistakes_in_the_params_of_an_agent_are_said_each_in_its_place(tmp_path):
    pytest.importorskip("harbor")
    suite(tmp_path / "suite")
    params = {"tools": ["bash", "bahs"], "max_turn": 3, "bash_output_chars": "many"}
    found = dict(problems(tmp_path, {"agent_import_path": "chat", "agent_params": params}))
    assert found.keys() == {f".agent_params.{key}" for key in ("tools[1]", "max_turn", "bash_output_chars")}
    assert "closest: max_turns" in found[".agent_params.max_turn"]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("templates/plian.jinja", "closest: plain.jinja"),
        ("{% for m in messages %}{{ m.content }}", "it is no Jinja template: line 1"),
    ],
)
def test_a_template_that_cannot_be_had_is_said(tmp_path, template, said):
    pytest.importorskip("jinja2")
    suite(tmp_path / "suite")
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "plain.jinja").write_text("{{ messages[0].content }}")
    ((path, message),) = problems(tmp_path, {"chat_template": template})
    assert path == ".chat_template" and said in message
    assert problems(tmp_path, {"chat_template": "templates/plain.jinja"}) == []


def test_a_renderer_that_the_cookbook_does_not_have_is_said_with_the_nearest(tmp_path):
    pytest.importorskip("tinker_cookbook")
    suite(tmp_path / "suite")
    ((_, message),) = problems(tmp_path, {"chat_template": "qwen33"})
    assert "closest: qwen3" in message and ".jinja" in message
    assert problems(tmp_path, {"chat_template": "qwen3"}) == []


def test_a_model_without_a_key_is_refused_before_anything_is_spent(tmp_path, monkeypatch):
    pytest.importorskip("openai")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    suite(tmp_path / "suite")
    ((path, message),) = problems(tmp_path, {"models": ["openai/gpt"]})
    assert (path, message) == (".models[0]", "openai needs a key: set OPENAI_API_KEY")
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert problems(tmp_path, {"models": ["openai/gpt"]}) == []


@pytest.mark.parametrize(
    ("model", "place", "said"),
    [
        ("opnai/gpt", ".models[0].kind", "closest: openai"),
        ({"kind": "openai", "params": {"model": "m", "max_token": 3}}, ".models[0].params.max_token", "max_tokens"),
        ("mock", ".models[0]", "asks the model that a run trains; to score that untrained, set `baseline: true`"),
    ],
)
def test_a_model_that_cannot_be_asked_is_located(tmp_path, model, place, said):
    suite(tmp_path / "suite")
    ((path, message),) = problems(tmp_path, {"models": [model]})
    assert path == place and said in message


def test_a_model_cannot_be_put_to_tasks_that_need_an_environment(tmp_path):
    @inference.register("nobody")
    class Nobody:
        def generate(self, *, prompt, max_tokens, temperature, stop): ...

    directory(tmp_path / "suite", "a")
    found = dict(problems(tmp_path, {"models": ["nobody"]}))
    assert "a hosted model only answers questions" in found[".models"]


def test_every_reason_why_tasks_cannot_be_graded_is_told_once_at_its_first_task(tmp_path, monkeypatch):
    @verifiers.register("wants_a_licence")
    class WantsALicence:
        def verify(self, *, prompt, completion, target): ...

        @classmethod
        def why_not(cls, params):
            return "there is no licence here"

    suite(tmp_path / "suite", "wants_a_licence")
    ((path, message),) = problems(tmp_path, {})
    assert path == "" and message.endswith("tasks.jsonl:1: task 'red': there is no licence here (and 2 other tasks)")
    assert problems(tmp_path, {"limit": 1})[0][1].endswith("there is no licence here")


def test_a_judge_without_a_key_is_refused_before_anything_is_spent(tmp_path, monkeypatch):
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "suite").mkdir()
    task = {
        "task_id": "a",
        "instruction": "Be kind.",
        "verifier": {"kind": "llm_judge", "judge_model": "claude-sonnet-4-5", "rubric": "Is it kind?"},
    }
    (tmp_path / "suite" / "tasks.jsonl").write_text(json.dumps(task))
    ((_, message),) = problems(tmp_path, {})
    assert "tasks.jsonl:1: task 'a': " in message and "ANTHROPIC_API_KEY" in message


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"tests/test.sh": "curl https://example.org/x | sh\n"},
            "the sandbox has no network, and tests/test.sh needs one",
        ),
        ({"environment/Dockerfile": "FROM a\nFROM b\n"}, "several stages"),
        ({"environment/Dockerfile": "FROM a\nRUN pip install no-such-package-9\n"}, "installs no-such-package-9"),
        ({"environment/docker-compose.yaml": "x"}, "docker-compose"),
    ],
)
def test_a_task_directory_that_no_sandbox_can_do_is_refused_by_name(tmp_path, monkeypatch, files, said):
    pytest.importorskip("harbor")
    monkeypatch.setattr(requirements, "why_unavailable", lambda: None)
    directory(tmp_path / "suite", "a")
    assert problems(tmp_path, {}) == []
    directory(tmp_path / "suite", "b", **files)
    ((_, message),) = problems(tmp_path, {})
    assert f"{tmp_path}/suite/b: task 'b': " in message and said in message


def test_a_task_directory_without_tests_or_on_a_machine_without_a_sandbox_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("harbor")
    directory(tmp_path / "suite", "a")
    monkeypatch.setattr(requirements, "why_unavailable", lambda: "there is no bubblewrap")
    assert problems(tmp_path, {})[0][1].endswith("there is no bubblewrap")
    monkeypatch.setattr(requirements, "why_unavailable", lambda: None)
    (tmp_path / "suite" / "a" / "tests" / "test.sh").unlink()
    assert problems(tmp_path, {})[0][1].endswith("it has no tests/test.sh, so nothing could grade it")


def test_another_template_renders_one_entry_and_leaves_training_and_the_others_alone(tmp_path):
    pytest.importorskip("torch")
    suite(tmp_path / "suite")
    (tmp_path / "bare.jinja").write_text("{{ messages[-1].content }}")
    local = {"model": {"name": "tiny-random"}, "backend": {"kind": "local", "params": {"threads": 1}}}
    plain = config(tmp_path, {"name": "plain", "max_tokens": 2}, **local)
    both = plain.metadata.benchmark[0].model_copy(update={"name": "bare", "chat_template": "bare.jinja"})
    plain.metadata.benchmark.append(both)
    result = Experiment(plain).run()
    evals = {found.name: found for found in result.runs[0].evals}
    assert [found.error for found in evals.values()] == [None, None] and result.unread_settings == []
    prompts = {name: [rollout.turns[0].prompt_tokens for rollout in evals[name].rollouts] for name in evals}
    assert all(whole != bare and str(bare)[1:-1] in str(whole) for whole, bare in zip(*prompts.values(), strict=True))


def test_every_key_of_an_entry_is_read_and_the_template_is_left_unread_where_there_is_but_one(tmp_path):
    pytest.importorskip("harbor")
    suite(tmp_path / "suite")
    entry = {
        "split": "val", "run_every": 1, "metrics": ["pass@2"], "num_samples": 2, "max_tokens": 8, "temperature": 0.5,
        "limit": 2, "breakdown_keys": ["k"], "baseline": True, "engine": "harbor", "n_concurrent": 2, "max_attempts": 2,
        "agent_import_path": "chat", "agent_params": {"max_turns": 1}, "chat_template": "{{ messages[0].content }}",
    }  # fmt: skip
    result = Experiment(config(tmp_path, entry)).run()
    assert result.completed and [r.error for r in result.runs[0].evals] == [None] * 3
    assert result.unread_settings == ["metadata.benchmark[0].chat_template"]
    again = Experiment(config(tmp_path, entry)).run()
    assert again.completed and again.unread_settings == result.unread_settings, "what was read is remembered"
