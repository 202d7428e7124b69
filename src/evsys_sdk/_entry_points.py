"""Bring extensions in: ours by importing their modules, other packages' through entry points.

In: the registries. Out: the registries, filled. A broken third-party entry point is reported and skipped; it must not
take the others down.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from evsys_sdk.errors import FOREIGN
from evsys_sdk.logs import get_logger

if TYPE_CHECKING:
    from evsys_sdk.registry import Registry

ROOMS = (
    "config", "algorithms", "backends", "data", "record", "verifiers", "eval", "inference", "rollout", "experiment",
    "deployers", "research",
)  # fmt: skip
"""Rooms with built-in extensions; each names the modules that register them, as `EXTENSIONS` in its `__init__.py`."""


def built_in_modules() -> list[str]:
    rooms = [import_module(f"evsys_sdk.{room}") for room in ROOMS]
    return [f"{room.__name__}.{module}" for room in rooms for module in room.EXTENSIONS]


def load_third_party(registries: dict[str, Registry]) -> None:
    points = entry_points()  # reads the metadata of every installed package: once, not once per registry
    for registry in registries.values():
        for point in points.select(group=registry.group):
            try:
                target = point.load()
                if registry.entries.get(point.name) is None or registry.entries[point.name].target is not target:
                    registry.register(point.name)(target)
            except FOREIGN as exc:
                reason = f"{type(exc).__name__}: {exc}"
                registry.broken[point.name] = reason
                get_logger(__name__).warning(
                    "skipped entry point %s of group %s (%s): %s", point.name, registry.group, point.value, reason
                )
