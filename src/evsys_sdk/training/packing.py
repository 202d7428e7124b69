"""Fill each place of a batch with as many short sequences as fit.

In: the lengths of the data, and how much a pack may hold. Out: packs, as lists of indices. The sequences of a pack stay
data of their own, so none ever sees another, on any backend; what lays them end to end without padding is the local
engine, or the server. A pack is a unit of counting: `batch_size` packs make a step of about the same number of tokens
each time, whatever the rows are like.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from evsys_sdk.training.batch import epoch_order


def packs(lengths: Sequence[int], *, room: int, seed: int) -> list[list[int]]:
    """Every index once, the lengths of a pack together at most `room` (or one that is longer alone): longest first,
    each into the fullest pack that still takes it. The seed decides between equals."""
    shuffled = epoch_order(len(lengths), 0, seed)
    found: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (what still fits, number of the pack), in order
    for index in sorted(shuffled, key=lambda i: -lengths[i]):
        place = bisect_left(free, (lengths[index], -1))
        if place == len(free):
            found.append([index])
            left, number = room - lengths[index], len(found) - 1
        else:
            left, number = free.pop(place)
            found[number].append(index)
            left -= lengths[index]
        if left > 0:
            insort(free, (left, number))
    return found
