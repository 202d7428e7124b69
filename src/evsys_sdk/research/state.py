"""What a research loop knows: recipes tried, their scores, what was decided.

In: nothing. Out: the frozen records that proposers, driver and laboratory exchange, and the contracts between them. A
recipe is the settings of one run; a `Proposal` is a change of a recipe that was tried; a `Trial` is a proposal with
what came of it. Trial 0 is the config's own run. Everything that a proposer may know is in `ResearchState`, and no
score of a test benchmark is in it.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from evsys_sdk.config.sweep import set_dotted
from evsys_sdk.data_types import JsonObject
from evsys_sdk.errors import Problem
from evsys_sdk.explain import split_path
from evsys_sdk.registry import Direction
from evsys_sdk.stats.verdict import Comparison

Changes = Mapping[str, object]
"""Dotted setting of the run -> its new value: `algorithm.params.learning_rate`, or a whole block (`algorithm`), or a
whole list (`data.transforms`). `DELETED` takes the setting away, which gives it its default."""
DELETED = "__deleted__"

Decision = Literal["first", "kept", "discarded", "undecided"]
"""By the verdict. `undecided`: as many seeds as the config allows did not tell it from the incumbent."""
Status = Literal["completed", "failed", "pruned", "invalid", "duplicate", "unpromising", "declined"]
"""`pruned`: left behind at a rung. `invalid` (no legal file, or forbidden), `duplicate` (tried before, or next to it),
`unpromising` (the proposer in charge expects more from the proposal it would make) and `declined` (by a person, under
--approve) cost nothing."""
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
    usd: float = 0.0
    """What that model charged, as far as its price is known."""


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
    context: str = ""
    """What `evsys context` says of the rounds so far, for proposers that ask a model (`wants_context`)."""

    @property
    def incumbent(self) -> Trial | None:
        """The last one that was kept."""
        # Each that is kept takes the place of the one before.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What a proposer expects of another's recipe, by the same measure as from the best that it would propose."""

    gain: float
    own: float


@runtime_checkable
class Proposer(Protocol):
    """What should be tried next?

    A kind of the registry `proposer`; `Config` holds its params. Asked twice with the same state and the same stream of
    chance it answers the same, unless something outside (a model, an agent) takes part: the driver journals every
    answer before it acts on it, so that a kill repeats no question that was answered.
    """

    def propose(self, state: ResearchState, space: object, rng: random.Random) -> Proposal | None:
        """The next proposal, `None` when it has none. `space` is a `research.space.Space`."""
        ...


@runtime_checkable
class Optimiser(Proposer, Protocol):
    """Is another's recipe worth a trial?

    A proposer that can tell is in charge where its share is 1. Others, whose share is capped, are asked only in the
    rounds that it does not keep, and launched only where it expects no more from the one that it would propose.
    """

    def keeps_round(self, state: ResearchState, space: object) -> bool:
        """Whether no other proposer is asked in this round."""
        ...

    def promise(self, state: ResearchState, space: object, recipe: JsonObject, rng: random.Random) -> Prospect | None:
        """None where it cannot tell; then the recipe is launched."""
        ...


CANDIDATE, INCUMBENT = "candidate", "incumbent"
"""The arms of a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """One measurement that the driver wants: a candidate beside the incumbent, with these seeds."""

    trial: int
    seeds: Sequence[int]
    """Consecutive, the same for both arms; those that were measured in an earlier look are reused."""
    candidate: JsonObject
    proposal: Proposal
    incumbent: JsonObject | None = None
    """None for trial 0, which is compared with nothing."""
    parent: str | None = None
    """The experiment that made the incumbent."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """What is left of the budget: `steps`, `tokens`, `seconds`, `usd`, as far as the research has such limits."""
    until: int | None = None
    """A rung: train up to this step only. A later plan of the trial with another `until`, or none, resumes exactly."""
    purpose: Literal["round", "final"] = "round"
    """`final`: the winner on seeds that took no part in choosing it, beside the config's own recipe; test benchmarks
    are scored only there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmMean:
    """What an arm scored by the success metric, over its seeds."""

    mean: float
    low: float | None = None
    high: float | None = None
    n_seeds: int = 1
    expected: float | None = None
    """The mean corrected for having been picked; None where the verdict does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What came of a `RoundPlan`."""

    status: Literal["completed", "failed", "stopped"]
    """Of the candidate. `stopped` (Ctrl-C, a spent budget) is no result: the driver ends, and measures it when it is
    resumed."""
    why: str = ""
    """Why it failed or was stopped."""
    experiment: str | None = None
    """The name of its record."""
    candidate: ArmMean | None = None
    incumbent: ArmMean | None = None
    comparison: Comparison | None = None
    """The verdict's, `candidate` against `incumbent`, corrected for its looks; None where there is none."""
    looks: int = 1
    """How often this question was looked at, this time included."""
    cost: TrialCost = field(default_factory=TrialCost)
    """Of this measurement alone: what was reused costs nothing."""
    conclusion: str = ""
    """Of the final: the conclusion of its experiment, test scores included. Never shown to a proposer."""


class Laboratory(Protocol):
    """What does this recipe score?

    The driver knows no experiment, and asks here. `Experiments` (research/laboratory.py) runs an ordinary experiment
    per plan; a simulated one may draw scores and call `stats.judge.judge_arms`."""

    def check(self, recipe: JsonObject) -> list[Problem]:
        """Everything that is known to be wrong with the recipe before it costs anything; empty for a legal one."""
        ...

    def identity(self, recipe: JsonObject) -> str:
        """The same for recipes that would do the same (`recipe_key`, or better)."""
        ...

    def measure(self, plan: RoundPlan) -> Measurement:
        """Run it. The same plan after a kill resumes what was interrupted and gives the same measurement."""
        ...


def apply_changes(recipe: JsonObject, changes: Changes) -> JsonObject:
    """The recipe with these settings changed; EvsysError where a path does not fit."""
    from evsys_sdk.errors import EvsysError

    # A copy in which nothing is shared, and which holds what a journal can keep.
    child: JsonObject = json.loads(json.dumps(recipe))
    for path, value in changes.items():
        parts = split_path(path)
        try:
            if value == DELETED:
                # The walk checks nothing: a place that is not there raises, and the caller hears which path it was.
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
