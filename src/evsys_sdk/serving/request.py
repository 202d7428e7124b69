"""A chat request: read, checked, and refused where it asks for what a sampler cannot do.

In: the body of POST /v1/chat/completions. Out: a `ChatRequest`, or a 400 that names the field. Fields that would change
the answer and cannot be honoured are refused; others that OpenAI's clients send (`user`, `store`, ...) are passed over.
"""

from __future__ import annotations

import json
import math
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evsys_sdk.serving.http import ApiError
from evsys_sdk.surface import Messages, SamplingParams, derive_seed

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_CHOICES = 128


class ChatRequest(BaseModel):
    """The body, as OpenAI documents it, with vLLM's `return_token_ids` and `top_k`."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    stop: str | list[str] | None = None
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    functions: list[Any] | None = None
    return_token_ids: bool | None = None
    session_id: str | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    def chat(self) -> Messages:
        """The messages as renderers take them."""
        return [
            {**message, "role": "system" if message["role"] == "developer" else message["role"]}
            for message in self.messages
        ]

    def sampling(self, max_tokens: int) -> SamplingParams:
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
        )


def read_request(body: bytes) -> ChatRequest:
    """The request in `body`; a 400 when it is none or asks for too much."""
    try:
        value = json.loads(body, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as exc:
        raise ApiError(400, f"the body is not JSON: {exc}") from exc
    try:
        request = ChatRequest.model_validate(value)
    except ValidationError as exc:
        raise _bad_field(exc) from exc
    _check_messages(request.messages)
    _check_tools(request.tools or [])
    _refuse(request)
    return request


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


def _is_function(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _refuse(request: ChatRequest) -> None:
    """Refuse what would change the answer and cannot be done."""
    form = (request.response_format or {}).get("type", "text")
    cannot = {
        "top_logprobs": bool(request.top_logprobs),
        "response_format": form != "text",
        "frequency_penalty": bool(request.frequency_penalty),
        "presence_penalty": bool(request.presence_penalty),
        "logit_bias": bool(request.logit_bias),
        "functions": bool(request.functions),
        "tool_choice": request.tool_choice not in (None, "none", "auto"),
    }
    instead = {"functions": "use tools", "tool_choice": "use auto or none", "response_format": "say it in the prompt"}
    for name, asked in cannot.items():
        if asked:
            hint = instead.get(name, "leave it out")
            raise ApiError(400, f"{name} cannot be honoured here: {hint}", param=name, code="unsupported_value")
