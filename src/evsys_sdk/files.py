"""Files: written whole (a reader sees the old content or the new one, never a part), and rows of JSON lines.

In: a path, content, rows. Out: the file, fsynced; a stream of rows, from plain or gzipped files. Every record and
manifest of the SDK is written here, and every JSONL file that a user wrote is read here, so that a bad line is always
answered in the same way: with file, line number and reason.

Lines are parsed some 16 KB at a time: one call of the parser for many lines is faster, and their rows then
share their key strings, which saves a quarter of a gigabyte per million rows of five columns.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from evsys_sdk.constants import WORKSPACE_DIR
from evsys_sdk.errors import DataError, shorten
from evsys_sdk.format import visible
from evsys_sdk.redaction import redact, redact_values

GIT_IGNORES_ALL = "# Written by evsys: nothing in this folder belongs into git.\n*\n"


def make_folder(path: Path) -> None:
    """Make a folder with its parents; the first one made in a workspace (`.evsys/`) makes git ignore all of it."""
    path.mkdir(parents=True, exist_ok=True)
    workspace = next((folder for folder in (path, *path.parents) if folder.name == WORKSPACE_DIR), None)
    if workspace is not None and not (workspace / ".gitignore").exists():
        with suppress(OSError):  # another process was quicker, or the disk is full: the run matters more
            (workspace / ".gitignore").write_text(GIT_IGNORES_ALL)


def sync(path: Path) -> None:
    """Make what was written to a file, or the names in a folder, outlive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_file(path: str | Path) -> Iterator[IO[bytes]]:
    """A binary handle whose content replaces `path` when the block ends well, and vanishes when it does not."""
    target = Path(path)
    make_folder(target.parent)
    # Beside the target, as `os.replace` works within one file system only. Hidden and `.part`, so that the next process
    # to open a run directory sweeps away what a kill left (`record.layout.sweep`). Cut, as names end at 255 bytes.
    beginning = os.fsencode(target.name)[:100].decode(errors="ignore")
    name = target.parent / f".{beginning}.{os.getpid()}.{secrets.token_hex(4)}.part"
    try:
        with open(name, "xb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(name, target)
        sync(target.parent)  # the new name is on disk only when its folder is
    except BaseException:
        name.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> Path:
    """Write `text` whole, without secrets and with control characters as text; return the path."""
    text = visible(redact(text))
    with whole_file(path) as handle:
        # Half a surrogate pair (a broken emoji in a dataset) becomes its escape, which JSON reads back.
        handle.write(text.encode(errors="backslashreplace"))
    return Path(path)


def write_json(path: str | Path, value: object) -> Path:
    """Write `value` whole as indented, standard JSON."""
    return write_text(path, to_json(value, indent=2) + "\n")


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none, or none that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def to_json(value: object, *, indent: int | None = None) -> str:
    """Standard JSON of anything we record: NaN and infinities become the strings "NaN", "Infinity", "-Infinity".

    Secrets that are known by value do not appear in it; `write_text` finds those that are known by shape. Control
    characters that JSON allows as they are (C1, marks of direction) are escaped: lines of it are printed by people."""
    return visible(redact_values(plain_json(value, indent=indent)))


def plain_json(value: object, *, indent: int | None = None) -> str:
    """Standard JSON of data that must come back as it was: rows of a dataset."""
    try:
        # Nearly all records have no NaN: only one that has is copied.
        if indent is None:
            return _ENCODER.encode(value)
        return json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False, default=_plain)
    except ValueError:
        return json.dumps(_without_nan(value), indent=indent, ensure_ascii=False, default=_plain)


def _plain(value: object) -> object:
    if hasattr(value, "tolist"):  # a numpy scalar or array
        return _without_nan(value.tolist())
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, default=_plain)
"""Made once: `json.dumps` with these settings would make one at each call."""


def _without_nan(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value


Row = dict[str, object]
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
        names = sorted(p.name for p in Path(path).iterdir() if p.is_file() and not p.name.startswith("."))
        holds = f"; it holds: {shorten(', '.join(names), 200)}" if names else ""
        raise DataError(f"{path} is a folder, not a file{holds}") from exc


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
    lines: list[bytes], path: str | Path, before: int, convert: Callable[[Row], object] | None
) -> Iterator[object]:
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
        value = json.loads(text.decode().rstrip())  # else the column of a line that is cut off counts from its end
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
    return _encode(to_json(row) + "\n")


def encode_row(row: Row) -> bytes:
    """One line of a dataset, which comes back as it was."""
    return _encode(plain_json(row) + "\n")


def _encode(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as JSON's \ud800 allows: keep it escaped
        return (json.dumps(json.loads(text), ensure_ascii=True) + "\n").encode()
