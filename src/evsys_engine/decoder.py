"""A fast decoder for models of the Llama family, with fixed weights.

In: prompts, then one token per row and step. Out: logits. Weights are a snapshot with the adapter merged in, q/k/v
and gate/up fused. Prompts lie end to end in one matrix, without padding; rows of similar prompt length share a
`Group` with a preallocated key/value cache, from which finished rows are dropped. Rotary positions are inside the
keys, so a row's gap between its prompt and its first new token (where a longer neighbour's prompt still goes on) is
only masked, never moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from evsys_engine.merging import MergedWeights, Product, product

FAMILY = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings that do not depend on how long the sequence is."""
PREFILL_TOKENS = 2048
"""Prompt tokens computed at once."""
HEAD_BYTES = 64 << 20
"""Logits of a prompt held at once."""
GROWTH = 64
"""Slots added at least when a cache is full."""

Watch = Callable[[int, Tensor], None]
"""`watch(position, logits)`: what the model said at `position` of a prompt and at those after it."""
Attend = Callable[[int, Tensor], Tensor]
"""`attend(layer, qkv [tokens, heads, size]) -> [tokens, query heads * size]`."""


def is_supported(model: Any) -> bool:
    """Does this decoder compute what the model computes? If not, the model's own forward is used."""
    config = model.config
    return (
        type(model).__name__ in FAMILY
        and not _slides(config)
        and (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") in STATIC_ROPE
    )


def _slides(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return any(kind != "full_attention" for kind in kinds)
    return getattr(config, "sliding_window", None) is not None


class Layer(NamedTuple):
    before_attention: Tensor
    qkv: Product
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Product
    before_mlp: Tensor
    gate_up: Product
    down: Product


@dataclass(slots=True)
class Group:
    """Rows that decode together: their keys and values, and where each of them is."""

    cache: list[Tensor]
    """Per layer [2, rows, kv heads, slots, size]."""
    positions: Tensor
    """[rows], of each row's next token."""
    used: int
    """Slots that hold something."""
    mask: Tensor | None
    """[rows, slots], minus infinity in the gaps; None if there are none."""

    @property
    def size(self) -> int:
        return len(self.positions)

    def take_slot(self) -> None:
        if self.used == self.cache[0].shape[3]:
            self._grow(max(GROWTH, self.used // 2))
        self.used += 1

    def _grow(self, more: int) -> None:
        for i, old in enumerate(self.cache):  # layer by layer: only one is there twice
            new = old.new_empty((*old.shape[:3], old.shape[3] + more, old.shape[4]))
            new[:, :, :, : self.used] = old[:, :, :, : self.used]
            self.cache[i] = new
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_zeros(len(self.mask), more)], dim=1)

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Drop all others. Returns which row is now where: the last ones move into the holes."""
        order = list(range(len(rows)))
        holes = sorted(set(order) - set(rows))
        movers = [row for row in rows if row >= len(rows)]
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        for i, layer in enumerate(self.cache):
            if holes:
                layer[:, holes] = layer[:, movers]
            self.cache[i] = layer[:, : len(rows)]
        self.positions = self.positions[order]
        if self.mask is not None:
            self.mask = self.mask[order]
        return order


@dataclass(slots=True)
class Prefilled:
    """Prompts the model has read."""

    logits: Tensor
    """[prompts, vocabulary], after the last token of each."""
    lengths: list[int]
    places: list[tuple[int, int]] = field(default_factory=list)
    """Of each prompt: its chunk and its first token there."""
    chunks: list[list[Tensor]] = field(default_factory=list)
    """Per chunk and layer [tokens, 2, kv heads, size]; empty if nothing is to follow."""

    def open(self, which: Sequence[int], room: int) -> Group:
        """Rows that go on from these prompts (a number may come more than once), with `room` slots to begin with."""
        lengths = [self.lengths[i] for i in which]
        longest = max(lengths)
        cache = [self._spread(layer, which, longest, room) for layer in range(len(self.chunks[0]))]
        positions = torch.tensor(lengths, device=self.logits.device)
        mask = None
        if min(lengths) < longest:
            slots = torch.arange(longest + room, device=positions.device)
            gap = (slots >= positions[:, None]) & (slots < longest)
            mask = torch.zeros(gap.shape, dtype=cache[0].dtype, device=gap.device).masked_fill_(gap, -torch.inf)
        return Group(cache, positions, longest, mask)

    def _spread(self, layer: int, which: Sequence[int], longest: int, room: int) -> Tensor:
        _, _, heads, size = self.chunks[0][layer].shape
        new = self.chunks[0][layer].new_empty((2, len(which), heads, longest + room, size))
        row = 0
        for prompt, same in groupby(which):
            rows, (chunk, start), length = len(list(same)), self.places[prompt], self.lengths[prompt]
            part = self.chunks[chunk][layer][start : start + length].permute(1, 2, 0, 3)
            new[:, row : row + rows, :, :length] = part[:, None]
            new[:, row : row + rows, :, length:longest] = 0  # masked, but must be finite
            row += rows
        return new


class LlamaDecoder:
    """One snapshot of weights, ready to decode."""

    def __init__(self, model: Any, weights: MergedWeights):
        config = model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self._eps = config.rms_norm_eps
        self._scale = self.head_size**-0.5
        self._rotary = model.model.rotary_emb
        self._act = model.model.layers[0].mlp.act_fn
        self._embedding = weights["model.embed_tokens.weight"]
        self._norm = weights["model.norm.weight"]
        self._layers = [_layer(weights, f"model.layers.{i}") for i in range(config.num_hidden_layers)]
        self._head = product(weights, ["lm_head"])
        self._cos = self._sin = self._embedding.new_empty((0, self.head_size))
        self.device = self._embedding.device

    @property
    def bytes_per_token(self) -> int:
        """Of the cache."""
        return 2 * len(self._layers) * self.kv_heads * self.head_size * self._embedding.dtype.itemsize

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], watch: Mapping[int, Watch], *, keep: bool) -> Prefilled:
        """Read the prompts; `keep` what rows that go on will need."""
        done, logits = Prefilled(self._embedding, [len(prompt) for prompt in prompts]), []
        for number, chunk in enumerate(_chunks(done.lengths)):
            lengths = done.lengths[chunk.start : chunk.stop]
            starts = [sum(lengths[:i]) for i in range(len(lengths))]
            kept: list[Tensor] = []
            hidden = self._read([prompts[i] for i in chunk], lengths, kept if keep else None)
            logits.append(
                self._head(hidden[[start + length - 1 for start, length in zip(starts, lengths, strict=True)]])
            )
            for i, start in zip(chunk, starts, strict=True):
                if i in watch:
                    self._show(hidden[start : start + done.lengths[i] - 1], watch[i])
            done.places += [(number, start) for start in starts]
            done.chunks.append(kept)
        done.logits = torch.cat(logits)
        return done

    @torch.inference_mode()
    def step(self, groups: Sequence[Group], tokens: Sequence[int]) -> Tensor:
        """Feed one token to every row of every group; the logits after it [rows, vocabulary]."""
        positions = torch.cat([group.positions for group in groups])
        for group in groups:
            group.take_slot()
        masks = [self._score_mask(group) for group in groups]
        hidden = self._run(torch.tensor(tokens, device=self.device), positions, partial(self._attend, groups, masks))
        for group in groups:
            group.positions = group.positions + 1
        return self._head(hidden)

    def _read(self, prompts: list[Sequence[int]], lengths: list[int], kept: list[Tensor] | None) -> Tensor:
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        positions = torch.cat([torch.arange(length, device=self.device) for length in lengths])
        return self._run(tokens, positions, partial(self._attend_prompts, lengths, kept))

    def _show(self, hidden: Tensor, watch: Watch) -> None:
        rows = max(16, HEAD_BYTES // (4 * len(self._embedding)))
        for start in range(0, len(hidden), rows):
            watch(start, self._head(hidden[start : start + rows]))

    def _run(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[tokens, hidden], normed for the head."""
        cos, sin = self._turns(positions)
        x = self._embedding[tokens]
        shape, width = (x.shape[-1],), self.heads + self.kv_heads
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv(rms_norm(x, shape, layer.before_attention, self._eps))
            qkv = qkv.view(len(tokens), -1, self.head_size)
            if layer.query_norm is not None:
                self._norm_heads(qkv, layer)
            turned = qkv[:, :width]
            swapped = turned.roll(self.head_size // 2, -1)
            turned.mul_(cos).addcmul_(swapped, sin)
            x = layer.out(attend(i, qkv)).add_(x)
            gate, up = layer.gate_up(rms_norm(x, shape, layer.before_mlp, self._eps)).chunk(2, dim=-1)
            x = layer.down(self._act(gate).mul_(up)).add_(x)
        return rms_norm(x, shape, self._norm, self._eps)

    def _norm_heads(self, qkv: Tensor, layer: Layer) -> None:
        keys = slice(self.heads, self.heads + self.kv_heads)
        qkv[:, : self.heads] = rms_norm(qkv[:, : self.heads], (self.head_size,), layer.query_norm, self._eps)
        qkv[:, keys] = rms_norm(qkv[:, keys], (self.head_size,), layer.key_norm, self._eps)

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [tokens, 1, size]; the first half of sin is negative, which makes `rotate_half` a roll."""
        needed = int(positions.max()) + 1
        if needed > len(self._cos):
            size = max(1024, 1 << (needed - 1).bit_length())
            cos, sin = self._rotary(self._embedding, torch.arange(size, device=self.device)[None])
            sin = torch.cat([-sin[0, :, : self.head_size // 2], sin[0, :, self.head_size // 2 :]], dim=-1)
            self._cos, self._sin = cos[0], sin
        return self._cos[positions][:, None], self._sin[positions][:, None]

    def _attend_prompts(self, lengths: list[int], kept: list[Tensor] | None, layer: int, qkv: Tensor) -> Tensor:
        """Each prompt looks at itself, causally."""
        if kept is not None:
            kept.append(qkv[:, self.heads :].unflatten(1, (2, self.kv_heads)).contiguous())
        out, start = [], 0
        for length, same in groupby(lengths):
            count = len(list(same))
            part = qkv[start : start + count * length].unflatten(0, (count, length)).transpose(1, 2)
            q, k, v = part.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
            seen = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            out.append(seen.transpose(1, 2).reshape(count * length, -1))
            start += count * length
        return torch.cat(out)

    def _attend(self, groups: Sequence[Group], masks: list[Tensor | None], layer: int, qkv: Tensor) -> Tensor:
        """Each row looks at its own past. Query heads that share a key head are rows of one small product."""
        queries = qkv[:, : self.heads] * self._scale
        fresh = qkv[:, self.heads :].unflatten(1, (2, self.kv_heads)).transpose(0, 1)
        out, start = [], 0
        for group, mask in zip(groups, masks, strict=True):
            stop = start + group.size
            cache = group.cache[layer]
            cache[:, :, :, group.used - 1] = fresh[:, start:stop]
            keys, values = cache.flatten(1, 2)[:, :, : group.used]
            q = queries[start:stop].view(-1, self.heads // self.kv_heads, self.head_size)
            past = keys.transpose(1, 2)
            scores = torch.bmm(q, past) if mask is None else torch.baddbmm(mask, q, past)
            out.append(torch.bmm(torch.softmax(scores, -1), values).view(group.size, -1))
            start = stop
        return out[0] if len(out) == 1 else torch.cat(out)

    def _score_mask(self, group: Group) -> Tensor | None:
        if group.mask is None:
            return None
        ahead = group.mask[:, None, None, : group.used]
        shape = (group.size, self.kv_heads, self.heads // self.kv_heads, group.used)
        return ahead.expand(shape).reshape(-1, *shape[2:])


def _layer(weights: MergedWeights, name: str) -> Layer:
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    return Layer(
        before_attention=weights[f"{name}.input_layernorm.weight"],
        qkv=product(weights, [f"{attention}.{part}_proj" for part in "qkv"]),
        query_norm=weights.get(f"{attention}.q_norm.weight"),
        key_norm=weights.get(f"{attention}.k_norm.weight"),
        out=product(weights, [f"{attention}.o_proj"]),
        before_mlp=weights[f"{name}.post_attention_layernorm.weight"],
        gate_up=product(weights, [f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
        down=product(weights, [f"{mlp}.down_proj"]),
    )


def _chunks(lengths: Sequence[int]) -> Iterator[range]:
    """Neighbouring prompts that are computed together."""
    start, tokens = 0, 0
    for i, length in enumerate(lengths):
        if i > start and tokens + length > PREFILL_TOKENS:
            yield range(start, i)
            start, tokens = i, 0
        tokens += length
    yield range(start, len(lengths))
