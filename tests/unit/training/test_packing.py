"""Short sequences share a place of the batch."""

from __future__ import annotations

import random

import pytest

from evsys_sdk.training.batch import packs


def test_every_sequence_is_in_one_pack_and_no_pack_holds_too_much():
    chance = random.Random(3)
    lengths = [chance.randint(1, 100) for _ in range(500)]
    found = packs(lengths, room=128, seed=0)
    assert sorted(index for pack in found for index in pack) == list(range(500))
    assert max(sum(lengths[index] for index in pack) for pack in found) <= 128
    least = sum(lengths) / 128
    assert len(found) <= 1.1 * least + 1, "packs are nearly full"


def test_a_sequence_that_fills_a_pack_is_alone():
    assert sorted(map(len, packs([10, 10, 4, 6], room=10, seed=0))) == [1, 1, 2]


def test_a_sequence_longer_than_a_pack_is_alone_too():
    assert sorted(packs([12, 1], room=10, seed=0)) == [[0], [1]]


def test_a_seed_repeats_and_another_puts_others_together():
    lengths = [5] * 40
    assert packs(lengths, room=20, seed=1) == packs(lengths, room=20, seed=1)
    assert packs(lengths, room=20, seed=1) != packs(lengths, room=20, seed=2)


@pytest.mark.parametrize("lengths", [[], [3]])
def test_few_sequences_make_few_packs(lengths):
    assert len(packs(lengths, room=10, seed=0)) == len(lengths)
