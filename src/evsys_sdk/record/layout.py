"""Where the runs of an experiment lie, and who may write there.

In: a run's id. Out: its directory, claimed for it and locked: named like the run; where another run has that one, such
as one of another experiment in the same folder, `<run>@<experiment>`. No record is replaced by another experiment's,
and an earlier attempt is set aside, not deleted.
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

from evsys_sdk.config.sweep import directory_name
from evsys_sdk.constants import EXPERIMENT_RESULT_FILE, JOURNAL_FILE
from evsys_sdk.errors import EvsysError, RunLocked
from evsys_sdk.files import make_folder, write_text
from evsys_sdk.logs import get_logger
from evsys_sdk.record.models import RunRecord

LOCK_FILE = ".lock"
"""Locked by the kernel (flock): the lock ends with its process, so a dead process never blocks the next."""
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
        for look in range(LOOKS, -1, -1):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if look:  # a process that only looks (`is_held`) has the lock for a moment
                    time.sleep(LOOK_SECONDS)
                    continue
            owner = os.pread(descriptor, LONGEST_NAME, 0).decode(errors="replace").strip() or "another process"
            raise RunLocked(f"{what} is in use by {owner}; wait for it or choose another output_dir") from None
        with suppress(OSError):  # on a full disk the lock holds all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        # The file stays: once it is deleted and made anew, two processes can each hold a lock, on two files of one
        # name.
        os.close(descriptor)


def is_held(lock: Path) -> bool:
    """Whether a live process holds this lock; asking changes nothing."""
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        # Shared, so that two processes that only look are not taken for holders by each other.
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


REHEARSALS = "dry"


_SUFFIX = f".{EXPERIMENT_RESULT_FILE}"


def stem_of(record: Path) -> str:
    """The experiment's name as its files have it."""
    return record.name.removesuffix(_SUFFIX)


def records_in(folder: Path) -> list[Path]:
    """Where the experiments whose files lie in a folder have, or will have, their records."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    stems = {name.removesuffix(f".{kind}") for name in names for kind in (JOURNAL_FILE, EXPERIMENT_RESULT_FILE)
             if name.endswith(f".{kind}")}  # fmt: skip
    return [folder.absolute() / f"{stem}{_SUFFIX}" for stem in sorted(stems)]


class RunFolders:
    """The run directories of one experiment."""

    def __init__(self, output_dir: Path, experiment: str):
        self._folder, self._experiment = output_dir, experiment
        self._said = False

    def of(self, run: str) -> Path:
        """The directory of a run: the one it has, else the first that is free."""
        run_id, plain, number = f"{self._experiment}/{run}", directory_name(run), 1
        other = f"{plain}@{directory_name(self._experiment)}"
        name, holder = plain, _claim(self._folder / plain, run_id)
        while holder != run_id:
            self._say(name, holder, other)
            name, number = other if number == 1 else f"{other}-{number}", number + 1
            holder = _claim(self._folder / name, run_id)
        return self._folder / name

    def _say(self, name: str, holder: str, other: str) -> None:
        if not self._said:
            say = "%s is the run %s; runs of the same name lie in %s and the like"
            get_logger(__name__).warning(say, self._folder / name, holder, self._folder / other)
            self._said = True


def _claim(folder: Path, run_id: str) -> str:
    """Whose the directory is: this run's, unless another experiment has it already."""
    recorded = RunRecord.find(folder)
    if recorded and recorded.run_id and not (folder / OWNER_FILE).exists():
        return recorded.run_id
    owner = folder / OWNER_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            # O_EXCL: of two processes that claim it at once, one gets it.
            descriptor = os.open(owner, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            holder = owner.read_text(errors="replace").strip()
            if not holder:  # the process that began to claim it was killed before it had
                write_text(owner, f"{run_id}\n")
            return holder or run_id
        with os.fdopen(descriptor, "w") as handle:
            handle.write(f"{run_id}\n")
    except OSError:  # the run itself will say that it cannot use it
        pass
    return run_id
