"""A PEFT adapter's folder, read without torch: what is in it, and whether this engine can train it further.

In: a folder with `adapter_config.json` and `adapter_model.safetensors`. Out: rank, alpha and the adapted layers, or why
the adapter means something else than `alpha / rank * B @ A` beside a frozen linear layer. Nothing of the kind is
guessed: what is not plain LoRA is refused by the name of the setting.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from evsys_engine.types import BadRequest, JsonObject

CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
BASE_COPY = ".base_layer.weight"
"""End of the name under which PEFT saves the base model's own weights of an adapted head, unchanged."""
UNUSUAL = (
    "use_dora",
    "use_rslora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "megatron_config",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
)
"""Settings of PEFT that change what the tensors mean, when they are set."""
CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin (`init_lora_weights`) that also change the base model's weights, which the folder does not hold."""
HEADER_BYTES = 100_000_000
"""The safetensors format's own limit of its header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftFolder:
    """A plain LoRA adapter."""

    path: Path
    rank: int
    alpha: float
    layers: tuple[str, ...]
    """Whole names of the adapted layers, sorted."""
    base_model: str
    """What the adapter says it was trained over; may be empty."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def is_peft_folder(path: str | Path) -> bool:
    return (Path(path) / CONFIG).is_file()


def read_peft_folder(path: str | Path) -> PeftFolder:
    """What the folder holds; `BadRequest` names the first thing in it that is not plain LoRA."""
    folder = Path(path)
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as exc:
        raise BadRequest(f"{folder} is not a whole PEFT adapter ({exc})") from exc
    if not isinstance(config, dict):
        raise BadRequest(f"{folder / CONFIG} must be a mapping, not {type(config).__name__}")
    reason = _unusual(config)
    if reason:
        raise BadRequest(f"{folder} is not plain LoRA ({reason}); merge it into its base model, and start from that")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise BadRequest(f"{folder / CONFIG}: r must be a whole number above 0, not {rank!r}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not (math.isfinite(alpha) and alpha > 0):
        raise BadRequest(f"{folder / CONFIG}: lora_alpha must be a number above 0, not {alpha!r}")
    return PeftFolder(
        path=folder,
        rank=rank,
        alpha=float(alpha),
        layers=_layers(folder),
        base_model=str(config.get("base_model_name_or_path") or ""),
    )


def _unusual(config: JsonObject) -> str | None:
    if config.get("peft_type") != "LORA":
        return f"peft_type is {config.get('peft_type')!r}"
    found = [key for key in UNUSUAL if config.get(key)]
    if config.get("bias", "none") != "none":
        found.append(f"bias: {config['bias']}")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(CHANGED_BASE):
        found.append(f"init_lora_weights: {begun}")
    return ", ".join(found) or None


def _layers(folder: Path) -> tuple[str, ...]:
    """The layers whose pairs are in the file; any other tensor is refused by its name."""
    names = set(tensor_names(folder / ADAPTER))
    layers = _adapted_modules(names)
    pairs = {PREFIX + layer + part for layer in layers for part in (".lora_A.weight", ".lora_B.weight")}
    other = sorted((names - {PREFIX + layer + BASE_COPY for layer in layers}) ^ pairs)
    if other or not pairs:
        strange = ", ".join(other[:3]) or "it is empty"
        raise BadRequest(f"{folder / ADAPTER} holds other tensors than pairs of lora_A and lora_B: {strange}")
    return tuple(sorted(layers))


def _adapted_modules(names: set[str]) -> set[str]:
    ends = (".lora_A.weight", ".lora_B.weight")
    return {name[len(PREFIX) : -len(ends[0])] for name in names if name.startswith(PREFIX) and name.endswith(ends)}


def tensor_names(file: Path) -> list[str]:
    """The names in a safetensors file, from its header alone."""
    try:
        with open(file, "rb") as handle:
            size = int.from_bytes(handle.read(8), "little")
            if not 2 <= size <= HEADER_BYTES:
                raise ValueError("its header is damaged")
            header = json.loads(handle.read(size))
    except FileNotFoundError:
        pickled = file.with_suffix(".bin")
        hint = f"; {pickled.name} is a pickle, which is not read: save it as safetensors" if pickled.exists() else ""
        raise BadRequest(f"{file.parent} is not a whole PEFT adapter: {file.name} is missing{hint}") from None
    except (OSError, ValueError) as exc:
        raise BadRequest(f"{file} is not a safetensors file ({exc})") from exc
    return [name for name in header if name != "__metadata__"]
