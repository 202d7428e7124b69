"""What happened in an experiment, event by event: the truth from which an interrupted run is taken up again.

In: events of runs, each under a key that makes writing it twice the same as writing it once. Out: the same events, in
order. One SQLite file per experiment, in WAL mode: a kill leaves every event whole or absent. Nothing is erased:
what a resumed run does anew is marked as superseded.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evsys_sdk.errors import EvsysError, JournalDamaged, RecordLost, shorten
from evsys_sdk.redaction import redact, redact_values

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
TASKS = "tasks"
"""What the tasks of one benchmark asked and expected, by task id; the key is `split/name`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
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
        with self._blamed():
            self._db = connect(str(path), isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(SCHEMA)

    def begin(self, run: str, fingerprint: str) -> RunJournal:
        """A new attempt at `run`; the events of earlier ones stay, and are not its own."""
        with self._blamed(), self._lock:
            self._db.execute(
                "INSERT INTO attempts SELECT ?, coalesce(max(attempt), 0) + 1, ? FROM attempts WHERE run = ?",
                (run, fingerprint, run),
            )
        last = self.latest(run)
        assert last is not None
        return last

    def copy(self, source: RunJournal, run: str, fingerprint: str, *, note: Event) -> RunJournal:
        """All that counts of an attempt in another journal as a new attempt at `run`, with a note that it is a copy;
        whole or not at all."""
        columns = "kind, key, at, data"
        query = f"SELECT {columns} FROM events WHERE run = ? AND attempt = ? AND superseded = 0 ORDER BY id"
        rows = source.journal.read(query, (source.run, source.attempt))
        rows.append((note.kind, note.key, note.at, json.dumps(note.data)))
        with self._blamed(), self._lock, self._db:
            self._db.execute("BEGIN")
            [(last,)] = self._db.execute("SELECT coalesce(max(attempt), 0) FROM attempts WHERE run = ?", (run,))
            self._db.execute("INSERT INTO attempts VALUES (?, ?, ?)", (run, last + 1, fingerprint))
            insert = f"INSERT INTO events (run, attempt, {columns}) VALUES (?, ?, ?, ?, ?, ?)"
            self._db.executemany(insert, [(run, last + 1, *row) for row in rows])
        return RunJournal(self, run, last + 1)

    def unfinished(self, run: str, fingerprint: str) -> RunJournal | None:
        """The last attempt at `run`, if it was the same run and did not come to its end."""
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
        """EvsysError when the file is damaged."""
        [(found,)] = self.read("PRAGMA quick_check(1)", ())
        if found != "ok":
            raise JournalDamaged(f"the experiment's journal {self.path} is damaged: {found}")
        with self._blamed(), self._lock:
            for is_valid, data in self._db.execute("SELECT json_valid(data), data FROM events"):
                if not is_valid:  # or it holds a NaN, of which SQLite knows nothing
                    self._refuse_other_than_json(data)

    def _refuse_other_than_json(self, data: str) -> None:
        try:
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
    def _blamed(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            raise self._error(exc) from exc

    def _error(self, exc: sqlite3.Error) -> EvsysError:
        """What it means: a full disk, a file that is no journal (any more), or something else."""
        name = getattr(exc, "sqlite_errorname", "")
        if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
            say = f"the experiment's journal {self.path} cannot be written to: {exc}"
            return RecordLost(f"{say}; the same command goes on from what there is")
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            return JournalDamaged(f"the experiment's journal {self.path} cannot be used: {exc}")
        if "decode to UTF-8" in str(exc):
            return JournalDamaged(f"the experiment's journal {self.path} is damaged: {shorten(str(exc))}")
        return EvsysError(f"the experiment's journal {self.path} cannot be used: {exc}")

    def write(self, statement: str, values: tuple[Any, ...]) -> None:
        with self._blamed(), self._lock:
            self._db.execute(statement, values)

    def read(self, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with self._blamed(), self._lock:
            return self._db.execute(query, values).fetchall()


class RunJournal:
    """The events of one attempt at one run, or at the experiment as a whole."""

    def __init__(self, journal: Journal, run: str, attempt: int):
        self.journal, self.run, self.attempt = journal, run, attempt

    def add(self, kind: str, data: dict[str, Any], *, at: int, key: str = "") -> None:
        """Note an event; one that is there already stays as it is."""
        self.journal.write(
            "INSERT OR IGNORE INTO events (run, attempt, kind, key, at, data) VALUES (?, ?, ?, ?, ?, ?)",
            (self.run, self.attempt, kind, key or str(at), at, _text_of(kind, data)),
        )

    def events(self, *, after: int = -1, upto: int) -> list[Event]:
        """What happened later than step `after` and not later than `upto`, in order; rollouts are asked for apart."""
        rows = self.journal.read(
            "SELECT kind, key, at, data FROM events WHERE run = ? AND attempt = ? AND superseded = 0"
            f" AND kind != '{ROLLOUT}' AND at > ? AND at <= ? ORDER BY id",
            (self.run, self.attempt, after, upto),
        )
        return [Event(kind=kind, key=key, at=at, data=json.loads(data)) for kind, key, at, data in rows]

    def rollouts(self, prefix: str) -> dict[str, dict[str, Any]]:
        """The rollouts whose key begins with `prefix`, by the rest of their keys."""
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

    def evals(self) -> list[Event]:
        """The evaluations of the run, in the order in which they ended."""
        return [event for event in self.events(upto=2**62) if event.kind in ("eval", "final_eval")]

    @property
    def completed(self) -> bool:
        rows = self.journal.read(
            "SELECT data FROM events WHERE run = ? AND attempt = ? AND kind = 'end' AND superseded = 0",
            (self.run, self.attempt),
        )
        return any(json.loads(data)["status"] == "completed" for (data,) in rows)


def _text_of(kind: str, data: dict[str, Any]) -> str:
    """An event as JSON without secrets. What a model wrote is searched for known values only: it is taken up again."""
    text = json.dumps(data, default=_plain)
    return redact_values(text) if kind in (ROLLOUT, TASKS) else redact(text)


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
