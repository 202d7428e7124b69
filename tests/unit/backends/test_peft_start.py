"""A PEFT adapter made elsewhere is trained further on the local backend; what is not plain LoRA is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from evsys_engine.models import find_model
from evsys_sdk.backends.local import LocalBackend
from evsys_sdk.checks.preflight import validate_yaml
from evsys_sdk.errors import BackendError, ConfigError
from evsys_sdk.registry import algorithms
from evsys_sdk.testing import training_context

ROWS = [{"messages": [{"role": "user", "content": "say"}, {"role": "assistant", "content": "red"}]}]


@pytest.fixture(scope="module")
def base():
    return find_model("tiny-random").path


def peft_folder(base: Path, folder: Path, **settings) -> Path:
    """An adapter that PEFT itself made, with numbers in both factors."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(**{"r": 3, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"], **settings})
    model = get_peft_model(model, config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if ".lora_B." in name:
                tensor.normal_(std=0.05)
    model.save_pretrained(folder)
    return folder


def train(folder: Path, start: Path | str, kind: str = "sft", **params):
    ctx = training_context(folder, ROWS, backend=LocalBackend(threads=1), model_name="tiny-random")
    ctx.start_from = str(start)
    return algorithms.build(kind, {"max_steps": 1, **params}).train(ctx)


def logits(base: Path, folder: str | Path):
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(folder))
    return model.eval()(torch.tensor([[5, 6, 7]])).logits.detach()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": "all-linear"},
        {"layers_to_transform": [1]},
        {"target_modules": ["up_proj", "o_proj"]},
    ],
)
def test_training_resumes_from_the_adapter_with_its_own_rank_alpha_and_layers(base, tmp_path, settings):
    start = peft_folder(base, tmp_path / "peft", **settings)
    result = train(tmp_path / "run", start, learning_rate=1e-9)
    assert result.extras["lora_rank"] == 3
    # With next to no learning rate the trained weights say what the adapter said.
    assert torch.allclose(logits(base, result.artifacts["final_sampler"]), logits(base, start), atol=1e-5)
    saved = json.loads((Path(result.artifacts["final_sampler"]) / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"]) == (3, 12)
    # Of an adapted head PEFT also saves the base model's weights, which are no part of the adapter.
    names = {name for name in load_file(start / "adapter_model.safetensors") if ".lora_" in name}
    assert load_file(Path(result.artifacts["final_sampler"]) / "adapter_model.safetensors").keys() == names


def test_an_adapted_head_over_other_weights_is_refused(base, tmp_path):
    start = peft_folder(base, tmp_path / "peft", target_modules=["lm_head"])
    tensors = load_file(start / "adapter_model.safetensors")
    (name,) = (name for name in tensors if name.endswith(".base_layer.weight"))
    save_file({**tensors, name: tensors[name] + 0.1}, start / "adapter_model.safetensors")
    with pytest.raises(BackendError, match="trained over other weights of lm_head than this model's"):
        train(tmp_path / "run", start)


def test_it_learns_and_a_second_run_resumes_from_the_first_ones_state(base, tmp_path):
    start = peft_folder(base, tmp_path / "peft")
    first = train(tmp_path / "one", start, learning_rate=0.01, max_steps=5)
    assert first.metrics["final_loss"] < first.metrics["first_loss"]
    second = train(tmp_path / "two", first.artifacts["final_checkpoint"], learning_rate=0.01, max_steps=2)
    assert second.metrics["first_loss"] < first.metrics["final_loss"]


def test_trl_resumes_from_it_too(base, tmp_path):
    pytest.importorskip("trl")
    start = peft_folder(base, tmp_path / "peft")
    result = train(tmp_path / "run", start, "local_sft", learning_rate=1e-9)
    assert torch.allclose(logits(base, result.artifacts["final_sampler"]), logits(base, start), atol=1e-5)


def config(start: Path, backend: str = "local", **params) -> str:
    run = {
        "name": "r",
        "data": {"source_kind": "in_memory", "rows": ROWS},
        "model": {"name": "tiny-random", "load_checkpoint_path": str(start)},
        "algorithm": {"kind": "sft", "params": {"max_steps": 1, **params}},
        "backend": {"kind": backend},
    }
    return yaml.safe_dump({"name": "e", "run": run})


def refusal(tmp_path: Path, start: Path, **more) -> str:
    (tmp_path / "config.yaml").write_text(config(start, **more))
    with pytest.raises(ConfigError) as caught:
        validate_yaml(tmp_path / "config.yaml", deep=True)
    assert "model.load_checkpoint_path" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"use_rslora": True}, "use_rslora"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias: all"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"lora_bias": True}, "lora_bias"),
        ({"kasa_config": {"beta": 1e-4, "gamma": 1e-3}}, "kasa_config"),
        ({"velora_config": {"num_groups": 2}}, "velora_config"),
        ({"monteclora_config": {"num_samples": 4}}, "monteclora_config"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: pissa_niter_4"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": 0}, "r must be"),
        ({"lora_alpha": "x"}, "lora_alpha must be"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name_at_validation(base, tmp_path, changed, word):
    start = peft_folder(base, tmp_path / "peft")
    settings = json.loads((start / "adapter_config.json").read_text())
    (start / "adapter_config.json").write_text(json.dumps({**settings, **changed}))
    assert word in refusal(tmp_path, start)


def test_strange_tensors_and_missing_files_are_refused_at_validation(base, tmp_path):
    start = peft_folder(base, tmp_path / "peft")
    tensors = load_file(start / "adapter_model.safetensors")
    save_file({**tensors, "base_model.model.lm_head.weight": torch.zeros(2)}, start / "adapter_model.safetensors")
    assert "base_model.model.lm_head.weight" in refusal(tmp_path, start)
    (start / "adapter_model.safetensors").rename(start / "adapter_model.bin")
    assert "adapter_model.bin is a pickle" in refusal(tmp_path, start)


def test_another_rank_and_another_backend_are_refused_at_validation(base, tmp_path):
    start = peft_folder(base, tmp_path / "peft")
    assert "this adapter has rank 3, and lora_rank is 8" in refusal(tmp_path, start, lora_rank=8)
    assert "PEFT adapter" in refusal(tmp_path, start, backend="mock")
    (tmp_path / "config.yaml").write_text(config(start, lora_rank=3))
    validate_yaml(tmp_path / "config.yaml", deep=True)


def test_layers_that_the_engine_does_not_train_are_named(base, tmp_path):
    start = peft_folder(base, tmp_path / "peft", target_modules=["q_proj", "embed_tokens"])
    assert "lora_embedding" in refusal(tmp_path, start)
