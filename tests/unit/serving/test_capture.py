"""Sessions: whose tokens are whose, and what is kept of them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from evsys_sdk.serving import Capture, Endpoint, ServedModel, running
from evsys_sdk.testing import ScriptedModel

openai = pytest.importorskip("openai", reason="needs the extra openai")

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("session", "options"),
    [
        ("in the path/1", {}),
        (None, {"extra_headers": {"X-Session-ID": "in the path/1"}}),
        (None, {"extra_body": {"session_id": "in the path/1"}}),
    ],
)
def test_a_session_is_named_in_the_path_the_header_or_the_body(start, client, renderer, session, options):
    found = start()
    client(found, session).chat.completions.create(model="policy", messages=HI, **options)
    assert found.endpoint.capture.sessions() == ["in the path/1"]
    turn = found.endpoint.capture.take("in the path/1")[0]
    assert turn.prompt_tokens == renderer.prompt(HI) and turn.text == "hello there"
    assert turn.completion_tokens == [*b"hello there", renderer.tokenizer.eos_token_id]
    assert turn.logprobs == [-0.5 - place / 100 for place in range(12)]
    assert found.endpoint.capture.take("in the path/1") == []


def test_turns_of_a_session_come_in_order_streamed_or_not(start, client, model):
    found = start(model(lambda asked: f"you said {asked}"))
    for text, stream in (("a", False), ("b", True), ("c", False)):
        answer = client(found, "s").chat.completions.create(
            model="policy", messages=[{"role": "user", "content": text}], stream=stream
        )
        list(answer)
    assert [turn.text for turn in found.endpoint.capture.take("s")] == ["you said a", "you said b", "you said c"]


def test_the_turn_keeps_the_call_that_the_answer_shows_in_openais_form(start, client, model):
    text = 'So: <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    found = start(model(default=text))
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    client(found, "s").chat.completions.create(model="policy", messages=HI, tools=[tool])
    assert found.endpoint.capture.take("s")[0].text == text


async def test_sessions_that_speak_at_once_do_not_mix(renderer):
    capture = Capture()
    sampler = ScriptedModel(lambda asked: f"you said {asked}")
    endpoint = Endpoint({"policy": ServedModel(sampler=sampler, renderer=renderer)}, capture=capture)
    async with running(endpoint) as found:

        async def rollout(session):
            async with openai.AsyncOpenAI(base_url=found.base_url(session), api_key="x", max_retries=0) as asker:
                for number in range(4):
                    messages = [{"role": "user", "content": f"{session}.{number}"}]
                    await asker.chat.completions.create(model="policy", messages=messages)

        await asyncio.gather(*(rollout(f"s{number}") for number in range(8)))
    for number in range(8):
        turns = capture.take(f"s{number}")
        assert [turn.text for turn in turns] == [f"you said s{number}.{turn}" for turn in range(4)]
    assert capture.sessions() == []


def test_without_a_session_or_a_capture_nothing_is_kept(start, client):
    found = start()
    client(found).chat.completions.create(model="policy", messages=HI)
    assert found.endpoint.capture.sessions() == []
    found.endpoint.capture = None
    client(found, "s").chat.completions.create(model="policy", messages=HI)


class Slow:
    """A sampler that waits until it is let go or stopped."""

    def __init__(self, inner):
        self.inner, self.begun, self.stopped = inner, threading.Event(), threading.Event()
        self.release = None

    async def sample(self, *args, **options):
        self.release = asyncio.Event()
        self.begun.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.stopped.set()
            raise
        return await self.inner.sample(*args, **options)


def test_a_caller_who_hangs_up_stops_the_work_and_leaves_no_turn(start, client, model):
    sampler = Slow(model())
    found = start(sampler)
    with pytest.raises(openai.APITimeoutError):
        # On a busy machine, too, the sampler has begun after three seconds.
        client(found, "s").chat.completions.create(model="policy", messages=HI, timeout=3)
    assert sampler.stopped.wait(300), "the sampler went on for nobody"
    assert found.endpoint.capture.take("s") == []


def test_more_than_can_be_under_way_are_told_to_come_again(start, client, model):
    sampler = Slow(model())
    found = start(sampler, in_flight=1)
    asker = client(found)
    first = threading.Thread(target=lambda: _quietly(asker))
    first.start()
    assert sampler.begun.wait(300)
    with pytest.raises(openai.RateLimitError) as caught:
        client(found, "s").chat.completions.create(model="policy", messages=HI)
    assert caught.value.response.headers["retry-after"] == "1" and caught.value.code == "rate_limit_exceeded"
    assert found.endpoint.capture.errors("s") == []  # being sent away is no failure of the sampler
    asker.close()
    first.join(300)
    assert not first.is_alive()


def _quietly(asker):
    with pytest.raises(openai.APIError):
        asker.chat.completions.create(model="policy", messages=HI, timeout=5)


def test_a_policy_that_is_put_in_anew_answers_from_then_on(start, client, model, renderer):
    found = start()
    found.endpoint.models["policy"] = ServedModel(sampler=model(default="step 2"), renderer=renderer)
    answer = client(found).chat.completions.create(model="policy", messages=HI)
    assert answer.choices[0].message.content == "step 2"
