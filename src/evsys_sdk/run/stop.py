"""Stopping on request: signals become a flag that every run checks.

In: SIGINT, SIGTERM, SIGHUP. Out: a `StopFlag`. At the first signal, runs stop after the current step and leave a valid
record. At the second, the running code is interrupted where it stands; where no exception reaches it (a sleep, a
library's C code) the process ends. At another of the same kind the process ends.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from evsys_sdk.concurrency import Interrupted, heed_stop, interrupt_loop, interrupt_thread, no_interrupt, unless_stopped
from evsys_sdk.errors import Cancelled
from evsys_sdk.format import refuse_non_numbers
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import LogStore

LOOP_SECONDS = 0.5
"""An event loop that has not run a callback for so long is inside a call that does not await."""
STUCK_SECONDS = 0.5
"""A thread that has not moved so long after an exception was sent to it is not in Python code."""
POLL_SECONDS = 0.1


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
        """Raise Cancelled after a request to stop."""
        if self.event.is_set():
            raise Cancelled("stopped by the user")

    @contextmanager
    def working(self) -> Iterator[None]:
        """Marks this thread as one in which a run executes. The block may raise Interrupted; after it nothing does."""
        ident = threading.get_ident()
        # Before the look at `interrupted`: `interrupt` sets that first and reads the threads after it, so that one of
        # the two sees the other, whatever the timing.
        self.threads.add(ident)
        try:
            if self.interrupted:
                raise Interrupted
            with heed_stop(self.event):
                yield
        finally:
            with self.lock:
                self.threads.discard(ident)
                # An exception that was sent and has not arrived yet would strike while the record is written.
                no_interrupt(ident)

    async def unless_set[T](self, work: Awaitable[T]) -> T:
        """The result of `work`; a request to stop before that cancels it and raises `Cancelled`."""
        with heed_stop(self.event):
            return await unless_stopped(work)

    def interrupt(self) -> list[str]:
        """End what the runs' threads do, once: cancel what they await, and where they await nothing, raise Interrupted
        at their next Python instruction. Returns file and line of threads that reach no such instruction."""
        if self.interrupted:
            return []
        self.interrupted = True
        self.event.set()
        sent: list[int] = []
        until = time.monotonic() + LOOP_SECONDS
        cancelled = {ident: interrupt_loop(ident) for ident in list(self.threads)}
        for ident, done in cancelled.items():
            if done is None or not done.wait(max(0.0, until - time.monotonic())):
                with self.lock:
                    if ident in self.threads:
                        interrupt_thread(ident)
                        sent.append(ident)
        # A thread is stuck if it stays at the same instruction of the same frame.
        stuck, end = _instructions(sent), time.monotonic() + STUCK_SECONDS
        while stuck and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            now = _instructions(sent)
            stuck = {ident: place for ident, place in stuck.items() if now.get(ident) == place}
        return [f"{file}:{line}" for ident, (_, _, file, line) in stuck.items() if ident in self.threads]


def _instructions(idents: list[int]) -> dict[int, tuple[int, int, str, int]]:
    """The instruction each thread is at: frame, index, file and line."""
    frames = sys._current_frames()
    return {
        ident: (id(frame), frame.f_lasti, frame.f_code.co_filename, frame.f_lineno)
        for ident in idents
        if (frame := frames.get(ident)) is not None
    }


@contextmanager
def stop_on_signals(stop: StopFlag) -> Iterator[StopFlag]:
    """Route the signals to `stop` while the block runs; outside the main thread nothing changes. A hangup that is
    ignored (nohup) stays ignored.

    A separate thread obeys the signals. Python calls handlers in the main thread only: not before that wakes up,
    which a signal that the kernel delivers to another thread does not make it do, and in the midst of anything, such
    as another handler that holds a lock. So handlers do nothing, and Python writes the signal's number to a pipe."""
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    read, write = os.pipe()
    watcher = threading.Thread(target=_obey, args=(stop, read, numbers), name="evsys-signals", daemon=True)
    watcher.start()
    # `set_wakeup_fd` refuses a descriptor that can block.
    os.set_blocking(write, False)
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    # Without a handler Python would write nothing.
    before = {number: signal.signal(number, lambda number, frame: None) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.set_wakeup_fd(wakeup)

    _restore_in_child.append(restore)
    try:
        yield stop
    finally:
        _restore_in_child.remove(restore)
        restore()
        # Closing this end ends the thread's `os.read`; the other end stays open until the thread is gone.
        os.close(write)
        watcher.join()
        os.close(read)


def _obey(stop: StopFlag, read: int, numbers: set[signal.Signals]) -> None:
    """Do what each signal asks for, until the pipe is closed."""
    pressed = set()
    while found := os.read(read, 1):
        number = found[0]
        if number not in numbers:  # another library's handler
            continue
        if not stop.event.is_set():
            stop.set()
            # SIGTERM comes from `evsys stop` or a service manager, where no one can press a key again.
            again = " Press Ctrl-C again to stop immediately." if number == signal.SIGINT else ""
            _say(f"Stopping after the current step.{again}")
        elif number in pressed:
            os._exit(128 + number)
        else:
            pressed.add(number)
            stuck = stop.interrupt()
            if stuck and not hasattr(sys, "ps1"):  # a notebook is not ended: there it takes another signal
                _say(f"{stuck[0]} cannot be interrupted: ending the process. The same command resumes the experiment.")
                os._exit(128 + number)


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # the terminal may have gone
        print(text, file=sys.stderr)


_restore_in_child: list[Callable[[], None]] = []


def _restore_signals_in_child() -> None:
    """A forked child shares the pipe: a Ctrl-C, which reaches both, would count twice."""
    while _restore_in_child:
        _restore_in_child.pop()()


os.register_at_fork(after_in_child=_restore_signals_in_child)


@dataclass(slots=True)
class StoppableLogStore:
    """The run's log store as the algorithm sees it. For an algorithm with its own loop, any log call is also a
    moment to stop at; inside a step that the hooks know of, the run stops when the step is done."""

    store: LogStore
    stop: StopFlag
    first_step: int = 0
    """Steps of earlier stages of a chain, so that a later stage's curve begins where theirs ended."""
    last_step: int = 0
    in_step: bool = False
    """Between the hooks' `step_start` and `step_end`."""
    not_finite: set[str] = field(default_factory=set)
    """Metrics that were NaN or infinite at some step; each is named once."""
    warnings: list[str] = field(default_factory=list)
    """Those of the run's record, which name them too."""

    def log_scalar(self, name: str, value: float, step: int) -> None:
        self._check({name: value}, step)
        self.last_step = max(self.last_step, self.first_step + step)
        self.store.log_scalar(name, value, self.first_step + step)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self._check(metrics, step)
        self.last_step = max(self.last_step, self.first_step + step)
        self.store.log_metrics(metrics, self.first_step + step)

    def _check(self, metrics: dict[str, float], step: int) -> None:
        if not self.in_step:
            self.stop.check()
        refuse_non_numbers(metrics, step)
        for name, value in metrics.items():
            if not math.isfinite(value) and name not in self.not_finite:
                self.not_finite.add(name)
                get_logger(__name__).warning("metric %r is %s at step %d", name, float(value), step)
                self.warnings.append(f"metric {name!r} is {float(value)} at step {step}")

    def log_hyperparams(self, hparams: dict[str, object]) -> None:
        self.store.log_hyperparams(hparams)

    def log_artifact(self, name: str, path: str) -> None:
        self.store.log_artifact(name, path)

    def close(self) -> None:
        self.store.close()
