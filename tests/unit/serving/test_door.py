"""Who may come in, and what plain HTTP gets."""

from __future__ import annotations

import json

import pytest
import requests

from evsys_sdk.errors import EvsysError
from evsys_sdk.serving import Address, Endpoint, in_background

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def ask(found, **options):
    return requests.post(f"{found.base_url()}/chat/completions", json=BODY, timeout=10, **options)


def test_with_a_key_only_its_holders_come_in(start):
    found = start(key="secret")
    assert ask(found).status_code == 401
    refused = ask(found, headers={"Authorization": "Bearer wrong"})
    assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    assert ask(found, headers={"Authorization": "Bearer secret"}).status_code == 200
    assert ask(found, headers={"X-API-Key": "secret"}).status_code == 200


def test_health_is_told_to_everybody(start):
    found = start(key="secret")
    answer = requests.get(f"{found.url}/health", timeout=10)
    assert answer.status_code == 200 and answer.json() == {"status": "ok", "models": ["policy"], "under_way": 0}


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Host": "evil.example"}])
def test_without_a_key_web_pages_are_kept_out(start, headers):
    assert ask(start(), headers=headers).status_code == 403


def test_beyond_this_machine_a_key_is_needed():
    with pytest.raises(EvsysError, match="give a key"):
        with in_background(Endpoint({}), Address(host="0.0.0.0")):
            pass


def test_a_taken_port_is_a_message(start):
    port = int(start().url.rpartition(":")[2])
    with pytest.raises(EvsysError, match=f"cannot listen on 127.0.0.1:{port}"):
        with in_background(Endpoint({}), Address(port=port)):
            pass


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_request_is_a_400(start, body):
    answer = requests.post(f"{start().base_url()}/chat/completions", data=body, timeout=10)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_too_large_is_a_413(start, monkeypatch):
    monkeypatch.setattr("evsys_sdk.serving.http.BODY_BYTES", 1000)
    answer = requests.post(f"{start().base_url()}/chat/completions", data=b"x" * 5000, timeout=10)
    assert answer.status_code == 413


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/chat/completions"), ("POST", "/v1/nothing"), ("GET", "/")])
def test_what_is_not_there_is_a_404_that_says_what_is(start, method, path):
    answer = requests.request(method, start().url + path, timeout=10)
    assert answer.status_code == 404 and "/v1/models" in answer.json()["error"]["message"]


def test_events_are_what_a_plain_reader_of_streams_expects(start):
    answer = requests.post(f"{start().base_url()}/chat/completions", json=BODY | {"stream": True}, timeout=10)
    assert answer.headers["content-type"] == "text/event-stream"
    events = answer.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]" and all(event.startswith("data: ") for event in events)
    assert json.loads(events[0][6:])["object"] == "chat.completion.chunk"
