"""How long does it take to read hundreds of experiments back, next to json.loads of the same files?

In: nothing; `--experiments` records of sweeps (4 arms, 3 seeds, in-loop and final scores, one breakdown) are made for
the occasion. Out: a table (or `--json`) and `perf/results/history.json`; exit code 1 when a goal is missed. Measured is
`evsys context` in this process, from the files to the printed text, once with the index of a workspace that knows them
and once by looking through the folder; then the whole command with the start of Python. Of `--repeats` the fastest.
Seconds in this process are its CPU seconds, which on idle cores is what a clock shows: it is one thread, and the files
are in the cache. `clock` beside them is what the clock showed on this machine, with whatever else ran on it.

    python perf/history.py
    python perf/history.py --experiments 2000 --json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evsys_sdk.files import write_json
from evsys_sdk.history.context import context_text
from evsys_sdk.history.history import read_history, records_below

RESULTS = Path(__file__).parent / "results" / "history.json"
MAX_SECONDS, TOKENS = 0.5, 4000
ARMS, SEEDS, LOOP_EVALS = 4, 3, 5
RATES = (1e-5, 1e-4, 1e-3, 1e-2)


def make_record(number: int, draw: random.Random) -> dict[str, Any]:
    """What a sweep over learning rates leaves."""
    name = f"sweep_{number:04d}"
    arms = [f"{name}__learning_rate{rate:g}" for rate in RATES[:ARMS]]
    level = draw.uniform(0.3, 0.9)
    scores = {arm: [min(1.0, max(0.0, draw.gauss(level, 0.05))) for _ in range(SEEDS)] for arm in arms}
    return {
        "experiment": name,
        "tags": ["sweep", f"round-{number % 7}"],
        "hypothesis": f"Round {number}: a higher learning rate with rank {2 ** (number % 6)} learns the tools faster.",
        "options": {"max_steps": None, "dry": False},
        "contents": {"tasks of val/tools": "a" * 64},
        "ts": f"2026-{1 + number % 12:02d}-{1 + number % 28:02d}T10:00:00.000+00:00",
        "name": name,
        "seconds": 60.0,
        "best_arm": max(arms, key=lambda arm: sum(scores[arm])),
        "conclusion": "\n".join(f"{arm}: 3 of 3 seeds completed, pass@1 {scores[arm][0]:.3f}" for arm in arms),
        "arms": [{"arm": arm, "statuses": ["completed"] * SEEDS, "scores": scores[arm], "errors": []} for arm in arms],
        "runs": [_run(name, arm, seed, score) for arm in arms for seed, score in enumerate(scores[arm])],
        "config": _config(name, arms, number),
    }


def _run(name: str, arm: str, seed: int, score: float) -> dict[str, Any]:
    evals = [_eval(score * step / LOOP_EVALS, step * 50) for step in range(1, LOOP_EVALS + 1)] + [_eval(score, None)]
    return {
        "run_id": f"{name}/{arm}__s{seed}",
        "status": "completed",
        "metrics": {"val/tools/pass@1": score, "final_loss": 1 - score, "first_loss": 2.0, "steps": 250.0},
        "artifacts": {"final_checkpoint": f"outputs/{arm}__s{seed}/weights/final"},
        "error": None,
        "evals": evals,
        "run_dir": f"outputs/{arm}__s{seed}",
    }


def _eval(value: float, step: int | None) -> dict[str, Any]:
    score = {"metric": "pass@1", "value": value, "low": value - 0.08, "high": value + 0.08, "n_tasks": 150}
    score |= {"n_rollouts": 150, "n_errors": 0, "error": None}
    parts = {"mail": [score], "calendar": [score]} if step is None else {}
    return {
        "name": "tools",
        "split": "val",
        "step": step,
        "stage": None,
        "scores": [score],
        "breakdown": {"app": parts},
    }


def _config(name: str, arms: list[str], number: int) -> dict[str, Any]:
    def run(arm: str, rate: float) -> dict[str, Any]:
        params = {
            "learning_rate": rate,
            "rank": 2 ** (number % 6),
            "batch_size": 8 * (1 + number % 3),
            "max_steps": 250,
        }
        return {
            "name": arm,
            "data": {"path": "data/train.jsonl", "transforms": [{"kind": "jsonl_to_chat", "params": {}}]},
            "model": {"name": "smollm2-135m-instruct"},
            "algorithm": {"kind": "sft", "params": params},
            "backend": {"kind": "local"},
        }

    metadata = {
        "success_metric": {"name": "pass@1"},
        "benchmark": [{"name": "tools", "path": "data/val", "split": "val"}],
    }
    runs = [run(arm, rate) for arm, rate in zip(arms, RATES, strict=False)]
    return {"name": name, "n_repeats": SEEDS, "metadata": metadata, "runs": runs}


def bare_loads(outputs: Path) -> None:
    for record in records_below(outputs):
        json.loads(record.read_bytes())


def fastest(act: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """CPU seconds and seconds of the clock, each the least of its kind."""

    def once() -> tuple[float, float]:
        cpu, clock = time.process_time(), time.perf_counter()
        act()
        return time.process_time() - cpu, time.perf_counter() - clock

    cpu, clock = zip(*(once() for _ in range(repeats)), strict=True)
    return min(cpu), min(clock)


def whole_command(project: Path) -> None:
    command = [sys.executable, "-m", "evsys_sdk.cli.main", "context", "--tokens", str(TOKENS)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "sweep_" in done.stdout, done.stderr


def measure(n: int, repeats: int) -> dict[str, Any]:
    draw = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="evsys-history-") as folder:
        project = Path(folder)
        workspace, outputs = project / ".evsys", project / "outputs"
        for number in range(n):
            write_json(outputs / f"sweep_{number:04d}.experiment_result.json", make_record(number, draw))
        megabytes = sum(record.stat().st_size for record in outputs.glob("*.json")) / 1e6
        bare, bare_clock = fastest(lambda: bare_loads(outputs), repeats)
        scanned, scanned_clock = fastest(lambda: context_text(read_history(None, [outputs]), TOKENS), repeats)
        workspace.mkdir()
        read_history(workspace, outputs=outputs)  # the index learns of them
        indexed, clock = fastest(lambda: context_text(read_history(workspace, outputs=outputs), TOKENS), repeats)
        _, command = fastest(lambda: whole_command(project), repeats)
    return {
        "experiments": n,
        "megabytes": round(megabytes, 1),
        "bare_seconds": round(bare, 4),
        "indexed_seconds": round(indexed, 4),
        "indexed_ratio": round(indexed / bare, 2),
        "scanned_seconds": round(scanned, 4),
        "scanned_ratio": round(scanned / bare, 2),
        "clock": {
            "bare": round(bare_clock, 4),
            "indexed": round(clock, 4),
            "scanned": round(scanned_clock, 4),
            "command": round(command, 3),
        },
        "goal": {
            f"context of {n} experiments in <= {MAX_SECONDS:g} s, from the index": indexed <= MAX_SECONDS,
            "and looking through the folder in at most 3 times what json.loads takes": scanned <= 3 * bare,
        },
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def table(result: dict[str, Any]) -> str:
    clock = result["clock"]

    def line(label: str, key: str) -> str:
        ratio = f", {result[f'{key}_ratio']:.2f} times" if f"{key}_ratio" in result else ""
        return f"{label}  {result[f'{key}_seconds']:.3f} s ({clock[key]:.3f}){ratio}"

    lines = [
        f"{result['experiments']:,} experiments, {result['megabytes']} MB of records; CPU seconds (clock)",
        line("json.loads of them    ", "bare"),
        line("context, by the index ", "indexed"),
        line("context, by the folder", "scanned"),
        f"whole command           ({clock['command']:.3f})",
    ]
    return "\n".join(lines + [f"{'met   ' if met else 'MISSED'} {goal}" for goal, met in result["goal"].items()])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--experiments", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.experiments, options.repeats)
    write_json(RESULTS, result)
    print(json.dumps(result) if options.json else table(result))
    return 0 if all(result["goal"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
