"""Tests of the engine need torch (extra `local`); without it they are left out, and pytest says how many ran."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import weakref
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes to make says something of the machine, nothing of the code.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

MEMORY = Path("/dev/shm")
MEMORY_BYTES = 4 << 30
"""The folders of tests that run at the same time, and of a session, take up to 1 GB."""


def keep_folders_in_memory() -> None:
    """Let `tmp_path` lie in memory. A run syncs thirty times to disk, and each takes 10 ms. No test takes the power
    away: what a killed process wrote is there all the same."""
    try:
        found = os.statvfs(MEMORY)
    except OSError:
        return
    has_room = found.f_bavail * found.f_frsize >= MEMORY_BYTES
    if has_room and not found.f_flag & os.ST_NOEXEC and os.access(MEMORY, os.W_OK):  # containers often give 64 MB
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))  # what pytest calls the place of all its folders


keep_folders_in_memory()

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["engine/*"]


@pytest.fixture(autouse=True, scope="session")
def _history_of_the_repository():
    """What tests run from the repository's own folder does not go into its `evsys history`."""
    from evsys_sdk.constants import WORKSPACE_DIR
    from evsys_sdk.experiment import registration

    own, found = Path(__file__).parents[1] / WORKSPACE_DIR, registration.workspaces_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registration, "workspaces_of", lambda config: [one for one in found(config) if one != own])
        yield


_tinker_holders = None


@pytest.fixture(autouse=True, scope="module")
def _no_tinker_client_outlives_its_module():
    """A client whose server is gone would warn of its heartbeat for the rest of the session."""
    global _tinker_holders
    yield
    loaded = sys.modules.get("tinker.lib.internal_client_holder")
    if loaded is None:
        return
    if _tinker_holders is None:  # the first module that has imported tinker
        holder, init = loaded.InternalClientHolder, loaded.InternalClientHolder.__init__
        _tinker_holders = weakref.WeakSet(found for found in gc.get_objects() if type(found) is holder)

        def noted(self, *args, **kwargs):
            init(self, *args, **kwargs)
            _tinker_holders.add(self)

        holder.__init__ = noted
    for found in list(_tinker_holders):
        found.close()
    _tinker_holders.clear()


@pytest.fixture
def tinker_holders(monkeypatch):
    """What tinker clients that are made in this test hold: connections, heartbeats."""
    pytest.importorskip("tinker", reason="needs the extra tinker")
    from tinker.lib.internal_client_holder import InternalClientHolder

    made, init = [], InternalClientHolder.__init__

    def noted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(InternalClientHolder, "__init__", noted)
    return made


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
