"""The system calls that a sandbox is refused.

In: nothing. Out: a seccomp program for bubblewrap's `--seccomp`. Refused are calls by which one process changes or
reads another of the same uid (so that a graded program cannot reach into its grader), calls that namespaces do not
confine (keyrings, vsock), and calls that only widen what of the kernel can be attacked. Everything else passes.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping
from dataclasses import dataclass

REFUSED = (
    # Into another process: its memory, its registers, its open files.
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "kcmp",
    # Keyrings are not parted by namespaces: a sandbox would read its launcher's keys, and leave some for the next one.
    "add_key", "request_key", "keyctl",
    # Large, often attacked, and needed by hardly any program.
    "io_uring_setup", "io_uring_enter", "io_uring_register", "userfaultfd", "bpf", "perf_event_open",
    # Files found without a path; memory that no limit counts.
    "open_by_handle_at", "memfd_create", "memfd_secret",
    # i386's way around the look at `socket`.
    "socketcall",
)  # fmt: skip
FAMILIES = {"AF_UNSPEC": 0, "AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16}
"""What sockets may be of; the others (vsock reaches the host of a virtual machine) are unknown inside."""

CLONE_UNTRACED = 0x00800000
"""A flag of `clone` by which a child would leave the view of `tracer`. `clone3` has its flags where a filter
cannot look: it does not exist inside, and the C library then uses `clone`."""

# The same on every architecture, as all calls since 424 are.
_NEW = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "pidfd_getfd": 438, "process_madvise": 440,
    "memfd_secret": 447, "clone3": 435, "openat2": 437,
}  # fmt: skip
# linux/asm-generic: the architectures that came late.
_GENERIC = {
    **_NEW, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "add_key": 217,
    "request_key": 218, "keyctl": 219, "userfaultfd": 282, "bpf": 280, "perf_event_open": 241,
    "open_by_handle_at": 265, "memfd_create": 279, "socket": 198, "clone": 220, "prlimit64": 261, "execve": 221,
    "execveat": 281, "fcntl": 25, "ioctl": 29, "openat": 56, "chdir": 49, "fchdir": 50, "symlinkat": 36, "linkat": 37,
    "renameat": 38, "renameat2": 276,
    "setpriority": 140, "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122,
    "sched_setattr": 274, "ioprio_set": 30,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Architecture:
    """A numbering of system calls."""

    audit: int
    """AUDIT_ARCH_* of linux/audit.h."""
    numbers: Mapping[str, int]
    direct: int = 0o40000
    """O_DIRECT."""
    second_numbering: int | None = None
    """From here on calls have other numbers (x32 beside x86_64); no program here uses them, and all are refused."""


ARCHITECTURES = (
    Architecture(
        0xC000003E,  # x86_64
        {
            **_NEW, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "add_key": 248,
            "request_key": 249, "keyctl": 250, "userfaultfd": 323, "bpf": 321, "perf_event_open": 298,
            "open_by_handle_at": 304, "memfd_create": 319, "socket": 41, "clone": 56, "prlimit64": 302, "execve": 59,
            "fcntl": 72, "ioctl": 16,
            "execveat": 322, "open": 2, "openat": 257, "creat": 85, "chdir": 80, "fchdir": 81, "symlink": 88,
            "symlinkat": 266, "link": 86, "linkat": 265, "rename": 82, "renameat": 264, "renameat2": 316,
            "setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144, "sched_setaffinity": 203,
            "sched_setattr": 314, "ioprio_set": 251,
        },
        second_numbering=0x40000000,
    ),
    Architecture(
        0x40000003,  # i386, which an x86_64 kernel runs too
        {
            **_NEW, "ptrace": 26, "process_vm_readv": 347, "process_vm_writev": 348, "kcmp": 349, "add_key": 286,
            "request_key": 287, "keyctl": 288, "userfaultfd": 374, "bpf": 357, "perf_event_open": 336,
            "open_by_handle_at": 342, "memfd_create": 356, "socketcall": 102, "socket": 359,
            "clone": 120, "prlimit64": 340, "execve": 11, "execveat": 358, "fcntl": 55, "fcntl64": 221, "ioctl": 54,
            "open": 5, "openat": 295, "creat": 8, "chdir": 12, "fchdir": 133, "symlink": 83, "symlinkat": 304,
            "link": 9, "linkat": 303, "rename": 38, "renameat": 302, "renameat2": 353,
            "setpriority": 97, "sched_setparam": 154, "sched_setscheduler": 156, "sched_setaffinity": 241,
            "sched_setattr": 351, "ioprio_set": 289,
        },
    ),
    Architecture(0xC00000B7, _GENERIC, direct=0o200000),  # aarch64
    Architecture(0xC00000F3, _GENERIC),  # riscv64
    Architecture(
        0x40000028,  # arm
        {
            **_NEW, "ptrace": 26, "process_vm_readv": 376, "process_vm_writev": 377, "kcmp": 378, "add_key": 309,
            "request_key": 310, "keyctl": 311, "userfaultfd": 388, "bpf": 386, "perf_event_open": 364,
            "open_by_handle_at": 371, "memfd_create": 385, "socket": 281, "clone": 120, "prlimit64": 369, "execve": 11,
            "execveat": 387, "fcntl": 55, "fcntl64": 221, "ioctl": 54, "open": 5, "openat": 322, "creat": 8,
            "chdir": 12, "fchdir": 133, "symlink": 83, "symlinkat": 331, "link": 9, "linkat": 330, "rename": 38,
            "renameat": 329, "renameat2": 382,
            "setpriority": 97, "sched_setparam": 154, "sched_setscheduler": 156, "sched_setaffinity": 241,
            "sched_setattr": 380, "ioprio_set": 314,
        },
        direct=0o200000,
    ),
)  # fmt: skip
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT, THIRD_ARGUMENT = 0, 4, 16, 24, 32
"""Where they stand in the kernel's `struct seccomp_data`; of an argument its lower half (little-endian machines)."""
F_SETFL, TIOCSTI, TIOCLINUX = 4, 0x5412, 0x541C
LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, FAIL, TRACE = 0x7FFF0000, 0x00050000, 0x7FF00000
REFUSE, UNKNOWN_FAMILY, UNKNOWN_CALL = FAIL | errno.EPERM, FAIL | errno.EAFNOSUPPORT, FAIL | errno.ENOSYS
EXECUTIONS = ("execve", "execveat")
OPENS = {"open": 1, "openat": 2}
"""Calls that open files, and which of their arguments (from 0) holds the flags."""
PLACES: Mapping[str, tuple[int | None, int]] = {
    "symlink": (None, 1), "symlinkat": (1, 2), "link": (None, 1), "linkat": (2, 3), "rename": (None, 1),
    "renameat": (2, 3), "renameat2": (2, 3),
}  # fmt: skip
"""Calls by which a link gets to a new place, and which of their arguments hold the folder and the name there."""
SCHEDULES: Mapping[str, int] = {
    "setpriority": 1, "ioprio_set": 1, "sched_setparam": 0, "sched_setscheduler": 0, "sched_setaffinity": 0,
    "sched_setattr": 0,
}  # fmt: skip
"""Calls that say how much of the machine a process gets, and which of their arguments names it. 0 is the caller; before
it there may be an argument that says whether a process, a group or all of a user are meant."""
TRACED = (*EXECUTIONS, *OPENS, "creat", "chdir", "fchdir", *PLACES, *SCHEDULES)
"""Calls that `tracer` sees before they are carried out; it is given their place in this list."""
LOOKED_AT = 0o1 | 0o2 | 0o100 | 0o1000 | 0o40000 | 0o200000 | 0o10000000
"""Flags of `open`: to write, to create, to truncate; a folder (0o40000 on arm, 0o200000 elsewhere); O_PATH."""

Instruction = tuple[int, int, int, int]
"""Code, how far to jump if true, if false, operand."""


def seccomp_filter(*, traces_executions: bool = False, traces_opens: bool = False) -> bytes:
    """Lets every call pass but these; on a machine that it does not know it refuses all, so that nothing runs.

    `traces_executions` and `traces_opens` (of files to write, and of folders) are for processes that have a tracer:
    without one they could execute nothing. With the latter, no open file becomes one of O_DIRECT.
    """
    program: list[Instruction] = [(LOAD, 0, 0, ARCHITECTURE)]
    for architecture in ARCHITECTURES:
        numbers = architecture.numbers
        check: list[Instruction] = [(LOAD, 0, 0, NUMBER)]
        if architecture.second_numbering is not None:
            check += [(JUMP_IF_AT_LEAST, 0, 1, architecture.second_numbering), (RETURN, 0, 0, REFUSE)]
        answers = {name: REFUSE for name in REFUSED if name in numbers} | {"clone3": UNKNOWN_CALL}
        if traces_executions:
            answers |= {name: TRACE | place for place, name in enumerate(EXECUTIONS)}
        if traces_opens:
            # From the fifth on: of `open` and `openat`, which come before, the flags decide (`looks`).
            named = ("creat", *PLACES, "chdir", "fchdir")
            answers |= {name: TRACE | TRACED.index(name) for name in named if name in numbers}
            # Its flags lie where a filter cannot look. Programs do without it, as on older kernels.
            answers["openat2"] = UNKNOWN_CALL
        for name, answer in answers.items():
            check += [(JUMP_IF_EQUAL, 0, 1, numbers[name]), (RETURN, 0, 0, answer)]
        # A jump counts the instructions that it leaves out. `clone` has its flags first on all of these architectures;
        # s390, which is not among them, has them second.
        flags: list[Instruction] = [(LOAD, 0, 0, FIRST_ARGUMENT), (JUMP_IF_ANY_BIT, 0, 1, CLONE_UNTRACED)]
        flags += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
        # The limits of another process: without open files, the tests could not write their reward. 0 is the caller
        # itself (the C library's way); the filter cannot know the caller's own number. To read limits, with no new ones
        # given (both halves of the third argument are 0), is harmless.
        limits: list[Instruction] = [(LOAD, 0, 0, FIRST_ARGUMENT), (JUMP_IF_EQUAL, 4, 0, 0)]
        limits += [(LOAD, 0, 0, THIRD_ARGUMENT), (JUMP_IF_EQUAL, 0, 3, 0)]
        limits += [(LOAD, 0, 0, THIRD_ARGUMENT + 4), (JUMP_IF_EQUAL, 0, 1, 0)]
        limits += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
        families: list[Instruction] = [(LOAD, 0, 0, FIRST_ARGUMENT)]
        for family in FAMILIES.values():
            families += [(JUMP_IF_EQUAL, 0, 1, family), (RETURN, 0, 0, ALLOW)]
        families.append((RETURN, 0, 0, UNKNOWN_FAMILY))
        # What a program puts into its terminal's input is typed for the shell that started it there.
        typing: list[Instruction] = [(LOAD, 0, 0, SECOND_ARGUMENT), (JUMP_IF_EQUAL, 1, 0, TIOCSTI)]
        typing += [(JUMP_IF_EQUAL, 0, 1, TIOCLINUX), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
        looks = {"clone": flags, "prlimit64": limits, "socket": families, "ioctl": typing}
        for name, place in SCHEDULES.items() if traces_executions else ():
            # With an argument before it: a process, which is 0 for the one call and 1 for the other.
            look: list[Instruction] = [(LOAD, 0, 0, FIRST_ARGUMENT + 8 * place), (JUMP_IF_EQUAL, 0, 1 + 2 * place, 0)]
            if place:
                look += [(LOAD, 0, 0, FIRST_ARGUMENT), (JUMP_IF_EQUAL, 0, 1, int(name == "ioprio_set"))]
            looks[name] = [*look, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, TRACE | TRACED.index(name))]
        if traces_opens:
            # Flags belong to all that have inherited an open file. With O_DIRECT the tests cannot write a line to
            # their log any more, and a `grep` that cannot print what it found seems to have found nothing.
            states: list[Instruction] = [(LOAD, 0, 0, SECOND_ARGUMENT), (JUMP_IF_EQUAL, 0, 3, F_SETFL)]
            states += [(LOAD, 0, 0, THIRD_ARGUMENT), (JUMP_IF_ANY_BIT, 0, 1, architecture.direct)]
            states += [(RETURN, 0, 0, FAIL | errno.EINVAL), (RETURN, 0, 0, ALLOW)]
            looks |= {"fcntl": states, "fcntl64": states}
        for name, place in OPENS.items() if traces_opens else ():
            looks[name] = [(LOAD, 0, 0, FIRST_ARGUMENT + 8 * place), (JUMP_IF_ANY_BIT, 0, 1, LOOKED_AT)]
            looks[name] += [(RETURN, 0, 0, TRACE | TRACED.index(name)), (RETURN, 0, 0, ALLOW)]
        for name, program_of_call in ((name, each) for name, each in looks.items() if name in numbers):
            check += [(JUMP_IF_EQUAL, 0, len(program_of_call), numbers[name]), *program_of_call]
        check.append((RETURN, 0, 0, ALLOW))
        # A jump is one byte: with more than 255 instructions for one architecture `struct.pack` raises.
        program += [(JUMP_IF_EQUAL, 0, len(check), architecture.audit), *check]
    program.append((RETURN, 0, 0, REFUSE))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
