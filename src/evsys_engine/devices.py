"""Where the engine computes, how precisely, and how much it takes on at once.

In: what the user asked for ("auto" mostly). Out: a torch device, a dtype and `Limits`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evsys_engine.types import EngineError

DTYPES = {"float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
FAST_BF16 = {"avx512_bf16", "amx_bf16"}
"""CPU flags; without one of them bf16 is several times slower than fp32."""
HEAD_BYTES = 64 << 20
"""Logits held at a time: enough rows for an efficient product, few enough to forget about."""
CPU_BATCH_TOKENS = 512
"""Measured (SmolLM2-135M, 256 to 2048 tokens): more is not faster, and costs 1.5 MB a token."""
GPU_BATCH_SHARE = 0.2
"""Of the GPU's memory, for one forward/backward: there a large batch is the fast one."""
GRAPH_SHARE = 0.25
"""Of the device's memory, for a custom loss that keeps all its graphs until the caller has answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much is computed at once; results do not depend on it."""

    batch_tokens: int
    """Tokens of one forward/backward."""
    graph_tokens: int
    """Tokens whose graphs a custom loss may hold; above it the forward pass is done twice."""
    head_rows: int
    """Positions whose logits exist at the same time."""


def choose_device(asked: str) -> torch.device:
    """`auto` is the GPU if there is one."""
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise EngineError(f"device {asked!r} is not one of auto, cpu, cuda, cuda:<number>")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EngineError(
            f"device {asked!r}: torch sees {torch.cuda.device_count()} GPUs here; use device: cpu or auto"
        )
    return device


def choose_dtype(asked: str, device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> torch.dtype:
    """`auto` is bf16 where the hardware is fast at it, else fp32."""
    if asked == "auto":
        fast = device.type == "cuda" or bool(FAST_BF16 & cpu_flags(cpuinfo))
        return torch.bfloat16 if fast else torch.float32
    if asked not in DTYPES:
        raise EngineError(f"dtype {asked!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[asked]


def cpu_flags(cpuinfo: Path) -> set[str]:
    """What the processor says it can do; empty where it does not say (not Linux)."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())


def choose_limits(config: Any, device: torch.device, dtype: torch.dtype, batch_tokens: int | None) -> Limits:
    """Limits for a model with this (text) config; None leaves `batch_tokens` to us."""
    if batch_tokens is not None and batch_tokens < 1:
        raise EngineError(f"max_batch_tokens must be 1 or more, not {batch_tokens}")
    tokens = _memory_bytes(device) / _graph_bytes_per_token(config, dtype)
    usual = CPU_BATCH_TOKENS if device.type == "cpu" else max(CPU_BATCH_TOKENS, int(GPU_BATCH_SHARE * tokens))
    return Limits(
        batch_tokens=batch_tokens or usual,
        graph_tokens=int(GRAPH_SHARE * tokens),
        head_rows=max(16, HEAD_BYTES // (4 * config.vocab_size)),
    )


def _graph_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Roughly what autograd keeps of one token: some 14 vectors of the stream and 5 of the MLP in each layer."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    wide = getattr(config, "intermediate_size", None) or 4 * hidden
    return int(layers * (14 * hidden + 5 * wide) * dtype.itemsize)


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 8 << 30
