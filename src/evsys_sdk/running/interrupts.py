"""Stopping on request: signals become a flag that every run looks at.

In: SIGINT, SIGTERM, SIGHUP. Out: a `StopFlag`. First signal: runs stop after the step they are in and leave a
valid record. Second: the code that is running is interrupted where it stands. Once more of that kind: the process ends.

What a signal asks for is done on a thread of its own. Python calls handlers in the main thread only: not before it
wakes up, which a signal that the kernel gives to another thread does not make it do, and in the midst of anything, such
as another handler that holds a lock.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

from evsys_sdk.asyncs import Interrupted, interrupt_loop, interrupt_thread, no_interrupt
from evsys_sdk.errors import Cancelled

LOOP_SECONDS = 1.0
"""An event loop that has not come round for so long is in the midst of a call that does not wait for anything."""


@dataclass(slots=True)
class StopFlag:
    """Shared by all runs of an experiment."""

    event: threading.Event = field(default_factory=threading.Event)
    interrupted: bool = False
    """Whether the runs are to end where they stand; what breaks in them then is no failure of theirs."""
    threads: set[int] = field(default_factory=set)
    """Threads in which runs execute now; the ones to interrupt at the second signal."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def set(self) -> None:
        self.event.set()

    def check(self) -> None:
        """Raise Cancelled when somebody asked to stop."""
        if self.event.is_set():
            raise Cancelled("stopped by the user")

    @contextmanager
    def working(self) -> Iterator[None]:
        """Marks this thread as one in which a run executes. It may end with Interrupted; after it nothing does."""
        ident = threading.get_ident()
        self.threads.add(ident)
        try:
            if self.interrupted:
                raise Interrupted
            yield
        finally:
            with self.lock:
                self.threads.discard(ident)
                no_interrupt(ident)

    def interrupt(self) -> None:
        """End what the runs' threads do, once: what they wait for is cancelled, and where they do not wait, Interrupted
        is raised at their next Python instruction."""
        if self.interrupted:
            return
        self.interrupted = True
        self.event.set()
        until, told = time.monotonic() + LOOP_SECONDS, {ident: interrupt_loop(ident) for ident in list(self.threads)}
        for ident, heard in told.items():
            if heard is None or not heard.wait(max(0.0, until - time.monotonic())):
                with self.lock:
                    if ident in self.threads:
                        interrupt_thread(ident)


@contextmanager
def stop_on_signals(stop: StopFlag) -> Iterator[StopFlag]:
    """Route the signals to `stop` while the block runs; outside the main thread nothing changes. A hangup that is
    ignored (nohup) stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    read, write = os.pipe()
    watcher = threading.Thread(target=_heed, args=(stop, read, numbers), name="evsys-signals", daemon=True)
    watcher.start()
    try:
        with _written_to(write, numbers):
            yield stop
    finally:
        os.close(write)
        watcher.join()
        os.close(read)


def _heed(stop: StopFlag, read: int, numbers: set[signal.Signals]) -> None:
    """Do what each signal asks for, until nobody can write any more."""
    pressed = set()
    while found := os.read(read, 1):
        number = found[0]
        if number not in numbers:  # a handler of somebody else's
            continue
        if not stop.event.is_set():
            stop.set()
            _say("Stopping after the current step. Press Ctrl-C again to stop immediately.")
        elif number in pressed:
            os._exit(128 + number)
        else:
            pressed.add(number)
            stop.interrupt()


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # the terminal may be what has gone
        print(text, file=sys.stderr)


@contextmanager
def _written_to(pipe: int, numbers: set[signal.Signals]) -> Iterator[None]:
    """Python writes the numbers of signals to `pipe` as they come, on whatever thread."""
    os.set_blocking(pipe, False)
    wakeup = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
    before = {number: signal.signal(number, _nothing) for number in numbers}
    put_back = partial(_put_back, before, wakeup)
    _at_fork.append(put_back)
    try:
        yield
    finally:
        _at_fork.remove(put_back)
        put_back()


def _put_back(before: dict[signal.Signals, Any], wakeup: int) -> None:
    for number, handler in before.items():
        signal.signal(number, handler or signal.SIG_DFL)
    signal.set_wakeup_fd(wakeup)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Without a handler Python writes nothing."""


_at_fork: list[Callable[[], None]] = []


def _leave_to_the_parent() -> None:
    """A forked child shares the pipe: a Ctrl-C, which reaches both, would count twice."""
    while _at_fork:
        _at_fork.pop()()


os.register_at_fork(after_in_child=_leave_to_the_parent)
