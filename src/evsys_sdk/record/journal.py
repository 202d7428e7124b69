"""The journal of an experiment, event by event: what an interrupted run resumes from.

In: events of runs, each under a key that makes writing it twice the same as writing it once; rollouts of evaluations,
one by one as they end. Out: the same events, in order; the rollouts that an earlier, interrupted process left, so that
they are not made again. One SQLite file per experiment, in WAL mode: a kill leaves every event whole or absent. Nothing
is erased: what a resumed run does anew is marked as superseded.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evsys_sdk.errors import EvsysError, JournalDamaged, RecordLost, shorten
from evsys_sdk.protocols import MACHINE_FAILURES, EvalResult, Rollout
from evsys_sdk.record.models import from_data, rollout_from_data, rollout_to_data, to_data
from evsys_sdk.redaction import redact, redact_values

# `one_event` covers only what counts (superseded = 0): a step that is done again is noted under the same key, beside
# the superseded one. Reads by run, attempt, kind and key use it too.
SCHEMA = """
CREATE TABLE IF NOT EXISTS attempts (
    run TEXT NOT NULL, attempt INTEGER NOT NULL, fingerprint TEXT NOT NULL, PRIMARY KEY (run, attempt));
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, run TEXT NOT NULL, attempt INTEGER NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL,
    at INTEGER NOT NULL, data TEXT NOT NULL, superseded INTEGER NOT NULL DEFAULT 0);
CREATE UNIQUE INDEX IF NOT EXISTS one_event ON events (run, attempt, kind, key) WHERE superseded = 0;
"""

EXPERIMENT = ""
"""The run under which the experiment itself has its line."""
ROLLOUT = "rollout"
"""The kind of event that there are thousands of."""
PAYMENT = "payment"
"""Dollars that training paid a service for one call."""
IDENTITY = "run"
"""The kind of event by which a run begins; its key is the run's identity."""
REUSED = "reused"
"""The kind of event that says where a run's other events were copied from."""
TASKS = "tasks"
"""What the tasks of one benchmark asked and expected, by task id; the key is `split/name`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEvent:
    """One thing that happened."""

    kind: str
    key: str
    at: int
    """The run's step at which it happened."""
    data: dict[str, Any]


class Journal:
    """The events of one experiment; any thread may write."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()
        with self._error_boundary():
            # isolation_level=None: every statement commits by itself, and Python opens no transaction behind our back.
            self._db = connect(str(path), isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(SCHEMA)

    def begin(self, run: str, fingerprint: str) -> RunJournal:
        """A new attempt at `run`; the events of earlier ones stay, and are not its own."""
        with self._error_boundary(), self._lock:
            self._db.execute(
                "INSERT INTO attempts SELECT ?, coalesce(max(attempt), 0) + 1, ? FROM attempts WHERE run = ?",
                (run, fingerprint, run),
            )
        last = self.latest(run)
        assert last is not None
        return last

    def copy(self, source: RunJournal, run: str, fingerprint: str, *, note: JournalEvent) -> RunJournal:
        """All that counts of an attempt in another journal as a new attempt at `run`, with a note that it is a copy;
        whole or not at all."""
        columns = "kind, key, at, data"
        query = f"SELECT {columns} FROM events WHERE run = ? AND attempt = ? AND superseded = 0 ORDER BY id"
        rows = source.journal.read(query, (source.run, source.attempt))
        rows.append((note.kind, note.key, note.at, json.dumps(note.data)))
        with self._error_boundary(), self._lock, self._db:
            self._db.execute("BEGIN")
            [(last,)] = self._db.execute("SELECT coalesce(max(attempt), 0) FROM attempts WHERE run = ?", (run,))
            self._db.execute("INSERT INTO attempts VALUES (?, ?, ?)", (run, last + 1, fingerprint))
            insert = f"INSERT INTO events (run, attempt, {columns}) VALUES (?, ?, ?, ?, ?, ?)"
            self._db.executemany(insert, [(run, last + 1, *row) for row in rows])
        return RunJournal(self, run, last + 1)

    def unfinished(self, run: str, fingerprint: str) -> RunJournal | None:
        """The last attempt at `run`, if it was the same run and did not end."""
        last = self.latest(run, fingerprint)
        return None if last is None or last.completed else last

    def latest(self, run: str, fingerprint: str | None = None) -> RunJournal | None:
        """The last attempt at `run`; None if there is none, or if it was one with another fingerprint."""
        query = "SELECT attempt, fingerprint FROM attempts WHERE run = ? ORDER BY attempt DESC LIMIT 1"
        rows = self.read(query, (run,))
        if not rows or fingerprint not in (None, rows[0][1]):
            return None
        return RunJournal(self, run, rows[0][0])

    @property
    def has_results(self) -> bool:
        """Whether any run has trained a step or tried a task."""
        query = f"SELECT 1 FROM events WHERE kind IN ('step', 'eval', 'final_eval', '{ROLLOUT}') LIMIT 1"
        return bool(self.read(query, ()))

    def check(self) -> None:
        """JournalDamaged when the file is damaged."""
        # Not `integrity_check`, which also compares every index with its table; (1) ends at the first fault.
        [(found,)] = self.read("PRAGMA quick_check(1)", ())
        if found != "ok":
            raise JournalDamaged(f"the experiment's journal {self.path} is damaged: {found}")
        with self._error_boundary(), self._lock:
            for is_valid, data in self._db.execute("SELECT json_valid(data), data FROM events"):
                if is_valid:
                    continue
                try:  # SQLite refuses a NaN, which Python writes and reads
                    json.loads(data)
                except ValueError as exc:
                    say = f"the experiment's journal {self.path} is damaged: an event in it cannot be read"
                    raise JournalDamaged(f"{say} ({exc})") from exc

    def sync(self) -> None:
        """Make every event written so far survive a crash of the machine. SQLite itself (`synchronous = NORMAL`) only
        does so when it moves the write-ahead log into the database."""
        with self._lock:
            for file in (self.path.with_name(f"{self.path.name}-wal"), self.path):
                try:
                    descriptor = os.open(file, os.O_RDONLY)
                except FileNotFoundError:
                    continue
                try:
                    os.fsync(descriptor)
                except OSError as exc:
                    say = f"the experiment's journal {self.path} cannot be written to: {exc}"
                    raise RecordLost(f"{say}; the same command resumes from what there is") from exc
                finally:
                    os.close(descriptor)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def _error_boundary(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            raise self._error(exc) from exc

    def _error(self, exc: sqlite3.Error) -> EvsysError:
        """What it means: a full disk, a file that is no journal (any more), or something else."""
        name = getattr(exc, "sqlite_errorname", "")
        if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
            say = f"the experiment's journal {self.path} cannot be written to: {exc}"
            return RecordLost(f"{say}; the same command resumes from what there is")
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            return JournalDamaged(f"the experiment's journal {self.path} cannot be used: {exc}")
        if "decode to UTF-8" in str(exc):
            return JournalDamaged(f"the experiment's journal {self.path} is damaged: {shorten(str(exc))}")
        return EvsysError(f"the experiment's journal {self.path} cannot be used: {exc}")

    def write(self, statement: str, values: tuple[object, ...]) -> None:
        with self._error_boundary(), self._lock:
            self._db.execute(statement, values)

    def read(self, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with self._error_boundary(), self._lock:
            return self._db.execute(query, values).fetchall()


class RunJournal:
    """The events of one attempt at one run, or at the experiment as a whole."""

    def __init__(self, journal: Journal, run: str, attempt: int):
        self.journal, self.run, self.attempt = journal, run, attempt

    def add(self, kind: str, data: dict[str, Any], *, at: int, key: str = "") -> None:
        """Note an event; one that is there already stays as it is."""
        text = json.dumps(data, default=_plain)
        # What a model wrote is searched for known secrets by value only: a resumed evaluation reads it back.
        text = redact_values(text) if kind in (ROLLOUT, TASKS) else redact(text)
        self.journal.write(
            "INSERT OR IGNORE INTO events (run, attempt, kind, key, at, data) VALUES (?, ?, ?, ?, ?, ?)",
            (self.run, self.attempt, kind, key or str(at), at, text),
        )

    def events(self, *, after: int = -1, upto: int) -> list[JournalEvent]:
        """What happened later than step `after` and not later than `upto`, in order; rollouts are asked for apart."""
        rows = self.journal.read(
            "SELECT kind, key, at, data FROM events WHERE run = ? AND attempt = ? AND superseded = 0"
            f" AND kind != '{ROLLOUT}' AND at > ? AND at <= ? ORDER BY id",
            (self.run, self.attempt, after, upto),
        )
        return [JournalEvent(kind=kind, key=key, at=at, data=json.loads(data)) for kind, key, at, data in rows]

    def rollouts(self, prefix: str) -> dict[str, dict[str, object]]:
        """The rollouts whose key begins with `prefix`, by the rest of their keys."""
        # A range of keys, not LIKE: names may hold `%` and `_`, and the range is read off the index. U+10FFFF sorts
        # behind every character of a key.
        rows = self.journal.read(
            "SELECT substr(key, ?), data FROM events WHERE run = ? AND attempt = ? AND superseded = 0"
            f" AND kind = '{ROLLOUT}' AND key >= ? AND key < ? ORDER BY id",
            (len(prefix) + 1, self.run, self.attempt, prefix, prefix + "\U0010ffff"),
        )
        return {rest: json.loads(data) for rest, data in rows}

    @property
    def has_rollouts(self) -> bool:
        """Whether the attempt has tried itself on a benchmark."""
        query = f"SELECT 1 FROM events WHERE run = ? AND attempt = ? AND superseded = 0 AND kind = '{ROLLOUT}' LIMIT 1"
        return bool(self.journal.read(query, (self.run, self.attempt)))

    def supersede(self, *, after: int) -> None:
        """What happened later than step `after` is going to happen anew."""
        self.journal.write(
            "UPDATE events SET superseded = 1 WHERE run = ? AND attempt = ? AND at > ?",
            (self.run, self.attempt, after),
        )

    def evals(self) -> list[JournalEvent]:
        """The evaluations of the run, in the order in which they ended."""
        return [event for event in self.events(upto=2**62) if event.kind in ("eval", "final_eval")]

    @property
    def completed(self) -> bool:
        rows = self.journal.read(
            "SELECT data FROM events WHERE run = ? AND attempt = ? AND kind = 'end' AND superseded = 0",
            (self.run, self.attempt),
        )
        return any(json.loads(data)["status"] == "completed" for (data,) in rows)


def connect(database: str, **how: Any) -> sqlite3.Connection:
    """A connection for any thread, which can do what `number_in` needs."""
    db = sqlite3.connect(database, check_same_thread=False, **how)
    db.create_function("number_in", 2, _number_in, deterministic=True)
    return db


def number_in(path: str) -> str:
    """SQL for the number at a dotted path in an event's data, NULL where there is none."""
    # SQLite is fast, and cannot read an event with a NaN somewhere in it.
    return f"CASE WHEN json_valid(data) THEN json_extract(data, '$.{path}') ELSE number_in(data, '{path}') END"


def _number_in(data: str, path: str) -> float | None:
    found = json.loads(data)
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, int | float) else None


def _plain(value: Any) -> Any:
    """A number of numpy or torch as a number; anything else that JSON has no word for as text."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


_BETWEEN = "\t"


class JournalledRollouts:
    """`protocols.FinishedRollouts` of the evaluation that `name` tells apart from all others of the run."""

    def __init__(self, journal: RunJournal, name: str, *, at: int = 0):
        self.name = name
        self._journal, self._at = journal, at
        found = journal.rollouts(name + _BETWEEN)
        self._done = {key: rollout_from_data(data) for key, data in found.items()}

    def find(self, task_id: str, sample: int) -> Rollout | None:
        return self._done.get(_key(task_id, sample))

    def add(self, task_id: str, sample: int, rollout: Rollout) -> None:
        if rollout.status not in MACHINE_FAILURES:  # perhaps the server is back
            self.keep(task_id, sample, rollout)

    def keep(self, task_id: str, sample: int, rollout: Rollout) -> None:
        """Add a rollout of an evaluation that is over: it counts, also where the machine failed."""
        key = _key(task_id, sample)
        if key in self._done:
            return
        self._done[key] = rollout
        self._journal.add(ROLLOUT, rollout_to_data(rollout), at=self._at, key=self.name + _BETWEEN + key)


def _key(task_id: str, sample: int) -> str:
    # An id from a dataset may hold half a surrogate pair, which SQLite does not take.
    return f"{task_id.encode(errors='backslashreplace').decode()}{_BETWEEN}{sample}"


def to_data_without(result: EvalResult, kept: JournalledRollouts) -> dict[str, object]:
    """The evaluation as plain data that points to its rollouts, which the journal has."""
    order, seen = [], Counter[str]()
    for rollout in result.rollouts:
        # By place: the n-th rollout of a task is its sample n, under which `add` has kept it already, unless the
        # machine failed it.
        sample = seen[rollout.task_id]
        seen[rollout.task_id] += 1
        kept.keep(rollout.task_id, sample, rollout)
        order.append([rollout.task_id, sample])
    return to_data(replace(result, rollouts=[])) | {"kept": kept.name, "order": order}


def read_eval(data: dict[str, Any], journal: RunJournal) -> EvalResult:
    """What the journal keeps as an evaluation, with its rollouts."""
    fields = {key: value for key, value in data.items() if key not in ("kept", "order")}
    if "kept" not in data:
        return from_data(fields)
    kept = JournalledRollouts(journal, data["kept"])
    found = [kept.find(task_id, sample) for task_id, sample in data["order"]]
    return replace(from_data(fields), rollouts=[rollout for rollout in found if rollout is not None])
