"""Run a coroutine from plain code, whether or not an event loop is already turning (notebooks), until somebody
interrupts it; plain code from a coroutine, on a thread; and time limits that do not count the time spent in a line."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from evsys_sdk.errors import Cancelled


class Interrupted(BaseException):
    """Somebody wants what this thread does to end where it stands. No Exception, which foreign code would take for a
    failure of its own, and no KeyboardInterrupt, which breaks an event loop."""

    def __str__(self) -> str:
        return "interrupted"


def run_async[T](work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; inside a running loop it runs on a thread of its own."""
    waiting = threading.get_ident()
    if not _loop_is_running():
        return _turn(work, waiting)
    outcome: list[Any] = []  # (worked, value or exception)

    def target() -> None:
        try:
            outcome.append((True, _turn(work, waiting)))
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


@dataclass(slots=True)
class _Turning:
    """Work on an event loop that a thread waits for."""

    loop: asyncio.AbstractEventLoop
    task: asyncio.Task[Any]
    interrupted: bool = False

    def interrupt(self, heard: threading.Event) -> None:
        self.interrupted = True
        self.task.cancel()
        heard.set()


_turning: dict[int, _Turning] = {}
"""By the thread that waits in `run_async`."""


def _turn[T](work: Coroutine[Any, Any, T], waiting: int) -> T:
    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(_complain)
        return runner.run(_until_interrupted(work, waiting))


async def _until_interrupted[T](work: Coroutine[Any, Any, T], waiting: int) -> T:
    task = asyncio.current_task()
    assert task is not None
    before, turning = _turning.get(waiting), _Turning(asyncio.get_running_loop(), task)
    _turning[waiting] = turning
    try:
        return await work
    except asyncio.CancelledError:
        if turning.interrupted:
            raise Interrupted from None
        raise
    finally:
        del _turning[waiting]
        if before is not None:
            _turning[waiting] = before


def _complain(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What asyncio says of work that nobody asked after; that somebody stopped it is none of that."""
    if not isinstance(context.get("exception"), Interrupted | Cancelled):
        loop.default_exception_handler(context)


def interrupt_loop(ident: int) -> threading.Event | None:
    """Cancel what a thread waits for in `run_async`, which then raises Interrupted. The event is set when its loop has
    heard of it; None for a thread that waits for nothing."""
    turning, heard = _turning.get(ident), threading.Event()
    if turning is None:
        return None
    with contextlib.suppress(RuntimeError):  # the loop is closed by now
        turning.loop.call_soon_threadsafe(turning.interrupt, heard)
    return heard


def interrupt_thread(ident: int) -> None:
    """Raise Interrupted on a thread at its next Python instruction."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Interrupted))


def no_interrupt(ident: int) -> None:
    """Take back an `interrupt_thread` that has not come to anything yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), None)


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
