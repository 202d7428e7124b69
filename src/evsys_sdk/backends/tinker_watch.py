"""How long a server may fail before a run gives up.

In: the real client's own HTTP traffic. Out: its calls' answers, or `BackendUnavailable`. The client sends again what
did not get through, numbered, so that a server does nothing twice; but it waits for results without an end, and asks
a server that answers 5xx again at once. The bound and the pause are added here.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from evsys_sdk.concurrency import check_stop
from evsys_sdk.errors import BackendError, BackendUnavailable, EvsysAuthError, EvsysError

UNIMPORTANT = frozenset({"telemetry", "dynamic_config", "unload_model"})
"""Requests whose failure costs a run nothing."""
RESULTS = "retrieve_future"
"""The one route the client requests again without a pause."""
CALLS = frozenset({"asample", RESULTS})
"""The requests that one call to a sampler is made of."""
NOT_RETRIED = 424
"""A status that the client hands on at once. It stands in for a passing failure that the caller is to retry."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 10.0
FORGOTTEN_SECONDS = 90.0
"""Longer than any pause between two tries: a failure not repeated for so long is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A route that has failed since, and did not work in between."""

    since: float
    last: float
    tries: int
    why: str


class Watch:
    """Since when does this server fail us?"""

    def __init__(self, server: str, timeout_seconds: float, *, clock: Callable[[], float] = time.monotonic):
        self.server, self.timeout_seconds, self._clock = server, timeout_seconds, clock
        self._troubles: dict[str, Trouble] = {}
        self._waiting: dict[int, tuple[str, float]] = {}
        """Requests that have no answer yet, and since when."""
        self._gave_up = False
        self.retries = True
        """False: a sampler's call that fails, fails at once; who makes the calls decides about another try."""
        self._lock = threading.Lock()  # the client works on another thread

    def attach(self, holder: Any) -> None:
        """Look at every request that this connection holder of the client sends from now on."""
        lend = holder.aclient
        holder.aclient = lambda *args: self._observe(lend(*args))

    @contextmanager
    def _observe(self, lent: AbstractContextManager[Any]) -> Iterator[Any]:
        with lent as client:
            # Private to the SDK: a version of tinker that renames it breaks here.
            http = client._client
            if getattr(http, "watched_by", None) is not self:
                http.watched_by, http.send = self, self.observing(http.send)
            yield client

    def observing(self, send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """`send`, with each outcome noted, and a pause before the client can repeat a failed request for a result."""

        async def observe(request: Any, **options: Any) -> Any:
            route, began = request.url.path.rstrip("/").rpartition("/")[2], self._clock()
            self._waiting[id(request)] = route, began
            try:
                response = await send(request, **options)
            except Exception as exc:
                why = f"{type(exc).__name__}: {exc}".rstrip(": ")
                self.note(route, began, why)
                if not self.retries and route in CALLS:
                    return _handed_on(request, f"no connection ({why})")
                raise
            finally:
                del self._waiting[id(request)]
            if not is_transient(response.status_code):
                self.note(route, began, None)
                return response
            trouble = self.note(route, began, f"status {response.status_code}")
            if not self.retries and route in CALLS:
                return _handed_on(request, f"status {response.status_code}")
            if trouble and route == RESULTS:
                await asyncio.sleep(pause_seconds(trouble.tries, response.headers.get("retry-after")))
            return response

        return observe

    def note(self, route: str, began: float, why: str | None) -> Trouble | None:
        """A request on `route` failed, saying `why`, or (None) got an answer."""
        if route in UNIMPORTANT:
            return None
        with self._lock:
            found = self._current().get(route)
            if why is None:
                self._troubles.pop(route, None)
                return None
            fresh = Trouble(since=began, last=began, tries=0, why=why)
            self._troubles[route] = replace(
                found or fresh, last=self._clock(), tries=(found or fresh).tries + 1, why=why
            )
            return self._troubles[route]

    def _current(self) -> dict[str, Trouble]:
        oldest = self._clock() - FORGOTTEN_SECONDS
        self._troubles = {route: found for route, found in self._troubles.items() if found.last >= oldest}
        return self._troubles

    @property
    def worst(self) -> tuple[str, Trouble] | None:
        """The route that has failed for the longest time."""
        now = self._clock()
        silent = [
            (route, Trouble(since=began, last=now, tries=1, why="no answer"))
            for route, began in list(self._waiting.values())
            # Waiting for a result is no failure: the server answers when it has one.
            if route not in {*UNIMPORTANT, RESULTS} and now - began >= self.timeout_seconds
        ]
        with self._lock:
            return min([*self._current().items(), *silent], key=lambda item: item[1].since, default=None)

    @property
    def is_well(self) -> bool:
        """Whether it is worth a try to talk to the server."""
        return not self._gave_up and self.worst is None

    async def answer[T](self, call: Awaitable[T], what: str, *, names_a_path: bool = False) -> T:
        """The answer of a call under way; `BackendUnavailable` once the server has failed for too long. Where the call
        `names_a_path`, it is that which a server does not find, and not the session."""
        task, began = asyncio.ensure_future(call), self._clock()
        try:
            while not (await asyncio.wait({task}, timeout=min(1.0, self.timeout_seconds / 4)))[0]:
                # After a request to stop, a server that is slow may finish the current step; one that fails may not.
                # Failures from before this call do not count: the checkpoint after a failed step may well be saved.
                with self._lock:
                    is_failing = any(trouble.last >= began for trouble in self._current().values())
                if is_failing:
                    check_stop()
                self._give_up_when_late(what)
            return task.result()
        except asyncio.CancelledError:
            raise
        except Exception as exc:
            raise as_our_error(exc, what, self.server, names_a_path=names_a_path) from exc
        finally:
            task.cancel()

    def _give_up_when_late(self, what: str) -> None:
        found = self.worst
        if found is None:
            return
        route, trouble = found
        late = self._clock() - trouble.since
        if late >= self.timeout_seconds:
            self._gave_up = True
            raise BackendUnavailable(
                f"{what}: {self.server} has failed for {late:.0f} s ({trouble.tries} tries, the last at {route}: "
                f"{trouble.why}); timeout_seconds is {self.timeout_seconds:g}"
            )


def _handed_on(request: Any, why: str) -> Any:
    import httpx

    return httpx.Response(NOT_RETRIED, json={"detail": why}, request=request)


def is_transient(status: int) -> bool:
    """Whether the same request may work later. 408 is no failure: it is how a server says that a result takes time."""
    return status == 429 or status >= 500


def pause_seconds(tries: int, retry_after: str | None) -> float:
    """How long to wait after so many failures; what the server asks for comes first."""
    asked = float(retry_after) if retry_after and retry_after.isdecimal() else 0.0
    # 2**10 is past the longest pause, and keeps the power small however often a server fails.
    return max(min(asked, 60.0), min(FIRST_PAUSE_SECONDS * 2 ** min(tries - 1, 10), LONGEST_PAUSE_SECONDS))


def as_our_error(exc: Exception, what: str, server: str, *, names_a_path: bool = False) -> EvsysError:
    """What a failure inside the client means for a run."""
    import tinker

    if isinstance(exc, EvsysError):
        return exc
    codes = (getattr(each, "status_code", None) for each in _chain(exc))
    status = next((code for code in codes if isinstance(code, int)), None)
    if status in (401, 403):
        return EvsysAuthError(f"{what}: {server} refuses the key: {reason(exc)}")
    if status in (404, 410) and not names_a_path:
        return BackendUnavailable(
            f"{what}: {server} no longer knows this run's session, as after a restart: {reason(exc)}"
        )
    if isinstance(exc, tinker.APIConnectionError | TimeoutError) or is_transient(status or 0):
        return BackendUnavailable(f"{what}: {server} does not answer: {reason(exc)}")
    return BackendError(f"{what} failed: {reason(exc)}")


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    """The failure and what it came from; the client wraps some in exceptions of other kinds."""
    while exc is not None:
        yield exc
        exc = exc.__cause__


def reason(exc: BaseException) -> str:
    """What the server, or the network, said: without the client's wrapping."""
    for each in _chain(exc):
        body = getattr(each, "body", None)
        detail = body.get("detail") if isinstance(body, dict) else None
        if isinstance(detail, list):  # FastAPI's form of a body that does not fit
            detail = "; ".join(str(part.get("msg", part)) if isinstance(part, dict) else str(part) for part in detail)
        if detail:
            return str(detail)
    text = str(exc).removeprefix("Request failed: ").partition(" for self.request_id=")[0]
    return text if type(exc).__name__ == "RequestFailedError" else f"{type(exc).__name__}: {text}"
