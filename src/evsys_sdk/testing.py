"""Stand-ins for tests, ours and yours: a model that says what it is told, a backend that writes down what it is asked.

In: answers, or another backend. Out: objects that pass for the real thing, with real tokens. Nothing in the SDK
imports this module.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from evsys_sdk.backends.mock import MockBackend
from evsys_sdk.backends.mock_tokenizer import ByteTokenizer
from evsys_sdk.config.models import ModelConfig
from evsys_sdk.data.stores import InMemoryDataStore
from evsys_sdk.errors import BackendError, shorten
from evsys_sdk.protocols import RunContext
from evsys_sdk.surface import ModelInput, SampledSequence, SampleOutput, SamplingParams

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
class Event:
    """Something that happened to a call of the training surface."""

    what: Literal["submitted", "awaited", "answered", "failed"]
    call: str
    """The method's name, such as `forward_backward`."""
    number: int
    """Which call it was, from 0; the same for all events of one call."""
    args: tuple[Any, ...] = ()
    """Positional then keyword arguments; only with `submitted`."""


@dataclass(slots=True)
class RecordingBackend:
    """Passes every call on to another backend, by default the mock, and writes down when it was made and awaited."""

    inner: Any = field(default_factory=MockBackend)
    events: list[Event] = field(default_factory=list)
    seconds_inside: float = 0.0
    """Time spent in the other backend's calls."""
    _calls: int = 0

    @property
    def name(self) -> str:
        return str(self.inner.name)

    def prepare(self, *, model: Any, run_dir: Path) -> dict[str, Any]:
        handles = self.inner.prepare(model=model, run_dir=run_dir)
        return {**handles, "service": _Recorded(handles["service"], self)}

    def teardown(self, handles: dict[str, Any]) -> None:
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
    """A log store that keeps what it is told."""

    metrics: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """(step, metrics), in order."""
    hparams: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)

    def log_scalar(self, name: str, value: float, step: int) -> None:
        self.metrics.append((step, {name: value}))

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.metrics.append((step, dict(metrics)))

    def log_hyperparams(self, hparams: dict[str, Any]) -> None:
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


class _Recorded:
    """A service or client whose calls are written down; what it hands out is recorded too."""

    def __init__(self, real: Any, book: RecordingBackend):
        self._real, self._book = real, book

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if not callable(value) or name == "get_tokenizer":
            return value
        return lambda *args, **kwargs: self._call(name, value, args, kwargs)

    def _call(self, name: str, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _RecordedAnswer:
        number, self._book._calls = self._book._calls, self._book._calls + 1
        every = (*args, *kwargs.values())
        self._book.events.append(Event(what="submitted", call=name, number=number, args=every))
        answer = self._book.timed(lambda: method(*args, **kwargs))
        return _RecordedAnswer(answer, self._book, name, number)


@dataclass(slots=True, eq=False)
class _RecordedAnswer:
    answer: Awaitable[Any]
    book: RecordingBackend
    call: str
    number: int

    def __await__(self) -> Generator[Any, Any, Any]:
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
        self.book.events.append(Event(what=what, call=self.call, number=self.number))
