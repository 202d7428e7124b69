"""What is said of a model without loading it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from evsys_engine.models import describe_model, find_model, list_models
from evsys_engine.models.card import ADAPTER_BYTES, FULL_BYTES, training_bytes


def test_the_card_tells_what_loading_would(tiny, tmp_path):
    found = find_model("tiny-random", cache=tmp_path)
    card = describe_model(found)
    model = AutoModelForCausalLM.from_pretrained(found.path)
    assert card.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert card.architecture == type(model).__name__
    assert (card.layers, card.hidden_size) == (model.config.num_hidden_layers, model.config.hidden_size)
    assert (card.vocab_size, card.context_length) == (model.config.vocab_size, model.config.max_position_embeddings)
    assert card.chat_template
    assert card.disk_bytes == sum(path.stat().st_size for path in found.path.iterdir())


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", "nowhere"])
def test_a_chat_template_is_found_in_either_place(place, tiny, tmp_path):
    folder = Path(shutil.copytree(tiny, tmp_path / "mine"))
    if place != "tokenizer_config.json":
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        del settings["chat_template"]
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if place == "chat_template.jinja":
        (folder / place).write_text("{{ messages }}")
    assert describe_model(find_model(str(folder))).chat_template == (place != "nowhere")


def test_weights_that_only_torch_reads_are_not_guessed_at(tiny, tmp_path):
    folder = Path(shutil.copytree(tiny, tmp_path / "mine"))
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    card = describe_model(find_model(str(folder)))
    assert card.parameters is None and card.lora_bytes is None


def test_the_estimate_of_memory_fits_what_was_measured():
    config = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    # Peak memory of the engine over two steps of 512 tokens of SmolLM2-135M: 2.44 GB with rank 8, 4.42 GB with rank 0.
    assert training_bytes(config, 134_515_008, per_parameter=ADAPTER_BYTES) == pytest.approx(2.44e9, rel=0.05)
    assert training_bytes(config, 134_515_008, per_parameter=FULL_BYTES) == pytest.approx(4.42e9, rel=0.05)
    assert training_bytes({}, 1, per_parameter=4) is None


def test_the_list_shows_built_ins_and_what_was_converted(write_gguf, tmp_path):
    cache = tmp_path / "cache"
    assert [(model.name, model.state) for model in list_models(cache) if model.source != "hub"] == [
        ("smollm2-135m-instruct", "not here"),
        ("tiny-random", "not here"),
    ]
    find_model("tiny-random", cache=cache)
    file = write_gguf()
    find_model(str(file), cache=cache)
    (cache / "gguf-broken-0123").mkdir()
    shelf = [model for model in list_models(cache) if model.source != "hub"]
    assert [(model.name, model.state) for model in shelf[1:]] == [("tiny-random", "ready"), (str(file), "ready")]
    assert all(model.disk_bytes > 100_000 for model in shelf[1:])
    assert shelf[0].download_bytes > 90_000_000
