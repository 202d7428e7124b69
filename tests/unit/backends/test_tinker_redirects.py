"""The key goes to the server that the config names, and not to where that one points."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

pytest.importorskip("tinker", reason="needs the extra tinker")

from evsys_sdk.backends.tinker import ask_features


class Redirecting(BaseHTTPRequestHandler):
    seen: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("X-API-Key")))
        port = self.server.server_address[1]
        self.send_response(307 if "elsewhere" not in self.path else 200)
        self.send_header("Location", f"http://localhost:{port}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Redirecting.seen = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_redirect_does_not_take_the_key_along(url):
    assert ask_features(url, "tml-secret", 5.0) is None
    assert Redirecting.seen == [("/api/v1/get_server_capabilities", "tml-secret")]
