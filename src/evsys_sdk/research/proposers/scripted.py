"""Proposals that are written down beforehand: for tests, demonstrations, and a list of ideas to work through."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from evsys_sdk.config.base import Name, Params, Strict
from evsys_sdk.errors import EvsysError
from evsys_sdk.registry import register_proposer
from evsys_sdk.research.state import Proposal, ResearchState


class ScriptedIdea(Strict):
    """One proposal of a script."""

    changes: dict[str, Any]
    """Dotted setting of the run -> its new value."""
    claim: Name = "This is better than the incumbent."
    confidence: float | None = Field(default=None, ge=0, le=1)


@register_proposer("scripted")
class ScriptedProposer:
    """Propose these changes of the incumbent, one after the other."""

    class Config(Params):
        proposals: list[ScriptedIdea] = Field(default_factory=list)
        """Each `{changes, claim, confidence}`."""
        path: Name | None = None
        """A file of such proposals, one JSON object per line."""

        @model_validator(mode="after")
        def _has_ideas(self) -> ScriptedProposer.Config:
            if bool(self.proposals) == (self.path is not None):
                raise ValueError("set either proposals or path")
            return self

    def __init__(self, **params: Any):
        self.cfg = self.Config(**params)
        self.ideas = self.cfg.proposals if self.cfg.path is None else read_ideas(Path(self.cfg.path))

    def propose(self, state: ResearchState, space: object, rng: random.Random) -> Proposal | None:
        # The trials say where it was, in this process or the one before.
        number = sum(trial.proposal.operator == "scripted" for trial in state.trials)
        if number >= len(self.ideas) or state.incumbent is None:
            return None
        idea = self.ideas[number]
        return Proposal(
            parent=state.incumbent.number,
            changes=idea.changes,
            claim=idea.claim,
            confidence=idea.confidence,
            operator="scripted",
        )


def read_ideas(path: Path) -> list[ScriptedIdea]:
    try:
        lines = path.read_text().splitlines()
        return [ScriptedIdea.model_validate(json.loads(line)) for line in lines if line.strip()]
    except (OSError, ValueError) as exc:
        raise EvsysError(f"{path} is no file of proposals: {exc}") from exc
