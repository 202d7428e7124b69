"""Who may come in, and what plain HTTP gets."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import requests

from evsys_engine.http import HttpLimits
from evsys_sdk.backends.mock_tokenizer import ByteTokenizer
from evsys_sdk.errors import EvsysError
from evsys_sdk.serving import Endpoint, ListenAddress, ServedModel, in_background
from evsys_sdk.testing import ScriptedModel
from evsys_sdk.training.rendering import ChatRenderer

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def ask(found, **options):
    return requests.post(f"{found.base_url()}/chat/completions", json=BODY, timeout=300, **options)


def test_with_a_key_only_its_holders_come_in(start):
    found = start(key="secret")
    assert ask(found).status_code == 401
    refused = ask(found, headers={"Authorization": "Bearer wrong"})
    assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    assert ask(found, headers={"Authorization": "Bearer secret"}).status_code == 200
    assert ask(found, headers={"X-API-Key": "secret"}).status_code == 200


def test_health_is_told_to_everybody(start):
    found = start(key="secret")
    answer = requests.get(f"{found.url}/health", timeout=300)
    assert answer.status_code == 200 and answer.json() == {"status": "ok", "models": ["policy"], "under_way": 0}


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Host": "evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_without_a_key_web_pages_are_kept_out(start, headers):
    assert ask(start(), headers=headers).status_code == 403


def test_beyond_this_machine_a_key_is_needed():
    with pytest.raises(EvsysError, match="give a key"):
        with in_background(Endpoint({}), ListenAddress(host="0.0.0.0")):
            pass


def test_a_taken_port_is_a_message(start):
    port = int(start().url.rpartition(":")[2])
    with pytest.raises(EvsysError, match=f"cannot listen on 127.0.0.1:{port}"):
        with in_background(Endpoint({}), ListenAddress(port=port)):
            pass


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_request_is_a_400(start, body):
    answer = requests.post(f"{start().base_url()}/chat/completions", data=body, timeout=300)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_too_large_is_a_413(start, monkeypatch):
    monkeypatch.setattr("evsys_sdk.serving.endpoint.BODY_BYTES", 1000)
    answer = requests.post(f"{start().base_url()}/chat/completions", data=b"x" * 5000, timeout=300)
    assert answer.status_code == 413


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/chat/completions"), ("POST", "/v1/nothing"), ("GET", "/")])
def test_what_is_not_there_is_a_404_that_says_what_is(start, method, path):
    answer = requests.request(method, start().url + path, timeout=300)
    assert answer.status_code == 404 and "/v1/models" in answer.json()["error"]["message"]


def test_events_are_what_a_plain_reader_of_streams_expects(start):
    answer = requests.post(f"{start().base_url()}/chat/completions", json=BODY | {"stream": True}, timeout=300)
    assert answer.headers["content-type"] == "text/event-stream"
    events = answer.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]" and all(event.startswith("data: ") for event in events)
    assert json.loads(events[0][6:])["object"] == "chat.completion.chunk"


@pytest.mark.parametrize("site", ["none", "same-origin"])
def test_a_person_at_the_address_bar_is_no_web_page(start, site):
    assert ask(start(), headers={"Sec-Fetch-Site": site}).status_code == 200


def first_line(found, sent):
    with socket.create_connection(found.url.removeprefix("http://").split(":"), timeout=300) as connection:
        connection.sendall(sent)
        return connection.recv(1000).partition(b"\r\n")[0]


def test_a_half_sent_request_is_given_up(start, monkeypatch):
    monkeypatch.setattr("evsys_sdk.serving.run.LIMITS", HttpLimits(head_seconds=0.3, pause_seconds=0.3))
    found = start()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    for sent in (b"", head[:20], head, head + b"Content-Length: 50\r\n\r\n", head + b"Content-Length: 50\r\n\r\n{"):
        assert first_line(found, sent).startswith(b"HTTP/1.1 408"), sent
    monkeypatch.setattr("evsys_sdk.serving.run.LIMITS", HttpLimits(body_seconds=0.3))
    assert first_line(found, head + b"Content-Length: 50\r\n\r\n{").startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "field",
    [
        '"temperature": Infinity', '"temperature": NaN', '"temperature": 1e999', '"top_p": NaN', '"top_p": -Infinity',
        '"top_k": -2', '"top_k": -1000000000000000000000', '"user": NaN', '"metadata": {"x": [1e400]}',
    ],
)  # fmt: skip
def test_a_number_that_is_none_is_a_400(start, field):
    body = json.dumps(BODY)[:-1] + f", {field}}}"
    answer = requests.post(f"{start().base_url()}/chat/completions", data=body, timeout=300)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("field", ['"top_k": -1', '"top_k": 0', '"temperature": 1e-320', '"temperature": 1e300'])
def test_odd_but_meaningful_settings_are_taken(start, field):
    body = json.dumps(BODY)[:-1] + f", {field}}}"
    assert requests.post(f"{start().base_url()}/chat/completions", data=body, timeout=300).status_code == 200


class Weird(ScriptedModel):
    """Its log probabilities are not what JSON has a word for."""

    logprob = float("nan")

    async def _sample(self, prompt, count, params, include_prompt_logprobs):
        output = await super()._sample(prompt, count, params, include_prompt_logprobs)
        changed = [replace(row, logprobs=[self.logprob] * len(row.tokens)) for row in output.sequences]
        return replace(output, sequences=changed)


@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_is_json(start, stream):
    sampler = Weird({}, default="hi")
    body = BODY | {"logprobs": True, "stream": stream}
    url = f"{start(sampler).base_url()}/chat/completions"
    answer = requests.post(url, json=body, timeout=300)
    assert answer.status_code == 500 and "not a number" in answer.json()["error"]["message"]
    sampler.logprob = float("-inf")
    text = requests.post(url, json=body, timeout=300).text
    assert '"logprob": -9999.0' in text and "Infinity" not in text


class OneTooMany(ScriptedModel):
    """Writes one more completion than it was asked for."""

    async def _sample(self, prompt, count, params, include_prompt_logprobs):
        return await super()._sample(prompt, count + 1, params, include_prompt_logprobs)


@pytest.mark.parametrize("sampler", [Weird({}, default="hi"), OneTooMany({}, default="hi")])
@pytest.mark.parametrize(("door", "asked"), [("chat/completions", BODY), ("completions", {"prompt": "hi"})])
def test_what_no_sampler_may_give_is_remembered_by_the_session_as_its_failure(start, sampler, door, asked):
    found = start(sampler)
    answer = requests.post(f"{found.base_url('s')}/{door}", json={"model": "policy"} | asked, timeout=300)
    assert answer.status_code == 500 and "the sampler failed" in answer.json()["error"]["message"]
    assert len(found.endpoint.capture.errors("s")) == 1 and found.endpoint.capture.take("s") == []


class SlowRenderer(ChatRenderer):
    """A chat that takes as long to tokenise as the test likes."""

    def __init__(self):
        super().__init__(ByteTokenizer())
        self.began, self.go_on = threading.Event(), threading.Event()

    def prompt(self, messages):
        if len(messages[-1]["content"]) > 1000:
            self.began.set()
            assert self.go_on.wait(300)
        return super().prompt(messages)


def test_a_chat_that_takes_long_to_tokenise_keeps_nobody_waiting():
    renderer = SlowRenderer()
    served = ServedModel(sampler=ScriptedModel({}, default="hello"), renderer=renderer)
    long = BODY | {"messages": [{"role": "user", "content": "x" * 2000}]}
    with in_background(Endpoint({"policy": served})) as found, ThreadPoolExecutor(1) as pool:
        url = f"{found.base_url()}/chat/completions"
        answer = pool.submit(lambda: requests.post(url, json=long, timeout=300))
        assert renderer.began.wait(300)
        assert requests.get(f"{found.url}/health", timeout=300).status_code == 200
        assert ask(found).status_code == 200
        renderer.go_on.set()
        assert answer.result().status_code == 200


def test_long_requests_do_not_take_the_threads_that_read_short_ones():
    renderer = SlowRenderer()
    served = ServedModel(sampler=ScriptedModel({}, default="hello"), renderer=renderer)
    long = BODY | {"messages": [{"role": "user", "content": "x" * 70_000}]}
    with in_background(Endpoint({"policy": served})) as found, ThreadPoolExecutor(8) as pool:
        url = f"{found.base_url()}/chat/completions"
        answers = [pool.submit(lambda: requests.post(url, json=long, timeout=300)) for _ in range(8)]
        assert renderer.began.wait(300)
        try:
            assert requests.post(url, json=BODY, timeout=60).status_code == 200
        finally:
            renderer.go_on.set()
        assert {answer.result().status_code for answer in answers} == {200}


HALF_A_PAIR = [
    ("chat/completions", b'{"model": "policy", "messages": [{"role": "user", "content": "a\\ud83d b"}]}'),
    ("chat/completions", b'{"model": "policy", "messages": [{"role": "user", "content": "a\xed\xa0\x80"}]}'),
    ("completions", b'{"model": "policy", "prompt": ["fine", "\\uDC00"]}'),
    ("completions", b'{"model": "policy", "prompt": "hi", "stop": "\\udfff\\ud800"}'),
]


@pytest.mark.parametrize(("door", "body"), HALF_A_PAIR)
def test_text_that_is_no_unicode_is_a_400(start, door, body, caplog):
    answer = requests.post(f"{start().base_url()}/{door}", data=body, timeout=300)
    assert answer.status_code == 400 and "the body" in answer.json()["error"]["message"]
    assert "Traceback" not in caplog.text


def test_a_character_written_as_a_pair_is_read(start):
    body = b'{"model": "policy", "prompt": "\\ud83d\\ude00 and \\\\ud83d", "echo": true}'
    answer = requests.post(f"{start().base_url()}/completions", data=body, timeout=300)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"].startswith("\U0001f600 and \\ud83d")


def test_a_caller_who_ends_the_connection_sees_that_its_body_is_too_large(start):
    url = f"{start(context_length=100).base_url()}/chat/completions"
    asked = urllib.request.Request(url, b"x" * 2**26)  # urllib sends the whole body before it reads the answer
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(asked, timeout=300)
    assert caught.value.code == 413 and "1048576 bytes" in json.loads(caught.value.read())["error"]["message"]


def test_a_body_longer_than_any_context_is_refused_before_it_is_read(start):
    found = start(context_length=100)
    text = {"messages": [{"role": "user", "content": "x" * 2**21}]}
    answer = requests.post(f"{found.base_url()}/chat/completions", json=BODY | text, timeout=300)
    assert answer.status_code == 413 and "1048576 bytes" in answer.json()["error"]["message"]
    found.endpoint.models["policy"].context_length = 2**17
    answer = requests.post(f"{found.base_url()}/chat/completions", json=BODY | text, timeout=300)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_body_is_bounded_where_the_context_length_is_not_known(start):
    url = f"{start().base_url()}/chat/completions"
    long = {"messages": [{"role": "user", "content": "x" * (2**22 + 1)}]}
    answer = requests.post(url, json=BODY | long, timeout=300)
    assert answer.status_code == 413 and "4194304 bytes" in answer.json()["error"]["message"]
    fits = {"messages": [{"role": "user", "content": "x" * 2**19}]}
    answer = requests.post(url, json=BODY | fits, timeout=300)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


class SlowModel(ScriptedModel):
    """Draws within the call, as the mock's sampler does, and as long as the test likes."""

    computes_in_call = True

    def __init__(self):
        super().__init__({}, default="hello")
        self.began, self.go_on = threading.Event(), threading.Event()

    def sample(self, *arguments, **options):
        self.began.set()
        assert self.go_on.wait(300)
        return super().sample(*arguments, **options)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_sampler_that_computes_within_the_call_keeps_nobody_waiting(start, path):
    slow = SlowModel()
    found = start(slow)
    body = BODY if path == "chat/completions" else {"model": "policy", "prompt": "hello"}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: requests.post(f"{found.base_url()}/{path}", json=body, timeout=300))
        assert slow.began.wait(300)
        assert requests.get(f"{found.url}/health", timeout=300).json()["under_way"] == 1
        slow.go_on.set()
        assert answer.result().status_code == 200


def test_the_mock_samplers_calls_are_made_on_a_thread():
    from evsys_sdk.backends.mock import MockSamplingClient

    assert MockSamplingClient.computes_in_call


@pytest.mark.parametrize("stop", [["x"] * 65, "x" * 1001, ["a", "x" * 1001]])
def test_stop_strings_are_few_and_short(start, stop):
    found = start()
    for path, body in (("chat/completions", BODY), ("completions", {"model": "policy", "prompt": "hello"})):
        answer = requests.post(f"{found.base_url()}/{path}", json=body | {"stop": stop}, timeout=300)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "stop"
        assert "at most 64 texts of at most 1000 characters" in answer.json()["error"]["message"]


def test_an_echo_with_logprobs_takes_so_many_tokens(start):
    body = {"model": "policy", "prompt": ["a" * 2**15] * 3, "echo": True, "logprobs": 1, "max_tokens": 1}
    answer = requests.post(f"{start().base_url()}/completions", json=body, timeout=300)
    assert answer.status_code == 400 and "several requests" in answer.json()["error"]["message"]
