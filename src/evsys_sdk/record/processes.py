"""Which process it is, also after its number has been given to another.

In: a process id. Out: a `ProcessId` that no later process shares, whether that one still lives, and signals that
reach it or nobody.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from evsys_sdk.errors import EvsysError

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
        return self.is_here and self.born is not None and birth_of(self.pid) == self.born

    def send(self, number: signal.Signals) -> bool:
        """Signal this very process; False when it is gone."""
        if not self.is_alive:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError as exc:
            raise EvsysError(f"{self} belongs to somebody else: {exc.strerror}") from exc
        return True


def this_process() -> ProcessId:
    return ProcessId(pid=os.getpid(), host=socket.gethostname(), born=birth_of(os.getpid()))


def birth_of(pid: int) -> str | None:
    """What tells a live process from another with the same number; None for one that has ended."""
    return _birth_in_proc(pid) if sys.platform == "linux" else _birth_by_ps(pid)


def _birth_in_proc(pid: int) -> str | None:
    try:
        told = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if told[STATE] in "ZX" else f"{boot}/{told[START_TICKS]}"


def _birth_by_ps(pid: int) -> str | None:
    try:
        done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None
