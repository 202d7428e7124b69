"""Put an endpoint on the network, and take it off cleanly.

In: an `Endpoint` and an address. Out: a URL that answers: inside the caller's event loop (`running`), on a thread
beside it (`in_background`), or until a signal (`serve`). A caller who hangs up is not worked for any longer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from urllib.parse import quote

from evsys_engine.http import (
    AsgiMessage,
    HttpError,
    HttpLimits,
    HttpRequest,
    HttpResponse,
    ListenAddress,
    Receive,
    Send,
    check_access,
    json_response,
    read_body,
    run_app,
    run_in_thread,
    send_response,
    stop_on_signals,
)
from evsys_engine.types import EngineError
from evsys_sdk.errors import EvsysError
from evsys_sdk.logs import get_logger
from evsys_sdk.redaction import redact
from evsys_sdk.serving.admin import PREFIX
from evsys_sdk.serving.endpoint import Endpoint
from evsys_sdk.serving.request import ApiError

LIMITS = HttpLimits()
LOOPBACK = ListenAddress()
"""Any free port of this machine, no key."""
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class EndpointApp:
    """The ASGI application."""

    def __init__(self, endpoint: Endpoint, key: str | None) -> None:
        self._endpoint, self._key = endpoint, key

    async def __call__(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        response: HttpResponse | None
        try:
            request = HttpRequest.from_scope(scope)
            admin = self._endpoint.admin
            if admin is not None and request.path.startswith(PREFIX):
                check_access(request.headers, admin.key, key_hint="Authorization: Bearer <the admin key>")
            elif self._key is None or request.path != "/health":
                check_access(request.headers, self._key, key_hint="Authorization: Bearer ...")
            hint, most = ": more text does not fit the models served here", self._endpoint.body_bytes()
            body = await read_body(request.headers, receive, most, LIMITS, too_large_hint=hint)
            response = await self._answer_unless_gone(replace(request, body=body), receive)
        except Exception as exc:
            response = error_response(exc)
        if response is not None:
            await send_response(send, response)

    async def _answer_unless_gone(self, request: HttpRequest, receive: Receive) -> HttpResponse | None:
        """None, and the work is stopped, when the caller hangs up before the response is there."""

        async def wait_for_disconnect() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        working = asyncio.ensure_future(self._endpoint(request))
        leaving = asyncio.ensure_future(wait_for_disconnect())
        try:
            await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)


def error_response(exc: Exception) -> HttpResponse:
    """The error in the form that OpenAI's clients read."""
    if not isinstance(exc, HttpError):
        get_logger(__name__).error("a request failed", exc_info=exc)
        exc = ApiError(500, f"{type(exc).__name__}: {exc}")
    elif not isinstance(exc, ApiError):
        exc = ApiError(exc.status, exc.message, code="invalid_api_key" if exc.status == 401 else None)
    kind = ERROR_TYPES.get(exc.status, "server_error" if exc.status >= 500 else "invalid_request_error")
    error = {"message": redact(exc.message), "type": kind, "param": exc.param, "code": exc.code}
    headers = {} if exc.wait is None else {"retry-after": str(exc.wait)}
    return json_response({"error": error}, status=exc.status, headers=headers)


@dataclass(frozen=True, slots=True)
class RunningEndpoint:
    """An endpoint that answers."""

    url: str
    endpoint: Endpoint

    def base_url(self, session: str | None = None) -> str:
        """What clients take as `base_url` or `api_base`; with a session, its tokens are captured."""
        return f"{self.url}/v1" if session is None else f"{self.url}/session/{quote(session, safe='')}/v1"


@contextlib.asynccontextmanager
async def running(endpoint: Endpoint, address: ListenAddress = LOOPBACK) -> AsyncIterator[RunningEndpoint]:
    """The endpoint, answering in this event loop."""
    app = EndpointApp(endpoint, address.key)
    try:
        async with run_app(app, address, head_seconds=LIMITS.head_seconds) as url:
            yield RunningEndpoint(url, endpoint)
    except EngineError as exc:  # the address, or uvicorn is missing
        raise EvsysError(str(exc)) from exc


@contextlib.contextmanager
def in_background(endpoint: Endpoint, address: ListenAddress = LOOPBACK) -> Iterator[RunningEndpoint]:
    """The endpoint, answering on a thread beside the caller: for notebooks and plain scripts."""

    async def serve_until(on_ready: Callable[[RunningEndpoint], None], stop: asyncio.Event) -> None:
        async with running(endpoint, address) as found:
            on_ready(found)
            await stop.wait()

    with run_in_thread(serve_until, name="evsys-endpoint") as (found, _):
        yield found


def serve(
    make: Callable[[], Awaitable[Endpoint]],
    address: ListenAddress = LOOPBACK,
    *,
    on_ready: Callable[[RunningEndpoint], None],
) -> None:
    """Serve what `make` makes until SIGINT or SIGTERM; `on_ready` gets the endpoint when callers may come."""

    async def main() -> None:
        try:
            address.check()
        except EngineError as exc:
            raise EvsysError(str(exc)) from exc
        stop = stop_on_signals()
        async with running(await make(), address) as found:
            on_ready(found)
            await stop.wait()

    asyncio.run(main())
