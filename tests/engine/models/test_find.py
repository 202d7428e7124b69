"""Which kind of name is which, and what is said of a name that leads nowhere."""

from __future__ import annotations

import json
import shutil

import pytest

from evsys_engine.models import ModelError, find_model


def test_a_directory_is_taken_where_it_lies(tiny, tmp_path, monkeypatch):
    shutil.copytree(tiny, tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    found = find_model("mine", cache=tmp_path / "cache")
    assert (found.name, found.path, found.source) == ("mine", (tmp_path / "mine").resolve(), "directory")
    assert not (tmp_path / "cache").exists()


def test_a_directory_is_preferred_to_a_hub_id_of_the_same_form(tiny, tmp_path, monkeypatch):
    shutil.copytree(tiny, tmp_path / "models/mine")
    monkeypatch.chdir(tmp_path)
    assert find_model("models/mine").source == "directory"


def test_a_home_directory_is_understood(tiny, tmp_path, monkeypatch):
    shutil.copytree(tiny, tmp_path / "mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("~/mine").path == tmp_path / "mine"


@pytest.mark.parametrize(
    ("gone", "reason"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no weights"),
        ("tokenizer*.json", "no tokenizer files"),
    ],
)
def test_an_incomplete_directory_says_what_it_lacks(gone, reason, tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "mine")
    for path in (tmp_path / "mine").glob(gone):
        path.unlink()
    with pytest.raises(ModelError, match=f"not a whole Hugging Face model: {reason}"):
        find_model(str(tmp_path / "mine"))


def test_a_directory_with_a_missing_shard_is_refused(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "mine")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "mine/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"1 of 2 weight files are missing .*model-00002-of-00002"):
        find_model(str(tmp_path / "mine"))


def test_a_directory_of_gguf_files_names_the_file_to_give(tmp_path):
    (tmp_path / "some.gguf").touch()
    with pytest.raises(ModelError, match=r"name the file itself: .*some\.gguf"):
        find_model(str(tmp_path))


def test_an_adapter_is_not_a_model(tiny, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(tiny / name, tmp_path)
    (tmp_path / "adapter_config.json").touch()
    shutil.copy(tiny / "model.safetensors", tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="holds an adapter, not a model"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("smollm2-135m", "smollm2-135m-instruct"),
        ("SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("tiny_random", "tiny-random"),
        ("gpt-17", "smollm2-135m-instruct"),
        ("./nowhere/at/all", "smollm2-135m-instruct"),
        ("nowhere.gguf", "smollm2-135m-instruct"),
    ],
)
def test_a_name_that_leads_nowhere_is_answered_with_what_would(name, near, tmp_path):
    with pytest.raises(ModelError) as caught:
        find_model(name, cache=tmp_path)
    assert repr(name) in str(caught.value)
    assert f"a built-in model: {near} " in str(caught.value)
    assert "evsys model pull" not in str(caught.value), "it is no hub id"
