"""Calls of one model, one after another, in the order of their numbers.

In: numbered calls in any order, some of them twice, some of them refused before they could wait here. Out: each done
once, in order. The client numbers its calls from 1 and sends the pieces of one batch side by side, so a later number
may well arrive first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from evsys_engine.server.futures import Answer, Futures, Promise, failure
from evsys_engine.types import BadRequest, EngineError

logger = logging.getLogger("evsys_engine.server")

FARTHEST_AHEAD = 100_000
"""A number farther ahead than this is no lost call but nonsense."""


class Conflict(EngineError):
    """The number belongs to another call; the server answers 409."""


@dataclass(frozen=True, slots=True)
class Job:
    promise: Promise
    work: Callable[[], Awaitable[Answer]]


class Lane:
    """The queue of one model."""

    def __init__(self, name: str, futures: Futures, *, gap_seconds: float) -> None:
        self._name, self._futures, self._gap_seconds = name, futures, gap_seconds
        self._waiting: dict[int, Job] = {}
        self._given_up: list[range] = []
        self._refused: set[int] = set()
        self._skipped: set[int] = set()
        self._next = 1
        self._closed = False
        self._arrived = asyncio.Event()
        self._runner = asyncio.create_task(self._run())

    def number(self, asked: int | None) -> int:
        """The number a call has; a client that does not count is served in the order it comes."""
        if asked and asked > self._next + FARTHEST_AHEAD:
            raise BadRequest(f"seq_id {asked} is far ahead of {self._next}, the next one due")
        return asked or max(self._waiting, default=self._next - 1) + 1

    def has_seen(self, number: int) -> bool:
        """Is this call waiting, running or done? Then it was sent twice."""
        if any(number in missing for missing in self._given_up):
            raise BadRequest(f"seq_id {number} came over {self._gap_seconds:g} s late; later calls have gone ahead")
        if number in self._skipped:
            raise Conflict(f"seq_id {number} belongs to a call that was refused; send this one as seq_id {self._next}")
        return number < self._next or number in self._waiting

    def put(self, number: int, job: Job) -> None:
        self._refused.discard(number)
        self._waiting[number] = job
        self._arrived.set()

    def refuse(self, number: int) -> None:
        """The call with this number was answered with an error: later ones do not wait for it.

        Until a later one arrives, the caller may send a corrected call under the same number.
        """
        if self._next <= number <= self._next + FARTHEST_AHEAD and number not in self._waiting:
            self._refused.add(number)
            self._arrived.set()

    async def close(self) -> None:
        """Let the running call end; refuse those that wait."""
        self._closed = True
        for job in self._waiting.values():
            self._futures.settle(job.promise, failure(BadRequest(f"{self._name} was unloaded before this was done")))
        self._waiting.clear()
        self._arrived.set()
        await self._runner

    def abandon(self) -> None:
        """Stop without waiting: the server goes down."""
        self._runner.cancel()

    async def _run(self) -> None:
        while job := await self._next_due():
            await self._futures.keep(job.promise, job.work())

    async def _next_due(self) -> Job | None:
        deadline: float | None = None
        while self._next not in self._waiting:
            if self._closed:
                return None
            if self._next in self._refused and self._waiting:
                self._refused.remove(self._next)
                self._skipped.add(self._next)
                self._next += 1
                continue
            self._arrived.clear()
            deadline = self._deadline(deadline)
            try:
                async with asyncio.timeout_at(deadline):
                    await self._arrived.wait()
            except TimeoutError:
                self._give_up_on_missing()
        self._next += 1
        return self._waiting.pop(self._next - 1)

    def _deadline(self, current: float | None) -> float | None:
        """Nothing waits: no hurry. Later numbers wait for a missing one: not for ever."""
        if not self._waiting:
            return None
        return current or asyncio.get_running_loop().time() + self._gap_seconds

    def _give_up_on_missing(self) -> None:
        missing = range(self._next, min({*self._waiting, *self._refused}))
        logger.warning("%s: calls %d to %d did not arrive; skipping them", self._name, missing.start, missing.stop - 1)
        self._given_up.append(missing)
        self._next = missing.stop
