"""Stopping on request: signals become a flag that every run looks at.

In: SIGINT, SIGTERM, SIGHUP. Out: a `StopFlag`. First signal: runs stop after the step they are in and leave a
valid record. Second: the code that is running is interrupted where it stands. Third: Python's own behaviour.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from evsys_sdk.errors import Cancelled


@dataclass(slots=True)
class StopFlag:
    """Shared by all runs of an experiment."""

    event: threading.Event = field(default_factory=threading.Event)
    threads: set[int] = field(default_factory=set)
    """Threads in which runs execute now; the ones to interrupt at the second signal."""

    def set(self) -> None:
        self.event.set()

    def check(self) -> None:
        """Raise Cancelled when somebody asked to stop."""
        if self.event.is_set():
            raise Cancelled("stopped by the user")

    @contextmanager
    def working(self) -> Iterator[None]:
        """Marks this thread as one in which a run executes."""
        ident = threading.get_ident()
        self.threads.add(ident)
        try:
            yield
        finally:
            self.threads.discard(ident)

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt inside the runs' threads, at their next Python instruction."""
        for ident in list(self.threads):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(KeyboardInterrupt))


@contextmanager
def stop_on_signals(stop: StopFlag) -> Iterator[StopFlag]:
    """Route the signals to `stop` while the block runs; outside the main thread nothing changes. A hangup that is
    ignored (nohup) stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before: dict[int, object] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        if not stop.event.is_set():
            stop.set()
            print("stopping after this step; once more to stop at once", file=sys.stderr)
            return
        stop.interrupt()
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    for number in numbers:
        before[number] = signal.signal(number, handle)
    try:
        yield stop
    finally:
        for changed, old in before.items():
            signal.signal(changed, old)  # type: ignore[arg-type]
