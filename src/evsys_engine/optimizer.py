"""AdamW and clipping, as torch does them, and the sum of gradients they work on.

In: gradients of the calls since the last step. Out: changed parameters and the norm those gradients had. Written out
because `torch.optim` pulls in the compiler at its first step (seconds), and because its state must be ours to save.
"""

from __future__ import annotations

import math
from dataclasses import fields

import torch
from torch import Tensor

from evsys_engine.types import AdamParams, BadRequest


class Gradients:
    """A running sum, one tensor per parameter; nothing until the first is added."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def add(self, more: list[Tensor]) -> None:
        if not self.tensors:
            # Taken over, not copied: later calls add into these very tensors.
            self.tensors = more
        elif more:
            torch._foreach_add_(self.tensors, more)


class AdamW:
    """`torch.optim.AdamW` with settings that come with each step."""

    def __init__(self, parameters: dict[str, Tensor]):
        self.steps = 0
        self._parameters = parameters
        self.mean: dict[str, Tensor] = {}
        self.square: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, gradients: Gradients, settings: AdamParams) -> float:
        """Change the parameters; the norm of the gradients before clipping comes back.

        As in torch, without gradients nothing moves. Unlike torch, gradients that are not finite move nothing either:
        the caller sees the norm and still has the weights.
        """
        if not gradients.tensors:
            return 0.0
        norm = torch.stack(torch._foreach_norm(gradients.tensors)).norm()
        if math.isfinite(norm):
            if settings.grad_clip_norm:
                # 1e-6 and the cap at 1 as in `torch.nn.utils.clip_grad_norm_`: small gradients are not scaled up.
                torch._foreach_mul_(gradients.tensors, (settings.grad_clip_norm / (norm + 1e-6)).clamp(max=1.0))
            self._update(gradients.tensors, settings)
        return float(norm)

    def _update(self, grads: list[Tensor], settings: AdamParams) -> None:
        self.steps += 1
        if not self.mean:
            self.reset(steps=self.steps)
        values, mean, square = (list(part.values()) for part in (self._parameters, self.mean, self.square))
        # Decoupled weight decay (Loshchilov and Hutter 2019): the weights shrink before the step, outside the moments.
        torch._foreach_mul_(values, 1 - settings.learning_rate * settings.weight_decay)
        torch._foreach_lerp_(mean, grads, 1 - settings.beta1)
        torch._foreach_mul_(square, settings.beta2)
        torch._foreach_addcmul_(square, grads, grads, value=1 - settings.beta2)
        # Bias correction (Kingma and Ba 2015, section 3): that of the square comes after the root and before `eps`, as
        # in torch; that of the mean is folded into the rate of the last line.
        below = torch._foreach_sqrt(square)
        torch._foreach_div_(below, math.sqrt(1 - settings.beta2**self.steps))
        torch._foreach_add_(below, settings.eps)
        torch._foreach_addcdiv_(values, mean, below, value=-settings.learning_rate / (1 - settings.beta1**self.steps))

    def reset(self, *, steps: int = 0) -> None:
        """Moments of zero."""
        self.steps = steps
        self.mean = {name: torch.zeros_like(value, requires_grad=False) for name, value in self._parameters.items()}
        self.square = {name: torch.zeros_like(value, requires_grad=False) for name, value in self._parameters.items()}


def check_settings(settings: AdamParams) -> None:
    """Refuse what would spoil the weights."""
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise BadRequest(f"{entry.name} must be a number of 0 or more, not {value!r}")
    for name in ("beta1", "beta2"):
        if getattr(settings, name) >= 1:
            raise BadRequest(f"{name} must be below 1, not {getattr(settings, name)}")
