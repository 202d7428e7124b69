"""Tools: how a model is shown them, and how its calls are read.

In: the tools of a request and the model's text. Out: messages that show the tools, and the calls in OpenAI's form. A
chat template that has a place for tools shows them itself; for any other they are described in the system message, and
calls and results are written into the text, in the usual `<tool_call>{json}</tool_call>` form.
"""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from dataclasses import dataclass

from evsys_engine.types import JsonObject
from evsys_sdk.answers import parsed_json
from evsys_sdk.data_types import content_text, with_tools
from evsys_sdk.protocols import Renderer
from evsys_sdk.training_api import Messages

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_PROBE = "evsys_probe"
_DESCRIPTION = """# Tools

You may call one or more of these functions:
<tools>
{tools}
</tools>

To call a function, write its name and arguments as JSON between tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call, as it is written to the caller."""

    id: str
    name: str
    arguments: str
    """As JSON."""

    def as_dict(self) -> JsonObject:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def shows_tools(renderer: Renderer) -> bool:
    """Whether the chat template has a place for tools, calls and results: it is tried."""
    chat: Messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [ToolCall(id="c", name=_PROBE, arguments="{}").as_dict()]},
        {"role": "tool", "tool_call_id": "c", "name": _PROBE, "content": "seen"},
    ]
    tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {"type": "object"}}}
    with suppress(Exception):  # a template may raise whatever it likes
        text = renderer.tokenizer.decode(renderer.prompt(with_tools(chat, {"tools": [tool]})))
        # More than once: where the tool is described, and where it is called.
        return "seen" in text and text.count(_PROBE) > 1
    return False


def shown(messages: Messages, tools: list[JsonObject], *, by_template: bool) -> Messages:
    """The messages with the tools in sight."""
    if by_template:
        return with_tools(messages, {"tools": tools})
    messages = [_as_text(message) for message in messages]
    if not tools:
        return messages
    text = _DESCRIPTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    first = {**messages[0], "content": f"{content_text(messages[0].get('content'))}\n\n{text}"}
    return [first, *messages[1:]]


def _as_text(message: JsonObject) -> JsonObject:
    """A message whose calls or result stand in its text."""
    text = content_text(message.get("content"))
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    parts = [text] if text else []
    for function in (call["function"] for call in message["tool_calls"]):
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = parsed_json(arguments) if parsed_json(arguments) is not None else arguments
        body = json.dumps({"name": function["name"], "arguments": arguments or {}}, ensure_ascii=False)
        parts.append(f"{OPEN}\n{body}\n{CLOSE}")
    return {"role": message["role"], "content": "\n".join(parts)}


def read_calls(text: str, tools: list[JsonObject]) -> tuple[str, list[ToolCall]]:
    """What the text says besides its calls, and the calls; a block that is no call stays text, as it was written."""
    if not tools:
        return text, []
    calls: list[ToolCall] = []
    rest: list[str] = []
    end = 0
    # Searched for rather than matched: a pattern with `.*?` takes quadratic time on a long run of spaces.
    while (begin := text.find(OPEN, end)) >= 0:
        rest.append(text[end:begin])
        closed = text.find(CLOSE, begin)
        inside = text[begin + len(OPEN) : closed if closed >= 0 else len(text)]  # the last one may be left open
        end = closed + len(CLOSE) if closed >= 0 else len(text)
        found = _calls_in(parsed_json(inside.strip()))
        calls.extend(found)
        if not found:
            rest.append(text[begin:end])
    rest.append(text[end:])
    if calls:
        return "".join(rest).strip(), calls
    names = {tool["function"]["name"] for tool in tools}
    bare = _calls_in(parsed_json(text.strip()))  # some templates teach calls without tags
    return ("", bare) if bare and all(call.name in names for call in bare) else (text, [])


def _calls_in(value: object) -> list[ToolCall]:
    """The calls that a JSON value describes; none if one of them is none."""
    calls: list[ToolCall] = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict):
            return []
        function = item["function"] if isinstance(item.get("function"), dict) else item
        name = function.get("name")
        arguments = function.get("arguments", function.get("parameters", {}))
        if not isinstance(name, str) or not isinstance(arguments, dict | str):
            return []
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(ToolCall(id=f"call_{secrets.token_hex(12)}", name=name, arguments=text))
    return calls
