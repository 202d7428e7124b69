"""`evsys sync`: a mirror in any server, whatever it was written for, and twice is once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evsys_sdk.cli.main import main
from evsys_sdk.record.dashboard.client import DashboardClient

COUNTS = """select (select count(*) from dashboard_experiment), (select count(*) from dashboard_generation),
    (select count(*) from dashboard_point), (select count(*) from dashboard_eval),
    (select count(*) from dashboard_prediction)"""


def record_session(folder: Path, **how: Any) -> Path:
    """A session with one experiment, written without a server."""
    client = DashboardClient(log_dir=folder, offline=True, environ={}, **how)
    experiment = client.create_experiment("lr", hypothesis="it helps")
    run = client.create_generation(experiment, name="a__s1")
    for step in range(20):
        client.log_step_metric(run, step, {"loss": 1 / (step + 1), "nan": float("nan")})
    evaluation = client.log_eval_run(run, metrics={"pass@1": 0.5}, name="tools")
    client.log_predictions(run, [{"task_id": f"t{n}", "completion": "x"} for n in range(5)], eval_run_id=evaluation)
    client.update_experiment(experiment, status="completed", conclusion="done")
    client.finish()
    assert client.mirror_path is not None
    return client.mirror_path


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, server: Any, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    for name, value in (("URL", server.url), ("KEY", server.key)):
        monkeypatch.setenv(f"EVSYS_API_{name}", value)
    monkeypatch.setenv("EVSYS_PROJECT_ID", "p1")
    monkeypatch.setenv("EVSYS_OFFLINE", "1")  # runs here record on this machine only; `sync` is asked for by name
    monkeypatch.setenv("EVSYS_LOG_DIR", str(tmp_path / "mirror"))
    return monkeypatch


def synced(capsys: Any, *words: str, code: int = 0) -> Any:
    capsys.readouterr()
    assert main(["sync", "--json", *words]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("environment")
def test_sessions_of_offline_runs_and_other_servers_are_sent_and_twice_is_once(server, tmp_path, capsys):
    record_session(tmp_path / "mirror")
    record_session(tmp_path / "mirror", project_id="elsewhere", api_url="http://10.1.1.1")
    first = synced(capsys)
    assert [one["state"] for one in first["sessions"]] == ["sent", "sent"]
    assert [one["records"] for one in first["sessions"]] == [29, 29]
    counts = server.rows(COUNTS)
    assert counts == [(2, 2, 80, 2, 10)]
    assert [one["state"] for one in synced(capsys)["sessions"]] == ["unchanged"] * 2
    assert [one["state"] for one in synced(capsys, "--all")["sessions"]] == ["sent"] * 2
    assert server.rows(COUNTS) == counts
    assert server.rows("select distinct status, conclusion from dashboard_experiment") == [("completed", "done")]


@pytest.mark.usefixtures("environment")
def test_a_session_that_grew_is_sent_from_where_it_stopped(server, tmp_path, capsys):
    path = record_session(tmp_path / "mirror")
    synced(capsys)
    run = server.rows("select id from dashboard_generation")[0][0]
    with open(path, "a") as handle:
        body = {"step": 99, "ts": 5.0, "metrics": {"loss": 0.0}}
        event = {"method": "POST", "path": f"/api/dashboard/api/sdk/generations/{run}/step/", "body": body}
        handle.write(json.dumps({**event, "batch": "steps"}) + "\n")
    assert [(one["state"], one["records"]) for one in synced(capsys)["sessions"]] == [("sent", 1)]
    assert server.rows("select count(*) from dashboard_point") == [(41,)]


@pytest.mark.usefixtures("environment")
def test_what_a_server_will_not_take_is_said_and_the_rest_arrives(server, tmp_path, capsys):
    path = record_session(tmp_path / "mirror")
    lines = path.read_text().splitlines(keepends=True)
    bad = {"method": "POST", "path": "/api/dashboard/api/sdk/experiments/", "body": {"id": "x/y", "name": "n", "ts": 1}}
    path.write_text("".join([*lines[:5], "no json\n", json.dumps(bad) + "\n", *lines[5:]]))
    found = synced(capsys, code=2)
    assert [(one["state"], one["rejected"], one["records"]) for one in found["sessions"]] == [("rejected", 1, 29)]
    assert "is no id" in path.with_suffix(".rejected").read_text()
    assert server.rows(COUNTS) == [(1, 1, 40, 1, 5)]


@pytest.mark.usefixtures("environment")
def test_a_session_that_is_still_written_is_left_to_its_owner(tmp_path, capsys):
    client = DashboardClient(log_dir=tmp_path / "mirror", offline=True, environ={})
    client.create_experiment("lr")
    assert [one["state"] for one in synced(capsys)["sessions"]] == ["busy"]
    client.finish()
    assert [one["state"] for one in synced(capsys)["sessions"]] == ["sent"]


def test_a_wrong_key_or_a_server_that_is_away_ends_it_with_the_reason(environment, tmp_path, capsys):
    record_session(tmp_path / "mirror")
    record_session(tmp_path / "mirror")
    found = synced(capsys, "--to", "http://127.0.0.1:9", code=2)
    assert [one["state"] for one in found["sessions"]] == ["failed"]
    assert "out of reach" in found["sessions"][0]["why"]
    assert found["not_tried"] == 1
    environment.setenv("EVSYS_API_KEY", "evk_wrong")
    found = synced(capsys, code=2)
    assert "not known here" in found["sessions"][0]["why"]
    environment.setenv("EVSYS_API_KEY", "")
    assert main(["sync"]) == 1
    assert "EVSYS_API_KEY" in capsys.readouterr().err


def test_without_a_mirror_it_says_so(environment, tmp_path, capsys):
    assert main(["sync", "--mirror", str(tmp_path / "none")]) == 1
    assert "no such mirror folder" in capsys.readouterr().err
