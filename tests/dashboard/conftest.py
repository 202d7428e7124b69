"""A dashboard for tests: Django configured once per process on a SQLite file, each test in a project of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

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
def project(django_ready: None) -> Iterator[object]:
    """A project of this test alone; everything in it goes when the test ends."""
    from evsys_dashboard.models import Project

    number = next(_numbers)
    found = Project.objects.create(id=f"project-{number}", name=f"Project {number}", created=1.0)
    yield found
    found.delete()
