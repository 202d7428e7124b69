"""The mock's model: a log-linear one over hashed contexts, with exact gradients and its own AdamW.

In: contexts and gradients of logits. Out: logits and changed tables. Logits are a frozen base, which depends on
the model's name alone, plus the sum of one trainable row per context. Only rows that a batch touches are
changed or stored, and the optimiser keeps moments for those alone, as torch.optim.SparseAdam does.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

from evsys_sdk.backends.mock_contexts import NOTHING, TABLES, Array, Contexts, rows_of
from evsys_sdk.backends.mock_tokenizer import END_OF_TEXT, IM_END, VOCAB_SIZE
from evsys_sdk.surface import AdamParams

SCALE = np.float32(256.0)
"""Logits see the tables times this, so that learning rates usual for LoRA (1e-5 to 1e-3) are sensible here."""
INIT_NOISE = 1e-4
ROWS_AT_ONCE = 512
"""Rows an optimiser step handles together: few enough to stay in the processor's cache."""


def stream(*parts: object) -> np.random.Generator:
    """A random stream of its own for `parts`."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


@lru_cache(maxsize=32)
def base_logits(model_name: str) -> Array:
    """[1 + VOCAB, VOCAB]: the untrained model's logits after each token (row 0: after none); it babbles ASCII."""
    logits = stream("base", model_name).normal(0.0, 0.3, (VOCAB_SIZE + 1, VOCAB_SIZE))
    logits[:, :32] -= 6.0
    logits[:, 127:] -= 6.0
    logits[:, ord("\n")] += 5.0
    logits[:, IM_END] += 6.5
    logits[:, END_OF_TEXT] -= 4.0
    logits = logits.astype(np.float32)
    logits.setflags(write=False)
    return logits


def buckets_for(rank: int) -> int:
    """Rows per table. Rank 0 means full fine-tuning: as much room as a high rank."""
    return 512 * (rank or 64)


class TableModel:
    """A frozen base and the adapter's tables, stacked: row 0 is nothing, then `buckets` rows per table."""

    def __init__(self, *, model_name: str, rank: int, seed: int | None):
        self.model_name, self.rank, self.buckets = model_name, rank, buckets_for(rank)
        self.base = base_logits(model_name)
        # Pages of a fresh zero array cost no memory until they are written to.
        self.weights = np.zeros((1 + TABLES * self.buckets, VOCAB_SIZE), dtype=np.float32)
        self.used = np.zeros(len(self.weights), dtype=bool)
        if seed is not None:
            first = slice(1, 2 + VOCAB_SIZE)  # the rows of the last token: every position reads one
            noise = stream("adapter", seed).normal(0.0, INIT_NOISE, self.weights[first].shape)
            self.weights[first] = noise
            self.used[first] = True

    def rows(self, contexts: Contexts) -> Array:
        return rows_of(contexts, self.buckets)

    def logits(self, contexts: Contexts, rows: Array) -> Array:
        """[N, VOCAB]."""
        total = self.weights[rows[:, 0]]
        for column in range(1, rows.shape[1]):
            total += self.weights[rows[:, column]]
        total *= SCALE
        total += self.base[contexts.history[0].astype(np.int64)]
        return total


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


class Gradients:
    """What the calls since the last optimiser step add up to, by row."""

    def __init__(self) -> None:
        self.rows = np.zeros(0, dtype=np.int64)
        self.values = np.zeros((0, VOCAB_SIZE), dtype=np.float32)

    def add(self, rows: Array, dlogits: Array) -> None:
        """Add what `dlogits` [N, VOCAB] means for the rows [N, CONTEXTS] that made these logits."""
        positions = np.repeat(np.arange(len(rows)), rows.shape[1])
        flat = rows.ravel()
        there = flat != NOTHING
        new_rows, new_values = sum_by_row(flat[there], dlogits * SCALE, positions[there])
        if len(self.rows):
            stacked = np.concatenate([self.values, new_values])
            every = np.concatenate([self.rows, new_rows])
            new_rows, new_values = sum_by_row(every, stacked, np.arange(len(every)))
        self.rows, self.values = new_rows, new_values

    def norm(self) -> float:
        return float(np.sqrt(np.square(self.values, dtype=np.float64).sum()))


def sum_by_row(rows: Array, values: Array, source: Array) -> tuple[Array, Array]:
    """Distinct `rows`, and for each the sum of `values[source]` over its occurrences."""
    order = np.argsort(rows, kind="stable")
    ordered, source = rows[order], source[order]
    first = np.flatnonzero(np.diff(ordered, prepend=-1))
    counts = np.diff(first, append=len(ordered))
    sums = values[source[first]]
    few = 16  # most rows occur once or twice; reduceat is slow on many short runs, this on few long ones
    for nth in range(1, min(few, int(counts.max(initial=0)))):
        more = np.flatnonzero((counts > nth) & (counts <= few))
        sums[more] += values[source[first[more] + nth]]
    for row in np.flatnonzero(counts > few):
        sums[row] = values[source[first[row] : first[row] + counts[row]]].sum(axis=0)
    return ordered[first], sums


class Adam:
    """AdamW whose moments and decay reach only the rows that have a gradient."""

    def __init__(self, model: TableModel):
        self.steps = 0
        self.mean = np.zeros(model.weights.shape, dtype=np.float32)
        self.square = np.zeros(model.weights.shape, dtype=np.float32)

    def step(self, model: TableModel, gradients: Gradients, params: AdamParams) -> float:
        """Change the model; the gradient's norm before clipping comes back."""
        self.steps += 1
        norm = gradients.norm()
        clip = params.grad_clip_norm
        shrink = np.float32(clip / norm if clip and norm > clip else 1.0)
        for begin in range(0, len(gradients.rows), ROWS_AT_ONCE):
            part = slice(begin, begin + ROWS_AT_ONCE)
            self._update(model, gradients.rows[part], gradients.values[part] * shrink, params)
        return norm

    def _update(self, model: TableModel, rows: Array, grads: Array, params: AdamParams) -> None:
        mean = params.beta1 * self.mean[rows] + (1 - params.beta1) * grads
        square = params.beta2 * self.square[rows] + (1 - params.beta2) * grads * grads
        self.mean[rows], self.square[rows] = mean, square
        mean /= 1 - params.beta1**self.steps
        square /= 1 - params.beta2**self.steps
        kept = 1 - params.learning_rate * params.weight_decay
        change = params.learning_rate * mean / (np.sqrt(square) + params.eps)
        model.weights[rows] = kept * model.weights[rows] - change
        model.used[rows] = True
