"""The last layer and the log-softmax, a chunk of positions at a time.

In: hidden states [S, D] and targets [S, K]. Out: logprobs of the targets, and the gradient of a loss over them.
Logits of a whole batch never exist: a loss here is a sum over tokens, so each chunk's gradient can be taken while its
logits are still warm, and positions that do not pull (prompts) get their logprobs from the forward product alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evsys_engine.lora import Pair

Pull = Callable[[Tensor, Tensor], Tensor]
"""`(positions, their logprobs) -> dloss/dlogprob`, all of these positions."""


class LogitBuffers:
    """Two reusable buffers for logits: fresh ones of this size would cost page faults at every chunk."""

    def __init__(self, rows: int):
        self.rows = rows
        self._buffers: list[Tensor] = []

    def buffers(self, like: Tensor, rows: int, width: int) -> list[Tensor]:
        if not self._buffers or self._buffers[0].shape[1] != width or self._buffers[0].device != like.device:
            self._buffers = [torch.empty(self.rows, width, device=like.device) for _ in range(2)]
        return [buffer[:rows] for buffer in self._buffers]


@dataclass(slots=True)
class Scored:
    """What came of a batch's positions."""

    logprobs: Tensor
    """float32 [S, K]; 0 at positions that were not asked for."""
    grad_hidden: Tensor | None
    """[S, D], None if no position pulls."""
    grads: list[Tensor] = field(default_factory=list)
    """Of the head's own trainable tensors: (A, B) of its pair, or its full weight and bias."""


class Head:
    """Logits of hidden states, and the way back."""

    def __init__(self, weight: Tensor, bias: Tensor | None, pair: Pair | None, workspace: LogitBuffers, *, train: bool):
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.pair = None if pair is None else Pair(pair.a.detach(), pair.b.detach(), pair.scale)
        self.train = train
        """The weight itself is trained (full fine-tuning)."""
        self._workspace = workspace

    @torch.no_grad()
    def score(self, hidden: Tensor, targets: Tensor, live: Tensor, pull: Pull | None, *, others: bool) -> Scored:
        """Logprobs of the `live` positions [S], with their gradient if there is a `pull`; of the `others` if asked."""
        hidden = hidden.detach()
        out = Scored(torch.zeros(targets.shape, device=hidden.device), None)
        silent = [~live] if others else []
        if pull is not None and bool(live.any()):
            out.grad_hidden = torch.zeros_like(hidden)
            out.grads = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in self._trained_tensors()]
            for index in self._chunks(live):
                logp = self._logp(hidden[index])
                # Gathered first: `_slope` overwrites `logp`.
                out.logprobs[index] = logp.gather(1, targets[index])
                slope = _slope(logp, targets[index], pull(index, out.logprobs[index]))
                out.grad_hidden[index] = self._backward(hidden[index], slope, out.grads)
        else:
            silent.append(live)
        for mask in silent:
            for index in self._chunks(mask):
                out.logprobs[index] = self._logp(hidden[index]).gather(1, targets[index])
        return out

    def _trained_tensors(self) -> list[Tensor]:
        if self.train:
            return [self.weight] + ([] if self.bias is None else [self.bias])
        return [] if self.pair is None else [self.pair.a, self.pair.b]

    def _chunks(self, mask: Tensor) -> Iterator[Tensor]:
        positions = mask.nonzero()[:, 0]
        return iter(positions.split(self._workspace.rows)) if len(positions) else iter(())

    def _logp(self, hidden: Tensor) -> Tensor:
        """float32 log-softmax [n, V] in a buffer that the next chunk overwrites."""
        logits, logp = self._workspace.buffers(hidden, len(hidden), len(self.weight))
        # `out=` must have the product's type: a bf16 product is made apart and widened, since the softmax is in fp32.
        if hidden.dtype == torch.float32:
            torch.mm(hidden, self.weight.t(), out=logits)
        else:
            logits.copy_(hidden @ self.weight.t())
        if self.bias is not None:
            logits += self.bias
        if self.pair is not None:
            logits.addmm_(hidden.float() @ self.pair.a.t(), self.pair.b.t(), alpha=self.pair.scale)
        return torch.log_softmax(logits, dim=-1, out=logp)

    def _backward(self, hidden: Tensor, slope: Tensor, grads: list[Tensor]) -> Tensor:
        """dloss/dhidden of a chunk; what its own tensors get is added to `grads`."""
        down = slope.to(hidden.dtype) @ self.weight
        if self.train:
            grads[0] += slope.t() @ hidden.float()
            if self.bias is not None:
                grads[1] += slope.sum(0)
        elif self.pair is not None:
            a, b, scale = self.pair
            low = (slope @ b).mul_(scale)
            down += (low @ a).to(down.dtype)
            grads[0].addmm_(low.t(), hidden.float())
            grads[1].addmm_(slope.t(), hidden.float() @ a.t(), alpha=scale)
        return down


def _slope(logp: Tensor, targets: Tensor, pulls: Tensor) -> Tensor:
    """dloss/dlogits from dloss/dlogp, in place: each pull lifts its target and lowers all tokens by their share."""
    # dlogp[t]/dlogits = onehot(t) - softmax, summed over the K targets of a position. `scatter_add_`, because a token
    # may be a target twice; targets that were filled up have pull 0.
    return logp.exp_().mul_(-pulls.sum(1, keepdim=True)).scatter_add_(1, targets, pulls)
