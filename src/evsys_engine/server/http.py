"""HTTP as this server needs it: a request read whole, an answer written whole, on plain ASGI.

In: ASGI events. Out: `Request`s for a handler, and its `Answer` or its error as a response. Who may come in is
decided here.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from evsys_engine.server.checkpoints import UnknownCheckpoint
from evsys_engine.server.futures import Answer, UnknownPromise, json_answer
from evsys_engine.server.lanes import Conflict
from evsys_engine.server.limits import Limits
from evsys_engine.server.sessions import Gone, NotFound
from evsys_engine.types import BadRequest

logger = logging.getLogger("evsys_engine.server")

OPEN_PATH = "/api/v1/archives/"
"""What lies below it needs no key: each address there is a secret of its own."""
PIECE_BYTES = 2**20
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes = b""
    refused: HttpError | None = None
    """Why the body was not read to its end; `body` is then its beginning."""


Handler = Callable[[Request], Awaitable[Answer]]


class HttpError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.status = status
        self.answer = json_answer({"detail": message, **fields})


@dataclass(frozen=True, slots=True)
class Door:
    """Who may come in."""

    key: str | None = None

    def check(self, path: str, headers: Mapping[str, str]) -> None:
        if self.key is not None:
            if path.startswith(OPEN_PATH):
                return
            sent = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(sent.encode(), self.key.encode()):
                raise HttpError(401, "this server needs its key: tinker.ServiceClient(api_key=...)")
            return
        # Without a key the only guard is that nobody else reaches this machine's loopback. A web page in a browser on
        # this machine does: it sends an Origin, or has made its own name point here and sends that as Host. A picture
        # or a form of such a page comes without an Origin, but the browser says where it is from.
        foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        if foreign or "origin" in headers or not is_loopback(_host_of(headers.get("host", "localhost"))):
            raise HttpError(403, "requests from web pages are refused; start the server with a key to allow them")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host_of(header: str) -> str:
    return header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]


class App:
    """The ASGI application."""

    def __init__(self, handler: Handler, door: Door, limits: Limits) -> None:
        self._handler, self._door, self._limits = handler, door, limits

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            status, answer = 200, await self._answer(scope, receive)
        except asyncio.CancelledError:
            raise
        except Exception as exc:
            error = _as_http_error(exc)
            status, answer = error.status, error.answer
        await _send_answer(send, status, answer)

    async def _answer(self, scope: Any, receive: Receive) -> Answer:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self._door.check(scope["path"], headers)
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                body, refused = await self._read(headers, receive)
        except TimeoutError:
            raise HttpError(408, "the body did not arrive in time; send the request again") from None
        return await self._handler(Request(scope["method"], scope["path"], query, headers, body, refused))

    async def _read(self, headers: Mapping[str, str], receive: Receive) -> tuple[bytes, HttpError | None]:
        """The body; of one that is refused, its beginning and the reason."""
        if "content-encoding" in headers:
            return b"", HttpError(415, "compressed bodies are not read; client/config says so")
        protobuf = "x-protobuf" in headers.get("content-type", "")
        most = self._limits.body_bytes if protobuf else min(self._limits.json_bytes, self._limits.body_bytes)
        too_large = HttpError(413, f"a body may have {most} bytes; send fewer or shorter sequences")
        length = headers.get("content-length", "0")
        announced = int(length) if length.isdecimal() else most + 1
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            async with asyncio.timeout(self._limits.pause_seconds):
                event = await receive()
            if event["type"] == "http.disconnect":
                raise HttpError(400, "the connection ended within the body")
            parts.append(event.get("body", b""))
            size, more = size + len(parts[-1]), event.get("more_body", False)
            if max(size, announced) > most:
                return parts[0], too_large
        return b"".join(parts), None


def _as_http_error(exc: Exception) -> HttpError:
    """4xx is what the client raises at once; it tries 408, 409, 429 and 5xx again for minutes."""
    if isinstance(exc, HttpError):
        return exc
    if isinstance(exc, UnknownPromise):
        return HttpError(410, f"there is no result for request {exc.args[0]!r} (any more)")
    if isinstance(exc, Gone):
        return HttpError(410, str(exc))
    if isinstance(exc, NotFound | UnknownCheckpoint):
        return HttpError(404, str(exc))
    if isinstance(exc, Conflict):
        return HttpError(409, str(exc))
    if isinstance(exc, BadRequest):
        return HttpError(400, str(exc))
    logger.exception("a request failed", exc_info=exc)
    return HttpError(500, f"{type(exc).__name__}: {exc}")


async def _send_answer(send: Send, status: int, answer: Answer) -> None:
    # The client takes a 400 without content-length for a proxy's and repeats it.
    length = len(answer.body) if answer.file is None else answer.file.stat().st_size
    headers = [(b"content-type", answer.content_type.encode()), (b"content-length", str(length).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    if answer.file is not None:
        with answer.file.open("rb") as stream:
            while piece := await asyncio.to_thread(stream.read, PIECE_BYTES):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": answer.body})
