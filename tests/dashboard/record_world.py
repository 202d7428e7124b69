"""A real folder of experiments for the pages: a sweep of two arms and three seeds on the mock backend, and a child of
it with another learning rate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = [f"{first}{second}" for first in ("ba", "de", "fi", "go", "ku", "la", "me", "ni") for second in "bdf"]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def arm(name: str, rows: str, rate: float = 0.01) -> dict[str, Any]:
    return {
        "name": name,
        "data": {"path": f"data/{rows}.jsonl", "transforms": [{"kind": "jsonl_to_chat"}]},
        "model": {"name": "table"},
        "algorithm": {"kind": "sft", "params": {"learning_rate": rate, "max_steps": 30, "batch_size": 8}},
        "backend": {"kind": "mock"},
    }


def experiment(name: str, runs: list[dict[str, Any]], **top: Any) -> dict[str, Any]:
    benchmark = [
        {"name": "words", "path": "bench", "split": "val", "run_every": 10, "baseline": True},
        {"name": "held_out", "path": "held_out", "split": "test"},
    ]
    metadata = {
        "hypothesis": f"More rows make {name} better.",
        "tags": ["rows", name],
        "success_metric": "val/words/pass@1",
        "benchmark": benchmark,
    }
    return {"version": 1, "name": name, "description": "How many rows does it take?", "runs": runs,
            "output_dir": "outputs", "metadata": metadata, **top}  # fmt: skip


def make_folder(root: Path) -> Path:
    """Run the experiments in `root`, which is the current folder; returns the folder with their records."""
    from evsys_sdk.config.schema import ExperimentConfig
    from evsys_sdk.runner import run_experiment

    rows = [{"prompt": f"say {word}", "completion": word} for word in WORDS]
    write_lines(root / "data/all.jsonl", rows)
    write_lines(root / "data/half.jsonl", rows[:10])
    for folder, words in (("bench", WORDS[:18]), ("held_out", WORDS[18:])):
        tasks = [
            {"task_id": f"{word}", "instruction": f"say {word}",
             "verifier": {"kind": "in_process", "fn_name": "exact_match", "expected": word},
             "metadata": {"first": word[0]}}
            for word in words
        ]  # fmt: skip
        write_lines(root / folder / "tasks.jsonl", tasks)
    sweep = experiment("sweep", [arm("half", "half"), arm("all", "all")], n_repeats=3)
    slow = experiment("slow", [arm("slow_all", "all", rate=1e-4)], parent_experiment_id="sweep")
    for config in (sweep, slow):
        run_experiment(ExperimentConfig.model_validate(config))
    return root / "outputs"
