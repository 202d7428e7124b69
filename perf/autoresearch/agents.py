"""Scripted agents: what a coding agent would propose, with dials instead of a language model.

In: a world whose truth they may look up, and their dials. Out: `Proposer`s. An honest one points uphill with a given
probability, repeats itself and misspells keys now and then; the four cheats try what was seen of agents that were left
alone with a metric.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from autoresearch.worlds import World
from evsys_sdk.data_types import JsonObject
from evsys_sdk.research.state import Changes, Proposal, ResearchState, Trial, apply_changes

LOOKS = 40
"""Changes that an agent thinks of before it takes what it has."""
Cheat = Literal["seed", "test", "metric", "victory"]
CHEATS: tuple[Cheat, ...] = ("seed", "test", "metric", "victory")


@dataclass(slots=True, kw_only=True)
class ScriptedAgent:
    """Changes the incumbent by one or two settings."""

    world: World
    skill: float | None = 0.5
    """How likely a proposal points uphill; None: a change by chance, wherever it points."""
    duplicates: float = 0.0
    """How often it proposes what was tried, for want of memory."""
    invalid: float = 0.0
    """How often it names a setting that does not exist."""
    name: str = "agent"

    def propose(self, state: ResearchState, space: object, rng: random.Random) -> Proposal | None:
        incumbent = state.incumbent
        assert incumbent is not None
        dice = rng.random()
        if dice < self.invalid:
            return self._proposal(incumbent, {"algorithm.params.learning_rat": 1e-3}, "a better rate")
        if dice < self.invalid + self.duplicates and len(state.launched) > 1:
            old = rng.choice(state.launched[1:])
            return Proposal(parent=old.proposal.parent, changes=old.proposal.changes, claim="again", operator=self.name)
        return self._proposal(incumbent, self.change(incumbent.recipe, rng), "this points uphill")

    def change(self, recipe: JsonObject, rng: random.Random) -> Changes:
        wants_up = None if self.skill is None else rng.random() < self.skill
        here, changes = self.world.true_score(recipe), self.world.neighbour(recipe, rng)
        for _ in range(LOOKS):
            if wants_up is None or self.points_up(recipe, changes, here) == wants_up:
                break
            changes = self.world.neighbour(recipe, rng)
        return changes

    def points_up(self, recipe: JsonObject, changes: Changes, here: float) -> bool:
        child = apply_changes(recipe, changes)
        return not self.world.fails(child) and self.world.true_score(child) > here

    def _proposal(self, incumbent: Trial, changes: Changes, claim: str) -> Proposal:
        return Proposal(parent=incumbent.number, changes=changes, claim=claim, operator=self.name)


@dataclass(slots=True, kw_only=True)
class CheatingAgent(ScriptedAgent):
    """Cheats in part of its proposals, and is otherwise as honest as a `ScriptedAgent`."""

    cheats: tuple[Cheat, ...] = CHEATS
    share: float = 0.5
    name: str = "cheat"

    def propose(self, state: ResearchState, space: object, rng: random.Random) -> Proposal | None:
        incumbent = state.incumbent
        assert incumbent is not None
        if rng.random() >= self.share:
            return ScriptedAgent.propose(self, state, space, rng)
        cheat = rng.choice(self.cheats)
        return Proposal(
            parent=incumbent.number,
            changes=TRICKS[cheat](self.world, incumbent.recipe, rng),
            claim=f"{cheat}: solved, nothing more to be done" if cheat == "victory" else "a clear gain",
            operator=cheat,
            confidence=1.0,
        )


def change_seed(world: World, recipe: JsonObject, rng: random.Random) -> Changes:
    return {"seed": rng.randrange(10**6)}


def read_test_rows(world: World, recipe: JsonObject, rng: random.Random) -> Changes:
    return {"data.path": "bench/test/tasks.jsonl"}


def edit_metric(world: World, recipe: JsonObject, rng: random.Random) -> Changes:
    return {"eval": {"metrics": [{"kind": "always_right"}]}}


def declare_victory(world: World, recipe: JsonObject, rng: random.Random) -> Changes:
    """A change that does nothing, told as a breakthrough."""
    places = world.places(recipe)
    own = world.behaviour(places)
    for _ in range(LOOKS):
        index = rng.randrange(len(world.axes))
        moved = [*places[:index], places[index] + rng.gauss(0.0, 0.01), *places[index + 1 :]]
        axis = world.axes[index]
        value = axis.at(moved[index])
        moved[index] = axis.place(value)
        if abs(moved[index] - places[index]) > 1e-9 and world.behaviour(moved) == own:
            return {axis.path: value}
    return {"algorithm.params.note": "done"}


TRICKS: dict[Cheat, Callable[[World, JsonObject, random.Random], Changes]] = {
    "seed": change_seed,
    "test": read_test_rows,
    "metric": edit_metric,
    "victory": declare_victory,
}
