"""Run a coroutine from plain code, whether or not an event loop is already turning (notebooks), until a signal
interrupts it; plain code from a coroutine, on a thread; and time limits that do not count the time spent in a line."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from evsys_sdk.errors import Cancelled


class Interrupted(BaseException):
    """The work of this thread must end where it stands. No Exception, which foreign code would take for a failure of
    its work, and no KeyboardInterrupt, which breaks an event loop."""

    def __str__(self) -> str:
        return "interrupted"


def run_async[T](work: Coroutine[object, object, T]) -> T:
    """The result of `work`; inside a running loop it runs on another thread."""
    waiting = threading.get_ident()
    if not _loop_is_running():
        return _turn(work, waiting)
    outcome: list[Any] = []  # (worked, value or exception)

    def target() -> None:
        try:
            outcome.append((True, _turn(work, waiting)))
        except BaseException as exc:
            outcome.append((False, exc))

    thread = threading.Thread(target=contextvars.copy_context().run, args=(target,), name="evsys-async")
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
    task: asyncio.Task[object]
    interrupted: bool = False

    def interrupt(self, heard: threading.Event) -> None:
        self.interrupted = True
        self.task.cancel()
        heard.set()


_turning: dict[int, _Turning] = {}
"""By the thread that waits in `run_async`."""


def _turn[T](work: Coroutine[object, object, T], waiting: int) -> T:
    # Not as the task's result: when the runner restores the SIGINT handler, `signal` writes out the repr of that task,
    # result included, only to drop it (CPython 3.12); for thousands of rollouts that takes seconds.
    results: list[T] = []

    async def main() -> None:
        results.append(await _until_interrupted(work, waiting))

    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(_complain)
        runner.run(main())
    return results[0]


async def _until_interrupted[T](work: Coroutine[object, object, T], waiting: int) -> T:
    task = asyncio.current_task()
    assert task is not None
    # Plain code inside the work may call `run_async` again: that work runs on another thread in this one's name, and a
    # signal cancels the innermost, whose end then unwinds the outer one.
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


def _complain(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """Drop asyncio's report of work whose result was never read, where the reason is that it was stopped."""
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
    """Take back an `interrupt_thread` that has had no effect yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), None)


async def on_thread[T](call: Callable[[], T]) -> T:
    """What `call` returns, on another thread. A caller that gives up on it ends it too, if it is at work in Python;
    what waits in C code (a socket, a sleep) goes with the process."""
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
    """Raised inside a call whose caller has given up."""


class _Threaded:
    """One call; its outcome is (True, what it returned) or (False, what it raised)."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call, self.context = call, contextvars.copy_context()
        self.loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[tuple[bool, Any]] = self.loop.create_future()
        self.lock, self.at_work = threading.Lock(), True
        # A daemon: a call that hangs must not keep the process alive.
        self.thread = threading.Thread(target=self._work, name="evsys-thread", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        # Under the lock: once `at_work` is False the thread may end, and its number be given to another thread.
        with self.lock:
            if self.at_work:
                ident = ctypes.c_ulong(self.thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_Stopped))

    def _work(self) -> None:
        with contextlib.suppress(_Stopped):
            said = self._answer()
            with self.lock:
                self.at_work = False
            with contextlib.suppress(RuntimeError):  # the loop is closed, so there is no caller left
                self.loop.call_soon_threadsafe(self._settle, said)

    def _answer(self) -> tuple[bool, object]:
        try:
            return True, self.context.run(self.call)
        except _Stopped:
            raise
        except BaseException as exc:
            return False, exc

    def _settle(self, said: tuple[bool, object]) -> None:
        # A caller that gave up has cancelled it, and setting it again would raise inside the loop.
        if not self.outcome.done():
            self.outcome.set_result(said)


_stop: ContextVar[threading.Event | None] = ContextVar("evsys_stop", default=None)
POLL_SECONDS = 0.1
"""How often a wait on an event loop looks for a request to stop."""


@contextlib.contextmanager
def heed_stop(event: threading.Event) -> Iterator[None]:
    """Inside the block, and in the tasks and threads it starts, waits for another try end when `event` is set."""
    before = _stop.set(event)
    try:
        yield
    finally:
        _stop.reset(before)


def is_stop_requested() -> bool:
    event = _stop.get()
    return event is not None and event.is_set()


def check_stop() -> None:
    """Raise Cancelled after a request to stop."""
    if is_stop_requested():
        raise Cancelled("stopped by the user")


def pause_before_retry(seconds: float) -> None:
    """Block the thread before another try; a request to stop ends it with Cancelled."""
    event = _stop.get()
    if event is None:
        time.sleep(seconds)
    elif event.wait(seconds):
        check_stop()


async def apause_before_retry(seconds: float) -> None:
    """Wait on the event loop before another try; a request to stop ends it with Cancelled."""
    await unless_stopped(asyncio.sleep(seconds))


async def unless_stopped[T](work: Awaitable[T]) -> T:
    """The result of `work`; a request to stop before that cancels it and raises Cancelled."""
    if _stop.get() is None:
        return await work
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            check_stop()
            await asyncio.wait([task], timeout=POLL_SECONDS)
    finally:
        if not task.done():
            task.cancel()
            # Waited for, so that the work has let go of what it holds before the caller continues.
            await asyncio.gather(task, return_exceptions=True)
    return task.result()


_limit: ContextVar[tuple[asyncio.Timeout, float] | None] = ContextVar("evsys_limit", default=None)


async def within[T](work: Awaitable[T], seconds: float) -> T:
    """The result of `work`; TimeoutError when it takes longer, not counting the time in `clock_stopped`."""
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
