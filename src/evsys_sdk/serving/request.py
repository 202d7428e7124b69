"""A request: read, checked, and refused where it asks for what a sampler cannot do.

In: the body of POST /v1/chat/completions or /v1/completions. Out: a `ChatRequest` or a `CompletionRequest`, or a 400
that names the field. Fields that would change the answer and cannot be honoured are refused; others that OpenAI's
clients send (`user`, `store`, ...) are passed over.
"""

from __future__ import annotations

import json
import math
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evsys_sdk.errors import closest
from evsys_sdk.serving.http import ApiError
from evsys_sdk.surface import Messages, SamplingParams, derive_seed

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_CHOICES = 128
MOST_LOGPROBS = 20


class SamplingRequest(BaseModel):
    """What both kinds of request have, as OpenAI documents it, with vLLM's `return_token_ids` and `top_k`."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: str
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    session_id: str | None = None

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    def sampling(self, max_tokens: int, grammar: str | None = None) -> SamplingParams:
        seed = self.seed
        if seed is not None and not 0 <= seed < 2**31:
            seed = derive_seed(seed, "request")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or -1,
            seed=seed,
            stop=tuple(text for text in stop if text),
            grammar=grammar,
        )


class ChatRequest(SamplingRequest):
    """The body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    functions: list[Any] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def named_tool(self) -> str | None:
        """The one function that `tool_choice` names."""
        return str(self.tool_choice["function"]["name"]) if isinstance(self.tool_choice, dict) else None

    @property
    def forced_tools(self) -> list[dict[str, Any]] | None:
        """The functions of which one has to be called; None where the model may also answer in words."""
        if self.named_tool is not None:
            return [tool for tool in self.tools or [] if tool["function"]["name"] == self.named_tool]
        return self.tools if self.tool_choice == "required" else None

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema of an answer in words; None where any text will do."""
        form = self.response_format or {}
        if form.get("type") == "json_object":
            return {"type": "object"}
        return form["json_schema"]["schema"] if form.get("type") == "json_schema" else None

    def chat(self) -> Messages:
        """The messages as renderers take them."""
        return [
            {**message, "role": "system" if message["role"] == "developer" else message["role"]}
            for message in self.messages
        ]


class CompletionRequest(SamplingRequest):
    """The body of POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One for each completion asked for (times `n`)."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


def read_chat(body: bytes) -> ChatRequest:
    """The request in `body`; a 400 when it is none or asks for too much."""
    request = _read(ChatRequest, body)
    _check_messages(request.messages)
    _check_tools(request.tools or [])
    _check_tool_choice(request)
    _check_response_format(request.response_format or {})
    _refuse(
        request,
        top_logprobs=bool(request.top_logprobs),
        functions=bool(request.functions),
    )
    return request


def read_completion(body: bytes) -> CompletionRequest:
    """The request in `body`; a 400 when it is none or asks for too much."""
    request = _read(CompletionRequest, body)
    if len(request.prompts) * (request.n or 1) > MOST_CHOICES:
        said = f"prompt: at most {MOST_CHOICES} completions (prompts times n) can be asked for at once"
        raise ApiError(400, said, param="prompt")
    best_of = request.best_of is not None and request.best_of != (request.n or 1)
    _refuse(request, suffix=bool(request.suffix), best_of=best_of)
    return request


def _read[Body: SamplingRequest](kind: type[Body], body: bytes) -> Body:
    try:
        value = json.loads(body, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as exc:
        raise ApiError(400, f"the body is not JSON: {exc}") from exc
    try:
        return kind.model_validate(value)
    except ValidationError as exc:
        raise _bad_field(exc) from exc


def _finite(text: str) -> float:
    """Python reads NaN and Infinity, and 1e999 as infinity; JSON has none of them."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _bad_field(exc: ValidationError) -> ApiError:
    first = exc.errors()[0]
    place = ".".join(str(part) for part in first["loc"]) or "body"
    return ApiError(400, f"{place}: {first['msg']}", param=place)


def _check_messages(messages: Messages) -> None:
    for index, message in enumerate(messages):
        place, content = f"messages.{index}", message.get("content")
        if message.get("role") not in ROLES:
            raise ApiError(400, f"{place}.role: one of {', '.join(ROLES)} is needed", param=f"{place}.role")
        blocks = isinstance(content, list) and all(isinstance(block, dict) for block in content)
        if not (content is None or isinstance(content, str) or blocks):
            raise ApiError(400, f"{place}.content: text or a list of blocks is needed", param=f"{place}.content")
        _check_blocks(content if isinstance(content, list) else [], f"{place}.content")
        calls = message.get("tool_calls")
        if content is None and not calls:
            raise ApiError(400, f"{place}.content: it is missing", param=f"{place}.content")
        if calls is not None and not (isinstance(calls, list) and all(_is_function(call) for call in calls)):
            raise ApiError(400, f"{place}.tool_calls: a list of functions is needed", param=f"{place}.tool_calls")


def _check_blocks(blocks: list[dict[str, Any]], place: str) -> None:
    """The models here read text: an image or a sound would be dropped without a word."""
    for index, block in enumerate(blocks):
        kind, where = block.get("type", "text"), f"{place}.{index}"
        if kind != "text":
            said = f"{where}: a block of type {kind!r} cannot be shown to a model that reads text: leave it out"
            raise ApiError(400, said, param=where, code="unsupported_value")
        if not isinstance(block.get("text"), str):
            raise ApiError(400, f"{where}.text: text is needed", param=f"{where}.text")


def _check_tools(tools: list[dict[str, Any]]) -> None:
    for index, tool in enumerate(tools):
        if not _is_function(tool):
            raise ApiError(400, f"tools.{index}: only functions with a name can be offered", param=f"tools.{index}")
        if not isinstance(tool["function"].get("parameters") or {}, dict):
            place = f"tools.{index}.function.parameters"
            raise ApiError(400, f"{place}: a JSON schema is needed", param=place)


def _is_function(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _check_tool_choice(request: ChatRequest) -> None:
    choice, names = request.tool_choice, [tool["function"]["name"] for tool in request.tools or []]
    if choice in (None, "none", "auto"):
        return
    if choice == "required" and not names:
        raise ApiError(400, "tool_choice: a tool is required and none is offered: fill tools", param="tool_choice")
    if choice == "required":
        return
    if not _is_function(choice):
        said = 'tool_choice: none, auto, required or {"type": "function", "function": {"name": ...}} is needed'
        raise ApiError(400, said, param="tool_choice", code="unsupported_value")
    if request.named_tool not in names:
        near = closest(str(request.named_tool), names)
        hint = f"; closest: {near}" if near else ""
        raise ApiError(400, f"tool_choice: tools has no {request.named_tool!r}{hint}", param="tool_choice")


def _check_response_format(form: dict[str, Any]) -> None:
    kind = form.get("type", "text")
    if kind not in ("text", "json_object", "json_schema"):
        said = f"response_format.type: text, json_object or json_schema is needed, not {kind!r}"
        raise ApiError(400, said, param="response_format", code="unsupported_value")
    described = form.get("json_schema")
    if kind == "json_schema" and not (isinstance(described, dict) and isinstance(described.get("schema"), dict)):
        place = "response_format.json_schema.schema"
        raise ApiError(400, f"{place}: a JSON schema is needed", param=place)


def _refuse(request: SamplingRequest, **cannot: bool) -> None:
    """Refuse what would change the answer and cannot be done."""
    cannot |= {
        "frequency_penalty": bool(request.frequency_penalty),
        "presence_penalty": bool(request.presence_penalty),
        "logit_bias": bool(request.logit_bias),
    }
    for name, asked in cannot.items():
        if asked:
            hint = "use tools" if name == "functions" else "leave it out"
            raise ApiError(400, f"{name} cannot be honoured here: {hint}", param=name, code="unsupported_value")
