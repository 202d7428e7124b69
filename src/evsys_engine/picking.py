"""Which token comes next.

In: logits [rows, vocabulary] and each row's settings and uniform number. Out: one token per row and its logprob under
the model itself (temperature 1, nothing cut off), in fp32 or better. One number per row decides (inverse CDF), so the
choice of a row depends on its own logits and its own number alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from evsys_engine.types import Array

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


class Picker:
    """Picks for a fixed set of rows; make a new one when the set changes."""

    def __init__(self, settings: Sequence[Settings], device: torch.device):
        self._settings = [row if not row.greedy else Settings(1.0, 0, 1.0) for row in settings]
        self._greedy = [i for i, row in enumerate(settings) if row.greedy]
        temperatures = [min(row.temperature, HOTTEST) for row in self._settings]
        self._temperature = torch.tensor(temperatures, dtype=torch.float32, device=device)[:, None]
        self._warmed = any(value != 1 for value in temperatures)
        self._filtered = any(row.top_k > 0 or row.top_p < 1 for row in self._settings)
        self._mass: Tensor | None = None  # kept between steps: new memory of this size costs as much as the arithmetic

    def pick(
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
        self._mass = padded(logits) if self._mass is None else self._mass
        exponentials(logits - top, self._mass)
        cumulative = block_sums(self._mass)
        total = cumulative[:, -1:]
        chance = torch.tensor(uniforms, dtype=torch.float64, device=top.device)
        tokens = self._choose(logits, top, cumulative, chance, allowed or {})
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
                scaled.masked_fill_(scaled < floors(scaled, self._settings), -torch.inf)
            exponentials(scaled, self._mass)
            cumulative = block_sums(self._mass)
        tokens = invert(self._mass, cumulative, chance)
        if self._greedy:
            tokens[self._greedy] = logits[self._greedy].argmax(-1)
        return tokens


def padded(logits: Tensor) -> Tensor:
    """Zeros for these logits and up to the next whole block."""
    return logits.new_zeros((len(logits), -(-logits.shape[1] // BLOCK) * BLOCK))


def exponentials(scaled: Tensor, out: Tensor) -> None:
    torch.exp(scaled, out=out[:, : scaled.shape[1]])


def block_sums(mass: Tensor) -> Tensor:
    """Cumulative, in double precision [rows, blocks]."""
    return mass.unflatten(1, (-1, BLOCK)).sum(-1).double().cumsum(-1)


def invert(mass: Tensor, cumulative: Tensor, chance: Tensor) -> Tensor:
    """The token at each row's place in the CDF of unnormalised probabilities."""
    target = chance * cumulative[:, -1]
    block = first_above(cumulative, target)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    rows = torch.arange(len(mass), device=mass.device)
    inside = mass.unflatten(1, (-1, BLOCK))[rows, block].double().cumsum(-1)
    return block * BLOCK + first_above(inside, target - before)


def first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """The first place whose cumulative mass exceeds the target; never one that adds nothing."""
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
    ordered.masked_fill_(torch.arange(ordered.shape[1], device=k.device) >= k, -torch.inf)
    need = p * ordered.exp().sum(-1, keepdim=True).double()
    return torch.where(p < 1, _crossing(ordered, need)[0], ordered.gather(1, k - 1))


def nucleus_floor(scaled: Tensor, p: Tensor) -> Tensor:
    """The least likely of the likeliest tokens that together hold `p` of the mass [rows, 1]."""
    need = p * scaled.exp().sum(-1, keepdim=True).double()
    ordered = descending(scaled, min(LIKELIEST, scaled.shape[1]))
    floor, found = _crossing(ordered, need)
    if not bool(found.all()):
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
