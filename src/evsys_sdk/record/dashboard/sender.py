"""Brings the mirror's lines to the dashboard, in order, from one background thread.

In: sessions of the mirror. Out: HTTP requests, and offsets acknowledged. A server that is away costs a warning and a
pause that grows; a request that the server calls wrong is set aside, so that it cannot hold up the rest. Only this
module knows HTTP.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from evsys_sdk.errors import DashboardClientError, shorten
from evsys_sdk.logs import get_logger
from evsys_sdk.record.dashboard.mirror import MirrorSession
from evsys_sdk.record.dashboard.wire import WireEvent, WireLine, WireRequest, batched, headers, request_of
from evsys_sdk.redaction import redact

CONNECT_SECONDS = 3.05
MAX_PAUSE_SECONDS = 30.0
AUTH_STATUSES = (401, 403)
SEND_BYTES = 128 * 1024
"""So much goes out at once; less waits up to `linger_seconds` for more. Smaller, and the requests take longer than what
is in them; larger, and the server waits for the client and then the client for the server."""
ONE_BAD_ITEM_STATUSES = (400, 413, 422)
"""Answers that may be about one item of a batch: it is worth trying the halves."""


class Unreachable(Exception):
    """The server did not take a request now, but may later."""


class Transport:
    """One keep-alive connection to the dashboard."""

    def __init__(self, api_url: str, api_key: str, project_id: str, *, timeout_seconds: float):
        self.api_url = api_url
        self._headers = headers(api_key, project_id)
        self._timeout = (CONNECT_SECONDS, timeout_seconds)
        self._session: Any = None

    def send(self, request: WireRequest) -> None:
        """Deliver one request; Unreachable to try again later, DashboardClientError when it is wrong."""
        response = self._call(request.method, self.api_url + request.path, request.body)
        status, place = response.status_code, f"{request.method} {self.api_url}{request.path}"
        if status >= 500 or status in (408, 425, 429):
            raise Unreachable(f"{place}: HTTP {status}")
        if status >= 400:
            raise DashboardClientError(f"{place}: HTTP {status}: {shorten(response.text, 300)}", status)
        if status >= 300:
            raise DashboardClientError(f"{place} redirects to {response.headers.get('Location')}", status)

    def _call(self, method: str, url: str, data: bytes) -> Any:
        import requests

        if self._session is None:
            self._session = requests.Session()
            self._session.auth = self._sign  # an explicit signer, or requests would prefer a line of ~/.netrc

        def call() -> object:
            return self._session.request(method, url, data=data, timeout=self._timeout, allow_redirects=False)

        try:
            try:
                return call()
            except requests.ConnectionError as exc:
                if isinstance(exc, requests.Timeout):
                    raise
                # Sent twice, a request does no harm: ids are the client's (`wire`). A timeout is not repeated here,
                # which would double the time that a caller of `deliver` waits.
                return call()  # the server closes idle connections; a fresh one may do
        except requests.RequestException as exc:
            raise Unreachable(f"{method} {url}: {type(exc).__name__}") from exc

    def _sign(self, prepared: Any) -> Any:
        prepared.headers.update(self._headers)
        return prepared


class Sender:
    """The background thread and what it knows about the server."""

    def __init__(
        self,
        transport: Transport,
        find_backlog: Callable[[], Iterable[MirrorSession]],
        *,
        linger_seconds: float = 0.2,
        pause_seconds: float = 0.5,
    ):
        self._transport = transport
        self._find_backlog = find_backlog
        self._linger_seconds = linger_seconds
        self._pause_seconds = pause_seconds
        self._own: MirrorSession | None = None
        self._backlog: deque[MirrorSession] = deque()
        self._left_behind: Iterator[MirrorSession] | None = None
        self._searched = False
        self._waiting: dict[int, Future[None]] = {}
        self._failures = 0
        self._refusal: DashboardClientError | None = None
        self._lock = threading.Lock()
        self._progress = threading.Condition(self._lock)
        self._wake = threading.Event()
        self._urgent = threading.Event()
        self._stopping = False
        self._wake.set()  # the first round looks for sessions left behind
        self._thread = threading.Thread(target=self._run, name="evsys-dashboard", daemon=True)
        self._thread.start()

    def submit(self, session: MirrorSession, event: WireEvent) -> None:
        """Keep `event` in the mirror; it goes out soon."""
        self._own = session
        end = session.append(event)
        if not self._wake.is_set():
            self._wake.set()
        # Not while the server is away, when it would end each pause; and not for what is on its way already.
        if end - session.read_up_to >= SEND_BYTES and not self._failures and not self._urgent.is_set():
            self._urgent.set()

    def deliver(self, session: MirrorSession, event: WireEvent, *, timeout_seconds: float) -> None:
        """Keep `event`, and wait for the server's word on it unless the server is known to be away."""
        self._own = session
        with self._lock:  # the thread answers under the same lock, so it cannot be too early
            end = session.append(event)
            away, refusal = self._failures > 0, self._refusal
            answer = None if away else self._waiting.setdefault(end, Future())
        self._wake.set()
        if answer is None:
            if refusal is not None:
                raise refusal
            return
        self._urgent.set()
        try:
            answer.result(timeout_seconds)
        except TimeoutError:
            get_logger(__name__).warning("the dashboard is slow; %s goes out in the background", event.path)

    def replay(self, session: MirrorSession) -> None:
        """Send this session too."""
        with self._lock:
            self._backlog.append(session)
        self._wake.set()

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything is with the server; False when it is not in time."""
        deadline = time.monotonic() + timeout_seconds
        with self._progress:
            self._wake.set()
            self._urgent.set()
            while self._has_unsent():
                left = deadline - time.monotonic()
                if left <= 0 or not self._progress.wait(left) or self._refusal is not None:
                    return not self._has_unsent()
                if not self._failures:  # else the pause before the next attempt is kept
                    self._urgent.set()
        return True

    def stop(self, timeout_seconds: float) -> None:
        """End the thread; what was not sent stays in the mirror."""
        self._stopping = True
        self._wake.set()
        self._urgent.set()
        self._thread.join(timeout_seconds)
        for session in self._backlog:
            session.close()

    def _has_unsent(self) -> bool:
        own = self._own is not None and self._own.unsent_bytes > 0
        return own or bool(self._backlog) or not self._searched

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait()
            self._urgent.wait(self._linger_seconds)  # let lines gather, unless a caller waits for an answer
            # Cleared before the round and not after it: a line that arrives while it sends wakes the next one.
            self._wake.clear()
            self._urgent.clear()
            pause = self._round()
            with self._progress:
                self._progress.notify_all()
            if pause and not self._stopping:
                self._wake.set()
                # Not a sleep: `flush`, `deliver` and `stop` end the pause.
                self._urgent.wait(pause)

    def _round(self) -> float:
        """Send all there is; return how long to pause before trying again, 0 when all went well."""
        try:
            self._sweep()
        except Unreachable as exc:
            return self._note_failure(f"the dashboard is out of reach ({exc}); everything is kept in the mirror", None)
        except DashboardClientError as exc:
            return self._note_failure(f"the dashboard refuses us: {exc}", exc)
        except Exception as exc:
            get_logger(__name__).debug("sending failed", exc_info=exc)
            return self._note_failure(f"sending to the dashboard failed: {type(exc).__name__}: {exc}", None)
        if self._failures:
            get_logger(__name__).info("the dashboard is back; the mirror has been sent")
        self._failures, self._refusal = 0, None
        return 0.0

    def _note_failure(self, text: str, refusal: DashboardClientError | None) -> float:
        if self._failures == 0 or (refusal is None) != (self._refusal is None):
            get_logger(__name__).warning("%s", text)
        with self._lock:
            self._failures += 1
            self._refusal = refusal
            waiting, self._waiting = list(self._waiting.values()), {}
        for answer in waiting:
            _answer(answer, refusal)
        pause = min(MAX_PAUSE_SECONDS, self._pause_seconds * 2 ** min(self._failures - 1, 10))
        return pause * random.uniform(0.5, 1.0)  # jitter: many clients must not come back in step

    def _sweep(self) -> None:
        while not self._stopping:
            # Our own lines before each stretch of what others left: a live run does not wait behind an old backlog.
            while self._own is not None and self._send_window(self._own):
                # Cleared, or what asked for this window would make the next one leave with the first line that comes.
                # Before the looks at what waits, so that what asks meanwhile is seen in one way or the other.
                was_urgent = self._urgent.is_set()
                self._urgent.clear()
                is_due = was_urgent or self._waiting or self._own.unsent_bytes >= SEND_BYTES
                if not is_due:
                    # A few lines came meanwhile: they wait for more, or each would become a request.
                    self._wake.set()
                    break
            session = self._next_of_backlog()
            if session is None:
                return
            if not self._send_window(session):
                self._backlog.popleft().close()

    def _next_of_backlog(self) -> MirrorSession | None:
        """The session to send besides our own. Claimed one at a time: each holds a file open."""
        if not self._backlog and not self._searched:
            self._left_behind = self._left_behind or iter(self._find_backlog())
            found = next(self._left_behind, None)
            self._searched = found is None
            self._backlog.extend([found] if found else [])
        return self._backlog[0] if self._backlog else None

    def _send_window(self, session: MirrorSession) -> bool:
        """Send the next stretch of `session`; False when there was none."""
        window = session.read()
        if window.end == session.acknowledged:
            return False
        ends = {id(line): end for line, end in zip(window.lines, window.ends, strict=True)}
        for group in batched(window.lines):
            error = self._send_group(session, group)
            if session is self._own:
                with self._lock:
                    answer = self._waiting.pop(ends[id(group[0])], None)
                _answer(answer, error)
        # Only after all groups: what fails in the middle is sent again from the window's start, which changes nothing
        # at the server, since records are keyed by their ids.
        session.acknowledge(window.end)
        return True

    def _send_group(self, session: MirrorSession, group: list[WireLine]) -> DashboardClientError | None:
        rejections = send_group(self._transport, session, group)
        for error in rejections:
            get_logger(__name__).error("the dashboard rejected a record: %s", error)
        return rejections[0] if rejections and len(group) == 1 else None


def send_group(transport: Transport, session: MirrorSession, group: list[WireLine]) -> list[DashboardClientError]:
    """Send the lines of one request. Those that the server will never take are set aside in the mirror, and come back
    as an error each; Unreachable, or a refusal of the key, is raised."""
    request = request_of(group)
    if not session.is_searched:  # written before a secret was learnt, or by another process
        text = request.body.decode("utf-8", "surrogateescape")
        request = replace(request, body=redact(text).encode("utf-8", "surrogateescape"))
    try:
        transport.send(request)
        return []
    except DashboardClientError as exc:
        if exc.status in AUTH_STATUSES:
            raise
        if len(group) > 1 and exc.status in ONE_BAD_ITEM_STATUSES:
            half = len(group) // 2
            # Bisection: k bad items of n cost in the order of k log2(n) requests, and every good one arrives.
            return [
                *send_group(transport, session, group[:half]),
                *send_group(transport, session, group[half:]),
            ]
        rejected = []
        for line in group:
            if line.is_readable():
                session.reject(line, str(exc))
                rejected.append(exc)
            else:
                session.warn_unreadable(exc)
        return rejected


def _answer(future: Future[None] | None, error: Exception | None) -> None:
    if future is None:
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
