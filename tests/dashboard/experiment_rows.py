"""Experiments for the tests of pages, made directly through the models: small ones, hostile ones, and a study."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

START = 1_790_000_000.0
"""2026-09-21, the day of the first experiment of a study."""
DAY = 86400.0

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "javascript:alert(1)",
    "'-alert(1)-'",
    "{{ settings.SECRET_KEY }}{% debug %}",
    "</textarea></title></style><svg onload=alert(1)>",
    "bell \x07 escape \x1b[31m red",
    "right-to-left \u202e gnp.exe \u2066 isolate",
    "=cmd|' /C calc'!A1",
    "x" * 10_000,
)
_numbers = itertools.count(1)


def add_experiment(project: Any, name: str = "lr", **given: Any) -> Any:
    """A row as `summary.summarize` would leave it, with these fields."""
    from evsys_dashboard.models import ExperimentRow

    number = next(_numbers)
    fields: dict[str, Any] = {
        "id": f"exp-{number}",
        "project": project,
        "name": name,
        "status": "completed",
        "created": START + number,
        "updated": START + number,
        **given,
    }
    return ExperimentRow.objects.create(**fields)


def record_of(
    name: str,
    arms: Mapping[str, tuple[Mapping[str, Any], Sequence[float]]],
    *,
    ended: float = START,
    parent: str | None = None,
    half_width: float = 0.08,
    hypothesis_result: Mapping[str, Any] | None = None,
    model: str = "qwen3-4b",
    backend: str = "local",
    suite: str = "val/tools",
    mode: str = "max",
) -> dict[str, Any]:
    """An `ExperimentRecord` as plain data: arm -> its own settings, and the score of each seed."""
    split, bench = suite.split("/")
    shared = {"model": {"name": model}, "backend": {"kind": backend}}
    runs, judged = [], []
    for arm, (_, scores) in arms.items():
        mean = sum(scores) / len(scores)
        low, high = max(0.0, mean - half_width), min(1.0, mean + half_width)
        judged.append({"arm": arm, "mean": mean, "low": low, "high": high, "n_tasks": 48, "n_seeds": len(scores)})
        for seed, value in enumerate(scores):
            score = {"metric": "pass@1", "value": value, "low": low, "high": high, "n_tasks": 48, "n_rollouts": 48}
            runs.append(
                {
                    "run_id": f"{name}/{arm}__s{seed}",
                    "status": "completed",
                    "metrics": {f"{suite}/pass@1": value},
                    "evals": [{"name": bench, "split": split, "scores": [score]}],
                    "run_dir": f"/out/{name}/{arm}__s{seed}",
                }
            )
    sign = 1 if mode == "max" else -1
    return {
        "experiment": name,
        "status": "completed",
        "ts": datetime.fromtimestamp(ended, UTC).isoformat(),
        "parent_experiment_id": parent,
        "best_arm": max(judged, key=lambda one: sign * one["mean"])["arm"],
        "contents": {f"tasks of {suite}": "5f0c1a2b" * 8, "contents of data/train.jsonl": "77ea92f4" * 8},
        "verdict": {"arms": judged, "mode": mode, "share": True},
        "hypothesis_result": dict(hypothesis_result or {}),
        "arms": [
            {"arm": arm, "statuses": ["completed"] * len(scores), "scores": list(scores)}
            for arm, (_, scores) in arms.items()
        ],
        "runs": runs,
        "config": {
            "name": name,
            "metadata": {"success_metric": {"name": f"{split}.pass@1", "mode": mode}},
            "runs": [
                {"name": arm, **shared, "algorithm": {"kind": "sft", "params": dict(own)}}
                for arm, (own, _) in arms.items()
            ],
        },
    }


def prediction(confidence: float | None, outcome: str, *, known_before: bool = False) -> dict[str, Any]:
    """A `HypothesisResult` as plain data."""
    right = {"supported": 1.0, "refuted": 0.0}.get(outcome)
    brier = None if confidence is None or right is None or known_before else (confidence - right) ** 2
    return {
        "claim": "a beats b",
        "outcome": outcome,
        "confidence": confidence,
        "brier": brier,
        "known_before": known_before,
    }


CLAIMS = (
    "A learning rate of {lr:g} routes more requests to the right tool than the parent's.",
    "Rank {rank} adapters lose nothing against full fine-tuning on tool calls.",
    "Deduplicated rows make {steps} steps enough.",
    "Two demonstrations in the prompt help more than twice the rows.",
)


def add_study(project: Any, n: int, *, seed: int = 7) -> None:
    """A study of `n` experiments that climbs slowly, with lineage, noise, failures and one that still runs."""
    from evsys_dashboard.models import ExperimentRow

    chance = random.Random(seed)
    rows, best_name, best = [], None, 0.42
    tags = ("baseline", "data", "lora", "prompt", "rl", "ablation")
    for number in range(n):
        lr, rank = chance.choice([1e-5, 5e-5, 1e-4, 5e-4, 1e-3]), chance.choice([8, 16, 32, 64])
        steps, order = chance.choice([40, 80, 160]), chance.choice(["shuffled", "curriculum"])
        name = f"{chance.choice(['tools', 'router', 'calls'])}-lr{lr:g}-r{rank}-{number}"
        gain = 0.05 * (1 - abs(math.log10(lr) + 3.6)) + 0.01 * (order == "curriculum")
        goal = min(0.97, best - 0.02 + gain + chance.gauss(0, 0.04))
        created = START + number * DAY / max(1, n / 60)
        kind = chance.random()
        status = (
            "running" if number == n - 1 else "failed" if kind < 0.05 else "invalid" if kind < 0.07 else "completed"
        )
        one = {
            "id": f"{project.id}-study-{number}",
            "project": project,
            "name": name,
            "hypothesis": chance.choice(CLAIMS).format(lr=lr, rank=rank, steps=steps),
            "status": status,
            "tags": chance.sample(tags, chance.choice([0, 1, 1, 2, 3])),
            "created": created,
            "updated": created,
            "parent_experiment_id": best_name or "",
            "model": chance.choice(["qwen3-4b", "qwen3-4b", "smollm2-135m"]),
            "algorithm": "sft",
            "backend": "local",
            "n_arms": 2,
            "n_runs": 4,
            "spark": [round(goal * (1 - 0.8 ** (step + 1)) + chance.gauss(0, 0.02), 3) for step in range(24)],
            "cost_usd": round(chance.lognormvariate(-1, 1), 4),
            "metric": "val/tools/pass@1",
        }
        if status in ("completed", "invalid"):
            scores = [round(min(1.0, max(0.0, goal + chance.gauss(0, 0.02))), 4) for _ in range(2)]
            base = [round(min(1.0, max(0.0, best - 0.05 + chance.gauss(0, 0.02))), 4) for _ in range(2)]
            outcome = "supported" if goal > best else "refuted" if goal < best - 0.04 else "inconclusive"
            result = prediction(chance.choice([0.55, 0.65, 0.75, 0.9]), outcome) if chance.random() < 0.5 else None
            own = {"learning_rate": lr, "lora_rank": rank, "max_steps": steps, "order": order}
            record = record_of(
                name,
                {"candidate": (own, scores), "parent": ({**own, "learning_rate": 1e-5}, base)},
                ended=created + 900,
                parent=best_name,
                hypothesis_result=result,
                model=str(one["model"]),
            )
            top = max(record["verdict"]["arms"], key=lambda arm: arm["mean"])
            one |= {
                "record": record,
                "ended": created + 900,
                "seconds": chance.lognormvariate(6, 1),
                "verdict": "undecided" if outcome == "inconclusive" else outcome,
                "best_arm": top["arm"],
                "best_value": top["mean"],
                "best_low": top["low"],
                "best_high": top["high"],
                "n_tasks": 48,
                "n_seeds": 2,
                "n_errors": chance.choice([0, 0, 0, 0, 3]),
            }
            if status == "completed" and goal > best + 0.01:
                best, best_name = best + (goal - best) * min(1.0, 40 / n), name
        rows.append(ExperimentRow(**one))
    ExperimentRow.objects.bulk_create(rows)
