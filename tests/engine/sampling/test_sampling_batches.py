"""Who shares a batch, and from when on, changes no bit of anybody's answer: a rollout can be repeated on its own."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_models import new_sampler
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from evsys_engine.types import SampleRequest

VOCAB = 1000
SHAPE = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Sizes of real models: long sums are where a library goes other ways for other numbers of rows.
MAKERS = {
    "smollm2": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            **SHAPE,
            hidden_size=256,
            intermediate_size=1536,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=128,
        )
    ),
}


def _requests(chance: random.Random) -> list[SampleRequest]:
    return [
        SampleRequest(
            tokens=[chance.randrange(VOCAB) for _ in range(length)],
            num_samples=chance.choice([1, 1, 3]),
            max_tokens=chance.choice([1, 8, 30]),
            seed=length,
            temperature=chance.choice([0.0, 0.7, 1.0]),
            top_k=chance.choice([-1, 40]),
            top_p=chance.choice([1.0, 0.9]),
            topk_prompt_logprobs=chance.choice([0, 2]),
            prompt_logprobs=chance.choice([True, False]),
        )
        for length in (1, 3, 17, 64, 100, 127, 200, 300, 520)
    ]


def _joining_at_odd_moments(sampler, requests, chance):
    """Each request comes when it likes, while others are being answered."""
    results = {}
    waiting = list(enumerate(requests))
    chance.shuffle(waiting)

    def feed(room):
        coming = [waiting.pop() for _ in range(min(len(waiting), chance.choice([0, 0, 0, 1, 2])))]
        return [
            sampler.job(request, lambda result, number=number: results.update({number: result}), pytest.fail)
            for number, request in coming
        ]

    while waiting:
        sampler.serve(feed)
    return [results[number] for number in range(len(requests))]


@pytest.mark.parametrize(
    ("kind", "dtype", "threads"),
    [
        ("smollm2", torch.float32, 1),
        ("qwen3", torch.float32, 1),
        ("qwen3", torch.bfloat16, 1),
        ("qwen3", torch.float32, 2),
    ],
    ids=["smollm2", "qwen3", "qwen3-bf16", "qwen3-two-threads"],
)
def test_answers_are_the_same_to_the_last_bit_in_any_company(kind, dtype, threads):
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    try:
        sampler, chance = new_sampler(MAKERS[kind]().eval().to(dtype)), random.Random(1)
        requests = _requests(chance)
        alone = [sampler.sample([request])[0] for request in requests]
        pairs = [result for i in range(0, len(requests), 2) for result in sampler.sample(requests[i : i + 2])]
        for among in (sampler.sample(requests), pairs, _joining_at_odd_moments(sampler, requests, chance)):
            assert among == alone
    finally:
        torch.set_num_threads(1)
