"""A dashboard for tests: Django configured once per process on a SQLite file, each test in a project of its own."""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `servers`; tests are imported by path, not as a package

from servers import PostgresqlProcess, ServerProcess, find_postgresql

pytest.importorskip("django", reason="the dashboard needs the extra `dashboard`")

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def django_ready(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Configure Django and make the tables."""
    from evsys_dashboard.settings import ServerOptions, configure

    path = tmp_path_factory.mktemp("dashboard") / "dashboard.sqlite"
    configure(ServerOptions(database_url=f"sqlite://{path}", secret_key="test", hosts=("testserver", "127.0.0.1")))
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


@pytest.fixture
def project(django_ready: None) -> Iterator[Any]:
    """A project of this test alone; everything in it goes when the test ends."""
    from evsys_dashboard.models import Project

    number = next(_numbers)
    found = Project.objects.create(id=f"project-{number}", name=f"Project {number}", created=1.0)
    yield found
    found.delete()


@pytest.fixture
def team(django_ready: None) -> Iterator[None]:
    """The server of a team instead of one's own machine: people see the projects they are members of."""
    from django.conf import settings

    settings.EVSYS_IS_LOCAL = False
    yield
    settings.EVSYS_IS_LOCAL = True


@pytest.fixture
def visitor(django_ready: None) -> Any:
    """A browser that is logged in as the user of this machine (`django.test.Client`)."""
    from django.test import Client

    from evsys_dashboard.auth import local_user

    client = Client()
    client.force_login(local_user())
    return client


@pytest.fixture
def key(project: Any) -> str:
    """A key of the test's project that may write."""
    from evsys_dashboard.auth import make_key

    return make_key(project, "test", "write")[1]


def _fill(project: Any, number: int = 1, **fields: Any) -> tuple[str, str]:
    """An experiment with a run, curves, an evaluation and rollouts; its id and that of its run."""
    from evsys_dashboard import ingest

    experiment, run, evaluation = (f"{project.pk}-{kind}{number}" for kind in "erv")
    given = {
        "name": f"lr {number}",
        "hypothesis": f"rate {number} helps",
        "tags": ["lr"],
        "config": {"name": "lr"},
        "ts": float(number),
    }
    with ingest.writing():
        ingest.save_experiment(project, experiment, given | fields, create=True)
        about = {"experiment_id": experiment, "name": "a__s1", "run_config": {"seed": 1}, "ts": float(number)}
        generation = ingest.save_generation(project, run, about, create=True)
        steps = [{"step": 1, "ts": 1.0, "metrics": {"loss": 0.5, "bad": "NaN"}}]
        ingest.save_steps([ingest.read_steps(run, {"steps": steps})])
        body = {"id": evaluation, "name": "tools", "split": "test", "metrics": {"pass@1": 0.5}, "ts": 2.0}
        ingest.save_eval(project, generation, body)
        rollouts = [{"id": f"{run}-p{n}", "ts": 1.0, "task_id": f"t{n}", "reward": n, "status": "ok",
                     "completion": f"answer {n}", "eval_run_id": evaluation} for n in range(2)]  # fmt: skip
        ingest.save_predictions(ingest.read_predictions(project, run, {"predictions": rollouts}))
    return experiment, run


@pytest.fixture
def fill(django_ready: None) -> Any:
    """Make an experiment with a run, curves, an evaluation and rollouts in a project; the ids of both come back."""
    return _fill


@pytest.fixture(scope="session")
def needs_postgresql() -> None:
    """Skips where there is no PostgreSQL."""
    pytest.importorskip("psycopg", reason="PostgreSQL needs psycopg")
    if find_postgresql() is None:
        pytest.skip("PostgreSQL is not installed here (no initdb)")
    if os.geteuid() == 0 and shutil.which("runuser") is None:
        pytest.skip("PostgreSQL does not run as root, and there is no runuser")


@pytest.fixture(scope="session")
def postgresql_url(needs_postgresql: None) -> Iterator[str]:
    """A PostgreSQL server of this session."""
    server = PostgresqlProcess()
    try:
        yield server.start().url
    finally:
        server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of this test, of each kind."""
    if request.param == "sqlite":
        return f"sqlite://{tmp_path / 'dashboard.sqlite'}"
    base = request.getfixturevalue("postgresql_url")
    import psycopg

    name = f"test_{uuid.uuid4().hex}"
    with psycopg.connect(f"{base}/postgres", autocommit=True) as db:
        db.execute(f"CREATE DATABASE {name}")
    return f"{base}/{name}"


@pytest.fixture
def server(database_url: str) -> Iterator[ServerProcess]:
    """A server process with the projects p1 and p2, on each kind of database."""
    found = ServerProcess(database_url, projects=["p1", "p2"]).start()
    yield found
    found.stop()


@pytest.fixture
def sqlite_server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server process with the projects p1 and p2, on SQLite, for what no database has a part in."""
    found = ServerProcess(f"sqlite://{tmp_path / 'dashboard.sqlite'}", projects=["p1", "p2"]).start()
    yield found
    found.stop()


@pytest.fixture(scope="session")
def rows(django_ready: None) -> ModuleType:
    """`experiment_rows.py`: experiments made directly through the models."""
    return importlib.import_module("experiment_rows")


CHROMIUM_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


@pytest.fixture(scope="session")
def live_url(django_ready: None) -> Iterator[str]:
    """The address of a server in a thread of this process, on the tables of the tests."""
    import threading

    import uvicorn

    from evsys_dashboard.asgi import Application
    from evsys_dashboard.server import listen

    started = threading.Event()

    class SignallingServer(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            started.set()

    application, sock = Application(), listen("127.0.0.1", 0)
    server = SignallingServer(uvicorn.Config(application, lifespan="off", log_config=None, timeout_graceful_shutdown=3))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    assert started.wait(120)
    yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    server.should_exit = True
    thread.join(60)
    application.close()


@pytest.fixture(scope="module")
def chromium(live_url: str) -> Iterator[Any]:
    """A headless browser of this module. Playwright runs an event loop in this thread while it is open, in which async
    tests of other modules could not run, and which Django takes for a view that blocks."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="browser tests need playwright")
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("chromium is not installed here (Debian's package chromium)")
    with pytest.MonkeyPatch.context() as patch, sync_api.sync_playwright() as playwright:
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
        browser = playwright.chromium.launch(executable_path=found, args=list(CHROMIUM_FLAGS), timeout=120_000)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any, live_url: str, visitor: Any) -> Iterator[Any]:
    """`open_page("/p/x/", width=360, color_scheme="dark")`: a page, logged in. A script error or a violation of the
    content security policy on it fails the test."""
    from django.conf import settings

    contexts, problems = [], []

    def opened(path: str, *, width: int = 1280, height: int = 900, color_scheme: str = "light") -> Any:
        size = {"width": width, "height": height}
        context = chromium.new_context(viewport=size, color_scheme=color_scheme, base_url=live_url)
        context.set_default_timeout(60_000)
        cookie = visitor.cookies[settings.SESSION_COOKIE_NAME].value
        context.add_cookies([{"name": settings.SESSION_COOKIE_NAME, "value": cookie, "url": live_url}])
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: problems.append(said.text) if "Content Security Policy" in said.text else None)
        page.goto(path)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture(scope="session")
def sweep_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The records of two real experiments (`record_world`): a sweep of two arms and three seeds, and a child of it."""
    import contextlib

    root = tmp_path_factory.mktemp("sweep")
    world = importlib.import_module("record_world")
    with contextlib.chdir(root):
        return world.make_folder(root)


@pytest.fixture
def sweep(project: Any, sweep_folder: Any) -> Any:
    """These experiments as rows of the test's project, by name."""
    from evsys_dashboard.follow import FollowedSource, Follower, ensure_experiment_loaded
    from evsys_dashboard.models import ExperimentRow

    Follower(project=project, place=FollowedSource(folders=(sweep_folder,))).update()
    rows = {row.name: row for row in ExperimentRow.objects.filter(project=project)}
    for row in rows.values():
        ensure_experiment_loaded(row)
    return rows
