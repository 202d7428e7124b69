"""Values are compared as values: JSON and numbers, wherever the completion put them."""

from __future__ import annotations

import json

import pytest

from evsys_sdk.errors import VerifierFailed
from evsys_sdk.verifiers import run_verifier

CITY = {"city": "Oslo", "sizes": [1, 2], "open": True}


def same_json(completion: str, expected, **params) -> float:
    return run_verifier("json_match", completion, expected, params)


def number(completion: str, expected, **params) -> float:
    return run_verifier("numeric_match", completion, expected, params)


@pytest.mark.parametrize(
    "completion",
    [
        json.dumps(CITY),
        json.dumps(dict(reversed(CITY.items())), indent=2),
        f"<answer>{json.dumps(CITY)}</answer>",
        f"Here it is:\n```json\n{json.dumps(CITY)}\n```",
        f"I found {json.dumps(CITY)} for you.",
        json.dumps({**CITY, "sizes": [1.0, 2]}),
    ],
)
def test_json_is_found_wherever_it_stands(completion):
    assert same_json(completion, CITY) == 1.0
    assert same_json(completion, json.dumps(CITY)) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "Oslo",
        "{" * 3000,
        json.dumps({**CITY, "more": 1}),
        json.dumps({**CITY, "open": 1}),
        json.dumps({**CITY, "sizes": [2, 1]}),
        json.dumps({"city": "Oslo"}),
        json.dumps([CITY]),
    ],
)
def test_other_json_does_not_match(completion):
    assert same_json(completion, CITY) == 0.0


def test_a_subset_allows_more_keys_at_every_depth_and_no_fewer():
    wanted = {"a": {"b": 1}, "c": [{"d": 2}]}
    assert same_json(json.dumps({"a": {"b": 1, "x": 0}, "c": [{"d": 2, "y": 0}], "z": 0}), wanted, subset=True) == 1.0
    assert same_json(json.dumps({"a": {}, "c": [{"d": 2}]}), wanted, subset=True) == 0.0


def test_lists_may_come_in_another_order_when_asked_for():
    assert same_json("[3, 1, 2, 1]", [1, 1, 2, 3], ignore_order=True) == 1.0
    assert same_json("[3, 1, 2, 2]", [1, 1, 2, 3], ignore_order=True) == 0.0
    assert same_json("[3, 1, 2, 1]", [1, 1, 2, 3]) == 0.0


def test_unordered_items_that_fit_several_places_find_each_its_own():
    # {"a": 1} fits both found items; taking the first one greedily would leave {"a": 1, "b": 2} without a partner.
    found = [{"a": 1, "b": 2}, {"a": 1}]
    assert same_json(json.dumps(found), [{"a": 1}, {"a": 1, "b": 2}], ignore_order=True, subset=True) == 1.0
    assert same_json(json.dumps(found), [{"b": 2}, {"b": 2}], ignore_order=True, subset=True) == 0.0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("42", 42),
        ("The answer is 42.", 42),
        ("First 7, then 12; so 42", "42"),
        ("<answer>1,234.50</answer> and not 9", 1234.5),
        ("$1,234,567", 1234567),
        ("-0.5", -0.5),
        ("\u22123", -3),
        ("3/4", 0.75),
        ("1e-3", 0.001),
        (".5", 0.5),
        ("5-3 = 2", 2),
        ("42%", 42),
        ("x2 = 7", 7),
    ],
)
def test_the_last_number_is_the_answer(completion, expected):
    assert number(completion, expected) == 1.0


@pytest.mark.parametrize("completion", ["", "none", "41", "42 or 43", "1e999", "-42", "4 2", "1/0", "NaN", "Infinity"])
def test_another_number_or_none_does_not_match(completion):
    assert number(completion, 42) == 0.0


def test_how_near_is_near_enough_can_be_said():
    assert number("3.14", 3.14159) == 0.0
    assert number("3.14", 3.14159, tolerance=0.01) == 1.0
    assert number("101", 100, relative_tolerance=0.02) == 1.0
    assert number("103", 100, relative_tolerance=0.02) == 0.0


@pytest.mark.parametrize(
    ("name", "expected", "params"),
    [
        ("json_match", None, {}),
        ("json_match", {}, {"subset": True}),
        ("numeric_match", None, {}),
        ("numeric_match", "many", {}),
        ("numeric_match", True, {}),
        ("numeric_match", 1, {"tolerance": -1}),
        ("numeric_match", 1, {"tolerance": float("inf")}),
        ("numeric_match", 1, {"relative_tolerance": 1.0}),
    ],
)
def test_a_task_that_cannot_be_judged_is_a_failure_and_not_a_score(name, expected, params):
    with pytest.raises(VerifierFailed):
        run_verifier(name, "1", expected, params)
