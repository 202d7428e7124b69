"""The answer inside a completion, and whether it is the one wanted."""

from __future__ import annotations

import pytest

from evsys_sdk.answers import answer_in, has_answer, same_answer


def test_the_last_pair_of_tags_holds_the_answer():
    assert answer_in("I write <answer>like this</answer>. So: <ANSWER>\n Paris </ANSWER>.") == "Paris"


def test_without_tags_the_whole_completion_is_the_answer():
    assert answer_in("  Paris\n") == "Paris"


def test_an_open_tag_is_no_answer():
    assert not has_answer("<answer>Paris") and not has_answer("<answer> </answer>")


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<answer>GMAIL_SEND</answer>", "GMAIL_SEND"),
        ("GMAIL_SEND", "<answer>GMAIL_SEND</answer>"),
        ("GMAIL_SEND", {"tool_slug": "GMAIL_SEND", "toolkit": "gmail"}),
        ('{"tool_slug": "GMAIL_SEND", "toolkit": "gmail"}', {"tool_slug": "GMAIL_SEND"}),
        ("42", 42),
        ("42", 42.0),
        ("true", True),
        ("b", ["a", "b"]),
        ('{"x": [1, 2]}', {"x": [1, 2]}),
    ],
)
def test_equal_answers_in_different_clothes_are_the_same(completion, expected):
    assert same_answer(completion, expected)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("paris", "Paris"), ("Paris, France", "Paris"), ("1", True), ("", "Paris"), ("a, b", ["a", "b"]), ("41", 42)],
)
def test_different_answers_are_not(completion, expected):
    assert not same_answer(completion, expected)
