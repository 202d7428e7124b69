"""The text verifiers: what passes, what does not, and what is a mistake in the task."""

from __future__ import annotations

import pytest

from evsys_sdk.errors import VerifierFailed
from evsys_sdk.verifiers import run_verifier


def test_exact_match_looks_inside_the_answer_tags():
    assert run_verifier("exact_match", "So I say <answer> 42 </answer>.", "42", {}) == 1.0
    assert run_verifier("exact_match", "So I say 42.", "42", {}) == 0.0


def test_exact_match_can_ignore_case():
    assert run_verifier("exact_match", "PARIS", "paris", {}) == 0.0
    assert run_verifier("exact_match", "PARIS", "paris", {"case_sensitive": False}) == 1.0


def test_an_empty_completion_matches_no_answer():
    assert run_verifier("exact_match", "", "42", {}) == 0.0


def test_contains_wants_all_parts_unless_told_any():
    assert run_verifier("contains", "red and blue", ["red", "blue"], {}) == 1.0
    assert run_verifier("contains", "red and green", ["red", "blue"], {}) == 0.0
    assert run_verifier("contains", "red and green", ["red", "blue"], {"require": "any"}) == 1.0


def test_regex_match_takes_its_pattern_from_either_place():
    assert run_verifier("regex_match", "id: 1234", r"\d{4}", {}) == 1.0
    assert run_verifier("regex_match", "id: 12", None, {"pattern": r"\d{4}"}) == 0.0


def test_a_full_match_covers_the_whole_answer():
    assert run_verifier("regex_match", "<answer>1234</answer>", r"\d+", {"full_match": True}) == 1.0
    assert run_verifier("regex_match", "<answer>1234!</answer>", r"\d+", {"full_match": True}) == 0.0


@pytest.mark.parametrize(
    ("params", "good", "bad"),
    [
        ({}, "<answer>x</answer>", "x"),
        ({"format": "json"}, '{"a": 1}', "{a: 1}"),
        ({"pattern": r"\w+: .*"}, "answer: 3", "3"),
    ],
)
def test_format_only_asks_for_the_form_and_not_for_the_content(params, good, bad):
    assert run_verifier("format_only", good, None, params) == 1.0
    assert run_verifier("format_only", bad, None, params) == 0.0


@pytest.mark.parametrize(
    ("name", "expected", "params"),
    [
        ("exact_match", None, {}),
        ("contains", "", {}),
        ("contains", None, {}),
        ("contains", [], {}),
        ("regex_match", None, {}),
        ("regex_match", "(", {}),
        ("format_only", None, {"format": "regex"}),
        ("format_only", None, {"format": "yaml"}),
    ],
)
def test_a_task_that_cannot_be_judged_is_a_failure_and_not_a_score(name, expected, params):
    with pytest.raises(VerifierFailed):
        run_verifier(name, "anything", expected, params)
