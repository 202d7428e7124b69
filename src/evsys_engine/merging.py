"""The weights a sampler sees: the shared base with an adapter's part added.

In: a model, and low-rank pairs or a full set of weights over it. Out: tensors by parameter name, and products with
them. An untouched matrix is the base's own; a touched one is made in fp32 at each read; the reader keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.functional import linear

from evsys_engine.types import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Product = Callable[[Tensor], Tensor]
"""[tokens, in] -> [tokens, out]."""
LoraParts = Mapping[str, tuple[Tensor, Tensor, float]]
"""By module name: A [rank, in], B [out, rank] and the scale of B @ A."""

ROWS_TO_COME = 32
"""oneDNN lays a matrix out for so many rows. Measured: 8 rows gain a tenth, 1 to 2048 rows lose nothing."""
_SHARED: WeakKeyDictionary[PreTrainedModel, WeakValueDictionary[tuple[str, ...], Product]] = WeakKeyDictionary()
"""Per model, the products with untouched matrices: all samplers in use have the same ones."""

_ALONE: dict[Any, bool] = {}
"""Per sizes, type, device and number of threads: does a lone row come out differently?"""


class MergedWeights:
    """Parameters by name. Names are those of `model.named_parameters`, tied ones under each of their names."""

    def __init__(self, model: PreTrainedModel, lora: LoraParts | None = None, full: Mapping[str, Tensor] | None = None):
        self.model = model
        self._base: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._lora = {f"{name}.weight": parts for name, parts in (lora or {}).items()}
        self._full = self._under_every_name(full or {})
        unknown = [name for name in (*self._lora, *(full or {})) if name not in self._base]
        if unknown:
            raise EngineError(f"the weights are of another model: this one has no {unknown[0]}")

    def _under_every_name(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # `full` may have a tied tensor under one of its names only; the base's own tensors tell which names share it.
        by_tensor = {id(self._base[name]): tensor for name, tensor in full.items() if name in self._base}
        tied = {name: by_tensor[id(own)] for name, own in self._base.items() if id(own) in by_tensor}
        return tied | dict(full)

    def __contains__(self, name: str) -> bool:
        return name in self._base

    def __getitem__(self, name: str) -> Tensor:
        own = self._base[name].detach()
        weight = self._full[name].detach().to(own.device) if name in self._full else own
        if name in self._lora:
            a, b, scale = self._lora[name]
            weight = torch.addmm(weight.float(), b.to(own.device).float(), a.to(own.device).float(), alpha=scale)
        return weight.to(own.dtype)

    def get(self, name: str) -> Tensor | None:
        return self[name] if name in self._base else None

    def is_touched(self, name: str) -> bool:
        return name in self._lora or name in self._full

    def changed_parameters(self) -> dict[str, Tensor]:
        """Every parameter that is not the base's own."""
        return {name: self[name] for name in self._base if self.is_touched(name)}


def product(weights: MergedWeights, modules: Sequence[str]) -> Product:
    """x -> the outputs of these linear layers, side by side."""
    if any(weights.is_touched(f"{module}.{part}") for module in modules for part in ("weight", "bias")):
        return _new_product(weights, modules, own=True)
    shared = _SHARED.setdefault(weights.model, WeakValueDictionary())
    found = shared.get(tuple(modules)) or _new_product(weights, modules, own=False)
    shared[tuple(modules)] = found
    return found


def _new_product(weights: MergedWeights, modules: Sequence[str], *, own: bool) -> Product:
    matrices = [weights[f"{module}.weight"] for module in modules]
    biases, bias = [weights.get(f"{module}.bias") for module in modules], None
    if any(each is not None for each in biases):
        pairs = zip(biases, matrices, strict=True)
        bias = torch.cat([matrix.new_zeros(len(matrix)) if each is None else each for each, matrix in pairs])
    multiply: Product
    if packs(matrices[0]):
        multiply = pack_weight(torch.cat(matrices), bias)
    elif len(matrices) == 1 or own:
        multiply = partial(linear, weight=matrices[0] if len(matrices) == 1 else torch.cat(matrices), bias=bias)
    else:  # joining them would copy the base

        def multiply(x: Tensor) -> Tensor:
            out = torch.cat([linear(x, matrix) for matrix in matrices], dim=-1)
            return out if bias is None else out.add_(bias)

    if not _alone_is_different(multiply, matrices):
        return multiply

    def multiply_padded(x: Tensor) -> Tensor:
        return multiply(x) if len(x) > 1 else multiply(x.expand(2, -1))[:1]

    return multiply_padded


def _alone_is_different(multiply: Product, matrices: list[Tensor]) -> bool:
    """Is a lone row summed up in another order than a row in company? That hangs on the sizes; with oneDNN it is so
    where the sum is long, and two rows and 2048 rows give each row the same bits."""
    like = matrices[0]
    if like.dtype != torch.float32:
        return True  # a short type hides most differences from a trial, and shows them later
    key = (*(tuple(matrix.shape) for matrix in matrices), like.dtype, like.device, torch.get_num_threads())
    if key not in _ALONE:
        chance = torch.Generator().manual_seed(0)
        # Two equal rows: what then differs between the products comes from the number of rows alone.
        x = torch.randn(1, like.shape[1], generator=chance).to(like).expand(2, -1)
        _ALONE[key] = not torch.equal(multiply(x)[:1], multiply(x[:1]))
    return _ALONE[key]


def packs(weight: Tensor) -> bool:
    """Is a copy in oneDNN's own layout worth it? In fp32 on a CPU it is: 1.2 to 2 times the speed for 1 to 32 rows."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and _packing_works()


def pack_weight(weight: Tensor, bias: Tensor | None) -> Product:
    """A product with a copy of `weight` in oneDNN's layout."""
    matrix = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_TO_COME)
    linear_pointwise = torch.ops.mkldnn._linear_pointwise

    def multiply(x: Tensor) -> Tensor:
        return linear_pointwise(x, matrix, bias, "none", [], "")

    return multiply


@cache
def _packing_works() -> bool:
    """torch's compiler is built on these two operators, but they are not public: try them before relying on them."""
    if not torch.backends.mkldnn.is_available():
        return False
    weight, x = torch.linspace(-1, 1, 24).view(8, 3), torch.linspace(0, 1, 6).view(2, 3)
    try:
        return torch.allclose(pack_weight(weight, None)(x), linear(x, weight), atol=1e-6)
    except (AttributeError, RuntimeError, TypeError):
        return False
