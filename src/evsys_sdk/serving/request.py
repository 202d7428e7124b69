"""A request: read, checked, and refused where it asks for what a sampler cannot do; and the grammar it asks for.

In: the body of POST /v1/chat/completions or /v1/completions. Out: a `ChatRequest` or a `CompletionRequest`, or a 400
that names the field; for a `response_format` or a forced `tool_choice`, a grammar in llguidance's form. Fields that
would change the answer and cannot be honoured are refused; others that OpenAI's clients send (`user`, `store`, ...)
are passed over.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from evsys_engine.http import HttpError
from evsys_engine.types import JsonObject
from evsys_sdk.errors import EvsysError, closest, need
from evsys_sdk.training_api import Messages, SamplingParams, derive_seed

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_CHOICES = 128
MOST_LOGPROBS = 20
MOST_STOPS = 64
LONGEST_STOP = 1000
"""Characters. Every token that is written is compared with every stop string."""


class ApiError(HttpError):
    """A response other than 200, in the form that OpenAI's clients read."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, wait: int | None = None
    ) -> None:
        super().__init__(status, message)
        self.code, self.param, self.wait = code, param, wait


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
    stream_options: JsonObject | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: JsonObject | None = None
    return_token_ids: bool | None = None
    session_id: str | None = None

    @field_validator("stop")
    @classmethod
    def _few_and_short(cls, stop: str | list[str] | None) -> str | list[str] | None:
        texts = [stop] if isinstance(stop, str) else stop or []
        if len(texts) > MOST_STOPS or any(len(text) > LONGEST_STOP for text in texts):
            raise ValueError(f"at most {MOST_STOPS} texts of at most {LONGEST_STOP} characters")
        return stop

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    def sampling(self, max_tokens: int, grammar: str | None = None) -> SamplingParams:
        seed = self.seed
        # Every backend takes 31 bits: any other integer is folded into them, the same one always to the same seed.
        if seed is not None and not 0 <= seed < 2**31:
            seed = derive_seed(seed, "request")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or -1,
            seed=seed,
            # The engine refuses an empty stop string, which every text contains.
            stop=tuple(text for text in stop if text),
            grammar=grammar,
        )


class ChatRequest(SamplingRequest):
    """The body of POST /v1/chat/completions."""

    messages: list[JsonObject] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    response_format: JsonObject | None = None
    functions: list[object] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered_tools(self) -> list[JsonObject]:
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def named_tool(self) -> str | None:
        """The one function that `tool_choice` names."""
        return str(self.tool_choice["function"]["name"]) if isinstance(self.tool_choice, dict) else None

    @property
    def forced_tools(self) -> list[JsonObject] | None:
        """The functions of which one has to be called; None where the model may also answer in words."""
        if self.named_tool is not None:
            return [tool for tool in self.tools or [] if tool["function"]["name"] == self.named_tool]
        return self.tools if self.tool_choice == "required" else None

    @property
    def answer_schema(self) -> JsonObject | None:
        """The JSON schema of an answer in words; None where any text will do."""
        form = self.response_format or {}
        if form.get("type") == "json_object":
            return {"type": "object"}
        return form["json_schema"]["schema"] if form.get("type") == "json_schema" else None

    @property
    def is_constrained(self) -> bool:
        """Whether the completion has to follow a grammar."""
        return self.forced_tools is not None or self.answer_schema is not None

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
    _check_tools(request)
    form = request.response_format or {}
    kind, described = form.get("type", "text"), form.get("json_schema")
    if kind not in ("text", "json_object", "json_schema"):
        said = f"response_format.type: text, json_object or json_schema is needed, not {kind!r}"
        raise ApiError(400, said, param="response_format", code="unsupported_value")
    if kind == "json_schema" and not (isinstance(described, dict) and isinstance(described.get("schema"), dict)):
        place = "response_format.json_schema.schema"
        raise ApiError(400, f"{place}: a JSON schema is needed", param=place)
    _refuse(request, top_logprobs=bool(request.top_logprobs), functions=bool(request.functions))
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


# Half of a pair that stands for one character beyond 16 bits; alone it is no character, and no tokenizer takes it.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _read[Body: SamplingRequest](kind: type[Body], body: bytes) -> Body:
    try:
        # Decoded here: `json` lets halves of surrogate pairs pass in bytes.
        text = body.decode(json.detect_encoding(body))
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        said = f"the body has {exc.object[exc.start]!r}, one half of a surrogate pair, which is no character"
        raise ApiError(400, said) from exc
    except (ValueError, RecursionError) as exc:
        raise ApiError(400, f"the body is not JSON: {exc}") from exc
    try:
        return kind.model_validate(value)
    except ValidationError as exc:
        first = exc.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "body"
        raise ApiError(400, f"{place}: {first['msg']}", param=place) from exc


def _finite(text: str) -> float:
    """Python reads NaN and Infinity, and 1e999 as infinity; JSON has none of them."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _check_messages(messages: Messages) -> None:
    for index, message in enumerate(messages):
        place, content = f"messages.{index}", message.get("content")
        if message.get("role") not in ROLES:
            raise ApiError(400, f"{place}.role: one of {', '.join(ROLES)} is needed", param=f"{place}.role")
        blocks = isinstance(content, list) and all(isinstance(block, dict) for block in content)
        if not (content is None or isinstance(content, str) or blocks):
            raise ApiError(400, f"{place}.content: text or a list of blocks is needed", param=f"{place}.content")
        # The models here read text: an image or a sound would be dropped without a word.
        for number, block in enumerate(content if isinstance(content, list) else []):
            kind, where = block.get("type", "text"), f"{place}.content.{number}"
            if kind != "text":
                said = f"{where}: a block of type {kind!r} cannot be shown to a model that reads text: leave it out"
                raise ApiError(400, said, param=where, code="unsupported_value")
            if not isinstance(block.get("text"), str):
                raise ApiError(400, f"{where}.text: text is needed", param=f"{where}.text")
        calls = message.get("tool_calls")
        if content is None and not calls:
            raise ApiError(400, f"{place}.content: it is missing", param=f"{place}.content")
        if calls is not None and not (isinstance(calls, list) and all(_is_function(call) for call in calls)):
            raise ApiError(400, f"{place}.tool_calls: a list of functions is needed", param=f"{place}.tool_calls")


def _check_tools(request: ChatRequest) -> None:
    for index, tool in enumerate(request.tools or []):
        if not _is_function(tool):
            raise ApiError(400, f"tools.{index}: only functions with a name can be offered", param=f"tools.{index}")
        if not isinstance(tool["function"].get("parameters") or {}, dict):
            place = f"tools.{index}.function.parameters"
            raise ApiError(400, f"{place}: a JSON schema is needed", param=place)
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


def _is_function(value: object) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


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


# Whitespace is fixed (one space behind each comma and colon, as `json.dumps` writes it): a small model that may write
# any amount of it writes nothing else.
JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
MOST_CALLS = 8
"""Calls in one answer to `tool_choice: required`."""
GRAMMAR_CPU_SECONDS = 1.0
"""To compile a grammar. 2,000 optional or 5,000 required properties take 0.4."""
GRAMMAR_SECONDS = 30.0
"""By the clock, on a machine so busy that it does not grant the CPU time."""
# Values, not schemas, except: parts of an `allOf`, which would exclude each other's properties if each were closed, and
# `properties`, whose keys are names of fields and which `_closed` treats apart.
_LEFT_ALONE = frozenset(["allOf", "const", "enum", "default", "examples", "properties"])
_MIXED = frozenset(["allOf", "anyOf", "oneOf", "$ref", "if", "not", "patternProperties", "additionalProperties"])


def grammar_of(request: ChatRequest) -> str | None:
    """The grammar that the request's completions have to follow."""
    schema = request.answer_schema
    forced = request.forced_tools
    if schema is None and forced is None:
        return None
    param = "response_format" if forced is None else "tools"
    try:
        library = need("llguidance", extra="serve")
    except EvsysError as exc:
        asked = "response_format" if forced is None else "tool_choice"
        raise ApiError(400, f"{asked}: {exc}", param=asked, code="unsupported_value") from exc
    try:
        grammar = str(library.LLMatcher.grammar_from_lark(_lark(request, schema, forced)))
        problem = _find_problem(grammar)
    except RecursionError:
        grammar, problem = "", "it is nested too deeply"
    if problem is not None:
        raise ApiError(400, f"{param}: this JSON schema cannot be followed: {problem}", param=param)
    return grammar


@lru_cache(maxsize=256)
def _find_problem(grammar: str) -> str | None:
    """Why no completion can follow the grammar. A few bytes can keep the compiler busy for minutes (`multipleOf:
    999983`, 5,000 optional properties), so it is tried in a separate process first."""
    worker = [sys.executable, "-I", str(Path(__file__).with_name("grammar_worker.py")), str(GRAMMAR_CPU_SECONDS)]
    try:
        done = subprocess.run(worker, input=grammar.encode(), capture_output=True, timeout=GRAMMAR_SECONDS)
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode < 0:  # by SIGPROF, or because it ran out of memory or stack
        return "it takes too long to compile; use fewer optional properties, shorter patterns or a smaller multipleOf"
    if done.returncode != 0:
        raise EvsysError(f"compiling a grammar ended with {done.returncode}: {done.stderr.decode()[-500:]}")
    said = done.stdout.decode().strip()
    return said.rpartition("failed to compile JSON schema: ")[2].partition("\n")[0] if said else None


def _lark(request: ChatRequest, schema: JsonObject | None, forced: list[JsonObject] | None) -> str:
    rules: list[str] = []
    starts: list[str] = []
    if forced is None and schema is not None:
        starts.append("answer")
        rules.append(f"answer: {_json(schema)}")
    tools = forced if forced is not None else request.offered_tools
    if tools:
        most = 1 if request.parallel_tool_calls is False or request.named_tool else MOST_CALLS
        starts.append("calls")
        rules.append(f'calls: call ("\\n" call){{0,{most - 1}}}' if most > 1 else "calls: call")
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
        # A call, as `tools.read_calls` reads it. Each schema is a separate root, which its `$ref`s count on.
        for number, function in enumerate(tool["function"] for tool in tools):
            begin = f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": '
            arguments = function.get("parameters") or {"type": "object", "properties": {}}
            rules += [
                f"call_{number}: {json.dumps(begin)} arguments_{number} {json.dumps('}' + chr(10) + '</tool_call>')}",
                f"arguments_{number}: {_json(arguments)}",
            ]
    return "\n".join([f"start: {' | '.join(starts)}", *rules])


def _json(schema: JsonObject) -> str:
    return "%json " + json.dumps({**_close_objects(schema), "x-guidance": JSON_OPTIONS})


def _close_objects(schema: Any) -> Any:
    """The schema, with objects that have the properties they name and no others.

    JSON Schema allows any more of them; a model that is asked for `{name, age}` is not asked to invent some. An object
    that is put together from parts, or that says what else it may have, is left as it is.
    """
    if isinstance(schema, list):
        return [_close_objects(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    mixed = bool(_MIXED & schema.keys())
    parts = {key: value if key in _LEFT_ALONE else _close_objects(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        parts["properties"] = {name: _close_objects(value) for name, value in schema["properties"].items()}
        if not mixed:
            parts["additionalProperties"] = False
    return parts
