"""The experiments that were run here, newest first.

In: a workspace, whose index names the records, or folders to look through. Out: a `History` of `Entry`s, each with its
state, its digest and what people said of it. Nothing here raises for a record that is torn or gone: a torn one is
listed as `unreadable`, with the reason.
An experiment without a result is `running` while a process holds its lock, and `interrupted` when none does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evsys_sdk.constants import EXPERIMENT_RESULT_FILE, JOURNAL_FILE, RUN_RESULT_FILE
from evsys_sdk.record.digest import Digest, digest_of
from evsys_sdk.record.index import Known, note_results, read_index, stamp_of, stat_of
from evsys_sdk.record.notes import NO_NOTES, Notes, read_notes
from evsys_sdk.record.run_dir import is_held

STATUSES = ("completed", "partial", "failed", "cancelled", "running", "interrupted", "invalid", "unreadable")
DEFAULT_OUTPUTS = "outputs"
"""Where experiments write unless they say otherwise; looked through besides the index."""
REHEARSALS = "dry"
DEEPEST = 6
_SUFFIX = f".{EXPERIMENT_RESULT_FILE}"
_INSIDE_RUNS = frozenset(["attempts", "logs", "weights", "__pycache__", "node_modules"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One experiment, as far as the disk tells."""

    digest: Digest
    record: Path
    """Where its result is, or will be."""
    state: str
    """What the machine knows: completed, partial, failed, cancelled, running, interrupted, unreadable."""
    when: float = 0.0
    """When it ended, or began if it has not, in seconds since the epoch."""
    notes: Notes = NO_NOTES
    problem: str | None = None
    """Why the record could not be read."""

    @property
    def name(self) -> str:
        return self.digest.name

    @property
    def status(self) -> str:
        """The state, or `invalid` for an experiment that was taken out of the count."""
        return self.state if self.notes.why_invalid is None else "invalid"

    @property
    def counts(self) -> bool:
        """Whether its scores may be built on."""
        return self.state in ("completed", "partial") and self.notes.why_invalid is None

    @property
    def date(self) -> str:
        return datetime.fromtimestamp(self.when, UTC).strftime("%Y-%m-%d %H:%M") if self.when else "?"

    @property
    def journal(self) -> Path:
        return self.record.with_name(stem_of(self.record) + f".{JOURNAL_FILE}")


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Experiments, newest first, and what could not be read."""

    entries: list[Entry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def stem_of(record: Path) -> str:
    """The experiment's name as its files have it."""
    return record.name.removesuffix(_SUFFIX)


def read_history(workspace: Path | None, folders: Sequence[Path] = (), *, outputs: Path | None = None) -> History:
    """What the workspace's index names, and what lies in `outputs` itself; given `folders`, what lies in and below
    those instead."""
    indexed = {one.record: one for one in read_index(workspace)} if workspace is not None else {}
    places = [record for folder in folders for record in records_below(folder)]
    places += records_in(outputs) if outputs is not None and not folders else []
    known = {} if folders else dict(indexed)
    known |= {record: indexed.get(record, Known(record=record)) for record in places}
    entries, read = [], {}
    for one in known.values():
        entry, fresh = _entry(one)
        entries += [entry] if entry is not None else []
        if entry is not None and fresh and entry.problem is None:
            read[entry.record] = entry.digest
    if workspace is not None and not folders and read and workspace.is_dir():  # looking back makes no workspace
        note_results(workspace, read)
    entries.sort(key=lambda entry: (-entry.when, entry.name))
    problems = [text for entry in entries for text in (entry.problem, entry.notes.problem) if text]
    return History(entries=entries, problems=problems)


def read_one(record: Path) -> Entry | None:
    """The experiment with this record (or the journal beside where it would be); None where there is neither."""
    return _entry(Known(record=record.absolute()))[0]


def records_in(folder: Path) -> list[Path]:
    """Where the experiments whose files lie in a folder have, or will have, their records."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    stems = {name.removesuffix(f".{kind}") for name in names for kind in (JOURNAL_FILE, EXPERIMENT_RESULT_FILE)
             if name.endswith(f".{kind}")}  # fmt: skip
    return [folder.absolute() / f"{stem}{_SUFFIX}" for stem in sorted(stems)]


def records_below(folder: Path, depth: int = DEEPEST) -> Iterator[Path]:
    """The same for a folder and those in it; runs, rehearsals and hidden folders are not looked into."""
    yield from records_in(folder)
    try:
        inner = sorted(entry.path for entry in os.scandir(folder) if _may_hold_records(entry))
    except OSError:
        return
    for path in inner if depth else ():
        yield from records_below(Path(path), depth - 1)


def _may_hold_records(entry: os.DirEntry[str]) -> bool:
    if entry.name.startswith(".") or entry.name in _INSIDE_RUNS or entry.name == REHEARSALS:
        return False
    return entry.is_dir(follow_symlinks=False) and not os.path.exists(os.path.join(entry.path, RUN_RESULT_FILE))


def _entry(known: Known) -> tuple[Entry | None, bool]:
    """The experiment, if there is anything of it on disk, and whether its record had to be read."""
    record = known.record
    found = stat_of(record)
    held = is_held(record.parent / f".{stem_of(record)}.lock")
    if found is None:
        return _without_result(known, held=held), False
    fresh, problem, digest = False, None, known.digest
    if digest is None or known.stamp != stamp_of(found):
        fresh = True
        digest, problem = _read(record)
    ended = _seconds(digest.ended) or found.st_mtime
    state, when = "unreadable" if problem else digest.status, ended
    if held:
        state, when = "running", known.started or ended
    elif known.started and known.started > found.st_mtime + 1:
        # It was begun again after this result, and that attempt left none.
        state, when = "interrupted", known.started
    notes = read_notes(record, about=digest.result)
    return Entry(digest=digest, record=record, state=state, when=when, problem=problem, notes=notes), fresh


def _without_result(known: Known, *, held: bool) -> Entry | None:
    """An experiment that was begun, if its journal is there."""
    record = known.record
    journal = stat_of(record.with_name(f"{stem_of(record)}.{JOURNAL_FILE}"))
    if journal is None:
        return None
    digest = known.plan or Digest(name=stem_of(record))
    return Entry(
        digest=digest,
        record=record,
        state="running" if held else "interrupted",
        when=known.started or journal.st_mtime,
        notes=read_notes(record, about=digest.result),
    )


def _read(record: Path) -> tuple[Digest, str | None]:
    """What the record says; or a bare digest and the reason."""
    try:
        data = json.loads(record.read_bytes())
        return digest_of(data), None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        return Digest(name=stem_of(record)), f"{record} cannot be read, so nothing of it counts: {_reason(exc)}"


def _reason(exc: BaseException) -> str:
    if isinstance(exc, OSError):
        return exc.strerror or str(exc)
    if isinstance(exc, json.JSONDecodeError | UnicodeDecodeError):
        return f"not whole, valid JSON ({exc})"
    return f"not a record of an experiment ({exc or type(exc).__name__})"


def _seconds(moment: str | None) -> float | None:
    try:
        return datetime.fromisoformat(moment).timestamp() if moment else None
    except (TypeError, ValueError):
        return None


def read_record(entry: Entry) -> dict[str, Any]:
    """The whole record; empty for an experiment without a readable one."""
    try:
        found = json.loads(entry.record.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def newest_by_name(entries: Iterable[Entry]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for entry in entries:  # newest first
        found.setdefault(entry.name, entry)
    return found
