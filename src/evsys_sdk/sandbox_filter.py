"""The system calls that a sandbox is refused: those of the kernel's keyrings.

In: nothing. Out: a seccomp program for bubblewrap's `--seccomp`. Namespaces do not part keyrings: a command would
inherit the session keyring of the program that started it, read its keys, and leave keys there for the next sandbox.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence

# add_key, request_key and keyctl have neighbouring numbers; by AUDIT_ARCH_* of linux/audit.h.
FIRST_OF_THREE = {
    0xC000003E: 248,  # x86_64
    0x40000003: 286,  # i386, which an x86_64 kernel runs too
    0xC00000B7: 217,  # aarch64
    0x40000028: 309,  # arm
    0xC00000F3: 217,  # riscv64
}
X32_BIT = 0x40000000
"""Marks the calls of x86_64's second numbering, which are otherwise the same."""
NUMBER, ARCHITECTURE = 0, 4
"""Where they stand in the kernel's `struct seccomp_data`."""
LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM

Instruction = tuple[int, int, int, int]
"""Code, how far to jump if true, if false, operand."""


def keyring_filter() -> bytes:
    """Lets every call pass but these; on a machine that it does not know it refuses all, so that nothing runs."""
    program: list[Instruction] = [(LOAD, 0, 0, ARCHITECTURE)]
    for architecture, first in FIRST_OF_THREE.items():
        check = _refuse_three(first)
        program += [(JUMP_IF_EQUAL, 0, len(check), architecture), *check]
    return _packed([*program, (RETURN, 0, 0, REFUSE)])


def _refuse_three(first: int) -> list[Instruction]:
    return [
        (LOAD, 0, 0, NUMBER),
        (AND, 0, 0, 0xFFFFFFFF ^ X32_BIT),
        (JUMP_IF_AT_LEAST, 0, 2, first),
        (JUMP_IF_AT_LEAST, 1, 0, first + 3),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]


def _packed(program: Sequence[Instruction]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
