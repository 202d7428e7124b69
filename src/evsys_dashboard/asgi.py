"""The server's application: steps and predictions by the short way, everything else by Django.

In: HTTP requests (ASGI). Out: answers. Batches of steps and predictions go to one writer thread, which commits all
that is waiting at once and answers after the commit: what a client got as stored survives a kill of the server.
Host and Origin are checked here for all routes, and bodies are read with a limit.
"""

from __future__ import annotations

import asyncio
import io
import json
import queue
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core.handlers.wsgi import WSGIHandler
from django.db import DataError, Error, close_old_connections, connection
from django.http.request import split_domain_port, validate_host

from evsys_dashboard import ingest
from evsys_dashboard.auth import Refusal, check_key, note_use
from evsys_dashboard.models import ApiKey
from evsys_dashboard.request_body import parse_body
from evsys_dashboard.settings import MAX_BODY_BYTES
from evsys_sdk.logs import get_logger
from evsys_sdk.record.dashboard.wire import API_PREFIX, PROJECT_HEADER

HOT = re.compile(rf"{re.escape(API_PREFIX)}/sdk/generations/(?P<run>[^/]+)/(?P<kind>step|predictions)/")
RUN_OF_PROJECT = "SELECT 1 FROM dashboard_generation WHERE id = %s AND project_id = %s"
GROUP = 64
"""Requests in one commit, at most: the first of them waits for the last."""
MAX_STRANGER_BYTES = 64 * 1024
"""Of the body of a request with neither key nor cookie, such as the login form."""
THREADS = 8
"""For Django, which is synchronous: each has a connection to the database as long as the server lives."""
WAIT_SECONDS = 30.0

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HotRequest:
    """A batch of steps or predictions on its way to the writer."""

    run: str
    kind: str
    authorization: str
    project_id: str
    encoding: str
    data: bytes
    answer: Future[None]
    """Done after the commit; a Refusal for a batch that is wrong."""


@dataclass(frozen=True, slots=True)
class CheckedBatch:
    """A batch that may be written."""

    request: HotRequest
    steps: ingest.StepBatch | None
    predictions: list[ingest.ReadPrediction]
    may_replace: bool = True
    """Whether its rollouts may take the place of stored ones; an agent's may not, it would grade itself."""


class Writer:
    """One thread that writes what clients send, a group of requests per commit."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[HotRequest | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="evsys-dashboard-writer", daemon=True)
        self._thread.start()

    def submit(self, request: HotRequest) -> None:
        self._queue.put(request)

    def stop(self) -> None:
        """Write what is waiting, and end."""
        self._queue.put(None)
        self._thread.join(WAIT_SECONDS)

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            # What came while the last group was written shares one commit, which costs more than its rows.
            group, ends = [first], False
            while len(group) < GROUP and not self._queue.empty():
                following = self._queue.get()
                if following is None:
                    ends = True
                    break
                group.append(following)
            try:
                close_old_connections()
                self._write(group)
            except Exception as exc:  # the thread must live: without it nothing is stored any more
                get_logger(__name__).exception("the writer failed")
                for request in group:
                    _fail(request, Refusal(503, f"not stored ({type(exc).__name__}); send it again"))
            if ends:
                break
        connection.close()

    def _write(self, group: list[HotRequest]) -> None:
        keys: dict[tuple[str, str], ApiKey] = {}
        checked = [batch for request in group if (batch := self._check(request, keys)) is not None]
        try:
            with ingest.writing():
                ingest.save_steps([batch.steps for batch in checked if batch.steps is not None])
                ingest.save_predictions(
                    [row for batch in checked if batch.may_replace for row in batch.predictions],
                    added=[row for batch in checked if not batch.may_replace for row in batch.predictions],
                )
        except DataError as exc:
            if len(checked) > 1:  # one of them has what no database can store: each by itself, then
                for batch in checked:
                    self._write([batch.request])
                return
            for batch in checked:
                _fail(batch.request, Refusal(422, f"the database cannot store this: {exc}"))
        except Error as exc:  # a full disk, a database that is away: the client keeps it all and comes again
            get_logger(__name__).error("nothing can be stored: %s", exc)
            connection.close()
            for batch in checked:
                _fail(batch.request, Refusal(503, f"the database cannot be written to: {exc}"))
        for batch in checked:
            if not batch.request.answer.done():
                batch.request.answer.set_result(None)

    def _check(self, request: HotRequest, keys: dict[tuple[str, str], ApiKey]) -> CheckedBatch | None:
        """The batch, or None for one that is refused. `keys` remembers the keys of this group."""
        try:
            sender = request.authorization, request.project_id
            if sender not in keys:
                keys[sender] = check_key(*sender, "write")
                note_use(keys[sender])
            key = keys[sender]
            with connection.cursor() as cursor:
                cursor.execute(RUN_OF_PROJECT, [request.run, key.project_id])
                if cursor.fetchone() is None:
                    raise Refusal(404, f"there is no run {request.run!r} in this project")
            body = parse_body(request.data, request.encoding)
            if request.kind == "step":
                return CheckedBatch(request, ingest.read_steps(request.run, body), [])
            rollouts = ingest.read_predictions(key.project, request.run, body)
            return CheckedBatch(request, None, rollouts, may_replace=key.scope != ApiKey.Scope.AGENT)
        except Refusal as exc:
            _fail(request, exc)
            return None


def _fail(request: HotRequest, error: Exception) -> None:
    if not request.answer.done():
        request.answer.set_exception(error)


class Application:
    """The ASGI application."""

    def __init__(self) -> None:
        self.writer = Writer()
        self._django = WSGIHandler()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="evsys-dashboard")
        self._hosts = list(settings.ALLOWED_HOSTS)

    def close(self) -> None:
        """Store what is waiting. For the end of the process."""
        self.writer.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])  # uvicorn then does without, as with lifespan
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            self._check_origin(headers)
            hot = HOT.fullmatch(scope["path"])
            # A stranger's large body is not kept in memory until it is refused.
            is_stranger = "authorization" not in headers and "cookie" not in headers
            data = await _read_body(headers, receive, limit=MAX_STRANGER_BYTES if is_stranger else MAX_BODY_BYTES)
            if hot is None:
                await self._ask_django(scope, data, send)
                return
            if scope["method"] != "POST":
                raise Refusal(405, f"{scope['method']} is not possible here; use POST")
            if "authorization" not in headers:
                raise Refusal(401, "send an API key: `Authorization: Bearer evk_...` (Settings > API keys)")
            answer: Future[None] = Future()
            request = HotRequest(
                run=hot["run"],
                kind=hot["kind"],
                authorization=headers["authorization"],
                project_id=headers.get(PROJECT_HEADER.lower(), ""),
                encoding=headers.get("content-encoding", ""),
                data=data,
                answer=answer,
            )
            self.writer.submit(request)
            await asyncio.wrap_future(answer)
            await _send_json(send, 200, {"ok": True})
        except Refusal as exc:
            await _send_json(send, exc.status, {"error": exc.reason})

    def _check_origin(self, headers: Mapping[str, str]) -> None:
        """Refuse a name that is not ours (a page elsewhere that points its own name at this machine), and requests
        that another site's page sends."""
        host = headers.get("host", "")
        domain, _ = split_domain_port(host)
        if not domain or not validate_host(domain, self._hosts):
            raise Refusal(400, f"this server is not called {host!r}; start it with the name that you use (--host)")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            raise Refusal(403, "requests from pages of other sites are refused")

    async def _ask_django(self, scope: Scope, data: bytes, send: Send) -> None:
        loop = asyncio.get_running_loop()

        # The thread waits for the client, so that a slow one does not fill the memory with what it has yet to read.
        def emit(message: Message) -> None:
            asyncio.run_coroutine_threadsafe(send(message), loop).result(WAIT_SECONDS)

        await loop.run_in_executor(self._threads, _answer_by_django, self._django, _environ(scope, data), emit)


def _answer_by_django(django: WSGIHandler, environ: dict[str, Any], emit: Callable[[Message], None]) -> None:
    started: list[tuple[int, list[tuple[bytes, bytes]]]] = []

    def start_response(status: str, headers: list[tuple[str, str]], _: object = None) -> None:
        plain = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        started.append((int(status.partition(" ")[0]), plain))

    with ingest.pages_in_flight:
        parts = django(environ, start_response)
    try:
        [(status, headers)] = started
        emit({"type": "http.response.start", "status": status, "headers": headers})
        if getattr(parts, "streaming", True):  # a download: piece by piece, never whole in memory
            for part in parts:
                emit({"type": "http.response.body", "body": part, "more_body": True})
            emit({"type": "http.response.body", "body": b""})
        else:
            emit({"type": "http.response.body", "body": b"".join(parts)})
    finally:
        parts.close()


def _environ(scope: Scope, data: bytes) -> dict[str, Any]:
    """The request as WSGI has it (PEP 3333)."""
    server, client = scope.get("server") or ("localhost", 80), scope.get("client") or ("", 0)
    environ: dict[str, Any] = {
        "REQUEST_METHOD": scope["method"],
        "SCRIPT_NAME": "",
        # WSGI's text is bytes read as latin-1; uvicorn has already undone the %XX.
        "PATH_INFO": scope["path"].encode().decode("latin-1"),
        "QUERY_STRING": scope["query_string"].decode("latin-1"),
        "SERVER_NAME": server[0],
        "SERVER_PORT": str(server[1]),
        "SERVER_PROTOCOL": f"HTTP/{scope['http_version']}",
        "REMOTE_ADDR": client[0],
        "CONTENT_LENGTH": str(len(data)),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": scope["scheme"],
        "wsgi.input": io.BytesIO(data),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    for raw, value in scope["headers"]:
        name, text = raw.decode("latin-1"), value.decode("latin-1")
        if "_" in name:  # `X_Evsys_Project` must not pass for `X-Evsys-Project`
            continue
        key = name.upper().replace("-", "_")
        if key == "CONTENT_LENGTH":
            continue
        key = key if key == "CONTENT_TYPE" else f"HTTP_{key}"
        environ[key] = f"{environ[key]},{text}" if key in environ else text
    return environ


async def _read_body(headers: Mapping[str, str], receive: Receive, *, limit: int) -> bytes:
    too_large = Refusal(413, f"the body has more than {limit:,} bytes; send smaller batches")
    length = headers.get("content-length", "0")
    if not length.isdigit() or int(length) > limit:
        raise too_large
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(400, "the client left")
        part = message.get("body", b"")
        size += len(part)
        if size > limit:  # sent in chunks, without a length
            raise too_large
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


async def _send_json(send: Send, status: int, body: dict[str, object]) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    if status == 413:  # what is left of the body is not read
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
