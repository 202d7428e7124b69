"""A uid that no other live sandbox on this machine has, and the locks by which processes agree on it.

In: nothing. Out: a number, as long as the lease lasts. Processes agree through file locks, which the kernel lets go
when the holder dies. Without root there is only one uid to be had, one's own.
"""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

from evsys_sandbox.errors import SandboxError

# Beyond what systemd and container runtimes give out; the second for containers that map few uids.
RANGES = (range(1_900_000_000, 1_900_060_000), range(30_000, 60_000))
LOCKS = Path("/run/evsys-sandbox")


class UidLease:
    """`with UidLease() as uid:` no other sandbox has the uid meanwhile."""

    def __init__(self) -> None:
        self._lock: tuple[int, Path] | None = None

    def __enter__(self) -> int:
        if os.geteuid() != 0:
            return os.getuid()
        LOCKS.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The first range that exists in this user namespace.
        spans = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
        mapped = (
            uids for uids in RANGES if any(first <= uids[0] and uids[-1] < first + count for first, _, count in spans)
        )
        uids = next(mapped, None)
        if uids is None:
            raise SandboxError("this container maps too few uids for sandboxes: it needs 30000 to 60000")
        # Anywhere in the range: a uid that was used a moment ago may still have processes dying.
        start = random.SystemRandom().randrange(len(uids))
        for offset in range(len(uids)):
            uid = uids[(start + offset) % len(uids)]
            handle = _try_lock(LOCKS / str(uid))
            if handle is not None:
                self._lock = handle, LOCKS / str(uid)
                return uid
        raise SandboxError(f"no uid is free for another sandbox; is {LOCKS} full of locks held by other programs?")

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            handle, path = self._lock
            path.unlink(missing_ok=True)  # before the lock is let go; see _try_lock
            os.close(handle)
            self._lock = None


def _try_lock(path: Path) -> int | None:
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    handle = hold(path, alone=True)
    if handle is None:
        return None
    # The last holder may have removed the file between our open and our lock: then the lock is worth nothing.
    with contextlib.suppress(FileNotFoundError):
        if os.stat(path).st_ino == os.fstat(handle).st_ino:
            return handle
    os.close(handle)
    return None


def hold(path: Path, *, alone: bool = False) -> int | None:
    """A lock on a file or directory, as an open handle; None when another process's stands against it."""
    import fcntl  # late: this module is imported on systems that have no such locks, and no sandbox either

    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle
