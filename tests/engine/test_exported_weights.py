"""Trained weights for other programs: what peft, transformers and GGUF readers load says what the engine says."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from evsys_engine.engine import Engine
from evsys_engine.export import export_model
from evsys_engine.models import find_model
from evsys_engine.models.errors import ModelError
from evsys_engine.models.gguf_writer import PROBE
from evsys_engine.types import AdamParams, BadRequest, LoraSettings

SHAPE = {
    "vocab_size": 400,  # the tokenizer has 384
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": False, "head_dim": 128}),
}
TOKENS = torch.tensor([[5, 90, 301, 7, 12, 44]])


def make_base(folder, family, **extra):
    model_class, config_class, more = FAMILIES[family]
    torch.manual_seed(11)
    model = model_class(config_class(**{**SHAPE, **more, **extra}))
    if family == "qwen2":
        for layer in model.model.layers:  # biases of zero would hide a mistake
            torch.nn.init.normal_(layer.self_attn.q_proj.bias, std=0.5)
    model.save_pretrained(folder)
    tiny = find_model("tiny-random").path
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(tiny / name, folder / name)
    return folder


def train(base, folder, make_data, **settings):
    engine = Engine.load(base, name="base", dtype="float32", threads=1)
    adapter = engine.create_adapter(LoraSettings(**{"rank": 3, "alpha": 12.0, **settings}))
    for step in range(2):
        adapter.forward_backward(make_data(seed=step), "cross_entropy")
        adapter.optim_step(AdamParams(learning_rate=1e-2))
    adapter.save_weights(folder)
    return folder


@pytest.fixture(params=sorted(FAMILIES))
def family(request):
    return request.param


@pytest.fixture
def base(tmp_path, family):
    return make_base(tmp_path / "base", family)


def logits(folder, **more):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()
    with torch.no_grad():
        return model(TOKENS).logits


def peft_logits(base, adapter):
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(adapter))
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.mark.parametrize("settings", [{}, {"train_unembed": True}])
def test_all_three_forms_say_the_same(tmp_path, base, family, make_data, settings):
    weights = train(base, tmp_path / "weights", make_data, **settings)
    wanted = peft_logits(base, weights)
    assert (wanted - logits(base)).abs().max() > 0.1

    export_model("peft", base, weights, tmp_path / "peft", base_name=str(base))
    assert torch.equal(peft_logits(base, tmp_path / "peft"), wanted)
    export_model("merged", base, weights, tmp_path / "merged", base_name=str(base))
    assert torch.allclose(logits(tmp_path / "merged"), wanted, atol=1e-4)
    (tmp_path / "any").touch()
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "merged").iterdir()}
    assert set(modes.values()) == {(tmp_path / "any").stat().st_mode}, modes
    for number_type, error in (("f32", 1e-4), ("f16", 0.02), ("q8_0", 0.3)):
        file = tmp_path / f"{number_type}.gguf"
        export_model("gguf", base, weights, file, base_name=str(base), number_type=number_type)
        read_by_transformers = logits(tmp_path, gguf_file=file.name)
        assert (read_by_transformers - wanted).abs().max() < error, number_type
        ours = find_model(str(file), cache=tmp_path / "cache")
        assert (logits(ours.path) - wanted).abs().max() < error, number_type


def test_a_gguf_file_keeps_the_tokenizer_and_the_chat_template(tmp_path, base):
    export_model("gguf", base, None, tmp_path / "m.gguf", base_name=str(base))
    again = AutoTokenizer.from_pretrained(find_model(str(tmp_path / "m.gguf"), cache=tmp_path / "cache").path)
    first = AutoTokenizer.from_pretrained(base)
    for text in (PROBE, "<|im_start|>user\nhello<|im_end|>\n", "12 ab"):
        assert again.encode(text) == first.encode(text)
    assert again.chat_template == first.chat_template
    assert (again.eos_token, again.bos_token, again.pad_token) == (first.eos_token, first.bos_token, first.pad_token)


def test_weights_that_were_trained_whole_are_exported_whole(tmp_path, make_data):
    base = make_base(tmp_path / "base", "llama")
    weights = train(base, tmp_path / "weights", make_data, rank=0)
    export_model("merged", base, weights, tmp_path / "merged", base_name="x")
    assert torch.allclose(logits(tmp_path / "merged"), logits(weights), atol=1e-6)
    with pytest.raises(BadRequest, match="trained all weights"):
        export_model("peft", base, weights, tmp_path / "peft", base_name="x")
    assert not (tmp_path / "peft").exists()


def test_what_exists_is_not_overwritten_and_a_failure_leaves_nothing(tmp_path, make_data):
    base = make_base(
        tmp_path / "base", "llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    )
    (tmp_path / "there").mkdir()
    with pytest.raises(BadRequest, match="exists; choose another place"):
        export_model("merged", base, None, tmp_path / "there", base_name="x")
    with pytest.raises(ModelError, match="rope scaling 'linear'"):
        export_model("gguf", base, None, tmp_path / "m.gguf", base_name="x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "there"]


def test_another_family_is_refused_with_the_ones_that_are_known(tmp_path):
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=400)).save_pretrained(tmp_path / "base")
    with pytest.raises(ModelError, match=r"llama, qwen2, qwen3 models, and this one is 'gpt2'.*--to merged"):
        export_model("gguf", tmp_path / "base", None, tmp_path / "m.gguf", base_name="x")


def test_another_base_model_than_the_trained_one_is_refused(tmp_path, make_data):
    base = make_base(tmp_path / "base", "llama")
    weights = train(base, tmp_path / "weights", make_data)
    other = make_base(tmp_path / "other", "llama", initializer_range=0.1)
    with pytest.raises(BadRequest, match="was trained over 'base'"):
        export_model("merged", other, weights, tmp_path / "merged", base_name="x")


def test_a_tokenizer_of_another_kind_is_refused(tmp_path):
    base = make_base(tmp_path / "base", "llama")
    whole = json.loads((base / "tokenizer.json").read_text())
    whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, whole["pre_tokenizer"]]}
    (base / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(ModelError, match="splits text like none of smollm"):
        export_model("gguf", base, None, tmp_path / "m.gguf", base_name="x")


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path):
    base = make_base(tmp_path / "base", "llama")
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
    with pytest.raises(ModelError, match=r"names no end-of-text token.*--to merged"):
        export_model("gguf", base, None, tmp_path / "m.gguf", base_name="x")
