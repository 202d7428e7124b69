"""Tiny random models and a tiny tokenizer, made on the spot."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from evsys_engine.scheduler import BatchSampler
from evsys_engine.types import ModelInfo

VOCAB = 300
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.25,  # large, so that the logits are far from flat
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def tiny(kind: str) -> Any:
    """A random model in eval mode; the same one for the same name."""
    torch.manual_seed(0)
    makers = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True)),
        "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
        "llama3-rope": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
        "mistral-sliding": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8)),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=128, initializer_range=0.25)
        ),
    }
    model = makers[kind]().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:  # these start as ones and zeros, which would hide a mistake
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.eos_token_id = None
    return model


def tiny_tokenizer() -> Any:
    """A byte-level BPE: every id below 256 or so is a byte, the rest are short pieces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<end>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the end of the story is the end of the day"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def info_of(model: Any) -> ModelInfo:
    config = model.config
    return ModelInfo(
        name="tiny",
        path=Path(),
        vocab_size=config.vocab_size,
        max_length=config.max_position_embeddings,
        parameters=model.num_parameters(),
        device="cpu",
        dtype="float32",
    )


def new_sampler(
    model: Any, *, tokenizer: Any = None, lora: Any = None, full: Any = None, lock: Any = None
) -> BatchSampler:
    return BatchSampler(
        engine_model=model,
        tokenizer=tokenizer,
        info=info_of(model),
        lora=lora,
        full=full,
        lock=lock or threading.Lock(),
    )


def random_lora(
    model: Any, *, rank: int = 4, head: bool = False
) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """Low-rank parts for every linear layer of the trunk (and the head), large enough to matter."""
    torch.manual_seed(1)
    return {
        name: (
            torch.randn(rank, module.in_features) * 0.2,
            torch.randn(module.out_features, rank) * 0.2,
            0.5,
        )
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and (head or name != "lm_head")
    }
