"""Tests of the engine need torch (extra `local`); without it they are left out, and pytest says how many ran."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["engine/*"]


@pytest.fixture(scope="session")
def tiny_engine():
    """The engine over the model made on the spot, with one thread."""
    pytest.importorskip("torch", reason="needs the extra local")
    from evsys_engine.engine import Engine
    from evsys_engine.models import find_model

    return Engine.load(find_model("tiny-random").path, name="tiny-random", threads=1)


@pytest.fixture(scope="session")
def tinker_server(tiny_engine, tmp_path_factory):
    """Our own Tinker server beside the tests; skips where the real client is missing."""
    pytest.importorskip("tinker", reason="needs the extra tinker")
    from evsys_engine.server import background_server

    with background_server(tiny_engine, tmp_path_factory.mktemp("server")) as running:
        yield running
