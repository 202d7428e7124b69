"""Tokenizer files: from a GGUF's own tokens and merges, or from any `tokenizers.Tokenizer`.

In: the metadata of a GGUF file. Out: `tokenizer.json` and `tokenizer_config.json` as transformers reads them.
transformers' own `gguf_file=` is not used: for byte-level BPE it builds a tokenizer that loses spaces and ends a chat
at the wrong token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evsys_engine.models.errors import ModelError, need
from evsys_engine.types import JsonObject

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerBase

NORMAL, USER_DEFINED, UNUSED = 1, 4, 5
"""Of llama.cpp's token types; all others are control tokens."""
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {"qwen2": WORDS % r"\p{N}", "llama-bpe": WORDS % r"\p{N}{1,3}"}
PRE_TOKENIZERS = ("smollm", "gpt-2", *SPLITS)
"""`tokenizer.ggml.pre` of the files we read."""
END_OF_TURN = "<|im_end|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Specials:
    """The tokens with a part to play, as text; None where the model has none."""

    bos: str | None
    eos: str
    """Ends the assistant's turn."""
    pad: str
    unk: str | None = None


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> tuple[Tokenizer, Specials]:
    """A `tokenizers.Tokenizer` that splits as llama.cpp does on the same file, and its special tokens."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        what = f"of kind {kind!r}" if kind != "gpt2" else f"byte-level BPE of the kind {pre!r}"
        raise ModelError(
            f"its tokenizer is {what}; read are byte-level BPE of the kinds {', '.join(PRE_TOKENIZERS)}. "
            "Use the model's Hugging Face directory instead"
        )
    missing = [key for key in ("tokens", "merges", "token_type") if f"tokenizer.ggml.{key}" not in metadata]
    if missing:
        raise ModelError(f"its tokenizer lacks {', '.join(missing)}")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    tokenizers = need("tokenizers")
    # Byte-level BPE writes a space as another letter, so the one that stands here parts the two tokens.
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # llama-bpe takes a word that is a token as it is, whatever the merges would make of it.
    model = tokenizers.models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(tokenizers, pre)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if pre == "qwen2":  # Qwen's own tokenizer joins letter and accent first; llama.cpp leaves that out
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.add_special_tokens(_added_tokens(tokenizers, tokens, metadata, special=True))
    tokenizer.add_tokens(_added_tokens(tokenizers, tokens, metadata, special=False))
    specials = choose_specials(metadata)
    if specials.bos and metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{specials.bos} $A", special_tokens=[(specials.bos, vocabulary[specials.bos])]
        )
    return tokenizer, specials


def choose_specials(metadata: Mapping[str, Any]) -> Specials:
    """bos, eos, pad and unk by the metadata; eos is what closes a turn of the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {
        word: tokens[metadata[f"tokenizer.ggml.{word}_token_id"]]
        for word in ("bos", "eos", "eot", "padding", "unknown")
        if f"tokenizer.ggml.{word}_token_id" in metadata
    }
    eos = named.get("eot") or named.get("eos")
    if END_OF_TURN in metadata.get("tokenizer.chat_template", "") and END_OF_TURN in tokens:
        eos = END_OF_TURN
    if eos is None:
        raise ModelError("the GGUF file names no end-of-text token (tokenizer.ggml.eos_token_id)")
    return Specials(bos=named.get("bos"), eos=eos, pad=named.get("padding", eos), unk=named.get("unknown"))


def save_tokenizer(
    tokenizer: PreTrainedTokenizerBase, folder: Path, specials: Specials, *, template: str | None, context: int
) -> None:
    """Write the two files by which `AutoTokenizer` finds this very tokenizer."""
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": specials.bos, "eos_token": specials.eos, "pad_token": specials.pad, "unk_token": specials.unk}
    settings: JsonObject = {
        # The general class: a model's own class (LlamaTokenizer) would be rebuilt with another pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key: token for key, token in named.items() if token is not None},
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    if template:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def _pre_tokenizer(tokenizers: Any, pre: str) -> Any:
    kinds = tokenizers.pre_tokenizers
    if pre == "smollm":
        return kinds.Sequence([kinds.Digits(individual_digits=True), kinds.ByteLevel(add_prefix_space=False)])
    if pre in SPLITS:
        split = kinds.Split(tokenizers.Regex(SPLITS[pre]), "isolated")
        return kinds.Sequence([split, kinds.ByteLevel(add_prefix_space=False, use_regex=False)])
    return kinds.ByteLevel(add_prefix_space=False)


def _added_tokens(
    tokenizers: Any, tokens: list[str], metadata: Mapping[str, Any], *, special: bool
) -> list[AddedToken]:
    """Tokens that are found in a text as they stand: control tokens, or what the model's makers added as words."""
    types = metadata["tokenizer.ggml.token_type"]
    return [
        tokenizers.AddedToken(token, normalized=False, special=special)
        for token, kind in zip(tokens, types, strict=True)
        if (kind not in (NORMAL, USER_DEFINED, UNUSED) if special else kind == USER_DEFINED)
    ]
