"""An evaluation as plain data and back, so that a journal can keep it whole.

In: an `EvalResult`, or what `to_data` made of one. Out: the other.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from evsys_sdk.protocols import EvalResult, Rollout, Score, Turn


def to_data(result: EvalResult) -> dict[str, Any]:
    """Everything, the transcripts too."""
    return asdict(result)


def from_data(data: dict[str, Any]) -> EvalResult:
    """What `to_data` was given."""
    breakdown = {
        key: {value: [Score(**score) for score in scores] for value, scores in parts.items()}
        for key, parts in data["breakdown"].items()
    }
    scores = [Score(**score) for score in data["scores"]]
    return EvalResult(
        **{**data, "scores": scores, "breakdown": breakdown, "rollouts": [_rollout(one) for one in data["rollouts"]]}
    )


def _rollout(data: dict[str, Any]) -> Rollout:
    return Rollout(**{**data, "turns": [Turn(**turn) for turn in data["turns"]]})
