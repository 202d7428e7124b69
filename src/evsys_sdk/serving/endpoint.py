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
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import unquote

from evsys_engine.http import HttpRequest, HttpResponse, json_response
from evsys_engine.types import BadRequest
from evsys_sdk.errors import BackendError, BackendUnavailable, EvsysError, closest
from evsys_sdk.protocols import Renderer, Turn
from evsys_sdk.serving.admin import PREFIX, ModelAdmin
from evsys_sdk.serving.completions import CompletionReply, complete
from evsys_sdk.serving.replies import Choice, Reply
from evsys_sdk.serving.request import ApiError, ChatRequest, CompletionRequest, grammar_of, read_chat, read_completion
from evsys_sdk.serving.tools import OPEN, read_calls, shown, shows_tools
from evsys_sdk.training_api import ModelInput, SampledSequence, SampleOutput, SamplingClient, text_of

# What each session made the model read and write, token by token.
#
# In: turns as the endpoint samples them, under the session key that the caller sent. Out: `take(session)`, the turns
# to train on. A failure of the sampler is kept too: the harness may swallow it and continue, and what it then does says
# nothing about the model.


@dataclass(slots=True)
class _Session:
    turns: list[Turn] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Capture:
    """Turns by session. The code that gives out a session key takes its turns, or they stay in memory."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._lock = threading.Lock()  # the endpoint may run on another thread

    def add(self, session: str, turn: Turn) -> None:
        with self._lock:
            self._sessions.setdefault(session, _Session()).turns.append(turn)

    def add_error(self, session: str, error: str) -> None:
        with self._lock:
            self._sessions.setdefault(session, _Session()).errors.append(error)

    def errors(self, session: str) -> list[str]:
        """Why the model could not answer this session, each time it could not; to be asked before `take`."""
        with self._lock:
            found = self._sessions.get(session)
            return list(found.errors) if found else []

    def take(self, session: str) -> list[Turn]:
        """The session's turns, in order, with the exact tokens and logprobs; the session is forgotten."""
        with self._lock:
            found = self._sessions.pop(session, None)
        return found.turns if found else []

    def sessions(self) -> list[str]:
        """Keys of the sessions that have not been taken yet."""
        with self._lock:
            return list(self._sessions)


_SESSION = re.compile(r"/session/([^/]+)(/.*)")
"""`/session/<key>/v1/...`."""
DEFAULT_MAX_TOKENS = 1024
DEFAULT_COMPLETION_TOKENS = 16
"""Of /v1/completions, as OpenAI has it."""
ROUTES = "/v1/chat/completions, /v1/completions, /v1/models and /health"
IN_FLIGHT = 1024
WORKERS = 4
"""Threads that read requests and write answers."""
LARGE_BYTES, LARGE_WORKERS = 2**16, 2
"""Longer requests, which take seconds to tokenise, are read by separate threads: a few of them must not keep short
ones waiting."""
GRAMMAR_WORKERS = 8
"""Threads that wait for grammars to be compiled, each in a process: a small one does not queue behind a few large."""
BYTES_PER_TOKEN = 64
"""Of a request, for each token of context: prose has 4 to 5, JSON with every letter escaped about 30."""
BODY_BYTES = 32 * 2**20
"""Of one request; less where the served models' context lengths are known."""
SMALLEST_BODY_LIMIT = 2**20
MOST_TOKENS = 2**16
"""Written at once by a model whose context length is not known; its requests are as long as for this one."""
MOST_PROMPT_TOKENS = 2**18
"""Read by a model whose context length is not known."""


@dataclass(slots=True, kw_only=True)
class ServedModel:
    """Weights, and how they are spoken to."""

    sampler: SamplingClient
    renderer: Renderer
    context_length: int | None = None
    """Tokens of prompt and completion together; None leaves the judgement to the sampler."""
    created: int = field(default_factory=lambda: int(time.time()))
    digest: str | None = None
    """sha256 of the weights, as replies carry it (`system_fingerprint`); None where it is not known."""
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
        aliases: Mapping[str, str] | None = None,
        admin: ModelAdmin | None = None,
    ) -> None:
        self.models = dict(models)
        self.aliases = dict(aliases or {})
        """Other names of models; one that moves keeps its callers."""
        self.admin = admin
        self.capture = capture
        self._default_max_tokens, self._in_flight, self._clock = default_max_tokens, in_flight, clock
        # Changed on the event loop alone, so it needs no lock.
        self._under_way = 0
        self._begun: set[asyncio.Event] = set()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="evsys-endpoint")
        self._large_workers = ThreadPoolExecutor(LARGE_WORKERS, thread_name_prefix="evsys-endpoint-large")
        self._grammar_workers = ThreadPoolExecutor(GRAMMAR_WORKERS, thread_name_prefix="evsys-endpoint-grammar")

    async def __call__(self, request: HttpRequest) -> HttpResponse:
        # Matched before it is unquoted: a key may hold a slash, sent as %2F.
        found = _SESSION.fullmatch(request.path)
        session, path = (unquote(found[1]), found[2]) if found else (None, request.path)
        route = f"{request.method} {path.rstrip('/')}"
        if path.startswith(PREFIX):
            if self.admin is None:
                raise ApiError(404, "this server has no admin routes; start it with --admin-key-env VAR")
            return await self.admin.answer(self, request)
        if route in ("POST /v1/chat/completions", "POST /v1/completions"):
            ended = asyncio.Event()
            self._begun.add(ended)
            try:
                answer = self._chat if route.endswith("/chat/completions") else self._complete
                return await answer(request, session)
            finally:
                self._begun.discard(ended)
                ended.set()
        if route == "GET /health":
            return json_response({"status": "ok", "models": self._names(), "under_way": self._under_way})
        if route == "GET /v1/models":
            return json_response({"object": "list", "data": [self._card(name) for name in self._names()]})
        if route.startswith("GET /v1/models/"):
            name = unquote(route.removeprefix("GET /v1/models/"))
            self._model(name)
            return json_response(self._card(name))
        raise ApiError(404, f"there is no {route}; there are {ROUTES}")

    async def wait_for_requests(self) -> None:
        """Until every request that has begun by now has ended."""
        for ended in list(self._begun):
            await ended.wait()

    def _names(self) -> list[str]:
        return [*self.aliases, *self.models]

    def _card(self, name: str) -> dict[str, object]:
        model = self._model(name)
        card: dict[str, object] = {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "evsys",
            "max_model_len": model.context_length,
        }
        more = {"root": self.aliases.get(name), "digest": model.digest}
        return card | {key: value for key, value in more.items() if value is not None}

    def _model(self, name: str) -> ServedModel:
        name = self.aliases.get(name, name)
        if name not in self.models:
            near = closest(name, self._names())
            hint = f"; closest: {near}" if near else ""
            known = ", ".join(self._names())
            raise ApiError(404, f"no model {name!r} here{hint}; known: {known}", code="model_not_found", param="model")
        return self.models[name]

    async def _chat(self, request: HttpRequest, session: str | None) -> HttpResponse:
        body, model, prompt = await self._read(self._read_chat, request.body)
        grammar = None
        if body.is_constrained:
            loop = asyncio.get_running_loop()
            grammar = await loop.run_in_executor(self._grammar_workers, self._grammar, model, body)
        session = session or request.headers.get("x-session-id") or body.session_id
        room = self._room(model, prompt, body.wanted_tokens or self._default_max_tokens, "messages")
        sampling = body.sampling(room, grammar)
        # `_place` is the outer one: a 429 is no failure of the sampler, and the session must not remember it.
        with self._place(), self._failures_answered(session):
            output = await self._sampler(model).sample(ModelInput.from_ints(prompt), body.n or 1, sampling)
            _check(output.sequences, body.n or 1)
        reply, answer = await self._in_worker(self._write_chat, model, body, prompt, output.sequences)
        # After the answer is written: a caller that gets an error has no turn to train on.
        for choice in reply.choices:
            self._capture(session, model, reply.prompt, choice.sequence)
        return answer

    async def _read[T](self, read: Callable[[bytes], T], body: bytes) -> T:
        workers = self._large_workers if len(body) > LARGE_BYTES else self._workers
        return await asyncio.get_running_loop().run_in_executor(workers, read, body)

    async def _in_worker[**P, T](self, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """On a thread: what takes long in a large request must not keep other callers waiting."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, partial(work, *arguments, **options))

    def _sampler(self, model: ServedModel) -> Any:
        """The model's sampler; one that computes within the call and not while it is awaited does so on a thread."""
        is_blocking = getattr(model.sampler, "computes_in_call", False)
        return _OnThread(model.sampler, self._workers) if is_blocking else model.sampler

    def _read_chat(self, body: bytes) -> tuple[ChatRequest, ServedModel, list[int]]:
        request = read_chat(body)
        model = self._model(request.model)
        return request, model, self._prompt(model, request)

    def _grammar(self, model: ServedModel, request: ChatRequest) -> str | None:
        """What the completion has to look like; a 400 where the sampler cannot be held to it."""
        asked = "tool_choice" if request.forced_tools is not None else "response_format"
        if not getattr(model.sampler, "takes_grammar", False):
            said = f"{asked} cannot be honoured by this model's backend, which samples elsewhere: use the backend local"
            hint = "use auto or none" if asked == "tool_choice" else "say it in the prompt"
            raise ApiError(400, f"{said}, or {hint}", param=asked, code="unsupported_value")
        return grammar_of(request)

    def _write_chat(
        self, model: ServedModel, body: ChatRequest, prompt: list[int], sequences: list[SampledSequence]
    ) -> tuple[Reply, HttpResponse]:
        reply = Reply(
            id=f"chatcmpl-{secrets.token_hex(12)}",
            created=int(self._clock()),
            request=body,
            prompt=prompt,
            choices=[self._choice(model, body, sequence) for sequence in sequences],
            tokenizer=model.renderer.tokenizer,
            digest=model.digest,
        )
        return reply, reply.answer()

    def body_bytes(self) -> int:
        """How long a request may be: no text that fits the models here is longer."""
        longest = max((model.context_length or MOST_TOKENS for model in self.models.values()), default=MOST_TOKENS)
        return min(BODY_BYTES, max(SMALLEST_BODY_LIMIT, longest * BYTES_PER_TOKEN))

    def _prompt(self, model: ServedModel, body: ChatRequest) -> list[int]:
        try:
            messages = shown(body.chat(), body.offered_tools, by_template=model.template_shows_tools)
            return model.renderer.prompt(messages)
        except EvsysError as exc:
            raise ApiError(400, str(exc), param="messages") from exc

    def _room(self, model: ServedModel, prompt: list[int], wanted: int, param: str) -> int:
        """Tokens that may be written: as many as asked for, and no more than fit."""
        length = model.context_length or MOST_PROMPT_TOKENS
        if len(prompt) >= length:
            raise ApiError(
                400,
                f"This model's maximum context length is {length} tokens; the {param} has {len(prompt)}. Shorten it.",
                param=param,
                code="context_length_exceeded",
            )
        return min(wanted, MOST_TOKENS if model.context_length is None else length - len(prompt))

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
    def _failures_answered(self, session: str | None) -> Iterator[None]:
        """A sampler that breaks is a 5xx, and the session remembers it: it is no doing of the model. What the sampler
        refuses is the caller's: a grammar that is too much for its parser, for instance."""
        try:
            yield
        except Exception as exc:
            for refused in (exc, exc.__cause__):
                if isinstance(refused, BadRequest):
                    raise ApiError(400, str(refused)) from exc
            message = str(exc) if isinstance(exc, EvsysError) else f"{type(exc).__name__}: {exc}"
            if self.capture is not None and session:
                self.capture.add_error(session, message)
            status = 503 if isinstance(exc, BackendUnavailable | OSError) else 500
            raise ApiError(status, f"the sampler failed: {message}") from exc

    def _choice(self, model: ServedModel, body: ChatRequest, sequence: SampledSequence) -> Choice:
        text = text_of(sequence.tokens, model.renderer.tokenizer)
        # An answer in the form that was asked for may look like a call without tags, and is none.
        is_answer = body.answer_schema is not None and body.forced_tools is None and not text.startswith(OPEN)
        content, calls = (text, []) if is_answer else read_calls(text, body.offered_tools)
        return Choice(sequence=sequence, content=content, calls=calls)

    async def _complete(self, request: HttpRequest, session: str | None) -> HttpResponse:
        body, model, prompts = await self._read(self._read_completion, request.body)
        session = session or request.headers.get("x-session-id") or body.session_id
        wanted = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        rooms, sampler = [self._room(model, prompt, wanted, "prompt") for prompt in prompts], self._sampler(model)
        with self._place(), self._failures_answered(session):
            found = await asyncio.gather(
                *(complete(sampler, body, prompt, room) for prompt, room in zip(prompts, rooms, strict=True))
            )
            texts = [text for group in found for text in group]
            _check([text.sequence for text in texts], len(prompts) * (body.n or 1))
        reply = CompletionReply(
            id=f"cmpl-{secrets.token_hex(12)}",
            created=int(self._clock()),
            request=body,
            prompts=prompts,
            completions=texts,
            tokenizer=model.renderer.tokenizer,
            digest=model.digest,
        )
        answer = await self._in_worker(reply.answer)
        for text in texts:
            self._capture(session, model, text.prompt, text.sequence)
        return answer

    def _read_completion(self, body: bytes) -> tuple[CompletionRequest, ServedModel, list[list[int]]]:
        request = read_completion(body)
        model = self._model(request.model)
        tokenizer = model.renderer.tokenizer
        prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompts]
        if not all(prompts):
            raise ApiError(400, "prompt: it is empty; give at least one token", param="prompt")
        size = getattr(tokenizer, "vocab_size", None)
        wrong = [token for prompt in prompts for token in prompt if token < 0 or (size and token >= size)]
        if wrong:
            raise ApiError(400, f"prompt: {wrong[0]} is no token of this model, which has {size}", param="prompt")
        if request.echo and request.logprobs is not None and sum(map(len, prompts)) > MOST_TOKENS:
            said = (
                f"prompt: echo with logprobs takes {MOST_TOKENS} tokens at once; send the prompts in several requests"
            )
            raise ApiError(400, said, param="prompt")
        return request, model, prompts

    def _capture(self, session: str | None, model: ServedModel, prompt: list[int], written: SampledSequence) -> None:
        if self.capture is None or not session or not written.tokens:
            return
        turn = Turn(
            prompt_tokens=prompt,
            completion_tokens=written.tokens,
            logprobs=written.logprobs,
            text=text_of(written.tokens, model.renderer.tokenizer),
        )
        self.capture.add(session, turn)


@dataclass(frozen=True, slots=True)
class _OnThread:
    """A sampler whose calls are made on a thread."""

    sampler: SamplingClient
    workers: ThreadPoolExecutor

    async def sample(self, *arguments: Any, **options: Any) -> SampleOutput:
        call = partial(self.sampler.sample, *arguments, **options)
        # The call blocks and gives an awaitable, which belongs to the event loop: only the call runs on the thread.
        return await (await asyncio.get_running_loop().run_in_executor(self.workers, call))


def _check(sequences: list[SampledSequence], count: int) -> None:
    if len(sequences) != count:
        raise BackendError(f"{count} completions were asked for and {len(sequences)} came")
    for sequence in sequences:
        if len(sequence.tokens) != len(sequence.logprobs):
            raise BackendError(f"the sampler gave {len(sequence.tokens)} tokens with {len(sequence.logprobs)} logprobs")
        if any(math.isnan(logprob) for logprob in sequence.logprobs):
            raise BackendError("the sampler gave a log probability that is not a number: have the weights diverged?")
