"""Attention over sequences that lie end to end in one row.

In: a Hugging Face decoder and packed tokens. Out: its hidden states, as if each sequence had been alone. Every linear
layer sees one matrix of real tokens, so rows of mixed length cost no padding. The model's attention implementation is
set to ours, which is plain SDPA for everybody who does not pass `packed_lengths`.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "evsys_packed"


def install(model: Any) -> None:
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
        q, k, v = (_rows(heads, start, count, length) for heads in (query, key, value))
        window = _window(length, kwargs.get("sliding_window"), query.device)
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


def _rows(heads: Tensor, start: int, count: int, length: int) -> Tensor:
    """`count` sequences of `length` tokens out of [1, H, S, d], as [count, H, length, d]."""
    part = heads[0, :, start : start + count * length]
    return part.unflatten(1, (count, length)).transpose(0, 1)


def _window(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """What a layer with a sliding window may look at; None where the window covers everything."""
    if window is None or length <= window:
        return None
    back = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (back >= 0) & (back < window)
