"""Weights that others read: peft, transformers, and our own sampler."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from evsys_engine.engine import Engine
from evsys_engine.export import read_weights
from evsys_engine.lora import ATTENTION, MLP
from evsys_engine.types import AdamParams, BadRequest, LoraSettings, SampleRequest, TrainingDatum


def trained(engine, make_data, **settings):
    adapter = engine.create_adapter(LoraSettings(**{"rank": 4, **settings}))
    for step in range(3):
        adapter.forward_backward(make_data(seed=step), "cross_entropy")
        adapter.optim_step(AdamParams(learning_rate=1e-2))
    return adapter


def assert_same_logprobs(adapter, model, data):
    for datum, ours in zip(data, adapter.forward(data, "cross_entropy").logprobs, strict=True):
        with torch.no_grad():
            logp = model(torch.tensor([datum.tokens])).logits[0].log_softmax(-1)
        targets = torch.as_tensor(datum.inputs["target_tokens"])
        np.testing.assert_allclose(ours, logp.gather(1, targets[:, None])[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "settings", [{}, {"train_unembed": True, "alpha": 7.5}, {"train_mlp": False}, {"train_attn": False}]
)
def test_peft_reads_an_adapter_and_says_the_same(engine, model_dir, make_data, tmp_path, settings):
    adapter = trained(engine, make_data, **settings)
    adapter.save_weights(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    untrained = base(torch.tensor([[1, 2, 3]])).logits.detach()
    model = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    assert (model(torch.tensor([[1, 2, 3]])).logits - untrained).abs().max() > 0.1
    assert_same_logprobs(adapter, model, make_data())


def test_the_adapter_config_says_what_peft_needs(llama, adapter, model_dirs, tmp_path):
    adapter.save_weights(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model_dirs["llama"])
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 32, "CAUSAL_LM")
    assert set(config["target_modules"]) == {*ATTENTION, *MLP}


def test_transformers_reads_a_rank_0_model_and_says_the_same(engine, make_data, tmp_path):
    adapter = trained(engine, make_data, rank=0)
    adapter.save_weights(tmp_path / "whole")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    assert_same_logprobs(adapter, model, make_data())
    assert AutoTokenizer.from_pretrained(tmp_path / "whole").encode("abc") == engine.tokenizer.encode("abc")


@pytest.fixture
def samplers(monkeypatch):
    """Stands in for the sampler: notes what it was made of."""
    made = []
    stand_in = SimpleNamespace(BatchSampler=lambda **given: made.append(given))
    monkeypatch.setitem(sys.modules, "evsys_engine.scheduler", stand_in)
    return made


def test_a_sampler_over_an_adapter_gets_its_pairs(llama, make_data, tmp_path, samplers):
    adapter = trained(llama, make_data)
    adapter.save_weights(tmp_path / "adapter")
    llama.load_sampler(tmp_path / "adapter")
    given = samplers[0]
    assert given["engine_model"] is llama.model and given["lock"] is llama.lock and given["full"] is None
    assert given["lora"].keys() == adapter._weights.pairs.keys()
    for name, (a, b, scale) in given["lora"].items():
        own = adapter._weights.pairs[name]
        assert torch.equal(a, own.a) and torch.equal(b, own.b) and scale == own.scale == 8.0


def test_a_sampler_over_a_whole_model_gets_every_tensor(llama, make_data, tmp_path, samplers):
    adapter = trained(llama, make_data, rank=0)
    adapter.save_weights(tmp_path / "whole")
    llama.load_sampler(tmp_path / "whole")
    full = samplers[0]["full"]
    assert full.keys() == dict(llama.model.named_parameters(remove_duplicate=False)).keys()
    assert all(torch.equal(full[name], own) for name, own in adapter._weights.parameters.items())


@pytest.mark.parametrize("settings", [{}, {"train_unembed": True}, {"rank": 0}])
def test_the_sampler_says_of_a_text_what_the_adapter_says(engine, make_data, tmp_path, settings):
    adapter, (datum,) = trained(engine, make_data, **settings), make_data((20,))
    text = [*datum.tokens, 5]
    shifted = TrainingDatum(
        tokens=datum.tokens, inputs={"target_tokens": np.array(text[1:]), "weights": np.ones(20, np.float32)}
    )
    adapter.save_weights(tmp_path / "weights")
    sampler = engine.load_sampler(tmp_path / "weights")
    (result,) = sampler.sample([SampleRequest(tokens=text, max_tokens=1, prompt_logprobs=True)])
    sampler.close()
    ours = adapter.forward([shifted], "cross_entropy").logprobs[0]
    np.testing.assert_allclose(result.prompt_logprobs[1:], ours, rtol=0, atol=1e-4)


def test_a_sampler_over_the_base_gets_nothing_else(llama, samplers):
    llama.load_sampler(None)
    assert samplers[0]["lora"] is None and samplers[0]["full"] is None


def test_an_adapter_that_peft_itself_saved_is_read_too(llama, model_dirs, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(model_dirs["llama"])
    theirs = get_peft_model(base, LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj"], init_lora_weights=False))
    theirs.save_pretrained(tmp_path / "peft")
    pairs, full = read_weights(tmp_path / "peft", llama.model, llama.info)
    layer = theirs.base_model.model.model.layers[1].self_attn.q_proj
    assert full is None and pairs.keys() == {f"model.layers.{index}.self_attn.q_proj" for index in range(2)}
    pair = pairs["model.layers.1.self_attn.q_proj"]
    assert torch.equal(pair.a, layer.lora_A["default"].weight) and pair.scale == 1.5


def test_an_adapter_that_is_not_plain_lora_is_refused(llama, model_dirs, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(model_dirs["llama"])
    config = LoraConfig(r=2, target_modules=["q_proj"], use_rslora=True)
    get_peft_model(base, config).save_pretrained(tmp_path / "peft")
    with pytest.raises(BadRequest, match="is not plain LoRA \\(use_rslora\\)"):
        llama.load_sampler(tmp_path / "peft")


def test_a_damaged_or_foreign_folder_is_refused(llama, adapter, model_dirs, tmp_path):
    adapter.save_weights(tmp_path / "adapter")
    other = Engine.load(model_dirs["qwen3"], device="cpu")
    with pytest.raises(BadRequest, match="was trained over"):
        other.load_sampler(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(BadRequest, match=r"is damaged: adapter_model\.safetensors"):
        llama.load_sampler(tmp_path / "adapter")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(BadRequest, match=r"neither adapter_config\.json nor config\.json"):
        llama.load_sampler(tmp_path / "nothing")


def test_saved_weights_do_not_follow_later_training(llama, make_data, tmp_path):
    adapter = trained(llama, make_data)
    adapter.save_weights(tmp_path / "adapter")
    before, _ = read_weights(tmp_path / "adapter", llama.model, llama.info)
    adapter.forward_backward(make_data(), "cross_entropy")
    adapter.optim_step(AdamParams(learning_rate=1.0))
    after, _ = read_weights(tmp_path / "adapter", llama.model, llama.info)
    assert all(torch.equal(before[name].b, after[name].b) for name in before)
