"""Rows for a run: read from their source and passed through the transforms, in order.

In: a `DataConfig`. Out: `LoadedRows`. Rows flow one at a time through the transforms that can `stream`; a list is
made only for those that need one, and at the end.
"""

from __future__ import annotations

import gc
import hashlib
import marshal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import batched, chain
from pathlib import Path
from typing import Any

from evsys_sdk import registry
from evsys_sdk.config.base import TransformSpec
from evsys_sdk.config.schema import DataConfig
from evsys_sdk.data.columns import fingerprint, row_at
from evsys_sdk.data.sources import DatasetPuller, RowSource, as_rows, open_source
from evsys_sdk.errors import DataError, error_boundary, shorten
from evsys_sdk.files import to_json
from evsys_sdk.protocols import DataStore, Row, Transform

CACHE_BYTES = 1 << 30
"""What the parsed sources of an experiment may take together; larger ones are parsed by every run."""
CACHE_BATCH = 64
"""Rows that are packed together: for chat rows of 600 bytes a third faster than one by one, and no faster beyond."""


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
    cache: RowCache | None = None,
) -> LoadedRows:
    """Read and transform; `transforms` are built from the config unless the caller brings them."""
    if transforms is None:
        transforms = build_transforms(config.transforms)
    source = open_source(config, store=store, folders=folders, workspace=workspace)
    with collector_paused():
        raw = _RawRows(source if cache is None else cache.get(config, source))
        rows: Iterable[Row] = raw.read()
        for number, (name, transform) in enumerate(transforms, 1):
            rows = _apply(transform, rows, f"transform {name!r} (number {number})")
        loaded = list(rows)
    return LoadedRows(rows=loaded, sha256=raw.sha256(), source=source.name, n_raw=raw.count)


def content_sha256(rows: Iterable[Row]) -> str:
    """The hash of rows, whatever their order, which each run shuffles anyway."""
    return hashlib.sha256(b"".join(sorted(map(fingerprint, rows)))).hexdigest()


class RowCache:
    """Sources that are parsed once for all runs of an experiment; any thread may ask.

    Every reader gets separate objects, because transforms, algorithms and verifiers of a project may change them: rows
    are kept packed by `marshal`, which unpacks them in half the time that parsing JSON takes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: dict[str, RowSource | None] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._contents: dict[str, str] = {}
        self._free = CACHE_BYTES

    def get(self, config: DataConfig, source: RowSource) -> RowSource:
        """`source`, which `config` names, with rows that are parsed already; itself where they cannot be kept."""
        key = to_json(config.model_dump(exclude={"transforms"}))  # arms with other transforms read the same source
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:  # one per source: a run waits for the rows it needs, and for no others
            if key not in self._sources:
                self._sources[key] = self._pack(source)
            return self._sources[key] or source

    def content_of(self, config: DataConfig, rows: Sequence[Row]) -> str:
        """`content_sha256` of the rows that `config` selects, computed once for all seeds of an arm."""
        key = to_json(config.model_dump())
        with self._lock:
            known = self._contents.get(key)
        if known is None:
            known = content_sha256(rows)
            with self._lock:
                self._contents[key] = known
        return known

    def _pack(self, source: RowSource) -> RowSource | None:
        packed: list[bytes] = []
        is_kept = False
        try:
            sha256 = source.sha256() if source.sha256 else None
            is_kept = self._fill(packed, source)
        finally:
            if not is_kept:
                with self._lock:
                    self._free += sum(map(len, packed))
        if not is_kept:
            return None
        return RowSource(
            name=source.name,
            rows=lambda: chain.from_iterable(map(marshal.loads, packed)),
            sha256=None if sha256 is None else lambda: sha256,
        )

    def _fill(self, packed: list[bytes], source: RowSource) -> bool:
        """Are all rows in `packed` now? Room is taken for what is in it, in any case."""
        with error_boundary(DataError, f"reading {source.name}"):
            for rows in batched(as_rows(source.rows(), source.name), CACHE_BATCH):
                try:
                    batch = marshal.dumps(rows)
                except ValueError:  # it holds a date or another object that JSON does not have
                    return False
                with self._lock:
                    packed.append(batch)
                    self._free -= len(batch)
                    if self._free < 0:
                        return False
        return True


class _RawRows:
    """Counts the raw rows as they pass, and hashes them where the source has no hash."""

    def __init__(self, source: RowSource) -> None:
        self.source = source
        self.count = 0
        self._digest = None if source.sha256 else hashlib.sha256()

    def read(self) -> Iterator[Row]:
        name = self.source.name
        with error_boundary(DataError, f"reading {name}"):
            for row in as_rows(self.source.rows(), name):
                self.count += 1
                if self._digest is not None:
                    self._digest.update(fingerprint(row))
                yield row

    def sha256(self) -> str:
        return self._digest.hexdigest() if self._digest is not None else self.source.sha256()  # type: ignore[misc]


def _apply(transform: Any, rows: Iterable[Row], what: str) -> Iterable[Row]:
    if callable(getattr(transform, "stream", None)):
        return _stream(transform, rows, what)
    taken = list(rows)  # outside the boundary: a fault of an earlier transform is not this one's
    with error_boundary(DataError, what):
        out = transform(taken)
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


def _stream(transform: Any, rows: Iterable[Row], what: str) -> Iterator[Row]:
    # Faults of earlier transforms pass through here as EvsysErrors, which the boundary leaves as they are.
    with error_boundary(DataError, what):
        for index, row in enumerate(transform.stream(rows)):
            if not isinstance(row, dict):
                raise _not_rows(what, f"{row_at(index)} is {shorten(repr(row))}")
            yield row


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
