"""Tests of the engine need torch (extra `local`); without it they are left out, and pytest says how many ran."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes to make says something of the machine, nothing of the code.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["engine/*"]


@pytest.fixture(autouse=True, scope="session")
def _history_of_the_repository():
    """What tests run from the repository's own folder does not go into its `evsys history`."""
    from evsys_sdk.constants import WORKSPACE_DIR
    from evsys_sdk.running import registering

    own, found = Path(__file__).parents[1] / WORKSPACE_DIR, registering.workspaces_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registering, "workspaces_of", lambda config: [one for one in found(config) if one != own])
        yield


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
