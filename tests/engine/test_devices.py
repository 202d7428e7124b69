"""Which device and precision the engine takes by itself."""

from __future__ import annotations

import pytest
import torch

from evsys_engine.devices import choose_device, choose_dtype, choose_limits
from evsys_engine.engine import Engine
from evsys_engine.types import EngineError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("fpu avx2 fma", torch.float32),
        ("fpu avx2 avx512f", torch.float32),
        ("avx512f avx512_bf16", torch.bfloat16),
        ("amx_bf16 amx_tile", torch.bfloat16),
    ],
)
def test_a_cpu_gets_bf16_only_where_it_is_fast(tmp_path, flags, dtype):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbogomips\t: 1\n")
    assert choose_dtype("auto", CPU, cpuinfo) is dtype


def test_a_system_that_does_not_tell_its_flags_gets_fp32(tmp_path):
    assert choose_dtype("auto", CPU, tmp_path / "missing") is torch.float32


def test_a_gpu_gets_bf16_and_what_was_asked_for_wins():
    assert choose_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert choose_dtype("fp32", torch.device("cuda")) is torch.float32
    assert choose_dtype("bfloat16", CPU) is torch.bfloat16


def test_auto_is_the_gpu_if_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto").type == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == "cpu"


@pytest.mark.parametrize("asked", ["gpu", "tpu:1", "mps"])
def test_an_unknown_device_is_refused_with_the_known_ones(asked):
    with pytest.raises(EngineError, match=f"device '{asked}' is not one of auto, cpu, cuda"):
        choose_device(asked)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(EngineError, match="'cuda:3': torch sees 1 GPUs here; use device: cpu or auto"):
        choose_device("cuda:3")


def test_an_unknown_dtype_is_refused_with_the_known_ones():
    with pytest.raises(EngineError, match="dtype 'int4' is not one of auto, float32"):
        choose_dtype("int4", CPU)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(EngineError, match=r"is not a model directory: it has no config\.json"):
        Engine.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError, match="cannot be loaded as a causal language model"):
        Engine.load(tmp_path)


def test_the_models_own_facts_are_reported(llama, model_dirs):
    info = llama.info
    assert (info.vocab_size, info.max_length, info.device, info.dtype) == (320, 128, "cpu", "float32")
    assert info.path == model_dirs["llama"] and info.name == model_dirs["llama"].name
    assert info.parameters == sum(value.numel() for value in llama.model.parameters())
    assert llama.tokenizer.decode(llama.tokenizer.encode("So, 2 x 3?")) == "So, 2 x 3?"


def test_a_budget_below_one_token_is_refused(llama):
    with pytest.raises(EngineError, match="max_batch_tokens must be 1 or more, not 0"):
        choose_limits(llama.model.config, CPU, torch.float32, 0)
