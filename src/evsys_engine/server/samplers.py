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
from typing import Any, cast

from evsys_engine.server.limits import Limits
from evsys_engine.types import EngineApi, Sampler, SampleRequest, SampleResult

InWorker = Callable[..., Awaitable[Any]]
"""`in_worker(function, *arguments)`: on a thread, awaited."""


@dataclass(frozen=True, slots=True)
class Loaded:
    sampler: Sampler
    queue: Any = None
    """A `SampleQueue` over it."""

    def close(self) -> None:
        if self.queue is not None:
            self.queue.close()
        self.sampler.close()


@dataclass(slots=True)
class Desk:
    """One set of weights and how many requests are with it."""

    loading: asyncio.Task[Loaded]
    requests: int = 0


class Samplers:
    """Every set of weights in use, the last used one last."""

    def __init__(self, engine: EngineApi, in_worker: InWorker, limits: Limits) -> None:
        self._engine, self._in_worker, self._limits = engine, in_worker, limits
        self._desks: OrderedDict[Path | None, Desk] = OrderedDict()

    def __len__(self) -> int:
        return len(self._desks)

    async def sample(self, folder: Path | None, request: SampleRequest) -> SampleResult:
        desk = self._desk(folder)
        desk.requests += 1
        try:
            loaded = await asyncio.shield(desk.loading)
            return await self._ask(loaded, request)
        finally:
            desk.requests -= 1
            await self._put_idle_ones_back()

    async def close(self, folder: Path | None) -> None:
        """Give the memory of these weights back; requests that are with them are broken off."""
        desk = self._desks.pop(folder, None)
        if desk is not None:
            await asyncio.wait([desk.loading])
            if desk.loading.exception() is None:
                await self._in_worker(desk.loading.result().close)

    def _desk(self, folder: Path | None) -> Desk:
        desk = self._desks.get(folder)
        if desk is None or (desk.loading.done() and desk.loading.exception()):  # what failed once is tried again
            desk = self._desks[folder] = Desk(asyncio.create_task(self._load(folder)))
        self._desks.move_to_end(folder)
        return desk

    async def _load(self, folder: Path | None) -> Loaded:
        loaded: Loaded = await self._in_worker(_open, self._engine, folder)
        return loaded

    async def _ask(self, loaded: Loaded, request: SampleRequest) -> SampleResult:
        if loaded.queue is None:
            results: list[SampleResult] = await self._in_worker(loaded.sampler.sample, [request])
            return results[0]
        # Submitting checks a prompt token by token: not on the event loop.
        result: SampleResult = await asyncio.wrap_future(await self._in_worker(loaded.queue.submit, request))
        return result

    async def _put_idle_ones_back(self) -> None:
        while len(self._desks) > self._limits.loaded_samplers and (idle := self._idle()):
            await self.close(idle[0])  # the one used longest ago; who is idle may have changed by then

    def _idle(self) -> list[Path | None]:
        return [folder for folder, desk in self._desks.items() if not desk.requests]


def _open(engine: EngineApi, folder: Path | None) -> Loaded:
    sampler = engine.load_sampler(folder)
    if not hasattr(sampler, "serve"):  # another engine's, which samples one list at a time
        return Loaded(sampler)
    from evsys_engine.sample_queue import SampleQueue

    return Loaded(sampler, SampleQueue(cast(Any, sampler)))
