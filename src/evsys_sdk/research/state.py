"""What a research loop knows: recipes tried, their scores, what was decided.

In: nothing. Out: the frozen records that proposers and the driver exchange, and the two contracts between them. A
`Recipe` is the settings of one run; a `Proposal` is a change of a recipe that was tried; a `Trial` is a proposal with
what came of it. Trial 0 is the config's own run. Everything that a proposer may know is in `ResearchState`, and no
score of a test benchmark is in it.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from evsys_sdk.config.sweep import set_dotted
from evsys_sdk.data_types import JsonObject
from evsys_sdk.explain import split_path
from evsys_sdk.registry import Direction

Changes = Mapping[str, object]
"""Dotted setting of the run -> its new value: `algorithm.params.learning_rate`, or a whole block (`algorithm`), or a
whole list (`data.transforms`). `DELETED` takes the setting away, which gives it its default."""
DELETED = "__deleted__"

Decision = Literal["first", "kept", "discarded", "undecided"]
"""By the verdict. `undecided`: as many seeds as the config allows did not tell it from the incumbent."""
Status = Literal["completed", "failed", "pruned", "invalid", "duplicate", "declined"]
"""`pruned`: left behind at a rung. `invalid` (no legal file, or forbidden), `duplicate` (tried before, or next to it)
and `declined` (by a person, under --approve) cost nothing."""
SPENT: frozenset[Status] = frozenset({"completed", "failed", "pruned"})
"""How trials end that were launched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One change, and why it should help."""

    parent: int
    """The trial whose recipe is changed."""
    changes: Changes
    claim: str
    """One sentence, registered before the launch."""
    operator: str
    """How it was made, as `numeric`, `kind_swap`, `agent`: what the credit goes to."""
    confidence: float | None = None
    """How likely the proposer thinks the gain is, from 0 to 1."""
    tokens: int = 0
    """Tokens of a model that it cost to propose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCost:
    """What a trial spent, its seeds together."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    usd: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The paired difference to the incumbent of that time, turned so that more is better."""

    difference: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A proposal and what came of it."""

    number: int
    proposal: Proposal
    proposer: str
    """The kind that proposed it; `config` for trial 0."""
    recipe: JsonObject
    """All settings of the run, without its name."""
    status: Status
    why: str = ""
    """Of one that failed or was not launched: the reason, for the next proposal."""
    experiment: str | None = None
    """The name of its record."""
    score: float | None = None
    """Mean of the success metric over its seeds, in the metric's own unit and direction; None without a score."""
    low: float | None = None
    high: float | None = None
    n_seeds: int = 0
    effect: Effect | None = None
    """None for trial 0, and where the two could not be compared."""
    incumbent: int | None = None
    """The trial it was compared with."""
    decision: Decision | None = None
    """None unless it has a score."""
    step: int | None = None
    """Where it was left behind; None for one that trained to its end."""
    cost: TrialCost = field(default_factory=TrialCost)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResearchState:
    """Everything before the next proposal."""

    trials: Sequence[Trial]
    """In order; trial 0 is the config's own run."""
    metric: str
    direction: Direction
    noise: float | None = None
    """Differences below this are not told apart (`history.leaderboard.Noise.floor`); None where it is not known."""
    budget_left: float = 1.0
    """The share of the budget that is left, by the limit that is nearest."""
    trials_left: int | None = None
    max_score: float | None = None
    """1.0 where the metric is a share."""

    @property
    def incumbent(self) -> Trial | None:
        """The last one that was kept."""
        return next((trial for trial in reversed(self.trials) if trial.decision in ("first", "kept")), None)

    @property
    def scored(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.score is not None]

    @property
    def launched(self) -> list[Trial]:
        """Those that cost something."""
        return [trial for trial in self.trials if trial.status in SPENT]

    def gain(self, trial: Trial) -> float:
        """The trial's score, turned so that more is better."""
        assert trial.score is not None
        return trial.score if self.direction == "max" else -trial.score


class Proposer(Protocol):
    """What should be tried next?

    A kind of the registry `proposer`; `Config` holds its params. Asked twice with the same state and the same stream of
    chance it answers the same, unless something outside (a model, an agent) takes part: the driver journals every
    answer before it acts on it, so that a kill repeats no question that was answered.
    """

    def propose(self, state: ResearchState, space: object, rng: random.Random) -> Proposal | None:
        """The next proposal, `None` when it has none. `space` is a `research.space.Space`."""
        ...


def apply_changes(recipe: JsonObject, changes: Changes) -> JsonObject:
    """The recipe with these settings changed; EvsysError where a path does not fit."""
    from evsys_sdk.errors import EvsysError

    child: JsonObject = json.loads(json.dumps(recipe))
    for path, value in changes.items():
        parts = split_path(path)
        try:
            if value == DELETED:
                parent: object = child
                for part in parts[:-1]:
                    parent = parent[part]  # type: ignore[index]
                del parent[parts[-1]]  # type: ignore[attr-defined]
            else:
                set_dotted(child, parts, json.loads(json.dumps(value)))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            raise EvsysError(f"{path} does not fit the recipe: nothing is there to change") from None
    return child


def recipe_key(recipe: JsonObject) -> str:
    """The same for the same settings, in whatever order they were written."""
    text = json.dumps(recipe, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
