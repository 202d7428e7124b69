"""SQL through a real server, on SQLite and on PostgreSQL: the same answers, and the same nothing for attacks."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import requests

from evsys_sdk.cli.main import main

ATTACKS = [
    "select * from dashboard_apikey",
    "select * from public.dashboard_apikey",
    "select * from evsys_query.roles",
    "with experiments as (select sha256 as name from dashboard_apikey) select * from experiments",
    "select name from experiments union select sha256 from dashboard_apikey",
    "select 1; select 2",
    "select 1; drop table dashboard_experiment",
    "commit; drop table dashboard_experiment",
    "select pg_sleep(600)",
    "select pg_read_file('/etc/passwd')",
    "select pg_ls_dir('/')",
    "select lo_import('/etc/passwd')",
    "copy (select 1) to '/tmp/evsys_stolen'",
    "copy (select 1) to program 'id'",
    "select * from dblink('dbname=postgres', 'select 1') as t(n int)",
    "set role postgres",
    "reset role",
    "set session authorization postgres",
    "select set_config('role', 'postgres', false)",
    "select set_config('session_authorization', 'postgres', false)",
    "select set_config('role', 'none', true), query_to_xml('select * from public.dashboard_apikey', true, true, '')",
    "select query_to_xml('select * from public.dashboard_apikey', true, true, '')",
    "select table_to_xml('public.dashboard_apikey', true, true, '')",
    "create temp table x as select 1",
    "create function f() returns int language sql as 'select 1'",
    "do $$ begin perform 1; end $$",
    "select 1 into newtable",
    "insert into evsys_query.roles values ('x', 'p2', false)",
    "update evsys_query.roles set project_id = 'p2'",
    "with x as (delete from public.dashboard_experiment returning *) select * from x",
    "select * from pg_authid",
    "select * from pg_shadow",
    "select nextval('public.dashboard_apikey_id_seq')",
    "explain analyze select * from public.dashboard_apikey",
    "lock table public.dashboard_experiment",
    "grant all on schema public to public",
    "with recursive c(n) as (select 1 union all select n+1 from c) select count(*) from c",
    "select count(*) from generate_series(1, 1000000000) a, generate_series(1, 1000000000) b",
]


def ask(server: Any, sql: str, project: str = "p1", key: str | None = None) -> requests.Response:
    headers = {"Authorization": f"Bearer {key or server.keys[project]}"}
    place = f"{server.url}/api/v1/projects/{project}/query"
    return requests.post(place, json={"sql": sql}, headers=headers, timeout=90)


@pytest.fixture
def filled(server: Any) -> Any:
    """Two projects with an experiment each; that of p2 holds a secret in every text."""
    for project, word in (("p1", "mine"), ("p2", "SECRET")):
        headers = {"Authorization": f"Bearer {server.keys[project]}", "X-Evsys-Project": project}
        about = {"id": f"e-{project}", "name": word, "hypothesis": word, "conclusion": "(", "tags": ["a"], "ts": 1.0}
        assert server.post("experiments/", about, headers=headers).status_code == 200
        run = {"id": f"g-{project}", "experiment_id": f"e-{project}", "name": "a__s1", "ts": 1.0}
        assert server.post("generations/", run, headers=headers).status_code == 200
        steps = {"steps": [{"step": 3, "ts": 1.0, "metrics": {"loss": 0.5, "x": "NaN"}}]}
        assert server.post(f"generations/g-{project}/step/", steps, headers=headers).status_code == 200
        found = {"id": f"v-{project}", "name": "tools", "split": "test", "metrics": {"pass@1": 1.0}, "ts": 1.0}
        assert server.post(f"generations/g-{project}/eval/", found, headers=headers).status_code == 200
        rollout = {"id": f"p-{project}", "task_id": "t", "reward": 1.0, "completion": word, "ts": 1.0}
        rollout["eval_run_id"] = f"v-{project}"
        answer = server.post(f"generations/g-{project}/predictions/", {"predictions": [rollout]}, headers=headers)
        assert answer.status_code == 200
    return server


def test_each_project_sees_itself_and_attacks_see_nothing(filled):
    """One server for all of it: starting one takes seconds."""
    for project, word in (("p1", "mine"), ("p2", "SECRET")):
        assert ask(filled, "select name, hypothesis from experiments", project).json()["rows"] == [[word, word]]
    assert ask(filled, "select arm, last_step from runs").json()["rows"] == [["a__s1", 3]]
    assert ask(filled, "select name, last, last_text from metrics order by name").json()["rows"] == [
        ["loss", 0.5, "0.5"],
        ["x", None, "NaN"],
    ]
    joined = "select r.completion, e.name from rollouts r join evals e on e.id = r.eval_id"
    assert ask(filled, joined).json()["rows"] == [["mine", "tools"]]
    before = filled.rows("select count(*) from dashboard_experiment")
    for sql in ATTACKS:
        answer = ask(filled, sql)
        assert answer.status_code == 422, (sql, answer.text)
        assert "SECRET" not in answer.text
    assert filled.rows("select count(*) from dashboard_experiment") == before
    for sql in ("select database_to_xml(true, true, '')", "select * from pg_stat_activity", "select * from pg_views"):
        assert "SECRET" not in (text := ask(filled, sql).text)
        assert "'p2'" not in text
    # No error may tell what the other project has.
    for condition in ("1 / (case when name = 'SECRET' then 0 else 1 end) = 1", "cast(length(name) as int) > 0"):
        assert ask(filled, f"select name from experiments where {condition}").json()["rows"] == [["mine"]]
    # `(` is no regular expression: tried on the other project's row, which its id finds at once, this is an error.
    if not filled.database_url.startswith("sqlite"):
        assert ask(filled, "select name from experiments where id = 'e-p2' and 'x' ~ conclusion").json()["rows"] == []
        assert ask(filled, "select name from experiments where 'x' ~ conclusion and id = 'e-p2'").json()["rows"] == []
    assert not Path("/tmp/evsys_stolen").exists()


def test_an_agents_key_sees_no_answers_to_test_tasks(filled):
    text = "evk_agent"
    columns = "(project_id, name, prefix, sha256, scope, created)"
    values = f"('p1', 'agent', 'evk_agent', '{hashlib.sha256(text.encode()).hexdigest()}', 'agent', 1.0)"
    statement = f"insert into dashboard_apikey {columns} values {values}"
    filled.write(statement)
    sql = "select reward, completion from rollouts"
    assert ask(filled, sql).json()["rows"] == [[1.0, "mine"]]
    assert ask(filled, sql, key=text).json()["rows"] == [[1.0, None]]
    assert ask(filled, sql).json()["rows"] == [[1.0, "mine"]]


def test_the_command_asks_the_server(filled, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVSYS_API_URL", filled.url)
    monkeypatch.setenv("EVSYS_API_KEY", filled.key)
    monkeypatch.setenv("EVSYS_PROJECT_ID", "p1")
    monkeypatch.delenv("EVSYS_OFFLINE", raising=False)
    assert main(["query", "select name, cost_usd from experiments", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["columns"], said["rows"], said["truncated"]) == (["name", "cost_usd"], [["mine", None]], False)
    assert main(["query", "select name from experiments"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "(1 row)"
    assert main(["query", "select nme from experiments"]) == 1
    assert "nme" in capsys.readouterr().err
    assert not (tmp_path / ".evsys").exists()


def test_a_statement_cannot_give_itself_more_time(filled):
    """PostgreSQL counts the time of each FETCH by itself, and a row may set the limit of the next one."""
    if filled.database_url.startswith("sqlite"):
        pytest.skip("SQLite has one clock for the whole statement")
    for sql in (
        "select pg_sleep(0.008) from generate_series(1, 10000)",
        "select set_config('statement_timeout', '0', false), case when n > 600 then pg_sleep(60) end "
        "from generate_series(1, 1000) n",
    ):
        answer = ask(filled, sql)
        assert (answer.status_code, "took longer than 5 s" in answer.text) == (422, True), (sql, answer.text)
        assert answer.elapsed.total_seconds() < 40  # without the limit: 80, and 24,000
