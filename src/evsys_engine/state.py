"""An adapter on disk, to continue training from.

In: parameters, optimiser and settings. Out: a folder with `weights.safetensors`, `moments.safetensors` and the
manifest; and back, bit for bit, onto an adapter of the same shape over the same model. Everything is read and checked
before anything is changed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from evsys_engine.folders import read_manifest, write_folder
from evsys_engine.optimizer import AdamW
from evsys_engine.types import BadRequest, JsonObject, LoraSettings, ModelInfo

KIND = "training state"
WEIGHTS, MOMENTS = "weights.safetensors", "moments.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSnapshot:
    """Copies, so that they can be written during the next steps."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    steps: int


def take_snapshot(parameters: dict[str, Tensor], optimizer: AdamW) -> StateSnapshot:
    moments = {f"mean.{name}": tensor for name, tensor in optimizer.mean.items()}
    moments |= {f"square.{name}": tensor for name, tensor in optimizer.square.items()}
    return StateSnapshot(weights=copy_to_cpu(parameters), moments=copy_to_cpu(moments), steps=optimizer.steps)


def copy_to_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """In main memory, independent of the originals."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def save_snapshot(folder: Path, snapshot: StateSnapshot, settings: LoraSettings, info: ModelInfo) -> None:
    def write(part: Path) -> None:
        save_file(snapshot.weights, part / WEIGHTS)
        save_file(snapshot.moments, part / MOMENTS)

    facts = {"kind": KIND, **model_facts(info), "settings": asdict(settings), "steps": snapshot.steps}
    write_folder(folder, facts, write)


def model_facts(info: ModelInfo) -> JsonObject:
    """Which base model the numbers belong to."""
    return {"model": info.name, "fingerprint": info.extra["fingerprint"]}


def read_snapshot(
    folder: Path, settings: LoraSettings, info: ModelInfo, shapes: dict[str, torch.Size]
) -> StateSnapshot:
    """The state in `folder`, which must fit these settings and the parameters' shapes."""
    facts = read_manifest(folder, KIND)
    check_model(folder, facts, info)
    check_settings(folder, facts["settings"], settings)
    try:
        weights, moments = load_file(folder / WEIGHTS), load_file(folder / MOMENTS)
    except (OSError, SafetensorError) as exc:
        raise BadRequest(f"{folder} cannot be read ({exc}); take another checkpoint") from exc
    expected = {f"{kind}.{name}": shape for kind in ("mean", "square") for name, shape in shapes.items()}
    # A state that was saved before the first step has no moments.
    if shapes_of(weights) != shapes or (moments and shapes_of(moments) != expected):
        raise BadRequest(f"{folder} holds other tensors than this adapter trains; create it as the saved one was")
    return StateSnapshot(weights=weights, moments=moments, steps=int(facts["steps"]))


def check_model(folder: Path, facts: JsonObject, info: ModelInfo) -> None:
    """Refuse weights that were trained over another model."""
    if facts["fingerprint"] != info.extra["fingerprint"]:
        raise BadRequest(f"{folder} was trained over {facts['model']!r}, whose weights are not those of {info.name!r}")


def check_settings(folder: Path, saved: JsonObject, settings: LoraSettings) -> None:
    """The seed may differ: it only says where the weights once began."""
    theirs = asdict(settings_from(saved))
    differ = {key: value for key, value in asdict(settings).items() if key != "seed" and theirs[key] != value}
    if differ:
        told = "; ".join(f"it has {key} {theirs[key]}, this adapter has {value}" for key, value in differ.items())
        raise BadRequest(f"{folder} does not fit: {told}; create the adapter with the saved settings")


def settings_from(saved: JsonObject) -> LoraSettings:
    """The settings as a manifest has them; older ones have no `targets`."""
    return LoraSettings(**{**saved, "targets": tuple(saved.get("targets") or ())})


def shapes_of(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


@torch.no_grad()
def restore(snapshot: StateSnapshot, parameters: dict[str, Tensor], optimizer: AdamW, *, with_moments: bool) -> None:
    """Put a checked snapshot back; without moments the optimiser starts afresh."""
    for name, tensor in parameters.items():
        tensor.copy_(snapshot.weights[name])
    optimizer.reset(steps=snapshot.steps if with_moments else 0)
    if with_moments and snapshot.moments:
        for name in parameters:
            optimizer.mean[name].copy_(snapshot.moments[f"mean.{name}"])
            optimizer.square[name].copy_(snapshot.moments[f"square.{name}"])
