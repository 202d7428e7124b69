"""The program that refuses system calls, carried out as the kernel would."""

from __future__ import annotations

import struct

import pytest

from evsys_sdk.sandbox_filter import keyring_filter

ALLOW, REFUSE = 0x7FFF0000, 0x00050001
X86_64, I386, AARCH64, UNKNOWN = 0xC000003E, 0x40000003, 0xC00000B7, 0x16


def verdict(architecture: int, number: int) -> int:
    program = list(struct.iter_unpack("=HBBI", keyring_filter()))
    data, place, held = {0: number, 4: architecture}, 0, 0
    while True:
        code, if_true, if_false, operand = program[place]
        place += 1
        if code == 0x20:
            held = data[operand]
        elif code == 0x54:
            held &= operand
        elif code == 0x06:
            return operand
        else:
            true = {0x15: held == operand, 0x35: held >= operand}[code]
            place += if_true if true else if_false


@pytest.mark.parametrize(
    ("architecture", "first"), [(X86_64, 248), (X86_64, 0x40000000 + 248), (I386, 286), (AARCH64, 217)]
)
def test_the_three_calls_of_the_keyrings_are_refused_and_their_neighbours_are_not(architecture, first):
    answers = [verdict(architecture, number) for number in range(first - 1, first + 4)]
    assert answers == [ALLOW, REFUSE, REFUSE, REFUSE, ALLOW]


def test_on_a_machine_it_does_not_know_nothing_passes():
    assert {verdict(UNKNOWN, number) for number in (0, 1, 59, 250)} == {REFUSE}
