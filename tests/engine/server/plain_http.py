"""Requests as bytes, past the client."""

from __future__ import annotations

import json
import urllib.error
import urllib.request


class Plain:
    """Requests as bytes, answers as (status, JSON)."""

    def __init__(self, url: str):
        self.url = url

    def __call__(self, path, body=None, *, method=None, timeout=20, **headers):
        data = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as exc:
            return exc.code, json.loads(exc.read() or b"null")

    def open_model(self, base_model):
        """A session and a model in it, made by hand."""
        session = self("create_session", {})[1]["session_id"]
        made = self("create_model", {"session_id": session, "model_seq_id": 0, "base_model": base_model})[1]
        return session, self("retrieve_future", {"request_id": made["request_id"]})[1]["model_id"]
