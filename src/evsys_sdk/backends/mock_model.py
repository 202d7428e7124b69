"""The mock's model: a log-linear one over hashed contexts, with exact gradients and its own AdamW.

In: contexts and gradients of logits. Out: logits and changed tables. Logits are a frozen base, which depends on
the model's name alone, plus the sum of one trainable row per context. Only rows that a batch touches are
changed or stored, and the optimiser keeps moments for those alone, as torch.optim.SparseAdam does.
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from evsys_sdk.backends.mock_tokenizer import END_OF_TEXT, IM_END, IM_START, VOCAB_SIZE
from evsys_sdk.errors import BackendError, error_boundary, need
from evsys_sdk.files import whole_file
from evsys_sdk.training.losses import get_loss, read_inputs, read_metrics, read_targets, settings_of
from evsys_sdk.training_api import AdamParams, Datum, ForwardBackwardOutput, LossCallable

# What the mock model looks at: contexts of a position, hashed to rows of its tables.
#
# In: token ids. Out: per position, the numbers of the table rows whose sum makes the logits. Short contexts (the last
# 1 to 8 tokens) generalise, the whole prompt with the place in the answer memorises, and the words of the message
# before with the place in the answer lie in between. Training hashes a whole sequence at once, sampling one position
# at a time; both go through `rows_of`.


ORDERS = (1, 2, 3, 5, 8)
REACH = max(ORDERS)
WORDS = 4
"""Words of the message before that are looked at: the longest, as they say most."""
TABLES = len(ORDERS) + 3
"""One per order, two for the prompt, one that all words share."""
CONTEXTS = len(ORDERS) + 2 + WORDS
NOTHING = 0
"""The row of a context that is not there; it stays zero."""

# 2**64 divided by the golden ratio, odd: the usual multiplier of multiplicative hashing. _MIX is that of degski's
# 64-bit mixer, of which `_bucket` does one round.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
_WORD = re.compile(rb"[a-z0-9\x80-\xff]+")

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contexts:
    """N positions, ready to be hashed."""

    history: Array
    """[REACH, N]: the token j places back plus 1, and 0 before the start."""
    prompt: Array
    """[N]: hash of everything up to the last turn's header."""
    place: Array
    """[N]: tokens since that header."""
    words: Array
    """[N, WORDS]: hashes of words in the turn before; 0 for none."""


def contexts_of(tokens: Array) -> Contexts:
    """The contexts of every position of one sequence."""
    starts = np.flatnonzero(tokens == IM_START)
    turn = np.searchsorted(starts, np.arange(len(tokens)), side="right")
    numbers = (tokens + 1).astype(np.uint64)
    padded = np.concatenate([np.zeros(REACH - 1, dtype=np.uint64), numbers])
    # A polynomial hash of every prefix at once; uint64 wraps around, which is the modulus.
    prefix_hashes = np.cumsum(numbers * np.cumprod(np.full(len(tokens), _STEP)))
    # For each turn the words of the one before; the first two turns have none.
    words = np.zeros((len(starts) + 1, WORDS), dtype=np.uint64)
    for number in range(2, len(starts) + 1):
        message = tokens[starts[number - 2] + 1 : starts[number - 1]]
        text = bytes(message[message < 256].astype(np.uint8))
        body = text.partition(b"\n")[2].lower()  # what stands before is the role
        longest = sorted(dict.fromkeys(_WORD.findall(body)), key=len, reverse=True)[:WORDS]
        words[number, : len(longest)] = [zlib.crc32(word) + 1 for word in longest]
    return Contexts(
        history=np.lib.stride_tricks.sliding_window_view(padded, REACH)[:, ::-1].T,
        prompt=np.concatenate([[np.uint64(0)], prefix_hashes[starts]])[turn],
        place=np.arange(len(tokens)) - np.concatenate([[0], starts])[turn],
        words=words[turn],
    )


def last_of(contexts: Contexts, copies: int) -> Contexts:
    """The last position alone, `copies` times: where sampling begins."""
    return Contexts(
        history=np.repeat(contexts.history[:, -1:], copies, axis=1),
        prompt=np.repeat(contexts.prompt[-1:], copies),
        place=np.repeat(contexts.place[-1:], copies),
        words=np.repeat(contexts.words[-1:], copies, axis=0),
    )


def join_contexts(parts: list[Contexts]) -> Contexts:
    """Positions of several sequences side by side."""
    return Contexts(
        history=np.concatenate([part.history for part in parts], axis=1),
        prompt=np.concatenate([part.prompt for part in parts]),
        place=np.concatenate([part.place for part in parts]),
        words=np.concatenate([part.words for part in parts]),
    )


def rows_of(contexts: Contexts, buckets: int) -> Array:
    """[N, CONTEXTS]: rows of the stacked tables; table k has rows 1 + k * buckets and on."""
    rows = np.empty((len(contexts.prompt), CONTEXTS), dtype=np.int64)
    running = np.zeros(len(contexts.prompt), dtype=np.uint64)
    pair = contexts.history[0] * _STEP + contexts.history[1]
    for order in range(1, REACH + 1):
        running = running * _STEP + contexts.history[order - 1]
        if order in ORDERS:
            table = ORDERS.index(order)
            rows[:, table] = _bucket(running, buckets, table)
    rows[:, 0] = 1 + contexts.history[0]  # there is a row for each token: no need to hash
    place = contexts.place.astype(np.uint64)
    table = len(ORDERS)
    rows[:, table] = _bucket(contexts.prompt * _STEP + place, buckets, table)
    # Independent of the place: after an answer that is a token longer or shorter, what follows is still recalled.
    rows[:, table + 1] = _bucket(contexts.prompt * _STEP + pair, buckets, table + 1)
    by_word = _bucket(contexts.words * _STEP + place[:, None], buckets, table + 2)
    rows[:, table + 2 :] = np.where(contexts.words == 0, NOTHING, by_word)
    return rows


def _bucket(hashes: Array, buckets: int, table: int) -> Array:
    mixed = (hashes ^ (hashes >> _HALF)) * _MIX
    # The upper half: a product's low bits depend only on the low bits of its factors. It also fits into int64.
    return (mixed >> _HALF).astype(np.int64) % buckets + (1 + table * buckets)


SCALE = np.float32(256.0)
"""Logits see the tables times this, so that learning rates usual for LoRA (1e-5 to 1e-3) are sensible here."""
INIT_NOISE = 1e-4
ROWS_AT_ONCE = 512
"""Rows an optimiser step handles together: few enough to stay in the processor's cache."""


def stream(*parts: object) -> np.random.Generator:
    """The random stream that belongs to `parts`."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


@lru_cache(maxsize=32)
def base_logits(model_name: str) -> Array:
    """[1 + VOCAB, VOCAB]: the untrained model's logits after each token (row 0: after none); it babbles ASCII."""
    logits = stream("base", model_name).normal(0.0, 0.3, (VOCAB_SIZE + 1, VOCAB_SIZE))
    logits[:, :32] -= 6.0
    logits[:, 127:] -= 6.0
    logits[:, ord("\n")] += 5.0
    # The mark lies above 127, so it ends up at 0.5 beside 95 printable characters around 0: about 1.7 % per token, and
    # an untrained answer of some 60 tokens.
    logits[:, IM_END] += 6.5
    logits[:, END_OF_TEXT] -= 4.0
    logits = logits.astype(np.float32)
    logits.setflags(write=False)
    return logits


def buckets_for(rank: int) -> int:
    """Rows per table. Rank 0 means full fine-tuning: as much room as a high rank."""
    return 512 * (rank or 64)


def zero_table(rows: int) -> Array:
    """[rows, VOCAB] of zeros; a row costs memory when it is written to."""
    # `np.zeros` asks for huge pages: the first row touched in 2 MB then costs 2 MB, and a run's rows lie scattered. In
    # a run of 12 steps these pages took 0.2 s of 0.5 s of CPU, and 100 MB.
    pages = mmap.mmap(-1, rows * VOCAB_SIZE * np.dtype(np.float32).itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel without huge pages does not know the advice
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype=np.float32).reshape(rows, VOCAB_SIZE)


class TableModel:
    """A frozen base and the adapter's tables, stacked: row 0 is nothing, then `buckets` rows per table."""

    def __init__(self, *, model_name: str, rank: int, seed: int | None):
        self.model_name, self.rank, self.buckets = model_name, rank, buckets_for(rank)
        self.base = base_logits(model_name)
        self.weights = zero_table(1 + TABLES * self.buckets)
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
    # The largest becomes 0: exp cannot overflow, and the sum is at least 1.
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


class MockGradients:
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
    # Stable, so that the floats of a row are added in the order of the data, and the sum has the same bits again.
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
        self.mean, self.square = zero_table(len(model.weights)), zero_table(len(model.weights))

    def step(self, model: TableModel, gradients: MockGradients, params: AdamParams) -> float:
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
        # The optimiser's own count, as in SparseAdam, not the row's: with betas 0.9 and 0.95, the first change of a row
        # that is touched late is 0.45 of the learning rate, that of one touched at step 1 all of it.
        mean /= 1 - params.beta1**self.steps
        square /= 1 - params.beta2**self.steps
        kept = 1 - params.learning_rate * params.weight_decay
        change = params.learning_rate * mean / (np.sqrt(square) + params.eps)
        model.weights[rows] = kept * model.weights[rows] - change
        model.used[rows] = True


# One forward and one backward through the mock's model.
#
# In: data and a loss. Out: the loss, the targets' logprobs, and gradients added to what is pending. Every loss, named
# or the user's own, is reduced to its slope c at each target's logprob; the gradient of the logits is then c * (one-
# hot - p), exactly. Everything is checked before anything is added: a refused call leaves no trace.


Shapes = list[tuple[int, ...]]
Pull = Callable[[Array, Shapes], tuple[dict[str, float], Array]]
"""(logprobs of all targets, flat; shape of each datum's) -> (metrics, dloss/dlogprob, flat)."""


def forward_backward(model: TableModel, pending: MockGradients, data: list[Datum], pull: Pull) -> ForwardBackwardOutput:
    if not data:
        raise BackendError("forward_backward was called without data")
    pairs = [read_targets(datum, index, VOCAB_SIZE) for index, datum in enumerate(data)]
    contexts = join_contexts([contexts_of(tokens) for tokens, _ in pairs])
    rows = model.rows(contexts)
    logp = log_softmax(model.logits(contexts, rows))
    # For every target of every datum: the position that predicts it, counted over all data, and its token.
    per_position = np.concatenate([np.full(len(targets), targets.size // len(targets)) for _, targets in pairs])
    position = np.repeat(np.arange(len(per_position)), per_position)
    target = np.concatenate([targets.ravel() for _, targets in pairs])
    chosen = logp[position, target]
    metrics, slope = pull(chosen.astype(np.float64), [targets.shape for _, targets in pairs])
    slope = slope.astype(np.float32)
    pulled = slope != 0  # most positions are context and pull at nothing
    active, place = np.unique(position[pulled], return_inverse=True)
    if len(active):
        # A position with K targets pulls K times: its slopes add up before the softmax term, in float64.
        total = np.bincount(place, weights=slope[pulled], minlength=len(active)).astype(np.float32)
        dlogits = -total[:, None] * np.exp(logp[active])
        # `add.at`, as `+=` with an index counts a repeated one once: the same token may be a target twice in a place.
        np.add.at(dlogits.reshape(-1), place * VOCAB_SIZE + target[pulled], slope[pulled])
        pending.add(rows[active], dlogits)
    sizes = np.cumsum([0, *(targets.size for _, targets in pairs)])
    return ForwardBackwardOutput(
        metrics=metrics, logprobs=[chosen[begin:end].tolist() for begin, end in pairwise(sizes)]
    )


def named_loss(data: list[Datum], name: str, config: Mapping[str, float] | None) -> Pull:
    """One of the losses in `evsys_engine.losses`."""
    loss, settings = get_loss(name), settings_of(name, config)

    def pull(logp: Array, shapes: Shapes) -> tuple[dict[str, float], Array]:
        inputs = [read_inputs(*pair, name, shapes[pair[1]]) for pair in zip(data, range(len(data)), strict=True)]
        flat = {key: np.concatenate([each[key].ravel() for each in inputs]) for key in loss.inputs}
        costs, slope = loss.fn(np, logp, **flat, **settings)
        return {"loss:sum": float(costs.sum())}, slope

    return pull


def custom_loss(data: list[Datum], fn: LossCallable) -> Pull:
    """The user's own loss: called once with tensors that require grad, then asked for their gradients."""
    torch = need("torch", extra="local")
    name = getattr(fn, "__qualname__", type(fn).__qualname__)

    def pull(logp: Array, shapes: Shapes) -> tuple[dict[str, float], Array]:
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
        parts = [part.reshape(shape) for part, shape in zip(np.split(logp, ends), shapes, strict=True)]
        tensors = [torch.tensor(part, dtype=torch.float32, requires_grad=True) for part in parts]
        with error_boundary(BackendError, f"custom loss {name}"):
            answer = fn(data, tensors)
            if not (isinstance(answer, tuple) and len(answer) == 2):
                raise BackendError(f"custom loss {name} must return (loss, metrics), not {type(answer).__name__}")
            loss, metrics = answer
            if not getattr(loss, "requires_grad", False) or loss.numel() != 1:
                raise BackendError(f"custom loss {name} must return one differentiable number made from the logprobs")
            numbers = read_metrics(metrics)
            loss.backward()
        slopes = [np.zeros(t.shape) if t.grad is None else t.grad.numpy() for t in tensors]
        return {**numbers, "loss:sum": float(loss.detach())}, np.concatenate([slope.ravel() for slope in slopes])

    return pull


# The mock's weights on disk.
#
# In: a model, and its optimiser when training is to resume from there. Out: a file named after what is in it, so that
# nothing saved is ever overwritten by something else; and back, whole or not at all. Only rows that were ever touched
# are stored.


FORMAT = "evsys-mock-1"
Kind = Literal["state", "sampler"]
_MAKER = {"state": "save_state", "sampler": "save_weights_for_sampler"}


def save(directory: Path, name: str, model: TableModel, adam: Adam | None) -> str:
    """Write the weights, with `adam` as a state and without as sampler weights; return the path."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise BackendError(f"{name!r} cannot name a checkpoint; use letters, digits, '.', '_' and '-'")
    kind: Kind = "sampler" if adam is None else "state"
    head = {"format": FORMAT, "kind": kind, "model": model.model_name, "rank": model.rank}
    rows = np.flatnonzero(model.used)
    arrays: dict[str, Any] = {"rows": rows, "weights": model.weights[rows]}
    if adam is not None:
        head["adam_steps"] = adam.steps
        arrays |= {"mean": adam.mean[rows], "square": adam.square[rows]}
    content = io.BytesIO()
    # `savez` dates its members 1980-01-01: the same weights give the same bytes, so the same name after a resume.
    np.savez(content, head=np.frombuffer(json.dumps(head).encode(), dtype=np.uint8), **arrays)
    digest = hashlib.blake2b(content.getbuffer(), digest_size=6).hexdigest()
    path = directory / f"{name}-{digest}.{kind}.npz"
    with whole_file(path) as handle:
        handle.write(content.getbuffer())
    return str(path)


def load(path: str, kind: Kind) -> tuple[dict[str, Any], dict[str, Array]]:
    """Head and arrays of a file that `save` wrote; anything else is refused."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}  # reading checks each part's checksum
        head = {"kind": None, "model": None, "rank": None, **json.loads(arrays.pop("head").tobytes())}
        if head.get("format") != FORMAT or not {"rows", "weights"} <= arrays.keys():
            raise ValueError("it has another format")
    except FileNotFoundError:
        raise BackendError(f"{path}: there is no such checkpoint") from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, AttributeError, zipfile.BadZipFile) as exc:
        raise BackendError(f"{path} is not a whole checkpoint of the mock backend ({exc})") from exc
    if head["kind"] != kind:
        raise BackendError(f"{path} holds a {head['kind']}; this needs what {_MAKER[kind]} returned")
    return head, arrays


def restore(path: str, kind: Kind, model_name: str, rank: int | None = None) -> tuple[TableModel, Adam | None]:
    """The model in a file, with its optimiser if it is a state. It must fit `model_name`, and `rank` if given."""
    head, arrays = load(path, kind)
    if head["model"] != model_name:
        raise BackendError(f"{path} holds weights for {head['model']!r}; this run's model is {model_name!r}")
    if rank is not None and head["rank"] != rank:
        raise BackendError(f"{path} has rank {head['rank']}, this adapter has {rank}; set lora_rank: {head['rank']}")
    model = TableModel(model_name=model_name, rank=head["rank"], seed=None)
    try:
        rows = arrays["rows"]
        model.weights[rows] = arrays["weights"]
        model.used[rows] = True
        if kind == "sampler":
            return model, None
        adam = Adam(model)
        adam.steps = int(head["adam_steps"])
        adam.mean[rows], adam.square[rows] = arrays["mean"], arrays["square"]
        return model, adam
    except (KeyError, IndexError, ValueError) as exc:
        raise BackendError(f"{path} is not a whole checkpoint of the mock backend ({exc})") from exc


def average(paths: Sequence[str], shares: Sequence[float], model_name: str) -> TableModel:
    """A model whose weights are the weighted sum of those in sampler files."""
    models = [restore(path, "sampler", model_name)[0] for path in paths]
    ranks = sorted({model.rank for model in models})
    if len(ranks) != 1:
        raise BackendError(f"cannot average weights of ranks {', '.join(map(str, ranks)) or 'none'}, which differ")
    total = TableModel(model_name=model_name, rank=models[0].rank, seed=None)
    for model, share in zip(models, shares, strict=True):
        rows = np.flatnonzero(model.used)
        total.weights[rows] += np.float32(share) * model.weights[rows]
        total.used[rows] = True
    return total
