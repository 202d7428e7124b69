"""What makes a folder a model: config, weights, tokenizer.

In: a folder. Out: what it lacks, its config, its tensors' shapes; all read from the files, without torch.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def missing_parts(folder: Path) -> str:
    """What keeps `folder` from being a Hugging Face model, in words; empty for a whole one."""
    if not (folder / "config.json").is_file():
        return f"no config.json in {folder}"
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return f"no tokenizer files (tokenizer.json) in {folder}"
    if (folder / "adapter_config.json").is_file() and not weight_files(folder):
        return f"{folder} holds an adapter, not a model; its base model is the one to name"
    for index in folder.glob("*.index.json"):
        wanted = sorted(set(read_json(index).get("weight_map", {}).values()))
        gone = [name for name in wanted if not (folder / name).is_file()]
        if gone:
            return f"{len(gone)} of {len(wanted)} weight files are missing in {folder} ({gone[0]})"
    return "" if weight_files(folder) else f"no weights (*.safetensors) in {folder}"


def weight_files(folder: Path) -> list[Path]:
    """The files with the weights: safetensors, else torch's own."""
    safe = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("adapter"))
    return safe or sorted(folder.glob("pytorch_model*.bin"))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where there is none."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def text_config(folder: Path) -> dict[str, Any]:
    """The config of the language model; a model of several senses keeps it one level down."""
    config = read_json(folder / "config.json")
    return {**config, **config.get("text_config", {})}


def count_parameters(folder: Path) -> int | None:
    """Numbers in the weights, each counted once; None where only torch could tell."""
    total = 0
    for path in weight_files(folder):
        if path.suffix != ".safetensors":
            return None
        for entry in _safetensors_header(path).values():
            size = 1
            for length in entry.get("shape", []):
                size *= length
            total += size
    return total


def _safetensors_header(path: Path) -> dict[str, Any]:
    """Name -> dtype and shape; the format opens with the header's length and the header in JSON."""
    with open(path, "rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        header: dict[str, Any] = json.loads(handle.read(length))
    header.pop("__metadata__", None)
    return header


def has_chat_template(folder: Path) -> bool:
    return (folder / "chat_template.jinja").is_file() or bool(
        read_json(folder / "tokenizer_config.json").get("chat_template")
        or read_json(folder / "chat_template.json").get("chat_template")
    )
