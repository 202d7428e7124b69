"""What people and agents have to say of an experiment, beside what the machine recorded.

In: a record's path and a remark. Out: lines in `<experiment>.notes.jsonl` beside the record, which is not touched.
Lines are only ever added. Each says of which result it speaks: when the experiment is run anew and comes to something
else, the remark stays on file and no longer counts.
"""

from __future__ import annotations

import getpass
import json
import os
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from evsys_sdk.constants import EXPERIMENT_RESULT_FILE
from evsys_sdk.errors import EvsysError
from evsys_sdk.redaction import redact

NOTES_FILE = "notes.jsonl"
Kind = Literal["invalid", "valid", "conclusion"]
KINDS = ("invalid", "valid", "conclusion")


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One remark."""

    kind: Kind
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


def add_note(record: Path, kind: Kind, text: str, *, about: str) -> Note:
    """Write a remark on the result `about` of the experiment whose record is, or will be, at `record`."""
    if not text.strip() and kind != "valid":
        raise EvsysError("say something: the text is empty")
    moment = datetime.now(UTC).isoformat(timespec="seconds")
    note = Note(kind=kind, text=text.strip(), by=_user(), ts=moment, about=about)
    path = notes_path(record)
    line = redact(json.dumps(asdict(note), ensure_ascii=False)) + "\n"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        with open(descriptor, "r+b") as file:
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            file.write(b"\n" * torn + line.encode(errors="backslashreplace"))
            file.flush()
            os.fsync(descriptor)
    except OSError as exc:
        raise EvsysError(f"the note could not be written to {path}: {exc.strerror}") from exc
    return note


def read_notes(record: Path, *, about: str) -> Notes:
    """The remarks on an experiment, those on another result than `about` only counted; a line that is no remark is
    told of and left out."""
    if not os.path.exists(_notes_name(record)):  # of hundreds of records, few have notes: no Path is made for the rest
        return NO_NOTES
    try:
        lines = notes_path(record).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as exc:
        return Notes(problem=f"{notes_path(record)} cannot be read: {exc.strerror}")
    parsed = [_parsed(line) for line in lines if line.strip()]
    found = [note for note in parsed if note is not None]
    broken = len(parsed) - len(found)
    current = [note for note in found if note.about == about]
    problem = f"{notes_path(record)}: {broken} of {len(parsed)} lines cannot be read" if broken else None
    return Notes(current=current, earlier=len(found) - len(current), problem=problem)


def _parsed(line: str) -> Note | None:
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
