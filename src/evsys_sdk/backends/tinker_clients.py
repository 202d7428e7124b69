"""The training surface over the real client's training and sampling clients.

In: our records. Out: our records; the client's own kinds stay here. A call is sent when it is made; those made while a
callable loss is still being computed, or a state loaded, are sent right after it, in order.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from evsys_sdk.backends.chat_tokenizer import ChatTokenizer
from evsys_sdk.backends.tinker_watch import Watch
from evsys_sdk.errors import BackendError, need, not_known
from evsys_sdk.training.losses import read_metrics
from evsys_sdk.training_api import (
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
    import tinker
    import torch
    from tinker.lib.internal_client_holder import InternalClientHolder

    from evsys_sdk.backends.tinker import TinkerService

type Reply[A] = tinker.APIFuture[A] | Future[A] | asyncio.Future[A]
"""An answer on its way: the client has futures of two kinds, and finished ones are asyncio's."""

UNLOAD_SECONDS = 10.0
"""How long a run waits for an adapter to be given back."""
CUSTOM_INPUTS = ("target_tokens", "weights")
"""What a server is sent for a callable loss; everything else stays with the callable."""


class TinkerTrainingClient:
    """One adapter on the server."""

    def __init__(self, service: TinkerService, inner: tinker.TrainingClient):
        self.service, self.inner = service, inner
        self._sending: asyncio.Task[object] | None = None
        """The last call that could not be sent at once."""
        self._saved: Counter[str] = Counter()
        self._unanswered: set[asyncio.Future[Any]] = set()
        """Calls about the adapter that were sent and have no answer yet."""

    def forward_backward(
        self, data: list[Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> Awaitable[ForwardBackwardOutput]:
        def send() -> Reply[tinker.ForwardBackwardOutput]:
            if loss_fn not in self.service.capabilities.losses:
                raise BackendError(not_known(loss_fn, "loss of this backend", self.service.capabilities.losses))
            named = cast("tinker.types.LossFnType", loss_fn)  # the server says which losses it has
            return self.inner.forward_backward([to_tinker(datum) for datum in data], named, loss_fn_config)

        return self._call(send, _output, f"forward_backward with {loss_fn}")

    def forward_backward_custom(self, data: list[Datum], loss_fn: LossCallable) -> Awaitable[ForwardBackwardOutput]:
        # The callable is ours to run, on our own records; the server sees the gradient of the logprobs.
        def loss(theirs: list[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
            value, metrics = loss_fn(data, logprobs)
            if not getattr(value, "requires_grad", False):
                raise BackendError("the loss must be a tensor that was computed from the logprobs")
            # A datum the callable does not look at has the gradient 0, where the client sees none and refuses.
            # `nan_to_num` first: infinity times 0 is NaN, which would spoil the loss.
            whole = value + sum(each.nan_to_num(0.0, 0.0, 0.0).sum() * 0.0 for each in logprobs)
            return whole, {**read_metrics(metrics), "loss:sum": float(value.detach().sum())}

        async def send() -> Reply[tinker.ForwardBackwardOutput]:
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
        name = self._unused_name(name, "state")
        return self._call(lambda: self.inner.save_state(name), lambda saved: str(saved.path), f"saving state {name}")

    def save_weights_for_sampler(self, name: str) -> Awaitable[str]:
        name = self._unused_name(name, "sampler")
        return self._call(
            lambda: self.inner.save_weights_for_sampler(name), lambda saved: str(saved.path), f"saving weights {name}"
        )

    def _unused_name(self, name: str, kind: str) -> str:
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
        what, unanswered = f"loading state {path}", set(self._unanswered)

        async def load() -> Reply[None]:
            old, self.inner = self.inner, await self.service.watch.answer(make(path), what, names_a_path=True)
            self._saved.clear()
            if unanswered:
                await asyncio.wait(unanswered)
            await unload(self.service.client.holder, old)
            return _done_future(None)

        return self._call_in_turn(load, lambda nothing: None, what)

    def get_tokenizer(self) -> ChatTokenizer:
        return self.service.get_tokenizer()

    def _call[A, T](self, send: Callable[[], Reply[A]], make: Callable[[A], T], what: str) -> Awaitable[T]:
        """Send now, unless an earlier call is still to be sent."""
        if self._sending is None or self._sending.done():
            sent: asyncio.Future[Reply[A]] = asyncio.get_running_loop().create_future()
            try:
                sent.set_result(send())
            except Exception as exc:  # a refusal comes when it is awaited, like every answer
                sent.set_exception(exc)
            return self._note_call(_collect(self.service.watch, sent, make, what))

        async def send_it() -> Reply[A]:
            return send()

        return self._call_in_turn(send_it, make, what)

    def _call_in_turn[A, T](
        self, send: Callable[[], Coroutine[None, None, Reply[A]]], make: Callable[[A], T], what: str
    ) -> Awaitable[T]:
        before = self._sending

        async def send_after() -> Reply[A]:
            if before is not None:
                # `wait` and not `await`: the failure of an earlier call belongs to its own caller.
                await asyncio.wait({before})
            return await self.service.watch.answer(send(), what)

        # A separate task, shielded below: a caller that gives up takes no call out of the order.
        self._sending = sending = asyncio.ensure_future(send_after())
        return self._note_call(_collect(self.service.watch, asyncio.shield(sending), make, what))

    def _note_call[T](self, call: asyncio.Task[T]) -> asyncio.Task[T]:
        self._unanswered.add(call)
        call.add_done_callback(self._unanswered.discard)
        return call


class TinkerSamplingClient:
    """Fixed weights on the server."""

    def __init__(self, watch: Watch, inner: tinker.SamplingClient):
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
        words = [item for item in sampling_params.stop if isinstance(item, str)]
        ids = [item for item in sampling_params.stop if isinstance(item, int)]
        if words and ids:
            raise BackendError("a Tinker server takes stop strings or stop ids, not both at once")
        params = types.SamplingParams(
            max_tokens=sampling_params.max_tokens,
            temperature=sampling_params.temperature,
            top_k=sampling_params.top_k,
            top_p=sampling_params.top_p,
            seed=sampling_params.seed,
            stop=words or ids or None,
        )
        future = self.inner.sample(
            types.ModelInput.from_ints(prompt.to_ints()),
            num_samples,
            params,
            include_prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
        )
        return _collect(self.watch, _done_future(future), _samples, "sampling")

    def compute_logprobs(self, prompt: ModelInput) -> Awaitable[list[float | None]]:
        types = need("tinker", extra="tinker").types
        future = self.inner.compute_logprobs(types.ModelInput.from_ints(prompt.to_ints()))
        return _collect(self.watch, _done_future(future), list, "compute_logprobs")


def _collect[A, T](watch: Watch, sent: Awaitable[Reply[A]], make: Callable[[A], T], what: str) -> asyncio.Task[T]:
    """The answer of a call that is on its way, in our records; its failure as a BackendError."""

    async def result_of(future: Reply[A]) -> A:
        if isinstance(future, asyncio.Future):
            return await future
        return await (asyncio.wrap_future(future) if isinstance(future, Future) else future.result_async())

    async def collect() -> T:
        return make(await watch.answer(result_of(await sent), what))

    task = asyncio.ensure_future(collect())
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, even if it is never awaited
    return task


async def unload(holder: InternalClientHolder, client: tinker.TrainingClient) -> None:
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


def _done_future[A](value: A) -> asyncio.Future[A]:
    future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future


def to_tinker(datum: Datum, names: tuple[str, ...] | None = None) -> tinker.Datum:
    """Our record as the client's; with `names`, only those inputs."""
    types = need("tinker", extra="tinker").types
    inputs = {}
    for key, value in datum.loss_fn_inputs.items():
        if names is None or key in names:
            array = value.to_numpy()
            inputs[key] = types.TensorData(data=array.ravel().tolist(), dtype=value.dtype, shape=list(array.shape))
    return types.Datum(model_input=types.ModelInput.from_ints(datum.model_input.to_ints()), loss_fn_inputs=inputs)


def _output(result: tinker.ForwardBackwardOutput) -> ForwardBackwardOutput:
    outputs, metrics = result.loss_fn_outputs, dict(result.metrics or {})
    if "loss:sum" not in metrics:  # SkyRL reports the parts alone
        if not all("elementwise_loss" in found for found in outputs):
            raise BackendError("the server reports no loss, so training could not be watched; use another server")
        metrics["loss:sum"] = float(sum(sum(found["elementwise_loss"].data) for found in outputs))
    logprobs = [list(found["logprobs"].data) if "logprobs" in found else [] for found in outputs]
    return ForwardBackwardOutput(metrics=metrics, logprobs=logprobs)


def _samples(response: tinker.SampleResponse) -> SampleOutput:
    return SampleOutput(
        sequences=[
            SampledSequence(tokens=list(s.tokens), logprobs=list(s.logprobs or []), stop_reason=s.stop_reason)
            for s in response.sequences
        ],
        prompt_logprobs=response.prompt_logprobs,
        topk_prompt_logprobs=response.topk_prompt_logprobs,
    )
