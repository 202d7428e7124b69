"""Trained weights as a folder or file for other programs: a PEFT adapter, a merged model, a GGUF file.

In: a base model's folder and, if it was trained, the weights that `save_weights` wrote. Out: something that peft,
transformers or llama.cpp loads. What is there already is never overwritten.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from evsys_engine.devices import without_progress_bars
from evsys_engine.folders import MANIFEST, read_manifest, set_modes, write_folder
from evsys_engine.lora import ATTENTION, MLP, Pair, target_layers
from evsys_engine.merging import MergedWeights
from evsys_engine.models.gguf_writer import NumberType, write_gguf
from evsys_engine.peft_folder import ADAPTER, BASE_COPY, CONFIG, PREFIX, is_peft_folder, read_peft_folder
from evsys_engine.state import check_model, model_facts, shapes_of
from evsys_engine.types import BadRequest, LoraSettings, ModelInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Weights as others read them: a PEFT adapter, or (rank 0) a whole Hugging Face model; and back, for sampling.
#
# In: an adapter's tensors. Out: a folder that `peft.PeftModel.from_pretrained` or
# `AutoModelForCausalLM.from_pretrained` takes. A PEFT folder made elsewhere is read too, if it is plain LoRA; only
# ours carry checksums and the base model's fingerprint.


KIND = "sampler weights"


def save_adapter(folder: Path, tensors: dict[str, Tensor], settings: LoraSettings, info: ModelInfo) -> None:
    """A PEFT folder of `<layer>.lora_A` and `<layer>.lora_B` tensors."""

    layers = {name.rpartition(".")[0].rpartition(".")[2] for name in tensors}
    alpha = settings.alpha
    config = {
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

    def write(part: Path) -> None:
        named = {f"{PREFIX}{name}.weight": tensor for name, tensor in tensors.items()}
        save_file(named, part / ADAPTER, metadata={"format": "pt"})
        (part / CONFIG).write_text(json.dumps(config, indent=2) + "\n")

    write_folder(folder, {"kind": KIND, **model_facts(info)}, write)


def save_model(
    folder: Path,
    model: PreTrainedModel,
    tensors: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    info: ModelInfo,
) -> None:
    """A Hugging Face folder of a whole model with these weights."""

    def write(part: Path) -> None:
        with without_progress_bars():
            model.save_pretrained(part, state_dict={name: tensor.to(model.dtype) for name, tensor in tensors.items()})
        tokenizer.save_pretrained(part)

    write_folder(folder, {"kind": KIND, **model_facts(info)}, write)


def read_weights(
    folder: Path, model: PreTrainedModel, info: ModelInfo | None
) -> tuple[dict[str, Pair] | None, dict[str, Tensor] | None]:
    """`(pairs, None)` of an adapter's folder, `(None, tensors)` of a whole model's. `info` says which model they must
    have been trained over; None: the caller has checked that."""
    folder = Path(folder)
    if info is not None and (folder / MANIFEST).exists():
        check_model(folder, read_manifest(folder, KIND), info)
    if (folder / CONFIG).exists():
        found, tensors = read_peft_folder(folder), _tensors(folder, model)
        return {name: _pair(folder, tensors, name, found.scale, model) for name in found.layers}, None
    if (folder / "config.json").exists():
        return None, _read_model(folder, model)
    raise BadRequest(f"{folder} holds neither {CONFIG} nor config.json; give a folder that save_weights wrote")


def _tensors(folder: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """The pairs of an adapter. A copy of the base model's head beside them must be the head of this model."""
    try:
        tensors = load_file(folder / ADAPTER)
    except (OSError, SafetensorError) as exc:
        raise BadRequest(f"{folder} is not a whole PEFT adapter ({exc})") from exc
    for name in [name for name in tensors if name.endswith(BASE_COPY)]:
        copy, layer = tensors.pop(name), name[len(PREFIX) : -len(BASE_COPY)]
        own = model.get_parameter(f"{layer}.weight")
        # The copy may come from a base model in another dtype; bf16 keeps eight bits.
        if copy.shape != own.shape or not torch.allclose(copy.float(), own.float().cpu(), rtol=2**-7, atol=1e-6):
            raise BadRequest(f"{folder} was trained over other weights of {layer} than this model's")
    return tensors


def peft_settings(folder: Path, model: PreTrainedModel, *, seed: int) -> LoraSettings:
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


def read_peft_weights(
    folder: Path, shapes: dict[str, torch.Size], info: ModelInfo, model: PreTrainedModel
) -> dict[str, Tensor]:
    """The tensors of a PEFT folder under the names of the engine's own parameters, which have these shapes."""
    if (folder / MANIFEST).exists():
        check_model(folder, read_manifest(folder, KIND), info)
    tensors = {
        name.removeprefix(PREFIX).removesuffix(".weight"): tensor.float()
        for name, tensor in _tensors(folder, model).items()
    }
    found = shapes_of(tensors)
    wrong = [name for name in sorted({*shapes, *found}) if shapes.get(name) != found.get(name)]
    if wrong:
        raise BadRequest(f"{folder} does not fit {info.name!r}: {', '.join(wrong[:3])} is missing or of another shape")
    return tensors


def _pair(folder: Path, tensors: dict[str, Tensor], name: str, scale: float, model: PreTrainedModel) -> Pair:
    try:
        own = model.get_parameter(f"{name}.weight")
        a, b = (tensors[f"{PREFIX}{name}.lora_{part}.weight"].float() for part in "AB")
        if (b.shape[0], a.shape[1]) != tuple(own.shape) or a.shape[0] != b.shape[1]:
            raise ValueError(f"{name}: {tuple(b.shape)} x {tuple(a.shape)} does not fit {tuple(own.shape)}")
    except (AttributeError, KeyError, ValueError) as exc:
        raise BadRequest(f"{folder} does not fit this model ({exc})") from exc
    return Pair(a.to(own.device), b.to(own.device), scale)


def _read_model(folder: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """All tensors under the names that `model` itself uses."""
    from transformers import AutoModelForCausalLM

    try:
        with without_progress_bars():
            whole = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, local_files_only=True)
    except (OSError, ValueError, SafetensorError) as exc:
        raise BadRequest(f"{folder} is not a whole Hugging Face model ({exc})") from exc
    tensors = {name: tensor.detach().to(model.device) for name, tensor in _named_tensors(whole).items()}
    if {name: tensor.shape for name, tensor in tensors.items()} != {
        n: own.shape for n, own in _named_tensors(model).items()
    }:
        raise BadRequest(f"{folder} holds a model of another shape than {type(model).__name__} loaded here")
    return tensors


def _named_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def fingerprint(model: torch.nn.Module) -> str:
    """What tells this base model from another: names, shapes and a sample of its numbers, at bf16's precision so that
    the dtype it was loaded in does not matter."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        flat = tensor.detach().flatten()
        # 64 numbers spread over each tensor: enough to tell trained weights apart, without hashing a large model.
        sample = flat[:: max(1, flat.numel() // 64)][:64]
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(sample.to(device="cpu", dtype=torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


Form = Literal["peft", "merged", "gguf"]
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)


def export_model(
    form: Form, base: Path, weights: Path | None, out: Path, *, base_name: str, number_type: NumberType = "f16"
) -> None:
    """Write the model to `out`, which must not exist yet; it appears whole."""
    if out.exists():
        raise BadRequest(f"{out} exists; choose another place, or delete it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        part = Path(scratch) / out.name
        if form == "peft":
            if weights is None or not is_peft_folder(weights):
                what = "an untrained model" if weights is None else "a run that trained all weights (lora_rank 0)"
                raise BadRequest(f"{what} has no adapter; use --to merged")
            if (weights / MANIFEST).exists():
                read_manifest(weights, KIND)  # its files are as they were written
            part.mkdir(parents=True)
            shutil.copy2(weights / ADAPTER, part / ADAPTER)
            config = json.loads((weights / CONFIG).read_text())
            (part / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": base_name}, indent=2) + "\n")
            _copy_tokenizer(base, part)
            set_modes(part.iterdir(), like=part / CONFIG)
        elif form == "merged":
            _write_merged(part, base, weights)
            set_modes(part.iterdir(), like=part / "config.json")
        else:
            _write_merged(Path(scratch) / "merged" / out.stem, base, weights)
            write_gguf(Path(scratch) / "merged" / out.stem, part, number_type=number_type)
        part.rename(out)


def _write_merged(folder: Path, base: Path, weights: Path | None) -> None:
    from transformers import AutoModelForCausalLM

    with without_progress_bars():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype="auto", local_files_only=True)
    if weights is not None and (weights / MANIFEST).exists():
        told = read_manifest(weights, KIND)  # which also checks that the files are as they were written
        if told["fingerprint"] != fingerprint(model):
            raise BadRequest(f"{weights} was trained over {told['model']!r}, whose weights are not those in {base}")
    lora, full = (None, None) if weights is None else read_weights(weights, model, None)
    merged = MergedWeights(model, lora, full)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    head_name = next(name for name, module in model.named_modules() if module is head)
    if lora and head.weight is embedding.weight and head_name in lora:
        # The head was trained and the embedding was not, so they are no longer one tensor.
        model.config.tie_word_embeddings = False
        head.weight = torch.nn.Parameter(head.get_parameter("weight").detach().clone())
    with torch.no_grad():
        touched = [f"{name}.weight" for name in lora or ()] + list(full or ())
        changed = {name: merged[name] for name in touched}
        for name, tensor in model.named_parameters(remove_duplicate=False):
            if name in changed:
                tensor.copy_(changed[name])
    folder.mkdir(parents=True)
    with without_progress_bars():
        model.save_pretrained(folder)
    _copy_tokenizer(base, folder)


def _copy_tokenizer(base: Path, folder: Path) -> None:
    for name in TOKENIZER_FILES:
        if (base / name).is_file() and not (folder / name).exists():
            shutil.copy2(base / name, folder / name)
