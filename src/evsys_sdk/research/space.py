"""The legal mutation space of a recipe.

In: a recipe, what the `research` block allows, and the config that it belongs to. Out: a `Space`: the kinds that may
stand in for each other, the items that lists may get, the settings that may change between which bounds, and a check by
which every child is a legal file before anything is spent. How it is made from a config is in `config_space`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from evsys_sdk.config.research import ResearchSpec
from evsys_sdk.data_types import JsonObject
from evsys_sdk.errors import Problem
from evsys_sdk.research.legal import FileCheck, parts_of
from evsys_sdk.research.recipes import block_of, changes_between, list_of, value_at, with_values
from evsys_sdk.research.settings import KindBlock, Setting, is_read, value_in

Point = Mapping[str, float | str]
"""A recipe as a place in the space: for each thing that can differ, a number from 0 to 1 or a word. What does not
exist there, such as a setting of another kind, is missing."""
HAS, ORDER = 0.6, 0.3
"""How far apart two lists are by an item, and by the order of two items: a list with one item more is a neighbour, so
that what is known about the other settings holds there too."""
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
    kinds: Mapping[str, Mapping[str, KindBlock]] = field(default_factory=dict)
    """Place of a `{kind, params}`, such as `algorithm` -> the kinds it may be."""
    lists: Mapping[str, Mapping[str, KindBlock]] = field(default_factory=dict)
    """Place of a list of `{kind, params}`, such as `data.transforms` -> the kinds that its items may be."""
    fixed: frozenset[str] = frozenset()
    """Settings, or blocks of them, that stay as they are in `base`."""
    free: frozenset[str] | None = None
    """The only settings that may change; None: all that are not fixed."""
    problems: Callable[[JsonObject], list[Problem]] = lambda recipe: []
    """What is wrong with a recipe as a file."""

    def __post_init__(self) -> None:
        kinds = {
            place: {str(kind): known[str(kind)]} if self.is_fixed(f"{place}.kind") and kind in known else known
            for place, known in self.kinds.items()
            for kind in [block_of(self.base, place).get("kind")]
        }
        object.__setattr__(self, "kinds", kinds)
        lists = {place: items for place, items in self.lists.items() if items and not self.is_fixed(place)}
        object.__setattr__(self, "lists", lists)

    @classmethod
    def of(cls, recipe: JsonObject, spec: ResearchSpec, files: FileCheck) -> Space:
        """The space that the `research` block asks for. ConfigError with every mistake in it."""
        parts = parts_of(recipe, spec, files)
        return cls(
            base=recipe, settings=parts.settings, kinds=parts.kinds, lists=parts.lists, fixed=parts.fixed,
            free=parts.free, problems=files,
        )  # fmt: skip

    def tunables(self, recipe: JsonObject) -> dict[str, Setting]:
        """Every setting that the recipe reads and that may change, by its dotted path."""
        found = {one.path: one for one in self.settings if not self.is_fixed(one.path) and is_read(one, recipe)}
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
        return _is_in_any(path, self.fixed)

    def point(self, recipe: JsonObject) -> Point:
        """Where the recipe lies. A setting that several kinds share, such as a learning rate, is one dimension."""
        point: dict[str, float | str] = {}
        for path, setting in self.tunables(recipe).items():
            point[self.dimension(recipe, path)] = setting.scaled(self.value(recipe, path, setting))
        for place in self.kinds:
            point[f"{place}.kind"] = str(block_of(recipe, place).get("kind"))
        for place, items in self.lists.items():
            order = [str(item.get("kind")) for item in list_of(recipe, place)]
            for kind in sorted({*items, *order}):
                point[f"{place}:{kind}"] = HAS * (kind in order)
            for first, second in ((a, b) for a in sorted(set(order)) for b in sorted(set(order)) if a < b):
                point[f"{place}:{first}<{second}"] = ORDER * (order.index(first) < order.index(second))
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
            if self.is_fixed(path) or any(value_at(self.base, each) != value_at(recipe, each) for each in inside):
                found.append(Problem(path=path, message="must stay as it is", value=value))
            elif self.free is not None and not any(_is_inside(path, each) for each in self.free):
                found.append(Problem(path=path, message="is not in research.space", value=value))
        # A space that a person wrote holds for its values too; of `auto`, bounds are advice and the schema is the law.
        for path, setting in (self.tunables(recipe) if self.free is not None and not found else {}).items():
            value = self.value(recipe, path, setting)
            if not setting.allows(value) and value != self.value(self.base, path, setting):
                found.append(Problem(path=path, message=f"must be {setting.bounds_text} (research.space)", value=value))
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
        shared = new.names | {setting.path.partition(".")[0] for setting in new.settings}
        params = {name: value for name, value in old.items() if name in shared} | dict(new.params)
        return with_values(recipe, {place: {**block, "kind": kind, "params": params}})

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
            child = with_values(child, {path: setting.draw(rng) for path, setting in waiting.items()})
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
        return with_values(recipe, {place: items})

    def _blocks(self, recipe: JsonObject) -> Iterator[tuple[str, Mapping[str, KindBlock], JsonObject]]:
        for place, kinds in self.kinds.items():
            yield place, kinds, block_of(recipe, place)
        for place, items in self.lists.items():
            for index, item in enumerate(list_of(recipe, place)):
                yield f"{place}[{index}]", items, item

    def dimension(self, recipe: JsonObject, path: str) -> str:
        """What a setting is called in a point: an item of a list by its kind, because its index may change."""
        for place in self.lists:
            if path.startswith(f"{place}["):
                index, _, rest = path[len(place) + 1 :].partition("]")
                return f"{place}:{list_of(recipe, place)[int(index)].get('kind')}{rest}"
        return path


def list_of_order(name: str) -> str:
    """Of a dimension that is the order of two items, `<place>:order`; empty for any other."""
    place, _, pair = name.partition(":")
    return f"{place}:order" if "<" in pair else ""


def point_distance(one: Point, other: Point) -> float:
    """The largest difference of two points in any dimension."""
    if one.keys() != other.keys():
        return 1.0
    pairs = [(value, other[name]) for name, value in one.items()]
    # Words, such as a kind, have no order: they are the same or wholly different.
    return max((float(a != b) if isinstance(a, str) or isinstance(b, str) else abs(a - b) for a, b in pairs), default=0)


@lru_cache(maxsize=10_000)  # asked of the same few paths for each of thousands of children
def _is_in_any(path: str, fixed: frozenset[str]) -> bool:
    return any(_is_inside(path, each) for each in fixed)


def _is_inside(path: str, around: str) -> bool:
    return path.startswith(around) and path[len(around) : len(around) + 1] in ("", ".", "[")
