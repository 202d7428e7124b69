"""Run a coroutine from plain code, whether or not an event loop is already turning (notebooks); plain code from a
coroutine, on a thread; and time limits that do not count the time spent in a line."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
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


async def on_thread[T](call: Callable[[], T]) -> T:
    """What `call` returns, on a thread of its own. Whoever gives up on it ends it too, if it is at work in Python; what
    waits in C code (a socket, a sleep) goes with the process."""
    work = _Threaded(call)
    try:
        returned, what = await work.outcome
    except asyncio.CancelledError:
        work.stop()
        raise
    if not returned:
        raise what
    return what


class _Stopped(BaseException):
    """Raised inside a call that nobody waits for any more."""


class _Threaded:
    """One call; its outcome is (True, what it returned) or (False, what it raised)."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.context = call, contextvars.copy_context()
        self.loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[tuple[bool, Any]] = self.loop.create_future()
        self.lock, self.at_work = threading.Lock(), True
        # A daemon: a call that hangs must not keep the process alive.
        self.thread = threading.Thread(target=self._work, name="evsys-thread", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        with self.lock:
            if self.at_work:
                ident = ctypes.c_ulong(self.thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_Stopped))

    def _work(self) -> None:
        with contextlib.suppress(_Stopped):
            said = self._said()
            with self.lock:
                self.at_work = False
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
                self.loop.call_soon_threadsafe(self._settle, said)

    def _said(self) -> tuple[bool, Any]:
        try:
            return True, self.context.run(self.call)
        except _Stopped:
            raise
        except BaseException as exc:
            return False, exc

    def _settle(self, said: tuple[bool, Any]) -> None:
        if not self.outcome.done():
            self.outcome.set_result(said)


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
