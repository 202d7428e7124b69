"""GGUF in, Hugging Face out: the same numbers, the same answers, or a refusal that says why."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from evsys_engine.models import ModelError, find_model
from evsys_engine.models import gguf as conversion

SHAPE = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}  # fmt: skip
TOKENS = torch.tensor([[1, 40, 300, 7, 7, 383, 2, 90]])


def _logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(TOKENS).logits


def test_a_llama_file_comes_back_bit_for_bit(tiny, write_gguf, tmp_path):
    folder = find_model(str(write_gguf()), cache=tmp_path / "cache").path
    before, after = load_file(tiny / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert json.loads((folder / "config.json").read_text()) == json.loads((tiny / "config.json").read_text()) | {
        "pad_token_id": 2
    }


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1", "Q4_0"])
def test_a_quantised_file_gives_what_transformers_makes_of_it(kind, write_gguf, tmp_path):
    file = write_gguf(quantisation=gguf.GGMLQuantizationType[kind])
    folder = find_model(str(file), cache=tmp_path / "cache").path
    ours = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (Qwen2ForCausalLM, Qwen2Config(**SHAPE, tie_word_embeddings=False)),
        (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True)),
    ],
    ids=["qwen2", "qwen3"],
)
def test_a_qwen_model_answers_as_before_its_trip_through_gguf(model_class, config, tiny, write_gguf, tmp_path):
    torch.manual_seed(3)
    model = model_class(config)
    for parameter in model.parameters():  # biases and norms too, which start as 0 and 1
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "before")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "before" / name).write_bytes((tiny / name).read_bytes())
    file = write_gguf(tmp_path / "before", pre="qwen2")
    folder = find_model(str(file), cache=tmp_path / "cache").path
    assert torch.equal(_logits(folder), _logits(tmp_path / "before"))


def test_large_weights_are_split_over_files_that_transformers_reads(tiny, write_gguf, tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "SHARD_BYTES", 100_000)
    folder = find_model(str(write_gguf()), cache=tmp_path / "cache").path
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    assert torch.equal(_logits(folder), _logits(tiny))


def test_the_folder_is_named_by_the_files_content(write_gguf, tmp_path):
    cache = tmp_path / "cache"
    first = find_model(str(write_gguf()), cache=cache)
    again = find_model(str(write_gguf(name="moved.gguf").rename(tmp_path / "model.gguf")), cache=cache)
    other = find_model(str(write_gguf(template="{{ messages }}")), cache=cache)
    assert first.path == again.path != other.path
    assert first.sha256[:12] in first.path.name
    assert json.loads((first.path / "evsys.json").read_text())["sha256"] == first.sha256


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "gemma2"}, "architecture 'gemma2'; read are llama, qwen2, qwen3"),
        ({"without": "blk.1.ffn_up.weight"}, "lacks the tensor blk.1.ffn_up.weight"),
        ({"extra_tensor": "blk.0.ffn_gate_inp.weight"}, "has the tensor blk.0.ffn_gate_inp.weight"),
        ({"extra_tensor": "rope_freqs.weight"}, "scales its rotary positions"),
        ({"llama__rope__scaling__type": "yarn"}, "scales its rotary positions"),
        ({"split__count": 3}, "one of 3 parts"),
        ({"kind": "llama"}, "tokenizer is of kind 'llama'"),
        ({"pre": "tekken"}, "of the kind 'tekken'; read are byte-level BPE of the kinds smollm, gpt-2, qwen2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_file_that_would_come_out_wrong_is_refused(changes, reason, write_gguf, tmp_path):
    with pytest.raises(ModelError, match=reason) as caught:
        find_model(str(write_gguf(**changes)), cache=tmp_path / "cache")
    assert "model.gguf" in str(caught.value)
    assert [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize("size", [0, 3, 2000, -200])
def test_a_torn_file_is_refused(size, write_gguf, tmp_path):
    file = write_gguf()
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"model\.gguf"):
        find_model(str(file), cache=tmp_path / "cache")
