"""Weights to sample from: read from their folder when used, put back when others are used more.

In: a folder (None for the base model) and a request. Out: completions. Requests for the same weights share a batch
where the engine's sampler can take newcomers on board (`SampleQueue`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from evsys_engine.server.limits import ServerLimits
from evsys_engine.types import EngineApi, EngineSampler, SampleOutput, SampleRequest

if TYPE_CHECKING:
    from evsys_engine.sample_queue import SampleQueue

InWorker = Callable[..., Awaitable[Any]]
"""`in_worker(function, *arguments)`: on a thread, awaited."""


@dataclass(frozen=True, slots=True)
class Loaded:
    sampler: EngineSampler
    queue: SampleQueue | None = None
    """Joins requests into batches; only over a sampler of our own engine."""

    def close(self) -> None:
        if self.queue is not None:
            self.queue.close()
        self.sampler.close()


@dataclass(slots=True)
class SamplerSlot:
    """One set of weights and how many requests are with it."""

    loading: asyncio.Task[Loaded]
    requests: int = 0


class Samplers:
    """Every set of weights in use, the last used one last."""

    def __init__(self, engine: EngineApi, in_worker: InWorker, limits: ServerLimits) -> None:
        self._engine, self._in_worker, self._limits = engine, in_worker, limits
        self._slots: OrderedDict[Path | None, SamplerSlot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._slots)

    async def sample(self, folder: Path | None, request: SampleRequest) -> SampleOutput:
        slot = self._slot(folder)
        slot.requests += 1
        try:
            loaded = await asyncio.shield(slot.loading)
            return await self._sample(loaded, request)
        finally:
            slot.requests -= 1
            await self._put_idle_ones_back()

    async def close(self, folder: Path | None) -> None:
        """Give the memory of these weights back; requests that are with them are broken off."""
        slot = self._slots.pop(folder, None)
        if slot is not None:
            await asyncio.wait([slot.loading])
            if slot.loading.exception() is None:
                await self._in_worker(slot.loading.result().close)

    def _slot(self, folder: Path | None) -> SamplerSlot:
        slot = self._slots.get(folder)
        if slot is None or (slot.loading.done() and slot.loading.exception()):  # what failed once is tried again
            slot = self._slots[folder] = SamplerSlot(asyncio.create_task(self._load(folder)))
        self._slots.move_to_end(folder)
        return slot

    async def _load(self, folder: Path | None) -> Loaded:
        def load() -> Loaded:
            sampler = self._engine.load_sampler(folder)
            if not hasattr(sampler, "serve"):  # another engine's, which samples one list at a time
                return Loaded(sampler)
            from evsys_engine.sample_queue import SampleQueue

            return Loaded(sampler, SampleQueue(cast(Any, sampler)))

        loaded: Loaded = await self._in_worker(load)
        return loaded

    async def _sample(self, loaded: Loaded, request: SampleRequest) -> SampleOutput:
        if loaded.queue is None:
            results: list[SampleOutput] = await self._in_worker(loaded.sampler.sample, [request])
            return results[0]
        # Submitting checks a prompt token by token: not on the event loop.
        result: SampleOutput = await asyncio.wrap_future(await self._in_worker(loaded.queue.submit, request))
        return result

    async def _put_idle_ones_back(self) -> None:
        while len(self._slots) > self._limits.loaded_samplers and (idle := self._idle()):
            await self.close(idle[0])  # the one used longest ago; who is idle may have changed by then

    def _idle(self) -> list[Path | None]:
        return [folder for folder, slot in self._slots.items() if not slot.requests]
