"""Whether a link of the agent's led the tests into the folder of the reward.

In: a call of the tests that opens a file to write, opens a folder or enters one. Out: whether it arrived in the guarded
folder under a name that does not say so. A program of the agent cannot write there (`tracer`), but it can make the
file that the tests write next, or its folder, a link. Only the kernel knows where a name led, and only after the call:
a look before it could be overtaken. So the name is read when the call begins, from the memory of the tests, which no
program of the agent can change, and compared with what the call has opened, before the tests can use it.

A name may begin at the working directory or at an open folder. Entering and opening folders is looked at too, so
neither of them is in the guarded folder, or above it, by way of a link. (A folder that was opened like a file to read
is not seen then; it is taken for good where the program has been in it, as `find` opens `.` to find its way back.)
Moves and hard links need no look: the guarded folder is mounted by itself, and both end where a mount ends. Part of
`supervisor`, without imports of evsys_sdk.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from evsys_sandbox.ptrace import read_link, read_text

AT_FDCWD, O_PATH = -100, 0o10000000
ENTERS = ("chdir", "fchdir")


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
    """What a thread that is about to carry out a call names in it."""
    place, number = f"/proc/{tid}", None
    written = "" if call == "fchdir" else read_text(tid, arguments[1 if call == "openat" else 0])
    if call in ("openat", "fchdir"):
        given = arguments[0] & 0xFFFFFFFF  # an int, whatever stands in the upper half
        number = given if given != AT_FDCWD & 0xFFFFFFFF and not written.startswith("/") else None
    begin = "/"
    if not written.startswith("/"):
        begin = read_link(f"{place}/cwd" if number is None else f"{place}/fd/{number}")
    return OpenedName(call, "/" + os.path.normpath(os.path.join(begin, written)).lstrip("/"), number)


def is_forged(tid: int, name: OpenedName, result: int, *, guarded: str, visited: set[str]) -> bool:
    """Whether a call followed a link to the guarded folder; it has succeeded, and its thread is still inside of it.

    `visited` are the folders in which the program has been; where this call enters one, that is added.
    """
    place = f"/proc/{tid}"
    arrived = read_link(f"{place}/cwd" if name.call in ENTERS else f"{place}/fd/{result}")
    if not arrived or not _is_guarded(arrived, guarded):  # nothing there: killed meanwhile
        return False
    # The filter does not stop at a folder that is opened like a file to read (`seccomp.LOOKED_AT`), so how the tests
    # came to it is not known, and it counts as a link. Not where the program has been: `find` opens `.` so. The price
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
