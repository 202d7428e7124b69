"""Weights as others read them: a PEFT adapter, or (rank 0) a whole Hugging Face model; and back, for sampling.

In: an adapter's tensors. Out: a folder that `peft.PeftModel.from_pretrained` or
`AutoModelForCausalLM.from_pretrained` takes. A PEFT folder made elsewhere is read too, if it is plain LoRA; only ours
carry checksums and the base model's fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from evsys_engine.folders import MANIFEST, read_manifest, write_folder
from evsys_engine.lora import ATTENTION, MLP, Pair, target_layers
from evsys_engine.peft_folder import ADAPTER, CONFIG, PREFIX, read_peft_folder
from evsys_engine.quiet import without_progress_bars
from evsys_engine.state import check_model, model_facts, shapes_of
from evsys_engine.types import BadRequest, LoraSettings, ModelInfo

KIND = "sampler weights"


def save_adapter(folder: Path, tensors: dict[str, Tensor], settings: LoraSettings, info: ModelInfo) -> None:
    """A PEFT folder of `<layer>.lora_A` and `<layer>.lora_B` tensors."""

    def write(part: Path) -> None:
        named = {f"{PREFIX}{name}.weight": tensor for name, tensor in tensors.items()}
        save_file(named, part / ADAPTER, metadata={"format": "pt"})
        (part / CONFIG).write_text(json.dumps(_peft_config(tensors, settings, info), indent=2) + "\n")

    write_folder(folder, {"kind": KIND, **model_facts(info)}, write)


def _peft_config(tensors: dict[str, Tensor], settings: LoraSettings, info: ModelInfo) -> dict[str, Any]:
    layers = {name.rpartition(".")[0].rpartition(".")[2] for name in tensors}
    alpha = settings.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(info.path),
        "r": settings.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": sorted(settings.targets or layers),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def save_model(folder: Path, model: Any, tensors: dict[str, Tensor], tokenizer: Any, info: ModelInfo) -> None:
    """A Hugging Face folder of a whole model with these weights."""

    def write(part: Path) -> None:
        with without_progress_bars():
            model.save_pretrained(part, state_dict={name: tensor.to(model.dtype) for name, tensor in tensors.items()})
        tokenizer.save_pretrained(part)

    write_folder(folder, {"kind": KIND, **model_facts(info)}, write)


def read_weights(
    folder: Path, model: Any, info: ModelInfo | None
) -> tuple[dict[str, Pair] | None, dict[str, Tensor] | None]:
    """`(pairs, None)` of an adapter's folder, `(None, tensors)` of a whole model's. `info` says which model they must
    have been trained over; None: the caller has checked that."""
    folder = Path(folder)
    if info is not None and (folder / MANIFEST).exists():
        check_model(folder, read_manifest(folder, KIND), info)
    if (folder / CONFIG).exists():
        return _read_adapter(folder, model), None
    if (folder / "config.json").exists():
        return None, _read_model(folder, model)
    raise BadRequest(f"{folder} holds neither {CONFIG} nor config.json; give a folder that save_weights wrote")


def _read_adapter(folder: Path, model: Any) -> dict[str, Pair]:
    found = read_peft_folder(folder)
    tensors = _tensors(folder)
    return {name: _pair(folder, tensors, name, found.scale, model) for name in found.layers}


def _tensors(folder: Path) -> dict[str, Tensor]:
    try:
        return load_file(folder / ADAPTER)
    except (OSError, SafetensorError) as exc:
        raise BadRequest(f"{folder} is not a whole PEFT adapter ({exc})") from exc


def peft_settings(folder: Path, model: Any, *, seed: int) -> LoraSettings:
    """The settings of an adapter that can take up the weights of a PEFT folder."""
    found = read_peft_folder(folder)
    every = target_layers(model, LoraSettings(rank=found.rank, train_unembed=True))
    strange = sorted(set(found.layers) - set(every))
    if strange:
        names = ", ".join(sorted({name.rpartition(".")[2] for name in strange}))
        raise BadRequest(
            f"{folder} adapts {names}, which this engine does not train in {type(model).__name__}; "
            f"it trains {', '.join((*ATTENTION, *MLP))} and the head"
        )
    ends = {name.rpartition(".")[2] for name in found.layers}
    whole = {name for name in every if name.rpartition(".")[2] in ends} == set(found.layers)
    # Names of kinds of layers where they say it all, so that settings stay short; else every layer's own name.
    targets: tuple[str, ...] = tuple(sorted(ends)) if whole else found.layers
    usual = {name.rpartition(".")[2] for name in target_layers(model, LoraSettings(rank=1))}
    return LoraSettings(rank=found.rank, alpha=found.alpha, seed=seed, targets=() if set(targets) == usual else targets)


def read_peft_weights(folder: Path, shapes: dict[str, torch.Size], info: ModelInfo) -> dict[str, Tensor]:
    """The tensors of a PEFT folder under the names of the engine's own parameters, which have these shapes."""
    if (folder / MANIFEST).exists():
        check_model(folder, read_manifest(folder, KIND), info)
    tensors = {
        name.removeprefix(PREFIX).removesuffix(".weight"): tensor.float() for name, tensor in _tensors(folder).items()
    }
    found = shapes_of(tensors)
    wrong = [name for name in sorted({*shapes, *found}) if shapes.get(name) != found.get(name)]
    if wrong:
        raise BadRequest(f"{folder} does not fit {info.name!r}: {', '.join(wrong[:3])} is missing or of another shape")
    return tensors


def _pair(folder: Path, tensors: dict[str, Tensor], name: str, scale: float, model: Any) -> Pair:
    try:
        layer = model.get_submodule(name)
        a, b = (tensors[f"{PREFIX}{name}.lora_{part}.weight"].float() for part in "AB")
        if (b.shape[0], a.shape[1]) != tuple(layer.weight.shape) or a.shape[0] != b.shape[1]:
            raise ValueError(f"{name}: {tuple(b.shape)} x {tuple(a.shape)} does not fit {tuple(layer.weight.shape)}")
    except (AttributeError, KeyError, ValueError) as exc:
        raise BadRequest(f"{folder} does not fit this model ({exc})") from exc
    return Pair(a.to(layer.weight.device), b.to(layer.weight.device), scale)


def _read_model(folder: Path, model: Any) -> dict[str, Tensor]:
    """All tensors under the names that `model` itself uses."""
    from transformers import AutoModelForCausalLM

    try:
        with without_progress_bars():
            whole = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, local_files_only=True)
    except (OSError, ValueError, SafetensorError) as exc:
        raise BadRequest(f"{folder} is not a whole Hugging Face model ({exc})") from exc
    tensors = {name: tensor.detach().to(model.device) for name, tensor in _named(whole).items()}
    if {name: tensor.shape for name, tensor in tensors.items()} != {n: own.shape for n, own in _named(model).items()}:
        raise BadRequest(f"{folder} holds a model of another shape than {type(model).__name__} loaded here")
    return tensors


def _named(model: torch.nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def fingerprint(model: torch.nn.Module) -> str:
    """What tells this base model from another: names, shapes and a sample of its numbers, at bf16's precision so that
    the dtype it was loaded in does not matter."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        flat = tensor.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 64)][:64]
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(sample.to(device="cpu", dtype=torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
