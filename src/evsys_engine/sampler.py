"""How one completion is drawn: its random numbers, which token comes next, and when it is over.

In: a row's seed, logits and settings, and its tokens so far. Out: the next token with its logprob, and how many tokens
stay at the end. Nothing here depends on the rows that share the batch.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from evsys_engine.types import Array, BadRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# One random stream per sampled row.
#
# In: a request's seed and the number of a row in it. Out: uniform numbers in [0, 1), one per sampled token. Nothing
# else feeds a stream: neither the rows that share the batch nor the order in which they are served.


STREAM_BLOCK = 64
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
            # Reversed, because `pop` takes from the end.
            self._ready = self._generator.random(STREAM_BLOCK).tolist()[::-1]
        return self._ready.pop()


def fresh_seed() -> int:
    """For a request that names none."""
    return secrets.randbits(63)


# Which token comes next.
#
# In: logits [rows, vocabulary] and each row's settings and uniform number. Out: one token per row and its logprob
# under the model itself (temperature 1, nothing cut off), in fp32 or better. One number per row decides (inverse
# CDF), so the choice of a row depends on its own logits and its own number alone.


BLOCK = 128
"""The CDF is searched in two levels: sums of blocks, then inside one block."""
COLDEST, HOTTEST = float(torch.finfo(torch.float32).tiny), float(torch.finfo(torch.float32).max)
"""Temperatures are divided by in fp32, where 1e-320 is 0 and 1e300 infinite: either would make NaNs."""
LIKELIEST = 1024
"""Tokens that are looked at first for top-p: sorting a whole vocabulary is slow, and they usually hold enough."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a row picks."""

    temperature: float
    top_k: int
    """0 or less: all."""
    top_p: float

    @property
    def greedy(self) -> bool:
        """So cold that fp32 has no number for the temperature: the likeliest token, as at 0."""
        return self.temperature < COLDEST


class TokenSampler:
    """Samples tokens for a fixed set of rows; make a new one when the set changes."""

    def __init__(self, settings: Sequence[Settings], device: torch.device):
        # Greedy rows get neutral settings, as fp32 cannot divide by their temperature; `_choose` sets their token.
        self._settings = [row if not row.greedy else Settings(1.0, 0, 1.0) for row in settings]
        self._greedy = [i for i, row in enumerate(settings) if row.greedy]
        temperatures = [min(row.temperature, HOTTEST) for row in self._settings]
        self._temperature = torch.tensor(temperatures, dtype=torch.float32, device=device)[:, None]
        self._warmed = any(value != 1 for value in temperatures)
        self._filtered = any(row.top_k > 0 or row.top_p < 1 for row in self._settings)
        self._mass: Tensor | None = None  # kept between steps: new memory of this size costs as much as the arithmetic

    def sample(
        self, logits: Tensor, uniforms: Sequence[float], allowed: Mapping[int, Array] | None = None
    ) -> tuple[list[int], list[float]]:
        """Tokens and logprobs, one per row; a logprob is NaN where the model's logits are not finite.

        `allowed` has the rows that may not pick every token: True where they may.
        """
        logits = logits.float()
        top = logits.amax(-1, keepdim=True)
        lost = ~torch.isfinite(top)[:, 0]
        if bool(lost.any()):  # one row must not spoil its neighbours': it picks anything, and its logprob is NaN
            logits, top = logits.masked_fill(lost[:, None], 0.0), top.masked_fill(lost[:, None], 0.0)
        self._mass = pad_to_block(logits) if self._mass is None else self._mass
        # Less the maximum, so that no exponential overflows and the likeliest token has mass 1.
        exponentials(logits - top, self._mass)
        cumulative = block_sums(self._mass)
        total = cumulative[:, -1:]
        chance = torch.tensor(uniforms, dtype=torch.float64, device=top.device)
        tokens = self._choose(logits, top, cumulative, chance, allowed or {})
        # Of the model's own logits: `_choose` may overwrite the mass, but `total` was summed before.
        logprobs = ((logits.gather(1, tokens[:, None]) - top).double() - total.log())[:, 0]
        return tokens.tolist(), logprobs.masked_fill(lost, torch.nan).tolist()

    def _choose(
        self, logits: Tensor, top: Tensor, cumulative: Tensor, chance: Tensor, allowed: Mapping[int, Array]
    ) -> Tensor:
        assert self._mass is not None
        if allowed:
            # Rows that may pick everything keep their logits and their maximum, so their bits.
            logits = logits.clone()
            for row, mask in allowed.items():
                logits[row].masked_fill_(~torch.from_numpy(mask).to(logits.device), -torch.inf)
            top = logits.amax(-1, keepdim=True)
        if len(self._greedy) == len(logits):
            return logits.argmax(-1)
        if self._warmed or self._filtered or allowed:
            scaled = (logits - top).div_(self._temperature)
            if self._filtered:
                # Tokens that tie with the floor all stay, so top-k may keep more than k.
                scaled.masked_fill_(scaled < floors(scaled, self._settings), -torch.inf)
            exponentials(scaled, self._mass)
            cumulative = block_sums(self._mass)
        tokens = invert(self._mass, cumulative, chance)
        if self._greedy:
            tokens[self._greedy] = logits[self._greedy].argmax(-1)
        return tokens


def pad_to_block(logits: Tensor) -> Tensor:
    """Zeros for these logits and up to the next whole block."""
    return logits.new_zeros((len(logits), -(-logits.shape[1] // BLOCK) * BLOCK))


def exponentials(scaled: Tensor, out: Tensor) -> None:
    torch.exp(scaled, out=out[:, : scaled.shape[1]])


def block_sums(mass: Tensor) -> Tensor:
    """Cumulative, in double precision [rows, blocks]."""
    # The long running sum is the one that loses digits, so it is made in fp64.
    return mass.unflatten(1, (-1, BLOCK)).sum(-1).double().cumsum(-1)


def invert(mass: Tensor, cumulative: Tensor, chance: Tensor) -> Tensor:
    """The token at each row's place in the CDF of unnormalised probabilities."""
    target = chance * cumulative[:, -1]
    block = first_above(cumulative, target)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    rows = torch.arange(len(mass), device=mass.device)
    # Summed in fp64, while the block's own sum was made in fp32: the target may lie just beyond the end of `inside`,
    # and `first_above` then takes the last token that has mass.
    inside = mass.unflatten(1, (-1, BLOCK))[rows, block].double().cumsum(-1)
    return block * BLOCK + first_above(inside, target - before)


def first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """The first place whose cumulative mass exceeds the target; never one that adds nothing."""
    # `right=True` steps over places that add nothing: they have the same cumulative mass as the place before.
    place = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    # Rounding may put the target at the very end: then the last place that added anything.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())[:, 0]
    return torch.minimum(place, last)


def floors(scaled: Tensor, settings: Sequence[Settings]) -> Tensor:
    """What a token must reach to stay [rows, 1]: top-k first, then top-p of what is left.

    Top-p keeps the fewest likeliest tokens that hold so much of the mass. `scaled` is (logits - maximum) / temperature.
    """
    floor = torch.full((len(scaled), 1), -torch.inf, device=scaled.device)
    with_k = [i for i, row in enumerate(settings) if 0 < row.top_k < scaled.shape[1]]
    with_p = [i for i, row in enumerate(settings) if row.top_p < 1 and not 0 < row.top_k < scaled.shape[1]]
    p = torch.tensor([[row.top_p] for row in settings], dtype=torch.float64, device=scaled.device)
    if with_k:
        k = torch.tensor([[settings[i].top_k] for i in with_k], device=scaled.device)
        floor[with_k] = top_k_floor(scaled[with_k], k, p[with_k])
    if with_p:
        floor[with_p] = nucleus_floor(scaled[with_p], p[with_p])
    return floor


def top_k_floor(scaled: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """The least likely of the k likeliest tokens, or of those among them that hold `p` of their mass [rows, 1]."""
    ordered = descending(scaled, int(k.max()))
    # Every row has its own k; all are cut out of the largest.
    ordered.masked_fill_(torch.arange(ordered.shape[1], device=k.device) >= k, -torch.inf)
    need = p * ordered.exp().sum(-1, keepdim=True).double()
    return torch.where(p < 1, _crossing(ordered, need)[0], ordered.gather(1, k - 1))


def nucleus_floor(scaled: Tensor, p: Tensor) -> Tensor:
    """The least likely of the likeliest tokens that together hold `p` of the mass [rows, 1]."""
    need = p * scaled.exp().sum(-1, keepdim=True).double()
    ordered = descending(scaled, min(LIKELIEST, scaled.shape[1]))
    floor, found = _crossing(ordered, need)
    if not bool(found.all()):
        # Flat distributions, as at a high temperature: these rows alone are sorted in full.
        flat = ~found[:, 0]
        floor[flat] = _crossing(descending(scaled[flat], scaled.shape[1]), need[flat])[0]
    return floor


def _crossing(ordered: Tensor, need: Tensor) -> tuple[Tensor, Tensor]:
    """Where falling values have summed up to `need`, and whether they do."""
    mass = ordered.exp().double()
    cumulative = mass.cumsum(-1)
    stay = (cumulative - mass < need).sum(-1, keepdim=True)  # what is before a token decides, so the first always stays
    return ordered.gather(1, stay - 1), cumulative[:, -1:] >= need


def descending(values: Tensor, count: int) -> Tensor:
    """The largest `count`, sorted. On a CPU numpy is ten times as fast as torch, which also sorts the places."""
    if values.device.type != "cpu":
        return values.topk(count, dim=-1).values
    array, start = values.numpy(), values.shape[1] - count
    largest = np.partition(array, start, axis=-1)[:, start:] if start else array
    return torch.from_numpy(np.sort(largest, axis=-1)[:, ::-1].copy())


# When a completion is over.
#
# In: the tokens of a row so far. Out: nothing, or how many of them stay. A stop id stays as the last token; a stop
# string is cut off, with every token that holds a piece of it, unless it is to stay.


MARGIN = 8
"""Tokens decoded before those that can hold a stop string: a tokenizer may treat a text's first one differently."""


class StopRule:
    """The stops of one request."""

    def __init__(
        self,
        stop: Sequence[str | int],
        end_ids: frozenset[int],
        tokenizer: PreTrainedTokenizerBase,
        *,
        keep_strings: bool = False,
    ):
        self._ids = end_ids | {item for item in stop if isinstance(item, int)}
        self._strings = [item for item in stop if isinstance(item, str)]
        self._tokenizer, self._keep_strings = tokenizer, keep_strings
        if "" in self._strings:
            raise BadRequest("stop has an empty string, which every text contains")
        if self._strings and tokenizer is None:
            raise BadRequest("stop has strings, but this model has no tokenizer; use token ids")
        # A token holds at least one byte, so no more than these can share in a stop string.
        self._window = MARGIN + max((len(item.encode("utf-8", "surrogatepass")) for item in self._strings), default=0)

    def kept(self, tokens: list[int]) -> int | None:
        """How many tokens stay if the last one ended the row; None if the row continues. Call it after every token."""
        if tokens[-1] in self._ids:
            return len(tokens)
        # The window costs the same at every token; the whole text is decoded only when it holds a stop, for its place.
        if self._strings and self._place(tokens[-self._window :]) is not None:
            place = self._place(tokens)
            if place is not None:
                return len(tokens) if self._keep_strings else self._cut(tokens, place)
        return None

    def _place(self, tokens: list[int]) -> int | None:
        """Where in the text the first stop string begins."""
        text = self._text(tokens)
        return min((text.find(item) for item in self._strings if item in text), default=None)

    def _cut(self, tokens: list[int], place: int) -> int:
        # Backwards: the stop string has only just been written, so few prefixes are decoded.
        kept = len(tokens) - 1
        while kept and len(self._text(tokens[:kept])) > place:
            kept -= 1
        return kept

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """What the model itself means by "the end"; these stop unless the request says otherwise."""
    found: set[int] = set()
    for owner in (tokenizer, getattr(model, "generation_config", None)):
        value = getattr(owner, "eos_token_id", None)
        found |= set(value) if isinstance(value, (list, tuple)) else {value} if value is not None else set()
    return frozenset(int(item) for item in found)
