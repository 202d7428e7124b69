"""A server that fails: calls get through once, weights end up as if nothing had happened, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import struct
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

pytest.importorskip("torch", reason="needs the extra local")
pytest.importorskip("tinker", reason="needs the extra tinker")

from evsys_engine.server import background_server
from evsys_engine.server.run import ServerAddress
from evsys_sdk.backends.tinker import TinkerBackend
from evsys_sdk.cli.main import main
from evsys_sdk.config.schema import ModelConfig
from evsys_sdk.errors import BackendUnavailable
from evsys_sdk.training_api import AdamParams, Datum, ModelInput, SamplingParams, TensorData

RATE = AdamParams(learning_rate=1e-3)
GIVEN_UP_BY = 20
"""Seconds, on a busy machine, where the backend is told to wait for 2."""


@dataclass(frozen=True)
class Status:
    """Refuse without asking the server."""

    code: int
    retry_after: str | None = None


CUT = "cut"
"""The server does its work, and the connection breaks within the answer."""
DROP = "drop"
"""The connection breaks before the server hears of it."""
HANG = "hang"


@dataclass
class Proxy:
    """Stands before a server and fails as planned, each fault once."""

    upstream: str
    plan: dict[str, list[object]] = field(default_factory=lambda: defaultdict(list))
    always: object = None
    """The fault of every request, once set."""
    only: str | None = None
    """The route it is for; None is all of them."""
    seen: Counter = field(default_factory=Counter)
    released: threading.Event = field(default_factory=threading.Event)

    def fault(self, route):
        self.seen[route] += 1
        if self.always is not None and self.only in (None, route):
            return self.always
        return self.plan[route].pop(0) if self.plan[route] else None


@pytest.fixture
def front():
    """Proxies before servers."""
    running = []

    def make(upstream):
        proxy = Proxy(upstream)
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"proxy": proxy}))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        proxy.url = f"http://127.0.0.1:{server.server_port}"

        def stop():
            proxy.always = DROP  # connections that are kept open would go on working
            proxy.released.set()
            server.shutdown()
            server.server_close()

        proxy.stop = stop
        running.append(proxy)
        return proxy

    yield make
    for proxy in running:
        proxy.stop()


class Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        fault = self.proxy.fault(self.path.rpartition("/")[2])
        if isinstance(fault, Status):
            extra = [("retry-after", fault.retry_after)] if fault.retry_after else []
            return self._answer(fault.code, b'{"detail": "the proxy says no"}', [("content-type", "x"), *extra])
        if fault == HANG:
            self.proxy.released.wait(300)
        if fault in (DROP, HANG):
            return self._reset()
        target = urlsplit(self.proxy.upstream)
        upstream = http.client.HTTPConnection(target.hostname, target.port, timeout=300)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "accept-encoding", "connection")}
        try:
            upstream.request(self.command, self.path, body, headers)
            answer = upstream.getresponse()
            content = answer.read()
        except OSError:
            return self._reset()
        finally:
            upstream.close()
        if fault == CUT:
            self._answer(answer.status, content, answer.getheaders(), only=len(content) // 2)
            return self._reset()
        return self._answer(answer.status, content, answer.getheaders())

    do_POST = do_GET

    def _answer(self, status, content, headers, only=None):
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() in ("content-type", "retry-after"):
                self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[:only])

    def _reset(self):
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def handle(self):
        with contextlib.suppress(OSError, ValueError):  # the other side went away
            super().handle()

    def finish(self):
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def log_message(self, *args):
        pass


@pytest.fixture
def connect(tmp_path):
    """Services over given addresses."""
    opened = []

    def make(url, **params):
        backend = TinkerBackend(base_url=url, **params)
        handles = backend.prepare(model=ModelConfig(name="tiny-random"), run_dir=tmp_path)
        opened.append((backend, handles))
        return handles["service"]

    yield make
    for backend, handles in opened:
        backend.teardown(handles)


def _datum(service, answer="blue"):
    tokens = service.get_tokenizer().encode(f"the sky is {answer}")
    inputs = {"target_tokens": TensorData(tokens[1:], "int64"), "weights": TensorData([1.0] * (len(tokens) - 1))}
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs)


async def _steps(service, client, count=3):
    for _ in range(count):
        output = client.forward_backward([_datum(service)], "cross_entropy")
        await client.optim_step(RATE)
        await output


async def _train(service):
    """A little of everything; what the weights then say, to the last bit."""
    client = await service.create_training_client(rank=4, seed=1)
    await _steps(service, client)

    def loss(data, logprobs):
        return -(logprobs[0] ** 2).sum(), {}

    custom = client.forward_backward_custom([_datum(service, "grey")], loss)
    await client.optim_step(RATE)
    await custom
    sampler = await service.create_sampling_client(await client.save_weights_for_sampler("end"))
    said = await sampler.sample(_datum(service).model_input, 2, SamplingParams(max_tokens=4, seed=5))
    return await sampler.compute_logprobs(_datum(service).model_input), [row.tokens for row in said.sequences]


FAULTS = {
    "rate limit with Retry-After": {"forward_backward": [Status(429, "1")], "retrieve_future": [Status(429, "1")]},
    "unavailable": {"optim_step": [Status(503)], "save_weights_for_sampler": [Status(503)]},
    "results that fail to come": {"retrieve_future": [Status(500), Status(502), None, Status(503), Status(504)]},
    "answers cut short": {"forward_backward": [None, CUT], "optim_step": [CUT], "retrieve_future": [None, CUT]},
    "creation cut short": {"create_model": [CUT], "create_session": [DROP], "create_sampling_session": [CUT]},
    "connections dropped": {"forward_backward": [DROP], "optim_step": [None, DROP], "asample": [DROP, CUT]},
}


@pytest.fixture(scope="module")
def undisturbed():
    """What `_train` ends with where nothing fails."""
    return []


@pytest.mark.parametrize("plan", FAULTS.values(), ids=FAULTS)
async def test_after_faults_the_weights_are_those_of_a_run_without(tinker_server, front, connect, plan, undisturbed):
    if not undisturbed:
        undisturbed.append(await _train(connect(tinker_server.url)))
    proxy = front(tinker_server.url)
    proxy.plan.update({route: list(faults) for route, faults in plan.items()})
    assert await _train(connect(proxy.url)) == undisturbed[0]
    assert not any(proxy.plan.values()), "every planned fault has happened"


async def test_a_server_that_dies_is_given_up_in_time(tinker_server, front, connect):
    proxy = front(tinker_server.url)
    service = connect(proxy.url)
    client = await service.create_training_client(rank=4, seed=1)
    await _steps(service, client, 1)
    service.watch.timeout_seconds = 2  # only now: a busy machine may take longer than that to connect
    proxy.stop()
    began = time.monotonic()
    calls = [client.forward_backward([_datum(service)], "cross_entropy"), client.optim_step(RATE)]
    for call in calls:
        with pytest.raises(BackendUnavailable, match=r"forward_backward|optim_step") as failed:
            await asyncio.wait_for(call, GIVEN_UP_BY)
        assert proxy.url in str(failed.value) and "timeout_seconds is 2" in str(failed.value)
    service.close()
    assert time.monotonic() - began < GIVEN_UP_BY


@pytest.mark.parametrize(("fault", "route"), [(Status(500), "retrieve_future"), (Status(429), "asample"), (HANG, None)])
async def test_failures_without_an_end_are_given_up_and_not_asked_in_a_rush(
    tinker_server, front, connect, fault, route
):
    proxy = front(tinker_server.url)
    service = connect(proxy.url)
    sampler = await service.create_sampling_client()
    service.watch.timeout_seconds = 2  # only now: a busy machine may take longer than that to connect
    proxy.always, proxy.only = fault, route
    began = time.monotonic()
    with pytest.raises(BackendUnavailable):
        await asyncio.wait_for(
            sampler.sample(_datum(service).model_input, 1, SamplingParams(max_tokens=2)), GIVEN_UP_BY
        )
    assert time.monotonic() - began < GIVEN_UP_BY and proxy.seen.total() < 60


async def test_slow_answers_are_no_failure(tinker_server, front, connect, monkeypatch):
    service = connect(tinker_server.url)
    client = await service.create_training_client(rank=4, seed=1)
    service.watch.timeout_seconds = 0.5  # only now: a busy machine may take longer than that to connect
    adapter = next(iter(tinker_server.service.sessions.all()[-1].models.values())).adapter
    real = adapter.forward_backward

    def slow(*args):
        time.sleep(1.5)
        return real(*args)

    monkeypatch.setattr(adapter, "forward_backward", slow)
    output = await client.forward_backward([_datum(service)], "cross_entropy")
    assert output.metrics["loss:sum"] > 0


async def test_after_a_restart_the_run_resumes_from_its_checkpoint(tiny_engine, tmp_path, connect):
    with background_server(tiny_engine, tmp_path / "kept") as first:
        service = connect(first.url, timeout_seconds=20)
        client = await service.create_training_client(rank=4, seed=1)
        await _steps(service, client, 2)
        path = await client.save_state("middle")
        await _steps(service, client, 2)
        uninterrupted = (await client.forward_backward([_datum(service)], "cross_entropy")).logprobs
        port = urlsplit(first.url).port
    with background_server(tiny_engine, tmp_path / "kept", ServerAddress(port=port)) as second:
        assert second.url == service.watch.server
        with pytest.raises(BackendUnavailable, match="as after a restart"):
            await _steps(service, client, 1)
        service.close()
        service = connect(second.url)
        client = await service.create_training_client(rank=4, seed=2)
        await client.load_state(path)
        await _steps(service, client, 2)
        assert (await client.forward_backward([_datum(service)], "cross_entropy")).logprobs == uninterrupted
        service.close()


@pytest.mark.parametrize(
    ("fault", "only"),
    [
        (Status(503), "asample"),
        (Status(429), "asample"),
        (DROP, "asample"),
        (Status(500), "retrieve_future"),
        (Status(503), None),
        (DROP, None),
    ],
    ids=str,
)
def test_eval_model_makes_each_call_as_often_as_max_attempts_says(front, tinker_server, tmp_path, fault, only):
    proxy = front(tinker_server.url)
    proxy.always, proxy.only = fault, only
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"query": "say {w}", "answer": "{w}"}}\n' for w in ("a", "b")))
    (tmp_path / "aliases.json").write_text("{}")
    words = ["--dataset", tmp_path / "rows.jsonl", "--aliases", tmp_path / "aliases.json", "--max-tokens", 4]
    words += ["--inference-kind", "tinker", "--model-name", "tiny-random", "--set", f"base_url={proxy.url}"]
    code = main(["eval", "model", *map(str, words), "--max-attempts", "2", "--output-dir", str(tmp_path / "out")])
    if only is None:
        assert code == 1 and proxy.seen == {"get_server_capabilities": 2}
        return
    report = json.loads((tmp_path / "out/retry_report.json").read_text())
    assert code == 2 and proxy.seen["asample"] == 4, "two rows, two tries each"
    assert report["total_retries"] == 2 and [failure["attempts"] for failure in report["failures"]] == [2, 2]
