"""The rows every contestant trains on: random tokens, the same for all, `BATCH` to a step.

In: a kind (`equal` or `mixed`) and a number of steps. Out: lists of token ids. Step 0 is short: it warms up.
"""

from __future__ import annotations

import random

BATCH = 8
EQUAL = 128
MIXED = (16, 256)
"""Many short rows, a few long ones, as chats are: each step has one row from every eighth of the log-uniform
distribution between these, so that all steps are alike: about 2.5 times as many tokens with padding as without."""
VOCABULARY = 49000


def make_steps(kind: str, steps: int) -> list[list[list[int]]]:
    """A warm-up of short rows, then `steps` batches."""
    chance = random.Random(1)
    return [make_rows([16] * BATCH, chance), *(make_rows(make_lengths(kind, chance), chance) for _ in range(steps))]


def make_rows(lengths: list[int], chance: random.Random) -> list[list[int]]:
    return [[chance.randrange(10, VOCABULARY) for _ in range(length)] for length in lengths]


def make_lengths(kind: str, chance: random.Random) -> list[int]:
    low, high = MIXED
    if kind == "equal":
        return [EQUAL] * BATCH
    lengths = [round(low * (high / low) ** ((part + chance.random()) / BATCH)) for part in range(BATCH)]
    chance.shuffle(lengths)
    return lengths
