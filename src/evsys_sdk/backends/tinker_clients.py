"""The training surface over the real client's training and sampling clients.

In: our records. Out: our records; the client's own kinds stay here. A call is sent when it is made; those made while a
callable loss is still being computed, or a state loaded, are sent right after it, in order.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from evsys_sdk.backends.chat_tokenizer import ChatTokenizer
from evsys_sdk.backends.tinker_watch import Watch
from evsys_sdk.errors import BackendError, need, not_known
from evsys_sdk.surface import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LossCallable,
    ModelInput,
    OptimStepOutput,
    SampledSequence,
    SampleOutput,
    SamplingParams,
)

if TYPE_CHECKING:
    from evsys_sdk.backends.tinker import TinkerService

UNLOAD_SECONDS = 10.0
"""How long a run waits for an adapter to be given back."""
CUSTOM_INPUTS = ("target_tokens", "weights")
"""What a server is sent for a callable loss; everything else stays with the callable."""


class TinkerTrainingClient:
    """One adapter on the server."""

    def __init__(self, service: TinkerService, inner: Any):
        self.service, self.inner = service, inner
        self._sending: asyncio.Task[Any] | None = None
        """The last call that could not be sent at once."""
        self._saved: Counter[str] = Counter()
        self._unanswered: set[asyncio.Future[Any]] = set()
        """Calls about the adapter that were sent and have no answer yet."""

    def forward_backward(
        self, data: list[Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> Awaitable[ForwardBackwardOutput]:
        def send() -> Any:
            if loss_fn not in self.service.capabilities.losses:
                raise BackendError(not_known(loss_fn, "loss of this backend", self.service.capabilities.losses))
            return self.inner.forward_backward([to_tinker(datum) for datum in data], loss_fn, loss_fn_config)

        return self._call(send, _output, f"forward_backward with {loss_fn}")

    def forward_backward_custom(self, data: list[Datum], loss_fn: LossCallable) -> Awaitable[ForwardBackwardOutput]:
        # The callable is ours to run, on our own records; the server sees the gradient of the logprobs.
        def loss(theirs: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
            value, metrics = loss_fn(data, logprobs)
            if not getattr(value, "requires_grad", False):
                raise BackendError("the loss must be a tensor that was computed from the logprobs")
            # A datum the callable does not look at has the gradient 0, where the client sees none and refuses.
            whole = value + sum(each.nan_to_num(0.0, 0.0, 0.0).sum() * 0.0 for each in logprobs)
            return whole, {**metrics, "loss:sum": float(value.detach().sum())}

        async def send() -> Any:
            theirs = [to_tinker(datum, CUSTOM_INPUTS) for datum in data]
            return await self.inner.forward_backward_custom_async(theirs, loss)

        return self._call_in_turn(send, _output, "forward_backward with a callable loss")

    def optim_step(self, adam_params: AdamParams) -> Awaitable[OptimStepOutput]:
        types = need("tinker", extra="tinker").types
        settings = types.AdamParams(**{name: getattr(adam_params, name) for name in AdamParams.__dataclass_fields__})
        return self._call(
            lambda: self.inner.optim_step(settings),
            lambda answer: OptimStepOutput(metrics=dict(answer.metrics or {})),
            "optim_step",
        )

    def save_state(self, name: str) -> Awaitable[str]:
        name = self._unused(name, "state")
        return self._call(lambda: self.inner.save_state(name), lambda saved: str(saved.path), f"saving state {name}")

    def save_weights_for_sampler(self, name: str) -> Awaitable[str]:
        name = self._unused(name, "sampler")
        return self._call(
            lambda: self.inner.save_weights_for_sampler(name), lambda saved: str(saved.path), f"saving weights {name}"
        )

    def _unused(self, name: str, kind: str) -> str:
        """No checkpoint is ever written over another."""
        self._saved[f"{kind}/{name}"] += 1
        count = self._saved[f"{kind}/{name}"]
        return name if count == 1 else f"{name}-{count}"

    def load_state(self, path: str, *, optimizer: bool = True) -> Awaitable[None]:
        """The protocol makes a new training client from a state; from here on that is the one we speak for. The adapter
        of the old one is given back when the server has answered all that it was asked about it."""
        client = self.service.client
        make = (
            client.create_training_client_from_state_with_optimizer_async
            if optimizer
            else client.create_training_client_from_state_async
        )
        what, owed = f"loading state {path}", set(self._unanswered)

        async def load() -> Any:
            old, self.inner = self.inner, await self.service.watch.answer(make(path), what, names_a_path=True)
            self._saved.clear()
            if owed:
                await asyncio.wait(owed)
            await unload(self.service.client.holder, old)
            return _done()

        return self._call_in_turn(load, lambda nothing: None, what)

    def get_tokenizer(self) -> ChatTokenizer:
        return self.service.get_tokenizer()

    def _call[T](self, send: Callable[[], Any], make: Callable[[Any], T], what: str) -> Awaitable[T]:
        """Send now, unless an earlier call is still to be sent."""
        if self._sending is None or self._sending.done():
            try:
                sent: Awaitable[Any] = _done(send())
            except Exception as exc:  # a refusal comes when it is awaited, like every answer
                sent = _failed(exc)
            return self._noted(_collected(self.service.watch, sent, make, what))

        async def send_it() -> Any:
            return send()

        return self._call_in_turn(send_it, make, what)

    def _call_in_turn[T](
        self, send: Callable[[], Coroutine[Any, Any, Any]], make: Callable[[Any], T], what: str
    ) -> Awaitable[T]:
        before = self._sending

        async def send_after() -> Any:
            if before is not None:
                await asyncio.wait({before})
            return await self.service.watch.answer(send(), what)

        self._sending = asyncio.ensure_future(send_after())
        return self._noted(_collected(self.service.watch, asyncio.shield(self._sending), make, what))

    def _noted[T](self, call: asyncio.Task[T]) -> asyncio.Task[T]:
        self._unanswered.add(call)
        call.add_done_callback(self._unanswered.discard)
        return call


class TinkerSamplingClient:
    """Fixed weights on the server."""

    def __init__(self, watch: Watch, inner: Any):
        self.watch, self.inner = watch, inner

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        *,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> Awaitable[SampleOutput]:
        types = need("tinker", extra="tinker").types
        if sampling_params.grammar is not None:
            raise BackendError("a Tinker server cannot hold a completion to a grammar; use the backend local")
        params = types.SamplingParams(
            max_tokens=sampling_params.max_tokens,
            temperature=sampling_params.temperature,
            top_k=sampling_params.top_k,
            top_p=sampling_params.top_p,
            seed=sampling_params.seed,
            stop=_stop(sampling_params.stop),
        )
        future = self.inner.sample(
            types.ModelInput.from_ints(prompt.to_ints()),
            num_samples,
            params,
            include_prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
        )
        return _collected(self.watch, _done(future), _samples, "sampling")

    def compute_logprobs(self, prompt: ModelInput) -> Awaitable[list[float | None]]:
        types = need("tinker", extra="tinker").types
        future = self.inner.compute_logprobs(types.ModelInput.from_ints(prompt.to_ints()))
        return _collected(self.watch, _done(future), list, "compute_logprobs")


def _collected[T](watch: Watch, sent: Awaitable[Any], make: Callable[[Any], T], what: str) -> asyncio.Task[T]:
    """The answer of a call that is on its way, in our records; its failure as a BackendError."""

    async def collect() -> T:
        return make(await watch.answer(_result(await sent), what))

    task = asyncio.ensure_future(collect())
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # heard, even if nobody awaits it
    return task


async def unload(holder: Any, client: Any) -> None:
    """Give the adapter of a training client back to the server. The client knows the request and has no method for it;
    a server that does not know it keeps the adapter until the session ends."""

    async def send() -> None:
        from tinker.lib.client_connection_pool_type import ClientConnectionPoolType
        from tinker.types import UnloadModelRequest

        body = UnloadModelRequest(model_id=client.model_id).model_dump()
        with holder.aclient(ClientConnectionPoolType.TRAIN) as connection:
            await connection.post("/api/v1/unload_model", body=body, cast_to=object)

    with suppress(Exception):
        await asyncio.wait_for(holder.run_coroutine_threadsafe(send()), UNLOAD_SECONDS)


async def _result(future: Any) -> Any:
    """What the client's future holds; it has them of two kinds, and we have finished ones of our own."""
    if isinstance(future, asyncio.Future):
        return await future
    return await (future.result_async() if hasattr(future, "result_async") else asyncio.wrap_future(future))


def _done(value: Any = None) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future


def _failed(exc: Exception) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_exception(exc)
    return future


def _stop(stop: tuple[str | int, ...]) -> list[str] | list[int] | None:
    words, ids = [s for s in stop if isinstance(s, str)], [s for s in stop if isinstance(s, int)]
    if words and ids:
        raise BackendError("a Tinker server takes stop strings or stop ids, not both at once")
    return words or ids or None


def to_tinker(datum: Datum, names: tuple[str, ...] | None = None) -> Any:
    """Our record as the client's; with `names`, only those inputs."""
    types = need("tinker", extra="tinker").types
    inputs = {}
    for key, value in datum.loss_fn_inputs.items():
        if names is None or key in names:
            array = value.to_numpy()
            inputs[key] = types.TensorData(data=array.ravel().tolist(), dtype=value.dtype, shape=list(array.shape))
    return types.Datum(model_input=types.ModelInput.from_ints(datum.model_input.to_ints()), loss_fn_inputs=inputs)


def _output(result: Any) -> ForwardBackwardOutput:
    outputs, metrics = result.loss_fn_outputs, dict(result.metrics or {})
    if "loss:sum" not in metrics:  # SkyRL tells the parts alone
        if not all("elementwise_loss" in found for found in outputs):
            raise BackendError("the server tells no loss, so training could not be watched; use another server")
        metrics["loss:sum"] = float(sum(sum(found["elementwise_loss"].data) for found in outputs))
    logprobs = [list(found["logprobs"].data) if "logprobs" in found else [] for found in outputs]
    return ForwardBackwardOutput(metrics=metrics, logprobs=logprobs)


def _samples(response: Any) -> SampleOutput:
    return SampleOutput(
        sequences=[
            SampledSequence(tokens=list(s.tokens), logprobs=list(s.logprobs or []), stop_reason=s.stop_reason)
            for s in response.sequences
        ],
        prompt_logprobs=response.prompt_logprobs,
        topk_prompt_logprobs=response.topk_prompt_logprobs,
    )
