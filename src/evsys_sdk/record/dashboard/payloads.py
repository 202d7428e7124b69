"""Evaluations and rollouts as the dashboard has them, whether they travel or are read from a folder.

In: `EvalResult`s and `Rollout`s. Out: plain fields, under ids that follow from the run's own: the same evaluation,
logged again or found on disk, is the same row.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evsys_sdk.protocols import EvalResult, Rollout, Turn
from evsys_sdk.record.dashboard.wire import derived_id
from evsys_sdk.record.layout import stem_of
from evsys_sdk.redaction import redact

FIGURES = ("curves", "arms")
MAX_FIGURE_BYTES = 2 * 1024 * 1024

Questions = Mapping[str, Mapping[str, object]]
"""Task id -> what it asked (`messages`) and the answer its verifier expected (`record.models.question_to_data`)."""


def without_none(value: Any) -> Any:
    """JSON data in which a key without a value is absent, as the documents have it."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def eval_id(generation_id: str, result: EvalResult) -> str:
    own = ("eval", generation_id, result.stage or "", result.split, result.name, str(result.step))
    return derived_id(*own)


def eval_fields(result: EvalResult) -> dict[str, Any]:
    """One evaluation; a field without a value is None."""
    return {
        "metrics": {score.metric: score.value for score in result.scores if score.value is not None},
        "name": result.name,
        "split": result.split,
        "step": result.step,
        "stage": result.stage,
        "scores": [without_none(asdict(score)) for score in result.scores],
        "breakdown": without_none(asdict(result)["breakdown"]) if result.breakdown else None,
        "error": result.error,
        "seconds": result.seconds,
        "training_mark": result.training_mark or None,
        "clusters": result.clusters or None,
    }


def prediction_fields(eval_run_id: str, rollouts: Iterable[Rollout], questions: Questions) -> Iterator[dict[str, Any]]:
    """Each rollout under a unique id: which try at which task of which evaluation."""
    seen = Counter[str]()
    for rollout in rollouts:
        seen[rollout.task_id] += 1
        question = questions.get(rollout.task_id)
        yield {
            "id": derived_id("prediction", eval_run_id, rollout.task_id, str(seen[rollout.task_id])),
            "task_id": rollout.task_id,
            "completion": rollout.completion,
            "question": without_none(dict(question)) if question is not None else None,
            "turns": [message for turn in rollout.turns for message in _messages(turn)],
            "reward": rollout.reward,
            "status": rollout.status,
            "error": rollout.error,
            "seconds": rollout.seconds,
            "cost_usd": rollout.cost_usd,
            "metadata": rollout.metadata,
        }


def _messages(turn: Turn) -> Iterator[dict[str, object]]:
    """What the model was shown since its turn before, and what it wrote."""
    if turn.observation:
        yield {"role": "tool", "text": redact(turn.observation)}
    # Counts and not the tokens themselves: a transcript is read by people, and tokens are ten times its size.
    tokens = {"prompt_tokens": len(turn.prompt_tokens), "completion_tokens": len(turn.completion_tokens)}
    yield {"role": "assistant", "text": turn.text, **tokens}


def checkpoints_in(run_dir: Path) -> list[dict[str, Any]]:
    """What a run saved at which step, its stages included."""
    found: list[dict[str, Any]] = []
    for manifest in [run_dir / "checkpoints.json", *sorted(run_dir.glob("stages/*/checkpoints.json"))]:
        stage = {} if manifest.parent == run_dir else {"stage": manifest.parent.name}
        try:
            for one in json.loads(manifest.read_bytes())["checkpoints"]:
                path = str(one.get("state") or one.get("sampler") or "")
                found.append({"step": int(one["step"]), "path": path, **stage})
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue  # a manifest that is torn or of another version says nothing
    return found


def figures_beside(record: Path) -> dict[str, str]:
    """The SVG figures that an experiment drew, by name."""
    found = {}
    for name in FIGURES:
        path = record.with_name(f"{stem_of(record)}.{name}.svg")
        try:
            if path.stat().st_size <= MAX_FIGURE_BYTES:
                found[name] = path.read_text(errors="replace")
        except OSError:
            continue
    return found
