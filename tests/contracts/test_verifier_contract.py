"""The verifier contract, over every built-in and over plain classes and functions that inherit nothing."""

from __future__ import annotations

import math

import pytest

from evsys_sdk.errors import VerifierFailed
from evsys_sdk.registry import get_verifier, list_verifiers, register_verifier, schema_for, verifiers
from evsys_sdk.verifiers import run_verifier

EXPECTED = {
    "exact_match": "yes",
    "contains": "yes",
    "regex_match": "yes",
    "tool_calls_match": [{"name": "yes", "arguments": {}}],
    "json_match": {"answer": "yes"},
    "numeric_match": 3,
    "weighted": "yes",
}
PARAMS = {
    "weighted": {"parts": [{"fn_name": "exact_match", "weight": 2}, {"fn_name": "contains"}]},
    "llm_judge": {"judge_model": "claude-x", "rubric": "?"},
    "e2b": {"dockerfile": "FROM debian", "test_sh": "grep -q yes output.txt"},
}
ASK_OUTSIDE = {"llm_judge", "e2b"}  # a model, a sandbox: their own tests attack them
BUILT_INS = [name for name in list_verifiers() if verifiers.entries[name].origin.startswith("evsys_sdk.")]
PURE = [name for name in BUILT_INS if name not in ASK_OUTSIDE]
OUTPUTS = ["", "yes", "no", "<answer>yes</answer>", '[{"name": "yes"}]', "{" * 5000, "\x00\ud800", "yes " * 10_000]


@pytest.fixture(autouse=True)
def registry_as_before(monkeypatch):
    monkeypatch.setattr(verifiers, "entries", dict(verifiers.entries))


@pytest.mark.parametrize("name", PURE)
@pytest.mark.parametrize("output", OUTPUTS, ids=range(len(OUTPUTS)))
def test_a_built_in_gives_a_reward_between_0_and_1_for_any_output(name, output):
    reward = run_verifier(name, output, EXPECTED.get(name), PARAMS.get(name, {}))
    assert isinstance(reward, float) and math.isfinite(reward) and 0.0 <= reward <= 1.0


@pytest.mark.parametrize("name", PURE)
def test_a_built_in_gives_an_empty_output_nothing(name):
    assert run_verifier(name, "", EXPECTED.get(name), PARAMS.get(name, {})) == 0.0


@pytest.mark.parametrize("name", BUILT_INS)
def test_a_built_in_closes_its_settings(name):
    assert schema_for("verifier", name)["additionalProperties"] is False
    with pytest.raises(VerifierFailed, match="unknown key"):
        run_verifier(name, "yes", EXPECTED.get(name), {**PARAMS.get(name, {}), "no_such_setting": 1})


def test_a_plain_class_without_a_base_is_a_verifier():
    @register_verifier("plain_verifier")
    class Plain:
        def verify(self, *, prompt, completion, target):
            return len(completion) / len(target)

    assert run_verifier("plain_verifier", "ab", "abcd", {}) == 0.5
    assert Plain.name == "plain_verifier"


@pytest.mark.parametrize(
    "function",
    [lambda model_output, expected, params: 1.0, lambda completion, expected, **params: 1.0],
    ids=["three arguments", "spread params"],
)
def test_a_plain_function_is_a_verifier(function):
    register_verifier("plain_function")(function)
    assert get_verifier("plain_function").target is function
    assert run_verifier("plain_function", "x", None, {"anything": "goes"}) == 1.0


@pytest.mark.parametrize("output", ["<answer>yes</answer>", "no"])
@pytest.mark.parametrize("name", PURE)
def test_get_verifier_answers_every_way_of_calling_one(name, output):
    verifier, expected, params = get_verifier(name), EXPECTED.get(name), PARAMS.get(name, {})
    rewards = [
        verifier(output, expected, params),
        verifier(output, expected, **params),
        verifier(**params).verify(prompt="Yes?", completion=output, target=expected).reward,
    ]
    assert rewards == [run_verifier(name, output, expected, params)] * 3


def test_the_params_of_a_verifier_reach_it_in_every_way_of_calling_it():
    verifier, json_text = get_verifier("format_only"), '{"a": 1}'
    assert verifier(json_text, None, {"format": "json"}) == 1.0
    assert verifier(json_text, None, format="json") == 1.0
    assert verifier(format="json").verify(prompt="", completion=json_text, target=None).reward == 1.0
    assert verifier(json_text, None) == 0.0
    with pytest.raises(VerifierFailed, match="formt"):
        verifier(json_text, None, formt="json")
