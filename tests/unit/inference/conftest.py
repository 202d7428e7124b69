"""Stand-ins for the providers: a real HTTP server on loopback that speaks each one's wire format, and its failures."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from evsys_sdk.registry import inference

MODELS = {"claude": "claude-opus-5", "openai": "gpt-5", "gemini": "gemini-2.5-pro"}
MODULES = {"claude": "anthropic", "openai": "openai", "gemini": "google.genai"}
KEYS = [
    *("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "ANTHROPIC_CUSTOM_HEADERS"),
    *("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_CUSTOM_HEADERS"),
    *("GEMINI_API_KEY", "GOOGLE_API_KEY", "GOOGLE_GENAI_USE_VERTEXAI"),
]


def ok_body(kind, text, calls=()):
    """The provider's answer with 7 tokens in, 5 out; for Gemini 2 of them are thoughts."""
    if kind == "claude":
        blocks = [{"type": "text", "text": text}] if text else []
        blocks += [{"type": "tool_use", "id": f"t{n}", "name": c[0], "input": c[1]} for n, c in enumerate(calls)]
        return {
            "id": "m", "type": "message", "role": "assistant", "model": "claude-opus-5", "content": blocks,
            "stop_reason": "end_turn", "stop_sequence": None, "usage": {"input_tokens": 7, "output_tokens": 5},
        }  # fmt: skip
    if kind == "openai":
        made = [
            {"id": f"c{n}", "type": "function", "function": {"name": c[0], "arguments": json.dumps(c[1])}}
            for n, c in enumerate(calls)
        ]
        message = {"role": "assistant", "content": text or None, **({"tool_calls": made} if made else {})}
        return {
            "id": "c", "object": "chat.completion", "created": 1, "model": "gpt-5",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12},
        }  # fmt: skip
    parts = [{"text": text}] if text else []
    parts += [{"functionCall": {"name": c[0], "args": c[1]}} for c in calls]
    return {
        "candidates": [{"content": {"role": "model", "parts": parts}, "finishReason": "STOP"}],
        "usageMetadata": {"promptTokenCount": 7, "candidatesTokenCount": 3, "thoughtsTokenCount": 2},
        "modelVersion": "gemini-2.5-pro",
    }


def error_body(kind, status, message):
    if kind == "claude":
        return {"type": "error", "error": {"type": "api_error", "message": message}}
    if kind == "openai":
        return {"error": {"message": message, "type": "server_error", "param": None, "code": None}}
    return {"error": {"code": status, "message": message, "status": "UNAVAILABLE"}}


def asked_text(kind, body):
    """The last thing the user said, as the provider reads it."""
    if kind == "gemini":
        return body["contents"][-1]["parts"][-1]["text"]
    content = body["messages"][-1]["content"]
    return content if isinstance(content, str) else content[-1]["text"]


class StandIn:
    """One provider. `script` holds what the next requests get, in order; after that every request is answered."""

    def __init__(self, kind):
        self.kind, self.requests, self.script = kind, [], deque()
        self.say = lambda asked: f"you said {asked}"
        self.at_once = self.most_at_once = 0
        self.pause_seconds = 0.0
        self.released = threading.Event()
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    @property
    def url(self):
        address = f"http://127.0.0.1:{self.server.server_port}"
        return f"{address}/v1" if self.kind == "openai" else address

    def will(self, *steps):
        """`("status", 429, {headers}, message)`, `("body", dict or bytes)`, `("page", 500)`, `"hang"`, `"trickle"`,
        `"drop"`, `"cut"`."""
        self.script.extend(steps)

    def close(self):
        self.released.set()
        self.server.shutdown()
        self.server.server_close()

    def _handler(stand_in):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args): ...

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with stand_in.lock:
                    stand_in.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                    step = stand_in.script.popleft() if stand_in.script else None
                    stand_in.at_once += 1
                    stand_in.most_at_once = max(stand_in.most_at_once, stand_in.at_once)
                try:
                    if stand_in.pause_seconds:
                        stand_in.released.wait(stand_in.pause_seconds)
                    self._play(step, body)
                finally:
                    with stand_in.lock:
                        stand_in.at_once -= 1

            def _play(self, step, body):
                if step == "hang":
                    stand_in.released.wait(300)
                elif step == "trickle":
                    self._trickle()
                elif step == "drop":
                    self.close_connection = True
                elif step == "cut":
                    self._begin_answer()
                    self.wfile.write(b'{"half": ')
                    self.close_connection = True
                elif step is None:
                    self._answer(200, ok_body(stand_in.kind, stand_in.say(asked_text(stand_in.kind, body))))
                elif step[0] == "body":
                    self._answer(200, step[1])
                elif step[0] == "page":
                    self._answer(step[1], b"<html>we are sorry</html>")
                else:
                    self._answer(step[1], error_body(stand_in.kind, step[1], step[3]), step[2])

            def _trickle(self):
                """A byte now and then: each read is quick, the answer never comes."""
                self._begin_answer()
                with contextlib.suppress(OSError):
                    while not stand_in.released.wait(0.1):
                        self.wfile.write(b" ")

            def _begin_answer(self):
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", "100000")
                self.end_headers()

            def _answer(self, status, body, headers=()):
                raw = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in dict(headers).items():
                    self.send_header(name, value)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

        return Handler


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=list(MODELS))
def kind(request):
    return request.param


@pytest.fixture
def provider(kind):
    """The stand-in of one provider, and `client(**params)` that asks it."""
    pytest.importorskip(MODULES[kind], reason=f"needs the extra {kind}")
    stand_in = StandIn(kind)
    stand_in.ok_body = lambda text, calls=(): ok_body(kind, text, calls)

    def client(**params):
        made = inference.build(kind, {"model": MODELS[kind], "base_url": stand_in.url, **params})
        made.pauses = []

        async def sleep(seconds):
            made.pauses.append(seconds)

        made._patience = type(made._patience)(
            max_retries=made._patience.max_retries,
            max_wait_seconds=made._patience.max_wait_seconds,
            timeout_seconds=made._patience.timeout_seconds,
            sleep=sleep,
            chance=lambda: 0.0,
        )
        return made

    stand_in.client = client
    yield stand_in
    stand_in.close()
