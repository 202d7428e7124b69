"""How much the framework itself costs per training step, on the mock backend.

In: nothing. Out: a table, and perf/results/mock_step.json. What counts as ours: the whole loop's time (building
batches, submitting, metrics, logging) minus the time inside the backend's calls; the median step of the best of
three runs. Goal: 1 ms per step at most.
"""

from __future__ import annotations

import asyncio
import platform
import random
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from evsys_sdk.algorithms.sft import SFT
from evsys_sdk.files import write_json
from evsys_sdk.record.log_stores import JsonlLogStore
from evsys_sdk.testing import MemoryLog, RecordingBackend, training_context
from evsys_sdk.training_api import ModelInput, SamplingParams

RESULTS = Path(__file__).parent / "results" / "mock_step.json"
GOAL_MS = 1.0
STEPS, REPEATS = 60, 3
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "fetch", "mail", "weather", "calendar")


def make_rows(count: int, tokens: int) -> list[dict[str, Any]]:
    """Chats of about `tokens` tokens (the mock's are bytes), a quarter of them the assistant's."""
    chance = random.Random(0)

    def text(size: int) -> str:
        words = ""
        while len(words) < size:
            words += chance.choice(WORDS) + " "
        return words[:size]

    chat = tokens - len("user") - len("assistant") - 8
    return [
        {"messages": [{"role": "user", "content": text(chat * 3 // 4)}], "target_assistant": text(chat // 4)}
        for _ in range(count)
    ]


def measure(batch_size: int, tokens: int, jsonl: bool) -> dict[str, Any]:
    """One run: total and framework time per step, in milliseconds, setting up and the final checkpoint left out."""
    with tempfile.TemporaryDirectory() as folder:
        backend = RecordingBackend()
        log = JsonlLogStore(log_dir=f"{folder}/logs") if jsonl else MemoryLog()
        ctx = training_context(Path(folder), make_rows(4 * batch_size, tokens), backend=backend, log_store=log)
        algorithm = SFT(max_steps=STEPS, batch_size=batch_size)
        marks: list[tuple[float, float]] = []
        build = algorithm.build_batch

        async def marked(step: int) -> Any:
            marks.append((time.perf_counter(), backend.seconds_inside))
            return await build(step)

        algorithm.build_batch = marked  # type: ignore[method-assign]
        algorithm.train(ctx)
        log.close()
    whole = [(b[0] - a[0]) * 1000 for a, b in pairwise(marks)]
    inside = [(b[1] - a[1]) * 1000 for a, b in pairwise(marks)]
    ours = [w - i for w, i in zip(whole, inside, strict=True)]
    return {
        "batch": batch_size,
        "tokens": tokens,
        "log": "jsonl" if jsonl else "memory",
        "step_ms": statistics.median(whole),
        "backend_ms": statistics.median(inside),
        "framework_ms": statistics.median(ours),
    }


def measure_sampling() -> float:
    """Milliseconds for 8 completions of 64 tokens."""

    async def sample() -> float:
        with tempfile.TemporaryDirectory() as folder:
            service = training_context(Path(folder), []).extras["backend_handles"]["service"]
            sampler = await service.create_sampling_client()
            prompt = ModelInput.from_ints(list(b"the quick brown fox"))
            times = []
            for seed in range(5):
                began = time.perf_counter()
                await sampler.sample(prompt, 8, SamplingParams(max_tokens=64, seed=seed))
                times.append((time.perf_counter() - began) * 1000)
            return statistics.median(times)

    return asyncio.run(sample())


def main() -> None:
    cases = [(8, 128, False), (8, 128, True), (32, 128, True), (8, 512, True)]
    best = [min((measure(*case) for _ in range(REPEATS)), key=lambda row: row["framework_ms"]) for case in cases]
    print(f"batch tokens     log  step ms backend ms framework ms  goal <= {GOAL_MS} ms")
    for row in best:
        print(
            f"{row['batch']:>5} {row['tokens']:>6} {row['log']:>7} {row['step_ms']:>8.2f} {row['backend_ms']:>10.2f} "
            f"{row['framework_ms']:>12.3f}  {'ok' if row['framework_ms'] <= GOAL_MS else 'TOO SLOW'}"
        )
    sampling = measure_sampling()
    print(f"sampling 8 x 64 tokens: {sampling:.1f} ms")
    RESULTS.parent.mkdir(exist_ok=True)
    machine = {"python": platform.python_version(), "processor": platform.machine()}
    write_json(RESULTS, {"goal_ms": GOAL_MS, "steps": best, "sampling_8x64_ms": sampling, **machine})


if __name__ == "__main__":
    main()
