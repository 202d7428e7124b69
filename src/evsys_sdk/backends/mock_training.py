"""One forward and one backward through the mock's model.

In: data and a loss. Out: the loss, the targets' logprobs, and gradients added to what is pending. Every loss,
named or the user's own, is reduced to its slope c at each target's logprob; the gradient of the logits is
then c * (one-hot - p), exactly. Everything is checked before anything is added: a refused call leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from evsys_sdk.backends.mock_contexts import Array, contexts_of, joined
from evsys_sdk.backends.mock_model import Gradients, TableModel, log_softmax
from evsys_sdk.backends.mock_tokenizer import VOCAB_SIZE
from evsys_sdk.errors import BackendError, blame, need
from evsys_sdk.surface import Datum, ForwardBackwardOutput, LossCallable
from evsys_sdk.training.losses import get_loss, read_inputs, read_targets, settings_of

Shapes = list[tuple[int, ...]]
Pull = Callable[[Array, Shapes], tuple[dict[str, float], Array]]
"""(logprobs of all targets, flat; shape of each datum's) -> (metrics, dloss/dlogprob, flat)."""


def forward_backward(model: TableModel, pending: Gradients, data: list[Datum], pull: Pull) -> ForwardBackwardOutput:
    if not data:
        raise BackendError("forward_backward was called without data")
    pairs = [read_targets(datum, index, VOCAB_SIZE) for index, datum in enumerate(data)]
    contexts = joined([contexts_of(tokens) for tokens, _ in pairs])
    rows = model.rows(contexts)
    logp = log_softmax(model.logits(contexts, rows))
    position, target = _flat_targets([targets for _, targets in pairs])
    chosen = logp[position, target]
    metrics, slope = pull(chosen.astype(np.float64), [targets.shape for _, targets in pairs])
    _add_gradients(pending, rows, logp, position, target, slope.astype(np.float32))
    sizes = np.cumsum([0, *(targets.size for _, targets in pairs)])
    return ForwardBackwardOutput(
        metrics=metrics, logprobs=[chosen[begin:end].tolist() for begin, end in pairwise(sizes)]
    )


def _flat_targets(targets: list[Array]) -> tuple[Array, Array]:
    """For every target of every datum: the position that predicts it, counted over all data, and its token."""
    per_position = np.concatenate([np.full(len(each), each.size // len(each)) for each in targets])
    return np.repeat(np.arange(len(per_position)), per_position), np.concatenate([each.ravel() for each in targets])


def _add_gradients(pending: Gradients, rows: Array, logp: Array, position: Array, target: Array, slope: Array) -> None:
    pulled = slope != 0  # most positions are context and pull at nothing
    active, place = np.unique(position[pulled], return_inverse=True)
    if not len(active):
        return
    slope, target = slope[pulled], target[pulled]
    total = np.bincount(place, weights=slope, minlength=len(active)).astype(np.float32)
    dlogits = -total[:, None] * np.exp(logp[active])
    np.add.at(dlogits.reshape(-1), place * VOCAB_SIZE + target, slope)
    pending.add(rows[active], dlogits)


def named_loss(data: list[Datum], name: str, config: Mapping[str, float] | None) -> Pull:
    """One of the losses in `training.losses`."""
    loss, settings = get_loss(name), settings_of(name, config)

    def pull(logp: Array, shapes: Shapes) -> tuple[dict[str, float], Array]:
        inputs = [read_inputs(*pair, name, shapes[pair[1]]) for pair in zip(data, range(len(data)), strict=True)]
        flat = {key: np.concatenate([each[key].ravel() for each in inputs]) for key in loss.inputs}
        value, slope = loss.fn(logp, **flat, **settings)
        return {"loss:sum": value}, slope

    return pull


def custom_loss(data: list[Datum], fn: LossCallable) -> Pull:
    """The user's own loss: called once with tensors that require grad, then asked for their gradients."""
    torch = need("torch", extra="local")
    name = getattr(fn, "__qualname__", type(fn).__qualname__)

    def pull(logp: Array, shapes: Shapes) -> tuple[dict[str, float], Array]:
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
        parts = [part.reshape(shape) for part, shape in zip(np.split(logp, ends), shapes, strict=True)]
        tensors = [torch.tensor(part, dtype=torch.float32, requires_grad=True) for part in parts]
        with blame(BackendError, f"custom loss {name}"):
            loss, metrics = _checked(fn(data, tensors), name)
            loss.backward()
        slopes = [np.zeros(t.shape) if t.grad is None else t.grad.numpy() for t in tensors]
        numbers = {key: _number(value) for key, value in metrics.items()}
        return {**numbers, "loss:sum": _number(loss)}, np.concatenate([slope.ravel() for slope in slopes])

    return pull


def _number(value: Any) -> float:
    return float(value.detach() if hasattr(value, "detach") else value)


def _checked(answer: Any, name: str) -> tuple[Any, Mapping[str, Any]]:
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping)):
        raise BackendError(f"custom loss {name} must return (loss, metrics), not {type(answer).__name__}")
    loss = answer[0]
    if not getattr(loss, "requires_grad", False) or loss.numel() != 1:
        raise BackendError(f"custom loss {name} must return one differentiable number made from the logprobs")
    return loss, answer[1]
