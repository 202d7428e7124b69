"""An OpenAI-compatible endpoint over any sampling client.

In: HTTP requests. Out: completions of the models that stand here, sampled and rendered exactly as training does it. A
caller with a session key (in the path, in `X-Session-ID` or as `session_id`) has its tokens captured, so that a harness
that only speaks HTTP can be trained.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from evsys_sdk.errors import BackendError, BackendUnavailable, EvsysError, closest
from evsys_sdk.protocols import Renderer, Turn
from evsys_sdk.serving import http
from evsys_sdk.serving.capture import Capture
from evsys_sdk.serving.http import Answer, ApiError, Request, json_answer
from evsys_sdk.serving.replies import Choice, Reply
from evsys_sdk.serving.request import ChatRequest, read_request
from evsys_sdk.serving.tools import read_calls, shown, shows_tools
from evsys_sdk.surface import ModelInput, SampledSequence, SamplingClient, text_of

_SESSION = re.compile(r"/session/([^/]+)(/.*)")
DEFAULT_MAX_TOKENS = 1024
IN_FLIGHT = 1024
WORKERS = 4
"""Threads that read requests and write answers."""
BYTES_PER_TOKEN = 64
"""Of a request, for each token of context: prose has 4 to 5, JSON with every letter escaped about 30."""
SMALLEST_BODY_LIMIT = 2**20
MOST_TOKENS = 2**16
"""Written at once by a model whose context length is not known."""


@dataclass(slots=True, kw_only=True)
class ServedModel:
    """Weights, and how they are spoken to."""

    sampler: SamplingClient
    renderer: Renderer
    context_length: int | None = None
    """Tokens of prompt and completion together; None leaves the judgement to the sampler."""
    created: int = field(default_factory=lambda: int(time.time()))
    template_shows_tools: bool = field(init=False)

    def __post_init__(self) -> None:
        self.template_shows_tools = shows_tools(self.renderer)


class Endpoint:
    """Answers requests. `models` may change while it runs: a policy that trains is put in anew at every step."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        *,
        capture: Capture | None = None,
        default_max_tokens: int = DEFAULT_MAX_TOKENS,
        in_flight: int = IN_FLIGHT,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.models = dict(models)
        self.capture = capture
        self._default_max_tokens, self._in_flight, self._clock = default_max_tokens, in_flight, clock
        self._under_way = 0
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="evsys-endpoint")

    async def __call__(self, request: Request) -> Answer:
        session, path = _split_session(request.path)
        route = f"{request.method} {path.rstrip('/')}"
        if route == "POST /v1/chat/completions":
            return await self._chat(request, session)
        if route == "GET /health":
            return json_answer({"status": "ok", "models": list(self.models), "under_way": self._under_way})
        if route == "GET /v1/models":
            return json_answer({"object": "list", "data": [self._card(name) for name in self.models]})
        if route.startswith("GET /v1/models/"):
            name = unquote(route.removeprefix("GET /v1/models/"))
            self._model(name)
            return json_answer(self._card(name))
        raise ApiError(404, f"there is no {route}; there are /v1/chat/completions, /v1/models and /health")

    def _card(self, name: str) -> dict[str, object]:
        model = self.models[name]
        return {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "evsys",
            "max_model_len": model.context_length,
        }

    def _model(self, name: str) -> ServedModel:
        if name not in self.models:
            near = closest(name, self.models)
            hint = f"; closest: {near}" if near else ""
            known = ", ".join(self.models)
            raise ApiError(404, f"no model {name!r} here{hint}; known: {known}", code="model_not_found", param="model")
        return self.models[name]

    async def _chat(self, request: Request, session: str | None) -> Answer:
        body, model, prompt = await self._in_worker(self._read_chat, request.body)
        session = session or request.headers.get("x-session-id") or body.session_id
        sampling = body.sampling(self._room(model, prompt, body))
        with self._place(), self._told_of_failure(session):
            output = await model.sampler.sample(ModelInput.from_ints(prompt), body.n or 1, sampling)
            _check(output.sequences, body.n or 1)
        reply, answer = await self._in_worker(self._write_chat, model, body, prompt, output.sequences)
        self._remember(session, model, reply)
        return answer

    async def _in_worker[T](self, work: Callable[..., T], *arguments: Any) -> T:
        """On a thread: what takes long in a large request must not keep other callers waiting."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, work, *arguments)

    def _read_chat(self, body: bytes) -> tuple[ChatRequest, ServedModel, list[int]]:
        request = read_request(body)
        model = self._model(request.model)
        return request, model, self._prompt(model, request)

    def _write_chat(
        self, model: ServedModel, body: ChatRequest, prompt: list[int], sequences: list[SampledSequence]
    ) -> tuple[Reply, Answer]:
        reply = Reply(
            id=f"chatcmpl-{secrets.token_hex(12)}",
            created=int(self._clock()),
            request=body,
            prompt=prompt,
            choices=[self._choice(model, body, sequence) for sequence in sequences],
            tokenizer=model.renderer.tokenizer,
        )
        return reply, reply.answer()

    def body_bytes(self) -> int:
        """How long a request may be: no text that fits the models here is longer."""
        lengths = [model.context_length for model in self.models.values()]
        known = [length for length in lengths if length is not None]
        if not known or len(known) < len(lengths):
            return http.BODY_BYTES
        return min(http.BODY_BYTES, max(SMALLEST_BODY_LIMIT, max(known) * BYTES_PER_TOKEN))

    def _prompt(self, model: ServedModel, body: ChatRequest) -> list[int]:
        try:
            messages = shown(body.chat(), body.offered_tools, by_template=model.template_shows_tools)
            return model.renderer.prompt(messages)
        except EvsysError as exc:
            raise ApiError(400, str(exc), param="messages") from exc

    def _room(self, model: ServedModel, prompt: list[int], body: ChatRequest) -> int:
        """Tokens that may be written: as many as asked for, and no more than fit."""
        wanted = body.wanted_tokens or self._default_max_tokens
        if model.context_length is None:
            return min(wanted, MOST_TOKENS)
        if len(prompt) >= model.context_length:
            raise ApiError(
                400,
                f"This model's maximum context length is {model.context_length} tokens; the messages came to "
                f"{len(prompt)}. Shorten them.",
                param="messages",
                code="context_length_exceeded",
            )
        return min(wanted, model.context_length - len(prompt))

    @contextmanager
    def _place(self) -> Iterator[None]:
        """One of the places under way; without one the caller is to come again."""
        if self._under_way >= self._in_flight:
            message = f"{self._in_flight} requests are under way already; try again"
            raise ApiError(429, message, code="rate_limit_exceeded", wait=1)
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    @contextmanager
    def _told_of_failure(self, session: str | None) -> Iterator[None]:
        """A sampler that breaks is a 5xx, and the session remembers it: it is no doing of the model."""
        try:
            yield
        except Exception as exc:
            message = str(exc) if isinstance(exc, EvsysError) else f"{type(exc).__name__}: {exc}"
            if self.capture is not None and session:
                self.capture.add_error(session, message)
            status = 503 if isinstance(exc, BackendUnavailable | OSError) else 500
            raise ApiError(status, f"the sampler failed: {message}") from exc

    def _choice(self, model: ServedModel, body: ChatRequest, sequence: SampledSequence) -> Choice:
        content, calls = read_calls(text_of(sequence.tokens, model.renderer.tokenizer), body.offered_tools)
        return Choice(sequence=sequence, content=content, calls=calls)

    def _remember(self, session: str | None, model: ServedModel, reply: Reply) -> None:
        if self.capture is None or not session:
            return
        for choice in reply.choices:
            turn = Turn(
                prompt_tokens=reply.prompt,
                completion_tokens=choice.sequence.tokens,
                logprobs=choice.sequence.logprobs,
                text=text_of(choice.sequence.tokens, model.renderer.tokenizer),
            )
            self.capture.add(session, turn)


def _split_session(path: str) -> tuple[str | None, str]:
    """`/session/<key>/v1/...` as the key and the rest."""
    found = _SESSION.fullmatch(path)
    return (unquote(found[1]), found[2]) if found else (None, path)


def _check(sequences: list[SampledSequence], count: int) -> None:
    if len(sequences) != count:
        raise BackendError(f"{count} completions were asked for and {len(sequences)} came")
    for sequence in sequences:
        if len(sequence.tokens) != len(sequence.logprobs):
            raise BackendError(f"the sampler gave {len(sequence.tokens)} tokens with {len(sequence.logprobs)} logprobs")
        if any(math.isnan(logprob) for logprob in sequence.logprobs):
            raise BackendError("the sampler gave a log probability that is not a number: have the weights diverged?")
