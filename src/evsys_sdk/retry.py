"""Ask a provider until it answers, for a bounded time.

In: a call that may fail. Out: its result and how often it was tried, or one of our errors. What is worth another try
(429, 408, 5xx, no connection or a lost one, no answer in time) and how long to wait is decided here: as long as the
provider asks for (`Retry-After`), else twice as long each time. A provider that asks for more than the bound is given
up at once.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from evsys_sdk.concurrency import apause_before_retry, unless_stopped
from evsys_sdk.errors import BackendError, BackendUnavailable, EvsysAuthError, EvsysError, shorten

FIRST_PAUSE_SECONDS = 0.5
NETWORK_ERRORS = {"APIConnectionError", "TransportError", "ClientConnectionError", "ClientPayloadError"}
"""What the SDKs and their libraries (httpx, httpx2, aiohttp) raise when there is no answer, or half of one; known by
name, as not all of them are installed."""


class ErrorPage(Exception):
    """A provider, or a proxy before it, answered with an error whose text its SDK could not read, losing the status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailure:
    """What an exception of an SDK means."""

    reason: str
    status: int | None = None
    transient: bool = False
    retry_after_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to keep trying."""

    max_retries: int
    max_wait_seconds: float
    """The longest pause between two tries."""
    timeout_seconds: float
    """For one try."""
    sleep: Callable[[float], Awaitable[None]] = apause_before_retry
    chance: Callable[[], float] = random.random

    async def ask[T](self, who: str, call: Callable[[], Awaitable[T]]) -> tuple[T, int]:
        """The result of `call` and the number of tries it took."""
        for attempt in range(1, self.max_retries + 2):
            try:
                async with asyncio.timeout(self.timeout_seconds):
                    # The first try belongs to the current step, which a request to stop lets finish.
                    return await (call() if attempt == 1 else unless_stopped(call())), attempt
            except EvsysError:
                raise
            except Exception as exc:
                failure = read_failure(exc, self.timeout_seconds)
                if not failure.transient:
                    if failure.status in (401, 403):
                        raise EvsysAuthError(f"{who} refused the key: {failure.reason}") from exc
                    raise BackendError(f"{who} failed: {failure.reason}") from exc
                if attempt > self.max_retries:
                    tries = f"{attempt} tries" if attempt > 1 else "1 try"
                    raise BackendUnavailable(f"{who} did not answer in {tries}: {failure.reason}") from exc
                await self.sleep(self._pause(who, failure, attempt))
        raise AssertionError("the last try returns or raises")

    def _pause(self, who: str, failure: CallFailure, attempt: int) -> float:
        asked = failure.retry_after_seconds
        if asked is None:
            # With up to half as much again by chance, so that calls that failed together do not come back together.
            doubled = FIRST_PAUSE_SECONDS * 2 ** (attempt - 1)
            return float(min(self.max_wait_seconds, doubled * (1 + self.chance() / 2)))
        if asked > self.max_wait_seconds:
            raise BackendUnavailable(
                f"{who} asks to wait {asked:g} s, longer than max_wait_seconds ({self.max_wait_seconds:g}): "
                f"{failure.reason}"
            )
        return asked


def read_failure(exc: Exception, timeout_seconds: float) -> CallFailure:
    """What happened, from whichever SDK it comes."""
    names = {cls.__name__ for cls in type(exc).__mro__}
    if isinstance(exc, TimeoutError) or names & {"APITimeoutError", "TimeoutException"}:
        return CallFailure(reason=f"no answer within {timeout_seconds:g} s", transient=True)
    if isinstance(exc, ErrorPage):
        return CallFailure(reason=str(exc), transient=True)
    status = getattr(exc, "status_code", None) or getattr(exc, "code", None)
    if isinstance(status, int) and status >= 400:
        headers = getattr(getattr(exc, "response", None), "headers", None) or {}
        text = shorten(str(getattr(exc, "message", None) or exc), 300)
        # An account without money answers 429 too, and no waiting helps.
        has_no_money = "insufficient_quota" in str(getattr(exc, "body", None) or exc)
        return CallFailure(
            reason=f"status {status}, {text}",
            status=status,
            transient=(status in (408, 429) or status >= 500) and not has_no_money,
            retry_after_seconds=retry_after(headers) or _delay_in_body(getattr(exc, "details", None)),
        )
    if isinstance(exc, OSError) or names & NETWORK_ERRORS:
        return CallFailure(reason=f"no connection ({shorten(str(exc.__cause__ or exc), 200)})", transient=True)
    return CallFailure(reason=f"its answer cannot be read ({type(exc).__name__}: {shorten(str(exc), 200)})")


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the provider asks us to wait, from `Retry-After` in either form."""
    milliseconds, value = headers.get("retry-after-ms"), headers.get("retry-after")
    try:
        if milliseconds:
            return max(0.0, float(milliseconds) / 1000)
        if value and value.strip().replace(".", "", 1).isdigit():
            return float(value)
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time()) if value else None
    except ValueError:
        return None


def _delay_in_body(details: Any) -> float | None:
    """Google's form: `{"@type": ".../google.rpc.RetryInfo", "retryDelay": "34s"}` among the error's details."""
    error = details.get("error", details) if isinstance(details, dict) else {}
    entries = error.get("details") if isinstance(error, dict) else None
    for entry in entries if isinstance(entries, list) else ():
        delay = str(entry.get("retryDelay", "")) if isinstance(entry, dict) else ""
        if delay.removesuffix("s").replace(".", "", 1).isdigit():
            return float(delay.removesuffix("s"))
    return None
