"""Builds the extensions a run names, and remembers which of their settings were read.

In: `{kind, params}` specs with their places in the config. Out: instances; after the run, the unread settings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from evsys_sdk.config.base import KindSpec
from evsys_sdk.config.reading import listening, note_read, read, settings_of, unread
from evsys_sdk.errors import ConfigError, EvsysError, blame
from evsys_sdk.registry import Registry, check_params


@dataclass(slots=True)
class Parts:
    """The extensions built so far."""

    settings: list[tuple[str, BaseModel]] = field(default_factory=list)
    """Place of the block -> the settings object its extension keeps."""

    def build(self, registry: Registry, spec: KindSpec, place: str, params: dict[str, Any] | None = None) -> Any:
        """An instance of what `spec` names; `params` replaces the spec's own where we had to complete them."""
        params = dict(spec.params) if params is None else params
        target = registry.get(spec.kind)
        problems = check_params(target, params)
        if problems:
            raise ConfigError(f"{place} ({registry.kind} {spec.kind!r})", problems)
        with blame(EvsysError, f"building {registry.kind} {spec.kind!r}"):
            instance = listening(target)(**params)
        kept = settings_of(instance)
        if kept is not None:
            self.settings.append((place, kept))
        return instance

    def unread(self) -> Iterator[str]:
        """Places of params that were given and that no extension built for that place has read."""
        of_place: dict[str, list[set[str]]] = {}
        for place, kept in self.settings:
            of_place.setdefault(place, []).append(set(unread(kept)))
        for place, found in of_place.items():
            yield from (f"{place}.params.{path}" for path in sorted(set.intersection(*found)))

    def read(self) -> Iterator[str]:
        """Places of params that were given and that an extension has read."""
        for place, kept in list(self.settings):
            yield from (f"{place}.params.{path}" for path in read(kept))

    def note_read(self, places: Collection[str]) -> None:
        """Note that these, as `read` names them, were read by another process."""
        for place, kept in self.settings:
            within = f"{place}.params."
            note_read(kept, {path.removeprefix(within) for path in places if path.startswith(within)})
