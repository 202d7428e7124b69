"""Calls that may fail: tried again with growing pauses, and reported when they fail for good.

In: a call. Out: its result; or, once the tries are used up, an entry in a `RetryReport` and None in its place, so that
one dead call does not end an evaluation of thousands. Without a report the last error is raised. What no second try can
help (a refused key, a missing package, the user's stop) is raised at once. `BackendUnavailable` is not tried again: the
client that raised it has retries of its own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from evsys_sdk.errors import (
    BackendUnavailable,
    Cancelled,
    ConfigError,
    DataError,
    EvsysAuthError,
    EvsysError,
    MissingDependency,
)

MAX_ATTEMPTS = 3
BASE_DELAY_SECONDS, MAX_DELAY_SECONDS = 0.5, 30.0
TRIED_ALREADY = (BackendUnavailable,)
"""A client that retries raised it when its own tries were used up; another layer of tries would multiply them."""
HOPELESS = (Cancelled, EvsysAuthError, MissingDependency, ConfigError, DataError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryFailure:
    """A call that failed for good."""

    key: str
    """What it was for, such as the row's id."""
    attempts: int
    error: str
    """Of the last try."""


@dataclass(slots=True)
class RetryReport:
    """How the calls of an evaluation went."""

    total_calls: int = 0
    total_retries: int = 0
    """Tries beyond the first."""
    failures: list[RetryFailure] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def total_failures(self) -> int:
        return len(self.failures)

    def add(self, attempts: int, failure: RetryFailure | None = None) -> None:
        """Note a call that took so many tries."""
        with self._lock:
            self.total_calls += 1
            self.total_retries += attempts - 1
            if failure is not None:
                self.failures.append(failure)

    def to_dict(self) -> dict[str, Any]:
        return {
            "total_calls": self.total_calls,
            "total_retries": self.total_retries,
            "total_failures": self.total_failures,
            "failures": [asdict(failure) for failure in self.failures],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RetryReport:
        failures = [RetryFailure(**failure) for failure in data["failures"]]
        return cls(data["total_calls"], data["total_retries"], failures)


def call_with_retry[T](
    call: Callable[[], T],
    *,
    key: str = "",
    max_attempts: int = MAX_ATTEMPTS,
    report: RetryReport | None = None,
    base_delay_seconds: float = BASE_DELAY_SECONDS,
    max_delay_seconds: float = MAX_DELAY_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> T | None:
    """The result of `call`, after at most `max_attempts` tries; the pause doubles from one to the next."""
    for attempt, pause in _tries(max_attempts, base_delay_seconds, max_delay_seconds):
        try:
            result = call()
        except HOPELESS:
            raise
        except Exception as exc:
            if pause is None or isinstance(exc, TRIED_ALREADY):
                _give_up(exc, key, attempt, report)
                return None
            sleep(pause)
            continue
        if report is not None:
            report.add(attempt)
        return result
    raise AssertionError("the last try returns or raises")


async def acall_with_retry[T](
    call: Callable[[], Awaitable[T]],
    *,
    key: str = "",
    max_attempts: int = MAX_ATTEMPTS,
    report: RetryReport | None = None,
    base_delay_seconds: float = BASE_DELAY_SECONDS,
    max_delay_seconds: float = MAX_DELAY_SECONDS,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T | None:
    """The same for a call that is awaited."""
    for attempt, pause in _tries(max_attempts, base_delay_seconds, max_delay_seconds):
        try:
            result = await call()
        except HOPELESS:
            raise
        except Exception as exc:
            if pause is None or isinstance(exc, TRIED_ALREADY):
                _give_up(exc, key, attempt, report)
                return None
            await sleep(pause)
            continue
        if report is not None:
            report.add(attempt)
        return result
    raise AssertionError("the last try returns or raises")


def _tries(max_attempts: int, base: float, longest: float) -> Iterator[tuple[int, float | None]]:
    """The number of each try and the pause after it; None after the last."""
    if max_attempts < 1:
        raise EvsysError(f"max_attempts is at least 1, not {max_attempts}")
    for attempt in range(1, max_attempts + 1):
        yield attempt, None if attempt == max_attempts else min(longest, base * 2 ** (attempt - 1))


def _give_up(exc: Exception, key: str, attempts: int, report: RetryReport | None) -> None:
    if report is None:
        raise exc
    error = str(exc) if isinstance(exc, EvsysError) else f"{type(exc).__name__}: {exc}"
    report.add(attempts, RetryFailure(key=key, attempts=attempts, error=error))
