"""What one optimiser step learns from, and the order in which rows come up.

In: a number of rows, an epoch, a seed. Out: `TrainingBatch` and permutations. The order is a function of seed and
epoch alone, so that any step can be rebuilt without having run the ones before it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from evsys_sdk.surface import Datum, LossCallable


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
