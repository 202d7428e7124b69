"""Every way of writing a verifier comes out as one; none of them can fail silently."""

from __future__ import annotations

import asyncio
import math

import pytest

from evsys_sdk.errors import Cancelled, VerifierFailed
from evsys_sdk.protocols import VerificationResult
from evsys_sdk.registry import register_verifier, schema_for, verifiers
from evsys_sdk.verifiers.adapt import as_verifier, check_verifier_params, run_verifier


@pytest.fixture(autouse=True)
def registry_as_before():
    verifiers.names()
    before = dict(verifiers.entries)
    yield
    verifiers.entries.clear()
    verifiers.entries.update(before)


def three_arguments(model_output, expected, params):
    return float(model_output == expected) * params["scale"]


def spread_params(completion, expected, *, scale: float = 1.0):
    return float(completion == expected) * scale


def one_more_setting(completion, expected, scale=1.0):
    return float(completion == expected) * scale


def any_params(completion, expected, **params):
    return float(completion == expected) * params["scale"]


class WithVerify:
    def __init__(self, scale=1.0):
        self.scale = scale

    def verify(self, *, prompt, completion, target):
        return VerificationResult(reward=float(completion == target) * self.scale, info={"prompt": prompt})


class WithCall:
    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, completion, expected):
        return float(completion == expected) * self.scale


class CallTakesParams:
    def __call__(self, completion, expected, params):
        return float(completion == expected) * params["scale"]


FORMS = [three_arguments, spread_params, one_more_setting, any_params, WithVerify, WithCall, CallTakesParams]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_form_gives_the_same_reward(form):
    verifier = as_verifier(form)
    assert verifier("a", "a", {"scale": 0.5}) == 0.5
    assert verifier("b", "a", {"scale": 0.5}) == 0.0


def test_a_third_argument_without_default_is_the_params_mapping_whatever_it_is_called():
    assert as_verifier(lambda output, expected, p: p["scale"])("", None, {"scale": 0.25}) == 0.25


def test_a_third_argument_of_a_plain_type_is_a_setting():
    def close_enough(completion: str, expected: float, tolerance: float) -> bool:
        return abs(float(completion) - expected) <= tolerance

    assert as_verifier(close_enough)("1.1", 1.0, {"tolerance": 0.2}) == 1.0


def test_the_prompt_reaches_the_class_form():
    verdict = as_verifier(WithVerify).judge("a", "a", {}, prompt="what?")
    assert verdict.info == {"prompt": "what?"}


def test_an_instance_is_made_once_per_params():
    made = []

    class Slow:
        def __init__(self, words=1):
            made.append(words)

        def verify(self, *, prompt, completion, target):
            return 1.0

    verifier = as_verifier(Slow)
    for words in (1, 1, 2, 1):
        verifier("", None, {"words": words})
    assert made == [1, 2]


class Neither:
    pass


class VerifyTakesOtherWords:
    def verify(self, output, gold):
        return 1.0


async def asynchronous(completion, expected):
    return 1.0


class VerifyIsAsync:
    async def verify(self, *, prompt, completion, target):
        return 1.0


@pytest.mark.parametrize("target", [VerifyIsAsync, asynchronous])
def test_an_async_verifier_is_awaited_and_plain_code_waits_for_it(target):
    verifier = as_verifier(target)
    assert verifier("a", "a", {}) == 1.0
    assert asyncio.run(verifier.ajudge("a", "a", {})).reward == 1.0


def test_a_plain_verifier_can_be_awaited_too():
    assert asyncio.run(as_verifier(spread_params).ajudge("a", "a", {"scale": 0.5})).reward == 0.5


def test_what_an_async_verifier_raises_is_named_with_its_task():
    async def breaks(completion, expected):
        raise TimeoutError("no answer")

    with pytest.raises(VerifierFailed, match="'breaks' on task 't1' failed: TimeoutError: no answer"):
        asyncio.run(as_verifier(breaks).ajudge("", None, {}, task_id="t1"))


@pytest.mark.parametrize("target", [7, "exact_match", Neither, VerifyTakesOtherWords, lambda output: 1.0])
def test_what_has_no_form_is_refused_at_registration_with_the_forms(target):
    with pytest.raises(TypeError, match=r"verify\(\*, prompt, completion, target\)"):
        register_verifier("never_there")(target)


@pytest.mark.parametrize("value", [True, 1, 0.5])
def test_bools_and_ints_are_rewards(value):
    assert as_verifier(lambda output, expected, params: value)("", None, {}) == float(value)


def test_a_numpy_scalar_is_a_reward():
    numpy = pytest.importorskip("numpy")
    assert as_verifier(lambda output, expected, params: numpy.float32(0.5))("", None, {}) == 0.5


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "1", [1.0], {}])
def test_anything_else_is_a_failure_and_never_a_zero(value):
    with pytest.raises(VerifierFailed, match="a reward is a finite number"):
        as_verifier(lambda output, expected, params: value)("", None, {})


def test_a_raising_verifier_is_named_with_its_task():
    @register_verifier("divides")
    def divides(model_output, expected, params):
        return 1 / 0

    with pytest.raises(VerifierFailed, match=r"'divides' on task 't1' failed: ZeroDivisionError"):
        run_verifier("divides", "", None, {}, task_id="t1")


def test_a_cancelled_run_passes_through_a_verifier():
    def stops(model_output, expected, params):
        raise Cancelled("enough")

    with pytest.raises(Cancelled):
        as_verifier(stops)("", None, {})


def test_an_unknown_setting_is_answered_with_the_nearest_right_word():
    problem = check_verifier_params("exact_match", {"case_sensitve": False})
    assert problem == "case_sensitve: unknown key; closest: case_sensitive"


def test_a_setting_of_the_wrong_type_is_found_before_anything_runs():
    assert "case_sensitive" in str(check_verifier_params("exact_match", {"case_sensitive": "perhaps"}))
    assert check_verifier_params("exact_match", {"case_sensitive": False}) is None


def test_the_params_of_a_class_are_checked_by_its_config_or_its_constructor():
    assert as_verifier(WithVerify).problem({"scales": 2}) == "scales: unknown key; closest: scale"
    assert as_verifier(WithVerify).problem({"scale": 2}) is None


def test_a_rollout_with_wrong_params_says_so():
    with pytest.raises(VerifierFailed, match="params: scales: unknown key; closest: scale"):
        as_verifier(spread_params)("a", "a", {"scales": 2})


def test_a_setting_arrives_as_the_type_its_signature_names():
    def strict(completion, expected, *, flag: bool = True):
        return flag is False

    assert as_verifier(strict)("", None, {"flag": "no"}) == 1.0


def test_a_functions_settings_have_a_schema():
    properties = schema_for("verifier", "exact_match")["properties"]
    assert properties["case_sensitive"]["type"] == "boolean"


def test_a_label_is_the_registered_name_of_a_class():
    @register_verifier("my_style")
    class Style:
        def verify(self, *, prompt, completion, target):
            raise ValueError("no style")

    with pytest.raises(VerifierFailed, match="verifier 'my_style'"):
        run_verifier("my_style", "", None, {})
