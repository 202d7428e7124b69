"""A project's plain functions on threads beside the event loop, so that one that never returns holds up no other.

In: a call of a user's verifier function. Out: what it returned or raised. The calls of one verifier follow one another
on one thread, so it need not be thread-safe. Only a call that has taken `SLOW_SECONDS` is left alone, and the next
begins beside it. Cancelling a call (a time limit, a cancelled run) ends a loop in Python; code that waits in C (a
socket, a sleep, `re` that backtracks) cannot be ended and lasts until the process ends.

A worker process instead of a thread could be killed, also inside `re`, which holds the interpreter lock while it
backtracks. It is not used: a project's verifier may share module state, open models and counters with callbacks and
other verifiers, and need not be picklable. `patterns.pattern_matches` is the way to match with a time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import queue
import threading
from collections.abc import Callable
from weakref import WeakKeyDictionary

from evsys_sdk.concurrency import clock_stopped

SLOW_SECONDS = 1.0
"""After this long a call no longer keeps others of the same verifier waiting."""
IDLE_SECONDS = 30.0
"""A thread without work ends."""


async def run_aside(owner: object, call: Callable[[], object]) -> object:
    """What `call` returns, on a thread; `owner` is whose calls must not overlap."""
    loop = asyncio.get_running_loop()
    turn = _Turn(_lines.setdefault(loop, {}).setdefault(id(owner), asyncio.Semaphore(1)))
    # The time limit of a call must not run while another call of the same verifier works.
    with clock_stopped():
        await turn.line.acquire()
    slow = loop.call_later(SLOW_SECONDS, turn.leave)
    job = _Job(contextvars.copy_context(), call, loop)
    thread = _Thread.take(owner)
    thread.jobs.put(job)
    try:
        returned, what = await job.outcome
    except asyncio.CancelledError:
        thread.stop()
        raise
    finally:
        slow.cancel()
        turn.leave()
    # Not after a cancellation: the thread may still hang in that call.
    thread.give_back()
    if returned:
        return what
    assert isinstance(what, BaseException)
    if isinstance(what, ValueError) and "main thread" in str(what):  # signals, and the time limits made of them
        raise ValueError(f"{what}; a plain verifier runs on a thread beside: write it as `async def`, and it does not")
    raise what


class _Turn:
    """A place at the head of the line, left once: when the call is over, or has taken too long."""

    def __init__(self, line: asyncio.Semaphore) -> None:
        self.line = line
        self.left = False

    def leave(self) -> None:
        if not self.left:
            self.left = True
            self.line.release()


_lines: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, asyncio.Semaphore]] = WeakKeyDictionary()


class _Abandoned(BaseException):
    """Raised inside a function whose outcome is no longer awaited."""


class _Job:
    """One call, and where its outcome is waited for: (True, what it returned) or (False, what it raised)."""

    def __init__(
        self, context: contextvars.Context, call: Callable[[], object], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.context, self.call, self.loop = context, call, loop
        self.outcome: asyncio.Future[tuple[bool, object]] = loop.create_future()

    def run(self) -> None:
        try:
            said = True, self.context.run(self.call)
        except _Abandoned:
            raise
        except BaseException as exc:
            said = False, exc
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits
            self.loop.call_soon_threadsafe(self._settle, said)

    def _settle(self, said: tuple[bool, object]) -> None:
        if not self.outcome.done():
            self.outcome.set_result(said)


class _Thread:
    """Runs the calls of one verifier, one at a time. A daemon: a call that hangs must not keep the process alive."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.at_work = self.is_stopped = False
        self.thread = threading.Thread(target=self._work, name="evsys-verifier", daemon=True)
        self.thread.start()

    @staticmethod
    def take(owner: object) -> _Thread:
        with _idle_lock:
            found = _idle.pop(id(owner), None)
        # After a fork the threads of the parent are not there.
        return found if found is not None and found.thread.is_alive() else _Thread(id(owner))

    def give_back(self) -> None:
        with _idle_lock:
            kept = _idle.setdefault(self.key, self)
        if kept is not self:
            self.jobs.put(None)

    def stop(self) -> None:
        """End the thread, and the call if it can be ended."""
        self.jobs.put(None)
        with self.lock:
            self.is_stopped = True
            if self.at_work:
                # Raised when the thread runs its next bytecode; `_work` ends on it wherever that is.
                ident = ctypes.c_ulong(self.thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_Abandoned))

    def _work(self) -> None:
        with contextlib.suppress(_Abandoned):
            while (job := self._next()) is not None and self._may_continue(at_work=True):
                job.run()
                self._may_continue(at_work=False)

    def _may_continue(self, *, at_work: bool) -> bool:
        with self.lock:
            self.at_work = at_work
            return not self.is_stopped

    def _next(self) -> _Job | None:
        while True:
            try:
                return self.jobs.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with _idle_lock:
                    # Where it is not, a job is on its way, or the thread has not been given back yet: look again.
                    if _idle.get(self.key) is self:
                        del _idle[self.key]
                        return None


_idle: dict[int, _Thread] = {}
"""At most one for each verifier."""
_idle_lock = threading.Lock()
