from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evsys_sdk.cli.main import main

pytest.importorskip("tokenizers")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache, and no hub in reach."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVSYS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def test_list_shows_what_could_be_used_and_what_is_here(cache, capsys):
    main(["model", "pull", "tiny-random"])
    capsys.readouterr()
    assert main(["model", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "source", "state", "size", "about"]
    assert lines[1].startswith("smollm2-135m-instruct  builtin  not here  92.9 MB to fetch")
    assert lines[2].startswith("tiny-random            builtin  ready     ")
    assert lines[-1] == f"cache: {cache}"


def test_list_as_json(cache, capsys):
    assert main(["model", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["cache"] == str(cache)
    assert [(model["name"], model["state"], model["path"]) for model in listed["models"]] == [
        ("smollm2-135m-instruct", "not here", None),
        ("tiny-random", "not here", None),
    ]


def test_pull_makes_the_model_and_says_where(cache, capsys):
    assert main(["model", "pull", "tiny-random"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("tiny-random: ready, ") and str(cache / "tiny-random") in printed
    assert (cache / "tiny-random/model.safetensors").is_file()


def test_pull_as_json_keeps_its_progress_off_stdout(cache, capsys, monkeypatch):
    import evsys_engine.models as models

    real = models.find_model

    def find_slowly(name, **options):
        options["say"]("fetching")
        return real(name, **options)

    monkeypatch.setattr(models, "find_model", find_slowly)
    assert main(["model", "pull", "tiny-random", "--json"]) == 0
    captured = capsys.readouterr()
    pulled = json.loads(captured.out)
    assert pulled["path"] == str(cache / "tiny-random") and pulled["seconds"] >= 0
    assert captured.err == "fetching\n"


def test_info_tells_the_measures_of_a_model(cache, capsys):
    assert main(["model", "info", "tiny-random"]) == 0
    shown = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    told = {label: text.strip() for label, text in shown.items()}
    assert told["architecture"] == "LlamaForCausalLM, 2 layers, hidden 64"
    assert told["vocabulary"] == "384" and told["context"] == "2,048 tokens"
    assert told["chat template"] == "yes"
    assert told["memory to train"].startswith("about 906.7 MB with an adapter")
    assert told["path"] == str(cache / "tiny-random")


def test_info_as_json_has_plain_numbers(cache, capsys):
    assert main(["model", "info", "tiny-random", "--json"]) == 0
    card = json.loads(capsys.readouterr().out)
    assert card["parameters"] == 98_624 and card["chat_template"] is True
    assert card["disk_bytes"] == sum(path.stat().st_size for path in (cache / "tiny-random").iterdir())


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["info", "smollm2-135m-instruct"], "next: evsys model pull smollm2-135m-instruct"),
        (["info", "org/unknown"], "where a hub can be reached: evsys model pull org/unknown"),
        (["pull", "tiny-randon"], "a built-in model: tiny-random"),
        (["pull", "nowhere.gguf"], "No such file or directory"),
    ],
)
def test_a_missing_model_is_exit_code_1_and_a_way_out(words, part, cache, capsys):
    assert main(["model", *words]) == 1
    captured = capsys.readouterr()
    assert part in captured.err and captured.out == ""


@pytest.mark.parametrize("words", [["list"], ["pull", "tiny-random"], ["info", "tiny-random"]])
def test_no_verb_loads_torch(words, cache):
    code = (
        "import sys; from evsys_sdk.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    done = subprocess.run([sys.executable, "-c", code, "model", *words], env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def trained_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two steps on the local backend, with a checkpoint of each."""
    pytest.importorskip("torch")
    import yaml

    from evsys_sdk import run_experiment

    monkeypatch.chdir(tmp_path)
    chat = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "red"}]
    run = {
        "name": "first",
        "data": {"source_kind": "in_memory", "rows": [{"messages": chat}]},
        "model": {"name": "tiny-random"},
        "algorithm": {"kind": "sft", "params": {"max_steps": 2, "save_every": 1, "learning_rate": 0.1}},
        "backend": {"kind": "local", "params": {"threads": 1}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"name": "exp", "run": run}))
    run_experiment(tmp_path / "config.yaml")
    return tmp_path / "outputs" / "first"


def test_export_writes_the_weights_of_a_run_or_of_one_of_its_checkpoints(trained_run, capsys):
    import torch
    from transformers import AutoModelForCausalLM

    def said(folder: str | Path) -> torch.Tensor:
        return AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([[5, 6, 7]])).logits

    capsys.readouterr()
    assert main(["model", "export", str(trained_run), "--to", "merged", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["form"], told["base_model"]) == ("merged", "tiny-random")
    assert told["path"] == str(Path("first-merged").absolute()) and told["bytes"] > 100_000
    assert main(["model", "export", "exp/first@step-1", "--to", "merged"]) == 0
    assert main(["model", "export", str(trained_run), "--checkpoint", "2", "--to", "merged"]) == 0
    assert torch.equal(said("first-2-merged"), said("first-merged"))
    assert (said("first-step-1-merged") - said("first-merged")).abs().max() > 1e-3
    assert main(["model", "export", str(trained_run), "--to", "peft", "-o", "deep/er/peft"]) == 0
    assert Path("deep/er/peft/adapter_config.json").is_file()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["outputs/first@step-9", "--to", "peft"],
            ["'step-9' is not a checkpoint of this run", "final, latest, step-1, step-2"],
        ),
        (["nothing", "--to", "peft"], ["nothing"]),
        (["tiny-random", "--to", "peft"], ["untrained model has no adapter", "--to merged"]),
    ],
)
def test_export_says_what_it_cannot_export(trained_run, capsys, args, words):
    capsys.readouterr()
    assert main(["model", "export", *args]) == 1
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


def test_the_mock_has_no_weights_to_export(tmp_path, monkeypatch, capsys):
    import yaml

    from evsys_sdk import run_experiment

    monkeypatch.chdir(tmp_path)
    run = {
        "name": "first",
        "data": {"source_kind": "in_memory", "rows": [{"prompt": "a", "completion": "b"}],
                 "transforms": [{"kind": "jsonl_to_chat"}]},
        "model": {"name": "table"},
        "algorithm": {"kind": "sft", "params": {"max_steps": 1}},
        "backend": {"kind": "mock"},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"name": "exp", "run": run}))
    run_experiment(tmp_path / "config.yaml")
    capsys.readouterr()
    assert main(["model", "export", "outputs/first", "--to", "merged"]) == 1
    assert "backend 'mock'; only the backend local keeps weights" in capsys.readouterr().err
