"""Which experiments a workspace knows, and what people and agents have to say of each.

In: paths of records, and remarks. Out: the workspace's index of records, and `Notes` of one of them, from
`<experiment>.notes.jsonl` beside it. The records themselves are not touched.
"""

from __future__ import annotations

import getpass
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from evsys_sdk.constants import EXPERIMENT_RESULT_FILE
from evsys_sdk.errors import EvsysError
from evsys_sdk.files import make_folder
from evsys_sdk.history.digest import VERSION, Digest, from_plain, to_plain
from evsys_sdk.logs import get_logger
from evsys_sdk.record.lines import append_durably
from evsys_sdk.redaction import redact

# Which experiments a workspace knows: a small index, so that history need not search the disk.
#
# In: paths of records, as experiments begin and end. Out: the same paths, each with what was known of it then. The
# index is a convenience and never the truth: the records are. So writing to it never fails a run, a broken or read-
# only one is done without, and what it says of a record counts only while that record is the very file it was made
# from.


INDEX_FILE = "experiments.sqlite"
SCHEMA = """CREATE TABLE IF NOT EXISTS experiments (
    record TEXT PRIMARY KEY, started REAL, plan TEXT, stamp TEXT, digest TEXT)"""
WAIT_SECONDS = 5.0
"""For another process that is writing; after that a run continues unregistered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexLine:
    """One line of the index."""

    record: Path
    started: float | None = None
    """When it was last begun, in seconds since the epoch."""
    plan: Digest | None = None
    """What was known when it began: no arm has a score yet."""
    stamp: str = ""
    digest: Digest | None = None
    """The experiment's result, read from the record that has `stamp`."""


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
        # The earlier result stays: beside it, `started` tells that the experiment was begun again since.
        "ON CONFLICT (record) DO UPDATE SET started = excluded.started, plan = excluded.plan"
    )
    _write(workspace, statement, [(str(record.absolute()), now, _json(plan))])


def note_results(workspace: Path, found: Mapping[Path, Digest], stamps: Mapping[Path, str] | None = None) -> None:
    """What these records say; they are on disk. `stamps`: of the files before they were read, so that one that changed
    meanwhile is read again; by default those of now, for the process that has just written them."""
    statement = (
        "INSERT INTO experiments (record, stamp, digest) VALUES (?, ?, ?) "
        "ON CONFLICT (record) DO UPDATE SET stamp = excluded.stamp, digest = excluded.digest"
    )
    if stamps is None:
        stamps = {record: stamp_of(stat) for record in found if (stat := stat_of(record)) is not None}
    rows = [(str(path.absolute()), stamp, _json(found[path])) for path, stamp in stamps.items()]
    _write(workspace, statement, rows)


def read_index(workspace: Path) -> list[IndexLine]:
    """Every experiment that was registered; none where the index is missing or broken."""
    path = workspace / INDEX_FILE
    if not path.is_file():
        return []
    try:
        with _open_index(path, write=False) as db:
            rows = db.execute("SELECT record, started, plan, stamp, digest FROM experiments").fetchall()
    except sqlite3.Error as exc:
        say = "%s cannot be read (%s); experiments are then found with --dir; delete it to begin a new one"
        get_logger(__name__).warning(say, path, exc)
        return []
    return [
        IndexLine(record=Path(record), started=started, plan=_digest(plan), stamp=stamp or "", digest=_digest(digest))
        for record, started, plan, stamp, digest in rows
    ]


def _write(workspace: Path, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
    try:
        make_folder(workspace)
        with _open_index(workspace / INDEX_FILE, write=True) as db, db:
            db.execute(SCHEMA)
            db.executemany(statement, rows)
    except (OSError, sqlite3.Error) as exc:
        get_logger(__name__).debug("%s is not kept up to date: %s", workspace / INDEX_FILE, exc)


@contextmanager
def _open_index(path: Path, *, write: bool) -> Iterator[sqlite3.Connection]:
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


# What people and agents have to say of an experiment, beside what the machine recorded.
#
# In: a record's path and a remark. Out: lines in `<experiment>.notes.jsonl` beside the record, which is not touched.
# Lines are only ever added. Each says of which result it speaks: when the experiment is run anew with another
# result, the remark stays on file and no longer counts.


NOTES_FILE = "notes.jsonl"
NoteKind = Literal["invalid", "valid", "conclusion"]
KINDS = ("invalid", "valid", "conclusion")


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One remark."""

    kind: NoteKind
    text: str
    by: str = ""
    ts: str = ""
    about: str = ""
    """Which result it speaks of (`Digest.result`); empty for an experiment that had none yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """All remarks on one experiment as it is now."""

    current: list[Note] = field(default_factory=list)
    earlier: int = 0
    """Remarks on a result that has been replaced since."""
    problem: str | None = None

    @property
    def why_invalid(self) -> str | None:
        """Why it does not count; None for an experiment that does."""
        # The last word counts: `valid` (`--undo`) takes back the `invalid` before it.
        last = next((note for note in reversed(self.current) if note.kind != "conclusion"), None)
        return last.text if last and last.kind == "invalid" else None

    @property
    def conclusions(self) -> list[Note]:
        return [note for note in self.current if note.kind == "conclusion"]


NO_NOTES = Notes()


def notes_path(record: Path) -> Path:
    return Path(_notes_name(record))


def _notes_name(record: Path) -> str:
    return str(record).removesuffix(EXPERIMENT_RESULT_FILE) + NOTES_FILE


def add_note(record: Path, kind: NoteKind, text: str, *, about: str) -> Note:
    """Write a remark on the result `about` of the experiment whose record is, or will be, at `record`."""
    if not text.strip() and kind != "valid":
        raise EvsysError("say something: the text is empty")
    moment = datetime.now(UTC).isoformat(timespec="seconds")
    note = Note(kind=kind, text=text.strip(), by=_user(), ts=moment, about=about)
    path = notes_path(record)
    line = redact(json.dumps(asdict(note), ensure_ascii=False))
    try:
        append_durably(path, line)
    except OSError as exc:
        raise EvsysError(f"the note could not be written to {path}: {exc.strerror}") from exc
    return note


def read_notes(record: Path, *, about: str) -> Notes:
    """The remarks on an experiment, those on another result than `about` only counted; a line that is no remark is
    reported and left out."""
    if not os.path.exists(_notes_name(record)):  # of hundreds of records, few have notes: no Path is made for the rest
        return NO_NOTES
    try:
        lines = notes_path(record).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as exc:
        return Notes(problem=f"{notes_path(record)} cannot be read: {exc.strerror}")
    parsed = [_parse_note(line) for line in lines if line.strip()]
    found = [note for note in parsed if note is not None]
    broken = len(parsed) - len(found)
    current = [note for note in found if note.about == about]
    problem = f"{notes_path(record)}: {broken} of {len(parsed)} lines cannot be read" if broken else None
    return Notes(current=current, earlier=len(found) - len(current), problem=problem)


def _parse_note(line: str) -> Note | None:
    try:
        found = Note(**json.loads(line))
    except (ValueError, TypeError):
        return None
    return found if found.kind in KINDS and isinstance(found.text, str) else None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container whose user has no name
        return ""
