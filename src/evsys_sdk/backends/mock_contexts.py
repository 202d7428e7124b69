"""What the mock model looks at: contexts of a position, hashed to rows of its tables.

In: token ids. Out: per position, the numbers of the table rows whose sum makes the logits. Short contexts
(the last 1 to 8 tokens) generalise, the whole prompt with the place in the answer memorises, and the
words of the message before with the place in the answer lie in between. Training hashes a whole
sequence at once, sampling one position at a time; both go through `rows_of`.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from evsys_sdk.backends.mock_tokenizer import IM_START

ORDERS = (1, 2, 3, 5, 8)
REACH = max(ORDERS)
WORDS = 4
"""Words of the message before that are looked at: the longest, as they say most."""
TABLES = len(ORDERS) + 3
"""One per order, two for the prompt, one that all words share."""
CONTEXTS = len(ORDERS) + 2 + WORDS
NOTHING = 0
"""The row of a context that is not there; it stays zero."""

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
    return Contexts(
        history=_history(tokens),
        prompt=np.concatenate([[np.uint64(0)], _prefix_hashes(tokens)[starts]])[turn],
        place=np.arange(len(tokens)) - np.concatenate([[0], starts])[turn],
        words=_words_before(tokens, starts)[turn],
    )


def last_of(contexts: Contexts, copies: int) -> Contexts:
    """The last position alone, `copies` times: where sampling begins."""
    return Contexts(
        history=np.repeat(contexts.history[:, -1:], copies, axis=1),
        prompt=np.repeat(contexts.prompt[-1:], copies),
        place=np.repeat(contexts.place[-1:], copies),
        words=np.repeat(contexts.words[-1:], copies, axis=0),
    )


def joined(parts: list[Contexts]) -> Contexts:
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
    rows[:, table + 1] = _bucket(contexts.prompt * _STEP + pair, buckets, table + 1)
    by_word = _bucket(contexts.words * _STEP + place[:, None], buckets, table + 2)
    rows[:, table + 2 :] = np.where(contexts.words == 0, NOTHING, by_word)
    return rows


def _bucket(hashes: Array, buckets: int, table: int) -> Array:
    mixed = (hashes ^ (hashes >> _HALF)) * _MIX
    return (mixed >> _HALF).astype(np.int64) % buckets + (1 + table * buckets)


def _history(tokens: Array) -> Array:
    padded = np.concatenate([np.zeros(REACH - 1, dtype=np.uint64), (tokens + 1).astype(np.uint64)])
    return np.lib.stride_tricks.sliding_window_view(padded, REACH)[:, ::-1].T


def _prefix_hashes(tokens: Array) -> Array:
    powers = np.cumprod(np.full(len(tokens), _STEP))
    return np.cumsum((tokens + 1).astype(np.uint64) * powers)


def _words_before(tokens: Array, starts: Array) -> Array:
    """[turns + 1, WORDS]: for each turn the words of the one before; the first two have none."""
    words = np.zeros((len(starts) + 1, WORDS), dtype=np.uint64)
    for turn in range(2, len(starts) + 1):
        found = _words_in(tokens[starts[turn - 2] + 1 : starts[turn - 1]])
        words[turn, : len(found)] = found
    return words


def _words_in(message: Array) -> list[int]:
    text = bytes(message[message < 256].astype(np.uint8))
    body = text.partition(b"\n")[2].lower()  # what stands before is the role
    found = sorted(dict.fromkeys(_WORD.findall(body)), key=len, reverse=True)
    return [zlib.crc32(word) + 1 for word in found[:WORDS]]
