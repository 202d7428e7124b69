"""What a named loss needs of each datum, read and checked, and its settings; errors are `BackendError`s.

In: `Datum`s and a loss's name. Out: numpy arrays. The losses themselves are in `evsys_engine.losses`, which torch and
numpy share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from evsys_engine import losses as engine_losses
from evsys_engine.losses import LOSSES as LOSSES
from evsys_engine.types import BadRequest
from evsys_sdk.errors import BackendError
from evsys_sdk.training_api import Datum

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    PolicyLoss = str
else:
    PolicyLoss = Literal[engine_losses.POLICY_LOSSES]  # the engine has the one list: a new loss needs no line here


def get_loss(name: str) -> engine_losses.NamedLoss:
    """The loss called `name`; an error that lists them otherwise."""
    try:
        return engine_losses.get_loss(name)
    except BadRequest as exc:
        raise BackendError(str(exc)) from exc


def settings_of(name: str, given: Mapping[str, float] | None) -> dict[str, float]:
    """The loss's settings: its defaults, overridden by `loss_fn_config`."""
    try:
        return engine_losses.settings_of(name, given)
    except BadRequest as exc:
        raise BackendError(str(exc)) from exc


def read_metrics(metrics: object) -> dict[str, float]:
    """The metrics that a custom loss returned, as plain numbers."""
    try:
        return engine_losses.read_metrics(metrics)
    except BadRequest as exc:
        raise BackendError(str(exc)) from exc


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
