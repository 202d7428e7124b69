"""What can be said of a model without loading it, and of the models at hand.

In: a `ModelFolder`, or the cache. Out: a `ModelCard`, or a list of `Shelved`. Reads headers only: no torch, no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evsys_engine.models.builtin import BUILT_INS
from evsys_engine.models.cache import UNFINISHED, cache_folder, folder_bytes, read_ready, unfinished_folders
from evsys_engine.models.find import (
    ModelFolder,
    Source,
    cached_models,
    count_parameters,
    has_chat_template,
    missing_parts,
    text_config,
)
from evsys_engine.types import JsonObject

BATCH_TOKENS = 512
"""Tokens of one forward/backward, as the engine does it on a CPU."""
ADAPTER_BYTES, FULL_BYTES = 4, 20
"""Per parameter: the weight; or weight, gradient, both moments and the optimiser's copy while it steps."""
RUNTIME_BYTES = 900_000_000
"""torch and transformers themselves, the logits of a few rows, the allocator's slack; measured beside SmolLM2-135M."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A model's measures; None is unknown."""

    name: str
    source: Source
    path: Path
    architecture: str
    parameters: int | None
    layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    context_length: int | None
    chat_template: bool
    disk_bytes: int
    lora_bytes: int | None
    """Memory for training an adapter in fp32, about."""
    full_bytes: int | None
    """Memory for training all weights in fp32 with AdamW, about."""
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A line of `evsys model list`."""

    name: str
    source: Source
    state: Literal["ready", "not here", "unfinished"]
    disk_bytes: int
    """What it takes now."""
    download_bytes: int = 0
    """What would have to travel first."""
    path: Path | None = None
    about: str = ""


def describe_model(model: ModelFolder) -> ModelCard:
    """The card of a model on this disk."""
    config, parameters = text_config(model.path), count_parameters(model.path)
    return ModelCard(
        name=model.name,
        source=model.source,
        path=model.path,
        architecture=", ".join(config.get("architectures") or [str(config.get("model_type", "unknown"))]),
        parameters=parameters,
        layers=config.get("num_hidden_layers"),
        hidden_size=config.get("hidden_size"),
        vocab_size=config.get("vocab_size"),
        context_length=config.get("max_position_embeddings"),
        chat_template=has_chat_template(model.path),
        disk_bytes=folder_bytes(model.path),
        lora_bytes=training_bytes(config, parameters, per_parameter=ADAPTER_BYTES),
        full_bytes=training_bytes(config, parameters, per_parameter=FULL_BYTES),
        sha256=model.sha256,
    )


def training_bytes(config: JsonObject, parameters: int | None, *, per_parameter: int) -> int | None:
    """Memory of a step of 512 tokens in fp32: weights and what goes with them, activations, runtime."""
    hidden, layers = config.get("hidden_size"), config.get("num_hidden_layers")
    if parameters is None or hidden is None or layers is None:
        return None
    wide = config.get("intermediate_size") or 4 * hidden
    # 14 vectors of the stream and 5 of the MLP per layer and token: fits SmolLM2's 1.9 GB at 256 tokens, 5.1 at 2,048.
    activations = 4 * BATCH_TOKENS * layers * (14 * hidden + 5 * wide)
    return int(per_parameter * parameters + activations + RUNTIME_BYTES)


def list_models(cache: Path | None = None) -> list[CachedModel]:
    """The built-ins, then everything else that is ready or half-made in our cache and in the hub library's."""
    cache = cache if cache is not None else cache_folder()
    models = []
    for name, model in BUILT_INS.items():
        folder = cache / name
        here = read_ready(folder, model.recipe) is not None
        models.append(
            CachedModel(
                name=name,
                source="builtin",
                state="ready" if here else "not here",
                disk_bytes=folder_bytes(folder) if here else 0,
                download_bytes=0 if here else model.download_bytes,
                path=folder if here else None,
                about=model.about,
            )
        )
    for folder in sorted(cache.glob("gguf-*")):
        manifest = read_ready(folder)
        if manifest:
            size, origin = folder_bytes(folder), manifest["origin"]
            models.append(CachedModel(name=origin, source="gguf", state="ready", disk_bytes=size, path=folder))
    for folder in unfinished_folders(cache):
        match = UNFINISHED.match(folder.name)
        name = match["name"] if match else folder.name
        models.append(
            CachedModel(
                name=name,
                source="builtin" if name in BUILT_INS else "gguf",
                state="unfinished",
                disk_bytes=folder_bytes(folder),
                path=folder,
                about="interrupted, or being made now; the next pull clears it",
            )
        )
    for name, folder, size in cached_models():
        state: Literal["ready", "unfinished"] = "unfinished" if missing_parts(folder) else "ready"
        models.append(CachedModel(name=name, source="hub", state=state, disk_bytes=size, path=folder))
    return models
