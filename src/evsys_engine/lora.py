"""Low-rank adapters over frozen linear layers.

In: a model whose linear layers are replaced once, in place, by ones that ask which adapter is active. Out: the same
model, through which any number of adapters can be run, one per call. Names and shapes of the model's own parameters
stay as they were. Without an active adapter (any other thread, any other user of the model) the layers are plain
linear ones.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from evsys_engine.types import EngineError, LoraSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


class Pair(NamedTuple):
    """What an adapter adds to one layer: `scale * B @ A`."""

    a: Tensor
    """[rank, in]."""
    b: Tensor
    """[out, rank]."""
    scale: float


class _Active(threading.local):
    pairs: Mapping[str, Pair] | None = None


_ACTIVE = _Active()


@contextmanager
def active(pairs: Mapping[str, Pair]) -> Iterator[None]:
    """Run the model with this adapter, in this thread, inside the block."""
    before, _ACTIVE.pairs = _ACTIVE.pairs, pairs
    try:
        yield
    finally:
        _ACTIVE.pairs = before


class AdaptedLinear(nn.Linear):
    """A linear layer that adds the active adapter's part for its name."""

    def __init__(self, name: str, base: nn.Linear):
        nn.Module.__init__(self)  # the parameters exist already
        self.name, self.in_features, self.out_features = name, base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.train(base.training)

    def forward(self, input: Tensor) -> Tensor:
        pair = _ACTIVE.pairs.get(self.name) if _ACTIVE.pairs else None
        if pair is None:
            return linear(input, self.weight, self.bias)
        return _LoraLinear.apply(input, self.weight, self.bias, *pair)


class _LoraLinear(torch.autograd.Function):
    """`x W' + bias + scale * x A' B'` with the low-rank products added in place, and no gradient for W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        flat, a, b = x.flatten(0, -2), a.to(x.dtype), b.to(x.dtype)
        # Kept for the backward pass: `rank` numbers per token, which save a second product over the input.
        low = flat @ a.t()
        out = linear(flat, weight, bias).addmm_(low, b.t(), alpha=scale)
        ctx.save_for_backward(flat, low, weight, a, b)
        ctx.scale, ctx.shape = scale, x.shape
        return out.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat, low, weight, a, b = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        # The same products written the other way round are several times slower on a CPU: a narrow matrix wants to be
        # read along its rows, and to stand on the left.
        grad_low = linear(grad, b.t().contiguous()).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:  # the first layer's input is the frozen embedding
            grad_x = (grad @ weight).addmm_(grad_low, a).view(ctx.shape)
        grad_a = (grad_low.t() @ flat).float()
        grad_b = (low.t() @ grad).t().float().mul_(ctx.scale)
        return grad_x, None, None, grad_a, grad_b, None


def adapt_linears(model: nn.Module) -> None:
    """Replace every layer that an adapter may train."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name.rpartition(".")[2] in (*ATTENTION, *MLP):
            model.set_submodule(name, AdaptedLinear(name, module))


def target_layers(model: PreTrainedModel, settings: LoraSettings) -> dict[str, nn.Linear]:
    """The layers these settings train, by name."""
    usual = (ATTENTION if settings.train_attn else ()) + (MLP if settings.train_mlp else ())
    wanted = settings.targets or usual
    layers: dict[str, nn.Linear] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, AdaptedLinear) and (name.rpartition(".")[2] in wanted or name in wanted)
    }
    head = model.get_output_embeddings()
    head_name = next(name for name, module in model.named_modules() if module is head)
    if head_name in wanted or (settings.train_unembed and not settings.targets):
        # Last: `LoraWeights.gradients` appends the head's gradients to those of the layers before it.
        layers[head_name] = head
    if not layers:
        raise EngineError(
            f"nothing to train: of {', '.join((*ATTENTION, *MLP))} and the head, "
            "these settings and this model leave none"
        )
    return layers


def new_pairs(model: PreTrainedModel, settings: LoraSettings) -> dict[str, Pair]:
    """A fresh adapter, started as PEFT does: A is uniform, B is zero, so that it changes nothing yet."""
    pairs = {}
    for name, layer in target_layers(model, settings).items():
        # Each layer has its own random stream, so that which other layers are trained does not matter.
        digest = hashlib.sha256(f"{settings.seed}/{name}".encode()).digest()
        chance = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
        bound = 1 / math.sqrt(layer.in_features)  # kaiming_uniform with a=sqrt(5)
        # Drawn on the CPU and then moved: a seed gives the same adapter on every device.
        a = torch.empty(settings.rank, layer.in_features).uniform_(-bound, bound, generator=chance)
        b = torch.zeros(layer.out_features, settings.rank)
        device = layer.weight.device
        pairs[name] = Pair(a.to(device), b.to(device), settings.alpha / settings.rank)
    return pairs
