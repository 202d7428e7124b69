"""Decoding: a fast way for models of the Llama family (`LlamaDecoder`), and any model's own forward (`ModelDecoder`).

In: prompts, then one token per row and step. Out: logits. `is_supported` says which models the fast one knows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention

from evsys_engine.merging import MergedWeights, Product, product
from evsys_engine.types import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A fast decoder for models of the Llama family, with fixed weights.
#
# In: prompts, then one token per row and step. Out: logits. Weights are a snapshot with the adapter merged in, q/k/v
# and gate/up fused. Prompts lie end to end in one matrix, without padding; rows of similar prompt length share a
# `Group` with a preallocated key/value cache, from which finished rows are dropped.
#
# On a CPU a row's logits are the same to the last bit whatever rows share the step, so a rollout can be repeated in
# other company. Three things make it so: products never see fewer than two rows (`merging`), a row's keys lie at its
# own positions with nothing but masked zeros behind them, and values are summed up in blocks of one size, from the
# first on.


FAMILY = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings that do not depend on how long the sequence is."""
PREFILL_TOKENS = 2048
"""Prompt tokens computed at once."""
HEAD_BYTES = 64 << 20
"""Logits of a prompt held at once."""
BLOCK = 128
"""Slots whose values are summed up in one product; a cache has a whole number of them."""

Watch = Callable[[int, Tensor], None]
"""`watch(position, logits)`: what the model said at `position` of a prompt and at those after it."""
Attend = Callable[[int, Tensor], Tensor]
"""`attend(layer, qkv [tokens, heads, size]) -> [tokens, query heads * size]`."""


def is_supported(model: PreTrainedModel) -> bool:
    """Does this decoder compute what the model computes? If not, the model's own forward is used."""
    config = model.config
    kinds = getattr(config, "layer_types", None)
    if kinds:
        slides = any(kind != "full_attention" for kind in kinds)
    else:
        slides = getattr(config, "sliding_window", None) is not None
    return (
        type(model).__name__ in FAMILY
        and not slides
        and (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") in STATIC_ROPE
    )


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
    """Per layer [2, rows, kv heads, slots, size]; a row's slots are its positions, zero where it has not been yet."""
    positions: Tensor
    """[rows], of each row's next token."""
    longest: int
    """The highest of them."""

    @property
    def size(self) -> int:
        return len(self.positions)

    @property
    def slots(self) -> int:
        """Those that are looked at when every row has taken its next token."""
        return whole_blocks(self.longest + 1)

    def make_room(self) -> None:
        """Have a slot for the next token of every row."""
        have = self.cache[0].shape[3]
        if self.slots > have:
            more = max(BLOCK, whole_blocks(have // 2))
            for i, old in enumerate(self.cache):  # layer by layer: only one is there twice
                self.cache[i] = pad(old, (0, 0, 0, more))

    def move_on(self) -> None:
        self.positions, self.longest = self.positions + 1, self.longest + 1

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Drop all others. Returns which row is now where: the last ones move into the holes."""
        order = list(range(len(rows)))
        holes = sorted(set(order) - set(rows))
        movers = [row for row in rows if row >= len(rows)]
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        for i, layer in enumerate(self.cache):
            if holes:
                # All slots of a row move, so what lies behind its last position stays zero.
                layer[:, holes] = layer[:, movers]
            # A view: the memory of dropped rows is given back when the group grows or ends.
            self.cache[i] = layer[:, : len(rows)]
        self.positions = self.positions[order]
        self.longest = int(self.positions.max())
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
        """Rows that continue from these prompts (a number may come more than once), with `room` slots to begin with."""
        lengths = [self.lengths[i] for i in which]
        slots = whole_blocks(max(lengths) + room)
        cache = [self._spread_cache(layer, which, slots) for layer in range(len(self.chunks[0]))]
        return Group(cache, torch.tensor(lengths, device=self.logits.device), max(lengths))

    def _spread_cache(self, layer: int, which: Sequence[int], slots: int) -> Tensor:
        _, _, heads, size = self.chunks[0][layer].shape
        # Zeros, not empty memory: masked slots get weight 0, and 0 times a NaN is a NaN.
        new = self.chunks[0][layer].new_zeros((2, len(which), heads, slots, size))
        row = 0
        for prompt, same in groupby(which):
            rows, (chunk, start), length = len(list(same)), self.places[prompt], self.lengths[prompt]
            part = self.chunks[chunk][layer][start : start + length].permute(1, 2, 0, 3)
            new[:, row : row + rows, :, :length] = part[:, None]
            row += rows
        return new


class LlamaDecoder:
    """One snapshot of weights, ready to decode."""

    def __init__(self, model: PreTrainedModel, weights: MergedWeights):
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
        """Read the prompts; `keep` what rows that continue will need."""
        # The embedding only holds the place of the logits, which are known at the end.
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
        for group in groups:
            group.make_room()
        masks = [self._mask(group) for group in groups]
        positions = torch.cat([group.positions for group in groups])
        hidden = self._run(torch.tensor(tokens, device=self.device), positions, partial(self._attend, groups, masks))
        for group in groups:
            group.move_on()
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
            # `roll` copies and comes first, since `mul_` overwrites `turned`, a view of the queries and keys in `qkv`.
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
            # A power of two: a growing sequence has the table made anew a few times, not at every position.
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

    def _attend(self, groups: Sequence[Group], masks: list[Tensor], layer: int, qkv: Tensor) -> Tensor:
        """Each row looks at its own past. Query heads that share a key head are rows of one small product."""
        queries = qkv[:, : self.heads] * self._scale
        fresh = qkv[:, self.heads :].unflatten(1, (2, self.kv_heads))
        out, start = [], 0
        for group, mask in zip(groups, masks, strict=True):
            stop = start + group.size
            cache = group.cache[layer]
            # Index tensors on both sides of a slice put the rows first, as `fresh` has them: [rows, 2, kv heads, size].
            cache[:, torch.arange(group.size, device=self.device), :, group.positions] = fresh[start:stop]
            keys, values = cache.flatten(1, 2)
            q = queries[start:stop].view(-1, self.heads // self.kv_heads, self.head_size)
            weights = torch.softmax(torch.baddbmm(mask, q, keys[:, : group.slots].transpose(1, 2)), -1)
            out.append(weigh_values(weights, values).view(group.size, -1))
            start = stop
        return out[0] if len(out) == 1 else torch.cat(out)

    def _mask(self, group: Group) -> Tensor:
        """[rows * kv heads, 1, slots], minus infinity where a row has not been yet."""
        ahead = torch.arange(group.slots, device=self.device) > group.positions[:, None]
        mask = torch.zeros(ahead.shape, dtype=group.cache[0].dtype, device=self.device)
        return mask.masked_fill_(ahead, -torch.inf).repeat_interleave(self.kv_heads, 0)[:, None]


def whole_blocks(slots: int) -> int:
    return -(-slots // BLOCK) * BLOCK


def weigh_values(weights: Tensor, values: Tensor) -> Tensor:
    """weights [n, queries, slots] @ values [n, slots or more, size]. How a library splits a long sum depends on its
    length, and so on the longest neighbour; blocks of one size, one after the other, do not."""
    total = torch.bmm(weights[:, :, :BLOCK], values[:, :BLOCK])
    for start in range(BLOCK, weights.shape[2], BLOCK):
        block = slice(start, start + BLOCK)
        total.baddbmm_(weights[:, :, block], values[:, block])
    return total


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
        # A prompt above the limit is a chunk alone: its attention needs all of it at once.
        if i > start and tokens + length > PREFILL_TOKENS:
            yield range(start, i)
            start, tokens = i, 0
        tokens += length
    yield range(start, len(lengths))


# Decoding through a model's own forward, for architectures that `LlamaDecoder` does not know.
#
# In and out as there. Merged weights are lent to the model for the length of a call, so a call must not overlap with
# others on the same model. Prompts are padded on the left, as `generate` does, because sliding windows and recurrent
# states count places, not positions.


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
        """Rows that continue from these prompts (a number may come more than once); can be called once."""
        del room  # the cache grows by itself
        group = ModelGroup(self.cache, self.mask, self.mask.sum(-1))
        group.keep(which)
        return group


class ModelDecoder:
    """A model and what is to be put in the place of its parameters."""

    def __init__(self, model: PreTrainedModel, replaced: Mapping[str, Tensor]):
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
        # Real tokens count from 0 behind their padding; the padding itself is masked, so any valid position will do.
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        columns = max(16, LOGITS_BYTES // (4 * self._vocab_size * len(ids))) if watch else width
        cache, logits = None, ids
        for start in range(0, width, columns):
            part = slice(start, start + columns)
            logits, cache = self._call(ids[:, part], mask[:, : part.stop], positions[:, part], cache, every=bool(watch))
            for i, look in watch.items():
                # Without the last position: it predicts the first new token, not one of the prompt.
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
