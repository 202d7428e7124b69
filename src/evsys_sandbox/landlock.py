"""Put a process that is being traced into a Landlock domain, by system calls that it is made to make.

In: a process that has run nothing of its program yet. Out: the same process, confined; `TracingFailed` where that was
not possible. Without imports of evsys_sdk, as the whole of `supervisor`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import stat
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evsys_sandbox.ptrace import (
    LONGEST_PATH,
    Machine,
    TracingFailed,
    get_registers,
    libc,
    peek,
    poke,
    put,
    read_link,
    read_status,
    set_registers,
)

# linux/landlock.h; the numbers of these calls are the same on every architecture.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
RULESET_VERSION = 1
MOST_DOMAINS = 16
"""Within one another; the kernel's limit."""
WRITE_FILE, REFER, TRUNCATE = 1 << 1, 1 << 13, 1 << 14
MAKE_AND_REMOVE = 0b1_1111_1111 << 4
"""Remove folders and files; make devices, folders, files, sockets, pipes and links."""
SCOPE_ABSTRACT_UNIX_SOCKET, SCOPE_SIGNAL = 1, 2
PATH_BENEATH = 1
AT_FDCWD, O_PATH_CLOEXEC = -100, 0o10000000 | 0o2000000
OPEN_FILES = "/proc/self/fd/"
NO_LIMIT, F_SETFL = 2**64 - 1, 4
SHELLS_OWN = 10
"""From here on bash numbers the files that it opens for itself; scripts number theirs from 3 to 9."""
TESTS_HOME, AGENTS_HOME = "/evsys/home", "/evsys/work"
"""The home of the tests, where they do not name one, and of the agent's programs that they run; of one length."""


@dataclass(frozen=True)
class Handle:
    """An open file that a program of the agent does not get as it is."""

    number: int
    opened: str | None
    """What it gets in its place: the file itself, opened anew, or another; None for nothing."""
    offset: int = 0
    flags: int = os.O_RDONLY
    is_appended: bool = False
    """The tests write there too. All write at its end, wherever one of them has moved to in it."""


def confine(
    tid: int,
    machine: Machine,
    *,
    version: int,
    writable: list[str] | None,
    until_call: Callable[[int], None],
    handles: Sequence[Handle] = (),
    file_limit: tuple[int, int] | None = None,
    keeps_signals: bool = False,
) -> None:
    """Have a process, which stands at the end of a system call, enter a new Landlock domain; one in which it
    can write to these places only, where they are given. `until_call` lets it run to the next beginning or end of a
    system call. The `handles` are exchanged and the `file_limit` is set before. `keeps_signals`: it can send
    signals only to what it starts."""
    registers = get_registers(tid, machine)
    # Far below the stack pointer: bash may be at work here (a file without a `#!` line), and the 128 bytes below the
    # pointer are in use on x86_64. What lies there is put back at the end.
    pc, scratch = registers[machine.pc], (registers[machine.stack] - 2 * LONGEST_PATH) & ~0xF
    places = [os.fsencode(place) + b"\0" for place in writable or ["/"]]
    # At least 32: the names of open files are put there too.
    used = range(0, max(32, *map(len, places)) + 8, 8)
    text, memory = peek(tid, pc), [peek(tid, scratch + offset) for offset in used]
    poke(tid, pc, machine.instruction + text[len(machine.instruction) :])

    def call(number: int, *arguments: int) -> int:
        changed = list(registers)
        changed[machine.pc], changed[machine.call] = pc, number
        if machine.original is not None:
            # -1: the process is in no call, so the kernel restarts none.
            changed[machine.original] = 2**64 - 1
        for place, value in zip(machine.arguments, (*arguments, 0, 0, 0, 0), strict=False):
            changed[place] = value & (2**64 - 1)
        # The process now runs the instruction that was put at `pc`. The first stop is the beginning of the call, the
        # second its end.
        set_registers(tid, changed)
        until_call(tid)
        until_call(tid)
        result = get_registers(tid, machine)[machine.result]
        return result - 2**64 if result >= 2**63 else result

    for handle in handles:
        if handle.opened is None:
            call(machine.close, handle.number)
            continue
        if handle.is_appended:
            call(machine.fcntl, handle.number, F_SETFL, handle.flags)
        new = -1
        for name, flags in ((handle.opened, handle.flags), (os.devnull, os.O_RDWR)):
            put(tid, scratch, name.encode() + b"\0")
            new = call(machine.openat, AT_FDCWD, scratch, flags, 0) if new < 0 else new
        if new < 0:
            raise TracingFailed
        call(machine.lseek, new, handle.offset, os.SEEK_SET)
        call(machine.dup3, new, handle.number, 0)
        call(machine.close, new)

    if file_limit is not None:
        put(tid, scratch, struct.pack("=QQ", *file_limit))
        if call(machine.prlimit, 0, resource.RLIMIT_FSIZE, scratch, 0) != 0:
            raise TracingFailed

    # TRUNCATE exists since version 3 of Landlock (Linux 6.2), scopes since version 6 (Linux 6.12).
    scope = SCOPE_ABSTRACT_UNIX_SOCKET | (SCOPE_SIGNAL if keeps_signals else 0) if version >= 6 else 0
    of_files = WRITE_FILE | (TRUNCATE if version >= 3 else 0)
    # Without a list of places: a domain that allows moves between folders everywhere. One that did not speak of them
    # would refuse them in every domain below it that is about files, and so to every program of the agent.
    handled = of_files | MAKE_AND_REMOVE | REFER if writable is not None else REFER
    put(tid, scratch, struct.pack("=QQQ", handled, 0, scope))
    # The first 8 bytes are the rights on files, which every version takes. Kernels before version 6 do not know the
    # third word, so it is not sent there.
    ruleset = call(CREATE_RULESET, scratch, 24 if scope else 8, 0)
    if ruleset < 0:
        raise TracingFailed
    for place in places:
        put(tid, scratch, place)
        # Not followed, but for `/proc/self/fd/N`: a place can have become a link to the guarded folder since it was
        # listed.
        flags = O_PATH_CLOEXEC | (0 if place.startswith(OPEN_FILES.encode()) else os.O_NOFOLLOW)
        opened = call(machine.openat, AT_FDCWD, scratch, flags, 0)
        if opened < 0:
            continue  # gone meanwhile
        put(tid, scratch, struct.pack("=Qi4x", handled, opened))
        if call(ADD_RULE, ruleset, PATH_BENEATH, scratch, 0) == -errno.EINVAL:  # no folder, but a file
            put(tid, scratch, struct.pack("=Qi4x", handled & of_files, opened))
            call(ADD_RULE, ruleset, PATH_BENEATH, scratch, 0)
        call(machine.close, opened)
    if call(RESTRICT_SELF, ruleset, 0) != 0:
        raise TracingFailed
    call(machine.close, ruleset)
    for offset, word in zip(used, memory, strict=True):
        poke(tid, scratch + offset, word)
    poke(tid, pc, text)
    set_registers(tid, registers)


def writable_places(process: int, guarded: str) -> list[str]:
    """What a program of the agent may write to: all that is mounted to be written, but for the guarded folder."""
    root, above = f"/proc/{process}/root", os.path.dirname(guarded)
    with open(f"/proc/{process}/mountinfo") as file:
        mounts = [line.split()[4:6] for line in file]
    mounted = [place for place, options in mounts if "rw" in options.split(",")]
    places = ["/dev", *(place for place in mounted if not f"{guarded}/".startswith(place.rstrip("/") + "/"))]
    # The tests' home: many of their programs read settings there, and some settings are commands.
    places = [place for place in places if place != TESTS_HOME]
    # Landlock has no exceptions: beside the guarded folder, each neighbour is allowed by itself. Not links: one of
    # the agent's could lead into the guarded folder.
    with os.scandir(f"{root}{above}") as neighbours:
        places += [f"{above}/{each.name}" for each in neighbours if not each.is_symlink()]
    places = [place for place in places if place != guarded and not place.startswith("/dev/")]
    # `echo x > /dev/stderr` opens a file anew that the tests have given to the program, such as their log.
    for number in range(3):
        given = read_link(f"/proc/{process}/fd/{number}")
        if given.startswith(f"{guarded}/") and not os.path.basename(given).startswith("reward"):
            places.append(f"{OPEN_FILES}{number}")
    return places


def exchanged_handles(process: int, guarded: str) -> list[Handle]:
    """Open files of the tests that a program of the agent inherits and could do harm with.

    A file to read has one offset for all that inherited it: `lseek` on the list of cases in `while read; do ./x; done <
    cases` would end the loop of the tests. The program gets such a file opened anew. A file in the guarded folder it
    gets only as its input or output, and there not a reward that the tests have written to already. In `diff <(REF)
    <(./x)` bash gives `./x` the first pipe too, which it could read empty; it gets such a pipe where its command says
    so. A log of the tests has one offset too: behind `lseek(1, 256 << 20)` the tests could write nothing (SIGXFSZ), and
    a `grep` that was killed seems to have found nothing.
    """
    found = []
    with open(f"/proc/{process}/cmdline", "rb") as file:
        named = set(map(int, re.findall(rb"\d+", file.read())))
    above = read_status(process).get("PPid")
    logs = {read_link(f"/proc/{above}/fd/{number}") for number in (1, 2)}
    for name in sorted(os.listdir(f"/proc/{process}/fd"), key=int):
        place, number = f"/proc/{process}/fd/{name}", int(name)
        path = read_link(place)
        with contextlib.suppress(OSError, StopIteration):  # closed meanwhile
            facts = os.stat(place)
            if number >= SHELLS_OWN and stat.S_ISFIFO(facts.st_mode) and number not in named:
                found.append(Handle(number, None))
            with open(f"/proc/{process}/fdinfo/{name}") as file:
                info = dict(line.split(":", 1) for line in file if line.startswith(("pos:", "flags:")))
            flags, offset = int(info["flags"], 8), int(info["pos"])
            if not stat.S_ISREG(facts.st_mode) or flags & O_PATH_CLOEXEC & ~os.O_CLOEXEC:
                continue
            is_guarded = path.startswith(f"{guarded}/")
            if flags & os.O_ACCMODE == os.O_RDONLY:
                found.append(Handle(number, f"{OPEN_FILES}{number}", offset))
            elif is_guarded and number > 2:
                found.append(Handle(number, None))
            elif is_guarded and os.path.basename(path).startswith("reward") and facts.st_size:
                found.append(Handle(number, os.devnull))
            elif number in (1, 2) and path in logs:
                flags = flags & os.O_ACCMODE | os.O_APPEND
                found.append(Handle(number, f"{OPEN_FILES}{number}", flags=flags, is_appended=True))
    return found


def lower_file_limit(process: int) -> tuple[int, int]:
    """How large a program of the agent may make a file: less than the tests, which are to have room in their log."""
    with open(f"/proc/{process}/limits") as file:
        limits = next(line.split()[3:5] for line in file if line.startswith("Max file size"))
    soft, hard = (NO_LIMIT if each == "unlimited" else int(each) // 4 * 3 for each in limits)
    return soft, hard


def change_home(process: int) -> None:
    """Give a program that has not begun another home than the tests have."""
    with open(f"/proc/{process}/environ", "rb") as file:
        variables = b"\0" + file.read()
    at = variables.find(f"\0HOME={TESTS_HOME}\0".encode())
    if at < 0:
        return
    with open(f"/proc/{process}/stat") as file:
        # `env_start`, the 50th field; the name of the program, the second, stands in brackets and may hold anything.
        begin = int(file.read().rpartition(")")[2].split()[47])
    place = begin + at + len("HOME=") + len(TESTS_HOME) - 8
    poke(process, place, AGENTS_HOME.encode()[-8:])


def landlock_version() -> int:
    """0 where the kernel has none, or has it turned off."""
    return max(0, int(libc.syscall(CREATE_RULESET, None, 0, RULESET_VERSION)))
