"""The named losses: what each token costs and how it pulls on its logprob.

In: logprobs of the target tokens and the arrays a loss reads, all of one shape. Out: `(loss, dloss/dlogprob)`, one
number per token. The definitions are Tinker's: sums over tokens, never means, so that gradients of several calls
simply add up.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evsys_engine.types import BadRequest

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Bounds of the probability ratio itself, not distances from 1."""
Pulled = tuple[Tensor, Tensor]


def cross_entropy(logp: Tensor, *, weights: Tensor) -> Pulled:
    """Minus the weighted logprob of the targets."""
    return -(weights * logp), -weights


def importance_sampling(logp: Tensor, *, logprobs: Tensor, advantages: Tensor) -> Pulled:
    """Policy gradient, corrected by the ratio of new to sampling probability."""
    loss = -((logp - logprobs).exp() * advantages)
    return loss, loss


def ppo(
    logp: Tensor, *, logprobs: Tensor, advantages: Tensor, clip_low_threshold: float, clip_high_threshold: float
) -> Pulled:
    """Importance sampling whose gain ends where the ratio leaves the clip range."""
    ratio = (logp - logprobs).exp()
    free, clipped = ratio * advantages, ratio.clamp(clip_low_threshold, clip_high_threshold) * advantages
    return -torch.minimum(free, clipped), torch.where(free <= clipped, -free, 0.0)


def cispo(
    logp: Tensor, *, logprobs: Tensor, advantages: Tensor, clip_low_threshold: float, clip_high_threshold: float
) -> Pulled:
    """Policy gradient weighted by a clipped ratio that is itself held constant, so no token is silenced."""
    held = (logp - logprobs).exp().clamp(clip_low_threshold, clip_high_threshold) * advantages
    return -(held * logp), -held


def dro(logp: Tensor, *, logprobs: Tensor, advantages: Tensor, beta: float) -> Pulled:
    """Policy gradient with a quadratic price, `beta`, on leaving the sampling policy."""
    drift = logp - logprobs
    return -(logp * advantages - 0.5 * beta * drift**2), beta * drift - advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss, what each datum must bring for it, and its settings with their defaults."""

    fn: Callable[..., Pulled]
    inputs: tuple[str, ...]
    """Beside `target_tokens`, and of the same shape."""
    silent_where_zero: str | None
    """The input whose zeros take a token out of the loss; None if every token counts (dro has a price on drift)."""
    config: Mapping[str, float] = field(default_factory=dict)


_POLICY = ("logprobs", "advantages")
LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(fn=cross_entropy, inputs=("weights",), silent_where_zero="weights"),
    "importance_sampling": Loss(fn=importance_sampling, inputs=_POLICY, silent_where_zero="advantages"),
    "ppo": Loss(fn=ppo, inputs=_POLICY, silent_where_zero="advantages", config=CLIP),
    "cispo": Loss(fn=cispo, inputs=_POLICY, silent_where_zero="advantages", config=CLIP),
    "dro": Loss(fn=dro, inputs=_POLICY, silent_where_zero=None, config={"beta": 0.05}),
}


def get_loss(name: str) -> Loss:
    """The loss called `name`; a refusal that lists them otherwise."""
    if not isinstance(name, str) or name not in LOSSES:
        raise BadRequest(not_known(name, "loss", LOSSES))
    return LOSSES[name]


def settings_of(name: str, given: Mapping[str, float] | None) -> dict[str, float]:
    """The loss's settings: its defaults, overridden by the caller's."""
    defaults = get_loss(name).config
    for key, value in (given or {}).items():
        if key not in defaults:
            raise BadRequest(f"config of {name}: " + not_known(key, "setting", defaults))
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise BadRequest(f"config of {name}: {key} must be a finite number, not {value!r}")
    return {**defaults, **(given or {})}


def not_known(word: object, what: str, known: Iterable[str]) -> str:
    """A refusal that offers the nearest right word."""
    names = sorted(known)
    near = difflib.get_close_matches(str(word), names, n=1)
    closest = f"; closest: {near[0]}" if near else ""
    return f"{word!r} is not a {what}{closest}; known: {', '.join(names) or 'none'}"
