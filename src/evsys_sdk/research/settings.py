"""What may be changed in a recipe, setting by setting.

In: the JSON schema of a kind, whose fields say what is `tunable`. Out: `Setting`s with a scale from 0 to 1, and the
`KindBlock`s that a kind or an item of a list can be.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evsys_sdk.config.base import JsonDict
from evsys_sdk.config.sweep import get_dotted
from evsys_sdk.data_types import JsonObject
from evsys_sdk.explain import split_path

DIGITS = 3
"""Significant digits of a proposed number: a learning rate of 0.00031415926 says no more than 0.00031."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A number between two bounds, or one of several values."""

    path: str
    """Dotted, below the block it belongs to, or below the recipe."""
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    """The range spans decades."""
    whole: bool = False
    """Whole numbers only."""
    values: tuple[object, ...] = ()
    """Empty for a number."""
    default: object = None
    when: Mapping[str, tuple[object, object]] = field(default_factory=dict)
    """Other settings of its block -> the value that they need for this one to be read, and their default."""

    def allows(self, value: object) -> bool:
        """Whether the value is one of its values, or a number between its bounds."""
        if self.values:
            return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.values)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and self.low <= value <= self.high  # type: ignore[operator]

    @property
    def bounds_text(self) -> str:
        """`one of [1, 2]`, or `1e-06 to 0.01, on a logarithmic scale`."""
        if self.values:
            return f"one of {json.dumps(list(self.values))}"
        return f"{self.low:g} to {self.high:g}" + (", on a logarithmic scale" if self.log else "")

    def scaled(self, value: object) -> float | str:
        """Where the value lies between the bounds, from 0 to 1 (beyond them: at the nearer end); of a choice, its
        name."""
        if self.values or isinstance(value, bool) or not isinstance(value, int | float):
            return json.dumps(value, sort_keys=True)
        if self.log:
            span = math.log(self.high / self.low)
            return min(max(math.log(max(value, self.low) / self.low) / span, 0.0), 1.0)
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def at(self, place: float) -> float | int:
        """The number at a place of the scale."""
        place = min(max(place, 0.0), 1.0)
        value = self.low * (self.high / self.low) ** place if self.log else self.low + place * (self.high - self.low)
        if self.whole:
            return round(value)
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)

    def draw(self, rng: random.Random) -> object:
        """A value by chance, evenly on the scale."""
        return rng.choice(self.values) if self.values else self.at(rng.random())


@dataclass(frozen=True, slots=True, kw_only=True)
class KindBlock:
    """One kind that a `{kind, params}` of the recipe can be."""

    kind: str
    params: JsonObject = field(default_factory=dict)
    """What it needs to be complete."""
    settings: tuple[Setting, ...] = ()
    """What may be changed, by its path below `params`."""
    names: frozenset[str] = frozenset()
    """All of its params, of which a new kind takes over what it shares with the old one."""


def settings_of_schema(schema: JsonDict) -> tuple[Setting, ...]:
    """The tunable settings of a kind's schema."""
    properties = schema.get("properties", {})
    defaults = {name: about.get("default") for name, about in properties.items()}
    found = []
    for name, about in properties.items():
        if "tunable" not in about:
            continue
        hint, default = about["tunable"], defaults[name]
        when = {path: (needed, defaults.get(path)) for path, needed in hint.get("when", {}).items()}
        types, values = _types_and_values(about)
        if "low" in hint:
            low, high, log = float(hint["low"]), float(hint["high"]), bool(hint["log"])
            # An integer's schema has no "number" among its types; its values are rounded when drawn.
            whole = "number" not in types
            found.append(Setting(path=name, low=low, high=high, log=log, whole=whole, default=default, when=when))
        elif len(values) > 1:  # a setting of one value cannot change
            found.append(Setting(path=name, values=tuple(values), default=default, when=when))
    return tuple(found)


def _types_and_values(about: JsonDict) -> tuple[set[str], list[object]]:
    """The types that a field may have, and the values where they are few."""
    types: set[str] = set()
    values: list[Any] = []
    for option in about.get("anyOf", [about]):
        types.add(str(option.get("type")))
        values += option.get("enum", [option["const"]] if "const" in option else [])
        named: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}
        values += named.get(str(option.get("type")), [])
    return types, values


def value_in(block: object, setting: Setting) -> object:
    """What the setting is in these params, its default where they do not say."""
    try:
        return get_dotted(block, split_path(setting.path))
    except KeyError:
        return setting.default


def is_read(setting: Setting, block: object) -> bool:
    """Whether the block's other settings let this one matter."""
    for path, (needed, default) in setting.when.items():
        if value_in(block, Setting(path=path, default=default)) != needed:
            return False
    return True
