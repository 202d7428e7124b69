"""A ready tiny model, and a writer of GGUF files that lays them out as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from evsys_engine.models import find_model
from evsys_engine.models.gguf import LAYER, LAYER_EXTRA, TOP

GgufWriter = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """The folder of `tiny-random`."""
    return find_model("tiny-random", cache=tmp_path_factory.mktemp("cache")).path


@pytest.fixture
def write_gguf(tiny, tmp_path) -> GgufWriter:
    """Write a Hugging Face folder (by default tiny-random) as a GGUF file."""

    def write(
        folder: Path | None = None,
        *,
        name: str = "model.gguf",
        quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
        without: str = "",
        extra_tensor: str = "",
        architecture: str = "",
        **metadata: Any,
    ) -> Path:
        folder = folder or tiny
        config = json.loads((folder / "config.json").read_text())
        kind = architecture or config["model_type"]
        writer = gguf.GGUFWriter(tmp_path / name, kind)
        _add_config(writer, config)
        _add_tokenizer(writer, folder, metadata)
        for key, value in metadata.items():
            add = writer.add_string if isinstance(value, str) else writer.add_uint32
            add(key.replace("__", "."), value)
        for key, values in _tensors(folder, config).items():
            if key != without:
                _add_tensor(writer, key, values, quantisation)
        if extra_tensor:
            writer.add_tensor(extra_tensor, np.ones(4, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return write


def _add_config(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])


def _add_tokenizer(writer: Any, folder: Path, metadata: dict[str, Any]) -> None:
    """Keys `tokens`, `types`, `eos`, `pre`, `kind` of `metadata` replace what the folder says."""
    saved = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocabulary = sorted(saved["model"]["vocab"], key=saved["model"]["vocab"].__getitem__)
    added = {token["content"] for token in saved["added_tokens"]}
    types = dict.fromkeys(added, 3) | metadata.pop("types", {})
    writer.add_tokenizer_model(metadata.pop("kind", "gpt2"))
    writer.add_tokenizer_pre(metadata.pop("pre", "smollm"))
    writer.add_token_list(vocabulary)
    writer.add_token_types([types.get(token, 1) for token in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in saved["model"]["merges"]])
    writer.add_eos_token_id(metadata.pop("eos", vocabulary.index("<|im_end|>")))
    writer.add_bos_token_id(vocabulary.index("<|im_start|>"))
    writer.add_chat_template(metadata.pop("template", settings["chat_template"]))


def _tensors(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The folder's weights under llama.cpp's names, its rotary halves interleaved where llama.cpp does so."""
    weights = load_file(folder / "model.safetensors")
    kind = config["model_type"]
    names = {value: key for key, value in TOP.items()}
    for index in range(config["num_hidden_layers"]):
        for key, value in (LAYER | LAYER_EXTRA[kind]).items():
            names[f"model.layers.{index}.{value}"] = f"blk.{index}.{key}"
    tensors = {names[key]: values for key, values in weights.items()}
    heads = {"attn_q.weight": "num_attention_heads", "attn_k.weight": "num_key_value_heads"}
    for key, values in tensors.items():
        if kind == "llama" and key.split(".", 2)[-1] in heads:
            count = config[heads[key.split(".", 2)[-1]]]
            half = values.reshape(count, 2, values.shape[0] // count // 2, values.shape[1])
            tensors[key] = np.ascontiguousarray(half.swapaxes(1, 2).reshape(values.shape))
    return tensors


def _add_tensor(writer: Any, key: str, values: Any, quantisation: Any) -> None:
    if values.ndim == 1 or quantisation == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(key, values)
    else:
        writer.add_tensor(key, gguf.quants.quantize(values, quantisation), raw_dtype=quantisation)
