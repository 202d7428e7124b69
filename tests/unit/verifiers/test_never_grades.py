"""A verifier that can grade nothing is refused before anything is spent."""

from __future__ import annotations

import itertools
import json
import math
import re

import pytest

from evsys_sdk.answers import same_answer
from evsys_sdk.checks.benchmarks import undoable_tasks
from evsys_sdk.data_types import HarborTask, InProcessVerifier
from evsys_sdk.patterns import matches_nothing
from evsys_sdk.verifiers.grading import grading_problem

NAN = json.loads("NaN")


def task(fn_name, expected, **params):
    verifier = InProcessVerifier(fn_name=fn_name, expected=expected, params=params)
    return HarborTask(task_id="t", instruction="i", verifier=verifier)


@pytest.mark.parametrize(
    ("fn_name", "expected", "params", "told"),
    [
        ("regex_match", "a(b", {}, "unterminated|missing"),
        ("regex_match", None, {"pattern": "*a"}, "nothing to repeat"),
        ("regex_match", "", {}, "empty"),
        ("regex_match", "(?!)", {}, "no text matches"),
        ("regex_match", None, {"pattern": r"[^\s\S]"}, "no text matches"),
        ("regex_match", "a^b", {"case_sensitive": False}, "no text matches"),
        ("format_only", None, {"format": "regex", "pattern": "x$y"}, "no text matches"),
        ("weighted", "a", {"parts": [{"fn_name": "regex_match", "expected": "(?!a)a"}]}, "no text matches"),
        ("exact_match", {"answer": None}, {}, "empty"),
        ("exact_match", "\u200b\u00a0", {}, "empty"),
        ("json_match", "<answer> </answer>", {}, "empty"),
        ("regex_match", None, {}, "needs a pattern"),
        ("format_only", None, {"pattern": "["}, "unterminated"),
        ("format_only", None, {"format": "regex"}, "needs params.pattern"),
        ("exact_match", "", {}, "empty"),
        ("exact_match", " \n", {}, "empty"),
        ("exact_match", ["", " "], {}, "empty"),
        ("exact_match", "<answer></answer>", {}, "empty"),
        ("exact_match", "It is <ANSWER> \n</ANSWER>.", {}, "empty"),
        ("exact_match", "<answer>7</answer> or <answer> </answer>", {}, "empty"),
        ("exact_match", ["<answer></answer>", ""], {}, "empty"),
        ("exact_match", {"answer": ""}, {}, "empty"),
        ("exact_match", {"tool_slug": ["", "<answer> </answer>"]}, {}, "empty"),
        ("json_match", '""', {}, "empty"),
        ("numeric_match", "<answer></answer>", {}, "a number"),
        ("weighted", "<answer></answer>", {"parts": [{"fn_name": "exact_match"}]}, "empty"),
        ("exact_match", [], {}, "needs `expected`"),
        ("exact_match", None, {}, "needs `expected`"),
        ("exact_match", NAN, {}, "NaN"),
        ("contains", "", {}, "empty"),
        ("contains", ["a", ""], {}, "non-empty"),
        ("numeric_match", NAN, {}, "NaN"),
        ("numeric_match", "nan", {}, "a number"),
        ("numeric_match", "", {}, "empty"),
        ("numeric_match", "seven", {}, "a number"),
        ("numeric_match", 5, {"tolerance": NAN}, "tolerance.*finite"),
        ("numeric_match", 5, {"tolerance": math.inf}, "tolerance.*finite"),
        ("numeric_match", 5, {"tolerance": -1}, "tolerance.*greater than or equal to 0"),
        ("numeric_match", 5, {"relative_tolerance": NAN}, "relative_tolerance.*finite"),
        ("numeric_match", 5, {"relative_tolerance": 1.0}, "relative_tolerance.*less than 1"),
        ("numeric_match", 5, {"relative_tolerance": -0.1}, "relative_tolerance.*greater than or equal to 0"),
        ("weighted", 5, {"parts": [{"fn_name": "numeric_match", "params": {"tolerance": NAN}}]}, "tolerance"),
        ("weighted", 5, {"parts": [{"fn_name": "exact_match", "weight": NAN}]}, "weight.*finite"),
        ("weighted", 5, {"parts": [{"fn_name": "exact_match", "weight": 1e308}] * 3}, "weights.*too large"),
        ("json_match", {"a": [1, NAN]}, {}, "NaN"),
        ("tool_calls_match", {}, {}, "needs `expected`"),
        ("tool_calls_match", [{"name": "f"}, 5], {}, "needs `expected`"),
        ("json_match", None, {}, "needs `expected`"),
        ("tool_calls_match", "not calls", {}, "needs `expected`"),
        ("tool_calls_match", [{"name": "f", "arguments": {"x": NAN}}], {}, "NaN"),
        ("weighted", "x", {"parts": [{"fn_name": "exact_match"}, {"fn_name": "regex_match", "expected": "("}]}, "part"),
        ("weighted", "", {"parts": [{"fn_name": "exact_match"}]}, "empty"),
    ],
)
def test_what_can_never_grade_is_refused_with_the_reason(fn_name, expected, params, told):
    import re

    why = grading_problem(task(fn_name, expected, **params))
    assert why is not None and re.search(told, why)
    [line] = undoable_tasks([(task(fn_name, expected, **params), "tasks.jsonl:1")])
    assert line.startswith("tasks.jsonl:1: task 't': ") and re.search(told, line)


@pytest.mark.parametrize(
    ("fn_name", "expected", "params"),
    [
        ("regex_match", r"\d+", {}),
        ("regex_match", None, {"pattern": "a|b"}),
        ("regex_match", "", {"pattern": "a|b"}),
        ("format_only", None, {}),
        ("format_only", "", {"format": "json"}),
        ("exact_match", "0", {}),
        ("exact_match", 0, {}),
        ("exact_match", False, {}),
        ("exact_match", ["", "none"], {}),
        ("exact_match", "<answer></answer", {}),
        ("exact_match", "<answer></answer> <answer>7</answer>", {}),
        ("contains", "<answer></answer>", {}),
        ("numeric_match", 0, {}),
        ("json_match", [], {}),
        ("json_match", {}, {}),
        ("tool_calls_match", [], {}),
        ("weighted", "x", {"parts": [{"fn_name": "exact_match"}, {"fn_name": "format_only"}]}),
    ],
)
def test_what_can_grade_is_left_alone(fn_name, expected, params):
    assert grading_problem(task(fn_name, expected, **params)) is None
    assert undoable_tasks([(task(fn_name, expected, **params), "p")]) == []


def test_each_task_is_looked_at_and_like_reasons_are_counted():
    tasks = [(task("exact_match", text), f"tasks.jsonl:{n}") for n, text in enumerate(["a", "", "b", " ", "c"], 1)]
    [line] = undoable_tasks(tasks)
    assert line.startswith("tasks.jsonl:2:") and line.endswith("(and another task)")


PROVED = [
    "(?!)", r"[^\s\S]", r"[^\w\W]", r"[^\x00-\U0010ffff]", "a^b", "a$b", r"a\Ab", r"a\Zb", r"\Z\n", "(?=a)b", "(?!a)a",
    "a(?<!a)", "(?!x*)", r"\b\B", "(?:(?!)|a^b)", "(?:(?!))+", "(?>(?!))", "(?i)(?!)", "(?m)a^b", "(?m)a$^b",
    "(a^)b", "a(?:^b|$c)",
]  # fmt: skip
POSSIBLE = [
    "a", "", "a|(?!)", "(?!)*x", "^$", r"a$\n", "(?m)a$\n^b", "(?m)a\n^b", "(?=a)a", "(?!a)b", "(?=)x", "^a", "a$",
    r"\A\ba\b\Z", "(?:^a)?b", "(?<=a)b", r"[^\s]", "(?:a|^)b", "(?:a^)*b", r"(?m)(?:a\n^)+b", "(",
    "(?s).$", "(?:a$|b)c",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PROVED)
def test_a_pattern_that_no_text_matches_is_known(pattern):
    assert matches_nothing(pattern, re.DOTALL)


@pytest.mark.parametrize("pattern", POSSIBLE)
def test_a_pattern_that_can_match_is_left_alone(pattern):
    assert not matches_nothing(pattern, re.DOTALL)


def test_no_text_matches_what_is_said_to_match_nothing():
    """Every sequence of three of these parts, against every text of four characters or fewer."""
    parts = ["a", r"\n", "^", "$", r"\b", r"\B", r"\Z", "[^a]", "(?=a)", "(?!a)", "(?<!a)", "a*", "(?:a|^b)", "(?m:^)",
             "(?m:$)", "(?:^a){2}", "(?:a$){1,2}", "(?!b*)"]  # fmt: skip
    texts = ["".join(letters) for size in range(5) for letters in itertools.product("ab\n", repeat=size)]
    said = ["".join(chosen) for chosen in itertools.product(parts, repeat=3) if matches_nothing("".join(chosen))]
    assert len(said) > 1000
    assert [pattern for pattern in said if any(map(re.compile(pattern).search, texts))] == []


def test_a_json_text_that_is_expected_is_matched_by_itself():
    for expected in ('{"a": 1}', '{"answer": "x"}'):
        assert same_answer(f"<answer>{expected}</answer>", expected)
