"""Where the engine computes, how precisely, and how much it takes on at once.

In: what the user asked for ("auto" mostly). Out: a torch device, a dtype and `Limits`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers.utils import logging

from evsys_engine.types import EngineError

# One heap for all threads.
#
# In: nothing. Out: a setting of the C library, for the whole process. Each arm runs in its own thread, and glibc
# would give each thread its own heap that keeps what its largest batch once needed: measured for four arms of
# SmolLM2-135M, 5.9 GB instead of 3.8.


M_ARENA_MAX = -8
"""From glibc's malloc.h."""


def share_one_heap() -> bool:
    """Whether threads that begin from now on share a heap. A limit in the user's own MALLOC_ARENA_MAX stays."""
    if not sys.platform.startswith("linux") or "MALLOC_ARENA_MAX" in os.environ:
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1))
    except (OSError, AttributeError):  # another C library, which has no such heaps
        return False


# Loading and saving without a progress bar of transformers on the user's terminal.


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """The switch is the process's own; it is put back as it was."""
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


# Whose turn it is: one call at a time, first come, first served.
#
# In: threads that want the engine. Out: one of them at a time, in the order they asked. `threading.Lock` makes no
# promise about order, and an arm that trains in a tight loop could starve its neighbours.


class FairLock:
    """A lock with a queue. The thread that holds it may take it again (a custom loss may ask the engine something)."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._queue: deque[tuple[int, threading.Lock]] = deque()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self) -> None:
        """Wait for the turn; an interrupted wait (Ctrl-C) gives its place back."""
        me = threading.get_ident()
        with self._guard:
            if self._owner in (None, me):
                self._owner, self._depth = me, self._depth + 1
                return
            # A closed gate per waiter: opening one wakes exactly the thread whose turn it is.
            gate = threading.Lock()
            gate.acquire()
            place = (me, gate)
            self._queue.append(place)
        try:
            gate.acquire()
        except BaseException:
            self._leave(place)
            raise

    def release(self) -> None:
        """Hand over to the thread that has waited longest."""
        with self._guard:
            if self._owner != threading.get_ident():
                raise RuntimeError("the lock is released by a thread that does not hold it")
            self._depth -= 1
            if self._depth == 0:
                self._hand_over()

    def _hand_over(self) -> None:
        if not self._queue:
            self._owner = None
            return
        # The next owner is named before its gate opens, so a thread that asks in between queues up.
        self._owner, gate = self._queue.popleft()
        self._depth = 1
        gate.release()

    def _leave(self, place: tuple[int, threading.Lock]) -> None:
        with self._guard:
            if place in self._queue:
                self._queue.remove(place)
            else:  # the turn came while the wait was being broken off
                self._depth = 0
                self._hand_over()

    def __enter__(self) -> FairLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


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
class ComputeLimits:
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


def choose_limits(config: Any, device: torch.device, dtype: torch.dtype, batch_tokens: int | None) -> ComputeLimits:
    """Limits for a model with this (text) config; None leaves `batch_tokens` to us."""
    if batch_tokens is not None and batch_tokens < 1:
        raise EngineError(f"max_batch_tokens must be 1 or more, not {batch_tokens}")
    # Roughly what autograd keeps of one token: some 14 vectors of the stream and 5 of the MLP in each layer.
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    token_bytes = config.num_hidden_layers * (14 * config.hidden_size + 5 * wide) * dtype.itemsize
    tokens = _memory_bytes(device) / token_bytes
    usual = CPU_BATCH_TOKENS if device.type == "cpu" else max(CPU_BATCH_TOKENS, int(GPU_BATCH_SHARE * tokens))
    return ComputeLimits(
        batch_tokens=batch_tokens or usual,
        graph_tokens=int(GRAPH_SHARE * tokens),
        # 4 bytes: logits are fp32 whatever the model computes in.
        head_rows=max(16, HEAD_BYTES // (4 * config.vocab_size)),
    )


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        # A guess for systems that do not say, such as Windows.
        return 8 << 30
