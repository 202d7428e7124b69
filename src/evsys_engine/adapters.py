"""One adapter: its weights, the gradients that wait, its optimiser.

In: the calls of `types.Adapter`, from any thread. Out: their results, computed one call at a time in the order the
calls came. A call is checked before it queues up, and what it adds (gradients) or loads (state) is put in place only
when all of it is there: a call that fails leaves the adapter as it was.

Logprobs are computed for every target, as Tinker returns them, also where the weight is 0; such positions cost the
forward product with the head, no more (measured for SmolLM2-135M: under a tenth of what a token costs).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from evsys_engine.batching import Batch, BatchRow, hidden_states, make_batches, read_rows
from evsys_engine.devices import ComputeLimits, FairLock
from evsys_engine.export import save_adapter, save_model
from evsys_engine.head import Head, LogitBuffers, Pull, Scored
from evsys_engine.lora import active, new_pairs
from evsys_engine.losses import get_loss, read_metrics, settings_of
from evsys_engine.optimizer import AdamW, Gradients, check_settings
from evsys_engine.starting import read_start
from evsys_engine.state import copy_to_cpu, read_snapshot, restore, save_snapshot, shapes_of, take_snapshot
from evsys_engine.types import (
    AdamParams,
    Array,
    BadRequest,
    EngineError,
    LoraSettings,
    LossFunction,
    LossOutput,
    ModelInfo,
    TrainingDatum,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# What an adapter trains: low-rank pairs over the shared base, or a copy of the whole model.
#
# In: packed batches. Out: hidden states, and gradients of the trainable tensors. Both kinds keep these in fp32,
# whatever the base computes in; the optimiser changes them in place.


class TrainableWeights(Protocol):
    """Which numbers are trained, and how do they change what the model says?"""

    parameters: dict[str, Tensor]
    """fp32, in an order that does not change."""

    def hidden(self, batch: Batch) -> Tensor:
        """[S, D] before the head, with a graph if gradients are on."""
        ...

    def head(self, workspace: LogitBuffers) -> Head: ...

    def gradients(self, hidden: Tensor, scored: Scored) -> list[Tensor]:
        """For each of `parameters`, what the loss of this batch asks of it."""
        ...

    def refresh(self) -> None:
        """The parameters were changed from outside."""
        ...


def new_weights(model: PreTrainedModel, settings: LoraSettings) -> TrainableWeights:
    return LoraWeights(model, settings) if settings.rank else FullWeights(model)


class LoraWeights:
    """Pairs over the frozen base, which is shared with every other adapter."""

    def __init__(self, model: PreTrainedModel, settings: LoraSettings):
        self._model, self._head = model, model.get_output_embeddings()
        self.pairs = new_pairs(model, settings)
        names = {id(module): name for name, module in model.named_modules()}
        self._head_pair = self.pairs.get(names[id(self._head)])
        inner = {name: pair for name, pair in self.pairs.items() if pair is not self._head_pair}
        self.parameters: dict[str, Tensor] = {}
        for name, pair in self.pairs.items():  # the head's, if any, come last: `target_layers` sees to that
            self.parameters |= {f"{name}.lora_A": pair.a, f"{name}.lora_B": pair.b}
        self._inner = [tensor.requires_grad_() for pair in inner.values() for tensor in (pair.a, pair.b)]

    def hidden(self, batch: Batch) -> Tensor:
        with active(self.pairs):
            return hidden_states(self._model.base_model, batch.tokens, batch.positions, batch.lengths)

    def head(self, workspace: LogitBuffers) -> Head:
        return Head(self._head.weight, self._head.bias, self._head_pair, workspace, train=False)

    def gradients(self, hidden: Tensor, scored: Scored) -> list[Tensor]:
        inner = torch.autograd.grad(hidden, self._inner, scored.grad_hidden) if self._inner else ()
        return [*inner, *scored.grads]

    def refresh(self) -> None:
        """Nothing to do: the model reads the parameters themselves."""


class FullWeights:
    """A copy of the model, all of it trainable; for small models."""

    def __init__(self, model: PreTrainedModel):
        self.model = copy.deepcopy(model).requires_grad_()
        self._head = self.model.get_output_embeddings()
        self._own = dict(self.model.named_parameters())
        # A base in bf16 computes in bf16, but steps smaller than its precision must still add up.
        self.parameters = {
            name: tensor if tensor.dtype == torch.float32 else tensor.detach().float()
            for name, tensor in self._own.items()
        }

    def hidden(self, batch: Batch) -> Tensor:
        return hidden_states(self.model.base_model, batch.tokens, batch.positions, batch.lengths)

    def head(self, workspace: LogitBuffers) -> Head:
        return Head(self._head.weight, self._head.bias, None, workspace, train=True)

    def gradients(self, hidden: Tensor, scored: Scored) -> list[Tensor]:
        # A head that is not tied takes no part in `hidden`: autograd gives zeros, and `scored` has its gradient.
        inner = torch.autograd.grad(
            hidden, list(self._own.values()), scored.grad_hidden, allow_unused=True, materialize_grads=True
        )
        total = {name: grad.float() for name, grad in zip(self._own, inner, strict=True)}
        of_head = [tensor for tensor in (self._head.weight, self._head.bias) if tensor is not None]
        for tensor, grad in zip(of_head, scored.grads, strict=True):
            # Where the head is tied to the embedding, both gradients belong to the same tensor.
            name = next(name for name, own in self._own.items() if own is tensor)
            total[name] = total[name] + grad
        return list(total.values())

    @torch.no_grad()
    def refresh(self) -> None:
        for name, tensor in self._own.items():
            if tensor is not self.parameters[name]:
                tensor.copy_(self.parameters[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all adapters of one engine have in common."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    info: ModelInfo
    lock: FairLock
    limits: ComputeLimits
    workspace: LogitBuffers
    packs: bool
    """The model keeps packed sequences apart; if not, each is computed alone."""
    trainable: bool
    """The model's logits are a linear head's and nothing more, which `head` relies on."""


class TrainingAdapter:
    """Fulfils `types.Adapter`."""

    def __init__(self, shared: Shared, settings: LoraSettings):
        self.settings = settings
        self._shared = shared
        self._weights: TrainableWeights | None = new_weights(shared.model, settings)
        self._shapes = shapes_of(self._weights.parameters)
        self._optimizer = AdamW(self._weights.parameters)
        self._gradients = Gradients()

    def forward(
        self, data: Sequence[TrainingDatum], loss_fn: str, config: Mapping[str, float] | None = None
    ) -> LossOutput:
        return self._apply_named_loss(data, loss_fn, config, learn=False)

    def forward_backward(
        self, data: Sequence[TrainingDatum], loss_fn: str, config: Mapping[str, float] | None = None
    ) -> LossOutput:
        return self._apply_named_loss(data, loss_fn, config, learn=True)

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
                logprobs = []
                for batch, kept in zip(batches, hidden, strict=True):
                    every = torch.ones(len(batch.targets), dtype=torch.bool, device=batch.targets.device)
                    scored = head.score(
                        weights.hidden(batch) if kept is None else kept, batch.targets, every, None, others=False
                    )
                    logprobs.append(scored.logprobs)
            # The caller's loss is differentiated down to these copies of the logprobs; from there to the parameters the
            # gradient is computed batch by batch.
            leaves = _by_row(batches, logprobs)
            total, pulls, metrics = _ask(loss_fn, sources, [leaf.requires_grad_() for leaf in leaves])
            gradients = Gradients()
            for index, batch in enumerate(batches):
                states, hidden[index] = hidden[index], None  # each graph is given back as soon as it is used
                gradients.add(_custom_gradients(weights, head, batch, states, pulls))
            self._gradients.add(gradients.tensors)
        return LossOutput(metrics={**metrics, "loss:sum": total}, logprobs=[_array(leaf) for leaf in leaves])

    def optim_step(self, settings: AdamParams) -> dict[str, float]:
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
        # Outside the turn: the snapshot is a copy, and other calls do not wait for the disk.
        save_snapshot(folder, snapshot, self.settings, self._shared.info)

    def load_state(self, folder: Path, *, optimizer: bool = True) -> None:
        """Waiting gradients belong to the old weights and are dropped. A PEFT adapter's folder holds no optimiser and
        is taken only without one."""
        shared = self._shared
        read = read_snapshot if optimizer else partial(read_start, model=shared.model)
        # Read and checked before the turn: a torn folder leaves the adapter as it was.
        snapshot = read(Path(folder), self.settings, shared.info, self._shapes)
        with self._turn() as weights:
            restore(snapshot, weights.parameters, self._optimizer, with_moments=optimizer)
            self._gradients = Gradients()
            weights.refresh()

    def save_weights(self, folder: Path) -> None:
        with self._turn() as weights:
            tensors = copy_to_cpu(weights.parameters)
        shared = self._shared
        if isinstance(weights, FullWeights):
            save_model(folder, weights.model, tensors, shared.tokenizer, shared.info)
        else:
            save_adapter(folder, tensors, self.settings, shared.info)

    def close(self) -> None:
        with self._shared.lock:
            self._weights, self._gradients, self._optimizer = None, Gradients(), AdamW({})

    def _apply_named_loss(
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

    def _batches(self, rows: Sequence[BatchRow]) -> list[Batch]:
        budget = self._shared.limits.batch_tokens if self._shared.packs else None
        return make_batches(rows, budget, self._shared.model.device)

    @contextmanager
    def _turn(self) -> Iterator[TrainableWeights]:
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
        # In fp64: over many tokens the rounding of an fp32 sum would show in the loss that is reported.
        return float(self._evaluate(index, logprobs[index])[0].sum(dtype=torch.float64))

    def _evaluate(self, index: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        inputs = {key: values[index] for key, values in self._inputs.items()}
        return self._loss.fn(torch, logprobs, **inputs, **self._settings)


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
    numbers = read_metrics(metrics)
    pulls = torch.autograd.grad(loss.sum(), leaves, allow_unused=True, materialize_grads=True)
    return float(loss.detach()), list(pulls), numbers


def _custom_gradients(
    weights: TrainableWeights, head: Head, batch: Batch, hidden: Tensor | None, pulls: list[Tensor]
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
