"""The process of an experiment: what was launched, what says so on disk, and who asked it to stop.

In: an experiment's record, or where it will be. Out: the `ExperimentProcess` that lies beside it, written by the
process that has the experiment; whether that process has it still is for the lock to say, which the kernel keeps.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path

from evsys_sdk.constants import LAUNCH_FILE, LOG_FILE, STOP_FILE
from evsys_sdk.errors import EvsysError
from evsys_sdk.files import read_object, write_json
from evsys_sdk.record.layout import REHEARSALS, held_by, is_held, records_in, stem_of

# Which process it is, also after the kernel has given its number to another: a `ProcessId` has the boot and the start
# time besides, and a signal reaches that process or none.

PROC = Path("/proc")
STATE, START_TICKS = 0, 19
"""Places in `/proc/<pid>/stat` after the command's name, which is in brackets and may hold anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """One process of one machine."""

    pid: int
    host: str
    born: str | None
    """When it began, as the system tells it: a pid is given again, this is not. None where the system does not tell."""

    def __str__(self) -> str:
        """As a lock names it."""
        return f"process {self.pid} on {self.host}"

    @property
    def is_here(self) -> bool:
        """Whether it is one of this machine."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether this very process runs here."""
        return self.is_here and self.born is not None and process_start(self.pid) == self.born

    def send(self, number: signal.Signals) -> bool:
        """Signal this very process; False when it is gone."""
        # Between this look and the signal the pid could go to another process; the kernel hands pids out in a circle,
        # so that takes it a whole round.
        if not self.is_alive:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError as exc:
            raise EvsysError(f"{self} belongs to another user: {exc.strerror}") from exc
        return True


def this_process() -> ProcessId:
    return ProcessId(pid=os.getpid(), host=socket.gethostname(), born=process_start(os.getpid()))


def process_start(pid: int) -> str | None:
    """What tells a live process from another with the same number; None for one that has ended.

    Not psutil's `create_time`: that is wall-clock time on Linux and moves when the clock is set."""
    try:
        if sys.platform == "linux":
            fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
            boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
            # Z and X: dead, though its parent has not asked for it yet.
            return None if fields[STATE] in "ZX" else f"{boot}/{fields[START_TICKS]}"
        done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True)
        return done.stdout.strip() or None
    except OSError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentProcess:
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


def resume_command(command: Iterable[str]) -> str:
    """The command that resumes an experiment: the one that launched it without its `--fresh`, however short that was
    typed."""
    return shlex.join(word for word in command if not ("--fresh".startswith(word) and len(word) > len("--f")))


def write_launch(launch: ExperimentProcess) -> None:
    write_json(beside(Path(launch.record), LAUNCH_FILE), asdict(launch))


def read_launch(record: Path) -> ExperimentProcess | None:
    """What the last launch left; None where none did, or another version of the SDK left something else."""
    found = read_object(beside(record, LAUNCH_FILE)) or {}
    known = {each.name for each in fields(ExperimentProcess)}
    try:
        launch = ExperimentProcess(**{key: value for key, value in found.items() if key in known})
        return launch if launch.started_at else None
    except (TypeError, ValueError):
        return None


def running_launch(record: Path) -> ExperimentProcess | None:
    """The launch whose process has the experiment now. None while no process has it, or one that has not said so: the
    lock names its holder, and what an earlier process left is not taken for the holder's."""
    launch = read_launch(record)
    lock = lock_of(record)
    return launch if launch and is_held(lock) and held_by(lock) == str(launch.process) else None


def asked_to_stop(launch: ExperimentProcess, record: Path) -> str | None:
    """When this very process was asked to stop."""
    found = read_object(beside(record, STOP_FILE)) or {}
    return found.get("asked") if (found.get("pid"), found.get("born")) == (launch.pid, launch.born) else None


def note_stop(launch: ExperimentProcess, record: Path) -> None:
    """This very process has been asked to stop."""
    write_json(beside(record, STOP_FILE), {"pid": launch.pid, "born": launch.born, "asked": now_text()})
