"""Our messages in the words that every provider understands.

In: messages as rows and tasks have them. Out: their system text, their tools, and turns of user and assistant with
text and images only. Tool calls and tool results of earlier turns are written out as text, in the form that the
verifiers read; so are the calls that a provider's model makes.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from evsys_sdk.data_types import block_to_image_src, content_text, text_block
from evsys_sdk.errors import DataError
from evsys_sdk.surface import Messages

SYSTEM_ROLES = ("system", "developer")


def system_text(messages: Messages) -> str:
    """What the system messages say, together."""
    return "\n\n".join(content_text(message.get("content")) for message in messages if message["role"] in SYSTEM_ROLES)


def spoken(messages: Messages) -> list[tuple[str, list[dict[str, Any]]]]:
    """Role (`user` or `assistant`) and blocks of each turn; the system's messages are left out."""
    return [_turn(message) for message in messages if message["role"] not in SYSTEM_ROLES]


def _turn(message: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    content = message.get("content")
    if message["role"] == "tool":
        return "user", [text_block(f"<tool_response>\n{content_text(content)}\n</tool_response>")]
    blocks = list(content) if isinstance(content, list) else [text_block(content)] if content else []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        blocks.append(text_block(call_text(function.get("name"), function.get("arguments"))))
    return ("assistant" if message["role"] == "assistant" else "user"), blocks


def call_text(name: Any, arguments: Any) -> str:
    """A tool call as text."""
    if isinstance(arguments, str):
        with suppress(ValueError):  # half a call stays as the model made it
            arguments = json.loads(arguments)
    body = json.dumps({"name": name, "arguments": arguments or {}}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def joined(texts: list[str], calls: list[tuple[Any, Any]]) -> str:
    """What a model said and called, as one text."""
    return "\n".join([text for text in ["".join(texts)] if text] + [call_text(*call) for call in calls])


def tools_of(messages: Messages) -> list[dict[str, Any]]:
    """Name, description and parameters of the tools that stand on the messages."""
    tools = [tool.get("function", tool) for message in messages for tool in message.get("tools") or []]
    return [
        {
            "name": tool.get("name"),
            "description": tool.get("description") or "",
            "parameters": tool.get("parameters") or {"type": "object", "properties": {}},
        }
        for tool in tools
    ]


def image_in(block: dict[str, Any]) -> tuple[str, str, str]:
    """An image block as (address, "", "") or as ("", media type, base64)."""
    source = block_to_image_src(block)
    if source is None:
        raise DataError(f"a block of type {block.get('type')!r} cannot be sent: text and images can")
    if not source.startswith("data:"):
        return source, "", ""
    head, _, data = source.removeprefix("data:").partition(",")
    return "", head.removesuffix(";base64"), data
