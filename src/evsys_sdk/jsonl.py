"""Files of one JSON object per line, plain or gzipped.

In: a path. Out: a stream of rows, or rows on disk, whole. Every JSONL file that a user wrote is read here, so
that a bad line is always answered in the same way: with file, line number and reason.

Lines are parsed some 16 KB at a time: one call of the parser for many lines is faster, and their rows then
share their key strings, which saves a quarter of a gigabyte per million rows of five columns.
"""

from __future__ import annotations

import gzip
import io
import json
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from evsys_sdk.atomic import plain_json, to_json, whole_file
from evsys_sdk.errors import DataError, shorten

Row = dict[str, Any]
_BATCH_BYTES = 16 * 1024
_BOM = b"\xef\xbb\xbf"
# Stands between the lines of a batch. No line can hold it, so two broken lines never pass for whole ones.
_FENCE = secrets.token_hex(8)
_SEPARATOR = f',"{_FENCE}",'.encode()
_scan: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


def read_rows(path: str | Path, convert: Callable[[Row], Any] | None = None) -> Iterator[Any]:
    """Stream the objects of a file, each through `convert`; blank lines are skipped."""
    number = 0
    try:
        with open_bytes(path) as lines:
            while batch := lines.readlines(_BATCH_BYTES):
                if number == 0 and batch[0].startswith(_BOM):
                    batch[0] = batch[0][len(_BOM) :]
                rows = _parse_batch(batch) if convert is None else None
                yield from rows if rows is not None else _parse_lines(batch, path, number, convert)
                number += len(batch)
    except (OSError, EOFError, zlib.error) as exc:
        raise DataError(f"{path}: cannot be read after line {number}: {reason(exc)}") from exc


def open_bytes(path: str | Path) -> IO[bytes]:
    """The file's bytes, unpacked when its name ends in `.gz`; a missing file is a DataError."""
    try:
        if str(path).endswith(".gz"):
            return io.BufferedReader(gzip.open(path))  # lines are then found in C
        return open(path, "rb")
    except FileNotFoundError as exc:
        raise DataError(f"no such file: {Path(path).absolute()}") from exc
    except IsADirectoryError as exc:
        raise DataError(f"{path} is a folder, not a file{_files_in(Path(path))}") from exc


def _files_in(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    return f"; it holds: {shorten(', '.join(names), 200)}" if names else ""


def _parse_batch(lines: list[bytes]) -> list[Row] | None:
    """All rows of the batch, or None when any line needs a closer look."""
    try:
        text = (b"[" + _SEPARATOR.join(lines) + b"]").decode()
        found, end = _scan(text, 0)
    except (ValueError, StopIteration, RecursionError):
        return None
    # Every fence at an odd place: then exactly one value stands between two of them, which is one line's.
    rows, fences = found[::2], found[1::2]
    whole = len(found) == 2 * len(lines) - 1 and fences.count(_FENCE) == len(fences) and end == len(text)
    return rows if whole and set(map(type, rows)) == {dict} else None


def _parse_lines(
    lines: list[bytes], path: str | Path, before: int, convert: Callable[[Row], Any] | None
) -> Iterator[Any]:
    for number, line in enumerate(lines, before + 1):
        if not line.strip():
            continue
        try:
            row = parse_object(line)
            yield row if convert is None else convert(row)
        except DataError as exc:
            raise DataError(f"{path}:{number}: {exc}") from exc


def parse_object(text: bytes) -> Row:
    """The one JSON object in `text`, or a DataError with the reason."""
    try:
        value = json.loads(text.decode())
    except (ValueError, RecursionError) as exc:
        raise DataError(f"{reason(exc)}: {shorten(repr(text)[1:])}") from exc
    if not isinstance(value, dict):
        raise DataError(f"expected an object in braces, found {shorten(repr(value))}")
    return value


def reason(exc: BaseException) -> str:
    """What went wrong with a file, in few words."""
    if isinstance(exc, UnicodeDecodeError):
        return f"not UTF-8 (byte 0x{exc.object[exc.start]:02x} at position {exc.start})"
    if isinstance(exc, json.JSONDecodeError):
        return f"not valid JSON ({exc.msg} at column {exc.colno})"
    if isinstance(exc, RecursionError):
        return "nested too deeply"
    return str(exc) or type(exc).__name__


def write_rows(path: str | Path, rows: Iterable[Row], *, record: bool = False) -> int:
    """Write the rows, whole or not at all; return how many there were. A `record` holds no known secrets, a dataset
    comes back as it was."""
    encode = encode_record if record else encode_row
    count = 0
    with whole_file(path) as handle:
        packed = str(path).endswith(".gz")
        # Without name and time the same rows give the same bytes, so that content hashes agree.
        out = gzip.GzipFile("", "wb", fileobj=handle, mtime=0) if packed else handle
        for count, row in enumerate(rows, 1):
            if not isinstance(row, dict):
                raise DataError(f"{path}: row {count - 1} is not a mapping but {shorten(repr(row))}")
            out.write(encode(row))
        if packed:
            out.close()
    return count


def encode_record(row: Row) -> bytes:
    """One line of a log or record, without secrets that are known by value."""
    return _encoded(to_json(row) + "\n")


def encode_row(row: Row) -> bytes:
    """One line of a dataset, which comes back as it was."""
    return _encoded(plain_json(row) + "\n")


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as JSON's \ud800 allows: keep it escaped
        return (json.dumps(json.loads(text), ensure_ascii=True) + "\n").encode()
