"""An evaluation as plain data and back, so that a journal can keep it whole.

In: an `EvalResult` or a `Rollout`, or what was made of one. Out: the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from evsys_sdk.data_types import HarborTask, InProcessVerifier, content_text, task_messages
from evsys_sdk.protocols import EvalResult, Rollout, Score, Turn
from evsys_sdk.record.lines import StepOrder
from evsys_sdk.redaction import redact_rollout


def to_data(result: EvalResult) -> dict[str, Any]:
    """Everything, the transcripts too."""
    return asdict(replace(result, rollouts=[])) | {"rollouts": [rollout_to_data(one) for one in result.rollouts]}


def from_data(data: dict[str, Any]) -> EvalResult:
    """What `to_data` was given."""
    breakdown = {
        key: {value: [Score(**score) for score in scores] for value, scores in parts.items()}
        for key, parts in data["breakdown"].items()
    }
    scores = [Score(**score) for score in data["scores"]]
    rollouts = [rollout_from_data(one) for one in data["rollouts"]]
    return EvalResult(**{**data, "scores": scores, "breakdown": breakdown, "rollouts": rollouts})


def rollout_to_data(rollout: Rollout) -> dict[str, Any]:
    """One try; its long lists are handed on as they are, not copied, and its error and metadata hold no secrets."""
    return redact_rollout(_shallow(rollout) | {"turns": [_shallow(turn) for turn in rollout.turns]})


def rollout_from_data(data: dict[str, Any]) -> Rollout:
    return Rollout(**{**data, "turns": [Turn(**turn) for turn in data["turns"]]})


def question_to_data(task: HarborTask) -> dict[str, Any]:
    """What a task asked, as messages with a role and a text, and the answer that its verifier expected."""
    messages = [{"role": one["role"], "text": content_text(one.get("content") or "")} for one in task_messages(task)]
    expected = task.verifier.expected if isinstance(task.verifier, InProcessVerifier) else None
    return {"messages": messages, "expected": expected}


def in_order(evals: Sequence[EvalResult]) -> list[EvalResult]:
    """By step and name, however they came in beside the training."""
    order = StepOrder()
    for one in evals:
        order.note(one.step, f"{one.split}/{one.name}")
    return [evals[place] for place in order.places()]


def _shallow(record: Rollout | Turn) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}
