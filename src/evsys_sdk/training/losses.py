"""The named losses, as pure numpy functions: what a loss comes to and how it pulls on each logprob.

In: logprobs of the target tokens and the arrays a loss needs. Out: `(loss, dloss/dlogprob)`. The definitions are
Tinker's: sums over tokens, never means, so that gradients of several calls simply add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from evsys_sdk.errors import BackendError, not_known
from evsys_sdk.surface import Datum

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Bounds of the probability ratio itself, not distances from 1."""


def cross_entropy(logp: Array, *, weights: Array) -> tuple[float, Array]:
    """Minus the weighted logprob of the targets."""
    return float(-(weights * logp).sum()), -weights


def importance_sampling(logp: Array, *, logprobs: Array, advantages: Array) -> tuple[float, Array]:
    """Policy gradient, corrected by the ratio of new to sampling probability."""
    weighted = _ratio(logp, logprobs) * advantages
    return float(-weighted.sum()), -weighted


def ppo(
    logp: Array, *, logprobs: Array, advantages: Array, clip_low_threshold: float, clip_high_threshold: float
) -> tuple[float, Array]:
    """Importance sampling whose gain ends where the ratio leaves the clip range."""
    import numpy as np

    ratio = _ratio(logp, logprobs)
    free, clipped = ratio * advantages, ratio.clip(clip_low_threshold, clip_high_threshold) * advantages
    return float(-np.minimum(free, clipped).sum()), np.where(free <= clipped, -free, 0.0)


def cispo(
    logp: Array, *, logprobs: Array, advantages: Array, clip_low_threshold: float, clip_high_threshold: float
) -> tuple[float, Array]:
    """Policy gradient weighted by a clipped ratio that is itself held constant, so no token is silenced."""
    held = _ratio(logp, logprobs).clip(clip_low_threshold, clip_high_threshold) * advantages
    return float(-(held * logp).sum()), -held


def dro(logp: Array, *, logprobs: Array, advantages: Array, beta: float) -> tuple[float, Array]:
    """Policy gradient with a quadratic price, `beta`, on leaving the sampling policy."""
    drift = logp - logprobs
    return float(-(logp * advantages - 0.5 * beta * drift**2).sum()), beta * drift - advantages


def _ratio(logp: Array, logprobs: Array) -> Array:
    import numpy as np

    return np.exp(logp - logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss, what each datum must bring for it, and its settings with their defaults."""

    fn: Callable[..., tuple[float, Any]]
    inputs: tuple[str, ...]
    """Beside `target_tokens`, and of the same shape."""
    config: Mapping[str, float] = field(default_factory=dict)


_POLICY = ("logprobs", "advantages")
LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(fn=cross_entropy, inputs=("weights",)),
    "importance_sampling": Loss(fn=importance_sampling, inputs=_POLICY),
    "ppo": Loss(fn=ppo, inputs=_POLICY, config=CLIP),
    "cispo": Loss(fn=cispo, inputs=_POLICY, config=CLIP),
    "dro": Loss(fn=dro, inputs=_POLICY, config={"beta": 0.05}),
}


def get_loss(name: str) -> Loss:
    """The loss called `name`; an error that lists them otherwise."""
    if name not in LOSSES:
        raise BackendError(not_known(str(name), "loss", LOSSES))
    return LOSSES[name]


def settings_of(name: str, given: Mapping[str, float] | None) -> dict[str, float]:
    """The loss's settings: its defaults, overridden by `loss_fn_config`."""
    defaults = get_loss(name).config
    for key in given or {}:
        if key not in defaults:
            raise BackendError(f"loss_fn_config of {name}: " + not_known(str(key), "setting", defaults))
    settings = {**defaults, **(given or {})}
    low, high = settings.get("clip_low_threshold", 0.0), settings.get("clip_high_threshold", math.inf)
    if low > high:
        raise BackendError(f"loss_fn_config of {name}: clip_low_threshold {low} is above clip_high_threshold {high}")
    return settings


def read_targets(datum: Datum, index: int, vocab_size: int) -> tuple[Array, Array]:
    """Input tokens [T] and target tokens [T] or [T, K] of datum `index`, checked."""
    tokens = read_tokens(datum.model_input.tokens, f"datum {index}: model_input", vocab_size)
    targets = read_tokens(_array(datum, index, "target_tokens"), f"datum {index}: target_tokens", vocab_size)
    if targets.ndim not in (1, 2) or len(targets) != len(tokens):
        raise BackendError(
            f"datum {index}: target_tokens has shape {targets.shape} but model_input has {len(tokens)} tokens; "
            "position i of the input predicts target i"
        )
    return tokens, targets


def read_tokens(values: Any, what: str, vocab_size: int) -> Array:
    """Token ids as an array, all within the vocabulary; `what` names them in an error."""
    import numpy as np

    tokens = np.asarray(values)
    if tokens.size == 0:
        raise BackendError(f"{what} is empty")
    if tokens.dtype.kind not in "iu":
        raise BackendError(f"{what} must hold whole numbers (dtype int64), not {tokens.dtype}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise BackendError(f"{what} has token {low if low < 0 else high}; the vocabulary ends at {vocab_size - 1}")
    return tokens.astype(np.int64, copy=False)


def read_inputs(datum: Datum, index: int, name: str, shape: tuple[int, ...]) -> dict[str, Array]:
    """What loss `name` needs of datum `index`, each of the targets' `shape`."""
    loss = get_loss(name)
    for key in datum.loss_fn_inputs:
        if key != "target_tokens" and key not in loss.inputs:
            raise BackendError(f"datum {index}: {name} does not read {key!r}; it reads {', '.join(loss.inputs)}")
    if len(shape) == 2 and name != "cross_entropy":
        raise BackendError(f"datum {index}: {name} takes one target per position, not {shape[1]}")
    arrays = {key: _array(datum, index, key) for key in loss.inputs}
    for key, array in arrays.items():
        if array.shape != shape:
            raise BackendError(f"datum {index}: {key} has shape {array.shape}, target_tokens has {shape}")
    return arrays


def _array(datum: Datum, index: int, key: str) -> Array:
    if key not in datum.loss_fn_inputs:
        has = ", ".join(datum.loss_fn_inputs) or "nothing"
        raise BackendError(f"datum {index}: loss_fn_inputs has no {key!r}; it has {has}")
    try:
        return datum.loss_fn_inputs[key].to_numpy()
    except (TypeError, ValueError) as exc:
        raise BackendError(f"datum {index}: {key} is not an array of numbers: {exc}") from exc
