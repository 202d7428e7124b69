"""POST /v1/completions as the real `openai` client sees it."""

from __future__ import annotations

import asyncio

import pytest
import requests

from evsys_sdk.backends.mock import MockBackend
from evsys_sdk.config.schema import ModelConfig
from evsys_sdk.serving import Capture, Endpoint, ServedModel, in_background
from evsys_sdk.training.rendering import ChatRenderer
from evsys_sdk.training_api import ModelInput

openai = pytest.importorskip("openai", reason="needs the extra openai")


@pytest.fixture
def sampler(tmp_path):
    service = MockBackend().prepare(model=ModelConfig(name="m"), run_dir=tmp_path)["service"]

    async def make():
        return await service.create_sampling_client()

    return asyncio.run(make())


@pytest.fixture
def found(sampler, renderer):
    served = ServedModel(sampler=sampler, renderer=renderer, context_length=100)
    with in_background(Endpoint({"m": served}, capture=Capture())) as found:
        yield found


@pytest.fixture
def complete(found, client):
    def create(prompt, **options):
        return client(found).completions.create(**{"model": "m", "prompt": prompt, "seed": 1, **options})

    return create


def logprobs_of(sampler, text):
    async def score():
        return await sampler.compute_logprobs(ModelInput.from_ints(list(text.encode())))

    return asyncio.run(score())


def test_text_resumes_where_the_prompt_ends_without_a_template(start, client, model):
    sampler = model()
    answer = client(start(sampler)).completions.create(
        model="policy", prompt="hello", temperature=0.3, top_p=0.9, stop=["x"], seed=5, extra_body={"top_k": 4}
    )
    text, count, params = sampler.asked[0]
    assert text == "hello" and count == 1 and params.max_tokens == 16
    assert (params.temperature, params.top_p, params.top_k, params.stop, params.seed) == (0.3, 0.9, 4, ("x",), 5)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hello there", "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 12, 17)


def test_every_kind_of_prompt_is_the_same_text(complete):
    text = complete("ab").choices[0].text
    assert [complete(prompt).choices[0].text for prompt in (["ab"], [97, 98], [[97, 98]])] == [text] * 3


def test_choices_are_ordered_by_prompt_and_then_by_number(complete):
    answer = complete(["ab", "cd"], n=2, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = [choice.text for prompt in ("ab", "cd") for choice in complete(prompt, n=2, max_tokens=4).choices]
    assert [choice.text for choice in answer.choices] == alone and answer.usage.prompt_tokens == 4


def test_logprobs_are_those_of_the_tokens_drawn(complete, sampler):
    choice = complete("ab", max_tokens=5, logprobs=0).choices[0]
    assert choice.logprobs.tokens == list(choice.text) and choice.logprobs.text_offset == [0, 1, 2, 3, 4]
    assert choice.logprobs.top_logprobs is None
    assert choice.logprobs.token_logprobs == pytest.approx(logprobs_of(sampler, f"ab{choice.text}")[2:], abs=1e-6)


def test_an_echo_has_the_prompt_and_what_the_model_thinks_of_it(complete, sampler):
    choice = complete("abc", max_tokens=2, echo=True, logprobs=3).choices[0]
    known = logprobs_of(sampler, choice.text)
    assert choice.text.startswith("abc") and len(choice.text) == 5
    assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(known[1:], abs=1e-6)
    for token, value, top in zip(
        choice.logprobs.tokens[1:], choice.logprobs.token_logprobs[1:], choice.logprobs.top_logprobs[1:], strict=True
    ):
        assert top[token] == value and 3 <= len(top) <= 4 and max(top.values()) >= value
    assert complete("abc", max_tokens=2, echo=True).choices[0].text == choice.text


def test_a_prompt_can_be_scored_without_going_on(complete, sampler):
    choice = complete("abcd", max_tokens=0, echo=True, logprobs=1).choices[0]
    assert (choice.text, choice.finish_reason) == ("abcd", "length")
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(logprobs_of(sampler, "abcd")[1:], abs=1e-6)
    whole = complete("x" * 99, max_tokens=0, echo=True, logprobs=1)
    assert len(whole.choices[0].logprobs.tokens) == 99 and whole.usage.completion_tokens == 0


def test_a_stream_adds_up_to_the_whole(start, client, model):
    asker = client(start(model(default="a  b\nçé c")))
    options = {"model": "policy", "prompt": ["x", "y"], "logprobs": 0}
    whole = asker.completions.create(**options)
    chunks = list(asker.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        parts = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == choice.index]
        assert "".join(part.text for part in parts) == choice.text == "a  b\nçé c" and len(parts) > 3
        assert parts[-1].finish_reason == "stop" and parts[0].logprobs == choice.logprobs
        assert all(part.finish_reason is None for part in parts[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


def test_a_stop_and_a_full_length_say_which(complete):
    whole = complete("1 2 3 4", temperature=0.0, max_tokens=5).choices[0]
    assert len(whole.text) == 5 and whole.finish_reason == "length"
    cut = complete("1 2 3 4", temperature=0.0, max_tokens=5, stop=whole.text[2]).choices[0]
    assert (cut.text, cut.finish_reason) == (whole.text.partition(whole.text[2])[0], "stop")


def test_a_session_captures_completions(found, client):
    answer = client(found, "s").completions.create(
        model="m", prompt="ab", seed=1, max_tokens=4, extra_body={"return_token_ids": True}
    )
    [turn] = found.endpoint.capture.take("s")
    assert turn.prompt_tokens == answer.choices[0].prompt_token_ids == [97, 98]
    assert turn.completion_tokens == answer.choices[0].token_ids and len(turn.logprobs) == 4


BAD = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [[1, 10**9]]}, "prompt"),
    ({"prompt": ["a", 1]}, None),
    ({"prompt": {"text": "a"}}, None),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 2, "n": 65}, "prompt"),
    ({"prompt": "x" * 200}, "prompt"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"top_k": -2}, "top_k"),
    ({"suffix": "z"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"frequency_penalty": 1.0}, "frequency_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
]


@pytest.mark.parametrize(("change", "param"), BAD)
def test_a_bad_request_is_a_400_that_names_the_field(found, change, param):
    body = {"model": "m", "prompt": "ab", **change}
    answer = requests.post(f"{found.base_url()}/completions", json=body, timeout=300)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"].startswith(param or "prompt")


def test_a_missing_prompt_and_an_unknown_model_are_told(found):
    url = f"{found.base_url()}/completions"
    assert requests.post(url, json={"model": "m"}, timeout=300).json()["error"]["param"] == "prompt"
    assert requests.post(url, json={"model": "n", "prompt": "a"}, timeout=300).status_code == 404


def test_a_completion_on_the_local_backend(client, tmp_path, tiny_engine):
    from evsys_sdk.backends.local import LocalService

    service = LocalService(tiny_engine, tmp_path)

    async def make():
        return await service.create_sampling_client()

    renderer = ChatRenderer(service.get_tokenizer())
    served = ServedModel(sampler=asyncio.run(make()), renderer=renderer, context_length=tiny_engine.info.max_length)
    try:
        with in_background(Endpoint({"tiny": served})) as found:
            create = client(found).completions.create
            answer = create(model="tiny", prompt="The sky is", max_tokens=4, echo=True, logprobs=2, seed=3)
            choice = answer.choices[0]
            assert choice.text.startswith("The sky is") and choice.logprobs.token_logprobs[0] is None
            assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
            assert "".join(choice.logprobs.tokens) == choice.text or "\ufffd" in choice.text
            with pytest.raises(openai.BadRequestError, match="no token"):
                create(model="tiny", prompt=[10**7])
    finally:
        service.close()


def test_a_form_on_the_local_backend(client, tmp_path, tiny_engine):
    import json

    from evsys_sdk.backends.local import LocalService

    pytest.importorskip("llguidance", reason="needs the extra serve")
    service = LocalService(tiny_engine, tmp_path)

    async def make():
        return await service.create_sampling_client()

    renderer = ChatRenderer(service.get_tokenizer())
    served = ServedModel(sampler=asyncio.run(make()), renderer=renderer, context_length=tiny_engine.info.max_length)
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    tool = {"type": "function", "function": {"name": "tell", "parameters": schema}}
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 300, "seed": 3}
    try:
        with in_background(Endpoint({"tiny": served})) as found:
            create = client(found).chat.completions.create
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            said = create(**asked, response_format=form).choices[0].message.content
            assert isinstance(json.loads(said)["ok"], bool)
            choice = {"type": "function", "function": {"name": "tell"}}
            [call] = create(**asked, tools=[tool], tool_choice=choice).choices[0].message.tool_calls
            assert isinstance(json.loads(call.function.arguments)["ok"], bool)
    finally:
        service.close()
