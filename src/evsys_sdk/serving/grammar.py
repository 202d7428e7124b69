"""What a completion has to look like: the grammar of a request.

In: a `ChatRequest` with a `response_format` or a forced `tool_choice`. Out: a grammar in llguidance's form, or None
where the model may write what it likes. Whitespace is fixed (one space behind each comma and colon, as `json.dumps`
writes it): a small model that may write any amount of it writes nothing else.
"""

from __future__ import annotations

import json
from typing import Any

from evsys_sdk.errors import EvsysError, need
from evsys_sdk.serving.http import ApiError
from evsys_sdk.serving.request import ChatRequest

JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
MOST_CALLS = 8
"""Calls in one answer to `tool_choice: required`."""
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
        grammar = library.LLMatcher.grammar_from_lark(_lark(request, schema, forced))
        problem = _problem(library, grammar)
    except RecursionError:
        grammar, problem = "", "it is nested too deeply"
    if problem is not None:
        raise ApiError(400, f"{param}: this JSON schema cannot be followed: {problem}", param=param)
    return str(grammar)


def _lark(request: ChatRequest, schema: dict[str, Any] | None, forced: list[dict[str, Any]] | None) -> str:
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
        for number, tool in enumerate(tools):
            rules += _call_rules(number, tool["function"])
    return "\n".join([f"start: {' | '.join(starts)}", *rules])


def _problem(library: Any, grammar: str) -> str | None:
    """Why no text follows the grammar; None if one may."""
    failed, messages = library.LLMatcher.validate_grammar_with_warnings(grammar)
    if failed:
        return str(messages[0]).rpartition("failed to compile JSON schema: ")[2].partition("\n")[0]
    # A schema that leads nowhere (`{"$ref": "#"}`) is only noticed at the first token; single bytes will do for that.
    matcher = library.LLMatcher(library.LLTokenizer("byte"), grammar, log_level=0)
    matcher.compute_logit_bias()
    return "no text has this form" if matcher.is_error() else None


def _call_rules(number: int, function: dict[str, Any]) -> list[str]:
    """One call, as `tools.read_calls` reads it. Each schema is a root of its own, which its `$ref`s count on."""
    begin = f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": '
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return [
        f"call_{number}: {json.dumps(begin)} arguments_{number} {json.dumps('}' + chr(10) + '</tool_call>')}",
        f"arguments_{number}: {_json(schema)}",
    ]


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps({**_closed(schema), "x-guidance": JSON_OPTIONS})


def _closed(schema: Any) -> Any:
    """The schema, with objects that have the properties they name and no others.

    JSON Schema allows any more of them; a model that is asked for `{name, age}` is not asked to invent some. An object
    that is put together from parts, or that says what else it may have, is left as it is.
    """
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    mixed = bool(_MIXED & schema.keys())
    parts = {key: value if key in _LEFT_ALONE else _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        parts["properties"] = {name: _closed(value) for name, value in schema["properties"].items()}
        if not mixed:
            parts["additionalProperties"] = False
    return parts
