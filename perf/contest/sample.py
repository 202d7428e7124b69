"""One contestant in sampling: `python -m contest.sample engine|generate|llama.cpp MODEL`.

In: a number of sequences, by pipe. Out: tokens written and seconds, reading the prompts included. All sample at
temperature 1 from the whole vocabulary, in fp32 with an fp32 cache, `NEW_TOKENS` for each prompt of `PROMPT_TOKENS`;
no sequence ends early. MODEL is a folder; for llama.cpp a GGUF file, and the interpreter one that has llama-cpp-python.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

from contest.turns import Turns

PROMPT_TOKENS, NEW_TOKENS = 64, 96
MAX_ROWS = 32
VOCABULARY = 49000


def make_prompts(rows: int) -> list[list[int]]:
    chance = random.Random(rows)
    return [[chance.randrange(10, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(rows)]


def run_engine(model: str, turns: Turns) -> None:
    from evsys_engine.engine import Engine
    from evsys_engine.types import SampleRequest

    sampler = Engine.load(Path(model), device="cpu", dtype="float32").load_sampler(None)

    def sample(rows: int) -> int:
        requests = [
            SampleRequest(tokens=prompt, max_tokens=NEW_TOKENS, seed=i, end_of_text=False)
            for i, prompt in enumerate(make_prompts(rows))
        ]
        return sum(len(result.sequences[0].tokens) for result in sampler.sample(requests))

    turns.serve(sample)


def run_generate(model_dir: str, turns: Turns) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True).eval()
    model.generation_config.eos_token_id = None
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": NEW_TOKENS}

    @torch.inference_mode()
    def sample(rows: int) -> int:
        ids = torch.tensor(make_prompts(rows))
        out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings)
        return int(out[:, PROMPT_TOKENS:].numel())

    turns.serve(sample)


def run_llama_cpp(file: str, turns: Turns) -> None:
    """Its C interface: the Python class on top of it takes one sequence at a time."""
    import llama_cpp as lib

    silent = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(silent, None)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(file.encode(), lib.llama_model_default_params())
    settings = lib.llama_context_default_params()
    settings.n_ctx, settings.n_batch = MAX_ROWS * (PROMPT_TOKENS + NEW_TOKENS), MAX_ROWS * PROMPT_TOKENS
    settings.n_seq_max = MAX_ROWS
    settings.n_threads = settings.n_threads_batch = int(os.environ["OMP_NUM_THREADS"])
    settings.type_k = settings.type_v = lib.GGML_TYPE_F32
    context = lib.llama_init_from_model(model, settings)
    batch = lib.llama_batch_init(settings.n_batch, 0, 1)

    def decode(items: list[tuple[int, int, int, bool]]) -> None:
        """Tokens with their position, sequence, and whether their logits are wanted."""
        batch.n_tokens = len(items)
        for i, (token, position, sequence, wanted) in enumerate(items):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        if lib.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")

    def sample(rows: int) -> int:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        dice = [lib.llama_sampler_init_dist(seed) for seed in range(rows)]
        prompts = enumerate(make_prompts(rows))
        last = PROMPT_TOKENS - 1
        decode([(token, at, row, at == last) for row, prompt in prompts for at, token in enumerate(prompt)])
        places = [PROMPT_TOKENS * row + last for row in range(rows)]
        for step in range(NEW_TOKENS):
            tokens = [lib.llama_sampler_sample(die, context, place) for die, place in zip(dice, places, strict=True)]
            if step < NEW_TOKENS - 1:
                decode([(token, PROMPT_TOKENS + step, row, True) for row, token in enumerate(tokens)])
                places = list(range(rows))
        for die in dice:
            lib.llama_sampler_free(die)
        return rows * NEW_TOKENS

    turns.serve(sample)


WAYS = {"engine": run_engine, "generate": run_generate, "llama.cpp": run_llama_cpp}


if __name__ == "__main__":
    way, model = sys.argv[1:]
    WAYS[way](model, Turns())
