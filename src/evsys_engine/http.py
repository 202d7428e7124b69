"""HTTP for the engine's server and for the OpenAI-compatible endpoint of `evsys_sdk.serving`: plain ASGI on uvicorn.

In: a handler of requests and an address. Out: a server that starts, answers and stops cleanly. Who may send requests,
how large a body may be and how slowly it may arrive is decided here. uvicorn is imported when a server starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from evsys_engine.types import EngineError

if TYPE_CHECKING:
    import uvicorn

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]

KEEP_ALIVE_SECONDS = 75
"""Between two requests of a connection: longer than the tinker client's pause between two polls."""
STOP_SECONDS = 5
"""For requests that are being answered when the server stops."""
PIECE_BYTES = 2**20
"""Of a file, read and sent at once."""
DISCARDED_BYTES = 2**28
"""Of a body that is too large, read and dropped at most."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    method: str
    path: str
    """As sent, with its percent signs: which slashes were written as %2F matters."""
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes = b""
    query: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_scope(cls, scope: AsgiMessage) -> HttpRequest:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
        return cls(scope["method"], path, headers, query=query)


@dataclass(frozen=True, slots=True)
class HttpResponse:
    body: bytes | Sequence[bytes] = b""
    """Several parts are sent one after the other, as a stream."""
    content_type: str = "application/json"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None
    """Sent instead of the body, piece by piece."""


class HttpError(Exception):
    """A response other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class BodyTooLarge(HttpError):
    """`beginning` is what was read of the body."""

    def __init__(self, most: int, hint: str, beginning: bytes) -> None:
        super().__init__(413, f"a body may have {most} bytes{hint}")
        self.beginning = beginning


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """How long a request may take to arrive."""

    head_seconds: float = 20.0
    """For the head of a request."""
    pause_seconds: float = 30.0
    """Between two pieces of a body."""
    body_seconds: float = 300.0
    """For a whole body."""


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_access(headers: Mapping[str, str], key: str | None, *, key_hint: str) -> None:
    """Let holders of the key in; without a key, programs of this machine that are not a browser's web page."""
    if key is not None:
        sent = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        # In constant time: how long `==` takes tells how many letters of the key agree.
        if not hmac.compare_digest(sent.encode(), key.encode()):
            raise HttpError(401, f"this server needs its key: {key_hint}")
        return
    # Without a key the only guard is that no other machine reaches this one's loopback. A web page in a browser on this
    # machine does: it sends an Origin, or has made its own name point here and sends that as Host. A picture or a form
    # of such a page comes without an Origin, but the browser says where it is from.
    host = headers.get("host", "localhost")
    host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    is_foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    if is_foreign or "origin" in headers or not is_loopback(host):
        raise HttpError(403, "requests from web pages are refused; start the server with a key to allow them")


async def read_body(
    headers: Mapping[str, str], receive: Receive, most: int, limits: HttpLimits, *, too_large_hint: str
) -> bytes:
    if headers.get("content-encoding", "identity") != "identity":
        raise HttpError(415, "compressed bodies are not read; send the body as it is")
    length = headers.get("content-length", "0")
    announced = int(length) if length.isdecimal() else most + 1
    parts: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(limits.body_seconds):
            while more:
                async with asyncio.timeout(limits.pause_seconds):
                    event = await receive()
                if event["type"] == "http.disconnect":
                    raise HttpError(400, "the connection ended within the body")
                parts.append(event.get("body", b""))
                size, more = size + len(parts[-1]), event.get("more_body", False)
                # By its announced length a body is refused at its first piece, which still tells the number of a
                # training call (`server.wire.read_call_number`).
                if max(size, announced) > most:
                    # uvicorn drops the rest by itself, but not where the connection is to end with this answer: closed
                    # with bytes unread it is reset, and the caller never sees the answer.
                    while more and size < DISCARDED_BYTES and headers.get("connection", "").lower() == "close":
                        async with asyncio.timeout(limits.pause_seconds):
                            event = await receive()
                        size, more = size + len(event.get("body", b"")), event.get("more_body", False)
                    raise BodyTooLarge(most, too_large_hint, parts[0])
    except TimeoutError:
        raise HttpError(408, "the body did not arrive in time; send the request again") from None
    return b"".join(parts)


def json_response(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> HttpResponse:
    body = json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    return HttpResponse(body, status=status, headers=headers or {})


async def send_response(send: Send, response: HttpResponse) -> None:
    headers = [(b"content-type", response.content_type.encode())]
    headers += [(name.encode(), value.encode()) for name, value in response.headers.items()]
    body = response.body
    if response.file is not None or isinstance(body, bytes):
        # The tinker client takes a 400 without content-length for a proxy's and repeats it.
        length = len(body) if response.file is None else response.file.stat().st_size
        headers.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    if response.file is not None:
        with response.file.open("rb") as stream:
            while piece := await asyncio.to_thread(stream.read, PIECE_BYTES):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
    elif not isinstance(body, bytes):
        for part in body:
            await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": body if isinstance(body, bytes) else b""})


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """Where to listen and who may send requests."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes any free one."""
    key: str | None = None

    def check(self) -> None:
        if self.key is None and not is_loopback(self.host):
            raise EngineError(f"{self.host} can be reached from other machines: give a key, or listen on 127.0.0.1")

    def listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # Named TCP outright: only then does asyncio turn off Nagle's algorithm, which holds an answer back for 40 ms.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.host, self.port))
        except (OSError, OverflowError) as exc:
            listener.close()
            raise EngineError(f"cannot listen on {self.host}:{self.port}: {exc}") from exc
        listener.listen(1024)
        return listener


@contextlib.asynccontextmanager
async def run_app(
    app: Callable[[AsgiMessage, Receive, Send], Awaitable[None]], address: ListenAddress, *, head_seconds: float
) -> AsyncIterator[str]:
    """The application, answering in this event loop at the URL that the context gives."""
    address.check()
    server = _uvicorn_server(app, head_seconds)
    # Hundreds of requests may be under way, and caller and server may share a process: two open files for each.
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on Windows; not where it is forbidden
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    listener = address.listen()
    host, port = listener.getsockname()[:2]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await serving
        listener.close()


def stop_on_signals() -> asyncio.Event:
    """Set at SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


@contextlib.contextmanager
def run_in_thread[T](
    serve: Callable[[Callable[[T], None], asyncio.Event], Awaitable[object]], *, name: str
) -> Iterator[tuple[T, Callable[[], object]]]:
    """`serve(on_ready, stop)` on a thread beside the caller: gives what it passes to `on_ready`, and how to stop it."""
    ready: list[tuple[T, Callable[[], object]]] = []
    failed: list[BaseException] = []
    woken = threading.Event()

    async def main() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def on_ready(value: T) -> None:
            ready.append((value, lambda: loop.call_soon_threadsafe(stop.set)))
            woken.set()

        await serve(on_ready, stop)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as exc:
            failed.append(exc)
        finally:
            woken.set()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    woken.wait()
    if not ready:
        raise failed[0] if failed else EngineError(f"{name} ended before it was ready")
    try:
        yield ready[0]
    finally:
        if thread.is_alive():
            ready[0][1]()
        thread.join()


def _uvicorn_server(app: Callable[..., Awaitable[None]], head_seconds: float) -> uvicorn.Server:
    """uvicorn with a time limit for the head of each request. It has one between two requests of a connection, but none
    for a request of which only the first lines arrive: each such connection would stay for ever."""
    try:
        import h11
        import uvicorn
        from uvicorn.protocols.http.h11_impl import H11Protocol
    except ImportError as exc:
        raise EngineError("a server needs uvicorn: pip install 'evsys-sdk[serve]'") from exc

    class TimedProtocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._stop_timer()
            elif self._timer is None and self.conn.trailing_data[0]:  # the next request has begun
                self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _start_timer(self) -> None:
            self._timer = self.loop.call_later(head_seconds, self._time_out)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _time_out(self) -> None:
            self._timer = None
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self._end("408 Request Timeout", "the head of the request did not arrive in time; send it again")

        def send_400_response(self, msg: str) -> None:
            self._end("400 Bad Request", "this is not HTTP/1.1")

        def _end(self, status: str, message: str) -> None:
            """Answer what never became a request, in the forms of both servers, and close the connection."""
            body = json.dumps({"detail": message, "error": {"message": message, "type": "invalid_request_error"}})
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
            self.transport.write(f"HTTP/1.1 {status}\r\n{head}\r\n\r\n{body}".encode())
            self.transport.close()

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # signals are the caller's; uvicorn would raise them again at the end

    config = uvicorn.Config(
        app,
        http=TimedProtocol,
        ws="none",  # neither server speaks it; accepted, such a connection would stay open without an answer
        lifespan="off",
        log_config=None,
        log_level="warning",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=STOP_SECONDS,
        server_header=False,
    )
    return Server(config)
