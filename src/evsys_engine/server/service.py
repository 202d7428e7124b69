"""What the server does: the protocol's operations on an engine.

In: checked requests. Out: answers, or promises of them. All state is touched on the event loop alone; the engine,
files and large bodies are worked on in threads.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from evsys_engine.http import HttpResponse
from evsys_engine.server import bodies, wire
from evsys_engine.server.archives import Archives
from evsys_engine.server.checkpoints import Checkpoints, TinkerPath, check_name
from evsys_engine.server.futures import Futures, Promise, json_reply
from evsys_engine.server.limits import LIMITS, ServerLimits
from evsys_engine.server.samplers import Samplers
from evsys_engine.server.sessions import (
    Conflict,
    EngineSession,
    Model,
    ModelJob,
    ModelQueue,
    Naming,
    Sampling,
    Sessions,
)
from evsys_engine.types import BadRequest, EngineApi, JsonObject, LoraSettings


class Service:
    """One engine, one folder of checkpoints, any number of clients."""

    def __init__(self, engine: EngineApi, checkpoints: Checkpoints, limits: ServerLimits = LIMITS) -> None:
        self.engine, self.checkpoints, self.limits = engine, checkpoints, limits
        self.naming = Naming(engine.info)
        self.sessions = Sessions(time.monotonic)
        self.futures = Futures(limits, time.monotonic)
        self.arriving = 0
        """Numbered calls that are being read and are in no queue yet."""
        self._running: set[Future[Any]] = set()
        self._pool = ThreadPoolExecutor(limits.workers, thread_name_prefix="engine-server")
        self.samplers = Samplers(engine, self.in_worker, limits)
        self.archives = Archives(checkpoints.folder, time.monotonic, seconds=limits.archive_seconds)

    async def in_worker[**P, T](self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result; it runs on a thread, and to its end even if its caller has gone."""
        running = self._pool.submit(function, *args, **kwargs)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return await asyncio.wrap_future(running)

    # Sessions

    async def create_session(self, body: bodies.CreateSession) -> JsonObject:
        return {"session_id": self.sessions.open(body.user_metadata, body.display_name).session_id}

    async def session_heartbeat(self, body: bodies.SessionCall) -> JsonObject:
        self.sessions.get(body.session_id)
        return {"type": "session_heartbeat"}

    async def finish_session(self, session_id: str) -> JsonObject:
        await self.end_session(self.sessions.get(session_id))
        return {}

    async def end_session(self, session: EngineSession) -> None:
        """Unload its models and samplers and forget its results."""
        self.sessions.remove(session)
        self.futures.drop_session(session.session_id)
        # Models first: a call that still runs in a queue may add a sampler, which the next loop then puts away.
        for model in list(session.models.values()):
            await self._unload(model)
        for sampling in list(session.samplings.values()):
            await self._put_away(sampling)
        await self.in_worker(partial(shutil.rmtree, ignore_errors=True), self._unnamed_path(session))

    # Models

    async def create_model(self, body: bodies.CreateModel) -> JsonObject:
        session = self.sessions.get(body.session_id)
        self.naming.check(body.base_model)
        if body.optimizer_config.type != "adamw":
            raise BadRequest(f"optimizer {body.optimizer_config.type!r} is not offered here; adamw is")
        model_id = f"{session.session_id}-train-{body.model_seq_id}"
        return self._start_promise(session, f"{model_id}/create", body, lambda: self._create(session, model_id, body))

    async def _create(self, session: EngineSession, model_id: str, body: bodies.CreateModel) -> HttpResponse:
        if model_id not in session.models:  # asked for again after its first answer was forgotten
            await self._load_adapter(session, model_id, body)
        return json_reply({"type": "create_model", "model_id": model_id})

    async def _load_adapter(self, session: EngineSession, model_id: str, body: bodies.CreateModel) -> None:
        config = body.lora_config.model_dump()
        seed = config.pop("seed")
        settings = LoraSettings(**config, seed=secrets.randbelow(2**31) if seed is None else seed)
        adapter = await self.in_worker(self.engine.create_adapter, settings)
        queue = ModelQueue(model_id, self.futures, self.limits, lambda: self.arriving > 0)
        model = Model(model_id, session, settings, adapter, queue, body.base_model, body.user_metadata)
        session.models[model_id] = model
        if session not in self.sessions.all():  # it ended meanwhile
            await self._unload(model)

    async def get_info(self, body: bodies.ModelCall) -> JsonObject:
        model = self.sessions.model(body.model_id)
        name = self.naming.answer(model.base_model)
        return {
            "type": "get_info",
            "model_id": model.model_id,
            "model_name": name,
            "model_data": {"model_name": name, "tokenizer_id": self.naming.public},
            "is_lora": model.settings.rank > 0,
            "lora_rank": model.settings.rank,
        }

    async def unload_model(self, body: bodies.ModelCall) -> JsonObject:
        model = self.sessions.model(body.model_id)
        return self._start_promise(model.session, f"{model.model_id}/unload", body, lambda: self._unload(model))

    async def _unload(self, model: Model) -> HttpResponse:
        model.session.models.pop(model.model_id, None)
        await model.queue.close()
        await self.in_worker(model.adapter.close)
        return json_reply({"type": "unload_model", "model_id": model.model_id})

    # Training

    async def forward_backward(self, body: bytes) -> JsonObject:
        request, payload = await self.in_worker(_parse_training_request, body)
        model = self.sessions.model(request.model_id)
        return self._in_turn(model, request.seq_id, payload, lambda: self.in_worker(self._loss, model, request))

    def _loss(self, model: Model, request: Any) -> HttpResponse:
        data, config = wire.read_training_data(request, self.limits.tensor_elements)
        if not data:
            raise BadRequest("the batch is empty")
        compute = model.adapter.forward if request.forward_only else model.adapter.forward_backward
        return HttpResponse(wire.write_loss_output(compute(data, request.loss_fn, config)), wire.PROTOBUF)

    async def optim_step(self, body: bodies.OptimStep) -> JsonObject:
        model = self.sessions.model(body.model_id)

        async def step() -> HttpResponse:
            metrics = await self.in_worker(model.adapter.optim_step, bodies.read_adam(body))
            return json_reply({"metrics": metrics})

        return self._in_turn(model, body.seq_id, bodies.digest_body(body), step)

    # Weights

    async def save_weights(self, body: bodies.SaveWeights) -> JsonObject:
        model = self.sessions.model(body.model_id)

        async def save() -> HttpResponse:
            path = await self.in_worker(self._save, model, "weights", model.adapter.save_state, body)
            return json_reply({"type": "save_weights", "path": path})

        return self._in_turn(model, body.seq_id, bodies.digest_body(body), save)

    async def save_weights_for_sampler(self, body: bodies.SaveForSampler) -> JsonObject:
        model = self.sessions.model(body.model_id)

        async def save() -> HttpResponse:
            if body.path is None:
                sampler_id = await self._save_unnamed(model, body.sampling_session_seq_id)
                return json_reply({"type": "save_weights_for_sampler", "sampling_session_id": sampler_id})
            path = await self.in_worker(self._save, model, "sampler_weights", model.adapter.save_weights, body)
            return json_reply({"type": "save_weights_for_sampler", "path": path})

        return self._in_turn(model, body.seq_id, bodies.digest_body(body), save)

    def _save(self, model: Model, kind: str, write: Callable[[Path], None], body: bodies.SaveWeights) -> str:
        name = secrets.token_hex(4) if body.path is None else body.path
        path = TinkerPath(check_name(model.model_id), kind, check_name(name))
        facts = {
            **self.naming.facts(),
            "asked_as": model.base_model,
            "lora": asdict(model.settings),
            "user_metadata": body.user_metadata,
            "run_metadata": model.user_metadata,
        }
        self.checkpoints.save(path, write, facts, ttl_seconds=body.ttl_seconds, overwrite=body.overwrite)
        return str(path)

    async def _save_unnamed(self, model: Model, number: int | None) -> str:
        if number is None:
            raise BadRequest("save_weights_for_sampler needs a name (path) or a sampling_session_seq_id")
        session = model.session
        folder = self._unnamed_path(session) / str(number)
        await self.in_worker(partial(folder.parent.mkdir, parents=True, exist_ok=True))
        await self.in_worker(model.adapter.save_weights, folder)
        sampling = Sampling(sampler_id=_sampler_id(session, number), session=session, folder=folder, unnamed=True)
        session.samplings[sampling.sampler_id] = sampling
        unnamed = [sampling for sampling in session.samplings.values() if sampling.unnamed]
        for old in unnamed[: -self.limits.unnamed_samplers]:
            await self._put_away(old)
        return sampling.sampler_id

    async def load_weights(self, body: bodies.LoadWeights) -> JsonObject:
        model = self.sessions.model(body.model_id)

        async def load() -> HttpResponse:
            await self.in_worker(self._load, model, body)
            return json_reply({"type": "load_weights", "path": body.path, "model_id": model.model_id})

        return self._in_turn(model, body.seq_id, bodies.digest_body(body), load)

    def _load(self, model: Model, body: bodies.LoadWeights) -> None:
        path = TinkerPath.parse(body.path)
        if path.kind != "weights":
            raise BadRequest(f"{path} was saved for sampling; load a path that save_state returned")
        self.naming.check_facts(str(path), self.checkpoints.facts(path))
        model.adapter.load_state(self.checkpoints.find(path), optimizer=body.optimizer)

    # Sampling

    async def create_sampling_session(self, body: bodies.CreateSamplingSession) -> JsonObject:
        session = self.sessions.get(body.session_id)
        sampler_id = _sampler_id(session, body.sampling_session_seq_id)
        known = session.samplings.get(sampler_id)
        if known is not None and not known.unnamed and known.model_path != body.model_path:
            raise Conflict(f"{sampler_id} samples from {known.model_path or 'the base model'}; use the next number")
        if known is None:
            folder = await self.in_worker(self._folder_to_sample, body)
            session.samplings[sampler_id] = Sampling(
                sampler_id=sampler_id, session=session, folder=folder, model_path=body.model_path
            )
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def _folder_to_sample(self, body: bodies.CreateSamplingSession) -> Path | None:
        if body.base_model is not None:
            self.naming.check(body.base_model)
        if body.model_path is None:
            return None
        path = TinkerPath.parse(body.model_path)
        if path.kind != "sampler_weights":
            raise BadRequest(f"{path} is a training state; sample from a path that save_weights_for_sampler returned")
        self.naming.check_facts(str(path), self.checkpoints.facts(path))
        return self.checkpoints.find(path)

    async def asample(self, body: bodies.SampleBody) -> JsonObject:
        sampling = self.sessions.sampling(body.sampling_session_id)
        request = bodies.read_sample(body, max_length=self.engine.info.max_length)
        request_id = f"{sampling.sampler_id}/{body.seq_id}"

        async def sample() -> HttpResponse:
            result = await self.samplers.sample(sampling.folder, request)
            packed = await self.in_worker(partial(wire.write_sample_result, last_n=body.prompt_logprobs_last_n), result)
            return HttpResponse(packed, wire.PROTOBUF)

        sequence_ids = [f"{request_id}/{row}" for row in range(body.num_samples)]
        return self._start_promise(sampling.session, request_id, body, sample, sample_sequence_ids=sequence_ids)

    # Promises

    def _start_promise(
        self,
        session: EngineSession,
        request_id: str,
        body: BaseModel,
        work: Callable[[], Awaitable[HttpResponse]],
        **extra: object,
    ) -> JsonObject:
        """Begin at once. The same request sent again is the same promise."""
        payload = bodies.digest_body(body)
        promise = self._find_promise(request_id, payload)
        if promise is None:
            promise = self.futures.make(request_id, session.session_id, payload, **extra)
            self.futures.start(promise, work())
        return _ticket(promise)

    def _in_turn(
        self, model: Model, seq_id: int | None, payload: str, work: Callable[[], Awaitable[HttpResponse]]
    ) -> JsonObject:
        """Begin when every earlier call of the model is done. The same call sent again is the same promise."""
        number = model.queue.number(seq_id)
        request_id = f"{model.model_id}/{number}"
        if model.queue.has_seen(number):
            self._find_promise(request_id, payload)
            return {"request_id": request_id, "model_id": model.model_id}
        promise = self.futures.make(request_id, model.session.session_id, payload, model_id=model.model_id)
        model.queue.put(number, ModelJob(promise, work))
        return _ticket(promise)

    def _find_promise(self, request_id: str, payload: str) -> Promise | None:
        """The promise with this id, which must be that of the same request."""
        promise = self.futures.get(request_id)
        if promise is not None and promise.payload != payload:
            raise Conflict(f"{request_id} is the number of a different request; send this one under the next number")
        return promise

    def refuse_call(self, model_id: str, seq_id: int) -> None:
        """A call was answered with an error before it could wait for its turn: the next one does not wait for it."""
        with suppress(BadRequest):  # of no model here
            self.sessions.model(model_id).queue.refuse(seq_id)

    # Housekeeping

    async def sweep(self) -> None:
        self.futures.sweep()
        for session in self.sessions.silent_for(self.limits.session_seconds):
            await self.end_session(session)
        await self.in_worker(self.checkpoints.remove_expired)
        await self.in_worker(self.archives.sweep)

    async def close(self, patience_seconds: float) -> bool:
        """The server goes down: nothing new begins. False if something still ran at the time limit."""
        for session in self.sessions.all():
            for model in session.models.values():
                model.queue.abandon()
        await self.futures.close()
        # A thread cannot be broken off: what has begun gets `patience_seconds`, what has not is dropped.
        self._pool.shutdown(wait=False, cancel_futures=True)
        left = [asyncio.wrap_future(running) for running in list(self._running)]
        late = (await asyncio.wait(left, timeout=patience_seconds))[1] if left else set()
        self.archives.close()
        self.checkpoints.close()
        return not late

    async def _put_away(self, sampling: Sampling) -> None:
        sampling.session.samplings.pop(sampling.sampler_id, None)
        if any(
            other.folder == sampling.folder for session in self.sessions.all() for other in session.samplings.values()
        ):
            return
        await self.samplers.close(sampling.folder)
        if sampling.unnamed and sampling.folder is not None:
            await self.in_worker(partial(shutil.rmtree, ignore_errors=True), sampling.folder)

    def _unnamed_path(self, session: EngineSession) -> Path:
        return self.checkpoints.unnamed_folder(session.session_id)


def _sampler_id(session: EngineSession, number: int) -> str:
    return f"{session.session_id}-sample-{number}"


def _parse_training_request(body: bytes) -> tuple[Any, str]:
    """The request and the digest of its payload."""
    request = wire.parse_training_request(body)
    return request, bodies.digest("forward_backward", request.SerializeToString(deterministic=True))


def _ticket(promise: Promise) -> JsonObject:
    return {"request_id": promise.request_id, **promise.extra}
