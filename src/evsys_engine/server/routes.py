"""Which path is answered by what.

In: a `Request`. Out: the `Answer` of the operation behind its path. The paths are Tinker's, as clients 0.25 to 0.36
use them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from evsys_engine.server import bodies, wire
from evsys_engine.server.archives import ROUTE
from evsys_engine.server.futures import Answer, json_answer
from evsys_engine.server.http import HttpError, Request
from evsys_engine.server.listings import Listings
from evsys_engine.server.service import Service
from evsys_engine.types import BadRequest

PREFIX = "/api/v1/"

READ_AT_ONCE = 2**16
"""Bytes of JSON; more are read on a thread, so that other callers are answered meanwhile."""

Operation = Callable[..., Awaitable[dict[str, Any]]]


class Routes:
    """The handler of every request."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._posts = _posts(service)
        self._patterns = _patterns(service)

    async def __call__(self, request: Request) -> Answer:
        try:
            if request.refused is not None:
                raise request.refused
            return await self._answer(request)
        except (HttpError, BadRequest):
            self._free_number(request)
            raise

    def _free_number(self, request: Request) -> None:
        """A numbered call that is answered with an error must not hold up the calls behind it."""
        is_protobuf = "x-protobuf" in request.headers.get("content-type", "")
        call = wire.read_call_number(request.body) if is_protobuf else bodies.read_call_number(request.body)
        if call is not None:
            self._service.refuse_call(*call)

    async def _answer(self, request: Request) -> Answer:
        if not request.path.startswith(PREFIX):
            raise HttpError(404, f"{request.path} is not a path of this server; all begin with {PREFIX}")
        path = request.path.removeprefix(PREFIX)
        if request.method == "POST" and path in self._posts:
            kind, operation = self._posts[path]
            if len(request.body) < READ_AT_ONCE:
                return json_answer(await operation(bodies.read_body(kind, request.body)))
            return json_answer(await operation(await self._service.in_worker(bodies.read_body, kind, request.body)))
        if (request.method, path) == ("POST", "forward_backward"):
            return await self._forward_backward(request)
        if (request.method, path) == ("POST", "retrieve_future"):
            return await self._retrieve_future(bodies.read_body(bodies.RetrieveFuture, request.body))
        if request.method == "GET" and path.startswith(ROUTE):
            file = self._service.archives.find(path.removeprefix(ROUTE))
            return Answer(b"", "application/gzip", file)
        for method, pattern, operation in self._patterns:
            if method == request.method and (match := pattern.fullmatch(path)):
                return json_answer(await operation(request, **match.groupdict()))
        raise _not_offered(request.method, path)

    async def _forward_backward(self, request: Request) -> Answer:
        if "x-protobuf" not in request.headers.get("content-type", ""):
            raise HttpError(415, "forward_backward takes protobuf, as tinker 0.25 and newer send it")
        return json_answer(await self._service.forward_backward(request.body))

    async def _retrieve_future(self, body: bodies.RetrieveFuture) -> Answer:
        answer = await self._service.futures.wait_for(body.request_id)
        if answer is None:
            raise HttpError(408, "not done yet", type="try_again", request_id=body.request_id, queue_state="active")
        return answer


def _posts(service: Service) -> dict[str, tuple[type[Any], Operation]]:
    return {
        "client/config": (bodies.Anything, _client_config),
        "client/dynamic_config": (bodies.Anything, _dynamic_config),
        "telemetry": (bodies.Anything, _telemetry),
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
        "asample": (bodies.Sample, service.asample),
        "weights_info": (bodies.WeightsInfo, Listings(service).weights_info),
    }


def _patterns(service: Service) -> list[tuple[str, re.Pattern[str], Operation]]:
    listings = Listings(service)
    run = r"training_runs/(?P<run>[^/]+)"
    checkpoint = rf"{run}/checkpoints/(?P<kind>[^/]+)/(?P<name>[^/]+)"
    table: list[tuple[str, str, Operation]] = [
        ("GET", "healthz", _healthz),
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
    ]
    return [(method, re.compile(pattern), operation) for method, pattern, operation in table]


def _not_offered(method: str, path: str) -> HttpError:
    names = re.fullmatch(r"training_runs/[^/]+/checkpoints/(?P<id>.+?)(?P<ttl>/ttl)?", path)
    if names and (method, bool(names["ttl"])) in (("DELETE", False), ("PUT", True)):
        forms = "'weights/<name>' (training weights) or 'sampler_weights/<name>' (sampler weights)"
        return HttpError(400, f"Invalid checkpoint identifier {names['id']!r}. Expected format {forms}")
    return HttpError(404, f"{method} {PREFIX}{path} is not offered by this server")


async def _client_config(_: Any) -> dict[str, Any]:
    # Plain protobuf bodies, one request per result: the ways every client from 0.25 on knows.
    return {
        "pjwt_auth_enabled": False,
        "proto_compress_fwdbwd": False,
        "create_model_via_load_weights": False,
        "sample_use_retrieve_futures": False,
        "custom_loss_server_side": False,
        "sample_join_sampling_session": False,
        # Each sample that is under way holds a connection; a process may often have no more than 1024.
        "sample_max_concurrent_requests": 256,
    }


async def _dynamic_config(_: Any) -> dict[str, Any]:
    return {"sample_cancel_enabled": False}


async def _telemetry(_: Any) -> dict[str, Any]:
    return {"status": "accepted"}  # and forgotten; a client that is refused asks again every second


async def _healthz(_: Request) -> dict[str, Any]:
    return {"status": "ok"}
