"""Where raw rows come from: a file, rows in the YAML, a Hugging Face dataset, the workspace.

In: a `DataConfig`, the store, the folders a relative path may lie in. Out: a `Source`: a name for the record and
rows, not yet read. Only the settings that the chosen source needs are looked at, so that the others can be
reported as unread.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from evsys_sdk.config.models import DataConfig
from evsys_sdk.data.columns import row_at
from evsys_sdk.data.huggingface import read_hf_rows
from evsys_sdk.data.stores import LocalDataStore
from evsys_sdk.data.tables import read_csv_rows, read_parquet_rows
from evsys_sdk.errors import DataError, closest, shorten
from evsys_sdk.protocols import DataStore, Row


class DatasetPuller(Protocol):
    """Where does the file of this dataset lie? (The workspace.)"""

    def pull_dataset(self, ref: str, /) -> Path: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Raw rows that have not been read yet."""

    name: str
    """Where they come from, as a person would say it: a path, `in_memory`, `hf:<dataset>[<split>]`."""
    rows: Callable[[], Iterable[Any]]
    sha256: Callable[[], str] | None = None
    """Of the file as it lies there; None where only the rows themselves can be hashed."""


def open_source(
    config: DataConfig, *, store: DataStore, folders: Sequence[Path] = (), workspace: DatasetPuller | None = None
) -> Source:
    """The source that `config` asks for; a file that is not there is refused now."""
    ref = config.dataset_id or config.dataset_name
    if ref is not None:
        return _from_workspace(ref, workspace)
    match config.source_kind:
        case "in_memory":
            rows = config.rows or []
            return Source(name="in_memory", rows=lambda: copy.deepcopy(rows))
        case "hf_dataset":
            dataset, split = str(config.hf_dataset), config.hf_split
            return Source(name=f"hf:{dataset}[{split}]", rows=lambda: read_hf_rows(dataset, split, folders))
    return _from_file(find_path(str(config.path), store=store, folders=folders), config.source_kind, store)


def _from_workspace(ref: str, workspace: DatasetPuller | None) -> Source:
    if workspace is None:
        raise DataError(f"dataset {ref!r} is looked up in a workspace, and there is none here; give `path` instead")
    # The workspace's files are on this disk, wherever the config's own store may be.
    return _from_file(str(workspace.pull_dataset(ref)), "jsonl", LocalDataStore())


def _from_file(path: str, kind: str, store: DataStore) -> Source:
    digest = getattr(store, "sha256", None)
    place = _place(path, store)

    def read() -> Iterable[Any]:
        if kind == "jsonl":
            return store.read_jsonl(path)
        if kind == "json":
            return _rows_of(store.read_json(path), path)
        if not isinstance(place, Path):
            raise DataError(f"{path}: source_kind {kind} reads files on this machine; use data_store: {{kind: local}}")
        return read_csv_rows(place) if kind == "csv" else read_parquet_rows(place)

    return Source(
        name=str(place),
        rows=read,
        sha256=(lambda: digest(path)) if callable(digest) else None,
    )


def _rows_of(value: Any, path: str) -> list[Any]:
    """The list of rows in a JSON file: the file itself, or what lies under `rows` or `data`."""
    if isinstance(value, list):
        return value
    keys = [key for key in ("rows", "data") if isinstance(value, dict) and isinstance(value.get(key), list)]
    if len(keys) == 1:
        return value[keys[0]]
    found = f"a mapping with {shorten(', '.join(value), 100)}" if isinstance(value, dict) else type(value).__name__
    raise DataError(
        f"{path}: expected a list of rows, or a mapping with that list under `rows` or `data`; found {found}"
    )


def as_rows(rows: Iterable[Any], what: str) -> Iterator[Row]:
    """The same rows, each surely a dict; the first one that is no mapping is named by its index."""
    for index, row in enumerate(rows):
        if row.__class__ is not dict:
            if not isinstance(row, Mapping):
                raise DataError(f"{what}: {row_at(index)} is not a mapping but {shorten(repr(row))}")
            row = dict(row)
        yield row


def find_path(path: str, *, store: DataStore, folders: Sequence[Path] = ()) -> str:
    """The first of `path` in the store and `path` below each folder that exists, in a form the store reads."""
    places = [path, *(str(Path(folder).absolute() / path) for folder in folders if not os.path.isabs(path))]
    for place in places:
        if store.exists(place):
            return place
    looked = list(dict.fromkeys(os.path.normpath(_place(place, store)) for place in places))
    near = next(filter(None, (_nearest(place, store) for place in places)), None)
    raise DataError(f"no file {path!r}; looked for {' and '.join(looked)}" + (f"; closest: {near}" if near else ""))


def _place(path: str, store: DataStore) -> str | Path:
    locate = getattr(store, "locate", None)
    return locate(path) if callable(locate) else path


def _nearest(path: str, store: DataStore) -> str | None:
    """The existing path most like `path`: its first part that is not there, put right."""
    place = _place(path, store)
    if not isinstance(place, Path):
        return closest(path, store.list(f"{os.path.dirname(path)}/".lstrip("/")))
    for missing in (place, *place.parents):
        if missing.parent.is_dir() and not missing.exists():
            near = closest(missing.name, (p.name for p in missing.parent.iterdir()))
            return near and str(missing.parent / near)
    return None
