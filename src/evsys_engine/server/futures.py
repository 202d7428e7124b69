"""Promises and their results.

In: work that will end in an answer or a failure. Out: the answer to each request with the promise's id, until it has
been collected for a while. Lives on the event loop; nothing here blocks it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from evsys_engine.http import HttpResponse, json_response
from evsys_engine.server.limits import ServerLimits
from evsys_engine.types import BadRequest, JsonObject

logger = logging.getLogger("evsys_engine.server")


def json_reply(value: object) -> HttpResponse:
    try:
        return json_response(value)
    except ValueError:  # a norm of gradients that are not finite, for instance
        return json_response(_with_named_floats(value))


def _with_named_floats(value: object) -> object:
    """JSON has no NaN and no Infinity: they travel as strings, as in protobuf's JSON, which the client reads back."""
    if isinstance(value, dict):
        return {key: _with_named_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_named_floats(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def failure(exc: BaseException) -> HttpResponse:
    """What the client raises as a failed request: the caller's mistake, or ours."""
    if isinstance(exc, BadRequest):
        return json_reply({"error": str(exc), "category": "user"})
    return json_reply({"error": f"{type(exc).__name__}: {exc}", "category": "server"})


class UnknownPromise(BadRequest):
    """Never made here, or long gone; 410."""


@dataclass(slots=True)
class Promise:
    request_id: str
    session_id: str
    answer: asyncio.Future[HttpResponse]
    payload: str
    """A digest of the request: the same id with another request is a mistake of the caller."""
    done_at: float = 0.0
    collected_at: float = 0.0
    extra: JsonObject = field(default_factory=dict)
    """Said to the client together with the id."""


class Futures:
    """Every promise that may still be asked for."""

    def __init__(self, limits: ServerLimits, clock: Callable[[], float]) -> None:
        self._limits, self._clock = limits, clock
        self._promises: dict[str, Promise] = {}
        self._closing = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._promises)

    def get(self, request_id: str) -> Promise | None:
        return self._promises.get(request_id)

    def make(self, request_id: str, session_id: str, payload: str, **extra: object) -> Promise:
        promise = Promise(request_id, session_id, asyncio.get_running_loop().create_future(), payload, extra=extra)
        self._promises[request_id] = promise
        return promise

    def start(self, promise: Promise, work: Awaitable[HttpResponse]) -> Promise:
        """Let `work` run by itself and end in the promise."""
        task = asyncio.ensure_future(self.keep(promise, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return promise

    async def keep(self, promise: Promise, work: Awaitable[HttpResponse]) -> None:
        """Wait for `work` and put what came of it into the promise."""
        try:
            self.settle(promise, await work)
        except asyncio.CancelledError:
            self.settle(promise, failure(BadRequest("the session ended before this was done")))
            raise
        except Exception as exc:
            if not isinstance(exc, BadRequest):
                logger.exception("request %s failed", promise.request_id)
            self.settle(promise, failure(exc))

    def settle(self, promise: Promise, answer: HttpResponse) -> None:
        if not promise.answer.done():
            promise.done_at = self._clock()
            promise.answer.set_result(answer)

    async def wait_for(self, request_id: str) -> HttpResponse | None:
        """The answer, or None when it is not there after `poll_seconds`."""
        promise = self._promises.get(request_id)
        if promise is None:
            raise UnknownPromise(f"there is no result for request {request_id!r} (any more)")
        if not await self._done_in_time(promise):
            return None
        # The first time counts: asking again and again does not keep a result alive.
        promise.collected_at = promise.collected_at or self._clock()
        return promise.answer.result()

    async def _done_in_time(self, promise: Promise) -> bool:
        if not promise.answer.done() and not self._closing.is_set():
            closing = asyncio.ensure_future(self._closing.wait())
            try:
                both: list[asyncio.Future[Any]] = [promise.answer, closing]
                await asyncio.wait(both, timeout=self._limits.poll_seconds, return_when=asyncio.FIRST_COMPLETED)
            finally:
                closing.cancel()
        return promise.answer.done()

    def drop_session(self, session_id: str) -> None:
        for promise in [p for p in self._promises.values() if p.session_id == session_id]:
            self.settle(promise, failure(BadRequest(f"session {session_id} is over")))
            del self._promises[promise.request_id]

    def sweep(self) -> None:
        """Forget results that were collected a while ago, and those that no client collected in time."""
        now = self._clock()
        for promise in [p for p in self._promises.values() if p.done_at]:
            collected_long_ago = promise.collected_at and now - promise.collected_at >= self._limits.collected_seconds
            if collected_long_ago or now - promise.done_at >= self._limits.uncollected_seconds:
                del self._promises[promise.request_id]

    def stop_waiting(self) -> None:
        """Answer waiting polls with "try again": the server is about to close its connections."""
        self._closing.set()

    async def close(self) -> None:
        self.stop_waiting()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
