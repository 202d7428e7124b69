"""Several verifiers make one reward; none of them can drop out unnoticed."""

from __future__ import annotations

import asyncio

import pytest

from evsys_sdk.errors import VerifierFailed
from evsys_sdk.registry import register_verifier, verifiers
from evsys_sdk.verifiers import run_verifier


@pytest.fixture(autouse=True)
def registry_as_before(monkeypatch):
    verifiers.names()
    monkeypatch.setattr(verifiers, "entries", dict(verifiers.entries))


def judge(completion, expected, *parts):
    return asyncio.run(verifiers.adapted("weighted").ajudge(completion, expected, {"parts": list(parts)}))


RIGHT = {"fn_name": "exact_match", "weight": 3}
FORM = {"fn_name": "format_only"}


@pytest.mark.parametrize(
    ("completion", "reward"), [("<answer>42</answer>", 1.0), ("42", 0.75), ("<answer>7</answer>", 0.25), ("7", 0.0)]
)
def test_the_reward_is_the_weighted_mean(completion, reward):
    assert judge(completion, "42", RIGHT, FORM).reward == reward
    assert run_verifier("weighted", completion, "42", {"parts": [RIGHT, FORM]}) == reward


def test_a_part_may_expect_something_of_its_own():
    own = {"fn_name": "contains", "expected": "because"}
    assert judge("42 because", "42", {"fn_name": "contains"}, own).reward == 1.0
    assert judge("42", "42", {"fn_name": "contains"}, own).reward == 0.5


def test_what_each_part_gave_is_told():
    parts = judge("42", "42", RIGHT, FORM).info["parts"]
    assert [(part["fn_name"], part["weight"], part["reward"]) for part in parts] == [
        ("exact_match", 3.0, 1.0),
        ("format_only", 1.0, 0.0),
    ]


def test_parts_may_be_async_weighted_and_see_the_prompt():
    @register_verifier("echoes")
    class Echoes:
        async def verify(self, *, prompt, completion, target):
            await asyncio.sleep(0)
            return float(completion == prompt)

    inner = {"fn_name": "weighted", "params": {"parts": [{"fn_name": "echoes"}, FORM]}}
    adapted = verifiers.adapted("weighted")
    assert asyncio.run(adapted.ajudge("hi", None, {"parts": [inner]}, prompt="hi")).reward == 0.5


def test_a_part_that_breaks_breaks_the_whole():
    @register_verifier("breaks")
    def breaks(model_output, expected, params):
        raise RuntimeError("no")

    with pytest.raises(VerifierFailed, match=r"^verifier 'weighted': verifier 'breaks' failed: RuntimeError: no$"):
        judge("42", "42", RIGHT, {"fn_name": "breaks"})


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"fn_name": "exact_mach"}, "'exact_mach' is not a verifier; closest: exact_match"),
        ({"fn_name": "exact_match", "params": {"case": 1}}, "case: unknown key"),
        ({"fn_name": "exact_match", "wieght": 1}, "wieght"),
        ({"fn_name": "exact_match", "weight": 0}, "weight"),
        ({"fn_name": "exact_match", "weight": float("nan")}, "weight"),
    ],
)
def test_a_wrong_part_is_found_before_anything_runs(part, words):
    assert words in str(verifiers.adapted("weighted").why_not({"parts": [RIGHT, part]}))
    with pytest.raises(Exception, match=words):
        judge("42", "42", RIGHT, part)


def test_there_must_be_parts():
    assert "parts" in str(verifiers.adapted("weighted").why_not({"parts": []}))
    assert verifiers.adapted("weighted").why_not({"parts": [RIGHT]}) is None
