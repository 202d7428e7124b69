"""The model as llama.cpp reads it, in fp32: the same numbers as the folder's.

In: a Llama model's folder. Out: a GGUF file without a tokenizer (the contest hands out tokens).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from safetensors.numpy import load_file

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(model_dir: Path, file: Path) -> Path:
    """Made once; the file appears whole."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        _write(model_dir, part)
        os.replace(part, file)
    return file


def _write(model_dir: Path, file: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = GGUFWriter(str(file), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in load_file(model_dir / "model.safetensors").items():
        array = tensor.astype(np.float32)
        if ".q_proj." in name or ".k_proj." in name:
            array = _interleaved(array, heads if ".q_proj." in name else kv_heads)
        writer.add_tensor(_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.weight"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.weight"


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp turns neighbouring pairs where transformers turns halves of a head."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
