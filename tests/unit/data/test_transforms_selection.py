"""dedupe and filter: which rows stay."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from evsys_sdk import patterns
from evsys_sdk.data.transforms import Dedupe, Filter
from evsys_sdk.errors import DataError


def kept(transform: Any, values: list[Any], key: str = "v") -> list[int]:
    """Indices of the rows that stay; `...` leaves the value out."""
    rows = [{"i": index} | ({} if value is ... else {key: value}) for index, value in enumerate(values)]
    return [row["i"] for row in transform(rows)]


def test_the_first_of_equal_rows_stays() -> None:
    assert kept(Dedupe(key="v"), ["a", "b", "a", "c", "b"]) == [0, 1, 3]


def test_equal_means_the_same_json_value() -> None:
    assert kept(Dedupe(key="v"), [1, True, "1", 1.5, [1], [1], {"a": 1, "b": 2}, {"b": 2, "a": 1}]) == [
        0,
        1,
        2,
        3,
        4,
        6,
    ]


def test_several_keys_must_all_agree() -> None:
    rows = [{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 1, "c": 3}]
    assert Dedupe(key=["a", "b"])(rows) == rows[:2]


def test_without_a_key_whole_rows_are_compared() -> None:
    assert Dedupe()([{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1}]) == [{"a": 1, "b": 2}, {"a": 1}]


def test_each_pass_begins_anew() -> None:
    dedupe = Dedupe(key="v")
    assert kept(dedupe, ["a", "a"]) == kept(dedupe, ["a", "a"]) == [0]


@pytest.mark.parametrize("value", [..., None])
def test_a_row_without_the_key_is_an_error_and_not_a_duplicate(value: Any) -> None:
    with pytest.raises(DataError, match=r"dedupe: row 1 \(counting from 0\) has no 'v'"):
        kept(Dedupe(key="v"), ["a", value])


@pytest.mark.parametrize(
    ("condition", "values", "expected"),
    [
        ({"equals": "a"}, ["a", "b", ..., None], [0]),
        ({"not_equals": "a"}, ["a", "b", ..., None], [1]),
        ({"in": ["a", "b"]}, ["a", "b", "c", ...], [0, 1]),
        ({"not_in": ["a", "b"]}, ["a", "b", "c", ...], [2]),
        ({"min": 2}, [1, 2, 2.5, ...], [1, 2]),
        ({"max": 2}, [1, 2, 2.5, ...], [0, 1]),
        ({"min": 0}, [0, -1], [0]),
        ({"min_length": 2}, ["a", "ab", [1, 2], ...], [1, 2]),
        ({"max_length": 1}, ["a", "ab", [], ...], [0, 2]),
        ({"contains": "b"}, ["abc", "a", ["b"], ["bb"], {"b": 1}, ...], [0, 2, 4]),
        ({"regex": "^a.c$"}, ["abc", "xabc", ...], [0]),
        ({"exists": True}, ["a", 0, "", ..., None], [0, 1, 2]),
        ({"exists": False}, ["a", 0, "", ..., None], [3, 4]),
        ({"min": 1, "max": 3, "not_equals": 2}, [0, 1, 2, 3, 4], [1, 3]),
        ({"equals": False}, [True, False], [1]),
    ],
)
def test_rows_that_meet_every_condition_stay(condition: dict[str, Any], values: list[Any], expected: list[int]) -> None:
    assert kept(Filter(key="v", **condition), values) == expected


def test_a_dotted_key_looks_inside() -> None:
    rows = [{"meta": {"lang": "en"}}, {"meta": {"lang": "de"}}, {"meta": None}]
    assert Filter(key="meta.lang", equals="de")(rows) == rows[1:2]


@pytest.mark.parametrize(
    ("condition", "value", "words"),
    [
        ({"min": 1}, "3", "'3', which is not a number"),
        ({"max": 1}, True, "True, which is not a number"),
        ({"min_length": 1}, 3, "3, which has no length"),
        ({"contains": "a"}, 3, "3, which contains nothing"),
        ({"contains": 1}, "a", "holds text"),
        ({"regex": "a"}, 3, "3, which is not text"),
    ],
)
def test_a_value_that_cannot_be_compared_is_an_error(condition: dict[str, Any], value: Any, words: str) -> None:
    with pytest.raises(DataError, match=rf"filter: row 0 \(counting from 0\) holds .*{words.split('holds ')[-1]}"):
        kept(Filter(key="v", **condition), [value])


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"key": "v"}, "has no condition; give at least one of equals"),
        ({"equals": 1}, "key"),
        ({"key": "v", "exists": False, "min": 1}, "leaves no value"),
        ({"key": "v", "regex": "("}, "not a regular expression"),
        ({"key": "v", "inn": [1]}, "inn"),
    ],
)
def test_a_filter_that_makes_no_sense_is_refused(params: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Filter(**params)


def test_a_regex_that_backtracks_for_ever_is_an_error_that_names_the_row() -> None:
    """In a process of its own: without a limit it holds Python, and a test cannot end it."""
    script = """
from evsys_sdk import patterns
from evsys_sdk.data.transforms import Filter
from evsys_sdk.errors import DataError
patterns.PATTERN_SECONDS = 0.5
try:
    Filter(key="v", regex=r"(a+)+$")([{"v": "baaa"}, {"v": "a" * 60 + "!"}])
except DataError as exc:
    print(exc)
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert told.stdout == (
        "filter: row 1 (counting from 0) cannot be matched with regex: the pattern '(a+)+$' took longer than "
        "0.5 seconds on a text of 61 characters; write it without repeats inside repeats\n"
    ), told.stderr


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"^\s*(\w+\s?)+:", r"\d"])
def test_a_regex_keeps_the_same_rows_in_the_process_and_beside_it(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = ["baaa", "a b", "key word: 1", "", "é\u2028a", "\ud800a", "a\n"]
    expected = [index for index, value in enumerate(values) if re.search(pattern, value)]
    for most in (0, patterns.QUICK_STEPS):
        monkeypatch.setattr(patterns, "QUICK_STEPS", most)
        assert kept(Filter(key="v", regex=pattern), values) == expected
