"""How fast the local engine samples, beside `transformers` generate on the same model.

In: `--model DIR`, or nothing for a random model of SmolLM2-135M's shape (the speed does not depend on the values).
Out: a table of tokens/s at 1, 8 and 32 sequences, and perf/results/sampling.json. The two take turns, so that a noisy
machine hurts both; the ratio is of the best round of each. Goal: 1.5 times generate at 8 and 32 sequences on a CPU.
"""

from __future__ import annotations

import argparse
import os
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from evsys_engine.sampling import BatchSampler
from evsys_engine.types import ModelInfo, SampleRequest
from evsys_sdk.atomic import write_json

RESULTS = Path(__file__).parent / "results" / "sampling.json"
GOAL, GOAL_AT = 1.5, (8, 32)
SIZES = (1, 8, 32)
PROMPT_TOKENS = 64


def load_model(folder: str | None) -> Any:
    """In eval mode, and with no end token: every sequence gets its full length."""
    torch.manual_seed(0)
    if folder:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    else:
        shape = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
        sizes = {"intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192}
        model = LlamaForCausalLM(LlamaConfig(**shape, **sizes, tie_word_embeddings=True))
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def make_sampler(model: Any) -> BatchSampler:
    config = model.config
    info = ModelInfo(
        name=type(model).__name__,
        path=Path(),
        vocab_size=config.vocab_size,
        max_length=config.max_position_embeddings,
        parameters=model.num_parameters(),
        device="cpu",
        dtype="float32",
    )
    return BatchSampler(engine_model=model, tokenizer=None, info=info, lora=None, full=None, lock=threading.Lock())


def engine_call(sampler: BatchSampler, prompts: list[list[int]], new_tokens: int) -> Callable[[], int]:
    requests = [SampleRequest(tokens=prompt, max_tokens=new_tokens, seed=i) for i, prompt in enumerate(prompts)]

    def call() -> int:
        return sum(len(result.rows[0].tokens) for result in sampler.sample(requests))

    return call


def generate_call(model: Any, prompts: list[list[int]], new_tokens: int) -> Callable[[], int]:
    ids = torch.tensor(prompts)
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": new_tokens}

    @torch.inference_mode()
    def call() -> int:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings)
        return int(out[:, ids.shape[1] :].numel())

    return call


def measure(calls: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """Tokens per second of each, in its best round."""
    best = dict.fromkeys(calls, 0.0)
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            tokens = call()
            best[name] = max(best[name], tokens / (time.perf_counter() - began))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder; left out: random weights of SmolLM2-135M's shape")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    logging.set_verbosity_error()
    model = load_model(args.model)
    sampler = make_sampler(model)
    engine_call(sampler, [[1]], 2)()  # the snapshot is made before the clock runs
    rows = []
    print(f"sequences  generate tok/s  engine tok/s  ratio   (goal {GOAL} at {GOAL_AT}, load {os.getloadavg()[0]:.1f})")
    for size in SIZES:
        prompts = torch.randint(10, model.config.vocab_size, (size, PROMPT_TOKENS)).tolist()
        calls = {
            "generate": generate_call(model, prompts, args.new_tokens),
            "engine": engine_call(sampler, prompts, args.new_tokens),
        }
        speed = measure(calls, args.rounds)
        ratio = speed["engine"] / speed["generate"]
        word = "" if size not in GOAL_AT else "ok" if ratio >= GOAL else "TOO SLOW"
        print(f"{size:>9}  {speed['generate']:>14.1f}  {speed['engine']:>12.1f}  {ratio:>5.2f}   {word}")
        rows.append({"sequences": size, **{k: round(v, 1) for k, v in speed.items()}, "ratio": round(ratio, 2)})
    RESULTS.parent.mkdir(exist_ok=True)
    setup = {"model": args.model or "random, SmolLM2-135M's shape", "prompt": PROMPT_TOKENS, "new": args.new_tokens}
    machine = {"python": platform.python_version(), "torch": torch.__version__, "threads": torch.get_num_threads()}
    write_json(RESULTS, {"goal": {"ratio": GOAL, "at": list(GOAL_AT)}, "speed": rows, **setup, **machine})


if __name__ == "__main__":
    main()
