"""Rows for a run: read from their source and passed through the transforms, in order.

In: a `DataConfig`. Out: `LoadedRows`. Rows flow one at a time through the transforms that can `stream`; a list is
made only for those that need one, and at the end.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evsys_sdk import registry
from evsys_sdk.config.base import TransformSpec
from evsys_sdk.config.models import DataConfig
from evsys_sdk.data.columns import fingerprint, row_at
from evsys_sdk.data.sources import DatasetPuller, Source, as_rows, open_source
from evsys_sdk.errors import DataError, blame, shorten
from evsys_sdk.protocols import DataStore, Row, Transform


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRows:
    """Rows as the algorithm gets them, and where they came from."""

    rows: list[Row]
    sha256: str
    """Of the source as it was read: the file's bytes, or the content of the raw rows where there is no file."""
    source: str
    n_raw: int
    """Rows that the source gave, before any transform."""


def build_transforms(specs: Iterable[TransformSpec]) -> list[tuple[str, Transform]]:
    """The transforms that the YAML names, with their kinds."""
    return [(spec.kind, registry.transforms.build(spec.kind, dict(spec.params))) for spec in specs]


def load_rows(
    config: DataConfig,
    *,
    store: DataStore,
    folders: Sequence[Path] = (),
    workspace: DatasetPuller | None = None,
    transforms: Sequence[tuple[str, Transform]] | None = None,
) -> LoadedRows:
    """Read and transform; `transforms` are built from the config unless the caller brings them."""
    chain = build_transforms(config.transforms) if transforms is None else transforms
    source = open_source(config, store=store, folders=folders, workspace=workspace)
    raw = _RawRows(source)
    with collector_paused():
        rows: Iterable[Row] = raw.read()
        for number, (name, transform) in enumerate(chain, 1):
            rows = _apply(transform, rows, f"transform {name!r} (number {number})")
        loaded = list(rows)
    return LoadedRows(rows=loaded, sha256=raw.sha256(), source=source.name, n_raw=raw.count)


class _RawRows:
    """Counts the raw rows as they pass, and hashes them where the source has no hash of its own."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.count = 0
        self._digest = None if source.sha256 else hashlib.sha256()

    def read(self) -> Iterator[Row]:
        name = self.source.name
        with blame(DataError, f"reading {name}"):
            for row in as_rows(self.source.rows(), name):
                self.count += 1
                if self._digest is not None:
                    self._digest.update(fingerprint(row))
                yield row

    def sha256(self) -> str:
        return self._digest.hexdigest() if self._digest is not None else self.source.sha256()  # type: ignore[misc]


def _apply(transform: Any, rows: Iterable[Row], what: str) -> Iterable[Row]:
    # Reading happens outside the boundary: a fault of an earlier transform is not this one's.
    if callable(getattr(transform, "stream", None)):
        return _stream(transform, rows, what)
    return _call(transform, list(rows), what)


def _stream(transform: Any, rows: Iterable[Row], what: str) -> Iterator[Row]:
    # Faults of earlier transforms pass through here as EvsysErrors, which `blame` leaves as they are.
    with blame(DataError, what):
        for index, row in enumerate(transform.stream(rows)):
            if not isinstance(row, dict):
                raise _not_rows(what, f"{row_at(index)} is {shorten(repr(row))}")
            yield row


def _call(transform: Any, rows: list[Row], what: str) -> list[Row]:
    with blame(DataError, what):
        out = transform(rows)
        # A generator runs here, inside the boundary: what it raises is this transform's fault. A mapping or a text can
        # be iterated too, and is not rows.
        if isinstance(out, Iterable) and not isinstance(out, list | dict | str | bytes):
            out = list(out)
    if not isinstance(out, list):
        raise _not_rows(what, f"it is {shorten(repr(out))}")
    for index, row in enumerate(out):
        if not isinstance(row, dict):
            raise _not_rows(what, f"{row_at(index)} is {shorten(repr(row))}")
    return out


def _not_rows(what: str, found: str) -> DataError:
    return DataError(f"{what} must return rows (a list or a generator of mappings); {found}")


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without the cyclic garbage collector, which would walk the growing rows again and again and find nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()  # and back: straight to the oldest generation, or the next collection would walk them all
            gc.unfreeze()
            gc.enable()
