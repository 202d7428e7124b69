"""A GGUF file becomes a Hugging Face folder.

In: a `.gguf` file of the llama, qwen2 or qwen3 architecture. Out: config, fp32 safetensors and tokenizer in a folder.
llama.cpp's names and its order of the rotary halves exist only here; a file that would come out subtly wrong is
refused, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evsys_engine.models.cache import require_space
from evsys_engine.models.errors import ModelError, need
from evsys_engine.models.tokenizer import Specials, save_tokenizer, tokenizer_from_gguf
from evsys_engine.types import Array, JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECIPE = "gguf-1"
"""Changes whenever the same file would give another folder."""
SHARD_BYTES = 2 << 30
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
LAYER_EXTRA = {
    "llama": {},
    "qwen2": {f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"},
    "qwen3": {f"attn_{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"},
}
REMEDY = "use the model's Hugging Face directory instead"


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open GGUF file: what it says of itself, and its tensors by llama.cpp's names."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def setting(self, key: str, default: Any = None) -> Any:
        """A number of the architecture, e.g. `block_count`."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelError(f"{self.path} lacks {self.architecture}.{key}")
        return value


def convert_gguf(path: Path, folder: Path) -> None:
    """Write the model of a GGUF file into `folder` as transformers reads it."""
    need("safetensors.numpy")
    file = read_gguf(path)
    names = tensor_names(file)
    try:
        tokenizer, specials = tokenizer_from_gguf(file.metadata)
    except ModelError as exc:
        raise ModelError(f"{path}: {exc}") from exc
    config = model_config(file, tokenizer, specials)
    save_tokenizer(
        tokenizer,
        folder,
        specials,
        template=file.metadata.get("tokenizer.chat_template"),
        context=config["max_position_embeddings"],
    )
    write_configs(folder, config)
    sizes = {name: 4 * int(file.tensors[name].n_elements) for name in names}
    write_weights(folder, names, sizes, lambda name: read_tensor(file, name))


def read_gguf(path: Path) -> GgufFile:
    """Open a GGUF file whose architecture we know."""
    reader_class = need("gguf").GGUFReader
    try:
        reader = reader_class(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        file = GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})
    except OSError as exc:
        raise ModelError(f"cannot read {path}: {exc.strerror or exc}") from exc
    except Exception as exc:  # a torn file fails in many ways inside the reader
        raise ModelError(f"{path} is not a whole GGUF file ({type(exc).__name__}: {exc}); fetch it again") from exc
    _refuse_what_would_be_wrong(file)
    return file


def _refuse_what_would_be_wrong(file: GgufFile) -> None:
    name, prefix = file.architecture, f"{file.architecture}."
    if name not in CLASSES:
        raise ModelError(f"{file.path} is of the architecture {name!r}; read are {', '.join(CLASSES)}: {REMEDY}")
    if file.metadata.get("split.count", 1) > 1:
        raise ModelError(f"{file.path} is one of {file.metadata['split.count']} parts; merge them first, or {REMEDY}")
    scaling = file.metadata.get(f"{prefix}rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors or scaling != "none":
        raise ModelError(f"{file.path} scales its rotary positions, which a GGUF file does not fully tell: {REMEDY}")


def tensor_names(file: GgufFile) -> dict[str, str]:
    """llama.cpp's name -> transformers' name, for every tensor; none may be missing or left over."""
    layer = LAYER | LAYER_EXTRA[file.architecture]
    names = {key: value for key, value in TOP.items() if key != "output.weight" or key in file.tensors}
    for index in range(file.setting("block_count")):
        names |= {f"blk.{index}.{key}": f"model.layers.{index}.{value}" for key, value in layer.items()}
    missing, unknown = sorted(set(names) - set(file.tensors)), sorted(set(file.tensors) - set(names))
    if missing or unknown:
        what = f"lacks the tensor {missing[0]}" if missing else f"has the tensor {unknown[0]}"
        raise ModelError(f"{file.path} {what}, unlike other {file.architecture} models: {REMEDY}")
    return names


def read_tensor(file: GgufFile, name: str) -> Array:
    """One tensor in fp32, its rows in transformers' order."""
    tensor = file.tensors[name]
    try:
        values: Array = need("gguf").dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as exc:
        raise ModelError(f"{file.path}: {name} is stored as {tensor.tensor_type.name}, which cannot be read") from exc
    # llama.cpp interleaves the two rotary halves of each head, for the llama architecture only.
    if file.architecture == "llama" and name.endswith("attn_q.weight"):
        values = _undo_interleaving(values, file.setting("attention.head_count"))
    elif file.architecture == "llama" and name.endswith("attn_k.weight"):
        values = _undo_interleaving(values, _kv_heads(file))
    return np.ascontiguousarray(values, dtype=np.float32)


def _undo_interleaving(values: Array, heads: int) -> Array:
    paired = values.reshape(heads, -1, 2, values.shape[-1])
    return paired.swapaxes(1, 2).reshape(values.shape)


def _kv_heads(file: GgufFile) -> int:
    return int(file.setting("attention.head_count_kv", file.setting("attention.head_count")))


def model_config(file: GgufFile, tokenizer: PreTrainedTokenizerBase, specials: Specials) -> JsonObject:
    """`config.json`."""
    heads, hidden = file.setting("attention.head_count"), file.setting("embedding_length")
    theta = _short(file.setting("rope.freq_base", 10000.0))
    return {
        "architectures": [CLASSES[file.architecture]],
        "model_type": file.architecture,
        "hidden_size": hidden,
        "intermediate_size": file.setting("feed_forward_length"),
        "num_hidden_layers": file.setting("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(file),
        "head_dim": file.setting("attention.key_length", file.setting("rope.dimension_count", hidden // heads)),
        "max_position_embeddings": file.setting("context_length"),
        "rms_norm_eps": _short(file.setting("attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        # GGUF lists sizes from the innermost on: [hidden, vocabulary].
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": tokenizer.token_to_id(specials.bos) if specials.bos else None,
        "eos_token_id": tokenizer.token_to_id(specials.eos),
        "pad_token_id": tokenizer.token_to_id(specials.pad),
        "dtype": "float32",
    }


def write_configs(folder: Path, config: JsonObject) -> None:
    """`config.json`, and `generation_config.json` so that generation ends at the end of a turn."""
    ending = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config[key] is not None}
    for name, value in (("config", config), ("generation_config", ending)):
        (folder / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n")


def _short(value: float) -> float:
    """A float32 as people write it: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def write_weights(
    folder: Path, names: Mapping[str, str], sizes: Mapping[str, int], read: Callable[[str], Array]
) -> None:
    """Safetensors files of at most 2 GB, so that no more than one of them is ever in memory."""
    require_space(folder, sum(sizes.values()))
    save_file = need("safetensors.numpy").save_file
    shards = list(_shards(sizes))
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        filename = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        save_file({names[key]: read(key) for key in shard}, folder / filename, metadata={"format": "pt"})
        (folder / filename).chmod(0o644)  # safetensors lets only the owner read
        where |= {names[key]: filename for key in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _shards(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    shard: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if shard and filled + size > SHARD_BYTES:
            yield shard
            shard, filled = [], 0
        shard.append(name)
        filled += size
    yield shard
