"""Which experiments a workspace knows: a small index, so that history need not search the disk.

In: paths of records, as experiments begin and end. Out: the same paths, each with what was known of it then. The index
is a convenience and never the truth: the records are. So writing to it never fails a run, a broken or read-only one
is done without, and what it says of a record counts only while that record is the very file it was made from.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from evsys_sdk.atomic import make_folder
from evsys_sdk.logs import get_logger
from evsys_sdk.record.digest import VERSION, Digest, from_plain, to_plain
from evsys_sdk.redaction import redact

INDEX_FILE = "experiments.sqlite"
SCHEMA = """CREATE TABLE IF NOT EXISTS experiments (
    record TEXT PRIMARY KEY, started REAL, plan TEXT, stamp TEXT, digest TEXT)"""
WAIT_SECONDS = 5.0
"""For another process that is writing; after that a run goes on unregistered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One line of the index."""

    record: Path
    started: float | None = None
    """When it was last begun, in seconds since the epoch."""
    plan: Digest | None = None
    """What was known when it began: no arm has a score yet."""
    stamp: str = ""
    digest: Digest | None = None
    """What it came to, read from the record that has `stamp`."""


def stat_of(file: Path) -> os.stat_result | None:
    """None where there is no such file, or none that can be reached."""
    try:
        return os.stat(file)
    except OSError:
        return None


def stamp_of(found: os.stat_result) -> str:
    """What changes when the file does."""
    return f"{VERSION}:{found.st_mtime_ns}:{found.st_size}"


def note_start(workspace: Path, record: Path, plan: Digest, *, now: float) -> None:
    """An experiment that will leave its record here has begun."""
    statement = (
        "INSERT INTO experiments (record, started, plan) VALUES (?, ?, ?) "
        "ON CONFLICT (record) DO UPDATE SET started = excluded.started, plan = excluded.plan"
    )
    _write(workspace, statement, [(str(record.absolute()), now, _json(plan))])


def note_results(workspace: Path, found: Mapping[Path, Digest]) -> None:
    """What these records say; they are on disk."""
    statement = (
        "INSERT INTO experiments (record, stamp, digest) VALUES (?, ?, ?) "
        "ON CONFLICT (record) DO UPDATE SET stamp = excluded.stamp, digest = excluded.digest"
    )
    stats = {record: stat_of(record) for record in found}
    rows = [(str(path.absolute()), stamp_of(stat), _json(found[path])) for path, stat in stats.items() if stat]
    _write(workspace, statement, rows)


def read_index(workspace: Path) -> list[Known]:
    """Every experiment that was registered; none where the index is missing or broken."""
    path = workspace / INDEX_FILE
    if not path.is_file():
        return []
    try:
        with _opened(path, write=False) as db:
            rows = db.execute("SELECT record, started, plan, stamp, digest FROM experiments").fetchall()
    except sqlite3.Error as exc:
        say = "%s cannot be read (%s); experiments are then found with --dir; delete it to begin a new one"
        get_logger(__name__).warning(say, path, exc)
        return []
    return [
        Known(record=Path(record), started=started, plan=_digest(plan), stamp=stamp or "", digest=_digest(digest))
        for record, started, plan, stamp, digest in rows
    ]


def _write(workspace: Path, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
    try:
        make_folder(workspace)
        with _opened(workspace / INDEX_FILE, write=True) as db, db:
            db.execute(SCHEMA)
            db.executemany(statement, rows)
    except (OSError, sqlite3.Error) as exc:
        get_logger(__name__).debug("%s is not kept up to date: %s", workspace / INDEX_FILE, exc)


@contextmanager
def _opened(path: Path, *, write: bool) -> Iterator[sqlite3.Connection]:
    # A reader makes no file beside it, so that a workspace on a read-only disk can be read.
    where = f"file:{quote(str(path.absolute()))}?mode={'rwc' if write else 'ro'}"
    with closing(sqlite3.connect(where, uri=True, timeout=WAIT_SECONDS)) as db:
        yield db


def _json(digest: Digest) -> str:
    return redact(json.dumps(to_plain(digest), default=str))


def _digest(text: str | None) -> Digest | None:
    """None too for one that another version of the SDK wrote in another shape."""
    if not text:
        return None
    try:
        return from_plain(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
