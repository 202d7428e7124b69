"""The named losses, for every backend: what each token costs and how it pulls on its logprob.

In: logprobs of the target tokens and the arrays a loss reads, all of one shape, and the library they belong to: `xp` is
`torch` (the engine) or `numpy` (the mock). Out: `(loss, dloss/dlogprob)`, one number per token. The definitions are
Tinker's: sums over tokens, never means, so that gradients of several calls simply add up. A new loss is a function here
and a line in `LOSSES`. Importing this module loads neither torch nor numpy.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from evsys_engine.types import BadRequest

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Bounds of the probability ratio itself, not distances from 1."""
type Values = Any
"""A torch tensor or a numpy array."""
type LossAndSlope = tuple[Values, Values]


def cross_entropy(xp: Any, logp: Values, *, weights: Values) -> LossAndSlope:
    """Minus the weighted logprob of the targets."""
    return -(weights * logp), -weights


def importance_sampling(xp: Any, logp: Values, *, logprobs: Values, advantages: Values) -> LossAndSlope:
    """Policy gradient, corrected by the ratio of new to sampling probability."""
    # The ratio is its own derivative by `logp`: loss and slope are one array, so neither may be changed in place.
    loss = -(xp.exp(logp - logprobs) * advantages)
    return loss, loss


def ppo(
    xp: Any,
    logp: Values,
    *,
    logprobs: Values,
    advantages: Values,
    clip_low_threshold: float,
    clip_high_threshold: float,
) -> LossAndSlope:
    """Importance sampling whose gain ends where the ratio leaves the clip range."""
    ratio = xp.exp(logp - logprobs)
    # The smaller of the two (Schulman et al. 2017, eq. 7). With a negative advantage there is no upper clip: a token
    # that became likelier is still pushed down.
    free, clipped = ratio * advantages, ratio.clip(clip_low_threshold, clip_high_threshold) * advantages
    # Inside the range both are equal, and `<=` lets those tokens learn. Where the clipped one is smaller, the loss is
    # constant in `logp`.
    return -xp.minimum(free, clipped), xp.where(free <= clipped, -free, 0.0)


def cispo(
    xp: Any,
    logp: Values,
    *,
    logprobs: Values,
    advantages: Values,
    clip_low_threshold: float,
    clip_high_threshold: float,
) -> LossAndSlope:
    """Policy gradient weighted by a clipped ratio that is itself held constant, so no token is silenced."""
    # CISPO (MiniMax-M1, 2025): the ratio weighs the token and has no gradient, so the slope is the weight alone.
    held = xp.exp(logp - logprobs).clip(clip_low_threshold, clip_high_threshold) * advantages
    return -(held * logp), -held


def dro(xp: Any, logp: Values, *, logprobs: Values, advantages: Values, beta: float) -> LossAndSlope:
    """Policy gradient with a quadratic price, `beta`, on leaving the sampling policy."""
    drift = logp - logprobs
    return -(logp * advantages - 0.5 * beta * drift**2), beta * drift - advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLoss:
    """A loss, what each datum must bring for it, and its settings with their defaults."""

    fn: Callable[..., LossAndSlope]
    inputs: tuple[str, ...]
    """Beside `target_tokens`, and of the same shape."""
    silent_where_zero: str | None
    """The input whose zeros take a token out of the loss; None if every token counts (dro has a price on drift)."""
    config: Mapping[str, float] = field(default_factory=dict)


_POLICY = ("logprobs", "advantages")
LOSSES: dict[str, NamedLoss] = {
    "cross_entropy": NamedLoss(fn=cross_entropy, inputs=("weights",), silent_where_zero="weights"),
    "importance_sampling": NamedLoss(fn=importance_sampling, inputs=_POLICY, silent_where_zero="advantages"),
    "ppo": NamedLoss(fn=ppo, inputs=_POLICY, silent_where_zero="advantages", config=CLIP),
    "cispo": NamedLoss(fn=cispo, inputs=_POLICY, silent_where_zero="advantages", config=CLIP),
    "dro": NamedLoss(fn=dro, inputs=_POLICY, silent_where_zero=None, config={"beta": 0.05}),
}
POLICY_LOSSES = tuple(name for name, loss in LOSSES.items() if loss.silent_where_zero == "advantages")
"""What RL can train with: tokens that the model did not write have advantage 0, and must be out of the loss."""


def get_loss(name: str) -> NamedLoss:
    """The loss called `name`; a refusal that lists them otherwise."""
    if not isinstance(name, str) or name not in LOSSES:
        raise BadRequest(not_known(name, "loss", LOSSES))
    return LOSSES[name]


def settings_of(name: str, given: Mapping[str, float] | None) -> dict[str, float]:
    """The loss's settings: its defaults, overridden by the caller's."""
    defaults = get_loss(name).config
    for key, value in (given or {}).items():
        if key not in defaults:
            raise BadRequest(f"loss_fn_config of {name}: " + not_known(key, "setting", defaults))
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise BadRequest(f"loss_fn_config of {name}: {key} must be a finite number, not {value!r}")
    settings = {**defaults, **(given or {})}
    low, high = settings.get("clip_low_threshold", 0.0), settings.get("clip_high_threshold", math.inf)
    if low > high:
        raise BadRequest(f"loss_fn_config of {name}: clip_low_threshold {low} is above clip_high_threshold {high}")
    return settings


def not_known(word: object, what: str, known: Iterable[str]) -> str:
    """A refusal that offers the nearest right word."""
    names = sorted(known)
    near = difflib.get_close_matches(str(word), names, n=1)
    closest = f"; closest: {near[0]}" if near else ""
    return f"{word!r} is not a {what}{closest}; known: {', '.join(names) or 'none'}"


def read_metrics(metrics: object) -> dict[str, float]:
    """What a custom loss returned beside its loss, as plain numbers; None stands for none."""
    if not isinstance(metrics, Mapping | None):
        raise BadRequest(f"the custom loss must return (loss, metrics), with a mapping as metrics, not {metrics!r}")
    numbers = {}
    for key, value in (metrics or {}).items():
        try:
            # A metric may still hang on the graph; torch warns of that.
            numbers[str(key)] = float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError, RuntimeError) as exc:
            raise BadRequest(f"the metric {key!r} of the custom loss must be one number, not {value!r}") from exc
    return numbers
