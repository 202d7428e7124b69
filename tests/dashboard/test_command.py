"""`evsys dashboard`: one command, one link; and the server of a team."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from servers import WAIT_SECONDS
from test_follow import run_small

from evsys_sdk.record.dashboard.payloads import without_none

EVSYS = [sys.executable, "-m", "evsys_sdk.cli.main"]


@contextmanager
def running(folder: Path, *words: str, environ: dict[str, str] | None = None) -> Iterator[Any]:
    """The command in `folder`; yields the process with what its first line says."""
    process = subprocess.Popen(
        [*EVSYS, "dashboard", "--json", "--no-browser", *words],
        cwd=folder, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environ or {})},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, "it ended before it listened; its stderr says why"
        yield process, json.loads(line)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(WAIT_SECONDS)
        process.stdout.close()


def test_one_command_shows_what_is_on_disk_by_a_link_that_works_once(tmp_path):
    run_small(tmp_path)
    with running(tmp_path) as (process, said):
        browser = requests.Session()
        answer = browser.get(said["link"], timeout=WAIT_SECONDS, allow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (302, f"/p/{said['project']}/")
        assert said["url"].startswith("http://127.0.0.1:")
        assert requests.get(said["link"], timeout=WAIT_SECONDS, allow_redirects=False).status_code == 403
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_SECONDS) == 0
    for name in ("dashboard.sqlite", "dashboard.key"):
        assert stat.S_IMODE((tmp_path / ".evsys" / name).stat().st_mode) == 0o600


def test_a_session_outlives_a_restart(tmp_path):
    (tmp_path / ".evsys").mkdir()
    browser = requests.Session()
    with running(tmp_path) as (_, said):
        browser.get(said["link"], timeout=WAIT_SECONDS, allow_redirects=False)
    with running(tmp_path) as (_, said):
        answer = browser.get(f"{said['url']}/login", timeout=WAIT_SECONDS, allow_redirects=False)
        assert answer.status_code == 302  # logged in: there is nothing to do on the login page


def test_a_port_that_is_taken_is_refused_if_it_was_asked_for_and_passed_over_if_not(tmp_path):
    (tmp_path / ".evsys").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = subprocess.run(
            [*EVSYS, "dashboard", "--port", str(port)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
        )
        assert (ended.returncode, f"port {port} on 127.0.0.1 is in use" in ended.stderr) == (1, True)
    with running(tmp_path) as (_, first), running(tmp_path) as (_, second):
        assert first["url"] != second["url"]


def test_an_answer_does_not_wait_for_the_client_to_acknowledge_its_headers():
    from evsys_dashboard.server import listen

    async def nagle_is_off() -> bool:
        found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            found.set_result(bool(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            writer.close()

        sock = listen("127.0.0.1", 0)
        async with await asyncio.start_server(answer, sock=sock):
            _, writer = await asyncio.open_connection(*sock.getsockname())
            is_off = await found
            writer.close()
            return is_off

    assert asyncio.run(nagle_is_off())


def test_a_folder_that_is_none_is_refused(tmp_path):
    ended = subprocess.run(
        [*EVSYS, "dashboard", "--dir", "nowhere"], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    assert (ended.returncode, ended.stderr) == (1, "--dir nowhere is not a folder\n")


def test_without_the_extra_it_says_how_to_install_it(tmp_path):
    (tmp_path / "django.py").write_text("raise ImportError('not here')")
    ended = subprocess.run(
        [*EVSYS, "dashboard"], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_SECONDS,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert ended.returncode == 1
    assert "pip install 'evsys-sdk[dashboard]'" in ended.stderr


def test_a_database_url_without_a_host_is_named_and_not_used(tmp_path):
    (tmp_path / ".evsys").mkdir()
    elsewhere = tmp_path / "team.sqlite"
    environ = {**os.environ, "EVSYS_DATABASE_URL": f"sqlite://{elsewhere}"}
    process = subprocess.Popen(
        [*EVSYS, "dashboard", "--json", "--no-browser"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environ,
    )  # fmt: skip
    assert process.stdout is not None
    said = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=WAIT_SECONDS)
    assert "link" in json.loads(said)
    assert "EVSYS_DATABASE_URL is for the server of a team (--host)" in told
    assert not elsewhere.exists() and (tmp_path / ".evsys" / "dashboard.sqlite").exists()


def test_a_folder_is_not_shown_by_a_teams_server(tmp_path):
    words = [*EVSYS, "dashboard", "--host", "127.0.0.1", "--dir", "."]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert ended.returncode == 1 and "use one of them" in ended.stderr


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1"])
def test_a_teams_server_begins_with_its_first_owner(tmp_path, address):
    (tmp_path / ".evsys").mkdir()
    host = "127.0.0.1"
    with running(tmp_path, "--host", address, "--port", "0") as (_, said):
        assert "link" not in said  # nobody is let in without a password
        port = said["url"].rpartition(":")[2]
        url = f"http://{host}:{port}"
        setup = url + "/login/" + said["setup"].rpartition("/")[2]
        owner = requests.Session()
        page = owner.get(setup, timeout=WAIT_SECONDS)
        assert page.url == f"{url}/welcome"
        token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.text)
        assert token
        form = {"username": "ada", "password": "a long password", "csrfmiddlewaretoken": token[1]}
        assert owner.post(f"{url}/welcome", form, timeout=WAIT_SECONDS, allow_redirects=False).status_code == 302
    with running(tmp_path, "--host", address, "--port", "0") as (_, said):
        assert "setup" not in said
        url = f"http://{host}:{said['url'].rpartition(':')[2]}"
        browser = requests.Session()
        token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', browser.get(f"{url}/login", timeout=60).text)
        assert token
        form = {"username": "ada", "password": "a long password", "csrfmiddlewaretoken": token[1]}
        answer = browser.post(f"{url}/login", form, timeout=WAIT_SECONDS, allow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (302, "/")


def test_a_team_on_postgresql(tmp_path, postgresql_url):
    import psycopg

    (tmp_path / ".evsys").mkdir()
    with psycopg.connect(f"{postgresql_url}/postgres", autocommit=True) as db:
        db.execute("CREATE DATABASE team")
    environ = {"EVSYS_DATABASE_URL": f"{postgresql_url}/team"}
    with running(tmp_path, "--host", "0.0.0.0", "--port", "0", environ=environ) as (_, said):
        assert "setup" in said
    assert not (tmp_path / ".evsys" / "dashboard-team.sqlite").exists()
    with psycopg.connect(f"{postgresql_url}/team") as db:
        assert db.execute("SELECT id FROM dashboard_project").fetchall() == [("main",)]


def test_a_database_that_is_away_is_a_message_and_not_a_traceback(tmp_path):
    (tmp_path / ".evsys").mkdir()
    environ = {**os.environ, "EVSYS_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none"}
    ended = subprocess.run(
        [*EVSYS, "dashboard", "--host", "0.0.0.0", "--port", "0"], cwd=tmp_path, capture_output=True, text=True,
        timeout=WAIT_SECONDS, env=environ,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "cannot be used" in ended.stderr and "Traceback" not in ended.stderr


def test_the_logger_and_the_folder_give_the_same_rows(tmp_path, sqlite_server, monkeypatch, project):
    """One experiment, sent by `evsys_logger` and read from its folder: the same ids, scores and transcripts."""
    from evsys_dashboard.follow import FollowedSource, Follower, ensure_experiment_loaded

    for name, value in (
        ("API_URL", sqlite_server.url), ("API_KEY", sqlite_server.key), ("PROJECT_ID", "p1"),
        ("LOG_DIR", str(tmp_path / "mirror")),
    ):  # fmt: skip
        monkeypatch.setenv(f"EVSYS_{name}", value)
    record = run_small(tmp_path / "lab", "{ kind: evsys_logger }")
    Follower(project, FollowedSource(folders=(record.parent,))).update()
    row = project.experiments.get()
    ensure_experiment_loaded(row)
    [sent] = sqlite_server.rows(
        "SELECT id, name, status, hypothesis, conclusion, metric, best_arm, best_value, best_low, best_high, n_tasks, "
        "n_seeds, n_arms, n_runs FROM dashboard_experiment"
    )
    assert sent == (
        row.pk, row.name, row.status, row.hypothesis, row.conclusion, row.metric, row.best_arm, row.best_value,
        row.best_low, row.best_high, row.n_tasks, row.n_seeds, row.n_arms, row.n_runs,
    )  # fmt: skip
    [(record_text, figures)] = sqlite_server.rows("SELECT record, figures FROM dashboard_experiment")
    assert json.loads(record_text) == without_none(row.record)  # the wire has no null
    assert json.loads(figures) == row.figures
    runs = sqlite_server.rows("SELECT id, name, arm, seed, status, record, checkpoints FROM dashboard_generation")
    for pk, name, arm, seed, status, run_record, checkpoints in runs:
        run = row.generations.get(pk=pk)
        assert (name, arm, seed, status) == (run.name, run.arm, run.seed, run.status)
        assert json.loads(run_record) == without_none(run.record)
        assert [one["step"] for one in json.loads(checkpoints)] == [one["step"] for one in run.checkpoints]
    assert len(runs) == 4
    columns = "id, eval_id, task_id, reward, status, completion, body"
    predictions = {one[0]: one for one in sqlite_server.rows(f"SELECT {columns} FROM dashboard_prediction")}
    assert len(predictions) == 4 * 2 * 4
    for run in row.generations.all():
        for said in run.predictions.all():
            *plain, body = predictions[said.pk]
            assert plain == [said.pk, said.eval_id, said.task_id, said.reward, said.status, said.completion]
            assert json.loads(body) == said.body
    points = "SELECT count(*) FROM dashboard_point JOIN dashboard_metrickey k ON k.id = key_id WHERE k.name = 'loss'"
    assert sqlite_server.rows(points) == [(16,)]
