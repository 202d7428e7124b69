"""Rows of CSV and Parquet files.

In: a file on this machine. Out: rows, streamed. A CSV cell is text, and an empty one is null: the file does not say
more. Parquet carries its own types. pyarrow is imported only here.
"""

from __future__ import annotations

import csv
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from evsys_sdk.errors import DataError, need, shorten
from evsys_sdk.jsonl import open_bytes, reason
from evsys_sdk.protocols import Row

FileKind = Literal["jsonl", "json", "csv", "parquet"]
SUFFIXES: dict[str, FileKind] = {".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
PARQUET_BATCH = 1024
"""Rows that are turned into Python values at once."""
CELL_LIMIT = 2**31 - 1
"""Characters of one cell; the csv module's own limit of 131,072 is less than a long document."""


def kind_of_file(path: str | Path) -> FileKind:
    """What the name of a file says about its format; JSONL where it says nothing."""
    name = str(path).removesuffix(".gz")
    return next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), "jsonl")


def read_csv_rows(path: Path) -> Iterator[Row]:
    """Stream the rows of a CSV file with a header (`.tsv`: separated by tabs; `.gz`: packed)."""
    csv.field_size_limit(CELL_LIMIT)
    delimiter = "\t" if str(path).removesuffix(".gz").endswith(".tsv") else ","
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as text:
        lines = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            columns = _header(next(lines, []), path)
            for cells in lines:
                if not cells:
                    continue
                if len(cells) != len(columns):
                    raise DataError(
                        f"{path}:{lines.line_num}: {len(cells)} cells, and the header has {len(columns)} columns "
                        f"({shorten(', '.join(columns), 100)}); quote a cell that holds a {_NAMES[delimiter]}"
                    )
                yield {column: cell or None for column, cell in zip(columns, cells, strict=True)}
        except (csv.Error, UnicodeDecodeError) as exc:
            raise DataError(f"{path}:{lines.line_num + 1}: not valid CSV in UTF-8 ({exc})") from exc
        except (OSError, EOFError, zlib.error) as exc:  # a packed file that was cut short
            raise DataError(f"{path}: cannot be read after line {lines.line_num}: {reason(exc)}") from exc


_NAMES = {",": "comma", "\t": "tab"}


def _header(columns: list[str], path: Path) -> list[str]:
    if not columns:
        raise DataError(f"{path}: is empty; a CSV file begins with a line of column names")
    if not all(column.strip() for column in columns):
        raise DataError(f"{path}:1: the header has a column without a name: {shorten(repr(columns), 100)}")
    twice = sorted({column for column in columns if columns.count(column) > 1})
    if twice:
        raise DataError(f"{path}:1: the header has two columns of one name: {', '.join(twice)}")
    if len(columns) == 1 and any(mark in columns[0] for mark in ";\t|"):
        raise DataError(
            f"{path}:1: the header is one column, {shorten(repr(columns[0]))}; CSV cells are separated by commas "
            "(by tabs in a .tsv file)"
        )
    return columns


def read_parquet_rows(path: Path) -> Iterator[Row]:
    """Stream the rows of a Parquet file (extra `parquet`)."""
    parquet = need("pyarrow.parquet", extra="parquet")
    arrow_error = need("pyarrow", extra="parquet").ArrowException
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH):
                yield from batch.to_pylist()
    except (arrow_error, OSError) as exc:
        raise DataError(f"{path}: cannot be read as Parquet: {shorten(str(exc), 200)}") from exc
