"""Evolution over the space, with a model of what was tried.

In: the state of the research, the space and chance. Out: the next proposal. An operator, drawn by what each has earned,
sketches children of the elites; the surrogate settles their numbers and picks the child with the most to be gained,
weighed by the chance that it fails. Everything follows from the state, so that a resumed research proposes the same.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from evsys_sdk.config.base import Params
from evsys_sdk.data_types import JsonObject
from evsys_sdk.registry import register_proposer
from evsys_sdk.research.proposers.operators import OPERATORS, Breeding, Sketch, kinds_at
from evsys_sdk.research.proposers.surrogate import Columns, Surrogate, expected_improvement, squares_between
from evsys_sdk.research.recipes import block_of, changes_between, with_values
from evsys_sdk.research.shares import EVOLVE
from evsys_sdk.research.space import Point, Space, point_distance
from evsys_sdk.research.state import SPENT, Proposal, Prospect, ResearchState, Trial, apply_changes

if TYPE_CHECKING:
    from evsys_sdk.research.proposers.surrogate import Array

NEAR = 0.01
"""Recipes of which no setting differs by more of its range are the same trial again."""
MOST_RISK = 0.35
"""Chance of failure above which a child is not proposed while others are."""
OPERATORS_ASKED = 3
OF_EACH, OF_ALL = 2, 4
"""Sketches whose numbers are settled: of each operator that was drawn, and of all of them. One child is taken."""
CHILDREN = 120
"""Sets of numbers that are tried on the surrogate for each sketch."""
START_CHILDREN = 6
"""At the start, of so many the one is taken that lies furthest from what was tried. Of many more it would be a
corner of the space."""
STEP_SIZES = (0.02, 0.08, 0.25)
"""Of numbers, on their scale from 0 to 1."""
ELITES = 8
DULL, DOUBT = 0.05, 4.0
"""Where no child promises so much, in standard deviations of the scores, the surrogate may be too sure of itself: in
every second such round it is asked again with so many times more doubt. Otherwise what does not matter is varied to
the end."""
EVERY, ENOUGH = 3, 12
"""Every so many rounds a kind that had not yet so many trials has the round for itself."""
OLD = 40
"""Scored trials after which an elite is no parent any more, so that one lucky score does not rule."""
PRIOR = {"numeric": 4.0, "restart": 0.5, "ablate_one": 0.3}
"""Successes that an operator is credited with at first; 1 for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offspring:
    """A sketch with its numbers."""

    sketch: Sketch
    operator: str
    recipe: JsonObject
    worth: float
    """Expected improvement times the chance that it does not fail."""
    risk: float


@register_proposer("evolve")
class Evolve:
    """Operators chosen by what they earned, numbers by a surrogate of the scores, failures foreseen."""

    class Config(Params):
        startup_trials: int = Field(default=8, ge=1)
        """Trials that are spread over the space before anything is concluded from scores."""

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)
        self._points: dict[int, tuple[JsonObject, Point]] = {}

    def propose(self, state: ResearchState, space: object, rng: random.Random) -> Proposal | None:
        """The most promising child that is legal and was not tried; None when none was found."""
        assert isinstance(space, Space)
        state = _without_unlaunched(state)
        if not state.trials:
            return None
        breeding = Breeding(space=space, trials=state.trials, elites=elites_of(state, space), rng=rng)
        is_start = self._is_start(state)
        chance = None if is_start else chance_of(state, space)
        if chance is not None:
            breeding = replace(breeding, elites=chance.elites)
        drawn = ["restart"] if is_start else draw_operators(state, rng)
        sketches = {name: OPERATORS[name](breeding) for name in ([*drawn] if is_start else OPERATORS)}
        if chance is not None:
            sketches = {name: [one for one in those if chance.holds(one.recipe)] for name, those in sketches.items()}

        def breed(doubt: float) -> tuple[Memory, list[Offspring]]:
            memory = Memory.of(state, space, self._tried(state, space), doubt)
            memory = memory.against(chance.elites) if chance is not None else memory
            offspring: list[Offspring] = []
            for name, sketch in memory.promising(sketches, drawn):
                offspring += memory.best_children(sketch, name, rng, is_start=is_start)
            return memory, offspring

        memory, children = breed(1.0)
        if not is_start and len(state.launched) % 2 == 0 and memory.scores is not None:
            dull = DULL * memory.scores.scale
            if all(one.worth <= dull for one in children):
                memory, children = breed(DOUBT)
        for _ in range(3):  # where the operators found nothing new
            if children:
                break
            for sketch in OPERATORS["restart"](breeding):
                children += memory.best_children(sketch, "restart", rng, is_start=True)
        safe = [child for child in children if child.risk <= MOST_RISK]
        safe = safe or sorted(children, key=lambda child: child.risk)[:1]
        for child in sorted(safe, key=lambda child: child.worth, reverse=True):
            if not space.check(child.recipe):
                return self._proposal(child, state)
        return None

    def keeps_round(self, state: ResearchState, space: Space) -> bool:
        """Whether the round is for learning what the space is like, and not for others: at the start, at most a quarter
        of the trials, and where one kind has it for itself."""
        whole = None if state.trials_left is None else len(state.launched) + state.trials_left
        start = self.cfg.startup_trials if whole is None else min(self.cfg.startup_trials, whole // 4)
        return len(state.launched) <= start or (not self._is_start(state) and chance_of(state, space) is not None)

    def promise(self, state: ResearchState, space: Space, recipe: JsonObject, rng: random.Random) -> Prospect | None:
        """What another's recipe is expected to gain, next to the best that would be proposed here; None while too
        little was tried to say."""
        if self._is_start(state):
            return None
        state = _without_unlaunched(state)
        own = self.propose(state, space, rng)
        mine = [] if own is None else [apply_changes(_trial(state, own.parent).recipe, own.changes)]
        points = [space.point(one) for one in (recipe, *mine)]
        worth = Memory.of(state, space, self._tried(state, space), 1.0, others=points).worth(points)
        return None if worth is None else Prospect(gain=worth[0], own=worth[1] if mine else 0.0)

    def _is_start(self, state: ResearchState) -> bool:
        return len(state.launched) <= self.cfg.startup_trials or len(state.scored) < 4

    def _tried(self, state: ResearchState, space: Space) -> list[Point]:
        """The points of the trials, which do not change from one proposal to the next."""
        for trial in state.trials:
            known = self._points.get(trial.number)
            if known is None or known[0] is not trial.recipe:
                self._points[trial.number] = trial.recipe, space.point(trial.recipe)
        return [self._points[trial.number][1] for trial in state.trials]

    def _proposal(self, child: Offspring, state: ResearchState) -> Proposal | None:
        parent = _trial(state, child.sketch.parent)
        changes = changes_between(parent.recipe, child.recipe)
        return Proposal(
            parent=parent.number, changes=changes, claim=child.sketch.claim, operator=child.operator,
            confidence=round(1.0 - child.risk, 2),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What the trials say about the space."""

    space: Space
    tried: Sequence[Point]
    columns: Columns
    scores: Surrogate | None
    failures: Surrogate | None
    best: float

    @classmethod
    def of(
        cls, state: ResearchState, space: Space, tried: Sequence[Point], doubt: float, *, others: Sequence[Point] = ()
    ) -> Memory:
        columns = Columns.of([*tried, *others, *_one_of_each(space)])
        rows = columns.rows(tried)
        scored = [place for place, trial in enumerate(state.trials) if trial.score is not None]
        scores, best = None, 0.0
        if len(scored) >= 3:
            values = [state.gain(state.trials[place]) for place in scored]
            scores = Surrogate.fit(columns, rows[scored], values, are_scores=True, doubt=doubt)
            # Compared with what the best are believed to be worth, not with what one of them was lucky to get.
            best = float(scores.predict(rows[scored])[0].max())
        launched = [
            place for place, trial in enumerate(state.trials) if trial.status in ("completed", "failed", "pruned")
        ]
        broken = [float(state.trials[place].status == "failed") for place in launched]
        failures = None
        if 0 < sum(broken) < len(broken):
            failures = Surrogate.fit(columns, rows[launched], broken, noise=0.05)
        return cls(space=space, tried=tried, columns=columns, scores=scores, failures=failures, best=best)

    def worth(self, points: Sequence[Point]) -> list[float] | None:
        """Expected improvement of each, times the chance that it does not fail; None without scores to tell by."""
        return None if self.scores is None else [float(one) for one in self._judge(self.columns.rows(points), False)[0]]

    def against(self, trials: Sequence[Trial]) -> Memory:
        """The memory with these trials as what is to be surpassed."""
        if self.scores is None or not any(trial.score is not None for trial in trials):
            return self
        rows = self.columns.rows([self.space.point(trial.recipe) for trial in trials if trial.score is not None])
        return replace(self, best=float(self.scores.predict(rows)[0].max()))

    def promising(self, sketches: Mapping[str, Sequence[Sketch]], drawn: Sequence[str]) -> list[tuple[str, Sketch]]:
        """The sketches whose numbers are worth settling: of each operator that was drawn the best, and the best of
        all, by what they promise as they are."""
        import numpy as np

        named = [(name, sketch) for name, those in sketches.items() for sketch in those]
        if self.scores is None or not named:
            return named
        worth, risk = self._judge(self.columns.rows([self.space.point(sketch.recipe) for _, sketch in named]), False)
        order = np.argsort(-np.where(risk > MOST_RISK, worth * 1e-6, worth), kind="stable")
        chosen: list[int] = []
        for name in drawn:
            chosen += [place for place in order if named[place][0] == name][:OF_EACH]
        chosen += [place for place in order if place not in chosen][:OF_ALL]
        return [named[place] for place in chosen]

    def best_children(self, sketch: Sketch, operator: str, rng: random.Random, *, is_start: bool) -> list[Offspring]:
        """The sketch with the numbers that promise most; nothing where all was tried."""
        import numpy as np

        point = self.space.point(sketch.recipe)
        tunables = self.space.tunables(sketch.recipe)
        where = {
            path: self.columns.number(self.space.dimension(sketch.recipe, path))
            for path, setting in tunables.items()
            if sketch.may_tune and not setting.values
        }
        rows = start = self.columns.rows([point])
        if where:
            chance = np.random.default_rng(rng.getrandbits(32))
            rows = self._spread(rows, [*where.values()], chance, is_start)
        worth, risk = self._judge(rows, is_start)
        for place in np.argsort(-np.where(risk > MOST_RISK, worth * 1e-6, worth), kind="stable")[:5]:
            values = {path: tunables[path].at(float(rows[place][column])) for path, column in where.items()}
            # A number that did not move stays as it was written.
            values = {
                path: value for path, value in values.items() if rows[place][where[path]] != start[0][where[path]]
            }
            recipe = with_values(sketch.recipe, values)
            there = self.space.point(recipe)
            if min((point_distance(there, other) for other in self.tried), default=1.0) >= NEAR:
                child = Offspring(
                    sketch=sketch, operator=operator, recipe=recipe, worth=float(worth[place]), risk=float(risk[place])
                )
                return [replace(child, sketch=replace(sketch, claim=_with_numbers(sketch.claim, values)))]
        return []

    def _spread(self, rows: Array, columns: list[int], chance: Any, is_start: bool) -> Array:
        """Sets of numbers: anywhere, and in steps of several sizes around those of the sketch; then around the best
        of these once more."""
        import numpy as np

        everywhere = np.repeat(rows, START_CHILDREN if is_start else CHILDREN // 4, axis=0)
        everywhere[:, columns] = chance.random((len(everywhere), len(columns)))
        if is_start or self.scores is None:
            return everywhere
        rows = np.vstack([rows, everywhere, self._around(rows[0], columns, chance, CHILDREN)])
        for _ in range(2):
            worth, risk = self._judge(rows, False)
            top = np.argsort(-np.where(risk > MOST_RISK, 0.0, worth), kind="stable")[:4]
            rows = np.vstack([rows[top], *(self._around(rows[one], columns, chance, CHILDREN // 4) for one in top)])
        return rows

    def _around(self, row: Array, columns: list[int], chance: Any, count: int) -> Array:
        import numpy as np

        rows = np.repeat(row[None, :], count, axis=0)
        sizes = chance.choice(STEP_SIZES, size=(count, 1))
        moves = chance.random((count, len(columns))) < max(0.3, 2.0 / len(columns))
        moves[np.arange(count), chance.integers(len(columns), size=count)] = True
        steps = chance.normal(size=(count, len(columns))) * sizes * moves
        rows[:, columns] = np.clip(rows[:, columns] + steps, 0.0, 1.0)
        return rows

    def _judge(self, rows: Array, is_start: bool) -> tuple[Array, Array]:
        """What each row promises, and its chance of failure."""
        import numpy as np

        risk = np.zeros(len(rows))
        if self.failures is not None:
            risk = np.clip(self.failures.predict(rows)[0], 0.0, 1.0)
        if is_start or self.scores is None:  # far from what was tried
            gaps = squares_between(rows, self.columns.rows(self.tried))
            return np.sqrt(gaps).min(axis=1) * (1.0 - risk), risk
        mean, deviation = self.scores.predict(rows)
        return expected_improvement(mean, deviation, self.best) * (1.0 - risk), risk


@dataclass(frozen=True, slots=True, kw_only=True)
class KindChance:
    """A round for one kind alone, against its own best."""

    place: str
    kind: str
    elites: Sequence[Trial]

    def holds(self, recipe: JsonObject) -> bool:
        return block_of(recipe, self.place).get("kind") == self.kind


def chance_of(state: ResearchState, space: Space) -> KindChance | None:
    """The kind whose turn it is in every third round, until each had enough trials: what a kind can be worth shows
    only with numbers that suit it, and a surrogate that saw it with others believes it to be bad."""
    if len(state.launched) % EVERY:
        return None
    counts = {
        (place, kind): sum(block_of(trial.recipe, place).get("kind") == kind for trial in state.launched)
        for place, kinds in space.kinds.items()
        if len(kinds) > 1
        for kind in sorted(kinds)
    }
    place, kind = min(counts, key=lambda key: counts[key], default=("", ""))
    own = [trial for trial in state.scored if block_of(trial.recipe, place).get("kind") == kind]
    if not own or counts[place, kind] >= ENOUGH:
        return None
    return KindChance(place=place, kind=kind, elites=sorted(own, key=lambda t: lower_bound(state, t), reverse=True)[:4])


def elites_of(state: ResearchState, space: Space) -> list[Trial]:
    """The best of each cell (kinds x lists x cost) by the lower bound of their scores, the best first; the incumbent
    always is one. Without a score there is the config's own trial."""
    scored = state.scored
    recent = [trial for place, trial in enumerate(scored) if len(scored) - place <= OLD]
    incumbent = state.incumbent
    if incumbent is not None and incumbent not in recent:
        recent.append(incumbent)
    cells: dict[tuple[str, ...], Trial] = {}
    ranked = sorted(recent, key=lambda trial: lower_bound(state, trial), reverse=True)
    for trial in ranked:
        cells.setdefault(cell_of(trial, space), trial)
    elites = [*cells.values()]
    # Where there are few cells, as with numbers alone, the runners-up of all are parents too.
    elites += [trial for trial in ranked[:4] if trial not in elites]
    elites.sort(key=lambda trial: lower_bound(state, trial), reverse=True)
    return elites[:ELITES] or [state.trials[0]]


def lower_bound(state: ResearchState, trial: Trial) -> float:
    """What the trial is worth at least, as far as the noise is known."""
    return state.gain(trial) - (state.noise or 0.0) / math.sqrt(max(trial.n_seeds, 1))


def cell_of(trial: Trial, space: Space) -> tuple[str, ...]:
    """The cell of the archive: kinds, lists, and cost by powers of two."""
    kinds = [str(block_of(trial.recipe, place).get("kind")) for place in space.kinds]
    lists = [kinds_at(trial.recipe, place) for place in space.lists]
    return (*kinds, *lists, str(round(math.log2(max(trial.cost.steps, 1)))))


def draw_operators(state: ResearchState, rng: random.Random) -> list[str]:
    """The operators that are asked, by Thompson sampling: a success is a score above all before it, beyond the noise;
    a dear trial earns less by it."""
    won: defaultdict[str, float] = defaultdict(float)
    lost: defaultdict[str, float] = defaultdict(float)
    spent = sorted(trial.cost.steps for trial in state.launched)
    usual, best = max(spent[len(spent) // 2], 1), -math.inf
    for trial in state.launched:
        credit, name = 0.0, trial.proposal.operator
        if trial.score is not None:
            if state.gain(trial) > best + (state.noise or 0.0):
                credit = min(1.0, usual / max(trial.cost.steps, 1))
            best = max(best, state.gain(trial))
        won[name] += credit
        lost[name] += 1.0 - credit
    drawn = {name: rng.betavariate(PRIOR.get(name, 1.0) + won[name], 3.0 + lost[name]) for name in OPERATORS}
    return sorted(drawn, key=lambda name: drawn[name], reverse=True)[:OPERATORS_ASKED]


def _without_unlaunched(state: ResearchState) -> ResearchState:
    """The state without what others proposed and was not launched: it says nothing about the space."""
    told = [trial for trial in state.trials
            if trial.status in (*SPENT, "declined") or trial.proposer.startswith(EVOLVE)]  # fmt: skip
    return replace(state, trials=told)


def _trial(state: ResearchState, number: int) -> Trial:
    return next(trial for trial in state.trials if trial.number == number)


def _one_of_each(space: Space) -> list[Point]:
    """Points that together have every dimension and every word of the space."""
    points = []
    for place, kinds in space.kinds.items():
        for kind in kinds:
            points += _with_each_value(space, space.swap_kind(space.base, place, kind))
    for place, items in space.lists.items():
        whole = [{"kind": block.kind, "params": dict(block.params)} for block in items.values()]
        points += _with_each_value(space, with_values(space.base, {place: whole}))
    return points or _with_each_value(space, space.base)


def _with_each_value(space: Space, recipe: JsonObject) -> list[Point]:
    points = [space.point(recipe)]
    for path, setting in space.tunables(recipe).items():
        points += [space.point(with_values(recipe, {path: value})) for value in setting.values]
    return points


def _with_numbers(claim: str, values: dict[str, float | int]) -> str:
    said = ", ".join(f"{path.rpartition('.')[2]} = {value:g}" for path, value in values.items())
    return f"{claim}: {said}" if said else claim
