"""The loop: ask a proposer, check, measure beside the incumbent, keep or discard, go again.

In: a recipe, a laboratory that measures recipes, proposers, and what may be spent. Out: a `ResearchResult`. The driver
knows no experiment and no file but its journal. Every answer, approval, measurement and decision is in the journal
before the next act; a loop that was killed runs through its journal to where it was, and does nothing twice.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

from pydantic import TypeAdapter

from evsys_sdk.config.research import ResearchSpec
from evsys_sdk.data_types import JsonObject
from evsys_sdk.errors import FOREIGN, EvsysError, Problem, shorten
from evsys_sdk.format import shown
from evsys_sdk.registry import Direction
from evsys_sdk.research.decision import decide, is_behind
from evsys_sdk.research.journal import ResearchJournal
from evsys_sdk.research.shares import Seat, next_seat, rest_of
from evsys_sdk.research.space import Space
from evsys_sdk.research.state import (
    SPENT,
    ArmMean,
    Decision,
    Effect,
    Laboratory,
    Measurement,
    Optimiser,
    Proposal,
    ResearchState,
    RoundPlan,
    Status,
    Trial,
    TrialCost,
    apply_changes,
)

MAX_ASKS = 3
"""Of one proposer in one round, while what it proposes cannot be tried."""
FRUITLESS = 10
"""Rounds in a row without a proposal that can be tried, after which there are no more proposals."""
DRIVERS_OWN = {
    "seed": "seeds are the driver's: the same for candidate and incumbent",
    "name": "the driver names the runs",
    "tags": "the driver tags the runs",
    "eval": "what a run is scored on is the same for every candidate",
    "backend": "where a run trains is the same for every candidate",
}
"""Settings of a run that no proposal may touch, and why."""

Reason = Literal["goal", "budget", "plateau", "no proposals", "stopped", "person"]
"""Why a research ended; `person`: who was asked under --approve said quit."""
TRIAL, MEASUREMENT = TypeAdapter(Trial), TypeAdapter(Measurement)
PROPOSAL: TypeAdapter[Proposal | None] = TypeAdapter(Proposal | None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval:
    """What a person said of a proposal."""

    word: Literal["yes", "no", "quit"]
    why: str = ""


Approve = Callable[[int, Proposal, JsonObject], Approval]
"""Trial, proposal and the incumbent's recipe -> what the person says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """What the trials and proposals so far have cost."""

    trials: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    usd: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResearchResult:
    """The result of the research."""

    reason: Reason
    why: str
    """The reason in a sentence."""
    state: ResearchState
    winner: Trial
    """The last that was kept; trial 0 where none was."""
    final: Measurement | None
    """The winner on fresh seeds; None where the research was stopped before."""
    spent: Spending


class _Stop(Exception):
    """The research ends here; the same command resumes it."""

    def __init__(self, reason: Reason, why: str):
        super().__init__(why)
        self.reason: Reason = reason


@dataclass(slots=True, kw_only=True)
class Research:
    """One research under way."""

    spec: ResearchSpec
    recipe: JsonObject
    """The settings of the config's own run, without its name: trial 0."""
    laboratory: Laboratory
    seats: Sequence[Seat]
    metric: str
    direction: Direction
    space: Space | None = None
    """What may be changed, for the proposers and for what others propose; None: what the laboratory takes."""
    journal: ResearchJournal = field(default_factory=ResearchJournal)
    n_repeats: int = 1
    """Seeds of the first look at a candidate."""
    base_seed: int = 42
    goal: float | None = None
    """The incumbent's corrected score at which research ends."""
    max_score: float | None = None
    approve: Approve | None = None
    is_stopped: Callable[[], bool] = lambda: False
    context: Callable[[], str] = lambda: ""
    """What proposers with `wants_context` are given to read."""
    say: Callable[[str], None] = lambda text: None
    clock: Callable[[], float] = time.monotonic
    trials: list[Trial] = field(default_factory=list)
    asks: int = 0
    asked: Counter[str] = field(default_factory=Counter)
    """Proposer -> how often it was asked."""
    rounds: int = 0
    """Those that were begun."""
    asking: float = 0.0
    """Seconds that proposers took."""
    resting: dict[str, int] = field(default_factory=dict)
    """Proposer -> the round up to which it is asked last."""
    expected: dict[int, float] = field(default_factory=dict)
    """Trial -> its score, corrected for having been picked."""

    def run(self) -> ResearchResult:
        """Research until goal, budget, plateau or the last proposal; then score the winner on fresh seeds."""
        try:
            self._measure_first()
            fruitless = 0
            while fruitless < FRUITLESS:
                self._stop_if_over()
                self.rounds += 1
                launched = self._round()
                if launched is None:
                    break
                fruitless = 0 if launched else fruitless + 1
            raise _Stop("no proposals", "the proposers have nothing more that can be tried")
        except _Stop as end:
            reason, why = end.reason, str(end)
        state = self._state()
        winner = state.incumbent
        if winner is None:  # stopped during trial 0
            winner = replace(self._trial_zero(), why=why)
            return ResearchResult(reason=reason, why=why, state=state, winner=winner, final=None, spent=self._spent())
        # Not after a stop on request: the research is unfinished, and the same command resumes it.
        final = None if reason in ("stopped", "person") else self._score_finally(winner)
        if final is not None and final.status == "stopped":
            reason, why, final = "stopped", final.why, None
        return ResearchResult(reason=reason, why=why, state=state, winner=winner, final=final, spent=self._spent())

    # The rounds.

    def _trial_zero(self) -> Trial:
        proposal = Proposal(parent=0, changes={}, claim="The config's own run.", operator="config")
        return Trial(number=0, proposal=proposal, proposer="config", recipe=self.recipe, status="completed")

    def _measure_first(self) -> None:
        trial = self._trial_zero()
        found = self._measure(trial, seeds=self.n_repeats)
        if found.candidate is None:
            raise EvsysError(f"the config's own run has no score to research from: {found.why or found.status}")
        trial = replace(trial, decision="first", experiment=found.experiment, cost=found.cost)
        self._settle(_with_score(trial, found.candidate), found)

    def _round(self) -> bool | None:
        """Ask until a proposal was launched: True; False where what was proposed could not be tried; None where no
        proposer had anything to say."""
        asked, silent = Counter[str](), set[str]()
        optimiser = self._optimiser()
        kept_out = self._capped() if optimiser and optimiser.keeps_round(self._state(), self.space) else set[str]()
        while True:
            out = silent | {name for name, times in asked.items() if times >= MAX_ASKS}
            tired = {seat.name for seat in self.seats if self.resting.get(seat.name, 0) >= self.rounds}
            seat = next_seat(self.seats, self.trials, out | tired | kept_out) or next_seat(self.seats, self.trials, out)
            if seat is None:
                return None if silent == {seat.name for seat in self.seats} else False
            proposer, proposal = self._ask(seat)
            asked[proposer] += 1
            if proposal is None:
                silent.add(proposer)
                continue
            trial = self._try(proposer, proposal)
            if trial.status in SPENT:
                return True
            if trial.status == "unpromising":  # the optimiser has something better
                asked[proposer] = MAX_ASKS
            if rest := rest_of(self.trials, proposer):
                self.resting[proposer] = self.rounds + rest
                asked[proposer] = MAX_ASKS

    def _ask(self, seat: Seat) -> tuple[str, Proposal | None]:
        """What a proposer answers, journalled with its name: a resumed research may have other caps."""
        self.asks += 1
        self._check_stop()

        def answer() -> JsonObject:
            started = self.clock()
            state = self._state()
            if getattr(seat.proposer, "wants_context", False):
                state = replace(state, context=self.context())
            # Counted per proposer: an agent that proposes nothing that is launched changes no other proposal.
            stream = "" if seat.cap == 1 else f"{seat.name}/"
            rng = random.Random(f"{self.spec.seed}/{stream}{self.asked[seat.name] + 1}")
            try:
                found = seat.proposer.propose(state, self.space, rng)
            except EvsysError as exc:
                found = _void(f"{seat.name}: {exc}")
            except FOREIGN as exc:  # a project's own proposer
                found = _void(f"{seat.name} raised {type(exc).__name__}: {exc}")
            self._check_stop()  # what a proposer says that was interrupted is no answer
            seconds = round(self.clock() - started, 3)
            return {"proposer": seat.name, "proposal": PROPOSAL.dump_python(found, mode="json"), "seconds": seconds}

        found = self.journal.once(f"ask {self.asks}", answer)
        self.asked[str(found["proposer"])] += 1
        seconds = found["seconds"]
        assert isinstance(seconds, int | float)
        self.asking += seconds
        return str(found["proposer"]), PROPOSAL.validate_python(found["proposal"])

    def _try(self, proposer: str, proposal: Proposal) -> Trial:
        """The trial of a proposal, measured if it may be."""
        number = len(self.trials)
        incumbent = self._state().incumbent
        assert incumbent is not None
        recipe, status, why = self._admit(proposal)
        trial = Trial(
            number=number, proposal=proposal, proposer=proposer, recipe=recipe, status=status, why=why,
            incumbent=incumbent.number,
        )  # fmt: skip
        known = self.journal.find(_trial_key(number))
        if known is not None:
            return self._settle(TRIAL.validate_python(known), None)
        if status == "completed" and (why := self._why_unpromising(proposer, recipe)):
            trial = replace(trial, status="unpromising", why=why)
        if trial.status == "completed" and self.approve is not None:
            trial = self._ask_person(trial, incumbent)
        if trial.status != "completed":
            self.say(f"trial {number}: {trial.status}, {shorten(trial.why, 100)}")
            return self._settle(trial, None)
        self.say(f"trial {number} ({proposer}): {shorten(proposal.claim, 100)}")
        return self._judge(trial, incumbent)

    def _admit(self, proposal: Proposal) -> tuple[JsonObject, Status, str]:
        """The recipe of a proposal, and `completed` where it may be measured."""
        parent = next((t for t in self.trials if t.number == proposal.parent and t.status in SPENT), None)
        if parent is None:
            return self.recipe, "invalid", f"there is no trial {proposal.parent} to change"
        if not proposal.changes:
            return parent.recipe, "invalid", proposal.claim if proposal.operator == VOID else "it changes nothing"
        try:
            recipe = apply_changes(parent.recipe, proposal.changes)
        except EvsysError as exc:
            return parent.recipe, "invalid", str(exc)
        problems = [*self._check_fixed_settings(recipe)] or (self.space.check(recipe) if self.space else [])
        problems = problems or self.laboratory.check(recipe)
        if problems:
            return recipe, "invalid", "; ".join(f"{one.path}: {one.message}" for one in problems)
        identity = self.laboratory.identity(recipe)
        for trial in self.trials:
            # What a person declined is not put before them again.
            is_tried = trial.status in SPENT or trial.status == "declined"
            if is_tried and self.laboratory.identity(trial.recipe) == identity:
                return recipe, "duplicate", f"trial {trial.number} was the same"
        return recipe, "completed", ""

    def _why_unpromising(self, proposer: str, recipe: JsonObject) -> str:
        """Why a proposal of one whose share is capped is not launched: a trial that an agent wastes is one that the
        optimiser lacks."""
        optimiser = self._optimiser()
        if optimiser is None or proposer not in self._capped():
            return ""
        rng = random.Random(f"{self.spec.seed}/{self.asks}/promise")
        promise = optimiser.promise(self._state(), self.space, recipe, rng)
        if promise is None or promise.gain >= promise.own:
            return ""
        return f"is expected to gain {promise.gain / promise.own:.0%} of what the optimiser's next proposal is"

    def _optimiser(self) -> Optimiser | None:
        found = (seat.proposer for seat in self.seats if seat.cap == 1 and isinstance(seat.proposer, Optimiser))
        return next(found, None) if self.space is not None else None

    def _capped(self) -> set[str]:
        return {seat.name for seat in self.seats if seat.cap < 1}

    def _check_fixed_settings(self, recipe: JsonObject) -> Iterator[Problem]:
        """The settings of the driver's own that a recipe has otherwise than the config, seeds of every block
        included."""
        tunable = self.space.tunables(recipe) if self.space else {}
        for key, why in DRIVERS_OWN.items():
            # Of a backend, a space may name what is recipe and not machine, as what is trained.
            if _without(recipe.get(key), key, tunable) != _without(self.recipe.get(key), key, tunable):
                yield Problem(path=key, message=f"must stay as it is: {why}")
        before = list(_seeds_in(self.recipe))
        for path, value in _seeds_in(recipe):
            # A block that is new may not bring a seed either: another draw is no other recipe.
            if path != "seed" and (path, value) not in before:
                yield Problem(path=path, message=f"must stay as it is: {DRIVERS_OWN['seed']}")

    def _ask_person(self, trial: Trial, incumbent: Trial) -> Trial:
        def ask() -> JsonObject:
            assert self.approve is not None
            found = self.approve(trial.number, trial.proposal, incumbent.recipe)
            if found.word == "quit":
                raise _Stop("person", "the person who was asked said quit")
            return {"word": found.word, "why": found.why}

        found = self.journal.once(f"approval {trial.number}", ask)
        if found["word"] == "yes":
            return trial
        return replace(trial, status="declined", why=f"declined: {found['why']}" if found["why"] else "declined")

    def _judge(self, trial: Trial, incumbent: Trial) -> Trial:
        """Measure at the rungs, then with more and more seeds until the verdict decides."""
        cost, seeds = TrialCost(), self.n_repeats
        for step in self._rungs(trial.recipe):
            found = self._measure(trial, seeds=seeds, incumbent=incumbent, until=step)
            cost = _add(cost, found.cost)
            if found.status == "failed":
                return self._settle(replace(trial, status="failed", why=found.why, cost=cost), found)
            if is_behind(found.candidate, found.incumbent, self.direction):
                assert found.candidate is not None and found.incumbent is not None
                means = f"{shown(found.candidate.mean)} to {shown(found.incumbent.mean)}"
                why = f"behind the incumbent at step {step}: {means}"
                trial = replace(trial, status="pruned", why=why, step=step, cost=cost, experiment=found.experiment)
                return self._settle(trial, found)
        while True:
            found = self._measure(trial, seeds=seeds, incumbent=incumbent)
            cost = _add(cost, found.cost)
            trial = replace(trial, cost=cost, experiment=found.experiment)
            if found.candidate is None:
                why = found.why or "it has no score"
                return self._settle(replace(trial, status="failed", why=why), found)
            trial = replace(_with_score(trial, found.candidate), effect=self._effect(found))
            most = max(self.spec.max_repeats, self.n_repeats)
            ruling = decide(
                found.comparison,
                direction=self.direction,
                n_seeds=seeds,
                max_repeats=most,
                looks=found.looks,
                first_seeds=self.n_repeats,
            )
            if ruling.word != "repeat":
                decision: Decision = ruling.word
                return self._settle(replace(trial, decision=decision, why=ruling.why), found)
            seeds = ruling.seeds
            self.say(f"trial {trial.number}: {ruling.why}, now with {seeds} seeds")

    def _rungs(self, recipe: JsonObject) -> Iterator[int]:
        """The steps at which a candidate is compared before its end; the first alone where that is not known."""
        rungs = self.spec.rungs
        if rungs is None:
            return
        algorithm = recipe.get("algorithm")
        params = algorithm.get("params") if isinstance(algorithm, dict) else None
        length = params.get("max_steps") if isinstance(params, dict) else None
        end, step = length if isinstance(length, int) else rungs.min_steps + 1, rungs.min_steps
        while step < end:
            yield step
            step *= rungs.eta

    def _measure(
        self, trial: Trial, *, seeds: int, incumbent: Trial | None = None, until: int | None = None
    ) -> Measurement:
        plan = RoundPlan(
            trial=trial.number,
            seeds=range(self.base_seed, self.base_seed + seeds),
            candidate=trial.recipe,
            proposal=trial.proposal,
            incumbent=incumbent.recipe if incumbent else None,
            parent=incumbent.experiment if incumbent else None,
            limits=self._limits_left(),
            until=until,
        )
        key = f"measurement {trial.number} with {seeds} seeds" + (f" to step {until}" if until else "")
        return self._measure_once(key, plan)

    def _measure_once(self, key: str, plan: RoundPlan) -> Measurement:
        def measure() -> JsonObject:
            self._check_stop()
            found = self.laboratory.measure(plan)
            if found.status == "stopped":
                raise _Stop("budget" if found.why.startswith("the budget") else "stopped", found.why)
            outcome: JsonObject = MEASUREMENT.dump_python(found, mode="json")
            return outcome

        return MEASUREMENT.validate_python(self.journal.once(key, measure))

    def _settle(self, trial: Trial, found: Measurement | None) -> Trial:
        """The trial as the journal has it, from now on part of the state."""
        # As the journal has it: a trial that was settled before an interruption keeps the decision of then.
        trial = TRIAL.validate_python(self.journal.add(_trial_key(trial.number), TRIAL.dump_python(trial, mode="json")))
        self.trials.append(trial)
        if trial.decision in ("first", "kept"):
            found = found or self._last_measurement(trial)
            arm = found.candidate if found else None
            if arm is not None:
                self.expected[trial.number] = arm.mean if arm.expected is None else arm.expected
        if trial.status in SPENT and trial.number:
            self.say(f"trial {trial.number}: {trial.decision or trial.status} ({shorten(trial.why, 100)})")
        return trial

    def _last_measurement(self, trial: Trial) -> Measurement | None:
        known = self.journal.find(f"measurement {trial.number} with {trial.n_seeds} seeds")
        return MEASUREMENT.validate_python(known) if known else None

    def _score_finally(self, winner: Trial) -> Measurement | None:
        """The winner on seeds that no round has seen, beside the config's own recipe."""
        # A round takes seeds from `base_seed` on, at most so many; these begin behind the last of them.
        first = self.base_seed + max(self.spec.max_repeats, self.n_repeats)
        plan = RoundPlan(
            trial=winner.number,
            seeds=range(first, first + self.spec.final_repeats),
            candidate=winner.recipe,
            proposal=winner.proposal,
            incumbent=self.recipe if winner.number else None,
            parent=winner.experiment,
            purpose="final",
        )
        try:
            return self._measure_once(f"final of trial {winner.number} with {self.spec.final_repeats} seeds", plan)
        except _Stop as end:
            return Measurement(status="stopped", why=str(end))

    # What the loop knows.

    def _state(self) -> ResearchState:
        spent, limits = self._spent(), self._limits()
        left = min((1 - getattr(spent, name) / limit for name, limit in limits.items()), default=1.0)
        # A difference within half an interval may be chance. The median: trials with more seeds have shorter intervals.
        halves = [
            (trial.effect.high - trial.effect.low) / 2
            for trial in self.trials
            if trial.effect is not None and trial.effect.low is not None and trial.effect.high is not None
        ]
        return ResearchState(
            trials=list(self.trials),
            metric=self.metric,
            direction=self.direction,
            noise=median(halves) if halves else None,
            budget_left=max(0.0, left),
            trials_left=max(0, int(limits["trials"]) - spent.trials) if "trials" in limits else None,
            max_score=self.max_score,
        )

    def _effect(self, found: Measurement) -> Effect | None:
        one = found.comparison
        if one is None or one.difference is None:
            return None
        if self.direction == "max":
            return Effect(difference=one.difference, low=one.low, high=one.high)
        # An effect above 0 is an improvement. Where lower is better the sign turns, and the ends change places.
        return Effect(
            difference=-one.difference,
            low=None if one.high is None else -one.high,
            high=None if one.low is None else -one.low,
        )

    def _limits(self) -> dict[str, float]:
        return self.spec.budget.model_dump(exclude_none=True) if self.spec.budget else {}

    def _limits_left(self) -> Mapping[str, float]:
        """Of what a measurement itself can keep to."""
        spent = self._spent()
        limits = {name: limit for name, limit in self._limits().items() if name != "trials"}
        return {name: limit - getattr(spent, name) for name, limit in limits.items()}

    def _spent(self) -> Spending:
        launched = [trial for trial in self.trials if trial.status in SPENT]
        # A proposal of a hosted model costs dollars also where it was not launched.
        return Spending(
            trials=len(launched),
            steps=sum(trial.cost.steps for trial in launched),
            tokens=sum(trial.cost.tokens for trial in launched),
            seconds=sum(trial.cost.seconds for trial in launched) + self.asking,
            usd=sum(trial.cost.usd for trial in launched) + sum(trial.proposal.usd for trial in self.trials),
        )

    # Ends.

    def _stop_if_over(self) -> None:
        """Whether to stop is asked only where the journal ends: what was done stays done under another budget."""
        if self.journal.find(f"ask {self.asks + 1}") is not None:
            return
        state, spent = self._state(), self._spent()
        incumbent = state.incumbent
        assert incumbent is not None
        score = self.expected.get(incumbent.number)
        if self.goal is not None and score is not None:
            if score >= self.goal if self.direction == "max" else score <= self.goal:
                raise _Stop("goal", f"trial {incumbent.number} reached the goal: {self.metric} {shown(score)}")
        for name, limit in self._limits().items():
            if (used := getattr(spent, name)) >= limit:
                raise _Stop("budget", f"the budget is spent: {used:.6g} of {limit:g} {name}")
        since = [trial for trial in state.launched if trial.number > incumbent.number]
        if len(since) >= self.spec.patience:
            raise _Stop("plateau", f"{len(since)} trials since the last that was kept")
        self._check_stop()

    def _check_stop(self) -> None:
        if self.is_stopped():
            raise _Stop("stopped", "stopped on request")


VOID = "none"
"""The operator of an answer that was no proposal."""


def _void(why: str) -> Proposal:
    return Proposal(parent=0, changes={}, claim=why, operator=VOID)


def _trial_key(number: int) -> str:
    return f"trial {number}"


def _with_score(trial: Trial, arm: ArmMean) -> Trial:
    return replace(trial, score=arm.mean, low=arm.low, high=arm.high, n_seeds=arm.n_seeds)


def _add(one: TrialCost, other: TrialCost) -> TrialCost:
    return TrialCost(
        steps=one.steps + other.steps,
        tokens=one.tokens + other.tokens,
        seconds=one.seconds + other.seconds,
        usd=one.usd + other.usd,
    )


def _without(value: object, place: str, paths: Collection[str]) -> object:
    """A block without the settings at these paths, and without blocks that have nothing else."""
    if not isinstance(value, Mapping):
        return value
    kept = {key: _without(inner, f"{place}.{key}", paths) for key, inner in value.items()
            if f"{place}.{key}" not in paths}  # fmt: skip
    return {key: inner for key, inner in kept.items() if inner != {}}


def _seeds_in(value: object, place: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            path = f"{place}.{key}" if place else str(key)
            if key == "seed" or str(key).endswith("_seed"):
                yield path, inner
            else:
                yield from _seeds_in(inner, path)
    elif isinstance(value, list):
        for inner in value:  # without the index: a list may get shorter before a block with a seed
            yield from _seeds_in(inner, f"{place}[]")
