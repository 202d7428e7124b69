"""From the caller's data to packed micro-batches.

In: `TrainingDatum`s. Out: checked `Row`s, and `Batch`es of them under a token budget. A batch is one long row of
tokens without any padding; `lengths` says where its sequences end. Everything the caller can get wrong is found here,
before anything is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from evsys_engine.losses import get_loss
from evsys_engine.types import Array, BadRequest, ModelInfo, TrainingDatum

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Attention over sequences that lie end to end in one row.
#
# In: a Hugging Face decoder and packed tokens. Out: its hidden states, as if each sequence had been alone. Every
# linear layer sees one matrix of real tokens, so rows of mixed length cost no padding. The model's attention
# implementation is set to ours, which is plain SDPA for callers that do not pass `packed_lengths`.


NAME = "evsys_packed"


def install(model: PreTrainedModel) -> None:
    """Let `model` understand `packed_lengths`."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def hidden_states(trunk: Any, tokens: Tensor, positions: Tensor, lengths: list[int]) -> Tensor:
    """[S, D] of the decoder without its head. A single sequence is an ordinary call, which every model understands."""
    if len(lengths) == 1:
        return _states(trunk(input_ids=tokens, use_cache=False))
    # A mask that is already four-dimensional is passed on as it is: none is built, and `attention` does not look at it.
    no_mask = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=tokens.device)
    out = trunk(
        input_ids=tokens, position_ids=positions, attention_mask=no_mask, use_cache=False, packed_lengths=lengths
    )
    return _states(out)


def _states(output: Any) -> Tensor:
    states: Tensor = output.last_hidden_state
    return states[0]


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed_lengths: list[int] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: heads [1, H, S, d] in, [1, S, H, d] out."""
    if packed_lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    parts, start = [], 0
    for length, run in groupby(packed_lengths):
        count = len(list(run))
        # `count` sequences of `length` tokens out of [1, H, S, d], as [count, H, length, d].
        q, k, v = (
            heads[0, :, start : start + count * length].unflatten(1, (count, length)).transpose(0, 1)
            for heads in (query, key, value)
        )
        # What a layer with a sliding window may look at; None where the window covers everything.
        window, reach = None, kwargs.get("sliding_window")
        if reach is not None and length > reach:
            back = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
            window = (back >= 0) & (back < reach)
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=window,
            is_causal=window is None,
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        parts.append(out.transpose(1, 2).flatten(0, 1))
        start += count * length
    return torch.cat(parts)[None], None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """One datum, checked."""

    index: int
    tokens: Array
    """int64 [T]."""
    targets: Array
    """int64 [T, K]."""
    inputs: dict[str, Array]
    """What the loss reads, float32 [T, K]."""
    flat: bool
    """The caller gave one target per position, as [T]."""

    def reshape_logprobs(self, logprobs: Tensor) -> Tensor:
        """Of [T, K or more] logprobs, what this row asked for, in its own shape."""
        return logprobs[:, 0] if self.flat else logprobs[:, : self.targets.shape[1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences end to end: S tokens in all, K targets per position (fewer are filled up with token 0)."""

    rows: list[BatchRow]
    lengths: list[int]
    tokens: Tensor
    """[1, S]."""
    positions: Tensor
    """[1, S], from 0 in each sequence."""
    targets: Tensor
    """[S, K]."""
    inputs: dict[str, Tensor]
    """float32 [S, K]; 0 where filled up."""

    def split(self, values: Tensor) -> list[Tensor]:
        """[S, K] values by row, each in its row's shape."""
        return [row.reshape_logprobs(part) for row, part in zip(self.rows, values.split(self.lengths), strict=True)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`."""
        return _stack_padded([part.reshape(len(part), -1) for part in parts], self.targets.shape[1]).to(
            self.targets.device
        )


def read_rows(data: Sequence[TrainingDatum], loss_fn: str | None, info: ModelInfo) -> list[BatchRow]:
    """Check `data` for the loss; None is a custom loss, which may bring what it likes beside `target_tokens`."""
    if not data:
        raise BadRequest("there is no data; give at least one datum")
    return [_read_row(datum, index, loss_fn, info) for index, datum in enumerate(data)]


def _read_row(datum: TrainingDatum, index: int, loss_fn: str | None, info: ModelInfo) -> BatchRow:
    tokens = _tokens(datum.tokens, f"datum {index}: tokens", info.vocab_size)
    if tokens.ndim != 1:
        raise BadRequest(f"datum {index}: tokens has shape {tokens.shape}; it is one sequence of ids")
    if len(tokens) > info.max_length:
        raise BadRequest(f"datum {index}: {len(tokens)} tokens; {info.name} takes at most {info.max_length}")
    if "target_tokens" not in datum.inputs:
        raise BadRequest(f"datum {index}: inputs has no 'target_tokens'; it has {', '.join(datum.inputs) or 'nothing'}")
    targets = _tokens(datum.inputs["target_tokens"], f"datum {index}: target_tokens", info.vocab_size)
    if targets.ndim not in (1, 2) or len(targets) != len(tokens):
        raise BadRequest(
            f"datum {index}: target_tokens has shape {targets.shape} but there are {len(tokens)} tokens; "
            "position i of the input predicts target i"
        )
    inputs = _loss_inputs(datum, index, loss_fn, targets.shape) if loss_fn is not None else {}
    flat = targets.ndim == 1
    wide = {key: value.reshape(len(tokens), -1) for key, value in inputs.items()}
    return BatchRow(index=index, tokens=tokens, targets=targets.reshape(len(tokens), -1), inputs=wide, flat=flat)


def _tokens(values: Any, what: str, vocab_size: int) -> Array:
    try:
        tokens = np.asarray(values)
    except ValueError as exc:
        raise BadRequest(f"{what} is not an array: {exc}") from exc
    if tokens.size == 0:
        raise BadRequest(f"{what} is empty")
    # Booleans and whole floats are refused too: numpy would cast both to ids without a word.
    if tokens.dtype.kind not in "iu":
        raise BadRequest(f"{what} must hold whole numbers (int64), not {tokens.dtype}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise BadRequest(f"{what} has token {low if low < 0 else high}; the vocabulary ends at {vocab_size - 1}")
    return tokens.astype(np.int64)  # a copy: the caller may change its own while the call waits for its turn


def _loss_inputs(datum: TrainingDatum, index: int, name: str, shape: tuple[int, ...]) -> dict[str, Array]:
    wanted = get_loss(name).inputs
    if len(shape) == 2 and name != "cross_entropy":
        raise BadRequest(f"datum {index}: {name} takes one target per position, not {shape[1]}")
    for key in datum.inputs:
        if key != "target_tokens" and key not in wanted:
            raise BadRequest(f"datum {index}: {name} does not read {key!r}; it reads {', '.join(wanted)}")
    if name == "cross_entropy" and "weights" not in datum.inputs and len(shape) == 1:
        return {"weights": np.ones(shape, dtype=np.float32)}  # every target counts once, as the protocol has it
    arrays: dict[str, Array] = {}
    for key in wanted:
        if key not in datum.inputs:
            raise BadRequest(f"datum {index}: inputs has no {key!r}; it has {', '.join(datum.inputs)}")
        try:
            # `array` copies, unlike `asarray`: the caller may change its own while the call waits for its turn.
            values = np.array(datum.inputs[key], dtype=np.float32)
        except (TypeError, ValueError) as exc:
            raise BadRequest(f"datum {index}: {key} is not an array of numbers: {exc}") from exc
        if values.shape != shape:
            raise BadRequest(f"datum {index}: {key} has shape {values.shape}, target_tokens has {shape}")
        if not np.isfinite(values).all():
            raise BadRequest(f"datum {index}: {key} has a value that is not finite (NaN or infinity)")
        arrays[key] = values
    return arrays


def make_batches(rows: Sequence[BatchRow], budget: int | None, device: torch.device) -> list[Batch]:
    """Rows by length, longest first, packed until `budget` tokens are full; None makes a batch of each row.

    Longest first: if memory runs out, it does so at once. Equal lengths end up side by side, where attention takes
    them together.
    """
    groups: list[list[BatchRow]] = []
    room = 0
    for row in sorted(rows, key=lambda row: -len(row.tokens)):
        if budget is None or not groups or len(row.tokens) > room:
            groups.append([])
            room = budget or 0
        groups[-1].append(row)
        room -= len(row.tokens)
    return [_pack(group, device) for group in groups]


def _pack(rows: list[BatchRow], device: torch.device) -> Batch:
    lengths = [len(row.tokens) for row in rows]
    width = max(row.targets.shape[1] for row in rows)
    inputs = {
        key: _stack_padded([torch.from_numpy(row.inputs[key]) for row in rows], width).to(device)
        for key in rows[0].inputs
    }
    return Batch(
        rows=rows,
        lengths=lengths,
        tokens=torch.from_numpy(np.concatenate([row.tokens for row in rows])).to(device)[None],
        positions=torch.cat([torch.arange(length) for length in lengths]).to(device)[None],
        targets=_stack_padded([torch.from_numpy(row.targets) for row in rows], width).to(device),
        inputs=inputs,
    )


def _stack_padded(parts: Sequence[Tensor], width: int) -> Tensor:
    """[T, K] parts below one another, each filled up with zeros to `width` columns."""
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])
