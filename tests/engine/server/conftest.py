"""A server over the toy engine, the real client against it, and plain HTTP requests past the client."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # plain_http, toy_engine

from plain_http import Plain
from toy_engine import ToyEngine, save_tokenizer

from evsys_engine.server import background_server
from evsys_sdk.backends.tinker import release

KEY = "tml-local"


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture
def toy(toy_folder):
    return ToyEngine(toy_folder)


@pytest.fixture
def server(toy, tmp_path):
    with background_server(toy, tmp_path / "checkpoints") as running:
        yield running


@pytest.fixture
def connect(monkeypatch):
    """Real clients of a server; their heartbeats end with the test."""
    tinker = pytest.importorskip("tinker")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    clients = []

    def make(running, key=KEY):
        clients.append(tinker.ServiceClient(base_url=running.url, api_key=key))
        return clients[-1]

    yield make
    for client in clients:
        release(client)  # not `close`: the server may be gone, and that would try for minutes


@pytest.fixture
def client(connect, server):
    return connect(server)


@pytest.fixture
def training(client, toy):
    return client.create_lora_training_client(base_model=toy.info.name, rank=4, seed=1)


@pytest.fixture
def plain(server):
    return Plain(server.url)
