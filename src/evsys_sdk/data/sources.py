"""Where raw rows come from: registered kinds of data sources, and the workspace.

In: a `DataConfig`, the store, the folders a relative path may lie in. Out: a `RowSource`: a name for the record and
rows, not yet read. A kind is a class with a `Config` and `open(context)`; the built-in ones are here, with all that
knows CSV, Parquet (pyarrow) and Hugging Face datasets.
"""

from __future__ import annotations

import copy
import csv
import io
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from evsys_sdk.config.base import JsonDict, Params
from evsys_sdk.config.schema import SOURCE_KEYS, DataConfig
from evsys_sdk.data.columns import row_at
from evsys_sdk.data.stores import LocalDataStore
from evsys_sdk.errors import DataError, closest, error_boundary, need, not_known, shorten
from evsys_sdk.files import open_bytes, reason
from evsys_sdk.protocols import DataStore, Row
from evsys_sdk.registry import config_model, data_sources, register_data_source

PARQUET_BATCH = 1024
"""Rows that are turned into Python values at once."""
CELL_LIMIT = 2**31 - 1
"""Characters of one cell; the csv module's own limit of 131,072 is less than a long document."""
LINE_END = re.compile(rb"\r\n|\r|\n")
FileKind = Literal["jsonl", "json", "csv", "parquet"]
SUFFIXES: dict[str, FileKind] = {".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}


class DatasetPuller(Protocol):
    """Where does the file of this dataset lie? (The workspace.)"""

    def pull_dataset(self, ref: str, /) -> Path: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceContext:
    """Where a data source looks for files."""

    store: DataStore
    folders: Sequence[Path] = ()
    """Where a relative path may lie, beside the store: the config's folder, the project's root."""

    def find(self, path: str) -> str:
        """`path` in a form that the store reads; a DataError with the closest name where it does not exist."""
        return find_path(path, store=self.store, folders=self.folders)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """Raw rows that have not been read yet."""

    name: str
    """For records and messages: a path, `in_memory`, `hf:<dataset>[<split>]`."""
    rows: Callable[[], Iterable[Any]]
    sha256: Callable[[], str] | None = None
    """Of the file as it lies there; None where only the rows themselves can be hashed."""


@runtime_checkable
class DataSource(Protocol):
    """Which rows are these? A registered class, built with the settings of the `data` block that its `Config` names."""

    def open(self, context: SourceContext) -> RowSource: ...


def open_source(
    config: DataConfig, *, store: DataStore, folders: Sequence[Path] = (), workspace: DatasetPuller | None = None
) -> RowSource:
    """The source that `config` names; a file that does not exist is refused now."""
    ref = config.dataset_id or config.dataset_name
    if ref is not None:
        if workspace is None:
            raise DataError(f"dataset {ref!r} is looked up in a workspace, and there is none here; give `path` instead")
        # The workspace's files are on this disk, wherever the config's own store may be.
        return JsonlFile(path=str(workspace.pull_dataset(ref))).open(SourceContext(store=LocalDataStore()))
    kind = config.source_kind
    source: DataSource = data_sources.build(kind, source_settings(config))
    with error_boundary(DataError, f"data source {kind!r}"):
        opened = source.open(SourceContext(store=store, folders=folders))
    if not isinstance(opened, RowSource):
        raise DataError(f"data source {kind!r}: open must return a RowSource; it returned {shorten(repr(opened))}")
    return opened


def source_settings(config: DataConfig) -> JsonDict:
    """The settings of a data block for its source: of the common keys those that its `Config` has, and
    `source_params`."""
    model = config_model(data_sources.get(config.source_kind))
    wanted = [key for key in SOURCE_KEYS if key in (model.model_fields if model else config.model_fields_set)]
    given = {key: value for key in wanted if (value := getattr(config, key)) is not None}
    return {**given, **config.source_params}


def is_cheap_to_open(kind: str) -> bool:
    """Whether the source is one of ours that reads this disk or the config: no network, no code of the project."""
    return kind in data_sources.names() and getattr(data_sources.get(kind), "is_cheap", False) is True


class _File:
    """A file of rows in the data store."""

    is_cheap = True

    class Config(Params):
        path: str
        """A file of rows."""

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)

    def open(self, context: SourceContext) -> RowSource:
        path, store = context.find(self.cfg.path), context.store
        digest = getattr(store, "sha256", None)
        return RowSource(
            name=str(_place(path, store)),
            rows=lambda: self.read(path, store),
            sha256=(lambda: digest(path)) if callable(digest) else None,
        )

    def read(self, path: str, store: DataStore) -> Iterable[Any]:
        raise NotImplementedError


def _place(path: str, store: DataStore) -> str | Path:
    """The file itself where the store can tell, else the path as the store has it."""
    locate = getattr(store, "locate", None)
    return locate(path) if callable(locate) else path


def _local_file(path: str, store: DataStore, kind: str) -> Path:
    place = _place(path, store)
    if not isinstance(place, Path):
        raise DataError(f"{path}: source_kind {kind} reads files on this machine; use data_store: {{kind: local}}")
    return place


@register_data_source("jsonl")
class JsonlFile(_File):
    """One JSON object per line, also `.jsonl.gz`; streamed."""

    def read(self, path: str, store: DataStore) -> Iterable[Row]:
        return store.read_jsonl(path)


@register_data_source("json")
class JsonFile(_File):
    """A JSON file: a list of objects, or one under `rows` or `data`."""

    def read(self, path: str, store: DataStore) -> list[Any]:
        value = store.read_json(path)
        if isinstance(value, list):
            return value
        keys = [key for key in ("rows", "data") if isinstance(value, dict) and isinstance(value.get(key), list)]
        if len(keys) == 1:
            return value[keys[0]]
        found = f"a mapping with {shorten(', '.join(value), 100)}" if isinstance(value, dict) else type(value).__name__
        raise DataError(
            f"{path}: expected a list of rows, or a mapping with that list under `rows` or `data`; found {found}"
        )


@register_data_source("csv")
class CsvFile(_File):
    """A header and rows, also `.csv.gz`; `.tsv` is separated by tabs. Cells are text, an empty cell is null."""

    def read(self, path: str, store: DataStore) -> Iterator[Row]:
        file = _local_file(path, store, "csv")
        # The csv module has one limit for the process; a C long may have 32 bits, and takes no more than this.
        csv.field_size_limit(CELL_LIMIT)
        delimiter, name = ("\t", "tab") if str(file).removesuffix(".gz").endswith(".tsv") else (",", "comma")
        # -sig: a byte-order mark would become part of the first column's name. newline="": line breaks inside a quoted
        # cell are the csv reader's business.
        with io.TextIOWrapper(open_bytes(file), encoding="utf-8-sig", newline="") as text:
            lines = csv.reader(text, delimiter=delimiter, strict=True)
            try:
                columns = next(lines, [])
                _check_header(columns, file)
                for cells in lines:
                    if not cells:
                        continue
                    if len(cells) != len(columns):
                        raise DataError(
                            f"{file}:{lines.line_num}: {len(cells)} cells, and the header has {len(columns)} columns "
                            f"({shorten(', '.join(columns), 100)}); quote a cell that holds a {name}"
                        )
                    yield {column: cell or None for column, cell in zip(columns, cells, strict=True)}
            except csv.Error as exc:
                raise DataError(f"{file}:{lines.line_num}: not valid CSV in UTF-8 ({exc})") from exc
            except UnicodeDecodeError as exc:  # of a block of lines, of which none has been read
                line = lines.line_num + 1 + len(LINE_END.findall(exc.object[: exc.start]))
                raise DataError(f"{file}:{line}: not valid CSV in UTF-8 ({exc})") from exc
            except (OSError, EOFError, zlib.error) as exc:  # a packed file that was cut short
                raise DataError(f"{file}: cannot be read after line {lines.line_num}: {reason(exc)}") from exc


def _check_header(columns: list[str], file: Path) -> None:
    if not columns:
        raise DataError(f"{file}: is empty; a CSV file begins with a line of column names")
    if not all(column.strip() for column in columns):
        raise DataError(f"{file}:1: the header has a column without a name: {shorten(repr(columns), 100)}")
    twice = sorted({column for column in columns if columns.count(column) > 1})
    if twice:
        raise DataError(f"{file}:1: the header has two columns of one name: {', '.join(twice)}")
    if len(columns) == 1 and any(mark in columns[0] for mark in ";\t|"):
        raise DataError(
            f"{file}:1: the header is one column, {shorten(repr(columns[0]))}; CSV cells are separated by commas "
            "(by tabs in a .tsv file)"
        )


@register_data_source("parquet")
class ParquetFile(_File):
    """A Parquet file, with its own types; streamed."""

    requires: ClassVar = {"pyarrow": "parquet"}

    def read(self, path: str, store: DataStore) -> Iterator[Row]:
        file = _local_file(path, store, "parquet")
        parquet = need("pyarrow.parquet", extra="parquet")
        arrow_error = need("pyarrow", extra="parquet").ArrowException
        try:
            with parquet.ParquetFile(file) as opened:
                for batch in opened.iter_batches(batch_size=PARQUET_BATCH):
                    yield from batch.to_pylist()
        except (arrow_error, OSError) as exc:
            raise DataError(f"{file}: cannot be read as Parquet: {shorten(str(exc), 200)}") from exc


@register_data_source("in_memory")
class RowsInConfig:
    """The rows in the YAML itself."""

    is_cheap = True

    class Config(Params):
        rows: list[JsonDict]
        """The rows."""

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)

    def open(self, context: SourceContext) -> RowSource:
        rows = self.cfg.rows
        return RowSource(name="in_memory", rows=lambda: copy.deepcopy(rows))  # a transform may change what it gets


@register_data_source("hf_dataset")
class HuggingFaceDataset:
    """A Hugging Face dataset: on the hub, or on this disk and then without network."""

    requires: ClassVar = {"datasets": "local"}
    builders: ClassVar = {
        ".arrow": "arrow", ".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".tsv": "csv",
        ".txt": "text",
    }  # fmt: skip
    """Suffix of a file -> the library's name for its format."""

    class Config(Params):
        hf_dataset: str
        """The id of a dataset on the hub, or the path of a folder or file."""
        hf_split: str = "train"
        """The split to read."""

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)

    def open(self, context: SourceContext) -> RowSource:
        dataset, split = self.cfg.hf_dataset, self.cfg.hf_split
        return RowSource(name=f"hf:{dataset}[{split}]", rows=lambda: self.read(dataset, split, context.folders))

    def read(self, dataset: str, split: str, folders: Sequence[Path]) -> Iterator[Row]:
        datasets = need("datasets", extra="local")
        places = [Path(dataset).expanduser(), *(Path(folder) / dataset for folder in folders)]
        local = next((place.absolute() for place in places if place.exists()), None)
        # The library's progress bars would run through ours.
        has_bars = not datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            with error_boundary(DataError, f"loading the dataset {dataset!r}, split {split!r},"):
                if local is None:
                    yield from datasets.load_dataset(dataset, split=split)
                elif local.is_file() and local.suffix in self.builders:
                    extra = {"delimiter": "\t"} if local.suffix == ".tsv" else {}
                    files, builder = {split: str(local)}, self.builders[local.suffix]
                    yield from datasets.load_dataset(builder, data_files=files, split=split, **extra)
                elif not any((local / name).exists() for name in ("state.json", "dataset_dict.json")):
                    yield from datasets.load_dataset(str(local), split=split)
                else:  # made by `Dataset.save_to_disk`, which needs another loader
                    saved = datasets.load_from_disk(str(local))
                    if isinstance(saved, datasets.DatasetDict):
                        if split not in saved:
                            raise DataError(f"{local}: " + not_known(split, "split", saved))
                        saved = saved[split]
                    yield from saved
        finally:
            if has_bars:
                datasets.enable_progress_bars()


def as_rows(rows: Iterable[Any], what: str) -> Iterator[Row]:
    """The rows, each checked to be a dict; the first one that is no mapping is named by its index."""
    for index, row in enumerate(rows):
        if row.__class__ is not dict:
            if not isinstance(row, Mapping):
                raise DataError(f"{what}: {row_at(index)} is not a mapping but {shorten(repr(row))}")
            row = dict(row)
        yield row


def find_path(path: str, *, store: DataStore, folders: Sequence[Path] = ()) -> str:
    """The first of `path` in the store and `path` below each folder that exists, in a form the store reads."""
    # The order is a decision: docs/decisions/0005.
    places = [path, *(str(Path(folder).absolute() / path) for folder in folders if not os.path.isabs(path))]
    for place in places:
        if store.exists(place):
            return place
    looked = list(dict.fromkeys(os.path.normpath(_place(place, store)) for place in places))
    near = next(filter(None, (_closest_path(place, store) for place in places)), None)
    raise DataError(f"no file {path!r}; looked for {' and '.join(looked)}" + (f"; closest: {near}" if near else ""))


def _closest_path(path: str, store: DataStore) -> str | None:
    """The existing path most like `path`: its first part that does not exist, put right."""
    place = _place(path, store)
    if not isinstance(place, Path):
        return closest(path, store.list(f"{os.path.dirname(path)}/".lstrip("/")))
    for missing in (place, *place.parents):
        if missing.parent.is_dir() and not missing.exists():
            near = closest(missing.name, (p.name for p in missing.parent.iterdir()))
            return near and str(missing.parent / near)
    return None


def kind_of_file(path: str | Path) -> FileKind:
    """What the name of a file says about its format; JSONL where it says nothing."""
    name = str(path).removesuffix(".gz")
    return next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), "jsonl")
