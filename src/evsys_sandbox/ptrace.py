"""`ptrace` and what the kernel says of a process: registers, memory, status.

In: the number of a thread. Out: plain values. Everything here is one request to the kernel; what to ask, and when, is
decided in `tracer`. Without imports of evsys_sdk, as the whole of `supervisor`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import struct
from dataclasses import dataclass
from functools import cache

# linux/ptrace.h
PEEKDATA, POKEDATA, CONT, SYSCALL = 2, 5, 7, 24
GETEVENTMSG, GETREGSET, SETREGSET, SEIZE, LISTEN = 0x4201, 0x4204, 0x4205, 0x4206, 0x4208
EVENT_FORK, EVENT_VFORK, EVENT_CLONE, EVENT_EXEC, EVENT_SECCOMP, EVENT_STOP = 1, 2, 3, 4, 7, 128
OPTIONS = 0x01 | 0x02 | 0x04 | 0x08 | 0x10 | 0x80 | 0x100000
"""Events of system calls marked, forks, vforks, clones, executions, calls that the filter marks (those that execute);
everything is killed with the tracer."""
# TRACESYSGOOD sets the bit 0x80, so that the stop of a call is not taken for the signal SIGTRAP.
SYSCALL_STOP = signal.SIGTRAP | 0x80
NT_PRSTATUS = 1
# __WALL of linux/wait.h: threads too, which a plain wait passes over.
WALL = 0x40000000
GROUP_STOPS = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
LONGEST_PATH = 4096

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.restype = ctypes.c_long
libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)


@dataclass(frozen=True)
class Machine:
    """How a system call is made, by places of registers in the kernel's `user_regs_struct`, in words of 8 bytes."""

    registers: int
    call: int
    arguments: tuple[int, ...]
    result: int
    pc: int
    stack: int
    instruction: bytes
    openat: int
    close: int
    lseek: int
    dup3: int
    fcntl: int
    prlimit: int
    original: int | None = None
    """The register by which the kernel knows that a call may have to be restarted."""


# asm/ptrace.h: on x86_64 `user_regs_struct` (rax is 10, orig_rax 15, rip 16, rsp 19), on aarch64 `user_pt_regs` (x8
# holds the number of a call, x0 its result, 31 is sp, 32 pc). `instruction` is `syscall` and `svc #0`.
MACHINES = {
    "x86_64": Machine(
        27, 10, (14, 13, 12, 7, 9, 8), 10, 16, 19, b"\x0f\x05",
        openat=257, close=3, lseek=8, dup3=292, fcntl=72, prlimit=302, original=15,
    ),
    "aarch64": Machine(
        34, 8, (0, 1, 2, 3, 4, 5), 0, 32, 31, b"\x01\x00\x00\xd4",
        openat=56, close=57, lseek=62, dup3=24, fcntl=25, prlimit=261,
    ),
}  # fmt: skip


class TracingFailed(Exception):
    """A process could not be put into a new domain; it must not run."""


def ptrace(request: int, tid: int, address: int = 0, data: int = 0) -> int:
    # PEEKDATA returns the word itself, and that may be -1: only errno tells it from a failure.
    ctypes.set_errno(0)
    result = libc.ptrace(request, tid, address, data)
    code = ctypes.get_errno()
    if result == -1 and code:
        raise ProcessLookupError(tid) if code == errno.ESRCH else OSError(code, os.strerror(code))
    return int(result)


def event_message(tid: int) -> int:
    message = ctypes.c_ulong()
    ptrace(GETEVENTMSG, tid, 0, ctypes.addressof(message))
    return message.value


def peek(tid: int, address: int) -> bytes:
    return struct.pack("=q", ptrace(PEEKDATA, tid, address))


def poke(tid: int, address: int, word: bytes) -> None:
    ptrace(POKEDATA, tid, address, int.from_bytes(word, "little"))


def put(tid: int, address: int, words: bytes) -> None:
    words = words.ljust(-(-len(words) // 8) * 8, b"\0")
    for offset in range(0, len(words), 8):
        poke(tid, address + offset, words[offset : offset + 8])


def read_status(tid: int) -> dict[str, str]:
    """What the kernel says of a thread; nothing where it is gone."""
    try:
        with open(f"/proc/{tid}/status", errors="replace") as file:
            return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
    except OSError:
        return {}


def tracees() -> list[int]:
    """The processes that this one traces and has not reaped."""
    own = str(os.getpid())
    return [
        int(name) for name in os.listdir("/proc") if name.isdigit() and read_status(int(name)).get("TracerPid") == own
    ]


def read_link(path: str) -> str:
    """Where a link leads; empty where there is none any more."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def read_text(tid: int, address: int) -> str:
    """A text in the memory of a process, up to its zero byte; empty where the process has no such memory."""
    found = b""
    with contextlib.suppress(OSError, OverflowError), open(f"/proc/{tid}/mem", "rb", buffering=0) as memory:
        while b"\0" not in found and len(found) < LONGEST_PATH:
            # Up to the end of a page: the next may not be there.
            found += os.pread(memory.fileno(), 4096 - (address + len(found)) % 4096, address + len(found))
    return os.fsdecode(found.partition(b"\0")[0])


def get_registers(tid: int, machine: Machine) -> list[int]:
    registers, vector, address = _buffer(machine)
    vector[1] = ctypes.sizeof(registers)
    ptrace(GETREGSET, tid, NT_PRSTATUS, address)
    if vector[1] != 8 * machine.registers:
        raise TracingFailed  # a program for another architecture, such as i386
    return registers[: machine.registers]


@cache
def _buffer(machine: Machine) -> tuple[ctypes.Array[ctypes.c_uint64], ctypes.Array[ctypes.c_size_t], int]:
    """Where the kernel writes registers, the vector that says so, and its address. Made once: a tracer is one thread.
    With room to spare: the kernel says how much it has written, and another size is another architecture."""
    registers = (ctypes.c_uint64 * (machine.registers + 8))()
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(registers), ctypes.sizeof(registers))
    return registers, vector, ctypes.addressof(vector)


def set_registers(tid: int, values: list[int]) -> None:
    registers = (ctypes.c_uint64 * len(values))(*values)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(registers), ctypes.sizeof(registers))
    ptrace(SETREGSET, tid, NT_PRSTATUS, ctypes.addressof(vector))
