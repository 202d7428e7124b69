"""Whose turn it is: one call at a time, first come, first served.

In: threads that want the engine. Out: one of them at a time, in the order they asked. `threading.Lock` makes no
promise about order, and an arm that trains in a tight loop could starve its neighbours.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """A lock with a queue. The thread that holds it may take it again (a custom loss may ask the engine something)."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._queue: deque[tuple[int, threading.Lock]] = deque()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self) -> None:
        """Wait for the turn; an interrupted wait (Ctrl-C) gives its place back."""
        me = threading.get_ident()
        with self._guard:
            if self._owner in (None, me):
                self._owner, self._depth = me, self._depth + 1
                return
            gate = threading.Lock()
            gate.acquire()
            place = (me, gate)
            self._queue.append(place)
        try:
            gate.acquire()
        except BaseException:
            self._leave(place)
            raise

    def release(self) -> None:
        """Hand over to whoever has waited longest."""
        with self._guard:
            if self._owner != threading.get_ident():
                raise RuntimeError("the lock is released by a thread that does not hold it")
            self._depth -= 1
            if self._depth == 0:
                self._hand_over()

    def _hand_over(self) -> None:
        if not self._queue:
            self._owner = None
            return
        self._owner, gate = self._queue.popleft()
        self._depth = 1
        gate.release()

    def _leave(self, place: tuple[int, threading.Lock]) -> None:
        with self._guard:
            if place in self._queue:
                self._queue.remove(place)
            else:  # the turn came while the wait was being broken off
                self._depth = 0
                self._hand_over()

    def __enter__(self) -> FairLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
