"""A chat of several turns, kept in tokens; and the tools a model may call in it.

In: messages, and what the model said. Out: the next prompt: the tokens read and written so far, exactly as they were,
and behind them what the template makes of the answer to them. Nothing the model wrote is ever encoded again. Only a
template that shows earlier turns otherwise once later ones follow (thinking models) gets its prompt anew, as such a
model expects it; each turn is learnt after the prompt that it was really drawn from, so both are right to train on.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import Field, TypeAdapter, validate_call

from evsys_sdk.answers import parsed_json
from evsys_sdk.concurrency import on_thread
from evsys_sdk.config.base import Params
from evsys_sdk.data_types import content_text, with_tools
from evsys_sdk.errors import FOREIGN, DataError, EvsysError, error_boundary, not_known
from evsys_sdk.protocols import Renderer, Turn
from evsys_sdk.registry import register_agent
from evsys_sdk.training_api import Messages

# Also a block that `max_tokens` cut off: it is answered as a call that cannot be read.
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_OFFER = """You may call these functions:
{tools}
To call one, write <tool_call>{{"name": ..., "arguments": {{...}}}}</tool_call> and wait for what it returns."""


@register_agent("chat")
class Chat:
    """The default agent by name: talks to the model, runs the tools it calls, stops when it calls none."""

    class Config(Params):
        max_turns: int = Field(default=1, ge=1)
        """How often the model speaks."""
        tools: list[str] = Field(default_factory=list)
        """Where the functions are that the model may call: `my_project.tools.search`; `bash` runs in the task's
        environment."""
        bash_output_chars: int = Field(default=20_000, ge=100)
        """How much of what a command prints `bash` shows; of more, the beginning and the end."""

    import_path_of_agent = "evsys_sdk.rollout.chat_agent:ChatAgent"
    """The class itself needs harbor, and names are listed without it."""


class ChatHistory:
    """What has been said, as messages and as tokens."""

    def __init__(self, renderer: Renderer, messages: Messages):
        self.renderer, self.messages = renderer, list(messages)
        self.prompt = renderer.prompt(self.messages)

    def add(self, turn: Turn, *answers: dict[str, Any]) -> None:
        """The model spoke, and this is what it hears in return."""
        before = [*self.messages, {"role": "assistant", "content": turn.text}]
        self.messages = [*before, *answers]
        rendered = self.renderer.prompt(self.messages)
        end = self._end_of_turn(before, rendered)
        if end is None:
            self.prompt = rendered
            return
        # A completion that was cut off lacks the token that ends a turn, and templates have one there. It is added to
        # the next prompt only: the model did not write it, so it is not trained on.
        written, close = turn.completion_tokens, self.renderer.tokenizer.eos_token_id
        ended = bool(written) and written[-1] == close
        self.prompt = [*turn.prompt_tokens, *written, *([] if ended else [close]), *rendered[end:]]

    def _end_of_turn(self, messages: Messages, rendered: list[int]) -> int | None:
        """Where in `rendered` the assistant's last turn is over; None where it does not stand there as it was."""
        try:
            tokens, mask = self.renderer.sequences(messages, last_only=True)[-1]
        except DataError:  # the template cannot show this turn as it was written
            return None
        # Behind the last token that the mask gives to the assistant.
        end = len(mask) - mask[::-1].index(1) if 1 in mask else 0
        return end if end and rendered[:end] == tokens[:end] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    parameters: dict[str, object]
    """JSON schema of its arguments."""
    call: Callable[..., object]
    on_loop: bool = False
    """`async def`: it runs on the event loop. A plain function would stop everybody else there, so it gets a thread."""

    async def answer(self, arguments: dict[str, object]) -> object:
        said = self.call(**arguments) if self.on_loop else await on_thread(lambda: self.call(**arguments))
        return await said if inspect.isawaitable(said) else said

    def described(self) -> dict[str, object]:
        """As chat templates want it."""
        about = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": about}


@lru_cache(maxsize=256)
def tool_at(path: str) -> Tool:
    """The function that stands at `module.function` or `module:function`, as a tool."""
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name:
        raise EvsysError(not_known(path, "tool", ["bash"]) + "; a function is written as module:function")
    with error_boundary(EvsysError, f"tool {path!r}: importing {module_name}"):
        module = importlib.import_module(module_name)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise EvsysError(f"tool {path!r}: " + not_known(name, f"function in {module_name}", known))
    return tool_of(function)


def tool_of(function: Callable[..., object]) -> Tool:
    """A function with type hints and a docstring, as a tool."""
    with error_boundary(EvsysError, f"tool {function.__name__!r}: its arguments"):
        adapter: TypeAdapter[object] = TypeAdapter(function)  # type: ignore[arg-type]
        schema = adapter.json_schema()
        checked = validate_call(function)
    schema.setdefault("properties", {})
    return Tool(
        name=function.__name__,
        description=inspect.getdoc(function) or "",
        parameters=schema,
        call=checked,
        on_loop=inspect.iscoroutinefunction(function),
    )


def begin_chat(renderer: Renderer, messages: Messages, tools: Sequence[Tool]) -> ChatHistory:
    """A chat that shows the model its tools: by the template, or in words where that has no place for them."""
    if not tools:
        return ChatHistory(renderer, messages)
    described = [tool.described() for tool in tools]
    with suppress(DataError):  # some templates refuse tools, and others pass over them in silence
        shown = ChatHistory(renderer, with_tools(messages, {"tools": described}))
        if shown.prompt != renderer.prompt(messages):
            return shown
    offer = _OFFER.format(tools="\n".join(json.dumps(one["function"]) for one in described))
    first, rest = (messages[0], messages[1:]) if messages[0]["role"] == "system" else ({"content": ""}, messages)
    system = f"{content_text(first['content'])}\n\n{offer}".strip()
    return ChatHistory(renderer, [{"role": "system", "content": system}, *rest])


def calls_in(text: str) -> list[tuple[str, object]]:
    """The tool calls in a completion, as (name, arguments): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
    blocks, or a completion that is nothing but such an object. One that cannot be read has the name ''."""
    blocks = _CALL.findall(text)
    if not blocks:
        whole = _call(parsed_json(text))
        return [whole] if whole is not None else []
    return [_call(parsed_json(block.strip())) or ("", block.strip()) for block in blocks]


def _call(value: object) -> tuple[str, object] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or "arguments" not in value:
        return None
    arguments = value["arguments"]
    if isinstance(arguments, str):  # OpenAI writes them as JSON in a text
        arguments = parsed_json(arguments)
    return value["name"], arguments


async def answer_calls(calls: Sequence[tuple[str, object]], tools: dict[str, Tool]) -> Messages:
    """What the tools say, one message per call. The model reads what a tool or a call did wrong."""
    return [{"role": "tool", "name": name, "content": await _answer(name, given, tools)} for name, given in calls]


async def _answer(name: str, arguments: object, tools: dict[str, Tool]) -> str:
    if not name:
        return "error: this is not a tool call; write one JSON object with `name` and `arguments`"
    if name not in tools:
        return f"error: {not_known(name, 'tool', tools)}"
    if not isinstance(arguments, dict):
        return "error: `arguments` must be a JSON object"
    try:
        said = await tools[name].answer(arguments)
    except FOREIGN as exc:
        return f"error: {type(exc).__name__}: {exc}"
    return said if isinstance(said, str) else json.dumps(said, default=str)
