"""A dashboard for tests: Django configured once per process on a SQLite file, each test in a project of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

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
