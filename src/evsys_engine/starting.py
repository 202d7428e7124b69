"""What an adapter can start from: a training state of this engine, or a PEFT adapter made anywhere.

In: a folder. Out: the settings that fit it, and its weights. A caller that does not know the settings asks for them
first, makes an adapter with them and then loads.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from evsys_engine.export import peft_settings, read_peft_weights
from evsys_engine.folders import read_manifest
from evsys_engine.peft_folder import is_peft_folder, read_peft_folder
from evsys_engine.state import KIND, StateSnapshot, check_settings, read_snapshot, settings_from
from evsys_engine.types import LoraSettings, ModelInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def saved_rank(folder: Path) -> int:
    """The rank of what is saved in `folder`."""
    if is_peft_folder(folder):
        return read_peft_folder(folder).rank
    return settings_from(read_manifest(folder, KIND)["settings"]).rank


def saved_settings(folder: Path, model: PreTrainedModel, *, seed: int) -> LoraSettings:
    """The settings of an adapter that fits what is saved in `folder`."""
    if is_peft_folder(folder):
        return peft_settings(folder, model, seed=seed)
    return settings_from({**read_manifest(folder, KIND)["settings"], "seed": seed})


def read_start(
    folder: Path, settings: LoraSettings, info: ModelInfo, shapes: dict[str, torch.Size], *, model: PreTrainedModel
) -> StateSnapshot:
    """The weights in `folder`, which must fit these settings; a PEFT adapter comes without an optimiser."""
    if not is_peft_folder(folder):
        return read_snapshot(folder, settings, info, shapes)
    check_settings(folder, asdict(peft_settings(folder, model, seed=settings.seed)), settings)
    return StateSnapshot(weights=read_peft_weights(folder, shapes, info, model), moments={}, steps=0)
