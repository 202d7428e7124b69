"""What happens when the machine fails: PostgreSQL killed in the middle of commits, a disk without room, a clock that is
set back, a database user without rights. Nothing is lost, nothing is there twice, and the message says what to do."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from servers import WAIT_SECONDS, PostgresqlProcess, ServerProcess

from evsys_sdk import DashboardClient, ExperimentRun

POINTS = (
    "SELECT p.step, p.value FROM dashboard_point p JOIN dashboard_metrickey k ON k.id = p.key_id WHERE k.name = 'loss' "
    "ORDER BY p.step"
)
COUNT_POINTS = "SELECT count(*) FROM dashboard_point"


def client_of(server: ServerProcess, folder: Path) -> DashboardClient:
    return DashboardClient(
        api_url=server.url, api_key=server.key, project_id=server.projects[0], log_dir=folder / "mirror",
        timeout_seconds=5,
    )  # fmt: skip


def wait_for(condition: Any) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def postgresql(needs_postgresql: None, request: pytest.FixtureRequest) -> Iterator[PostgresqlProcess]:
    """A PostgreSQL server of this test; its parameter is the superuser's password."""
    found = PostgresqlProcess(password=getattr(request, "param", ""))
    try:
        yield found.start()
    finally:
        found.stop()


@contextmanager
def running(database_url: str) -> Iterator[ServerProcess]:
    server = ServerProcess(database_url).start()
    try:
        yield server
    finally:
        server.stop()


def execute(url: str, *statements: str) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as db:
        for statement in statements:
            db.execute(statement)


def test_postgresql_killed_in_the_middle_of_commits_loses_nothing_and_doubles_nothing(postgresql, tmp_path):
    execute(f"{postgresql.url}/postgres", "CREATE DATABASE lab")
    sent, stop = 0, threading.Event()
    with running(f"{postgresql.url}/lab") as server:
        client = client_of(server, tmp_path)
        with ExperimentRun(client, experiment_name="killed") as run:

            def write() -> None:
                nonlocal sent
                while not stop.wait(0.001):  # as often as a fast training, not as fast as a loop can
                    sent += 1
                    run.log_step(sent, loss=float(sent))

            thread = threading.Thread(target=write)
            thread.start()
            try:
                for _ in range(2):
                    wanted = server.rows(COUNT_POINTS)[0][0] + 200
                    wait_for(lambda wanted=wanted: server.rows(COUNT_POINTS)[0][0] >= wanted)
                    postgresql.kill()  # steps are being sent all the time
                    answer = server.post("experiments/", {"id": "e9", "name": "n", "ts": 1.0})
                    assert answer.status_code == 503 and "database" in answer.json()["error"]
                    postgresql.start()
            finally:
                stop.set()
                thread.join()
            assert client.flush(WAIT_SECONDS)
        assert client.finish(WAIT_SECONDS)
        assert server.rows(POINTS) == [(step, float(step)) for step in range(1, sent + 1)]
        assert server.rows("SELECT n, last FROM dashboard_metrickey") == [(sent, float(sent))]
        assert server.rows("SELECT status FROM dashboard_experiment") == [("completed",)]


@pytest.mark.skipif(sys.platform != "linux", reason="a limit is put on a running process (prlimit)")
def test_a_disk_without_room_is_said_and_the_client_keeps_everything(sqlite_server, tmp_path):
    """No file of the server may grow any more, as on a full disk (EFBIG instead of ENOSPC)."""
    server = sqlite_server
    client = client_of(server, tmp_path)
    assert server.process is not None
    with ExperimentRun(client, experiment_name="full") as run:
        run.log_step(1, loss=1.0)
        assert client.flush(WAIT_SECONDS)
        _, hard = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (4096, hard))
        for step in range(2, 501):
            run.log_step(step, loss=float(step))
        for path, body in [
            ("generations/none/step/", {"steps": [{"step": 1, "ts": 1.0, "metrics": {"loss": 1.0}}]}),
            ("experiments/", {"id": "e9", "name": "x" * 200, "description": "y" * 100_000, "ts": 1.0}),
        ]:
            wanted = (404,) if "none" in path else (503,)
            assert server.post(path, body).status_code in wanted, path
        assert not client.flush(0.5)  # what was not stored is still the client's to send
        assert server.rows(COUNT_POINTS) == [(1,)]
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        assert client.flush(WAIT_SECONDS)
    assert client.finish(WAIT_SECONDS)
    assert server.rows(POINTS) == [(step, float(step)) for step in range(1, 501)]


def test_a_clock_that_is_set_back_loses_no_end_of_a_run(sqlite_server, tmp_path, monkeypatch):
    from evsys_sdk.record.dashboard import client as module

    clock = iter([2_000_000_000.0 - 60 * number for number in range(1000)])  # every look is a minute earlier
    monkeypatch.setattr(module.time, "time", lambda: next(clock))
    server = sqlite_server
    client = client_of(server, tmp_path)
    with ExperimentRun(client, experiment_name="back") as run:
        run.log_step(1, loss=1.0)
        run.log_step(1, loss=2.0)  # the later value of a step counts
        run.set_conclusion("it works")
    monkeypatch.undo()
    assert client.finish(WAIT_SECONDS)
    assert server.rows("SELECT status, conclusion FROM dashboard_experiment") == [("completed", "it works")]
    assert server.rows("SELECT status FROM dashboard_generation") == [("completed",)]
    assert server.rows(POINTS) == [(1, 2.0)]


def test_a_clock_of_the_server_that_is_set_back_hides_no_change(project, fill, monkeypatch):
    from evsys_dashboard import ingest
    from evsys_dashboard.changes import changes_since, current_cursor

    fill(project, 1)
    cursor = current_cursor(project)
    monkeypatch.setattr(ingest.time, "time", lambda: 1000.0)
    experiment, run = fill(project, 2)
    found = changes_since(project, cursor)
    assert (found.experiments, found.runs) == ([experiment], [run])


def ask(server: ServerProcess, sql: str) -> requests.Response:
    headers = {"Authorization": f"Bearer {server.key}"}
    place = f"{server.url}/api/v1/projects/{server.projects[0]}/query"
    return requests.post(place, json={"sql": sql}, headers=headers, timeout=WAIT_SECONDS)


@pytest.mark.parametrize("postgresql", ["of-the-superuser"], indirect=True)
def test_sql_is_read_by_a_role_with_a_password_and_without_the_right_the_answer_says_what_to_do(postgresql):
    execute(
        f"{postgresql.url}/postgres",
        "CREATE ROLE lab LOGIN PASSWORD 'of-the-lab'",
        "CREATE DATABASE lab OWNER lab",
    )
    with running(f"{postgresql.url_of('lab', 'of-the-lab')}/lab") as server:
        server.make_run()
        refused = ask(server, "select name from experiments")
        assert refused.status_code == 422
        assert 'ALTER ROLE "lab" CREATEROLE' in refused.json()["error"]
        execute(f"{postgresql.url}/postgres", 'ALTER ROLE "lab" CREATEROLE')
        assert ask(server, "select name from experiments").json()["rows"] == [["e"]]
        assert ask(server, "select rolname from pg_authid").status_code == 422
        ask(server, "select lo_create(0)")  # PostgreSQL 15 allows it in a read-only transaction
        assert server.rows("select count(*) from pg_largeobject_metadata") == [(0,)]
        # The role is looked at again after this, and may then be there already.
        assert "does not exist; there are: experiments, runs" in ask(server, "select name from nowhere").json()["error"]
        assert ask(server, "select name from experiments").json()["rows"] == [["e"]]


def test_every_page_is_shown_on_both_databases(server, tmp_path):
    with ExperimentRun(client := client_of(server, tmp_path), experiment_name="walk", tags=["t"]) as run:
        run.log_step(1, loss=1.0)
        with run.benchmark("tools", split="val", step=1) as scoring:
            scoring.log_metrics({"pass@1": 0.5})
            scoring.log_prediction(task_id="t1", completion="yes", reward=1.0, metadata={"topic": "sums"})
    assert client.finish(WAIT_SECONDS)
    [(experiment,)] = server.rows("SELECT id FROM dashboard_experiment")
    [(run_id,)] = server.rows("SELECT id FROM dashboard_generation")
    browser = requests.Session()
    assert browser.get(server.url + server.link, timeout=WAIT_SECONDS).status_code == 200
    rollouts = f"rollouts?run={run_id}"
    pages = [
        "", "?q=walk+tag:t+score>=0.1+-status:failed+after:2020-01-01&sort=best&group=model", "?group=verdict",
        "?q=walk", "rows?from=0", "experiments.csv", "experiments.json", "progress", "progress?x=order", "progress.csv",
        f"experiments/{experiment}", f"experiments/{experiment}/scores.csv", f"compare?e={experiment}",
        f"runs/{run_id}", "rollouts", rollouts, f"{rollouts}&passed=1&status=ok&key=topic:sums&q=yes",
        f"{rollouts}&task=t1&side=1", "datasets", "benchmarks", "settings",
    ]  # fmt: skip
    for path in pages:
        answer = browser.get(f"{server.url}/p/p1/{path}", timeout=WAIT_SECONDS)
        assert answer.status_code == 200, (path, answer.text[:500])
        if path in (rollouts, f"{rollouts}&passed=1&status=ok&key=topic:sums&q=yes", f"{rollouts}&task=t1&side=1"):
            assert "yes" in answer.text and "t1" in answer.text, path
    for path in ("changes", f"experiments/{experiment}/curves?metric=loss", f"runs/{run_id}/rollouts?key=topic:sums"):
        answer = browser.get(f"{server.url}/api/v1/projects/p1/{path}", timeout=WAIT_SECONDS)
        assert answer.status_code == 200, path
