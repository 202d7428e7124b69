"""Trained weights as a folder or file for other programs: a PEFT adapter, a merged model, a GGUF file.

In: a base model's folder and, if it was trained, the weights that `save_weights` wrote. Out: something that peft,
transformers or llama.cpp loads. What is there already is never overwritten.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch

from evsys_engine.export import KIND, fingerprint, read_weights
from evsys_engine.folders import MANIFEST, read_manifest
from evsys_engine.merging import MergedWeights
from evsys_engine.models.gguf_writer import NumberType, write_gguf
from evsys_engine.peft_folder import ADAPTER, CONFIG, is_peft_folder
from evsys_engine.quiet import without_progress_bars
from evsys_engine.types import BadRequest

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
            _write_peft(part, base, weights, base_name)
        elif form == "merged":
            _write_merged(part, base, weights)
        else:
            _write_merged(Path(scratch) / "merged" / out.stem, base, weights)
            write_gguf(Path(scratch) / "merged" / out.stem, part, number_type=number_type)
        part.rename(out)


def _write_peft(folder: Path, base: Path, weights: Path | None, base_name: str) -> None:
    if weights is None or not is_peft_folder(weights):
        what = "an untrained model" if weights is None else "a run that trained all weights (lora_rank 0)"
        raise BadRequest(f"{what} has no adapter; use --to merged")
    if (weights / MANIFEST).exists():
        read_manifest(weights, KIND)  # its files are as they were written
    folder.mkdir(parents=True)
    shutil.copy2(weights / ADAPTER, folder / ADAPTER)
    config = json.loads((weights / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": base_name}, indent=2) + "\n")
    _copy_tokenizer(base, folder)


def _write_merged(folder: Path, base: Path, weights: Path | None) -> None:
    from transformers import AutoModelForCausalLM

    with without_progress_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto", local_files_only=True)
    if weights is not None and (weights / MANIFEST).exists():
        told = read_manifest(weights, KIND)  # which also checks that the files are as they were written
        if told["fingerprint"] != fingerprint(model):
            raise BadRequest(f"{weights} was trained over {told['model']!r}, whose weights are not those in {base}")
    lora, full = (None, None) if weights is None else read_weights(weights, model, None)
    merged = MergedWeights(model, lora, full)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if lora and head.weight is embedding.weight and _name_of(model, head) in lora:
        # The head was trained and the embedding was not, so they are no longer one tensor.
        model.config.tie_word_embeddings = False
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    with torch.no_grad():
        changed = {name: merged[name] for name in _touched(model, lora, full)}
        for name, tensor in model.named_parameters(remove_duplicate=False):
            if name in changed:
                tensor.copy_(changed[name])
    folder.mkdir(parents=True)
    with without_progress_bars():
        model.save_pretrained(folder)
    _copy_tokenizer(base, folder)


def _touched(model: Any, lora: Any, full: Any) -> list[str]:
    return [f"{name}.weight" for name in lora or ()] + list(full or ())


def _name_of(model: Any, wanted: Any) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _copy_tokenizer(base: Path, folder: Path) -> None:
    for name in TOKENIZER_FILES:
        if (base / name).is_file() and not (folder / name).exists():
            shutil.copy2(base / name, folder / name)
