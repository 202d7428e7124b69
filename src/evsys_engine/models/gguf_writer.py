"""A Hugging Face folder or a PEFT adapter becomes a GGUF file: the way back of `gguf`.

In: a folder with a llama, qwen2 or qwen3 model and its tokenizer. Out: one `.gguf` file that llama.cpp, transformers
and this engine read. The tokenizer is written only if the reader's own rules give its tokens back; a model that a GGUF
file cannot fully describe is refused, with the reason.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

import numpy as np

from evsys_engine.models.errors import ModelError, need
from evsys_engine.models.gguf import CLASSES, LAYER, LAYER_EXTRA, TOP
from evsys_engine.models.tokenizer import NORMAL, PRE_TOKENIZERS, UNUSED, USER_DEFINED, tokenizer_from_gguf
from evsys_engine.peft_folder import ADAPTER, PREFIX, read_peft_folder
from evsys_engine.types import Array, JsonObject

if TYPE_CHECKING:
    from gguf import GGUFValueType, GGUFWriter

NumberType = Literal["f32", "f16", "bf16", "q8_0"]
CONTROL = 3
"""llama.cpp's type of a token that is a mark and not text."""
PROBE = (
    "Hello there, World's  3 trees: 2024-11-18, 1234567 x=42;\n\n\tdef f(a):  return a+1\n"
    "I'll we're don't CAN'T naïve café Ünïcödé 你好，世界 こんにちは 🙂🙂 ...!!! 100%   end \r\n  3.14 "
    "<b>bold</b> __init__ camelCase SNAKE_CASE e\u0301 ٣٤٥ ½ №7"
)
"""Text in which byte-level BPE tokenizers of different kinds differ: contractions, digits, spaces, other scripts."""
REMEDY = "export it with --to merged instead"


def write_gguf(folder: Path, file: Path, *, number_type: NumberType = "f16") -> None:
    """Write the model in `folder` to `file`, which appears whole."""
    gguf = need("gguf")
    config = json.loads((folder / "config.json").read_text())
    architecture = _architecture(config)
    tokenizer = _tokenizer_fields(folder, int(config["vocab_size"]))
    part = file.parent / f".{file.name}.{secrets.token_hex(6)}.part"
    try:
        writer = gguf.GGUFWriter(part, architecture)
        _write_settings(writer, gguf, config, folder.name, number_type)
        for key, (value, kind) in tokenizer.items():
            of_texts = isinstance(value, list) and isinstance(value[0], str)
            items = gguf.GGUFValueType.STRING if of_texts else gguf.GGUFValueType.INT32
            writer.add_key_value(key, value, kind, sub_type=items if isinstance(value, list) else None)
        quantization = gguf.GGMLQuantizationType[number_type.upper()]
        for name, values in _tensors(folder, config, architecture):
            # Norms and biases are small and sensitive: llama.cpp keeps them in fp32 too. Rows of other matrices must be
            # whole blocks of the type.
            fits = values.shape[-1] % int(gguf.GGML_QUANT_SIZES[quantization][0]) == 0
            kind = quantization if values.ndim > 1 and fits else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def write_gguf_adapter(weights: Path, base: Path, file: Path) -> None:
    """Write the PEFT adapter in `weights` over the model in `base` to `file`, which appears whole. Its numbers stay
    fp32: an adapter is small, and llama.cpp adds it to the base model's activations while it runs."""
    gguf = need("gguf")
    config = json.loads((base / "config.json").read_text())
    architecture, adapter = _architecture(config), read_peft_folder(weights)
    names = {f"model.layers.{index}.{theirs}".removesuffix(".weight"): f"blk.{index}.{ours}"
             for index in range(int(config["num_hidden_layers"]))
             for ours, theirs in LAYER.items()}  # fmt: skip
    unknown = [layer for layer in adapter.layers if layer not in names]
    if unknown:
        raise ModelError(f"the adapter changes {unknown[0]}, which a GGUF adapter has no place for: use a merged file")
    groups = _rotated_heads(config, architecture)
    part = file.parent / f".{file.name}.{secrets.token_hex(6)}.part"
    try:
        writer = gguf.GGUFWriter(part, architecture)
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", adapter.alpha)
        with need("safetensors").safe_open(weights / ADAPTER, framework="pt") as handle:
            for layer in adapter.layers:
                low, high = (handle.get_tensor(f"{PREFIX}{layer}.lora_{side}.weight").float().numpy() for side in "AB")
                ours = names[layer]
                rows = groups.get(ours.removesuffix(".weight").rpartition(".")[2])
                # The rows of B are the layer's outputs, so they follow the order that the base model's rows have.
                high = high if rows is None else _swap_halves(high, rows)
                writer.add_tensor(f"{ours}.lora_a", np.ascontiguousarray(low))
                writer.add_tensor(f"{ours}.lora_b", np.ascontiguousarray(high))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def _rotated_heads(config: JsonObject, architecture: str) -> dict[str, int]:
    """The layers whose rows llama.cpp wants in another order, with their number of heads."""
    if architecture != "llama":
        return {}
    heads = int(config["num_attention_heads"])
    return {"attn_q": heads, "attn_k": int(config.get("num_key_value_heads") or heads)}


def _swap_halves(values: Array, heads: int) -> Array:
    """llama.cpp's order of the two rotary halves of each head."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _architecture(config: JsonObject) -> str:
    name = str(config.get("model_type"))
    if name not in CLASSES:
        raise ModelError(f"a GGUF file is written of {', '.join(CLASSES)} models, and this one is {name!r}: {REMEDY}")
    rope = _rope(config)
    wrong = {
        f"rope scaling {rope['rope_type']!r}": rope["rope_type"] != "default",
        "attention_bias": name == "llama" and config.get("attention_bias"),
        "mlp_bias": config.get("mlp_bias"),
        "sliding window attention": config.get("use_sliding_window"),
    }
    found = [what for what, present in wrong.items() if present]
    if found:
        raise ModelError(f"this {name} model has {', '.join(found)}, which is not written to GGUF here: {REMEDY}")
    return name


def _rope(config: JsonObject) -> JsonObject:
    """Rotary settings, from `rope_parameters` or from the keys that older configs have."""
    told = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = told.get("rope_type") or told.get("type") or "default"
    return {"rope_type": kind, "rope_theta": float(told.get("rope_theta") or config.get("rope_theta") or 10000.0)}


def _write_settings(
    writer: GGUFWriter, gguf: ModuleType, config: JsonObject, name: str, number_type: NumberType
) -> None:
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    width = int(config.get("head_dim") or hidden // heads)
    writer.add_name(name)
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(hidden)
    writer.add_block_count(int(config["num_hidden_layers"]))
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.get("num_key_value_heads") or heads))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_rope_freq_base(_rope(config)["rope_theta"])
    writer.add_vocab_size(int(config["vocab_size"]))
    types = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
    writer.add_file_type(gguf.LlamaFileType[types[number_type]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _tensors(folder: Path, config: JsonObject, architecture: str) -> Iterator[tuple[str, Array]]:
    """llama.cpp's name and fp32 values of every tensor, one at a time."""
    layer = LAYER | LAYER_EXTRA[architecture]
    names = {theirs: ours for ours, theirs in TOP.items()}
    for index in range(int(config["num_hidden_layers"])):
        names |= {f"model.layers.{index}.{theirs}": f"blk.{index}.{ours}" for ours, theirs in layer.items()}
    safetensors = need("safetensors")
    files: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(file, framework="pt") as handle:
            files |= dict.fromkeys(handle.keys(), file)
    if not files:
        raise ModelError(f"{folder} has no *.safetensors")
    tied = bool(config.get("tie_word_embeddings"))
    optional = {"lm_head.weight"} if tied else set()
    missing, unknown = sorted(set(names) - optional - set(files)), sorted(set(files) - set(names))
    if missing or unknown:
        what = f"lacks the tensor {missing[0]}" if missing else f"has the tensor {unknown[0]}"
        raise ModelError(f"this model {what}, unlike other {architecture} models: {REMEDY}")
    groups = _rotated_heads(config, architecture)
    for theirs, ours in names.items():
        if theirs not in files or (tied and theirs == "lm_head.weight"):
            continue
        with safetensors.safe_open(files[theirs], framework="pt") as handle:
            values: Array = handle.get_tensor(theirs).float().numpy()  # by torch: numpy has no bfloat16
        rows = groups.get(ours.rpartition(".")[0].rpartition(".")[2])
        yield ours, values if rows is None else _swap_halves(values, rows)


def _tokenizer_fields(folder: Path, size: int) -> dict[str, tuple[object, GGUFValueType]]:
    """The tokenizer as GGUF metadata: key -> value and its type."""
    kinds = need("gguf").GGUFValueType
    fast = need("transformers").AutoTokenizer.from_pretrained(folder, local_files_only=True)
    whole = json.loads(fast.backend_tokenizer.to_str()) if getattr(fast, "backend_tokenizer", None) else {}
    model = whole.get("model", {})
    is_byte_level = '"ByteLevel"' in json.dumps([whole.get("pre_tokenizer"), whole.get("decoder")])
    if model.get("type") != "BPE" or not model.get("merges") or not is_byte_level:
        raise ModelError(f"its tokenizer is not byte-level BPE, the one kind that is written to GGUF here: {REMEDY}")
    if fast.eos_token_id is None:  # readers would take a default of theirs for it
        raise ModelError(f"its tokenizer names no end-of-text token, which a GGUF file needs: {REMEDY}")
    # Every token by its number, with llama.cpp's type; numbers that the tokenizer leaves free are unused tokens.
    tokens, types = [f"[PAD{number}]" for number in range(size)], [UNUSED] * size
    numbers = {**model["vocab"], **{token["content"]: token["id"] for token in whole["added_tokens"]}}
    if max(numbers.values()) >= size:
        raise ModelError(f"its tokenizer has {max(numbers.values()) + 1} tokens and the model {size}: {REMEDY}")
    added = {token["content"]: CONTROL if token["special"] else USER_DEFINED for token in whole["added_tokens"]}
    added |= dict.fromkeys(fast.all_special_tokens, CONTROL)
    for token, number in numbers.items():
        tokens[number], types[number] = token, added.get(token, NORMAL)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    fields: dict[str, tuple[object, GGUFValueType]] = {
        "tokenizer.ggml.model": ("gpt2", kinds.STRING),
        "tokenizer.ggml.tokens": (tokens, kinds.ARRAY),
        "tokenizer.ggml.token_type": (types, kinds.ARRAY),
        "tokenizer.ggml.merges": (merges, kinds.ARRAY),
        "tokenizer.ggml.eos_token_id": (fast.eos_token_id, kinds.UINT32),
        "tokenizer.ggml.add_bos_token": (
            fast.bos_token_id is not None and fast.encode("a")[:1] == [fast.bos_token_id],
            kinds.BOOL,
        ),
    }
    for word, key in (("bos", "bos"), ("pad", "padding"), ("unk", "unknown")):
        number = getattr(fast, f"{word}_token_id", None)
        if number is not None:
            fields[f"tokenizer.ggml.{key}_token_id"] = (number, kinds.UINT32)
    if isinstance(fast.chat_template, str):
        fields["tokenizer.chat_template"] = (fast.chat_template, kinds.STRING)
    # Of the ways to split text that readers know by a name, the one that gives this tokenizer's own tokens.
    wanted = fast.encode(PROBE, add_special_tokens=False)
    metadata = {key: value for key, (value, _) in fields.items()}
    for pre in PRE_TOKENIZERS:
        made, _ = tokenizer_from_gguf({**metadata, "tokenizer.ggml.pre": pre})
        if made.encode(PROBE, add_special_tokens=False).ids == wanted:
            fields["tokenizer.ggml.pre"] = (pre, kinds.STRING)
            return fields
    raise ModelError(f"its tokenizer splits text like none of {', '.join(PRE_TOKENIZERS)}: {REMEDY}")
