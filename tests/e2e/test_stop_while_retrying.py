"""A stop while a server is tried again and again: the run ends then, not when its patience is over."""

from __future__ import annotations

import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("tinker", reason="needs the extra tinker")

LIMIT_SECONDS = 280
"""Far more than a busy machine needs, and less than the 300 s for which the backend tries."""


class FailingServer(ThreadingHTTPServer):
    """Answers 503, or (`hangs`) never; says when it was asked."""

    daemon_threads = True

    def __init__(self, *, hangs):
        self.asked, self.over = threading.Semaphore(0), threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server.asked.release()
                if hangs:
                    server.over.wait()
                self.send_error(503)

            do_POST = do_GET

            def log_message(self, *args):
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


def _interrupt(project, process):
    process.send_signal(signal.SIGINT)


def _terminate(project, process):
    process.send_signal(signal.SIGTERM)


def _stop(project, process):
    project.evsys("stop", "hello_sft", "--timeout", "250", check=True)


@pytest.mark.parametrize(
    ("hangs", "stop"), [(False, _interrupt), (False, _terminate), (False, _stop), (True, _terminate)]
)
def test_a_run_that_cannot_reach_its_server_stops_when_asked(project, minimal_run, hangs, stop):
    server = FailingServer(hangs=hangs)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    backend = {"kind": "tinker", "params": {"base_url": server.url, "timeout_seconds": 300}}
    path = project.config(run=minimal_run(backend=backend, eval={"enabled": False}))
    process = project.start("run", path)
    try:
        for _ in range(1 if hangs else 2):
            assert server.asked.acquire(timeout=LIMIT_SECONDS)
        stop(project, process)
        _, err = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        process.kill()
        process.communicate()
    assert process.returncode == 2, err
    assert project.record()["status"] == "cancelled"
    assert "To resume: evsys run" in err
