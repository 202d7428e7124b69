"""Servers on loopback that answer as the targets' documents say, over log probabilities that a test chooses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from evsys_sdk.protocols import Fingerprint

Answer = tuple[int, Any]


class StubServer:
    """Calls `answer(method, path, body)` for every request, and keeps the requests."""

    def __init__(self, answer: Callable[[str, str, Any], Answer]) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.headers: list[dict[str, str]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                raw = self.rfile.read(int(self.headers.get("content-length") or 0))
                try:
                    body = json.loads(raw) if raw else None
                except ValueError:
                    body = raw
                stub.requests.append((self.command, self.path, body))
                stub.headers.append({key.lower(): value for key, value in self.headers.items()})
                status, said = answer(self.command, self.path, body)
                headers = said.pop("_headers", {}) if isinstance(said, dict) else {}
                if isinstance(said, dict) and "_content" in said:
                    said = said["_content"]
                payload = said if isinstance(said, bytes) else json.dumps(said).encode()
                self.send_response(status)
                for key, value in {"content-type": "application/json", **headers}.items():
                    self.send_header(key, value)
                if "content-length" not in headers:
                    self.send_header("content-length", str(len(payload)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(payload)

            do_GET = do_POST = do_DELETE = do_HEAD = do_PUT = do_PATCH = _answer

            def log_message(self, *_: object) -> None:
                """Nothing: the test reads the requests."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[StubServer]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


class LoraStub(StubServer):
    """vLLM and SGLang as facts have them: adapters by name; SGLang applies one only where the request names it."""

    def __init__(self, fingerprint: Fingerprint, *, kind: str, base: str = "tiny-random") -> None:
        self.fingerprint, self.kind, self.base = fingerprint, kind, base
        self.loaded: dict[str, str] = {}
        self.ignores_adapters = False
        self.takes_adapters = True
        super().__init__(self._serve)

    def _logprobs(self, tokens: list[int], adapter: str | None) -> list[float]:
        case = next(case for case in self.fingerprint.cases if list(case.tokens) == tokens)
        active = adapter in self.loaded and not self.ignores_adapters
        return [value if active else value - 1.0 for value in case.logprobs]

    def _serve(self, method: str, path: str, body: Any) -> Answer:
        prefix = "/v1" if self.kind == "vllm" else ""
        if path == "/v1/models":
            adapters = [{"id": name, "object": "model", "parent": self.base} for name in self.loaded]
            return 200, {"data": [{"id": self.base, "object": "model", "parent": None}, *adapters]}
        if path == f"{prefix}/load_lora_adapter" and self.takes_adapters:
            if body["lora_name"] in self.loaded:
                return 400, {"error": {"message": f"The lora adapter {body['lora_name']!r} has already been loaded."}}
            self.loaded[body["lora_name"]] = body["lora_path"]
            return 200, b"Success: LoRA adapter added successfully."
        if path == f"{prefix}/unload_lora_adapter":
            self.loaded.pop(body["lora_name"])
            return 200, b"Success"
        if self.kind == "vllm" and path == "/v1/completions":
            if body["model"] not in {self.base, *self.loaded}:
                return 404, {"error": {"message": f"The model {body['model']!r} does not exist."}}
            values = self._logprobs(body["prompt"], body["model"])
            return 200, {"choices": [{"text": "x", "logprobs": {"token_logprobs": [None, *values, -0.1]}}]}
        if self.kind == "sglang" and path == "/generate":
            values = self._logprobs(body["input_ids"], body.get("lora_path"))
            return 200, {"text": "x", "meta_info": {"input_token_logprobs": [[None, 0, ""]]
                                                    + [[value, 0, ""] for value in values]}}  # fmt: skip
        return 404, {"detail": "Not Found"}
