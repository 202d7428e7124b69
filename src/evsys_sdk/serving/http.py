"""HTTP as the endpoint needs it: a request read whole, an answer in one piece or as events, on plain ASGI.

In: ASGI events. Out: `Request`s for a handler, and its `Answer` or its error in OpenAI's form. Who may come in is
decided here. A caller who hangs up is not worked for any longer.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evsys_sdk.logs import get_logger

BODY_BYTES = 32 * 2**20
"""Of one request; less where the served models' context lengths are known."""
HEAD_SECONDS = 20.0
"""For the head of a request to arrive."""
PAUSE_SECONDS = 30.0
"""Between two pieces of a body."""
BODY_SECONDS = 300.0
"""For a whole body."""
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    """As sent, with its percent signs."""
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    parts: Sequence[bytes]
    """Sent one after the other."""
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[Request], Awaitable[Answer]]


def json_answer(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    body = json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    return Answer(parts=[body], status=status, headers=headers or {})


class ApiError(Exception):
    """An answer other than 200, in the form that OpenAI's clients read."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, wait: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.wait = status, message, code, param, wait

    def answer(self) -> Answer:
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        headers = {} if self.wait is None else {"retry-after": str(self.wait)}
        return json_answer({"error": error}, status=self.status, headers=headers)


@dataclass(frozen=True, slots=True)
class Door:
    """Who may come in."""

    key: str | None = None

    def check(self, path: str, headers: Mapping[str, str]) -> None:
        if self.key is not None:
            if path == "/health":
                return
            sent = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(sent.encode(), self.key.encode()):
                raise ApiError(401, "this endpoint needs its key (Authorization: Bearer ...)", code="invalid_api_key")
            return
        # Without a key the only guard is that nobody else reaches this machine's loopback. A web page in a browser on
        # this machine does: it sends an Origin, or has made its own name point here and sends that as Host. A picture
        # or a form of such a page comes without an Origin, but the browser says where it is from.
        foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        if foreign or "origin" in headers or not is_loopback(_host_of(headers.get("host", "localhost"))):
            raise ApiError(403, "requests from web pages are refused; start the endpoint with a key to allow them")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host_of(header: str) -> str:
    return header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]


class App:
    """The ASGI application."""

    def __init__(self, handler: Handler, door: Door, body_bytes: Callable[[], int] = lambda: BODY_BYTES) -> None:
        self._handler, self._door, self._body_bytes = handler, door, body_bytes

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            # `path` has lost which slashes were written as %2F.
            path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
            self._door.check(path, headers)
            request = Request(scope["method"], path, headers, await _read(headers, receive, self._body_bytes()))
            answer = await _unless_gone(self._handler(request), receive)
        except Exception as exc:
            answer = _as_api_error(exc).answer()
        if answer is not None:
            await _send_answer(send, answer)


async def _unless_gone(work: Awaitable[Answer], receive: Receive) -> Answer | None:
    """The result of `work`; None, and the work is stopped, when the caller hangs up before."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read(headers: Mapping[str, str], receive: Receive, most: int) -> bytes:
    if headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "compressed bodies are not read")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > most:
        raise _too_large(most)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _read_pieces(receive, most)
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time; send the request again") from None


async def _read_pieces(receive: Receive, most: int) -> bytes:
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        async with asyncio.timeout(PAUSE_SECONDS):
            event = await receive()
        if event["type"] == "http.disconnect":
            raise ApiError(400, "the connection ended within the body")
        parts.append(event.get("body", b""))
        size, more = size + len(parts[-1]), event.get("more_body", False)
        if size > most:
            raise _too_large(most)
    return b"".join(parts)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"a body may have {most} bytes: more text does not fit the models served here")


def _as_api_error(exc: Exception) -> ApiError:
    if isinstance(exc, ApiError):
        return exc
    get_logger(__name__).error("a request failed", exc_info=exc)
    return ApiError(500, f"{type(exc).__name__}: {exc}")


async def _send_answer(send: Send, answer: Answer) -> None:
    headers = [(b"content-type", answer.content_type.encode())]
    headers += [(name.encode(), value.encode()) for name, value in answer.headers.items()]
    if len(answer.parts) == 1:
        headers.append((b"content-length", str(len(answer.parts[0])).encode()))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    for part in answer.parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
