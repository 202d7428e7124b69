"""Drawing completions from the mock's model, a token at a time, all rows together.

In: a model, a prompt, sampling parameters. Out: completions with the logprobs the model itself gives their tokens,
that is before temperature, top-k and top-p. Row i draws from a stream made of (seed, prompt, i), so it is
the same whatever other rows are in the call. A stop id ends the completion as its last token; a stop string is cut off.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import numpy as np

from evsys_sdk.backends.mock_model import Array, Contexts, TableModel, contexts_of, last_of, log_softmax, stream
from evsys_sdk.backends.mock_tokenizer import BYTES_OF, END_OF_TEXT, IM_END, IM_START, SPECIALS, VOCAB_SIZE
from evsys_sdk.errors import BackendError, error_boundary
from evsys_sdk.training.losses import read_tokens
from evsys_sdk.training_api import ModelInput, SampledSequence, SampleOutput, SamplingParams

if TYPE_CHECKING:
    from evsys_engine.grammar import Matcher

DRAWS_AT_ONCE = 64
COLDEST = float(np.finfo(np.float32).tiny)
"""Below this temperature the likeliest token is taken, as at 0: dividing by 1e-320 gives NaN."""
_LONGEST_MARK = max(map(len, SPECIALS))


@dataclass(slots=True)
class _Row:
    """A completion on its way."""

    chance: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: Literal["stop", "length"] = "length"
    matcher: Matcher | None = None

    def take(self, token: int, logprob: float, stops: _Stops) -> bool:
        """Append a token; True when the completion ends with it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        keep = stops.cut(self.tokens)
        if keep is None:
            if token not in stops.ids:
                if self.matcher is not None:
                    self.matcher.take(token)
                return False
            keep = len(self.tokens)
        del self.tokens[keep:], self.logprobs[keep:]
        self.ended = "stop"
        return True


class _Stops:
    """Where a completion ends before its length is used up."""

    def __init__(self, stop: tuple[str | int, ...]):
        self.ids = {END_OF_TEXT, IM_END} | {item for item in stop if isinstance(item, int)}
        texts = [item for item in stop if isinstance(item, str) and item]
        self.strings = [text.encode("utf-8", "surrogatepass") for text in texts]

    def cut(self, tokens: list[int]) -> int | None:
        """How many tokens stand before a stop string that the last token completed."""
        for string in self.strings:
            # A token has at least one byte, so this tail holds a string that the last token completed.
            tail = tokens[-(len(string) + _LONGEST_MARK) :]
            at = b"".join(BYTES_OF[token] for token in tail).find(string)
            if at >= 0:
                ends = accumulate(len(BYTES_OF[token]) for token in tail)
                return len(tokens) - len(tail) + sum(end <= at for end in ends)
        return None


def read_prompt(prompt: ModelInput) -> Array:
    """The prompt's tokens, checked."""
    return read_tokens(prompt.tokens, "prompt", VOCAB_SIZE)


def sample(
    model: TableModel, prompt: ModelInput, count: int, params: SamplingParams, logprobs: bool, top: int
) -> SampleOutput:
    """Completions of `prompt` and, where asked, what the model thinks of the prompt itself."""
    wrong = {
        f"num_samples is {count}": count < 1,
        f"max_tokens is {params.max_tokens}": params.max_tokens < 1,
        f"temperature is {params.temperature}": not 0 <= params.temperature < float("inf"),
        f"top_p is {params.top_p}": not 0 < params.top_p <= 1,
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise BackendError(f"cannot sample: {what}")
    tokens = read_prompt(prompt)
    about_prompt, best = prompt_logprobs(model, tokens, top) if logprobs or top else (None, None)
    return SampleOutput(
        sequences=draw(model, tokens, count, params),
        prompt_logprobs=about_prompt if logprobs else None,
        topk_prompt_logprobs=best if top else None,
    )


def prompt_logprobs(
    model: TableModel, tokens: Array, top: int = 0
) -> tuple[list[float | None], list[list[tuple[int, float]] | None]]:
    """The logprob of each prompt token, and the `top` likeliest tokens in its place; None for the first."""
    contexts = contexts_of(tokens)
    logp = log_softmax(model.logits(contexts, model.rows(contexts)))[:-1]
    own = logp[np.arange(len(logp)), tokens[1:]].tolist()
    order = np.argsort(-logp, axis=1, kind="stable")[:, :top]
    likely = np.take_along_axis(logp, order, axis=1).tolist()
    best = [list(zip(*pair, strict=True)) for pair in zip(order.tolist(), likely, strict=True)]
    return [None, *own], [None, *best]


def draw(model: TableModel, prompt: Array, count: int, params: SamplingParams) -> list[SampledSequence]:
    """`count` completions of `prompt`."""
    seed = secrets.randbits(63) if params.seed is None else params.seed
    key = prompt.tobytes().hex()
    first = None
    if params.grammar is not None:
        from evsys_engine.grammar import Matcher, byte_vocabulary

        marks = range(VOCAB_SIZE - len(SPECIALS), VOCAB_SIZE)
        with error_boundary(BackendError, "the grammar"):
            first = Matcher.begin(params.grammar, byte_vocabulary(BYTES_OF, marks, (IM_END, END_OF_TEXT)))
    rows = [
        _Row(chance=stream("sample", seed, index, key), matcher=first.copy() if first else None)
        for index in range(count)
    ]
    stops, alive = _Stops(params.stop), rows
    contexts = last_of(contexts_of(prompt), count)
    draws = np.zeros((count, 0))
    for turn in range(params.max_tokens):
        if turn % DRAWS_AT_ONCE == 0:
            # Each row from its own generator, a block at a time: how many rows are alive changes no row's numbers.
            draws = np.stack([row.chance.random(DRAWS_AT_ONCE) for row in alive])
        logp = log_softmax(model.logits(contexts, model.rows(contexts)))
        may = logp
        if params.grammar is not None:
            may = np.where([row.matcher.allowed() for row in alive if row.matcher], logp, -np.inf)
        chosen = _choose(may, draws[:, turn % DRAWS_AT_ONCE], params)
        picked = logp[np.arange(len(chosen)), chosen].tolist()
        ended = [
            row.take(token, logprob, stops) for row, token, logprob in zip(alive, chosen.tolist(), picked, strict=True)
        ]
        contexts = _advance(contexts, chosen, prompt, alive)
        if any(ended):
            going = np.flatnonzero(~np.array(ended))
            if not len(going):
                break
            alive, draws = [alive[index] for index in going], draws[going]
            contexts = Contexts(
                history=contexts.history[:, going],
                prompt=contexts.prompt[going],
                place=contexts.place[going],
                words=contexts.words[going],
            )
    return [SampledSequence(tokens=row.tokens, logprobs=row.logprobs, stop_reason=row.ended) for row in rows]


def _choose(logp: Array, draws: Array, params: SamplingParams) -> Array:
    if params.temperature < COLDEST:
        return logp.argmax(axis=1)
    scaled = logp.astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    order = None
    if 0 < params.top_k < weights.shape[1] or params.top_p < 1:
        order = np.argsort(-weights, axis=1, kind="stable")
        weights = np.take_along_axis(weights, order, axis=1)  # falling; the first always stays
        if params.top_k > 0:
            weights[:, params.top_k :] = 0.0
        if params.top_p < 1:
            # What is likelier than the token itself, without it: the token that crosses `top_p` stays in.
            before = weights.cumsum(axis=1) - weights
            outside = before >= params.top_p * weights.sum(axis=1, keepdims=True)
            outside[:, 0] = False
            weights[outside] = 0.0
    heights = weights.cumsum(axis=1)
    # The inverse of the cumulative distribution. `<=`: a draw of exactly 0 passes over tokens of weight 0.
    chosen = (heights <= draws[:, None] * heights[:, -1:]).sum(axis=1)
    return chosen if order is None else order[np.arange(len(chosen)), chosen]


def _advance(contexts: Contexts, chosen: Array, prompt: Array, rows: list[_Row]) -> Contexts:
    history = np.roll(contexts.history, 1, axis=0)
    history[0] = chosen + 1
    moved = replace(contexts, history=history, place=contexts.place + 1)
    for index in np.flatnonzero(chosen == IM_START):  # a new turn: prompt, place and words start over
        fresh = contexts_of(np.concatenate([prompt, rows[index].tokens]))
        moved.prompt[index], moved.place[index] = fresh.prompt[-1], fresh.place[-1]
        moved.words[index] = fresh.words[-1]
    return moved
