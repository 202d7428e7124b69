"""Run a coroutine from plain code, whether or not an event loop is already turning (notebooks)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any


def run_async[T](work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; inside a running loop it runs on a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
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
