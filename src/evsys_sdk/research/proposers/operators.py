"""Ways to make a child: what is changed about which parent.

In: the space, the elites and chance. Out: sketches of children, legal in kind and order; their numbers are settled by
the proposer, except where the operator is about one number. An operator that cannot help here makes none.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evsys_sdk.data_types import JsonObject
from evsys_sdk.research.recipes import block_of, value_at, with_values
from evsys_sdk.research.settings import Setting
from evsys_sdk.research.space import Space
from evsys_sdk.research.state import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """A child before its numbers are settled."""

    parent: int
    recipe: JsonObject
    claim: str
    may_tune: bool = True
    """Whether numbers may move too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breeding:
    """What operators work with."""

    space: Space
    trials: Sequence[Trial]
    elites: Sequence[Trial]
    """The best first."""
    rng: random.Random

    def parent(self) -> Trial:
        """One of the elites, the better the likelier."""
        # Places of an exponential distribution with mean 1: the best elite is taken in 63 of 100 draws, the second in
        # 23.
        place = min(int(self.rng.expovariate(1.0)), len(self.elites) - 1)
        return self.elites[place]


Operator = Callable[[Breeding], list[Sketch]]


def numeric(breeding: Breeding) -> list[Sketch]:
    """Other numbers for an elite: the two best, and one more, whose numbers may be what holds it back."""
    best = [*breeding.elites[:2], *breeding.rng.sample(breeding.elites[2:], min(1, len(breeding.elites[2:])))]
    return [
        Sketch(parent=one.number, recipe=one.recipe, claim=f"trial {one.number} scores higher with other numbers")
        for one in best
        # A setting with a list of values is a choice, which `flip` changes; without one it is a number.
        if any(not setting.values for setting in breeding.space.tunables(one.recipe).values())
    ]


def flip(breeding: Breeding) -> list[Sketch]:
    """Another value of one choice."""
    space, rng, sketches = breeding.space, breeding.rng, []
    for _ in range(8):
        parent = breeding.parent()
        choices = [(path, one) for path, one in space.tunables(parent.recipe).items() if len(one.values) > 1]
        if not choices:
            continue
        path, setting = rng.choice(choices)
        now = space.value(parent.recipe, path, setting)
        value = rng.choice([value for value in setting.values if value != now])
        child = with_values(parent.recipe, {path: value})
        claim = f"{path} = {value} scores higher than {now} (trial {parent.number})"
        sketches.append(Sketch(parent=parent.number, recipe=child, claim=claim))
    return sketches


def swap_kind(breeding: Breeding) -> list[Sketch]:
    """Another kind, with the settings of the best trial that had it, else with what the two share."""
    space, sketches = breeding.space, []
    parent = breeding.parent()
    for place, kinds in space.kinds.items():
        now = block_of(parent.recipe, place).get("kind")
        for kind in sorted(set(kinds) - {str(now)}):
            had = next((one for one in breeding.elites if block_of(one.recipe, place).get("kind") == kind), None)
            # What worked once with this kind is a better start than its defaults.
            if had is not None:
                child = with_values(parent.recipe, {place: block_of(had.recipe, place)})
            else:
                child = space.swap_kind(parent.recipe, place, kind)
            claim = f"{place}.kind = {kind} scores higher than {now} (trial {parent.number})"
            sketches.append(Sketch(parent=parent.number, recipe=child, claim=claim))
    breeding.rng.shuffle(sketches)
    return sketches[:8]


def change_list(breeding: Breeding) -> list[Sketch]:
    """Items more, less or elsewhere in a list."""
    space, rng, sketches = breeding.space, breeding.rng, []
    for number in range(24 if space.lists else 0):
        parent, place = breeding.parent(), rng.choice(sorted(space.lists))
        child = space.change_list(parent.recipe, place, rng)
        # One, two or three changes in turn: a list that needs two items more may score no better with one.
        for _ in range(number % 3):
            child = space.change_list(child, place, rng)
        claim = f"the {place} {kinds_at(child, place)} score higher than {kinds_at(parent.recipe, place)}"
        sketches.append(Sketch(parent=parent.number, recipe=child, claim=f"{claim} (trial {parent.number})"))
    return sketches


def cross(breeding: Breeding) -> list[Sketch]:
    """A whole part of one elite in the place of another's; of two of one kind, each setting from either."""
    space, rng, sketches = breeding.space, breeding.rng, []
    for _ in range(8 if len(breeding.elites) > 1 else 0):
        first, second = breeding.parent(), rng.choice(breeding.elites)
        # Equal parents have nothing to exchange.
        parts = [place for place in (*space.kinds, *space.lists) if second.recipe != first.recipe]
        if first.number == second.number or not parts:
            continue
        ours = space.tunables(first.recipe)
        values = {
            path: space.value(second.recipe, path, setting)
            for path, setting in space.tunables(second.recipe).items()
            # Uniform crossover (Syswerda 1989): each shared setting from either parent.
            if path in ours and rng.random() < 0.5
        }
        if rng.random() < 0.5:
            place = rng.choice(sorted(parts))
            values = {place: value_at(second.recipe, place)}
        child = with_values(first.recipe, values)
        claim = f"trial {first.number} scores higher with {', '.join(values) or 'parts'} of trial {second.number}"
        sketches.append(Sketch(parent=first.number, recipe=child, claim=claim))
    return sketches


def restart(breeding: Breeding) -> list[Sketch]:
    """Recipes by chance, of the kinds that were tried least."""
    space, rng = breeding.space, breeding.rng
    sketches = []
    for _ in range(4):
        child = space.draw(rng, space.base)
        for place, kinds in space.kinds.items():
            tried = Counter(str(block_of(trial.recipe, place).get("kind")) for trial in breeding.trials)
            least = min(tried[kind] for kind in kinds)
            kind = rng.choice([kind for kind in sorted(kinds) if tried[kind] == least])
            child = space.draw_settings(rng, space.swap_kind(child, place, kind))
        claim = "A part of the space that was hardly tried has better recipes"
        sketches.append(Sketch(parent=breeding.trials[0].number, recipe=child, claim=claim))
    return sketches


def simplify(breeding: Breeding) -> list[Sketch]:
    """One setting of an elite back to what the config says: simpler, and no worse."""
    space, rng, parent = breeding.space, breeding.rng, breeding.elites[0]
    changed: list[tuple[str, object]] = []
    base = space.tunables(space.base)
    for path, setting in space.tunables(parent.recipe).items():
        # A setting that the config does not have, as after a change of kind, has its default as the plain value.
        plain = space.value(space.base, path, setting) if path in base else setting.default
        if plain is not None and _is_other(setting, space.value(parent.recipe, path, setting), plain):
            changed.append((path, plain))
    sketches = []
    for path, plain in rng.sample(changed, min(3, len(changed))):
        child = with_values(parent.recipe, {path: plain})
        claim = f"{path} = {plain}, as at first, scores no lower than in trial {parent.number}"
        sketches.append(Sketch(parent=parent.number, recipe=child, claim=claim, may_tune=False))
    return sketches


OPERATORS: dict[str, Operator] = {
    "numeric": numeric,
    "flip": flip,
    "kind_swap": swap_kind,
    "list": change_list,
    "crossover": cross,
    "restart": restart,
    "ablate_one": simplify,
}


def kinds_at(recipe: JsonObject, place: str) -> str:
    items = value_at(recipe, place)
    names = [str(item.get("kind")) for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    return f"[{', '.join(names)}]"


def _is_other(setting: Setting, one: object, other: object) -> bool:
    first, second = setting.scaled(one), setting.scaled(other)
    if isinstance(first, str) or isinstance(second, str):
        return first != second
    # In parts of the range: a smaller change is no other recipe.
    return abs(first - second) > 0.02
