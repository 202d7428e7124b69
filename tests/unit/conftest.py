"""A small world for the record's tests: a run's context, and a dashboard that keeps what it is told."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evsys_sdk.logs import configure_logger
from evsys_sdk.protocols import RunContext


class StandIn:
    """A dashboard on loopback: keyed by id as the wire's rules say, and able to fail on request."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.answers: list[int] = []
        """Statuses of the next requests, before `rule` is asked."""
        self.rule: Callable[[str, dict[str, Any]], int] = lambda path, body: 200
        self._port = 0
        self._server: ThreadingHTTPServer | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen, on the same port as before after a `stop`."""
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status = stand_in.take(self.command, self.path, body, dict(self.headers))
                answer = b"{}" if status < 400 else b'{"detail": "no such thing"}'
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_PATCH = do_POST

            def log_message(self, *args: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            def handle_error(self, *args: Any) -> None: ...  # a client that hung up is part of the game

        self._server = Server(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def take(self, method: str, path: str, body: dict[str, Any], headers: dict[str, str]) -> int:
        self.headers.append(headers)
        status = self.answers.pop(0) if self.answers else self.rule(path, body)
        if status < 400:
            self.requests.append((method, path, body))
        return status

    def items(self, kind: str) -> list[dict[str, Any]]:
        """Everything that arrived in lists called `kind`, duplicates included."""
        return [item for _, _, body in self.requests for item in body.get(kind, [])]

    def bodies(self, ending: str) -> list[dict[str, Any]]:
        """Bodies that arrived at routes ending like this."""
        return [body for _, path, body in self.requests if path.endswith(ending)]


@pytest.fixture
def dashboard() -> Iterator[StandIn]:
    stand_in = StandIn()
    yield stand_in
    stand_in.stop()


@pytest.fixture
def environ(dashboard: StandIn, tmp_path: Path) -> dict[str, str]:
    """The environment of a client of the stand-in."""
    return {
        "EVSYS_API_URL": dashboard.url,
        "EVSYS_API_KEY": "evk_secret",
        "EVSYS_PROJECT_ID": "p1",
        "EVSYS_LOG_DIR": str(tmp_path / "mirror"),
    }


@pytest.fixture
def make_ctx(tmp_path: Path) -> Callable[..., RunContext]:
    """Makes the context of a run whose directory is `<tmp_path>/<run_id>`."""

    def make(run_id: str = "r0", *, hypothesis: str = "", **extras: Any) -> RunContext:
        config = SimpleNamespace(name="exp", metadata=SimpleNamespace(hypothesis=hypothesis))
        nothing: Any = None
        return RunContext(
            run_id=run_id,
            output_dir=tmp_path / run_id,
            config=config,
            data_store=nothing,
            log_store=nothing,
            backend=nothing,
            extras=extras,
        )

    return make


@pytest.fixture
def log_lines() -> Iterator[list[logging.LogRecord]]:
    """What the SDK logs during a test, from level INFO on."""
    lines: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record)

    configure_logger("INFO", handler=Keep(), environ={})
    yield lines
    configure_logger(environ={})
