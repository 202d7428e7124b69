"""What a training step gets: its batch, the order of rows, packs of short sequences, the learning rate.

In: numbers of rows, lengths, seeds, a step. Out: `TrainingBatch`, orders, packs and rates. All are pure functions, so a
resumed run has the same steps as an uninterrupted one.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from evsys_sdk.training_api import Datum, LossCallable

# What one optimiser step learns from, and the order in which rows come up.
#
# In: a number of rows, an epoch, a seed. Out: `TrainingBatch` and permutations. The order is a function of seed and
# epoch alone, so that any step can be rebuilt without having run the ones before it.


@dataclass(slots=True)
class TrainingBatch:
    """The data of one step and the loss to apply to it."""

    data: list[Datum]
    loss_fn: str | LossCallable = "cross_entropy"
    """A loss the backend knows by name, or your own `(data, logprobs) -> (loss, metrics)`."""
    loss_fn_config: dict[str, float] | None = None
    """Settings of a named loss."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Logged with the step."""
    rollouts: list[Any] = field(default_factory=list)
    """What the model did to make this data, where it did."""
    row_ids: list[str] = field(default_factory=list)
    """Where the data came from; named when the step goes wrong."""
    loss_scale: float | None = None
    """What `loss:sum` is divided by for the logs; None takes the weight of the tokens that pull."""
    keep_together: int = 1
    """Neighbours in `data` that one call must see together: 2 for pairs."""


def epoch_order(n: int, epoch: int, seed: int) -> list[int]:
    """The numbers 0 to n - 1 in the order of this epoch."""
    # Only `random()` itself is promised to stay the same from one Python to the next, `shuffle` is not.
    chance = random.Random(f"{seed}:{epoch}")
    keys = [chance.random() for _ in range(n)]
    return sorted(range(n), key=keys.__getitem__)


class RowOrder:
    """Which rows each step sees: every row once per epoch, the last batch of an epoch as large as what is left."""

    def __init__(self, n: int, *, batch_size: int, seed: int):
        self.n, self.batch_size, self.seed = n, batch_size, seed
        self.steps_per_epoch = -(-n // batch_size)
        self._epoch, self._order = -1, list[int]()

    def indices(self, step: int) -> list[int]:
        """The rows of step `step` (1-based), in any epoch."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(self.n, epoch, self.seed)
        return self._order[place * self.batch_size : (place + 1) * self.batch_size]


# Fill each place of a batch with as many short sequences as fit.
#
# In: the lengths of the data, and how much a pack may hold. Out: packs, as lists of indices. The sequences of a pack
# stay separate data, so none ever sees another, on any backend; what lays them end to end without padding is the
# local engine, or the server. A pack is a unit of counting: `batch_size` packs make a step of about the same number
# of tokens each time, whatever the rows are like.


def packs(lengths: Sequence[int], *, room: int, seed: int) -> list[list[int]]:
    """Every index once, the lengths of a pack together at most `room` (or one that is longer alone): longest first,
    each into the fullest pack that still takes it. The seed decides between equals."""
    shuffled = epoch_order(len(lengths), 0, seed)
    found: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (what still fits, number of the pack), in order
    for index in sorted(shuffled, key=lambda i: -lengths[i]):
        # Best fit: `free` is sorted, so this is the pack with the least room that is enough. Pack numbers begin at 0,
        # so -1 sorts before every pack with exactly this room.
        place = bisect_left(free, (lengths[index], -1))
        if place == len(free):
            found.append([index])
            left, number = room - lengths[index], len(found) - 1
        else:
            left, number = free.pop(place)
            found[number].append(index)
            left -= lengths[index]
        # A full pack, or one with a sequence longer than `room`, is never looked at again.
        if left > 0:
            insort(free, (left, number))
    return found


# Learning rates as pure functions of the step.
#
# In: a step (1-based), the number of steps, a shape. Out: a learning rate. Nothing is remembered between steps, so a
# resumed run has the same rates as an uninterrupted one.


ScheduleName = Literal["constant", "linear", "cosine"]


def constant(progress: float) -> float:
    """The full rate throughout."""
    return 1.0


def linear(progress: float) -> float:
    """A straight line down to 0 just after the last step."""
    return 1.0 - progress


def cosine(progress: float) -> float:
    """Half a cosine wave down to 0 just after the last step."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


SHAPES: dict[str, Callable[[float], float]] = {"constant": constant, "linear": linear, "cosine": cosine}


def warmup_length(total_steps: int, *, warmup_steps: int = 0, warmup_fraction: float = 0.0) -> int:
    """Steps of warm-up, given outright or as a part of the whole."""
    return min(total_steps, warmup_steps or round(warmup_fraction * total_steps))


def learning_rate(step: int, *, peak: float, total_steps: int, shape: ScheduleName, warmup: int = 0) -> float:
    """The rate of step `step`: up a straight line that reaches `peak` at step `warmup`, then along the shape."""
    if step <= warmup:
        return peak * step / warmup
    # From 0 at the first step after the warm-up to just below 1 at the last one: no step is spent at a rate of 0.
    progress = (step - 1 - warmup) / max(1, total_steps - warmup)
    return peak * SHAPES[shape](min(progress, 1.0))
