"""The gate of the workspace: every row is looked at before it is stored.

In: a user's file, or what a remote source sends. Out: clean lines, one JSON object each, as bytes.
A line that is no row is named by file and number. JSONL lines keep their own spelling; only blank lines,
line endings and a byte-order mark are dropped, so that they do not make a new version.
"""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from evsys_sdk.data.columns import row_at
from evsys_sdk.data.manifest import Kind
from evsys_sdk.data.tables import kind_of_file
from evsys_sdk.data_types import TargetFormat, detect_format, from_dict
from evsys_sdk.errors import DataError, shorten
from evsys_sdk.jsonl import encode_row, open_bytes, parse_object, reason


def data_file(path: Path) -> Path:
    """The file that `path` means: itself, or the `tasks.jsonl` of a benchmark's folder."""
    tasks = path / "tasks.jsonl"
    return tasks if path.is_dir() and tasks.is_file() else path


def file_lines(path: Path, kind: Kind) -> Iterator[bytes]:
    """The rows of a JSONL file, a `.json` list, a CSV or a Parquet file, as checked lines."""
    return _jsonl_lines(path, kind) if kind_of_file(path) == "jsonl" else _row_lines(path, kind)


def _jsonl_lines(path: Path, kind: Kind) -> Iterator[bytes]:
    with open_bytes(path) as handle:
        try:
            for number, raw in enumerate(handle, 1):
                line = (raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw).strip()
                if line:
                    yield _checked(line, f"{path}:{number}", kind)
        except (OSError, EOFError, zlib.error) as exc:  # a packed file that was cut short
            raise DataError(f"{path}: cannot be read to its end: {reason(exc)}") from exc


def _row_lines(path: Path, kind: Kind) -> Iterator[bytes]:
    from evsys_sdk.config.models import DataConfig
    from evsys_sdk.data.sources import as_rows, open_source
    from evsys_sdk.data.stores import LocalDataStore

    source = open_source(DataConfig(source_kind=kind_of_file(path), path=str(path)), store=LocalDataStore())
    for index, row in enumerate(as_rows(source.rows(), str(path))):
        yield _checked(row, f"{path}: {row_at(index)}", kind)


def stream_lines(items: Iterable[Mapping[str, Any] | bytes], what: str, kind: Kind) -> Iterator[bytes]:
    """The rows a remote source sends as checked lines; byte chunks may be cut anywhere."""
    for number, item in enumerate(_whole_items(items), 1):
        yield _checked(item, f"{what}: row {number}", kind)


def _whole_items(items: Iterable[Mapping[str, Any] | bytes]) -> Iterator[Mapping[str, Any] | bytes]:
    rest = b""
    for item in items:
        if isinstance(item, bytes):
            *lines, rest = (rest + item).split(b"\n")
            yield from filter(None, (line.strip() for line in lines))
        else:
            yield item
    if rest.strip():
        yield rest.strip()


def _checked(item: Mapping[str, Any] | bytes, place: str, kind: Kind) -> bytes:
    """The row as a line of JSON; a row of a benchmark must be a task that can be verified."""
    try:
        row = parse_object(item) if isinstance(item, bytes) else dict(item)
        if kind == "benchmark":
            _check_task(row)
    except DataError as exc:
        raise DataError(f"{place}: {exc}") from exc
    return item + b"\n" if isinstance(item, bytes) else encode_row(row)


def _check_task(row: dict[str, Any]) -> None:
    if detect_format(row) != TargetFormat.HARBOR_TASK:
        keys = shorten(", ".join(map(str, row)), 100)
        raise DataError(f"a benchmark's row needs `instruction` and `verifier`; this one has: {keys}")
    from_dict(row)
