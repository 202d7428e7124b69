"""Put an endpoint on the network, and take it off cleanly.

In: an `Endpoint` and an address. Out: a URL that answers: inside the caller's event loop (`running`), on a thread
beside it (`in_background`), or until a signal (`serve`). uvicorn carries the HTTP; it is imported when a server starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from evsys_engine.http_protocol import timed_protocol
from evsys_sdk.errors import EvsysError, need
from evsys_sdk.serving import http
from evsys_sdk.serving.endpoint import Endpoint
from evsys_sdk.serving.http import App, Door, is_loopback

KEEP_ALIVE_SECONDS = 75
STOP_SECONDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where to listen and who may come in."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes any free one."""
    key: str | None = None

    def check(self) -> None:
        if self.key is None and not is_loopback(self.host):
            raise EvsysError(f"{self.host} can be reached from other machines: give a key, or listen on 127.0.0.1")


LOOPBACK = Address()
"""Any free port of this machine, no key."""


@dataclass(frozen=True, slots=True)
class Running:
    """An endpoint that answers."""

    url: str
    endpoint: Endpoint

    def base_url(self, session: str | None = None) -> str:
        """What clients take as `base_url` or `api_base`; with a session, its tokens are captured."""
        return f"{self.url}/v1" if session is None else f"{self.url}/session/{quote(session, safe='')}/v1"


@contextlib.asynccontextmanager
async def running(endpoint: Endpoint, address: Address = LOOPBACK) -> AsyncIterator[Running]:
    """The endpoint, answering in this event loop."""
    address.check()
    _allow_many_connections()
    server = _uvicorn_server(App(endpoint, Door(address.key), endpoint.body_bytes))
    listener = _listen(address)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        yield Running(_url(listener), endpoint)
    finally:
        server.should_exit = True
        await serving
        listener.close()


@contextlib.contextmanager
def in_background(endpoint: Endpoint, address: Address = LOOPBACK) -> Iterator[Running]:
    """The endpoint, answering on a thread beside the caller: for notebooks and plain scripts."""
    ready: list[tuple[Running, Callable[[], object]]] = []
    failed: list[BaseException] = []
    woken = threading.Event()

    async def main() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        async with running(endpoint, address) as found:
            ready.append((found, lambda: loop.call_soon_threadsafe(stop.set)))
            woken.set()
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as exc:
            failed.append(exc)
        finally:
            woken.set()

    thread = threading.Thread(target=run, name="evsys-endpoint", daemon=True)
    thread.start()
    woken.wait()
    if not ready:
        raise failed[0]
    found, stop = ready[0]
    try:
        yield found
    finally:
        stop()
        thread.join()


def serve(
    make: Callable[[], Awaitable[Endpoint]], address: Address = LOOPBACK, *, on_ready: Callable[[Running], None]
) -> None:
    """Serve what `make` makes until SIGINT or SIGTERM; `on_ready` is told when callers may come."""

    async def main() -> None:
        address.check()
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with running(await make(), address) as found:
            on_ready(found)
            await stop.wait()

    asyncio.run(main())


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # Named TCP outright: only then does asyncio turn off Nagle's algorithm, which holds every answer back for 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address.host, address.port))
    except (OSError, OverflowError) as exc:
        listener.close()
        raise EvsysError(f"cannot listen on {address.host}:{address.port}: {exc}") from exc
    listener.listen(1024)
    return listener


def _allow_many_connections() -> None:
    # A step of rollouts opens hundreds, and caller and endpoint may share a process: two files for each.
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on Windows; not where it is forbidden
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _uvicorn_server(app: App) -> Any:
    uvicorn = need("uvicorn", extra="serve")  # it comes with local, harbor and dashboard too

    class Server(uvicorn.Server):  # type: ignore[name-defined]
        def capture_signals(self) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()  # signals are the caller's; uvicorn would raise them again at the end

    config = uvicorn.Config(
        app,
        http=timed_protocol(http.HEAD_SECONDS),
        lifespan="off",
        log_config=None,
        log_level="warning",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=STOP_SECONDS,
        server_header=False,
    )
    return Server(config)
