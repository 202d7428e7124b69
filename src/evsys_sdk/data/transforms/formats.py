"""Rows in the formats of public datasets become rows that the algorithms read.

In: ShareGPT conversations, Alpaca instructions, plain text, pairs of answers of which one is better. Out: rows with
`messages` (imitation), or with `messages`, `chosen` and `rejected` (dpo). Turns, texts and answers that were read are
replaced by what was made of them; the other columns stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from evsys_sdk.config.base import Name, Params
from evsys_sdk.data.columns import PROMPT_COLUMNS, BadRow, as_text, find_prompt, keys_of, lookup, refuse_row, require
from evsys_sdk.data.transforms.base import Change, RowByRow
from evsys_sdk.data.transforms.chat import Message
from evsys_sdk.data_types import TEXT_ROLE, content_text
from evsys_sdk.errors import closest, shorten
from evsys_sdk.protocols import Row
from evsys_sdk.registry import register_transform

Role = Literal["system", "user", "assistant", "tool"]
SPEAKERS: dict[str, Role] = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "function"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
}
"""Who a turn of a ShareGPT conversation is `from`, in the files that are around."""
CHOSEN_COLUMNS = ("chosen", "preferred_output", "preferred", "chosen_response", "response_chosen", "accepted")
REJECTED_COLUMNS = ("rejected", "non_preferred_output", "dispreferred", "rejected_response", "response_rejected")
TRANSCRIPT = re.compile(r"(?:^|\n\n)(Human|Assistant):[ \n]?")
"""How Anthropic's helpful/harmless files write a chat down."""


@register_transform("sharegpt_to_chat")
class SharegptToChat(RowByRow):
    """Make `messages` of a ShareGPT conversation: a list of turns with `from` and `value`."""

    cfg: Config

    class Config(Params):
        key: Name | None = None
        """The column with the turns; by default `conversations`, then `conversation`."""
        speakers: dict[str, Role] = Field(default_factory=dict)
        """Further names of speakers -> role, beside human, gpt, system, tool, observation and their like."""
        system_prompt: str | None = None
        """Plain text, put first; it replaces the system message that the row brings along."""

    def changer(self) -> Change:
        cfg, speakers = self.cfg, {**SPEAKERS, **self.cfg.speakers}

        def change(row: Row) -> Row:
            key = cfg.key or ("conversations" if row.get("conversations") is not None else "conversation")
            turns = require(row, key if row.get(key) is not None else cfg.key or "conversations")
            messages = _conversation(turns, key, speakers)
            out = {name: value for name, value in row.items() if name not in (key, "system", "tools")}
            if row.get("tools"):
                tools = _json(row["tools"], "tools")
                if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
                    raise BadRow(f"needs a list of tool descriptions in 'tools', not {shorten(repr(row['tools']))}")
                out["tools"] = [
                    # ShareGPT files have the bare function; chat templates want OpenAI's wrapping.
                    tool if "function" in tool else {"type": "function", "function": tool}
                    for tool in tools
                ]
            return {**out, "messages": _with_system(messages, cfg.system_prompt or row.get("system"))}

        return change


@register_transform("alpaca_to_chat")
class AlpacaToChat(RowByRow):
    """Make `messages` of `instruction`, `input` and `output`, with `system` and `history` where a row has them."""

    cfg: Config

    class Config(Params):
        instruction_key: Name = "instruction"
        """The column with what is asked."""
        input_key: Name = "input"
        """What the instruction is about; it may be missing or empty."""
        output_key: Name = "output"
        """The column with the answer to learn."""
        system_prompt: str | None = None
        """Plain text, put first; it replaces the row's own `system`."""

    def changer(self) -> Change:
        cfg = self.cfg

        def change(row: Row) -> Row:
            asked, answer = as_text(require(row, cfg.instruction_key)), as_text(require(row, cfg.output_key))
            if not answer.strip():
                raise BadRow(f"has an empty {cfg.output_key!r}; drop such rows with a filter before this transform")
            # Most Alpaca rows have an empty input: the instruction then stands alone.
            about = lookup(row, cfg.input_key)
            question = f"{asked}\n\n{as_text(about)}" if about not in (None, "") else asked
            pairs: list[object] = [] if row.get("history") is None else row["history"]
            messages = []  # earlier questions and answers, as `[[question, answer], ...]`, then this one
            for index, pair in enumerate([*pairs, (question, answer)]):
                if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
                    raise BadRow(f"needs a question and an answer at history[{index}], not {shorten(repr(pair))}")
                messages += [_message("user", as_text(pair[0])), _message("assistant", as_text(pair[1]))]
            used = {cfg.instruction_key, cfg.input_key, cfg.output_key, "system", "history"}
            out = {name: value for name, value in row.items() if name not in used}
            return {**out, "messages": _with_system(messages, cfg.system_prompt or row.get("system"))}

        return change


@register_transform("to_plain_text")
class ToPlainText(RowByRow):
    """Make every row plain text to learn as it stands: all of it, without the chat template (continued pretraining)."""

    cfg: Config

    class Config(Params):
        key: Name = "text"
        """The column with the text."""

    def changer(self) -> Change:
        key = self.cfg.key

        def change(row: Row) -> Row:
            text = require(row, key)
            if not isinstance(text, str) or not text.strip():
                raise BadRow(f"needs text in {key!r}, not {shorten(repr(text))}; drop such rows with a filter")
            out = {name: value for name, value in row.items() if name not in (key, "messages")}
            return {**out, "messages": [_message(TEXT_ROLE, text)]}

        return change


@register_transform("to_preference")
class ToPreference(RowByRow):
    """Make every row a prompt (`messages`) with a better answer (`chosen`) and a worse one (`rejected`), for dpo.

    Answers come as text, as a message, as a chat that ends with them (the prompt is then what both share), or as a
    transcript with `Human:` and `Assistant:`.
    """

    cfg: Config

    class Config(Params):
        prompt_key: Name | None = None
        """The column with the prompt, text or messages; by default `messages`, `conversations`, `input.messages`, or
        the first of prompt, query, question, instruction, input; without any, what both answers begin with."""
        chosen_key: Name | None = None
        """The column with the better answer; by default the first of chosen, preferred_output, preferred,
        chosen_response, response_chosen, accepted."""
        rejected_key: Name | None = None
        """The column with the worse answer; by default the first of rejected, non_preferred_output, dispreferred,
        rejected_response, response_rejected."""
        system_prompt: str | None = None
        """Plain text, put first; it replaces the system message that the row brings along."""

    def changer(self) -> Change:
        cfg = self.cfg

        def change(row: Row) -> Row:
            chosen_key = cfg.chosen_key or _first(row, CHOSEN_COLUMNS, "better answer", "chosen_key")
            rejected_key = cfg.rejected_key or _first(row, REJECTED_COLUMNS, "worse answer", "rejected_key")
            chosen = _answer_chat(require(row, chosen_key), chosen_key)
            rejected = _answer_chat(require(row, rejected_key), rejected_key)
            prompt = _prompt_of(row, cfg.prompt_key, {chosen_key, rejected_key})
            if prompt is None:
                prompt = chosen[:-1]
                if not prompt:
                    raise BadRow(
                        f"has no prompt: none of messages, conversations, {', '.join(PROMPT_COLUMNS)}, and "
                        f"{chosen_key!r} is not a chat; it has: {keys_of(row)}; set prompt_key"
                    )
            for key, chat in ((chosen_key, chosen), (rejected_key, rejected)):
                if chat[:-1] and _roles_and_texts(chat[:-1]) != _roles_and_texts(prompt):
                    raise BadRow(f"has a chat in {key!r} that does not begin with the prompt")
            better, worse = chosen[-1]["content"], rejected[-1]["content"]
            if better == worse:
                raise BadRow(f"has the same answer in {chosen_key!r} and {rejected_key!r}")
            used = {chosen_key, rejected_key, cfg.prompt_key, "conversations", "system"}
            out = {name: value for name, value in row.items() if name not in used}
            messages = _with_system(prompt, cfg.system_prompt or row.get("system"))
            return {**out, "messages": messages, "chosen": better, "rejected": worse}

        return change


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _with_system(messages: list[Message], system: object) -> list[Message]:
    if not system:
        return messages
    # One system message: templates refuse, or quietly drop, a second.
    return [_message("system", as_text(system)), *(turn for turn in messages if turn["role"] != "system")]


def _conversation(turns: object, key: str, speakers: dict[str, Role]) -> list[Message]:
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise BadRow(f"needs a list of turns in {key!r}, not {shorten(repr(turns))}")
    return [_message_of_turn(turn, f"{key}[{index}]", speakers) for index, turn in enumerate(turns)]


def _message_of_turn(turn: object, place: str, speakers: dict[str, Role]) -> Message:
    """One turn as a message; `from` and `value` may also be called `role` and `content`."""
    named = (turn.get("from") or turn.get("role")) if isinstance(turn, dict) else None
    if not isinstance(turn, dict) or not isinstance(named, str):
        raise BadRow(f"needs a mapping with `from` and `value` at {place}, not {shorten(repr(turn))}")
    # As written too: a speaker that the config names may have capitals.
    role = speakers.get(named.lower()) or speakers.get(named)
    if role is None:
        near = closest(named, speakers)
        raise BadRow(
            f"has an unknown speaker {named!r} at {place}{f' (closest: {near})' if near else ''}; "
            f"known: {', '.join(speakers)}; set speakers: {{{named}: user}} or whichever role it is"
        )
    value = turn.get("value") if turn.get("value") is not None else turn.get("content")
    if value is None and not turn.get("tool_calls"):
        raise BadRow(f"has no `value` at {place}")
    kept = {name: turn[name] for name in ("weight", "tool_calls", "tool_call_id", "name") if turn.get(name) is not None}
    if named.lower() == "function_call":
        # One call as JSON, or a list of them.
        calls = _json(value, place)
        calls = calls if isinstance(calls, list) else [calls]
        for call in calls:
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                raise BadRow(f"needs a call with `name` and `arguments` at {place}, not {shorten(repr(value))}")
        functions = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in calls]
        made = [{"type": "function", "function": function} for function in functions]
        return {"role": role, "content": "", **kept, "tool_calls": made}
    if isinstance(value, list) and all(isinstance(block, dict) and "type" in block for block in value):
        is_text = all(block["type"] == "text" for block in value)
        return {"role": role, "content": content_text(value) if is_text else value, **kept}
    return {"role": role, "content": "" if value is None else as_text(value), **kept}


def _json(value: Any, place: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as exc:
        raise BadRow(f"has text at {place} that is not JSON ({exc}): {shorten(value)}") from exc


def _first(row: Row, columns: tuple[str, ...], what: str, setting: str) -> str:
    key = next((key for key in columns if row.get(key) is not None), None)
    if key is None:
        raise refuse_row(row, f"no {what}", columns, setting)
    return key


def _prompt_of(row: Row, key: str | None, answers: set[str]) -> list[Message] | None:
    """The prompt as messages; None where the row keeps it in its answers only."""
    columns = (key,) if key else ("messages", "conversations", "input.messages")
    found = next((name for name in columns if lookup(row, name) is not None), None)
    if found is None:
        if key is not None:
            require(row, key)
        rest = {name: value for name, value in row.items() if name not in answers}
        found = next((name for name in PROMPT_COLUMNS if rest.get(name) is not None), None)
        if found is None or not isinstance(rest[found], list):
            text = find_prompt(rest)
            return None if text is None else _chat_of(text)
    if isinstance(row.get("input"), dict) and row["input"].get("tools"):
        raise BadRow("has `input.tools`, which dpo cannot show to the model; describe the tools in a system message")
    value = lookup(row, found)
    messages = _chat_of(value) if isinstance(value, str) else _conversation(value, found, SPEAKERS)
    if messages[-1]["role"] == "assistant":
        raise BadRow(f"has a prompt in {found!r} that ends with the assistant, whose answer is to be compared")
    return messages


def _chat_of(text: str) -> list[Message]:
    """A prompt as messages: a transcript turn by turn, any other text as what the user says."""
    return _transcript(text) or [_message("user", text)]


def _transcript(text: str) -> list[Message]:
    if not text.lstrip("\n").startswith("Human:"):
        return []
    _, *parts = TRANSCRIPT.split("\n\n" + text.lstrip("\n"))
    turns = [
        _message("user" if who == "Human" else "assistant", said.strip())
        for who, said in zip(parts[::2], parts[1::2], strict=True)
    ]
    # A prompt ends with a bare `Assistant:`, behind which the answer is to follow.
    return turns[:-1] if turns[-1] == _message("assistant", "") else turns


def _answer_chat(value: object, key: str) -> list[Message]:
    """The answer as the last of a chat; the chat before it is empty where the value is the answer alone."""
    if isinstance(value, str):
        chat = _transcript(value) or [_message("assistant", value)]
    else:
        chat = _conversation([value] if isinstance(value, dict) else value, key, SPEAKERS)
    last = chat[-1]
    if last["role"] != "assistant" or not content_text(last["content"]).strip() or last.get("tool_calls"):
        raise BadRow(f"needs the assistant's answer as text at the end of {key!r}, not {shorten(repr(value))}")
    return chat


def _roles_and_texts(messages: list[Message]) -> list[tuple[str, str]]:
    # Only one of prompt and answer may bring the system message; it is put before both.
    return [(turn["role"], turn["content"]) for turn in messages if turn["role"] != "system"]
