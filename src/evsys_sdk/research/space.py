"""The legal mutation space of a recipe.

In: a recipe, what the `research` block allows, and the config that it belongs to. Out: a `Space`: the kinds that may
stand in for each other, the items that lists may get, the settings that may change between which bounds, and a check by
which every child is a legal file before anything is spent. How it is made from a config is in `config_space`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from evsys_sdk.config.sweep import get_dotted, set_dotted
from evsys_sdk.data_types import JsonObject
from evsys_sdk.errors import Problem
from evsys_sdk.explain import show_path, split_path
from evsys_sdk.research.settings import Block, Setting, is_read, value_in
from evsys_sdk.research.state import DELETED, Changes, apply_changes

Point = Mapping[str, float | str]
"""A recipe as a place in the space: for each thing that can differ, a number from 0 to 1 or a word. What does not
exist there, such as a setting of another kind, is missing."""
LONGEST_LIST = 6
TRIES = 50
"""Children that are drawn before one that is legal is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What may be changed, and how."""

    base: JsonObject
    """The recipe that research starts from."""
    settings: tuple[Setting, ...] = ()
    """Those that belong to no kind."""
    kinds: Mapping[str, Mapping[str, Block]] = field(default_factory=dict)
    """Place of a `{kind, params}`, such as `algorithm` -> the kinds it may be."""
    lists: Mapping[str, Mapping[str, Block]] = field(default_factory=dict)
    """Place of a list of `{kind, params}`, such as `data.transforms` -> the kinds that its items may be."""
    fixed: frozenset[str] = frozenset()
    """Settings, or blocks of them, that stay as they are in `base`."""
    free: frozenset[str] | None = None
    """The only settings that may change; None: all that are not fixed."""
    problems: Callable[[JsonObject], list[Problem]] = lambda recipe: []
    """What is wrong with a recipe as a file."""

    def tunables(self, recipe: JsonObject) -> dict[str, Setting]:
        """Every setting that the recipe reads and that may change, by its dotted path."""
        found = {setting.path: setting for setting in self.settings if is_read(setting, recipe)}
        for place, kinds, block in self._blocks(recipe):
            known = kinds.get(str(block.get("kind")))
            for setting in known.settings if known else ():
                path = f"{place}.params.{setting.path}"
                if not self.is_fixed(path) and is_read(setting, block.get("params") or {}):
                    found[path] = setting
        return found

    def value(self, recipe: JsonObject, path: str, setting: Setting) -> object:
        return value_in(recipe, Setting(path=path, default=setting.default))

    def is_fixed(self, path: str) -> bool:
        """Whether the setting, or a block around it, is fixed."""
        return any(_is_inside(path, each) for each in self.fixed)

    def point(self, recipe: JsonObject) -> Point:
        """Where the recipe lies. A setting that several kinds share, such as a learning rate, is one dimension."""
        point: dict[str, float | str] = {}
        for path, setting in self.tunables(recipe).items():
            point[self._dimension(recipe, path)] = setting.scaled(self.value(recipe, path, setting))
        for place in self.kinds:
            point[f"{place}.kind"] = str(block_of(recipe, place).get("kind"))
        for place, items in self.lists.items():
            order = [str(item.get("kind")) for item in list_of(recipe, place)]
            for kind in sorted({*items, *order}):
                point[f"{place}:{kind}"] = float(kind in order)
            for first, second in ((a, b) for a in sorted(set(order)) for b in sorted(set(order)) if a < b):
                point[f"{place}:{first}<{second}"] = float(order.index(first) < order.index(second))
        return point

    def distance(self, one: JsonObject, other: JsonObject) -> float:
        """The largest difference of any setting: 0 for the same recipe, 1 for another kind or at the other bound."""
        return point_distance(self.point(one), self.point(other))

    def check(self, recipe: JsonObject) -> list[Problem]:
        """What keeps the recipe from being launched: a setting that must stay, or no legal file."""
        found = []
        for path, value in changes_between(self.base, recipe).items():
            # A whole block may have been swapped: then each of its parts that must stay is looked at.
            inside = [fixed for fixed in self.fixed if _is_inside(fixed, path)]
            if self.is_fixed(path) or any(_at(self.base, each) != _at(recipe, each) for each in inside):
                found.append(Problem(path=path, message="must stay as it is", value=value))
            elif self.free is not None and not any(_is_inside(path, each) for each in self.free):
                found.append(Problem(path=path, message="is not in research.space", value=value))
        for place, kinds in self.kinds.items():
            kind = block_of(recipe, place).get("kind")
            if kind not in kinds:
                message = f"is not a kind that research may choose here; known: {', '.join(sorted(kinds))}"
                found.append(Problem(path=f"{place}.kind", message=message, value=kind))
        return found or self.problems(recipe)

    def swap_kind(self, recipe: JsonObject, place: str, kind: str) -> JsonObject:
        """The recipe with another kind at the place. It keeps the settings that it shares with the old one."""
        block, new = block_of(recipe, place), self.kinds[place][kind]
        old = block.get("params") or {}
        assert isinstance(old, dict)
        shared = {setting.path.partition(".")[0] for setting in new.settings}
        params = {name: value for name, value in old.items() if name in shared} | dict(new.params)
        return self.with_values(recipe, {place: {**block, "kind": kind, "params": params}})

    def with_values(self, recipe: JsonObject, values: Changes) -> JsonObject:
        """The recipe with these settings."""
        child = _copy(recipe)
        for path, value in values.items():
            set_dotted(child, split_path(path), _copy(value))
        assert isinstance(child, dict)
        return child

    def sample(self, rng: random.Random, *, start: JsonObject | None = None) -> JsonObject:
        """A legal recipe by chance: kinds, lists and all settings."""
        for _ in range(TRIES):
            child = self.draw(rng, self.base if start is None else start)
            if not self.check(child):
                return child
        return self.base

    def draw(self, rng: random.Random, start: JsonObject) -> JsonObject:
        """Kinds, lists and settings by chance; perhaps not legal."""
        child = start
        for place, kinds in self.kinds.items():
            child = self.swap_kind(child, place, rng.choice(sorted(kinds)))
        for place, items in self.lists.items():
            for _ in range(rng.randrange(2 * len(items) + 1)):
                child = self.change_list(child, place, rng)
        return self.draw_settings(rng, child)

    def draw_settings(self, rng: random.Random, start: JsonObject) -> JsonObject:
        """The recipe with all its settings by chance; what its choices let matter included."""
        child = start
        seen: set[str] = set()
        while waiting := {path: one for path, one in self.tunables(child).items() if path not in seen}:
            child = self.with_values(child, {path: setting.draw(rng) for path, setting in waiting.items()})
            seen |= set(waiting)
        return child

    def change_list(self, recipe: JsonObject, place: str, rng: random.Random) -> JsonObject:
        """One item of a list put in, taken out, or moved."""
        items, known = list_of(recipe, place), self.lists[place]
        missing = sorted(set(known) - {str(item.get("kind")) for item in items})
        # Items that the space knows nothing about are the user's own and stay.
        own = [index for index, item in enumerate(items) if item.get("kind") in known]
        acts = ["insert"] * bool(missing and len(items) < LONGEST_LIST) + ["delete"] * bool(own)
        acts += ["move"] * (len(items) > 1)
        if not acts:
            return recipe
        act = rng.choice(acts)
        if act == "insert":
            block = known[rng.choice(missing)]
            items.insert(rng.randrange(len(items) + 1), {"kind": block.kind, "params": dict(block.params)})
        elif act == "delete":
            items.pop(rng.choice(own))
        else:
            first, second = rng.sample(range(len(items)), 2)
            items.insert(second, items.pop(first))
        return self.with_values(recipe, {place: items})

    def _blocks(self, recipe: JsonObject) -> Iterator[tuple[str, Mapping[str, Block], JsonObject]]:
        for place, kinds in self.kinds.items():
            yield place, kinds, block_of(recipe, place)
        for place, items in self.lists.items():
            for index, item in enumerate(list_of(recipe, place)):
                yield f"{place}[{index}]", items, item

    def _dimension(self, recipe: JsonObject, path: str) -> str:
        """What a setting is called in a point: an item of a list by its kind, because its index may change."""
        for place in self.lists:
            if path.startswith(f"{place}["):
                index, _, rest = path[len(place) + 1 :].partition("]")
                return f"{place}:{list_of(recipe, place)[int(index)].get('kind')}{rest}"
        return path


def block_of(recipe: JsonObject, place: str) -> JsonObject:
    """The `{kind, params}` at a place; empty where there is none."""
    block = _at(recipe, place)
    return block if isinstance(block, dict) else {}


def list_of(recipe: JsonObject, place: str) -> list[JsonObject]:
    """A copy of the list at a place."""
    items = _at(recipe, place)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def point_distance(one: Point, other: Point) -> float:
    """The largest difference of two points in any dimension."""
    if one.keys() != other.keys():
        return 1.0
    return max((_difference(one[name], other[name]) for name in one), default=0.0)


def _difference(one: float | str, other: float | str) -> float:
    if isinstance(one, str) or isinstance(other, str):
        return float(one != other)
    return abs(one - other)


def changes_between(old: JsonObject, new: JsonObject) -> dict[str, object]:
    """The changes that make `new` of `old`, as few as say it: another kind is a whole block, a list of other items the
    whole list."""
    changes: dict[str, object] = {}
    _note_changes(old, new, (), changes)
    assert apply_changes(old, changes) == new
    return changes


def _note_changes(old: object, new: object, place: tuple[str | int, ...], changes: dict[str, object]) -> None:
    if old == new and type(old) is type(new):
        return
    if isinstance(old, dict) and isinstance(new, dict) and old.get("kind") == new.get("kind"):
        for key in [*old, *(key for key in new if key not in old)]:
            if key not in new:
                changes[show_path((*place, key))] = DELETED
            elif key not in old:
                changes[show_path((*place, key))] = new[key]
            else:
                _note_changes(old[key], new[key], (*place, key), changes)
    elif isinstance(old, list) and isinstance(new, list) and _kinds_of(old) == _kinds_of(new) is not None:
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            _note_changes(before, after, (*place, index), changes)
    else:
        changes[show_path(place)] = new


def _kinds_of(items: list[object]) -> list[object] | None:
    """The kinds of a list of `{kind, params}`; None for any other list."""
    return [item.get("kind") for item in items if isinstance(item, dict)] if _all_blocks(items) else None


def _all_blocks(items: list[object]) -> bool:
    return all(isinstance(item, dict) and "kind" in item for item in items)


def _copy(value: object) -> object:
    # Four times faster than `copy.deepcopy`, and thousands of children are drawn.
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list | tuple) else value


def _is_inside(path: str, around: str) -> bool:
    return path.startswith(around) and path[len(around) : len(around) + 1] in ("", ".", "[")


def _at(recipe: JsonObject, path: str) -> object:
    try:
        return get_dotted(recipe, split_path(path))
    except KeyError:
        return None
