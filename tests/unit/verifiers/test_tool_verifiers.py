"""Tool calls are compared as calls: forms and order do not matter, names and arguments do."""

from __future__ import annotations

import json

import pytest

from evsys_sdk.errors import VerifierFailed
from evsys_sdk.verifiers import run_verifier

SEND = {"name": "send", "arguments": {"to": "a@b.c", "copies": 1}}
LIST = {"name": "list", "arguments": {}}


def reward(completion: str, expected, **params) -> float:
    return run_verifier("tool_calls_match", completion, expected, params)


@pytest.mark.parametrize(
    "completion",
    [
        json.dumps([SEND, LIST]),
        json.dumps([LIST, SEND]),
        json.dumps({"tool_calls": [LIST, SEND]}),
        json.dumps([{"function": {"name": "send", "arguments": json.dumps(SEND["arguments"])}}, {"name": "list"}]),
        f"First.\n<tool_call>{json.dumps(SEND)}</tool_call><tool_call>{json.dumps(LIST)}</tool_call>",
        f"Here:\n```json\n{json.dumps([SEND, LIST])}\n```",
        f"I will call {json.dumps([SEND, LIST])} now.",
        f"<answer>{json.dumps([SEND, LIST])}</answer>",
        json.dumps([{"name": "send", "arguments": {"copies": 1.0, "to": "a@b.c"}}, LIST]),
    ],
)
def test_the_same_calls_in_any_form_and_order_match(completion):
    assert reward(completion, [SEND, LIST]) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "I would rather not.",
        json.dumps([SEND]),
        json.dumps([SEND, LIST, LIST]),
        json.dumps([{"name": "send", "arguments": {"to": "x@b.c", "copies": 1}}, LIST]),
        f"<tool_call>{json.dumps(SEND)}</tool_call><tool_call>{json.dumps(LIST)}</tool_call><tool_call>?</tool_call>",
    ],
)
def test_missing_surplus_or_different_calls_do_not(completion):
    assert reward(completion, [SEND, LIST]) == 0.0


def test_no_calls_match_an_empty_expected_list():
    assert reward("Nothing to do.", []) == 1.0
    assert reward(json.dumps([LIST]), []) == 0.0


def test_partial_credit_does_not_pay_for_calling_everything():
    assert reward(json.dumps([SEND]), [SEND, LIST], partial_credit=True) == 0.5
    assert reward(json.dumps([SEND, LIST, LIST, LIST]), [SEND], partial_credit=True) == 0.25


def test_arguments_can_be_left_out_of_the_comparison():
    assert reward(json.dumps([{"name": "send"}]), [SEND], ignore_arguments=True) == 1.0


@pytest.mark.parametrize("expected", [None, "send", [{"arguments": {}}], 3])
def test_an_expected_value_without_calls_is_a_mistake_of_the_task(expected):
    with pytest.raises(VerifierFailed, match="list of"):
        reward("[]", expected)
