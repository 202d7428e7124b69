"""The clients of hosted models, each through its provider's own SDK against a stand-in that speaks its wire format."""

from __future__ import annotations

import asyncio
import builtins
import importlib
import time

import pytest

from evsys_sdk.data_types import image_base64_block, image_url_block, text_block
from evsys_sdk.errors import (
    BackendError,
    BackendUnavailable,
    ConfigError,
    EvsysAuthError,
    EvsysError,
    MissingDependency,
)
from evsys_sdk.eval.row_eval import score_rows
from evsys_sdk.protocols import InferenceClient
from evsys_sdk.registry import inference, metrics

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
BUSY = ("status", 429, {"retry-after": "3"}, "slow down")
BROKEN = ("status", 500, {}, "we are sorry")


def test_the_answer_is_text_by_the_published_signature(provider):
    client = provider.client()
    assert isinstance(client, InferenceClient)
    assert client.generate(prompt="hi", max_tokens=9, temperature=0.5, stop=["\n"]) == "you said hi"
    path, _, body = provider.requests[0]
    sent = {
        "claude": lambda: (path, body["max_tokens"], body["temperature"], body["stop_sequences"]),
        "openai": lambda: (path, body["max_completion_tokens"], body["temperature"], body["stop"]),
        "gemini": lambda: (path, *(body["generationConfig"][k] for k in ("maxOutputTokens", "temperature")),
                           body["generationConfig"]["stopSequences"]),
    }[provider.kind]()  # fmt: skip
    ends = {"claude": "/messages", "openai": "/chat/completions", "gemini": "/models/gemini-2.5-pro:generateContent"}
    assert sent[0].endswith(ends[provider.kind]) and sent[1:] == (9, 0.5, ["\n"])


async def test_a_client_can_be_scored_on_rows(provider):
    provider.say = lambda asked: "yes"
    client, rows = provider.client(), [{"prompt": "a", "answer": "yes"}, {"prompt": "b", "answer": "no"}]
    result = await score_rows(rows, metrics=[("exact_match", metrics.build("exact_match", {}))], client=client)
    assert result.scores[0].value == 0.5 and result.scores[0].n_errors == 0
    await client.aclose()


async def test_generate_works_inside_a_running_loop_and_again_after_it(provider):
    client = provider.client()
    assert client.generate(prompt="a") == client.generate(prompt="a") == await client.agenerate(prompt="a")
    await client.aclose()
    assert await client.agenerate(prompt="b") == "you said b"
    await client.aclose()


def test_usage_and_cost_are_recorded_per_call_and_in_sum(provider):
    client = provider.client(price={"input": 10.0, "output": 100.0})
    answer = asyncio.run(client.acomplete(prompt="hi"))
    assert (answer.input_tokens, answer.output_tokens, answer.attempts) == (7, 5, 1)
    assert answer.cost_usd == pytest.approx((7 * 10 + 5 * 100) / 1e6) and answer.seconds > 0 and answer.model
    client.generate(prompt="again")
    assert (client.usage.calls, client.usage.input_tokens, client.usage.output_tokens) == (2, 14, 10)
    assert client.usage.cost_usd == pytest.approx(2 * answer.cost_usd)


def test_a_listed_model_has_a_price_and_an_unknown_one_has_none(provider):
    assert asyncio.run(provider.client().acomplete(prompt="hi")).cost_usd > 0
    client = provider.client(model="brand-new-model")
    assert asyncio.run(client.acomplete(prompt="hi")).cost_usd is None
    assert client.usage.cost_usd is None and client.usage.unpriced_calls == 1


def test_a_busy_provider_is_asked_again_after_the_time_it_names(provider):
    provider.will(BUSY, ("status", 503, {}, "busy"))
    client = provider.client()
    answer = asyncio.run(client.acomplete(prompt="hi"))
    assert answer.text == "you said hi" and answer.attempts == 3
    assert client.pauses == [3.0, 1.0]  # what it asked for, then our own second pause


def test_a_provider_that_asks_for_too_long_a_pause_is_given_up(provider):
    provider.will(BUSY)
    client = provider.client(max_wait_seconds=2)
    with pytest.raises(BackendUnavailable, match="asks to wait 3 s, longer than max_wait_seconds"):
        client.generate(prompt="hi")
    assert len(provider.requests) == 1 and client.pauses == []


def test_a_provider_that_is_broken_for_ever_is_given_up_after_the_retries(provider):
    provider.will(*[BROKEN] * 9)
    client = provider.client(max_retries=3)
    with pytest.raises(BackendUnavailable, match=r"did not answer in 4 tries: status 500.*we are sorry"):
        client.generate(prompt="hi")
    assert len(provider.requests) == 4 and client.pauses == [0.5, 1.0, 2.0]
    assert (client.usage.calls, client.usage.failures) == (0, 1)


@pytest.mark.parametrize("how", ["hang", "trickle"])
def test_a_provider_that_never_ends_its_answer_is_asked_again_and_then_given_up(provider, how):
    provider.client().generate(prompt="the first call loads much of the SDK")
    provider.requests.clear()
    provider.will(how, how)
    client, began = provider.client(timeout_seconds=1, max_retries=1), time.monotonic()
    with pytest.raises(BackendUnavailable, match=r"2 tries: no answer within 1 s"):
        client.generate(prompt="hi")
    assert time.monotonic() - began < 10 and len(provider.requests) == 2


def test_a_dropped_connection_is_tried_again(provider):
    provider.will("drop")
    assert asyncio.run(provider.client().acomplete(prompt="hi")).text == "you said hi"


@pytest.mark.parametrize("how", [("page", 500), ("page", 502), "cut"])
def test_an_error_page_and_an_answer_cut_short_are_tried_as_often_as_any_other_failure(provider, how):
    provider.will(how)
    assert asyncio.run(provider.client().acomplete(prompt="hi")).attempts == 2
    provider.requests.clear()
    provider.will(*[how] * 9)
    with pytest.raises(BackendUnavailable, match="did not answer in 4 tries"):
        provider.client(max_retries=3).generate(prompt="hi")
    assert len(provider.requests) == 4


@pytest.mark.parametrize("body", [b'{"half": ', {}, {"choices": [], "content": None, "candidates": []}])
def test_an_answer_that_cannot_be_read_is_an_error_and_not_an_empty_text(provider, body):
    provider.will(("body", body))
    with pytest.raises(BackendError, match=r"cannot be read|gave no answer"):
        provider.client().generate(prompt="hi")
    assert len(provider.requests) == 1


def test_a_wrong_request_is_refused_once_with_the_providers_words(provider):
    provider.will(("status", 400, {}, "messages: at least one is needed"))
    with pytest.raises(BackendError, match="at least one is needed"):
        provider.client().generate(prompt="hi")
    assert len(provider.requests) == 1


def test_a_refused_key_is_said_so_and_never_retried(provider):
    provider.will(("status", 401, {}, "bad key"))
    with pytest.raises(EvsysAuthError, match="refused the key"):
        provider.client().generate(prompt="hi")
    assert len(provider.requests) == 1


def test_a_model_that_takes_no_temperature_is_asked_without_it_from_then_on(provider):
    provider.will(("status", 400, {}, "temperature is not supported with this model"))
    client = provider.client()
    assert client.generate(prompt="a", temperature=0.0) == "you said a"
    assert client.generate(prompt="b", temperature=0.0) == "you said b"
    bodies = [body.get("generationConfig", body) for _, _, body in provider.requests]
    assert ["temperature" in body for body in bodies] == [True, False, False]


def test_without_a_key_the_error_names_the_variable(kind, monkeypatch):
    variables = {"claude": "ANTHROPIC_API_KEY", "openai": "OPENAI_API_KEY", "gemini": "GEMINI_API_KEY"}
    with pytest.raises(EvsysAuthError, match=f"set {variables[kind]}"):
        inference.build(kind, {"model": "m"})
    with pytest.raises(EvsysAuthError, match="set MY_KEY"):
        inference.build(kind, {"model": "m", "api_key_env": "MY_KEY"})


def test_the_key_of_the_named_variable_is_the_one_sent(provider, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret-7")
    provider.client(api_key_env="MY_KEY").generate(prompt="hi")
    assert "secret-7" in " ".join(provider.requests[0][1].values())


def test_without_the_sdk_the_error_says_what_to_install(kind, monkeypatch):
    monkeypatch.setenv("MY_KEY", "x")
    monkeypatch.setattr(importlib, "import_module", _no_import)
    with pytest.raises(MissingDependency, match=rf"pip install 'evsys-sdk\[{kind}\]'"):
        inference.build(kind, {"model": "m", "api_key_env": "MY_KEY"})


def _no_import(name, *rest):
    if name in ("anthropic", "openai", "google.genai"):
        raise ImportError(f"No module named {name!r}")
    return builtins.__import__(name, fromlist=["x"])


def test_a_client_without_a_model_is_refused(kind):
    with pytest.raises(ConfigError, match="model"):
        inference.build(kind, {})


async def test_a_batch_keeps_its_order_and_the_limit_on_calls_under_way(provider):
    provider.pause_seconds = 0.05
    client = provider.client(concurrency=3)
    prompts = [f"p{number}" for number in range(10)]
    assert await client.agenerate_batch(prompts=prompts) == [f"you said {prompt}" for prompt in prompts]
    assert 2 <= provider.most_at_once <= 3
    await client.aclose()


async def test_one_failure_of_a_batch_is_raised_or_stands_in_its_place(provider):
    provider.will(("status", 400, {}, "no"))
    client = provider.client(concurrency=1)
    first, second = await client.try_batch(prompts=["a", "b"])
    assert isinstance(first, EvsysError) and second.text == "you said b"
    provider.will(("status", 400, {}, "no"))
    with pytest.raises(BackendError, match="no"):
        await client.agenerate_batch(prompts=["a", "b"])
    await client.aclose()


def test_the_system_message_goes_where_the_provider_wants_it(provider):
    chat = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    assert provider.client(system_prompt="Be short.").generate(prompt=chat) == "you said three"
    body = provider.requests[0][2]
    if provider.kind == "claude":
        assert body["system"] == "Be short." and [m["role"] for m in body["messages"]] == ["user", "assistant", "user"]
    elif provider.kind == "openai":
        assert body["messages"][0] == {"role": "system", "content": "Be short."} and len(body["messages"]) == 4
    else:
        assert body["systemInstruction"]["parts"][0]["text"] == "Be short."
        assert [turn["role"] for turn in body["contents"]] == ["user", "model", "user"]


def test_tools_are_offered_and_calls_come_back_as_the_text_that_verifiers_read(provider):
    provider.will(("body", provider.ok_body("let me see", [("add", {"a": 1})])))
    text = provider.client().generate(prompt=[{"role": "user", "content": "1+1?", "tools": [TOOL]}])
    assert text == 'let me see\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    tools = provider.requests[0][2]["tools"]
    name = {"claude": lambda: tools[0]["name"], "openai": lambda: tools[0]["function"]["name"],
            "gemini": lambda: tools[0]["functionDeclarations"][0]["name"]}[provider.kind]()  # fmt: skip
    assert name == "add"


def test_earlier_calls_and_results_are_shown_as_text(provider):
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    assert provider.client().generate(prompt=chat) == "you said <tool_response>\n2\n</tool_response>"
    assert '\\"name\\": \\"add\\"' in str(provider.requests[0][2]).replace('"', '\\"')


@pytest.mark.parametrize(
    "block", [image_base64_block("image/png", "aGk="), image_url_block("data:image/png;base64,aGk=")]
)
def test_images_go_in_the_providers_form(provider, block):
    provider.client().generate(prompt=[{"role": "user", "content": [block, text_block("what is it?")]}])
    body = provider.requests[0][2]
    if provider.kind == "claude":
        source = body["messages"][0]["content"][0]["source"]
        assert source == {"type": "base64", "media_type": "image/png", "data": "aGk="}
    elif provider.kind == "openai":
        assert body["messages"][0]["content"][0]["image_url"]["url"] == "data:image/png;base64,aGk="
    else:
        inline = body["contents"][0]["parts"][0]["inlineData"]
        assert sorted(inline.values()) == ["aGk=", "image/png"]


@pytest.mark.parametrize("kind", ["openai"], indirect=True)
def test_an_account_without_money_is_not_asked_again(provider):
    provider.will(("status", 429, {}, "insufficient_quota: check your plan"))
    with pytest.raises(BackendError, match="insufficient_quota"):
        provider.client().generate(prompt="hi")
    assert len(provider.requests) == 1


@pytest.mark.parametrize("kind", ["gemini"], indirect=True)
def test_a_blocked_prompt_is_an_error_with_the_reason(provider):
    provider.will(("body", {"promptFeedback": {"blockReason": "SAFETY"}}))
    with pytest.raises(BackendError, match="SAFETY"):
        provider.client().generate(prompt="hi")
