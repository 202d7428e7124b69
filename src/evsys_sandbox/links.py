"""Whether a link of the agent's led the tests into the folder of the reward.

In: a call of the tests that opens a file to write, opens a folder or enters one. Out: whether it arrived in the guarded
folder under a name that does not say so. A program of the agent cannot write there (`tracer`), but it can make the
file that the tests write next, or its folder, a link. Only the kernel knows where a name led, and only after the call:
a look before it could be overtaken. So the name is read from the memory of the tests, which no program of the agent can
change, and compared with what the call has opened, before the tests can use it.

A name may begin at the working directory or at an open folder. Entering and opening folders is looked at too, so
neither of them is in the guarded folder, or above it, by way of a link. (A folder that was opened like a file to read
is not seen then; it is taken for good where the program has been in it, as `find` opens `.` to find its way back.)
Moves and hard links into the guarded folder need no look: it is mounted by itself, and both end where a mount ends.
But a link that is moved, copied or unpacked may lead somewhere else than before: such calls of the tests are looked at
too (`leading_link`). Part of `supervisor`, without imports of evsys_sdk.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from evsys_sandbox.ptrace import LONGEST_PATH, read_link, read_text
from evsys_sandbox.seccomp import PLACES

AT_FDCWD, O_PATH = -100, 0o10000000
ENTERS = ("chdir", "fchdir")
MOST_LINKS, MOST_STEPS = 40, 1000
"""Followed for one name: as many links as the kernel follows, and more folders than a name of an honest program has.
Links that lead to links can make a name of 100 bytes take 2**60 steps."""
_HANDLES = ("/proc", "/dev/fd", "/dev/stdin")
"""Open files of the process that looks, and much else: where a name leads from there is not known beforehand."""
_ARGUMENTS: Mapping[str, tuple[int | None, int]] = {**PLACES, "openat": (0, 1), "fchdir": (0, 0)}
"""Of calls that do not begin with the name: which arguments hold the folder and the name."""
_PRINTED = ("/dev/stdout", "/dev/stderr")
"""Links for logs lead there; what the tests print is written there in any case."""
_OF_TESTS = ("/tests", "/evsys", *_HANDLES)


class RewardForged(Exception):
    """The tests are about to write what the agent wants where their reward belongs."""


@dataclass(frozen=True)
class OpenedName:
    """What a call names."""

    call: str
    path: str
    """As it is written, from the root on; links not followed, `..` taken away."""
    folder: int | None = None
    """The open folder at which it begins."""


def read_name(tid: int, call: str, arguments: Sequence[int]) -> OpenedName:
    """What a thread that is about to carry out a call names in it; of a call that moves, the new name."""
    place, number = f"/proc/{tid}", None
    at, name = _ARGUMENTS.get(call, (None, 0))
    written = "" if call == "fchdir" else read_text(tid, arguments[name])
    if at is not None:
        given = arguments[at] & 0xFFFFFFFF  # an int, whatever stands in the upper half
        number = given if given != AT_FDCWD & 0xFFFFFFFF and not written.startswith("/") else None
    begin = "/"
    if not written.startswith("/"):
        begin = read_link(f"{place}/cwd" if number is None else f"{place}/fd/{number}")
    return OpenedName(call, "/" + os.path.normpath(os.path.join(begin, written)).lstrip("/"), number)


def has_arrived(tid: int, call: str, result: int, guarded: str) -> bool:
    """Whether a call that opens or enters has succeeded in the guarded folder, or in one above it."""
    arrived = read_link(f"/proc/{tid}/cwd" if call in ENTERS else f"/proc/{tid}/fd/{result}")
    return arrived != "" and _is_guarded(arrived, guarded)  # nothing there: killed meanwhile


def is_forged(tid: int, name: OpenedName, result: int, *, guarded: str, visited: set[str]) -> bool:
    """Whether a call followed a link to the guarded folder; it has succeeded, and its thread is still inside of it.

    `visited` are the folders in which the program has been; where this call enters one, that is added.
    """
    place = f"/proc/{tid}"
    arrived = read_link(f"{place}/cwd" if name.call in ENTERS else f"{place}/fd/{result}")
    if not arrived or not _is_guarded(arrived, guarded):  # nothing there: killed meanwhile
        return False
    # The filter does not stop at a folder that is opened like a file to read (`seccomp.LOOKED_AT`), so how the tests
    # opened it is not known, and it counts as a link. Not where the program has been: `find` opens `.` so. The price
    # stands in docs/rollouts.md, "What remains".
    if name.folder is not None and read_link(f"{place}/fd/{name.folder}") not in visited:
        with contextlib.suppress(OSError), open(f"{place}/fdinfo/{name.folder}") as file:
            flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
            if not flags & (os.O_DIRECTORY | O_PATH):
                return True
    if name.call in ENTERS and _is_guarded(name.path, guarded):
        visited.add(arrived)
    if _is_guarded(name.path, guarded):
        return False
    # A link to /dev/stdout, as for logs: what the tests print is written there in any case.
    printed = {read_link(f"{place}/fd/{number}") for number in (1, 2)}
    return arrived not in printed or os.path.basename(arrived).startswith("reward")


def _is_guarded(path: str, guarded: str) -> bool:
    """Whether a path is in the guarded folder, or is a folder above it, from where a name leads into it."""
    return f"{path}/".startswith(f"{guarded}/") or f"{guarded}/".startswith(f"{path.rstrip('/')}/")


def follow(path: str, read: Callable[[str], str | None]) -> str | None:
    """Where a path leads, as far as it exists, by `read`, which gives the target of a link and None for anything else.
    At an open file (`/dev/stdin`, `/proc`) it ends. None where that takes more links or steps than allowed."""
    left, done = path.split("/")[::-1], ""
    links = steps = 0
    while left:
        part = left.pop()
        if part == "..":
            done = done.rpartition("/")[0]
        if part in ("", ".", ".."):
            continue
        done, steps = f"{done}/{part}", steps + 1
        if _is_in(done, (*_HANDLES, *_PRINTED)):
            return done
        if steps > MOST_STEPS or len(done) > LONGEST_PATH:
            return None
        if (target := read(done)) is not None:
            links += 1
            if links > MOST_LINKS:
                return None
            done = "" if target.startswith("/") else done.rpartition("/")[0]
            left += target.split("/")[::-1]
    return done or "/"


def read_target(place: str) -> str | None:
    """Where a link leads, as it is written; None for what is not a link."""
    try:
        return os.readlink(place)
    except OSError:
        return None


def is_of_tests(path: str | None, guarded: str) -> bool:
    """Whether a path that a link of the agent's leads to is the tests' business: their folder and that of the reward,
    the files that they have open, and folders from where a name leads there. None is a link that cannot be followed."""
    return path is None or _is_in(path, (*_OF_TESTS, guarded)) or path in ("/", "/dev", os.path.dirname(guarded))


def leading_link(tid: int, name: OpenedName, guarded: str) -> str | None:
    """Of what a call has put under a new name, the first link that leads to the tests' files from there."""
    root = f"/proc/{tid}/root"

    def read(path: str) -> str | None:
        return read_target(root + path)

    folder = follow(os.path.dirname(name.path), read)
    if folder is None:
        return name.path
    pending = [f"{folder.rstrip('/')}/{os.path.basename(name.path)}"]
    while pending:
        here = pending.pop()
        with contextlib.suppress(OSError):
            mode = os.lstat(root + here).st_mode
            if stat.S_ISLNK(mode) and is_of_tests(follow(here, read), guarded):
                return here
            if stat.S_ISDIR(mode):
                with os.scandir(root + here) as entries:
                    pending += [
                        f"{here}/{each.name}"
                        for each in entries
                        if each.is_symlink() or each.is_dir(follow_symlinks=False)
                    ]
    return None


def _is_in(path: str, folders: Sequence[str]) -> bool:
    return f"{path}/".startswith(tuple(f"{folder}/" for folder in folders))
