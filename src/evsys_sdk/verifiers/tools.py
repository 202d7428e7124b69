"""Verifier for tool calls: were the right tools called with the right arguments, in any order?

In: a completion that holds tool calls as JSON, and the calls expected. Out: 1.0, 0.0, or a share of them.
Read are: a list of calls, one call, `{"tool_calls": [...]}`, OpenAI's `function` form, `<tool_call>` blocks and
fenced JSON. An output without readable calls made no calls; an `expected` without them is an error of the task.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from evsys_sdk.answers import answer_in, parsed_json, texts_between
from evsys_sdk.registry import register_verifier
from evsys_sdk.verifiers.values import values_in

Call = tuple[str, str]
"""Tool name and its arguments as canonical JSON."""

_BEGIN, _END = re.compile(r"<tool_call>"), re.compile(r"</tool_call>")
_NAMES = ("name", "tool_slug", "tool")
_ARGUMENTS = ("arguments", "args", "parameters", "input")


@register_verifier("tool_calls_match", yields=True)
def tool_calls_match(
    completion: str, expected: Any, *, partial_credit: bool = False, ignore_arguments: bool = False
) -> float:
    """Are the calls in the completion the expected ones, order aside?"""
    wanted = _calls(parsed_json(expected) if isinstance(expected, str) else expected)
    if wanted is None:
        raise ValueError("tool_calls_match needs `expected`: a list of {name, arguments}")
    made = _calls_in(completion)
    if ignore_arguments:
        wanted, made = [(name, "") for name, _ in wanted], [(name, "") for name, _ in made]
    if not partial_credit or not wanted:
        return float(Counter(made) == Counter(wanted))
    right = (Counter(made) & Counter(wanted)).total()
    return right / max(len(made), len(wanted))  # calling everything there is must not pay


def _calls_in(completion: str) -> list[Call]:
    blocks = texts_between(completion, _BEGIN, _END)
    if blocks:
        per_block = [_calls(parsed_json(block.strip())) for block in blocks]
        return [call for calls in per_block for call in (calls or [("", "")])]  # unreadable: made, and wrong
    answer = answer_in(completion)
    whole = _calls(parsed_json(answer))
    if whole is not None:
        return whole
    # Every list and every call in the text: calls behind the first list are made too.
    return [call for value in values_in(answer) for call in _calls(value) or []]


def _calls(value: Any) -> list[Call] | None:
    """The calls that a JSON value describes; None when it describes none."""
    if isinstance(value, dict):
        value = value.get("tool_calls", [value])
    if not isinstance(value, list):
        return None
    calls = [_call(item) for item in value]
    return None if None in calls else [call for call in calls if call is not None]


def _call(item: Any) -> Call | None:
    if isinstance(item, dict) and isinstance(item.get("function"), dict):
        item = item["function"]
    if not isinstance(item, dict):
        return None
    name = next((item[key] for key in _NAMES if isinstance(item.get(key), str)), None)
    if name is None:
        return None
    arguments: Any = next((item[key] for key in _ARGUMENTS if item.get(key) is not None), {})
    if isinstance(arguments, str):  # OpenAI sends arguments as JSON inside a string
        arguments = parsed_json(arguments) if parsed_json(arguments) is not None else arguments
    return name, json.dumps(_canonical(arguments), sort_keys=True)


def _canonical(value: Any) -> Any:
    """1.0 and 1 are the same argument."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return value
