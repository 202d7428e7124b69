"""Run a coroutine from plain code, whether or not an event loop is already turning (notebooks); and time limits that
do not count the time spent in a line."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Coroutine, Iterator
from contextvars import ContextVar
from typing import Any


def run_async[T](work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; inside a running loop it runs on a thread of its own."""
    if not _loop_is_running():
        return asyncio.run(work)
    outcome: list[Any] = []  # (worked, value or exception)

    def target() -> None:
        try:
            outcome.append((True, asyncio.run(work)))
        except BaseException as exc:
            outcome.append((False, exc))

    thread = threading.Thread(target=target, name="evsys-async")
    thread.start()
    thread.join()
    done, value = outcome[0]
    if not done:
        raise value
    return value


def _loop_is_running() -> bool:
    # Apart from `run_async`: work that is done inside an exception's handler takes that exception for its own.
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


_limit: ContextVar[tuple[asyncio.Timeout, float] | None] = ContextVar("evsys_limit", default=None)


async def within[T](work: Awaitable[T], seconds: float) -> T:
    """What `work` comes to; TimeoutError when it takes longer, not counting the time in `clock_stopped`."""
    async with asyncio.timeout(seconds) as limit:
        before = _limit.set((limit, seconds))
        try:
            return await work
        finally:
            _limit.reset(before)


@contextlib.contextmanager
def clock_stopped() -> Iterator[None]:
    """Waiting for one's turn: the limit of `within`, if there is one, begins anew afterwards."""
    found = _limit.get()
    if found is None:
        yield
        return
    limit, seconds = found
    with contextlib.suppress(RuntimeError):  # it has just run out
        limit.reschedule(None)
    yield
    with contextlib.suppress(RuntimeError):
        limit.reschedule(asyncio.get_running_loop().time() + seconds)
