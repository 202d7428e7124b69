"""One random stream per sampled row.

In: a request's seed and the number of a row in it. Out: uniform numbers in [0, 1), one per sampled token. Nothing
else feeds a stream: neither the rows that share the batch nor the order in which they are served.
"""

from __future__ import annotations

import secrets

import numpy as np

BLOCK = 64
"""Numbers drawn at a time; the stream is the same for any block size."""


class RowStream:
    """The numbers of row `row` under `seed`."""

    __slots__ = ("_generator", "_ready")

    def __init__(self, seed: int, row: int):
        # Philox is counter-based: streams of neighbouring keys are independent. Negative seeds have their own.
        entropy = (abs(seed), int(seed < 0), row)
        self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))
        self._ready: list[float] = []

    def draw(self) -> float:
        if not self._ready:
            self._ready = self._generator.random(BLOCK).tolist()[::-1]
        return self._ready.pop()


def fresh_seed() -> int:
    """For a request that names none."""
    return secrets.randbits(63)
