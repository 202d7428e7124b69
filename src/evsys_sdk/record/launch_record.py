"""The process of an experiment: what was launched, what says so on disk, and who asked it to stop.

In: an experiment's record, or where it will be. Out: the `Launch` that lies beside it, written by the process that has
the experiment; whether that process has it still is for the lock to say, which the kernel keeps.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path

from evsys_sdk.atomic import read_object, write_json
from evsys_sdk.constants import LAUNCH_FILE, LOG_FILE, STOP_FILE
from evsys_sdk.record.history import REHEARSALS, records_in, stem_of
from evsys_sdk.record.processes import ProcessId
from evsys_sdk.record.run_dir import held_by, is_held


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """An experiment in a process."""

    experiment: str
    pid: int
    host: str
    born: str | None
    """Tells the process from a later one with the same pid."""
    command: list[str]
    cwd: str
    config: str
    """The file it was read from, or what stands for one in messages."""
    output_dir: str
    record: str
    """Where its result will be."""
    log: str | None
    """What the process writes goes there; None for one that was started from Python."""
    started: str
    detached: bool = False
    stoppable: bool = True
    """Whether it heeds signals: an experiment on a thread of a Python program does not."""
    n_runs: int | None = None
    """None where a search decides how many."""
    budget: dict[str, float] = field(default_factory=dict)
    """The limits it runs under."""
    evsys: str = ""

    @property
    def process(self) -> ProcessId:
        return ProcessId(pid=self.pid, host=self.host, born=self.born)

    @property
    def started_at(self) -> float:
        """In seconds since the epoch."""
        return datetime.fromisoformat(self.started).timestamp()


def now_text() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def beside(record: Path, kind: str) -> Path:
    """The file of this kind about the process; hidden, as the lock is: it is no part of the record."""
    return record.with_name(f".{stem_of(record)}.{kind}")


def lock_of(record: Path) -> Path:
    return beside(record, "lock")


def log_of(record: Path) -> Path:
    return record.with_name(f"{stem_of(record)}.{LOG_FILE}")


def reference_of(name: str, record: Path) -> str:
    """How commands name the experiment; a rehearsal, which no history lists, by its place."""
    if record.parent.name != REHEARSALS:
        return shlex.quote(name)
    alone = len(records_in(record.parent)) == 1
    return shlex.quote(os.path.relpath(record.parent if alone else record))


def write_launch(launch: Launch) -> None:
    write_json(beside(Path(launch.record), LAUNCH_FILE), asdict(launch))


def read_launch(record: Path) -> Launch | None:
    """What the last launch left; None where none did, or another version of the SDK left something else."""
    found = read_object(beside(record, LAUNCH_FILE)) or {}
    known = {each.name for each in fields(Launch)}
    try:
        launch = Launch(**{key: value for key, value in found.items() if key in known})
        return launch if launch.started_at else None
    except (TypeError, ValueError):
        return None


def running_launch(record: Path) -> Launch | None:
    """The launch whose process has the experiment now. None while nobody has it, or one that has not said so: the lock
    names its holder, and what an earlier process left is not taken for the holder's."""
    launch = read_launch(record)
    lock = lock_of(record)
    return launch if launch and is_held(lock) and held_by(lock) == str(launch.process) else None


def asked_to_stop(launch: Launch, record: Path) -> str | None:
    """When somebody asked this very process to stop."""
    found = read_object(beside(record, STOP_FILE)) or {}
    return found.get("asked") if (found.get("pid"), found.get("born")) == (launch.pid, launch.born) else None


def note_stop(launch: Launch, record: Path) -> None:
    """This very process has been asked to stop."""
    write_json(beside(record, STOP_FILE), {"pid": launch.pid, "born": launch.born, "asked": now_text()})
