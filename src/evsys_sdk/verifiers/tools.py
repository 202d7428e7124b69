"""Verifier for tool calls: were the right tools called with the right arguments, in any order?

In: a completion that holds tool calls as JSON, and the calls expected. Out: 1.0, 0.0, or a share of them.

The rule: a call counts as a tool-calling server would execute it, and what servers would read in two ways is a call
that was made and is wrong. Read are strict JSON objects with one name (`name`, `tool_slug` or `tool`) and at most one
object of arguments (`arguments`, `args`, `parameters` or `input`): alone, in a list, in `{"tool_calls": [...]}`, in
OpenAI's `function` form, in `<tool_call>` blocks, fenced or in running text. All calls of a completion count, wherever
they stand: in a block that is not closed, behind the answer or beside the first list too. Made and wrong are: a key
that occurs twice, two names or two sets of arguments, arguments that are no object, a call in a Python dict or with a
trailing comma, one that breaks off, one inside a string or other brackets, and `<function=...>` and its like. Only
what stands inside `<think>...</think>` is no call. A completion without any of this made no calls; an `expected`
without readable calls is an error of the task.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Annotated

from pydantic import Field

from evsys_sdk.answers import parsed_json, read_json
from evsys_sdk.registry import register_verifier
from evsys_sdk.verifiers.values import spans_in

Call = tuple[str, str]
"""Tool name and its arguments as canonical JSON."""

_UNREADABLE: Call = ("", "")
"""Stands for a call that was made and cannot be read: it is none of those expected."""
_NAMES = ("name", "tool_slug", "tool")
_OTHER_NAMES = ("tool_name", "function_name", "action", "recipient_name")
_ARGUMENTS = ("arguments", "args", "parameters", "input")
_OTHER_ARGUMENTS = ("params", "kwargs", "tool_input", "action_input")
_HOLDERS = ("tool_calls", "function")
_BEGIN, _END = re.compile(r"<tool_call>"), re.compile(r"</tool_call>")
_THINK, _THINK_END = re.compile(r"<think>"), re.compile(r"</think>")
_BRACKETS = re.compile(r'[\[\]{}\u201c\u201d"\n]')
_OPENING = {"]": "[", "}": "{", "\u201d": "\u201c"}
_CALL_KEYS = "|".join((*_NAMES, *_OTHER_NAMES, "arguments", *_HOLDERS))
# Where what is no JSON looks like a call: a key in any quotes, escaped or not, or without quotes behind `{`.
_BROKEN_CALL = re.compile(
    rf"['\"\u201c\u2018](?:{_CALL_KEYS})\\*+['\"\u201d\u2019]\s*+[:=]|\{{\s*+(?:{_CALL_KEYS})\s*+[:=]"
)
# Calls with the name outside JSON: Llama, Qwen3-Coder, XML, Mistral, Llama's built-in tools, DeepSeek, Kimi, gpt-oss.
_OTHER_SYNTAX = re.compile(
    r"<function\s*+=|<function\s++name\b|<invoke\b|<tool_name>|\[TOOL_CALLS\]\s*+\w|\[ARGS\]|<\|python_tag\|>\s*+\w"
    r"|<\uff5ctool\u2581(?:calls?\u2581begin|sep)|<\|tool_call_begin\|>|\bto=functions\."
)


@register_verifier("tool_calls_match")
def tool_calls_match(
    completion: str,
    expected: object,
    *,
    partial_credit: Annotated[bool, Field(description="Reward the share of calls that are right.")] = False,
    ignore_arguments: Annotated[bool, Field(description="Compare the names of the tools only.")] = False,
) -> float:
    """Are the calls in the completion the expected ones, order aside?"""
    value = _without_nulls(parsed_json(expected) if isinstance(expected, str) else expected)
    wanted = _calls_of(value)
    if _UNREADABLE in wanted or not (
        wanted or value == [] or (isinstance(value, dict) and value.get("tool_calls") == [])
    ):
        raise ValueError("tool_calls_match needs `expected`: a list of {name, arguments}")
    made = _calls_in(completion)
    if ignore_arguments:
        wanted, made = [(name, "") for name, _ in wanted], [(name, "") for name, _ in made]
    if not partial_credit or not wanted:
        return float(Counter(made) == Counter(wanted))
    right = (Counter(made) & Counter(wanted)).total()
    return right / max(len(made), len(wanted))  # calling everything there is must not pay


def _without_nulls(value: object) -> object:
    """`value` without the keys that a table fills with null where another row's call has them; arguments stay."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: item for key, item in value.items() if item is not None}
    return {key: item if key in _ARGUMENTS else _without_nulls(item) for key, item in kept.items()}


def _calls_in(completion: str) -> list[Call]:
    rest, blocks = _split(completion, _BEGIN, _END)
    calls = [call for block in blocks for call in _calls_of(parsed_json(block.strip())) or [_UNREADABLE]]
    if (begin := _BEGIN.search(rest)) is not None:  # a block that is not closed
        rest, block = rest[: begin.start()], rest[begin.end() :]
        # Without a call in it: cut off by the limit on tokens, or a tag that the text only mentions.
        calls += _calls_in_text(block) or [_UNREADABLE] * block.lstrip().startswith(("{", "["))
    said, _ = _split(rest, _THINK, _THINK_END)
    return calls + _calls_in_text(said)


def _split(text: str, begin: re.Pattern[str], end: re.Pattern[str]) -> tuple[str, list[str]]:
    """What stands outside the pairs of tags, and inside each."""
    outside, inside, place = [], [], 0
    while (opened := begin.search(text, place)) and (closed := end.search(text, opened.end())):
        outside.append(text[place : opened.start()])
        inside.append(text[opened.end() : closed.start()])
        place = closed.end()
    return " ".join([*outside, text[place:]]), inside


def _calls_in_text(text: str) -> list[Call]:
    """The calls in running text: those of its JSON values, and an unreadable one for all that looks like a call."""
    spans = list(spans_in(text))
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    between = [text[edges[at] : edges[at + 1]] for at in range(0, len(edges), 2)]  # before, between, behind the values
    unreadable = sum(bool(_BROKEN_CALL.search(piece)) + bool(_OTHER_SYNTAX.search(piece)) for piece in between)

    # How many pairs of brackets or quotes are around each value, as the running sum of `depth`.
    depth = [0] * (len(spans) + 1)
    open_at: dict[str, list[int]] = {bracket: [] for bracket in _OPENING.values()}
    quote_at: int | None = None
    for number, piece in enumerate(between):
        for bracket in _BRACKETS.findall(piece):
            if bracket == "\n":  # no string has a line break
                quote_at = None
            elif bracket == '"':
                if quote_at is not None:
                    depth[quote_at] += 1
                    depth[number] -= 1
                quote_at = number if quote_at is None else None
            elif bracket in open_at:
                open_at[bracket].append(number)
            elif open_at[_OPENING[bracket]]:
                depth[open_at[_OPENING[bracket]].pop()] += 1
                depth[number] -= 1

    calls: list[Call] = []
    around = 0
    for number, (start, end) in enumerate(spans):
        around += depth[number]
        try:
            inside = _calls_of(read_json(text[start:end]))
        except ValueError:  # a key twice, nested too deeply, or a number of thousands of digits
            inside = [_UNREADABLE] if _BROKEN_CALL.search(text[start:end]) else []
        is_in_apostrophes = between[number].endswith("'") and between[number + 1].startswith("'")
        calls += [_UNREADABLE] if inside and (around or is_in_apostrophes) else inside
    return calls + [_UNREADABLE] * unreadable


def _calls_of(value: object, *, named: bool = True) -> list[Call]:
    """The calls that a JSON value describes, wherever in it; what is in a call's arguments is none. With `named` a name
    alone makes an object a call: in lists, `tool_calls` and `function`. Under another key it needs arguments too."""
    if isinstance(value, str):
        return [_UNREADABLE] if ("{" in value or "<" in value) and _calls_in(value) else []
    if isinstance(value, list):
        items = [_calls_of(item, named=named) for item in value]
        return [call for calls in items for call in calls or [_UNREADABLE]] if any(items) else []
    if not isinstance(value, dict):
        return []
    names = [key for key in (*_NAMES, *_OTHER_NAMES) if key in value]
    given = [key for key in (*_ARGUMENTS, *_OTHER_ARGUMENTS) if key in value]
    inner = {key: item for key, item in value.items() if key not in given}
    calls = [call for key, item in inner.items() for call in _calls_of(item, named=key in _HOLDERS)]
    if given and ("function" in value or (not names and "arguments" in given)):
        return [*calls, _UNREADABLE]  # arguments of a call whose name is elsewhere or missing
    # A name alone is not enough where calls are inside: an OpenAI message has a name as well.
    is_call = bool(names) and (bool(given) or (named and not calls and names[0] in _NAMES))
    return [*calls, _call(value, names, given)] if is_call else calls


def _call(value: dict[str, object], names: list[str], given: list[str]) -> Call:
    """The one call of an object, or `_UNREADABLE` where it has two names or arguments, or they are of a wrong type."""
    name = value[names[0]]
    arguments = value[given[0]] if given else {}
    if isinstance(arguments, str):  # OpenAI sends arguments as JSON inside a string
        arguments = parsed_json(arguments)
    is_plain = {*names, *given} <= {*_NAMES, *_ARGUMENTS} and len(names) == 1 and len(given) <= 1
    if not is_plain or not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return _UNREADABLE
    return name, json.dumps(_canonical(arguments), sort_keys=True)


def _canonical(value: object) -> object:
    """1.0 and 1 are the same argument."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return value
