"""For tests, ours and yours: a scripted model, a backend that writes down what it is asked, a check of a custom loss.

In: answers, or another backend. Out: objects that pass for the real thing, with real tokens. Nothing in the SDK
imports this module.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from evsys_sdk.backends.mock import MockBackend
from evsys_sdk.backends.mock_tokenizer import ByteTokenizer
from evsys_sdk.config.schema import ModelConfig
from evsys_sdk.data.stores import InMemoryDataStore
from evsys_sdk.errors import BackendError, need, shorten
from evsys_sdk.protocols import RunContext
from evsys_sdk.training.chat_data import chat_data
from evsys_sdk.training.rendering import ChatRenderer
from evsys_sdk.training_api import (
    AdamParams,
    Datum,
    LossCallable,
    ModelInput,
    SampledSequence,
    SampleOutput,
    SamplingParams,
)

Reply = str | Exception | Sequence[str | Exception]
"""What to say; a sequence is gone through sample by sample, over and over; an exception is raised."""


class ScriptedModel:
    """A sampling client that answers from a script: by the last user message, or whatever a function makes of it."""

    def __init__(self, script: Mapping[str, Reply] | Callable[[str], Reply], *, default: Reply | None = None):
        self.script, self.default = script, default
        self.tokenizer = ByteTokenizer()
        self.prompts: list[str] = []
        """Every prompt that was sampled from, as text."""

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        *,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> Awaitable[SampleOutput]:
        self.prompts.append(self.tokenizer.decode(prompt.tokens))
        return self._sample(prompt, num_samples, sampling_params, include_prompt_logprobs)

    async def _sample(
        self, prompt: ModelInput, count: int, params: SamplingParams, include_prompt_logprobs: bool
    ) -> SampleOutput:
        reply = self._reply(self._last_user_message(prompt))
        replies: Sequence[str | Exception] = [reply] if isinstance(reply, str | Exception) else reply
        return SampleOutput(
            sequences=[self._sequence(replies[index % len(replies)], params) for index in range(count)],
            prompt_logprobs=await self.compute_logprobs(prompt) if include_prompt_logprobs else None,
        )

    async def compute_logprobs(self, prompt: ModelInput) -> list[float | None]:
        """The model is sure of everything."""
        return [None, *[0.0] * (prompt.length - 1)]

    def _reply(self, message: str) -> Reply:
        if callable(self.script):
            return self.script(message)
        reply = self.script.get(message, self.default)
        if reply is None:
            raise BackendError(f"the script has no answer to {shorten(message)!r} and no default")
        return reply

    def _last_user_message(self, prompt: ModelInput) -> str:
        text = self.tokenizer.decode(prompt.tokens)
        asked = text.rpartition("<|im_start|>user\n")[2]
        return asked.partition("<|im_end|>")[0]

    def _sequence(self, reply: str | Exception, params: SamplingParams) -> SampledSequence:
        if isinstance(reply, Exception):
            raise reply
        ends = [reply.find(stop) for stop in params.stop if isinstance(stop, str) and stop in reply]
        tokens = self.tokenizer.encode(reply[: min(ends)] if ends else reply)
        if not ends:
            tokens.append(self.tokenizer.eos_token_id)
        reason: Literal["stop", "length"] = "stop" if len(tokens) <= params.max_tokens else "length"
        tokens = tokens[: params.max_tokens]
        return SampledSequence(tokens=tokens, logprobs=[0.0] * len(tokens), stop_reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """Something that happened to a call of the training surface."""

    what: Literal["submitted", "awaited", "answered", "failed"]
    call: str
    """The method's name, such as `forward_backward`."""
    number: int
    """Which call it was, from 0; the same for all events of one call."""
    args: tuple[object, ...] = ()
    """Positional then keyword arguments; only with `submitted`."""


@dataclass(slots=True)
class RecordingBackend:
    """Passes every call on to another backend, by default the mock, and writes down when it was made and awaited."""

    inner: Any = field(default_factory=MockBackend)
    events: list[RecordedCall] = field(default_factory=list)
    seconds_inside: float = 0.0
    """Time spent in the other backend's calls."""
    _calls: int = 0

    @property
    def name(self) -> str:
        return str(self.inner.name)

    def prepare(self, *, model: object, run_dir: Path) -> dict[str, object]:
        handles = self.inner.prepare(model=model, run_dir=run_dir)
        return {**handles, "service": _Recorded(handles["service"], self)}

    def teardown(self, handles: dict[str, object]) -> None:
        self.inner.teardown(handles)

    def order(self, *calls: str) -> list[str]:
        """What happened to calls of these names (all, if none is named), as `submitted forward_backward` and so on."""
        return [f"{event.what} {event.call}" for event in self.events if not calls or event.call in calls]

    def timed[T](self, work: Callable[[], T]) -> T:
        began = time.perf_counter()
        try:
            return work()
        finally:
            self.seconds_inside += time.perf_counter() - began


@dataclass(slots=True)
class MemoryLog:
    """A log store that keeps what it is given."""

    metrics: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """(step, metrics), in order."""
    hparams: dict[str, object] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)

    def log_scalar(self, name: str, value: float, step: int) -> None:
        self.metrics.append((step, {name: value}))

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.metrics.append((step, dict(metrics)))

    def log_hyperparams(self, hparams: dict[str, object]) -> None:
        self.hparams.update(hparams)

    def log_artifact(self, name: str, path: str) -> None:
        self.artifacts[name] = path

    def close(self) -> None: ...

    def curve(self, name: str) -> list[float]:
        """The values of one metric, in order."""
        return [metrics[name] for _, metrics in self.metrics if name in metrics]


def training_context(
    output_dir: Path, rows: list[dict[str, Any]], *, backend: Any = None, model_name: str = "mock", **given: Any
) -> RunContext:
    """A context to hand to an algorithm's `train`, on the mock backend unless another is given."""
    backend = backend or MockBackend()
    handles = backend.prepare(model=ModelConfig(name=model_name), run_dir=output_dir)
    extras = {"train_rows": rows, "n_train_rows": len(rows), "backend_handles": handles, "model_name": model_name}
    fields: dict[str, Any] = {"run_id": "test", "config": None, "log_store": MemoryLog(), **given}
    return RunContext(output_dir=output_dir, backend=backend, data_store=InMemoryDataStore(), extras=extras, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCheck:
    """What `check_loss` measured."""

    loss: float
    metrics: dict[str, float]
    gradient_error: float
    """The largest difference between autograd's slope of a logprob and the measured one, relative to the largest."""
    expected_change: float
    """What a small step of the optimiser should do to the loss, by the gradient's norm."""
    measured_change: float
    """What that step did."""
    adds_up: bool
    """Whether the loss of all data is the sum of the losses of its parts, as grad_accumulation takes for granted."""


def check_loss(
    loss_fn: LossCallable,
    data: Sequence[Datum | dict[str, Any]],
    *,
    backend: Any = None,
    model_name: str = "mock",
    lora_rank: int = 4,
    keep_together: int = 1,
    tolerance: float = 0.05,
) -> LossCheck:
    """Check the gradient of a custom loss on a backend, by default the mock; an AssertionError says what is wrong.

    `data` are `Datum`s, or chats as rows. Looked at are: what the loss returns, that it returns the same again, its
    slopes by autograd against differences of the loss itself, and that a small optimiser step changes the loss by what
    the gradient foretells. Needs torch (extra `local`).
    """
    import asyncio
    import tempfile

    backend = backend or MockBackend()
    with tempfile.TemporaryDirectory(prefix="evsys-check-loss-") as folder:
        handles = backend.prepare(model=ModelConfig(name=model_name), run_dir=Path(folder))
        try:
            service = handles["service"]
            made = _data_of(data, service)
            client_check = _check_on_backend(loss_fn, made, service, lora_rank)
            loss, metrics, logprobs, expected, measured = asyncio.run(client_check)
        finally:
            backend.teardown(handles)
    error = _slope_error(loss_fn, made, logprobs)
    assert error <= tolerance, (
        f"autograd's slopes differ from the measured ones by {error:.1%}: the loss uses something that torch cannot "
        "differentiate (detach, item, numpy, round), or counts a logprob that it should not"
    )
    assert abs(measured - expected) <= tolerance * abs(expected) + 1e-6 * abs(loss), (
        f"a small step should change the loss by {expected:.3g} and changed it by {measured:.3g}"
    )
    parts = [made[i : i + keep_together] for i in range(0, len(made), keep_together)]
    places = [logprobs[i : i + keep_together] for i in range(0, len(made), keep_together)]
    pieces = sum(_loss_at(loss_fn, *each) for each in zip(parts, places, strict=True))
    adds_up = abs(pieces - loss) <= 1e-4 * max(1.0, abs(loss))
    return LossCheck(
        loss=loss,
        metrics=metrics,
        gradient_error=error,
        expected_change=expected,
        measured_change=measured,
        adds_up=adds_up,
    )


def _data_of(data: Sequence[Datum | dict[str, Any]], service: Any) -> list[Datum]:
    renderer = ChatRenderer(service.get_tokenizer())
    rows = [row for row in data if not isinstance(row, Datum)]
    given = [row for row in data if isinstance(row, Datum)]
    if rows and given:
        raise TypeError("check_loss takes data or rows, not both")
    return given or chat_data(rows, renderer, algorithm="check_loss", max_length=2048).data


async def _check_on_backend(
    loss_fn: LossCallable, data: list[Datum], service: Any, rank: int
) -> tuple[float, dict[str, float], list[Any], float, float]:
    """Loss, metrics, logprobs per datum, and the change of the loss by a small step: foretold and measured."""
    torch = need("torch", extra="local")
    client = await service.create_training_client(rank=rank, seed=0)
    first = await client.forward_backward_custom(data, loss_fn)
    norm = (await client.optim_step(AdamParams(learning_rate=0.0, beta1=0.0, beta2=0.0))).metrics["grad_norm"]
    loss = first.metrics["loss:sum"]
    assert math.isfinite(loss), (
        f"the loss is {loss}: look for log(0), 0/0 or an overflow of exp; logprobs are at most 0 and may be very low"
    )
    assert math.isfinite(norm), (
        f"the loss is {loss:.3g}, but its gradient's norm is {norm}: look for sqrt, log or a division at 0, also in "
        "the branch of torch.where that is not taken"
    )
    assert norm > 0, "the gradient is zero: the loss does not depend on the logprobs it is given, or has no data"
    # With betas of 0 and an eps far above any gradient, AdamW is gradient descent at the rate learning_rate / eps.
    # The step is to change the loss by as much as 5e-4 more in every logprob would: small enough to be straight, and
    # large enough to be seen in fp32.
    shapes = [datum.loss_fn_inputs["target_tokens"].to_numpy().shape for datum in data]
    logprobs = [torch.tensor(each).reshape(shape) for each, shape in zip(first.logprobs, shapes, strict=True)]
    wanted = 5e-4 * sum(float(slope.abs().sum()) for slope in _slopes(loss_fn, data, logprobs)[1])
    eps, expected = 1e4 * norm, -wanted
    again = await client.forward_backward_custom(data, loss_fn)
    assert again.metrics["loss:sum"] == loss, (
        f"the same data and weights gave {loss} and then {again.metrics['loss:sum']}: the loss keeps something from "
        "call to call, or draws random numbers; make them in build_batch and put them into the data"
    )
    await client.optim_step(AdamParams(learning_rate=eps * wanted / norm**2, beta1=0.0, beta2=0.0, eps=eps))
    after = await client.forward_backward_custom(data, loss_fn)
    metrics = {name: value for name, value in first.metrics.items() if name != "loss:sum"}
    return loss, metrics, logprobs, expected, after.metrics["loss:sum"] - loss


SLOPES_MEASURED = 12
"""Logprobs that are moved by hand; each costs two calls of the loss."""


def _slope_error(loss_fn: LossCallable, data: list[Datum], logprobs: list[Any]) -> float:
    leaves, slopes = _slopes(loss_fn, data, logprobs)
    flat = [(slope.abs().max().item(), index, place) for index, slope in enumerate(slopes) for place in _places(slope)]
    chosen = random.Random(0).sample(flat, min(SLOPES_MEASURED, len(flat)))
    largest, wrong, step = max(top for top, _, _ in flat), 0.0, 1e-4
    for _, index, place in chosen:
        at = [[value.detach().clone() for value in leaves] for _ in range(2)]
        at[0][index][place] += step
        at[1][index][place] -= step
        measured = (_loss_at(loss_fn, data, at[0]) - _loss_at(loss_fn, data, at[1])) / (2 * step)
        wrong = max(wrong, abs(measured - slopes[index][place].item()))
    return wrong / largest if largest else wrong


def _slopes(loss_fn: LossCallable, data: list[Datum], logprobs: list[Any]) -> tuple[list[Any], list[Any]]:
    """The logprobs in double precision, and what autograd says of each."""
    torch = need("torch", extra="local")
    leaves = [each.double().requires_grad_() for each in logprobs]
    loss, _ = loss_fn(data, leaves)
    return leaves, list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


def _places(slope: Any) -> list[tuple[int, ...]]:
    """Where to look: every position, those that pull first."""
    pulling = [tuple(place) for place in slope.nonzero().tolist()]
    still = [tuple(place) for place in (slope == 0).nonzero().tolist()]
    return [*pulling, *still[: max(1, len(pulling))]]


def _loss_at(loss_fn: LossCallable, data: list[Datum], logprobs: list[Any]) -> float:
    loss, _ = loss_fn(data, [each.detach().double().clone().requires_grad_() for each in logprobs])
    return float(loss.detach())


class _Recorded:
    """A service or client whose calls are written down; what it hands out is recorded too."""

    def __init__(self, real: object, book: RecordingBackend):
        self._real, self._book = real, book

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if not callable(value) or name == "get_tokenizer":
            return value
        return lambda *args, **kwargs: self._call(name, value, args, kwargs)

    def _call(self, name: str, method: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> _RecordedAnswer:
        number, self._book._calls = self._book._calls, self._book._calls + 1
        every = (*args, *kwargs.values())
        self._book.events.append(RecordedCall(what="submitted", call=name, number=number, args=every))
        answer = self._book.timed(lambda: method(*args, **kwargs))
        return _RecordedAnswer(answer, self._book, name, number)


@dataclass(slots=True, eq=False)
class _RecordedAnswer:
    answer: Awaitable[object]
    book: RecordingBackend
    call: str
    number: int

    def __await__(self) -> Generator[object, object, object]:
        self._note("awaited")
        began = time.perf_counter()
        try:
            value = yield from self.answer.__await__()
        except Exception:
            self._note("failed")
            raise
        finally:
            self.book.seconds_inside += time.perf_counter() - began
        self._note("answered")
        return _Recorded(value, self.book) if self.call.startswith("create_") else value

    def _note(self, what: Literal["awaited", "answered", "failed"]) -> None:
        self.book.events.append(RecordedCall(what=what, call=self.call, number=self.number))
