"""Put a service on the network, and take it off cleanly.

In: an engine and an address. Out: a server that runs until it is told to stop. uvicorn carries the HTTP; it is
imported when a server starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evsys_engine.http_protocol import timed_protocol
from evsys_engine.server.checkpoints import Checkpoints
from evsys_engine.server.http import App, Door, is_loopback
from evsys_engine.server.limits import LIMITS, Limits
from evsys_engine.server.routes import Routes
from evsys_engine.server.service import Service
from evsys_engine.types import EngineApi, EngineError

logger = logging.getLogger("evsys_engine.server")

KEY_PREFIXES = ("tml-", "eyJ")
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
            raise EngineError(f"{self.host} can be reached from other machines: give a key, or listen on 127.0.0.1")
        if self.key is not None and not self.key.startswith(KEY_PREFIXES):
            raise EngineError("the tinker client refuses keys that do not begin with 'tml-': choose one that does")


LOOPBACK = Address()
"""Any free port of this machine, no key."""


@dataclass(slots=True)
class RunningServer:
    """A server on a thread of this process."""

    url: str
    service: Service
    _loop: asyncio.AbstractEventLoop
    _stop: asyncio.Event = field(repr=False)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)


def serve(
    engine: EngineApi,
    checkpoints: Path,
    address: Address = LOOPBACK,
    *,
    limits: Limits = LIMITS,
    on_ready: Callable[[str], None] = lambda url: None,
) -> bool:
    """Serve until SIGINT or SIGTERM; `on_ready` is told the URL. False if the engine was still busy then."""

    async def main() -> bool:
        _allow_many_connections()
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        return await _serve(engine, checkpoints, address, limits, lambda url, _: on_ready(url), stop)

    return asyncio.run(main())


@contextlib.contextmanager
def background_server(
    engine: EngineApi, checkpoints: Path, address: Address = LOOPBACK, *, limits: Limits = LIMITS
) -> Iterator[RunningServer]:
    """A server beside the caller, for tests and notebooks."""
    ready: list[RunningServer] = []
    failed: list[BaseException] = []
    woken = threading.Event()

    async def main() -> None:
        stop = asyncio.Event()

        def tell(url: str, service: Service) -> None:
            ready.append(RunningServer(url, service, asyncio.get_running_loop(), stop))
            woken.set()

        await _serve(engine, checkpoints, address, limits, tell, stop)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as exc:
            failed.append(exc)
        finally:
            woken.set()

    thread = threading.Thread(target=run, name="engine-server", daemon=True)
    thread.start()
    woken.wait()
    if not ready:
        raise failed[0]
    try:
        yield ready[0]
    finally:
        ready[0].stop()
        thread.join()


async def _serve(
    engine: EngineApi,
    checkpoints: Path,
    address: Address,
    limits: Limits,
    on_ready: Callable[[str, Service], None],
    stop: asyncio.Event,
) -> bool:
    address.check()
    listener = _listen(address)
    service = Service(engine, Checkpoints(checkpoints), limits)
    app = App(Routes(service), Door(address.key), limits)
    server = _uvicorn_server(app, limits)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    sweeping = asyncio.create_task(_sweep(service))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        on_ready(_url(listener), service)
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([stopping, serving], return_when=asyncio.FIRST_COMPLETED)
    finally:
        sweeping.cancel()
        service.futures.stop_waiting()
        server.should_exit = True
        await serving
        in_time = await service.close(STOP_SECONDS)
        listener.close()
    return in_time


async def _sweep(service: Service) -> None:
    while True:
        await asyncio.sleep(service.limits.sweep_seconds)
        try:
            await service.sweep()
        except Exception:
            logger.exception("tidying up failed; the next round tries again")


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # Named TCP outright: only then does asyncio turn off Nagle's algorithm, which holds every answer back for 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address.host, address.port))
    except (OSError, OverflowError) as exc:
        listener.close()
        raise EngineError(f"cannot listen on {address.host}:{address.port}: {exc}") from exc
    listener.listen(1024)
    return listener


def _allow_many_connections() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on Windows; not where it is forbidden
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _uvicorn_server(app: App, limits: Limits) -> Any:
    try:
        uvicorn = importlib.import_module("uvicorn")
    except ImportError as exc:
        raise EngineError("the server needs uvicorn: pip install 'evsys-sdk[local]'") from exc

    class Server(uvicorn.Server):  # type: ignore[name-defined]
        def capture_signals(self) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()  # `serve` has its own; uvicorn would raise the signal again at the end

    config = uvicorn.Config(
        app,
        http=timed_protocol(limits.head_seconds),
        lifespan="off",
        log_config=None,
        log_level="warning",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=STOP_SECONDS,
        server_header=False,
    )
    return Server(config)
