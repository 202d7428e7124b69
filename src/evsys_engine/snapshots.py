"""Merged weights in memory: only the last few used.

In: who wants weights and how to make them. Out: those weights, made again if they had to go. Each snapshot is about
as large as the model, and an experiment has many samplers over one base, so they take turns.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

LIMIT = 2
"""Per model: the one that is trained against and the one that is evaluated."""


class Snapshots:
    """The snapshots of one model, the last used one last."""

    def __init__(self, limit: int = LIMIT):
        self._limit, self._guard = limit, threading.RLock()
        self._held: OrderedDict[object, Any] = OrderedDict()

    def get[T](self, owner: object, build: Callable[[], T]) -> T:
        with self._guard:
            if owner not in self._held:
                while len(self._held) >= self._limit:  # first make room, then build
                    self._held.popitem(last=False)
                self._held[owner] = build()
            self._held.move_to_end(owner)
            found: T = self._held[owner]
            return found

    def drop(self, owner: object) -> None:
        with self._guard:
            self._held.pop(owner, None)

    def __len__(self) -> int:
        return len(self._held)


_BY_MODEL: WeakKeyDictionary[Any, Snapshots] = WeakKeyDictionary()
_GUARD = threading.Lock()


def snapshots_of(model: Any) -> Snapshots:
    """Shared by all samplers over this model. A snapshot must not hold the model itself, or neither would ever go."""
    with _GUARD:
        return _BY_MODEL.setdefault(model, Snapshots())
