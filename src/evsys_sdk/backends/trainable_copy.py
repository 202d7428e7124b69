"""A copy of the local model for another library's trainer, and its weights back as our own.

In: a local service. Out: a plain Hugging Face model with a fresh (or loaded) PEFT adapter, or with all its weights
trainable (rank 0); and folders that the engine loads like those it wrote itself. It answers the part of a training
client that saves. The engine's shared model is not touched.
"""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from evsys_sdk.backends.local import LocalService
from evsys_sdk.errors import BackendError, error_boundary, need

INSIDE = "base_model.model."
"""What PEFT puts before the names of a model's layers."""


class TrainableCopy:
    """The base model once more, in full precision where it is trained, with what is trained over it."""

    def __init__(self, service: LocalService, *, rank: int, seed: int, start: str | None = None):
        from evsys_engine.starting import saved_settings
        from evsys_engine.types import LoraSettings

        self.service, self.engine = service, service.engine
        self.settings = LoraSettings(rank=rank, seed=seed)
        if start:
            with error_boundary(BackendError, f"loading state {start}"):
                saved = saved_settings(Path(start), self.engine.model, seed=seed)
            if saved.rank == rank:  # alpha and layers come with the weights
                self.settings = saved
        self.steps = 0
        """Optimiser steps done; goes into the saved state."""
        with error_boundary(BackendError, "making a copy of the local model to train"):
            self.model = self._with_adapter(self._load())
        if start:
            self._load_start(start)

    def _load_start(self, path: str) -> None:
        """Weights of a saved training state or of a PEFT adapter; the optimiser starts afresh."""
        from evsys_engine.starting import read_start
        from evsys_engine.state import shapes_of

        torch = need("torch", extra="local")
        own = self._tensors()
        with error_boundary(BackendError, f"loading state {path}"):
            saved = read_start(Path(path), self.settings, self.engine.info, shapes_of(own), model=self.engine.model)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(saved.weights[name])

    def save_state(self, name: str) -> Awaitable[str]:
        """What `load_state` of the local backend's training clients takes; another trainer's optimiser is left out."""
        from evsys_engine.state import StateSnapshot, copy_to_cpu, save_snapshot

        def write(folder: Path) -> None:
            snapshot = StateSnapshot(weights=copy_to_cpu(self._tensors()), moments={}, steps=self.steps)
            save_snapshot(folder, snapshot, self.settings, self.engine.info)

        return self.service.save(f"{name}-state", write)

    def save_weights_for_sampler(self, name: str) -> Awaitable[str]:
        """A PEFT folder (rank 0: a whole model), which the local backend samples from."""
        from evsys_engine.export import save_adapter, save_model
        from evsys_engine.state import copy_to_cpu

        def write(folder: Path) -> None:
            tensors, info = copy_to_cpu(self._tensors()), self.engine.info
            if self.settings.rank:
                save_adapter(folder, tensors, self.settings, info)
            else:
                save_model(folder, self.model, tensors, self.engine.tokenizer, info)

        return self.service.save(f"{name}-sampler", write)

    def _load(self) -> object:
        from evsys_engine.devices import without_progress_bars

        torch, transformers = need("torch", extra="local"), need("transformers", extra="local")
        info = self.engine.info
        dtype = getattr(torch, info.dtype) if self.settings.rank else torch.float32
        with without_progress_bars():
            model = transformers.AutoModelForCausalLM.from_pretrained(
                info.path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
            )
        return model.to(info.device)

    def _with_adapter(self, model: Any) -> Any:
        from evsys_engine.lora import ATTENTION, MLP

        if not self.settings.rank:
            return model.requires_grad_()
        torch, peft = need("torch", extra="local"), need("peft", extra="local")
        # PEFT draws lora_A from torch's global generator.
        torch.manual_seed(self.settings.seed)
        config = peft.LoraConfig(
            r=self.settings.rank,
            lora_alpha=self.settings.alpha,
            target_modules=list(self.settings.targets) or [*ATTENTION, *MLP],
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        return peft.get_peft_model(model, config)

    def _tensors(self) -> dict[str, Any]:
        """What is trained, under the engine's names."""
        if not self.settings.rank:
            return dict(self.model.named_parameters())
        mark = ".default.weight"  # of the adapter that is trained; a trainer may add others
        return {
            name.removeprefix(INSIDE).removesuffix(mark): tensor
            for name, tensor in self.model.named_parameters()
            if name.endswith((f".lora_A{mark}", f".lora_B{mark}"))
        }
