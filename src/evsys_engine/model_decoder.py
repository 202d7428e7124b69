"""Decoding through a model's own forward, for architectures that `decoder` does not know.

In and out as there: prompts, then one token per row and step; logits. Merged weights are lent to the model for the
length of a call, so a call must not overlap with others on the same model. Prompts are padded on the left, as
`generate` does, because sliding windows and recurrent states count places, not positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from evsys_engine.decoder import Watch
from evsys_engine.types import EngineError

LOGITS_BYTES = 256 << 20
"""Prompt logits held at once where they are asked for."""


@dataclass(slots=True)
class ModelGroup:
    """Rows that decode together."""

    cache: Any
    mask: Tensor
    """[rows, slots], 0 on the padding."""
    positions: Tensor
    """[rows], of each row's next token."""

    @property
    def size(self) -> int:
        return len(self.positions)

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Drop all others; returns which row is now where."""
        order = torch.tensor(rows, device=self.mask.device)
        self.cache.reorder_cache(order)
        self.mask, self.positions = self.mask[order], self.positions[order]
        return list(rows)


@dataclass(slots=True)
class ModelPrefilled:
    """Prompts the model has read."""

    logits: Tensor
    """[prompts, vocabulary], after the last token of each."""
    mask: Tensor
    cache: Any

    def open(self, which: Sequence[int], room: int) -> ModelGroup:
        """Rows that go on from these prompts (a number may come more than once); can be called once."""
        del room  # the cache grows by itself
        group = ModelGroup(self.cache, self.mask, self.mask.sum(-1))
        group.keep(which)
        return group


class ModelDecoder:
    """A model and what is to be put in the place of its parameters."""

    def __init__(self, model: Any, replaced: Mapping[str, Tensor]):
        self._model, self._replaced = model, replaced
        self._accepts = set(inspect.signature(type(model).forward).parameters)
        self.device = model.device
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.bytes_per_token = 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize
        self._vocab_size = config.vocab_size

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]], watch: Mapping[int, Watch], *, keep: bool) -> ModelPrefilled:
        del keep  # the model makes its cache either way
        width = max(len(prompt) for prompt in prompts)
        gaps = [width - len(prompt) for prompt in prompts]
        tokens = [[0] * gap + list(prompt) for gap, prompt in zip(gaps, prompts, strict=True)]
        ids = torch.tensor(tokens, device=self.device)
        mask = (torch.arange(width, device=self.device) >= torch.tensor(gaps, device=self.device)[:, None]).long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        columns = max(16, LOGITS_BYTES // (4 * self._vocab_size * len(ids))) if watch else width
        cache, logits = None, ids
        for start in range(0, width, columns):
            part = slice(start, start + columns)
            logits, cache = self._call(ids[:, part], mask[:, : part.stop], positions[:, part], cache, every=bool(watch))
            for i, look in watch.items():
                first, last = max(start, gaps[i]), min(part.stop, width - 1)
                if first < last:
                    look(first - gaps[i], logits[i, first - start : last - start])
        return ModelPrefilled(logits[:, -1], mask, cache)

    @torch.no_grad()
    def step(self, groups: Sequence[ModelGroup], tokens: Sequence[int]) -> Tensor:
        """Feed one token to every row of every group; the logits after it [rows, vocabulary]."""
        out, start = [], 0
        for group in groups:
            stop = start + group.size
            ids = torch.tensor(tokens[start:stop], device=self.device)[:, None]
            group.mask = torch.cat([group.mask, group.mask.new_ones(group.size, 1)], dim=1)
            logits, group.cache = self._call(ids, group.mask, group.positions[:, None], group.cache, every=False)
            group.positions = group.positions + 1
            out.append(logits[:, -1])
            start = stop
        return torch.cat(out)

    def _call(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any, *, every: bool) -> tuple[Tensor, Any]:
        """Logits of every position, or at least of the last, and the cache after them."""
        wanted = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": positions,
            "past_key_values": cache,
            "use_cache": True,
            "logits_to_keep": 0 if every else 1,
        }
        given = {name: value for name, value in wanted.items() if name in self._accepts}
        # A tied head may be replaced while the embedding is not: `MergedWeights` gives each name its own.
        out = functional_call(self._model, dict(self._replaced), (), given, tie_weights=False)
        if getattr(out, "past_key_values", None) is None:
            raise EngineError(f"{type(self._model).__name__} keeps no past_key_values, so it cannot be sampled here")
        return out.logits, out.past_key_values
