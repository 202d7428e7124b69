"""What an adapter trains: low-rank pairs over the shared base, or a whole model of its own.

In: packed batches. Out: hidden states, and gradients of the trainable tensors. Both kinds keep these in fp32,
whatever the base computes in; the optimiser changes them in place.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import Tensor

from evsys_engine.batching import Batch
from evsys_engine.head import Head, Scored, Workspace
from evsys_engine.lora import active, new_pairs
from evsys_engine.packing import hidden_states
from evsys_engine.types import LoraSettings


class Weights(Protocol):
    """Which numbers are trained, and how do they change what the model says?"""

    parameters: dict[str, Tensor]
    """fp32, in an order that does not change."""

    def hidden(self, batch: Batch) -> Tensor:
        """[S, D] before the head, with a graph if gradients are on."""
        ...

    def head(self, workspace: Workspace) -> Head: ...

    def gradients(self, hidden: Tensor, scored: Scored) -> list[Tensor]:
        """For each of `parameters`, what the loss of this batch asks of it."""
        ...

    def refresh(self) -> None:
        """The parameters were changed from outside."""
        ...


def new_weights(model: Any, settings: LoraSettings) -> Weights:
    return LoraWeights(model, settings) if settings.rank else FullWeights(model)


class LoraWeights:
    """Pairs over the frozen base, which is shared with every other adapter."""

    def __init__(self, model: Any, settings: LoraSettings):
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

    def head(self, workspace: Workspace) -> Head:
        return Head(self._head.weight, self._head.bias, self._head_pair, workspace, train=False)

    def gradients(self, hidden: Tensor, scored: Scored) -> list[Tensor]:
        inner = torch.autograd.grad(hidden, self._inner, scored.grad_hidden) if self._inner else ()
        return [*inner, *scored.grads]

    def refresh(self) -> None:
        """Nothing to do: the model reads the parameters themselves."""


class FullWeights:
    """A model of its own, all of it trainable; for small models."""

    def __init__(self, model: Any):
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

    def head(self, workspace: Workspace) -> Head:
        return Head(self._head.weight, self._head.bias, None, workspace, train=True)

    def gradients(self, hidden: Tensor, scored: Scored) -> list[Tensor]:
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
