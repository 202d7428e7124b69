"""The judge through a real provider's client, against a server on loopback that speaks its protocol."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from evsys_sdk.errors import VerifierFailed
from evsys_sdk.registry import verifiers
from evsys_sdk.verifiers import judge

pytest.importorskip("openai", reason="the openai package is not installed")


class OpenAIStandIn(BaseHTTPRequestHandler):
    """Answers every chat completion with the server's `reply`."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(asked)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": self.server.reply}}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": asked["model"]}
        body = json.dumps({**answer, "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    judge.forget_verdicts()
    made = ThreadingHTTPServer(("127.0.0.1", 0), OpenAIStandIn)
    made.asked, made.reply, made.daemon_threads = [], "", True
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def plan(server) -> dict:
    client = {"base_url": f"http://127.0.0.1:{server.server_port}/v1"}
    return {"judge_model": "gpt-5-mini", "rubric": "Is it polite?", "client": client}


async def test_many_rollouts_are_judged_at_once_and_each_question_is_paid_for_once(server):
    server.reply = '{"reason": "fine", "score": 0.5}'
    ajudge = verifiers.adapted("llm_judge").ajudge
    verdicts = await asyncio.gather(*(ajudge(f"hi {n % 20}", None, plan(server), prompt="Greet.") for n in range(80)))
    assert {verdict.reward for verdict in verdicts} == {0.5}
    assert len(server.asked) == 20 and {asked["model"] for asked in server.asked} == {"gpt-5-mini"}


async def test_garbage_over_the_wire_is_no_verdict(server):
    server.reply = "I cannot help with that."
    with pytest.raises(VerifierFailed, match="gave no verdict in 3 tries"):
        await verifiers.adapted("llm_judge").ajudge("hi", None, plan(server))
    assert len(server.asked) == 3
