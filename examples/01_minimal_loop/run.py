"""The smallest training loop: plain Python over the training API, with no YAML, no record and no verdict.

    python examples/01_minimal_loop/run.py           # SmolLM2-135M on this machine's CPU, minutes
    python examples/01_minimal_loop/run.py mock      # a table model, seconds, no torch

In: requests, each with the tool that it needs. Out: the loss of each step, and how many unseen requests are answered
right before and after. `algorithms/sft.py` and `training/loop.py` are this loop with resume, evaluation and records.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path

from evsys_sdk.config.schema import ModelConfig
from evsys_sdk.registry import backends
from evsys_sdk.training_api import AdamParams, Datum, ModelInput, SamplingParams, TensorData, text_of

DATA = Path(__file__).resolve().parents[1] / "10_sweep/data"
MODELS = {"local": "smollm2-135m-instruct", "mock": "table-model"}
STEPS, BATCH_SIZE, LEARNING_RATE, RANK, SEED = 40, 8, 1e-3, 8, 42


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def prompt_of(tokenizer, request):
    return tokenizer.apply_chat_template([{"role": "user", "content": request}], add_generation_prompt=True)


def to_datum(tokenizer, request, answer):
    """One sequence to learn from. Position i of the input predicts token i + 1: the caller shifts."""
    prompt = prompt_of(tokenizer, request)
    completion = [*tokenizer.encode(answer), tokenizer.eos_token_id]
    tokens = prompt + completion
    # Tokens the model reads but does not write carry weight 0: they are context, not behaviour.
    weights = [0.0] * len(prompt) + [1.0] * len(completion)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": TensorData(tokens[1:], dtype="int64"),
            "weights": TensorData(weights[1:]),
        },
    )


async def share_right(sampler, tokenizer, tasks):
    """Greedy answers to all tasks, asked at once: the sampler batches them."""
    params = SamplingParams(max_tokens=40, temperature=0.0, stop=(tokenizer.eos_token_id,), seed=SEED)
    prompts = [ModelInput.from_ints(prompt_of(tokenizer, task["instruction"])) for task in tasks]
    answers = await asyncio.gather(*(sampler.sample(prompt, 1, params) for prompt in prompts))
    said = [text_of(answer.sequences[0].tokens, tokenizer) for answer in answers]
    wanted = [f"<answer>{task['verifier']['expected']}</answer>" for task in tasks]
    return sum(a.strip() == b for a, b in zip(said, wanted, strict=True)) / len(tasks)


async def train(kind, folder):
    """Returns the share of unseen requests answered right: untrained, trained."""
    rows, tasks = read(DATA / "train.jsonl"), read(DATA / "val/tasks.jsonl")
    backend = backends.get(kind)()
    handles = backend.prepare(model=ModelConfig(name=MODELS[kind]), run_dir=folder)
    try:
        service = handles["service"]
        tokenizer = service.get_tokenizer()
        before = await share_right(await service.create_sampling_client(), tokenizer, tasks)
        print(f"untrained: {before:.3f} of {len(tasks)} unseen requests", flush=True)

        client = await service.create_training_client(rank=RANK, seed=SEED)
        data = [to_datum(tokenizer, row["query"], f"<answer>{row['tool_slug']}</answer>") for row in rows]
        chance = random.Random(SEED)
        for step in range(1, STEPS + 1):
            batch = chance.sample(data, BATCH_SIZE)
            rate = LEARNING_RATE * (1 - (step - 1) / STEPS)  # linear decay
            # Submit both before awaiting either: a remote server does them without a pause in between.
            loss = client.forward_backward(batch, "cross_entropy")
            moved = client.optim_step(AdamParams(learning_rate=rate))
            total = (await loss).metrics["loss:sum"]
            await moved
            learnt = sum(sum(datum.loss_fn_inputs["weights"].tolist()) for datum in batch)
            if step == 1 or step % 10 == 0:  # the loss is a sum over tokens; per token it can be compared
                print(f"step {step} of {STEPS}: loss {total / learnt:.4f}", flush=True)

        weights = await client.save_weights_for_sampler("final")
        after = await share_right(await service.create_sampling_client(weights), tokenizer, tasks)
        print(f"trained: {after:.3f} of {len(tasks)} unseen requests")
        return before, after
    finally:
        backend.teardown(handles)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:  # weights of this run; nothing is kept
        asyncio.run(train(sys.argv[1] if len(sys.argv) > 1 else "local", Path(scratch)))
