"""One adapter: its weights, the gradients that wait, its optimiser.

In: the calls of `types.Adapter`, from any thread. Out: their results, computed one call at a time in the order the
calls came. A call is checked before it queues up, and what it adds (gradients) or loads (state) is put in place only
when all of it is there: a call that fails leaves the adapter as it was.

Logprobs are computed for every target, as Tinker returns them, also where the weight is 0; such positions cost the
forward product with the head, no more (measured for SmolLM2-135M: under a tenth of what a token costs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evsys_engine.batching import Batch, Row, make_batches, read_rows
from evsys_engine.devices import Limits
from evsys_engine.export import save_adapter, save_model
from evsys_engine.fair_lock import FairLock
from evsys_engine.head import Head, Pull, Workspace
from evsys_engine.losses import get_loss, settings_of
from evsys_engine.optimizer import AdamW, Gradients, check_settings
from evsys_engine.starting import read_start
from evsys_engine.state import copied, read_snapshot, restore, save_snapshot, shapes_of, take_snapshot
from evsys_engine.types import (
    AdamSettings,
    Array,
    BadRequest,
    EngineError,
    LoraSettings,
    LossFunction,
    LossOutput,
    ModelInfo,
    TrainingDatum,
)
from evsys_engine.weights import FullWeights, Weights, new_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all adapters of one engine have in common."""

    model: Any
    tokenizer: Any
    info: ModelInfo
    lock: FairLock
    limits: Limits
    workspace: Workspace
    packs: bool
    """The model keeps packed sequences apart; if not, each is computed alone."""
    trainable: bool
    """Its logits are a linear head's and nothing more, which `head` relies on."""


class TrainingAdapter:
    """Fulfils `types.Adapter`."""

    def __init__(self, shared: Shared, settings: LoraSettings):
        self.settings = settings
        self._shared = shared
        self._weights: Weights | None = new_weights(shared.model, settings)
        self._shapes = shapes_of(self._weights.parameters)
        self._optimizer = AdamW(self._weights.parameters)
        self._gradients = Gradients()

    def forward(
        self, data: Sequence[TrainingDatum], loss_fn: str, config: Mapping[str, float] | None = None
    ) -> LossOutput:
        return self._named(data, loss_fn, config, learn=False)

    def forward_backward(
        self, data: Sequence[TrainingDatum], loss_fn: str, config: Mapping[str, float] | None = None
    ) -> LossOutput:
        return self._named(data, loss_fn, config, learn=True)

    def forward_backward_custom(self, data: Sequence[TrainingDatum], loss_fn: LossFunction) -> LossOutput:
        """The graphs of all data are kept until the caller's loss has answered; where they would not fit
        (`Limits.graph_tokens`), the forward pass is done once for the logprobs and once more for the gradient."""
        rows = read_rows(data, None, self._shared.info)
        sources = [datum if datum.source is None else datum.source for datum in data]
        with self._turn() as weights:
            head = weights.head(self._shared.workspace)
            batches = self._batches(rows)
            keep = sum(sum(batch.lengths) for batch in batches) <= self._shared.limits.graph_tokens
            with torch.set_grad_enabled(keep):
                hidden = [weights.hidden(batch) if keep else None for batch in batches]
                logprobs = [
                    _all_logprobs(head, weights.hidden(batch) if kept is None else kept, batch)
                    for batch, kept in zip(batches, hidden, strict=True)
                ]
            leaves = _by_row(batches, logprobs)
            total, pulls, metrics = _ask(loss_fn, sources, [leaf.requires_grad_() for leaf in leaves])
            gradients = Gradients()
            for index, batch in enumerate(batches):
                states, hidden[index] = hidden[index], None  # each graph is given back as soon as it is used
                gradients.add(_custom_gradients(weights, head, batch, states, pulls))
            self._gradients.add(gradients.tensors)
        return LossOutput(metrics={**metrics, "loss:sum": total}, logprobs=[_array(leaf) for leaf in leaves])

    def optim_step(self, settings: AdamSettings) -> dict[str, float]:
        check_settings(settings)
        with self._turn() as weights:
            gradients, self._gradients = self._gradients, Gradients()
            norm = self._optimizer.step(gradients, settings)
            weights.refresh()
        return {"grad_norm": norm}

    def save_state(self, folder: Path) -> None:
        """Gradients that still wait for `optim_step` are not part of it."""
        with self._turn() as weights:
            snapshot = take_snapshot(weights.parameters, self._optimizer)
        save_snapshot(folder, snapshot, self.settings, self._shared.info)

    def load_state(self, folder: Path, *, optimizer: bool = True) -> None:
        """Waiting gradients belong to the old weights and are dropped. A PEFT adapter's folder holds no optimiser and
        is taken only without one."""
        shared = self._shared
        read = read_snapshot if optimizer else partial(read_start, model=shared.model)
        snapshot = read(Path(folder), self.settings, shared.info, self._shapes)
        with self._turn() as weights:
            restore(snapshot, weights.parameters, self._optimizer, with_moments=optimizer)
            self._gradients = Gradients()
            weights.refresh()

    def save_weights(self, folder: Path) -> None:
        with self._turn() as weights:
            tensors = copied(weights.parameters)
        shared = self._shared
        if isinstance(weights, FullWeights):
            save_model(folder, weights.model, tensors, shared.tokenizer, shared.info)
        else:
            save_adapter(folder, tensors, self.settings, shared.info)

    def close(self) -> None:
        with self._shared.lock:
            self._weights, self._gradients, self._optimizer = None, Gradients(), AdamW({})

    def _named(
        self, data: Sequence[TrainingDatum], loss_fn: str, config: Mapping[str, float] | None, *, learn: bool
    ) -> LossOutput:
        settings = settings_of(loss_fn, config)
        rows = read_rows(data, loss_fn, self._shared.info)
        gradients, total, logprobs = Gradients(), 0.0, []
        with self._turn() as weights:
            head = weights.head(self._shared.workspace)
            batches = self._batches(rows)
            for batch in batches:
                cost = _Cost(loss_fn, settings, batch)
                pulls = learn and bool(cost.live.any())
                with torch.set_grad_enabled(pulls):
                    hidden = weights.hidden(batch)
                scored = head.score(hidden, batch.targets, cost.live, cost.pull if pulls else None, others=True)
                total += cost.total(scored.logprobs)
                logprobs.append(scored.logprobs)
                if pulls:
                    gradients.add(weights.gradients(hidden, scored))
            self._gradients.add(gradients.tensors)
        return LossOutput(metrics={"loss:sum": total}, logprobs=[_array(part) for part in _by_row(batches, logprobs)])

    def _batches(self, rows: Sequence[Row]) -> list[Batch]:
        budget = self._shared.limits.batch_tokens if self._shared.packs else None
        return make_batches(rows, budget, self._shared.model.device)

    @contextmanager
    def _turn(self) -> Iterator[Weights]:
        """The engine to ourselves. The caller's own torch modes do not reach in here."""
        with self._shared.lock, torch.inference_mode(False), torch.enable_grad():
            if self._weights is None:
                raise EngineError("this adapter is closed; create another one")
            yield self._weights


class _Cost:
    """A named loss over one batch."""

    def __init__(self, name: str, settings: Mapping[str, float], batch: Batch):
        self._loss, self._settings, self._inputs = get_loss(name), settings, batch.inputs
        key = self._loss.silent_where_zero
        anything = torch.ones(len(batch.targets), dtype=torch.bool, device=batch.targets.device)
        self.live = anything if key is None else (batch.inputs[key] != 0).any(dim=1)
        """[S]: positions that can pull."""

    def pull(self, index: Tensor, logprobs: Tensor) -> Tensor:
        return self._evaluate(index, logprobs)[1]

    def total(self, logprobs: Tensor) -> float:
        index = self.live.nonzero()[:, 0]
        return float(self._evaluate(index, logprobs[index])[0].sum(dtype=torch.float64))

    def _evaluate(self, index: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        inputs = {key: values[index] for key, values in self._inputs.items()}
        return self._loss.fn(logprobs, **inputs, **self._settings)


def _all_logprobs(head: Head, hidden: Tensor, batch: Batch) -> Tensor:
    every = torch.ones(len(batch.targets), dtype=torch.bool, device=hidden.device)
    return head.score(hidden, batch.targets, every, None, others=False).logprobs


def _by_row(batches: Sequence[Batch], logprobs: Sequence[Tensor]) -> list[Tensor]:
    """Logprobs of each datum in the caller's order, in main memory, as the real client hands them out."""
    found: dict[int, Tensor] = {}
    for batch, values in zip(batches, logprobs, strict=True):
        parts = batch.split(values)
        found |= {row.index: part.to("cpu", copy=True) for row, part in zip(batch.rows, parts, strict=True)}
    return [found[index] for index in range(len(found))]


def _ask(
    loss_fn: Callable[..., Any], sources: list[Any], leaves: list[Tensor]
) -> tuple[float, list[Tensor], dict[str, float]]:
    """The caller's loss, dloss/dlogprob of each leaf (0 where it did not look), and the caller's metrics."""
    answer = loss_fn(sources, list(leaves))
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise BadRequest(f"the custom loss must return (loss, metrics), not {type(answer).__name__}")
    loss, metrics = answer
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise BadRequest("the custom loss must return one number as a torch tensor")
    if not loss.requires_grad:
        raise BadRequest("the custom loss does not depend on the logprobs it was given, so there is nothing to learn")
    pulls = torch.autograd.grad(loss.sum(), leaves, allow_unused=True, materialize_grads=True)
    return _number(loss), list(pulls), {key: _number(value) for key, value in (metrics or {}).items()}


def _number(value: Any) -> float:
    """A metric may still hang on the graph; torch warns of that."""
    return float(value.detach() if isinstance(value, Tensor) else value)


def _custom_gradients(
    weights: Weights, head: Head, batch: Batch, hidden: Tensor | None, pulls: list[Tensor]
) -> list[Tensor]:
    wanted = batch.join([pulls[row.index] for row in batch.rows])
    live = (wanted != 0).any(dim=1)
    if not bool(live.any()):
        return []
    hidden = weights.hidden(batch) if hidden is None else hidden
    pull: Pull = lambda index, logprobs: wanted[index]  # noqa: E731
    return weights.gradients(hidden, head.score(hidden, batch.targets, live, pull, others=False))


def _array(values: Tensor) -> Array:
    return values.detach().cpu().numpy()
