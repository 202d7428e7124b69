"""One run's directory: whose it is, and what lies in it.

In: a path. Out: a locked directory. The lock is the kernel's (flock): it goes with the process that held it, so a dead
process never blocks the next. An earlier attempt is set aside, not deleted.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from evsys_sdk.atomic import make_folder
from evsys_sdk.errors import EvsysError, RunLocked

LOCK_FILE = ".lock"
OWNER_FILE = ".owner"
"""Names the run that the directory belongs to, for good."""
ATTEMPTS = "attempts"
LOOKS, LOOK_SECONDS = 3, 0.02
LONGEST_NAME = 400
"""Of a process, as a lock names it."""


@contextmanager
def open_run_dir(path: Path) -> Iterator[Path]:
    """Make and hold `path` for one run; RunLocked when another live process (or thread) has it."""
    try:
        make_folder(path)
    except OSError as exc:
        raise EvsysError(f"cannot use run directory {path}: {exc.strerror}") from exc
    with hold(path / LOCK_FILE, f"run directory {path}"):
        sweep([part for part in path.rglob(".*.part") if ATTEMPTS not in part.relative_to(path).parts])
        yield path


def sweep(parts: Iterable[Path]) -> None:
    """Remove half-written files and folders. Who calls is the only one to write there, so their writer was killed."""
    for part in parts:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            with suppress(OSError):
                part.unlink()


@contextmanager
def hold(lock: Path, what: str) -> Iterator[None]:
    """Hold the file `lock` for this process, or say who does."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as exc:
        raise EvsysError(f"cannot use {what}: {exc.strerror}") from exc
    try:
        try:
            _lock(descriptor)
        except BlockingIOError:
            owner = os.pread(descriptor, LONGEST_NAME, 0).decode(errors="replace").strip() or "another process"
            raise RunLocked(f"{what} is in use by {owner}; wait for it or choose another output_dir") from None
        with suppress(OSError):  # on a full disk the lock holds all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Take the lock, or BlockingIOError; somebody who only looks (`is_held`) has it for a moment and is waited for."""
    for _ in range(LOOKS):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOOK_SECONDS)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_held(lock: Path) -> bool:
    """Whether a live process holds this lock; asking changes nothing."""
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def held_by(lock: Path) -> str | None:
    """The process that holds this lock, or held it last, as `process 4711 on a-host`; None where none is named."""
    try:
        with open(lock, errors="replace") as handle:
            return handle.read(LONGEST_NAME).strip() or None
    except OSError:
        return None


def set_aside(path: Path, *, keep: Iterable[str] = ()) -> Path | None:
    """Move what an earlier attempt left, but for the entries to `keep`, into `attempts/<number>`; returns that."""
    stay = {LOCK_FILE, OWNER_FILE, ATTEMPTS, *keep}
    earlier = [entry for entry in path.iterdir() if entry.name not in stay]
    return move_aside({entry: entry.name for entry in earlier}, path / ATTEMPTS)


def move_aside(earlier: Mapping[Path, str], attempts: Path) -> Path | None:
    """Move these, each under its name, into a new folder `<number>` in `attempts`; returns that."""
    if not earlier:
        return None
    attempts.mkdir(exist_ok=True)
    numbers = [int(entry.name) for entry in attempts.iterdir() if entry.name.isdigit()]
    target = attempts / str(max(numbers, default=0) + 1)
    target.mkdir()
    for entry, name in earlier.items():
        shutil.move(str(entry), target / name)
    return target
