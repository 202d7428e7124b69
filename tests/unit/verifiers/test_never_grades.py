"""A verifier that can grade nothing is refused before anything is spent."""

from __future__ import annotations

import json

import pytest

from evsys_sdk.data_types import HarborTask, InProcessVerifier
from evsys_sdk.running.task_checks import undoable_tasks
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
        ("regex_match", None, {}, "needs a pattern"),
        ("format_only", None, {"pattern": "["}, "unterminated"),
        ("format_only", None, {"format": "regex"}, "needs params.pattern"),
        ("exact_match", "", {}, "empty"),
        ("exact_match", " \n", {}, "empty"),
        ("exact_match", ["", " "], {}, "empty"),
        ("exact_match", [], {}, "needs `expected`"),
        ("exact_match", None, {}, "needs `expected`"),
        ("exact_match", NAN, {}, "NaN"),
        ("contains", "", {}, "empty"),
        ("contains", ["a", ""], {}, "non-empty"),
        ("numeric_match", NAN, {}, "NaN"),
        ("numeric_match", "nan", {}, "a number"),
        ("numeric_match", "", {}, "empty"),
        ("numeric_match", "seven", {}, "a number"),
        ("json_match", {"a": [1, NAN]}, {}, "NaN"),
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
