"""Train a grid of real post-training recipes once and keep every task's answer.

In: nothing: `tiny-random`, first taught the task badly. Out: `table.json.gz` beside this file: per configuration, seed
and rung one bit per task, with steps and seconds. The runs are those of our own `sft` and `rl` on the local engine; a
run that fails, fails there (the loop refuses a loss that is not finite). It resumes: what the folder `--work`
holds is not trained again.

    python perf/autoresearch/measure_table.py --work /tmp/table --minutes 25
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from evsys_sdk import registry
from evsys_sdk.backends.local import LocalBackend
from evsys_sdk.errors import FOREIGN
from evsys_sdk.rollout.engine import InProcessRolloutEngine
from evsys_sdk.testing import training_context
from evsys_sdk.training.rendering import renderer_of
from evsys_sdk.training_api import ModelInput, SamplingParams

TABLE = Path(__file__).parent / "table.json.gz"
STEPS, RUNGS = 24, (6, 12, 24)
SEEDS = (0, 1, 2)
TRAIN_TASKS, VAL_TASKS = 180, 90
WRONG_ROWS = 0.35
"""The share of raw training rows whose answer is wrong; `checked: false` marks most of them."""
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "max": max,
    "min": min,
    "first": lambda a, b: a,
    "last": lambda a, b: b,
}
RECIPES: dict[str, list[dict[str, Any]]] = {
    "all": [{"kind": "jsonl_to_chat"}],
    "checked": [{"kind": "filter", "params": {"key": "checked", "equals": True}}, {"kind": "jsonl_to_chat"}],
    "checked_few": [
        {"kind": "filter", "params": {"key": "checked", "equals": True}},
        {"kind": "sample", "params": {"n": 60}},
        {"kind": "jsonl_to_chat"},
    ],
}
"""The data recipes: every row with its mistakes, the checked ones, or few of these."""


def split_tasks() -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[tuple[str, str]]]:
    """Question and answer: for training, for the search, and for the winner's last score."""
    pairs = [(a, b) for a in range(10) for b in range(10) if a != b]
    tasks = [(f"{word} {a} {b}", str(f(a, b))) for word, f in OPERATIONS.items() for a, b in pairs]
    random.Random(0).shuffle(tasks)
    return tasks[:TRAIN_TASKS], tasks[TRAIN_TASKS:][:VAL_TASKS], tasks[TRAIN_TASKS + VAL_TASKS :]


def raw_rows() -> list[dict[str, Any]]:
    chance, rows = random.Random(1), []
    for prompt, answer in split_tasks()[0]:
        is_wrong = chance.random() < WRONG_ROWS
        said = str(chance.randrange(10)) if is_wrong else answer
        rows.append({"prompt": prompt, "completion": said, "checked": not is_wrong or chance.random() < 0.1})
    return rows


def rows_of(recipe: str, kind: str) -> list[dict[str, Any]]:
    rows: list[Any] = raw_rows()
    for spec in RECIPES[recipe]:
        rows = registry.transforms.build(spec["kind"], spec.get("params", {}))(rows)
    if kind == "sft":
        return rows
    return [
        {
            "task_id": f"t{number}",
            "instruction": row["messages"][0]["content"],
            "verifier": {"fn_name": "exact_match", "expected": row["messages"][-1]["content"]},
        }
        for number, row in enumerate(rows)
    ]


def draw_configurations(n: int) -> list[dict[str, Any]]:
    """Space-filling in the axes that are numbers; every fifth is `rl`."""
    from scipy.stats import qmc

    points = qmc.Sobol(8, seed=7).random(n)
    found = []
    for number, u in enumerate(points):
        kind = "rl" if number % 5 == 4 else "sft"
        found.append(
            {
                "kind": kind,
                "learning_rate": float(f"{10 ** (-4 + 4.5 * u[0]):.3g}"),  # 1e-4 to 3
                "lora_rank": (0, 2, 8, 32)[int(u[1] * 4)],
                "batch_size": (2, 4, 8, 16)[int(u[2] * 4)],
                "warmup_fraction": round(0.3 * float(u[3]), 2),
                "weight_decay": float(f"{10 ** (-3 + 4 * u[4]):.3g}"),  # 1e-3 to 10
                "lr_schedule": ("constant", "linear", "cosine")[int(u[5] * 3)],
                "recipe": list(RECIPES)[int(u[6] * 3)],
                "max_grad_norm": (0.0, 1.0)[int(u[7] * 2)],
            }
        )
    return found


def train(kind: str, rows: list[Any], params: dict[str, Any], model: str, seed: int, folder: Path) -> Any:
    backend = LocalBackend(threads=1)
    ctx = training_context(
        folder, rows, backend=backend, model_name=model, seed=seed, rollouts=InProcessRolloutEngine()
    )
    ctx.extras["backend_kind"] = "local"
    algorithm = registry.algorithms.build(kind, params)
    try:
        result = algorithm.train(ctx)
    finally:
        backend.teardown(ctx.extras["backend_handles"])
    return result


def ask(model: str, weights: Path | None, tasks: list[tuple[str, str]], folder: Path) -> str:
    """One character per task: `1` where the greedy answer is right."""
    backend = LocalBackend(threads=1)
    ctx = training_context(folder, [], backend=backend, model_name=model)
    service: Any = ctx.extras["backend_handles"]["service"]
    renderer = renderer_of(ctx, service)

    async def sample() -> list[int]:
        client = await service.create_sampling_client(str(weights) if weights else None)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        prompts = [renderer.prompt([{"role": "user", "content": question}]) for question, _ in tasks]
        found = await asyncio.gather(*(client.sample(ModelInput.from_ints(p), 1, params) for p in prompts))
        return [one.sequences[0].tokens[0] for one in found]

    try:
        said = asyncio.run(sample())
        right = [renderer.tokenizer.encode(answer)[0] for _, answer in tasks]  # a digit is one token
    finally:
        backend.teardown(ctx.extras["backend_handles"])
    return "".join(str(int(one == other)) for one, other in zip(said, right, strict=True))


def make_base(folder: Path) -> str:
    """`tiny-random` after a full fine-tuning on the same questions with other answers; a model folder."""
    rows = rows_of("all", "sft")
    params = {"max_steps": 150, "batch_size": 32, "learning_rate": 3e-3, "lora_rank": 0, "lr_schedule": "linear"}
    return str(train("sft", rows, params, "tiny-random", 0, folder).artifacts["final_sampler"])


def measure(settings: dict[str, Any], seed: int, base: str, folder: Path) -> dict[str, Any]:
    """One run: its bits per rung, or why it failed."""
    kind = settings["kind"]
    names = ("learning_rate", "lora_rank", "batch_size", "warmup_fraction", "weight_decay", "lr_schedule")
    params = {name: settings[name] for name in (*names, "max_grad_norm")}
    params |= {"max_steps": STEPS, "save_at_fractions": [rung / STEPS for rung in RUNGS]}
    if kind == "rl":
        params |= {"num_samples": 4, "max_tokens": 2}
    line: dict[str, Any] = {"seed": seed, "error": None, "rungs": {}, "loss": None}
    began = time.process_time()
    try:
        result = train(kind, rows_of(settings["recipe"], kind), params, base, seed, folder)
        line["loss"] = [result.metrics.get("first_loss"), result.metrics.get("final_loss")]
    except FOREIGN as exc:
        line["error"] = f"{type(exc).__name__}: {exc}"[:200]
    line["seconds"] = round(time.process_time() - began, 3)
    _, val, fresh = split_tasks()
    for rung in RUNGS:
        found = sorted(folder.glob(f"weights/*{rung:06d}-sampler-*"))
        if found and line["error"] is None:
            bits = ask(base, found[0], [*val, *fresh], folder)
            line["rungs"][rung] = [bits[: len(val)], bits[len(val) :]]
    return line


def write_table(lines: list[dict[str, Any]], base: list[str], path: Path = TABLE) -> None:
    """Configurations of which every seed was measured, in order."""
    by_number: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        by_number.setdefault(line["number"], []).append(line)
    whole = {number: found for number, found in sorted(by_number.items()) if len(found) == len(SEEDS)}
    runs = [
        {"settings": found[0]["settings"], "seeds": sorted(({k: line[k] for k in KEPT} for line in found), key=by_seed)}
        for found in whole.values()
    ]
    _, val, fresh = split_tasks()
    tasks = {"val": [question for question, _ in val], "fresh": [question for question, _ in fresh]}
    data = {"steps": STEPS, "rungs": list(RUNGS), "tasks": tasks, "base": base, "runs": runs}
    with gzip.GzipFile(path, "wb", mtime=0) as file:  # without a time: the same runs make the same file
        file.write(json.dumps(data, separators=(",", ":")).encode())


KEPT = ("seed", "error", "rungs", "loss", "seconds")


def by_seed(line: dict[str, Any]) -> int:
    return int(line["seed"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of the base model and of the lines so far")
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--configurations", type=int, default=256)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    args.work.mkdir(parents=True, exist_ok=True)
    named = args.work / "base.txt"
    if not named.exists():
        named.write_text(make_base(args.work / "base"))
    base = named.read_text()
    path = args.work / "lines.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    known = {(line["number"], line["seed"]) for line in lines}
    end = time.monotonic() + 60 * args.minutes
    with path.open("a") as file:
        for number, settings in enumerate(draw_configurations(args.configurations)):
            for seed in SEEDS:
                if (number, seed) in known or time.monotonic() > end:
                    continue
                with tempfile.TemporaryDirectory(dir=args.work) as folder:
                    line = {"number": number, "settings": settings, **measure(settings, seed, base, Path(folder))}
                lines.append(line)
                file.write(json.dumps(line) + "\n")
                file.flush()
    _, val, fresh = split_tasks()
    write_table(lines, [ask(base, None, part, args.work / "ask") for part in (val, fresh)])
    print(f"{len(lines)} runs, {sum(line['error'] is not None for line in lines)} failed: {TABLE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
