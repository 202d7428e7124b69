"""The application: which path is answered by what.

In: HTTP requests. Out: the reply of the operation behind each path, or an error in the form that the client reads. The
paths are Tinker's, as clients 0.25 to 0.36 use them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from urllib.parse import unquote

from pydantic import BaseModel

from evsys_engine.http import (
    AsgiMessage,
    BodyTooLarge,
    HttpError,
    HttpRequest,
    HttpResponse,
    Receive,
    Send,
    check_access,
    read_body,
    send_response,
)
from evsys_engine.server import bodies, wire
from evsys_engine.server.checkpoints import UnknownCheckpoint
from evsys_engine.server.futures import UnknownPromise, json_reply
from evsys_engine.server.listings import ARCHIVES_PATH, Listings
from evsys_engine.server.service import Service
from evsys_engine.server.sessions import Conflict, NotFound, SessionOver
from evsys_engine.types import BadRequest, JsonObject

logger = logging.getLogger("evsys_engine.server")

PREFIX = "/api/v1/"
NUMBERED = {"forward_backward", "optim_step", "save_weights", "save_weights_for_sampler", "load_weights"}
"""Calls that a model answers in the order of their numbers."""
READ_AT_ONCE = 2**16
"""Bytes of JSON; more are read on a thread, so that other callers are answered meanwhile."""
CLIENT_CONFIG = {
    # Plain protobuf bodies, one request per result: the ways every client from 0.25 on knows.
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": False,
    # Pieces of a batch one after another: calls then arrive in order, and the first is computed while the next is
    # being sent.
    "parallel_fwdbwd_chunks": False,
    "create_model_via_load_weights": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
    # Each sample that is under way holds a connection; a process may often have no more than 1024.
    "sample_max_concurrent_requests": 256,
}
CONSTANTS: dict[tuple[str, str], dict[str, object]] = {
    ("POST", "client/config"): dict(CLIENT_CONFIG),
    ("POST", "client/dynamic_config"): {"sample_cancel_enabled": False},
    ("POST", "telemetry"): {"status": "accepted"},  # and forgotten; a client that is refused asks again every second
    ("GET", "healthz"): {"status": "ok"},
}
STATUS = {UnknownPromise: 410, SessionOver: 410, NotFound: 404, UnknownCheckpoint: 404, Conflict: 409, BadRequest: 400}
"""The first that fits. 4xx is what the client raises at once; it tries 408, 409, 429 and 5xx again for minutes."""

Operation = Callable[..., Awaitable[JsonObject]]


class EngineApp:
    """The ASGI application."""

    def __init__(self, service: Service, key: str | None) -> None:
        self._service, self._key, self._limits = service, key, service.limits
        listings = Listings(service)
        self._posts: dict[str, tuple[type[BaseModel], Operation]] = {
            "create_session": (bodies.CreateSession, service.create_session),
            "session_heartbeat": (bodies.SessionCall, service.session_heartbeat),
            "create_model": (bodies.CreateModel, service.create_model),
            "get_info": (bodies.ModelCall, service.get_info),
            "unload_model": (bodies.ModelCall, service.unload_model),
            "optim_step": (bodies.OptimStep, service.optim_step),
            "save_weights": (bodies.SaveWeights, service.save_weights),
            "save_weights_for_sampler": (bodies.SaveForSampler, service.save_weights_for_sampler),
            "load_weights": (bodies.LoadWeights, service.load_weights),
            "create_sampling_session": (bodies.CreateSamplingSession, service.create_sampling_session),
            "asample": (bodies.SampleBody, service.asample),
            "weights_info": (bodies.WeightsInfo, listings.weights_info),
        }
        run = r"training_runs/(?P<run>[^/]+)"
        checkpoint = rf"{run}/checkpoints/(?P<kind>[^/]+)/(?P<name>[^/]+)"
        self._patterns: list[tuple[str, str, Operation]] = [
            ("GET", "get_server_capabilities", listings.capabilities),
            ("GET", "samplers/(?P<sampler_id>[^/]+)", listings.sampler),
            ("GET", "sessions", listings.sessions),
            ("GET", "sessions/(?P<session_id>[^/]+)", listings.session),
            ("POST", "sessions/(?P<session_id>[^/]+)/finish", listings.finish_session),
            ("GET", "training_runs", listings.training_runs),
            ("GET", run, listings.training_run),
            ("GET", f"{run}/checkpoints", listings.checkpoints_of),
            ("GET", rf"{run}/checkpoints/(?:(?P<kind>[^/]+)/)?(?P<name>[^/]+)/archive", listings.archive),
            ("GET", "checkpoints", listings.checkpoints),
            ("DELETE", checkpoint, listings.delete_checkpoint),
            ("PUT", f"{checkpoint}/ttl", listings.set_ttl),
            ("POST", f"{checkpoint}/publish", listings.publish),
            ("DELETE", f"{checkpoint}/publish", listings.unpublish),
        ]

    async def __call__(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = HttpRequest.from_scope(scope)
        path = unquote(request.path)
        is_numbered = path.removeprefix(PREFIX) in NUMBERED
        self._service.arriving += is_numbered
        try:
            # The address of an archive is itself a secret: it needs no key.
            if self._key is None or not path.startswith(ARCHIVES_PATH):
                check_access(request.headers, self._key, key_hint="tinker.ServiceClient(api_key=...)")
            response = await self._read_and_answer(request, path, receive)
        except Exception as exc:
            response = error_response(exc)
        finally:
            self._service.arriving -= is_numbered
        await send_response(send, response)

    async def _read_and_answer(self, request: HttpRequest, path: str, receive: Receive) -> HttpResponse:
        is_protobuf = "x-protobuf" in request.headers.get("content-type", "")
        most = self._limits.body_bytes if is_protobuf else min(self._limits.json_bytes, self._limits.body_bytes)
        hint, body = "; send fewer or shorter sequences", b""
        try:
            body = await read_body(request.headers, receive, most, self._limits, too_large_hint=hint)
            return await self._answer(replace(request, body=body), path, is_protobuf=is_protobuf)
        except (HttpError, BadRequest) as exc:
            # A numbered call that is answered with an error must not hold up the calls behind it.
            body = exc.beginning if isinstance(exc, BodyTooLarge) else body
            call = wire.read_call_number(body) if is_protobuf else bodies.read_call_number(body)
            if call is not None:
                self._service.refuse_call(*call)
            raise

    async def _answer(self, request: HttpRequest, path: str, *, is_protobuf: bool) -> HttpResponse:
        service, method = self._service, request.method
        if not path.startswith(PREFIX):
            raise HttpError(404, f"{path} is not a path of this server; all begin with {PREFIX}")
        name = path.removeprefix(PREFIX)
        if (method, name) in CONSTANTS:
            return json_reply(CONSTANTS[method, name])
        if method == "POST" and name in self._posts:
            kind, operation = self._posts[name]
            if len(request.body) < READ_AT_ONCE:
                return json_reply(await operation(bodies.read_body(kind, request.body)))
            return json_reply(await operation(await service.in_worker(bodies.read_body, kind, request.body)))
        if (method, name) == ("POST", "forward_backward"):
            if not is_protobuf:
                raise HttpError(415, "forward_backward takes protobuf, as tinker 0.25 and newer send it")
            return json_reply(await service.forward_backward(request.body))
        if (method, name) == ("POST", "retrieve_future"):
            request_id = bodies.read_body(bodies.RetrieveFuture, request.body).request_id
            reply = await service.futures.wait_for(request_id)
            if reply is None:
                again = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
                return replace(json_reply({"detail": "not done yet", **again}), status=408)
            return reply
        if method == "GET" and path.startswith(ARCHIVES_PATH):
            return HttpResponse(content_type="application/gzip", file=service.archives.find(name.split("/", 1)[1]))
        for wanted, pattern, operation in self._patterns:
            if wanted == method and (match := re.fullmatch(pattern, name)):
                return json_reply(await operation(request, **match.groupdict()))
        names = re.fullmatch(r"training_runs/[^/]+/checkpoints/(?P<id>.+?)(?P<ttl>/ttl)?", name)
        if names and (method, bool(names["ttl"])) in (("DELETE", False), ("PUT", True)):
            forms = "'weights/<name>' (training weights) or 'sampler_weights/<name>' (sampler weights)"
            raise HttpError(400, f"Invalid checkpoint identifier {names['id']!r}. Expected format {forms}")
        raise HttpError(404, f"{method} {path} is not offered by this server")


def error_response(exc: Exception) -> HttpResponse:
    if isinstance(exc, HttpError):
        return replace(json_reply({"detail": exc.message}), status=exc.status)
    status = next((status for kind, status in STATUS.items() if isinstance(exc, kind)), None)
    if status is None:
        logger.exception("a request failed", exc_info=exc)
        return replace(json_reply({"detail": f"{type(exc).__name__}: {exc}"}), status=500)
    return replace(json_reply({"detail": str(exc)}), status=status)
