"""The endpoint as the real `openai` client sees it."""

from __future__ import annotations

import asyncio
import json

import pytest

from evsys_sdk.backends.mock import MockBackend
from evsys_sdk.config.schema import ModelConfig
from evsys_sdk.errors import BackendError, BackendUnavailable
from evsys_sdk.serving import Capture, Endpoint, ServedModel, in_background, running
from evsys_sdk.training.rendering import ChatRenderer

openai = pytest.importorskip("openai", reason="needs the extra openai")

HI = [{"role": "user", "content": "hi"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def test_a_completion_has_text_usage_and_a_reason_to_end(start, client):
    answer = client(start()).chat.completions.create(model="policy", messages=HI)
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == ("hello there", "assistant", "stop")
    assert choice.message.tool_calls is None and choice.logprobs is None and answer.model == "policy"
    assert answer.usage.completion_tokens == 12 and answer.usage.prompt_tokens == len(
        "<|>user\nhi<|>\n<|>assistant\n".replace("<|>", "#")
    )
    assert not hasattr(answer, "prompt_token_ids") and not hasattr(choice, "token_ids")


def test_settings_reach_the_sampler(start, client, model):
    sampler = model()
    client(start(sampler)).chat.completions.create(
        model="policy", messages=HI, temperature=0.3, top_p=0.9, max_tokens=7, n=2, stop=["x", "y"], seed=5,
        extra_body={"top_k": 4},
    )  # fmt: skip
    _, count, params = sampler.asked[0]
    assert count == 2 and params.stop == ("x", "y") and params.seed == 5
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.3, 0.9, 4, 7)


def test_without_settings_the_sampler_draws_as_the_model_is(start, client, model):
    sampler = model()
    client(start(sampler, default_max_tokens=33)).chat.completions.create(model="policy", messages=HI, stop=None)
    params = sampler.asked[0][2]
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (1.0, 1.0, -1, None)
    assert params.max_tokens == 33 and params.stop == ()


def test_several_choices_come_in_order_and_a_cut_one_says_so(start, client, model):
    sampler = model(default=["one", "two and more"])
    answer = client(start(sampler)).chat.completions.create(model="policy", messages=HI, n=2, max_completion_tokens=6)
    told = [(choice.index, choice.message.content, choice.finish_reason) for choice in answer.choices]
    assert told == [(0, "one", "stop"), (1, "two an", "length")]


def test_logprobs_and_token_ids_are_those_of_the_sampler(start, client, renderer):
    answer = client(start()).chat.completions.create(
        model="policy", messages=HI, logprobs=True, extra_body={"return_token_ids": True}
    )
    choice, tokens = answer.choices[0], renderer.tokenizer.encode("hello there") + [renderer.tokenizer.eos_token_id]
    assert choice.token_ids == tokens and answer.prompt_token_ids == renderer.prompt(HI)
    assert [entry.logprob for entry in choice.logprobs.content] == [-0.5 - place / 100 for place in range(12)]
    assert [entry.token for entry in choice.logprobs.content] == [*"hello there", "<|im_end|>"]


def test_a_stream_adds_up_to_the_whole(start, client, model):
    stream = client(start(model(default="a  b\nçé c"))).chat.completions.create(
        model="policy", messages=HI, stream=True, stream_options={"include_usage": True}, logprobs=True,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    chunks = list(stream)
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "a  b\nçé c"
    assert choices[0].delta.role == "assistant" and choices[-1].finish_reason == "stop" and len(choices) > 4
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    tokens = [token for choice in choices for token in getattr(choice, "token_ids", None) or []]
    logprobs = [entry for choice in choices for entry in (choice.logprobs.content if choice.logprobs else [])]
    assert len(tokens) == len(logprobs) == 12 and chunks[0].prompt_token_ids


def test_a_stream_without_the_option_ends_without_usage(start, client):
    chunks = list(client(start()).chat.completions.create(model="policy", messages=HI, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


async def test_the_async_client_in_the_same_loop_keeps_many_under_way(renderer, model):
    endpoint = Endpoint({"policy": ServedModel(sampler=model(lambda asked: f"you said {asked}"), renderer=renderer)})
    async with running(endpoint) as found:
        async with openai.AsyncOpenAI(base_url=found.base_url(), api_key="x", max_retries=0) as asker:

            async def ask(text):
                messages = [{"role": "user", "content": text}]
                return (await asker.chat.completions.create(model="policy", messages=messages)).choices[0]

            answers = await asyncio.gather(*(ask(f"n{number}") for number in range(40)))
            stream = await asker.chat.completions.create(model="policy", messages=HI, stream=True)
            streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert [answer.message.content for answer in answers] == [f"you said n{number}" for number in range(40)]
    assert streamed == "you said hi"


def test_tool_calls_come_in_openais_form(start, client, model):
    sampler = model(default=f"Let me add.\n{CALL}")
    answer = client(start(sampler)).chat.completions.create(model="policy", messages=HI, tools=[ADD])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me add."
    call = choice.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2}) and call.id
    assert "Adds two numbers." in sampler.asked[0][0]  # this template has no place for tools: they are described


def test_a_stream_carries_tool_calls(start, client, model):
    stream = client(start(model(default=f"{CALL}\n{CALL}"))).chat.completions.create(
        model="policy", messages=HI, tools=[ADD], stream=True
    )
    choices = [chunk.choices[0] for chunk in stream]
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, "add"), (1, "add")]
    assert choices[-1].finish_reason == "tool_calls"


def test_a_whole_tool_conversation_is_shown_to_the_model(start, client, model):
    sampler = model(lambda asked: "3" if "<tool_response>" in asked else CALL)
    asker = client(start(sampler))
    first = asker.chat.completions.create(model="policy", messages=HI, tools=[ADD]).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "3"}
    chat = [*HI, first.model_dump(exclude_none=True), result]
    last = asker.chat.completions.create(model="policy", messages=chat, tools=[ADD]).choices[0]
    assert (last.message.content, last.finish_reason) == ("3", "stop")
    shown = sampler.asked[1][0]
    assert CALL in shown and "<tool_response>\n3\n</tool_response>" in shown


@pytest.mark.parametrize("options", [{}, {"tools": [ADD], "tool_choice": "none"}])
def test_without_tools_a_call_is_plain_text(start, client, model, options):
    sampler = model(default=CALL)
    choice = client(start(sampler)).chat.completions.create(model="policy", messages=HI, **options).choices[0]
    assert choice.message.content == CALL and choice.message.tool_calls is None and choice.finish_reason == "stop"
    assert "Adds two numbers." not in sampler.asked[0][0]


def test_models_are_listed_and_found(start, client):
    asker = client(start(context_length=99))
    assert [found.id for found in asker.models.list()] == ["policy"]
    assert asker.models.retrieve("policy").max_model_len == 99
    with pytest.raises(openai.NotFoundError):
        asker.models.retrieve("other")


BAD = [
    ({"model": "polcy"}, 404, "closest: policy", "model"),
    ({"messages": []}, 400, "messages", "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "role", "messages.0.role"),
    ({"messages": [{"role": "user"}]}, 400, "missing", "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "what is it?"},
      {"type": "image_url", "image_url": {"url": "http://x"}}]}]}, 400, "image_url", "messages.0.content.1"),
    ({"messages": [*HI, {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, 400,
     "input_audio", "messages.1.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "text is needed",
     "messages.0.content.0.text"),
    ({"model": "by-template"}, 400, "this template takes no user", "messages"),
    ({"temperature": -1}, 400, "temperature", "temperature"),
    ({"max_tokens": 0}, 400, "max_tokens", "max_tokens"),
    ({"n": 1000}, 400, "n", "n"),
    ({"temperature": "hot"}, 400, "temperature", "temperature"),
    ({"top_logprobs": 3, "logprobs": True}, 400, "top_logprobs", "top_logprobs"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format", "response_format"),
    ({"tool_choice": "required", "tools": [ADD]}, 400, "tool_choice", "tool_choice"),
    ({"tools": [{"type": "web_search"}]}, 400, "functions", "tools.0"),
    ({"frequency_penalty": 1.0}, 400, "frequency_penalty", "frequency_penalty"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, 400, "maximum context length is 200", "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "status", "words", "param"), BAD)
def test_a_bad_request_is_told_in_openais_form(start, client, model, change, status, words, param):
    from evsys_sdk.errors import DataError

    found = start(context_length=200)

    class Refusing(ChatRenderer):
        def prompt(self, messages):
            raise DataError("this template takes no user")

    served = found.endpoint.models["policy"]
    found.endpoint.models["by-template"] = ServedModel(
        sampler=served.sampler, renderer=Refusing(served.renderer.tokenizer)
    )
    with pytest.raises(openai.APIStatusError) as caught:
        client(found).chat.completions.create(**{"model": "policy", "messages": HI, **change})
    assert caught.value.status_code == status and words in caught.value.message
    assert caught.value.param == param and caught.value.type == "invalid_request_error"


def test_blocks_of_text_are_read(start, client, model):
    sampler = model()
    blocks = [{"type": "text", "text": "good "}, {"type": "text", "text": "day"}]
    client(start(sampler)).chat.completions.create(model="policy", messages=[{"role": "user", "content": blocks}])
    assert "good day" in sampler.asked[0][0]


def test_a_long_prompt_has_openais_code_and_a_long_answer_is_cut(start, client, model):
    sampler = model(default="y" * 500)
    asker = client(start(sampler, context_length=40))
    with pytest.raises(openai.BadRequestError) as caught:
        asker.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x" * 40}])
    assert caught.value.code == "context_length_exceeded" and sampler.asked == []
    answer = asker.chat.completions.create(model="policy", messages=HI, max_tokens=400)
    assert answer.choices[0].finish_reason == "length" and answer.usage.total_tokens == 40


@pytest.mark.parametrize(
    ("broken", "status"),
    [
        (BackendUnavailable("the server has gone"), 503),
        (TimeoutError("no answer"), 503),
        (BackendError("it refused"), 500),
        (ValueError("a bug"), 500),
    ],
)
def test_a_sampler_that_breaks_is_a_5xx_and_the_session_remembers(start, client, model, broken, status):
    found = start(model(default=broken))
    with pytest.raises(openai.InternalServerError) as caught:
        client(found, "s1").chat.completions.create(model="policy", messages=HI)
    assert caught.value.status_code == status and str(broken) in caught.value.message
    assert str(broken) in found.endpoint.capture.errors("s1")[0]
    assert found.endpoint.capture.take("s1") == [] and found.endpoint.capture.errors("s1") == []


def test_a_model_on_the_mock_backend_repeats_with_a_seed(client, tmp_path):
    service = MockBackend().prepare(model=ModelConfig(name="m"), run_dir=tmp_path)["service"]
    sampler = asyncio.run(_sampler(service))
    capture = Capture()
    served = ServedModel(sampler=sampler, renderer=ChatRenderer(service.get_tokenizer()))
    with in_background(Endpoint({"m": served}, capture=capture)) as found:
        ask = {"model": "m", "messages": HI, "max_tokens": 8, "logprobs": True}
        answers = [client(found, "s").chat.completions.create(**ask, seed=seed) for seed in (1, 1, 2**40, 2**40)]
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts[0] == texts[1] and texts[2] == texts[3]
    for turn, answer in zip(capture.take("s"), answers, strict=True):
        assert turn.logprobs == [entry.logprob for entry in answer.choices[0].logprobs.content]
        # What was captured is what these weights really think of these tokens.
        again = asyncio.run(_logprobs(sampler, turn.prompt_tokens + turn.completion_tokens))
        assert again[len(turn.prompt_tokens) :] == pytest.approx(turn.logprobs, abs=1e-6)


async def _sampler(service):
    return await service.create_sampling_client()


async def _logprobs(sampler, tokens):
    from evsys_sdk.training_api import ModelInput

    return await sampler.compute_logprobs(ModelInput.from_ints(tokens))


def test_a_model_on_the_local_backend(client, tmp_path, tiny_engine):
    from evsys_sdk.backends.local import LocalService

    service = LocalService(tiny_engine, tmp_path)

    async def make():
        return await service.create_sampling_client()

    sampler = asyncio.run(make())
    served = ServedModel(
        sampler=sampler,
        renderer=ChatRenderer(service.get_tokenizer()),
        context_length=tiny_engine.info.max_length,
    )
    try:
        with in_background(Endpoint({"tiny": served}, capture=Capture())) as found:
            answer = client(found, "s").chat.completions.create(
                model="tiny", messages=HI, max_tokens=8, logprobs=True, seed=3, tools=[ADD],
                extra_body={"return_token_ids": True},
            )  # fmt: skip
            turn = found.endpoint.capture.take("s")[0]
        assert turn.completion_tokens == answer.choices[0].token_ids and 1 <= len(turn.logprobs) <= 8
        assert all(logprob < 0 for logprob in turn.logprobs)
        assert turn.logprobs == [entry.logprob for entry in answer.choices[0].logprobs.content]
    finally:
        service.close()
