"""The program that refuses system calls, carried out as the kernel would."""

from __future__ import annotations

import struct

import pytest

from evsys_sdk.sandbox_filter import ARCHITECTURES, REFUSED, seccomp_filter

ALLOW, REFUSE, UNKNOWN_FAMILY = 0x7FFF0000, 0x00050001, 0x00050061
X86_64, I386, AARCH64, UNKNOWN = 0xC000003E, 0x40000003, 0xC00000B7, 0x16
AF_UNIX, AF_INET, AF_ALG, AF_VSOCK = 1, 2, 38, 40


def verdict(architecture: int, number: int, first_argument: int = 0) -> int:
    program = list(struct.iter_unpack("=HBBI", seccomp_filter()))
    data, place, held = {0: number, 4: architecture, 16: first_argument}, 0, 0
    while True:
        code, if_true, if_false, operand = program[place]
        place += 1
        if code == 0x20:
            held = data[operand]
        elif code == 0x06:
            return operand
        else:
            true = {0x15: held == operand, 0x35: held >= operand}[code]
            place += if_true if true else if_false


@pytest.mark.parametrize(("architecture", "first"), [(X86_64, 248), (I386, 286), (AARCH64, 217)])
def test_the_three_calls_of_the_keyrings_are_refused_and_their_neighbours_are_not(architecture, first):
    answers = [verdict(architecture, number) for number in range(first - 1, first + 4)]
    assert answers == [ALLOW, REFUSE, REFUSE, REFUSE, ALLOW]


@pytest.mark.parametrize(
    "number", [101, 310, 311, 312, 323, 425, 426, 427, 438, 440, 298, 304, 319, 321], ids=lambda n: f"x86_64 {n}"
)
def test_calls_into_other_processes_and_into_much_attacked_parts_of_the_kernel_are_refused(number):
    assert verdict(X86_64, number) == REFUSE


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: hex(a.audit))
def test_every_architecture_refuses_every_call_by_its_own_number(architecture):
    missing = set(REFUSED) - architecture.numbers.keys()
    assert missing <= {"socketcall"}
    assert {verdict(architecture.audit, architecture.numbers[name]) for name in REFUSED if name not in missing} == {
        REFUSE
    }
    assert verdict(architecture.audit, 1) == ALLOW


@pytest.mark.parametrize(("architecture", "socket"), [(X86_64, 41), (I386, 359), (AARCH64, 198)])
def test_sockets_are_of_the_usual_families_only(architecture, socket):
    families = (AF_UNIX, AF_INET, AF_ALG, AF_VSOCK)
    assert [verdict(architecture, socket, family) for family in families] == [
        ALLOW,
        ALLOW,
        UNKNOWN_FAMILY,
        UNKNOWN_FAMILY,
    ]


@pytest.mark.parametrize("number", [0, 1, 59, 101, 250, 521])
def test_the_second_numbering_of_x86_64_is_refused_whole(number):
    assert verdict(X86_64, 0x40000000 + number) == REFUSE


def test_on_a_machine_it_does_not_know_nothing_passes():
    assert {verdict(UNKNOWN, number) for number in (0, 1, 59, 250)} == {REFUSE}
