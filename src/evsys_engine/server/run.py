"""Put a service on the network, and take it off cleanly.

In: an engine and an address. Out: a server that runs until it is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from evsys_engine.http import STOP_SECONDS, ListenAddress, run_app, run_in_thread, stop_on_signals
from evsys_engine.server.checkpoints import Checkpoints
from evsys_engine.server.limits import LIMITS, ServerLimits
from evsys_engine.server.routes import EngineApp
from evsys_engine.server.service import Service
from evsys_engine.types import EngineApi, EngineError

logger = logging.getLogger("evsys_engine.server")

KEY_PREFIXES = ("tml-", "eyJ")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress(ListenAddress):
    """Where to listen and who may send requests."""

    def check(self) -> None:
        ListenAddress.check(self)  # not super(): a class with slots is made twice
        if self.key is not None and not self.key.startswith(KEY_PREFIXES):
            raise EngineError("the tinker client refuses keys that do not begin with 'tml-': choose one that does")


LOOPBACK = ServerAddress()
"""Any free port of this machine, no key."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server on a thread of this process."""

    url: str
    service: Service
    stop: Callable[[], object] = lambda: None


def serve(
    engine: EngineApi,
    checkpoints: Path,
    address: ServerAddress = LOOPBACK,
    *,
    limits: ServerLimits = LIMITS,
    on_ready: Callable[[str], None] = lambda url: None,
) -> bool:
    """Serve until SIGINT or SIGTERM; `on_ready` gets the URL. False if the engine was still busy at the end."""

    async def main() -> bool:
        stop = stop_on_signals()
        return await _serve(engine, checkpoints, address, limits, lambda server: on_ready(server.url), stop)

    return asyncio.run(main())


@contextlib.contextmanager
def background_server(
    engine: EngineApi, checkpoints: Path, address: ServerAddress = LOOPBACK, *, limits: ServerLimits = LIMITS
) -> Iterator[RunningServer]:
    """A server beside the caller, for tests and notebooks."""

    async def serve_until(on_ready: Callable[[RunningServer], None], stop: asyncio.Event) -> bool:
        return await _serve(engine, checkpoints, address, limits, on_ready, stop)

    with run_in_thread(serve_until, name="engine-server") as (server, stop):
        yield replace(server, stop=stop)


async def _serve(
    engine: EngineApi,
    checkpoints: Path,
    address: ServerAddress,
    limits: ServerLimits,
    on_ready: Callable[[RunningServer], None],
    stop: asyncio.Event,
) -> bool:
    address.check()
    service = Service(engine, Checkpoints(checkpoints), limits)
    sweeping = asyncio.create_task(_sweep(service))
    try:
        async with run_app(EngineApp(service, address.key), address, head_seconds=limits.head_seconds) as url:
            on_ready(RunningServer(url, service))
            await stop.wait()
            service.futures.stop_waiting()  # or uvicorn would wait for those that poll
    finally:
        sweeping.cancel()
        in_time = await service.close(STOP_SECONDS)
    return in_time


async def _sweep(service: Service) -> None:
    while True:
        await asyncio.sleep(service.limits.sweep_seconds)
        try:
            await service.sweep()
        except Exception:
            logger.exception("tidying up failed; the next round tries again")
