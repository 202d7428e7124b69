"""SQL over one project: what is allowed works, and nothing else can be read, written or held up."""

from __future__ import annotations

import time
from typing import Any

import pytest

ATTACKS = [
    "select * from dashboard_apikey",
    "select * from main.dashboard_apikey",
    "select * from dashboard_experiment",
    "select count(*) from dashboard_experiment",
    "select 1 from django_session",
    "select * from sqlite_master",
    "select * from sqlite_temp_master",
    "select sql from temp.sqlite_schema",
    "select name from experiments union select sha256 from dashboard_apikey",
    "select (select sha256 from dashboard_apikey limit 1) from experiments",
    "select name from experiments where exists (select 1 from auth_user)",
    "with experiments as (select sha256 as name from dashboard_apikey) select * from experiments",
    "with runs as (select * from dashboard_experiment) select * from runs",
    "select * from (select sha256 from dashboard_apikey) as experiments",
    'select * from (select * from dashboard_experiment) as "rollouts"',
    "/* select from experiments */ select * from dashboard_project -- x",
    "select * from pragma_table_list",
    "select * from pragma_database_list",
    "select * from dbstat",
    "select load_extension('x')",
    "select readfile('/etc/passwd')",
    "select writefile('/tmp/x', 'y')",
    "select fts3_tokenizer('simple')",
    "select randomblob(1000000000)",
    "select zeroblob(1000000000)",
    "select printf('%.*c', 2000000000, 'x')",
    "select format('%.*c', 2000000000, 'x')",
    "attach database '/etc/passwd' as x",
    "attach ':memory:' as x",
    "pragma table_info(dashboard_apikey)",
    "pragma query_only = off",
    "pragma journal_mode = delete",
    "pragma writable_schema = 1",
    "insert into experiments (id) values ('x')",
    "insert into dashboard_project values ('x','x','',1)",
    "update dashboard_experiment set name = 'x'",
    "delete from dashboard_experiment",
    "drop table dashboard_experiment",
    "drop view experiments",
    "create temp view x as select * from dashboard_apikey",
    "create temp table x as select 1",
    "create temp trigger t after insert on dashboard_project begin select 1; end",
    "vacuum into '/tmp/stolen.sqlite'",
    "vacuum",
    "reindex",
    "analyze",
    "begin",
    "savepoint x",
    "detach temp",
    "select 1; select sha256 from dashboard_apikey",
    "select 1; drop table dashboard_experiment",
    "with recursive c(n) as (select 1 union all select n+1 from c) select count(*) from c",
    "with recursive c(n) as (select 1 union select n+1 from c) select n from c order by n desc",
    "",
    "   -- only a comment",
    "not sql at all",
    "select 'a\x00b'",
    "select " + "(" * 5000 + "1" + ")" * 5000,
    "select '" + "x" * 100_000 + "'",
]


def repeated(letter: str, power: int) -> str:
    """SQL for 10 ** `power` times the letter."""
    text = f"'{letter * 10}'"
    for _ in range(power - 1):
        text = f"replace({text}, '{letter}', '{letter * 10}')"
    return text


def run(project: Any, sql: str, **how: Any) -> Any:
    from evsys_dashboard.api.query import run_query

    return run_query(project.pk, sql, **{"hide_test": False, **how})


@pytest.fixture
def filled(project: Any, fill: Any) -> Any:
    """A project with one experiment; another project has one too, with a secret in each text."""
    from evsys_dashboard.models import Project

    other = Project.objects.create(id=f"{project.pk}-other", name="other", created=1.0)
    fill(project)
    fill(other, name="SECRET", hypothesis="SECRET", conclusion="SECRET")
    yield project
    other.delete()


def test_the_views_hold_the_project(filled):
    assert run(filled, "select name, hypothesis, status from experiments").rows == [["lr 1", "rate 1 helps", "running"]]
    assert run(filled, "select arm, seed, last_step from runs").rows == [["a", 1, 1]]
    assert run(filled, "select name, split, n_rollouts from evals").rows == [["tools", "test", 2]]
    assert run(filled, "select name, n, last, last_text from metrics order by name").rows == [
        ["bad", 1, None, "NaN"],
        ["loss", 1, 0.5, "0.5"],
    ]
    found = run(filled, "select benchmark, task_id, reward, completion from rollouts order by task_id")
    assert found.columns == ["benchmark", "task_id", "reward", "completion"]
    assert found.rows == [["tools", "t0", 0.0, "answer 0"], ["tools", "t1", 1.0, "answer 1"]]


def test_joins_groups_windows_and_ctes_work(filled):
    joined = (
        "select e.name, avg(r.reward), count(*) from rollouts r join experiments e on e.id = r.experiment_id group by 1"
    )
    assert run(filled, joined).rows == [["lr 1", 0.5, 2]]
    ranked = (
        "with best as (select task_id, rank() over (order by reward desc) as place from rollouts) select * from best"
    )
    assert run(filled, f"{ranked} where place = 1").rows == [["t1", 1]]


@pytest.mark.parametrize("sql", ATTACKS, ids=lambda sql: sql[:60].replace("\x00", ""))
def test_everything_else_is_refused(filled, sql):
    from evsys_dashboard.api.query import QueryRefused

    started = time.monotonic()
    with pytest.raises(QueryRefused) as caught:
        run(filled, sql)
    assert "SECRET" not in str(caught.value)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    "condition",
    [
        "case when name = 'SECRET' then abs(-9223372036854775807 - 1) else 1 end = 1",
        "case when hypothesis = 'SECRET' then json('{') else 1 end = 1",
        "json_extract(case when conclusion = 'SECRET' then '{' else '{}' end, '$.x') is null",
    ],
)
def test_a_condition_is_never_tried_on_rows_of_another_project(filled, condition):
    """An error, or none, would tell what the other project has. With its id the row is found at once."""
    assert run(filled, f"select name from experiments where {condition}").rows == [["lr 1"]]
    assert run(filled, f"select name from experiments order by {condition}").rows == [["lr 1"]]
    other = f"{filled.pk}-other-e1"
    assert run(filled, f"select name from experiments where id = '{other}' and {condition}").rows == []
    assert run(filled, f"select name from experiments where {condition} and id = '{other}'").rows == []


@pytest.mark.parametrize("view", ["evals", "rollouts"])
def test_a_condition_on_a_joined_table_is_not_tried_before_the_project_is(filled, view):
    """The id of a run finds it at once: SQLite would begin there, with a row of the other project."""
    from evsys_dashboard.models import GenerationRow

    other = f"{filled.pk}-other-e1"
    GenerationRow.objects.filter(experiment_id=other).update(arm="SECRET")
    overflow = "case when arm = 'SECRET' then abs(-9223372036854775807 - 1) else 1 end = 1"
    theirs = f"run_id = '{filled.pk}-other-r1'"
    assert run(filled, f"select id from {view} where {theirs} and {overflow}").rows == []


def test_a_statement_that_takes_too_long_is_ended(filled, monkeypatch):
    from evsys_dashboard.api import query

    monkeypatch.setattr(query, "MAX_SECONDS", 0.2)
    tables = ", ".join(f"json_each('[{','.join('1' * 100)}]') as t{n}" for n in range(8))
    with pytest.raises(query.QueryRefused, match="took longer than"):
        run(filled, f"select count(*) from {tables}")


def test_rows_and_bytes_are_limited(filled, monkeypatch):
    from evsys_dashboard.api import query

    many = f"json_each('[{','.join('1' * 100)}]')"
    monkeypatch.setattr(query, "MAX_ROWS", 50)
    found = run(filled, f"select 1 from {many}")
    assert (len(found.rows), found.truncated) == (50, True)
    monkeypatch.setattr(query, "MAX_BYTES", 1000)
    found = run(filled, f"select '{'x' * 400}' from {many}")
    assert (len(found.rows), found.truncated) == (2, True)
    with pytest.raises(query.QueryRefused, match=r"replace\(\) would make more than 4 MB"):
        run(filled, f"select replace({repeated('x', 6)}, 'x', 'yyyyyyyyy')")
    with pytest.raises(query.QueryRefused, match="too big"):
        run(filled, f"with x as (select {repeated('x', 6)} v) select v || v || v || v || v from x")


@pytest.mark.parametrize("value", ["v", "cast(v as blob)"])
def test_one_row_cannot_fill_the_memory(filled, value):
    """A row is refused while it is made: 90 times 4 MB as text, and no 2,000 columns of anything."""
    from evsys_dashboard.api.query import QueryRefused

    long = f"with y as (select {repeated('x', 6)} v), x as (select v || v || v || v as v from y)"
    with pytest.raises(QueryRefused, match="one row has more than 8 MB"):
        run(filled, f"{long} select {', '.join([value] * 20)} from x")
    with pytest.raises(QueryRefused, match="too many columns"):
        run(filled, f"{long} select {', '.join([value] * 300)} from x")
    assert (
        len(
            run(
                filled, "select e.*, r.*, v.*, m.*, o.* from experiments e, runs r, evals v, metrics m, rollouts o"
            ).columns
        )
        > 80
    )


def test_an_agents_key_sees_no_answers_to_test_tasks(filled):
    from django.test import Client

    from evsys_dashboard.auth import make_key

    def ask(scope: str) -> Any:
        headers = {"Authorization": f"Bearer {make_key(filled, scope, scope)[1]}"}
        body = {"sql": "select reward, completion from rollouts order by task_id"}
        place = f"/api/v1/projects/{filled.pk}/query"
        return Client().post(place, body, content_type="application/json", headers=headers).json()["rows"]

    assert ask("read") == [[0.0, "answer 0"], [1.0, "answer 1"]]
    assert ask("agent") == [[0.0, None], [1.0, None]]


def test_the_route_refuses_in_words(filled, key):
    from django.test import Client

    place, headers = f"/api/v1/projects/{filled.pk}/query", {"Authorization": f"Bearer {key}"}

    def ask(body: object) -> Any:
        return Client().post(place, body, content_type="application/json", headers=headers)

    assert ask({"sql": "select nme from experiments"}).status_code == 422
    assert "no such column: nme" in ask({"sql": "select nme from experiments"}).json()["error"]
    assert "there are: experiments" in ask({"sql": "select * from experments"}).json()["error"]
    assert ask({"sql": 5}).status_code == 422
    assert ask([]).status_code == 422
    assert Client().get(place, headers=headers).status_code == 405
    assert Client().post(place, {"sql": "select 1"}, content_type="application/json").status_code == 401


def test_a_project_id_with_a_quote_is_only_an_id(project, fill):
    from evsys_dashboard.api.query import run_query

    fill(project)
    assert run_query("x' or '1'='1", "select * from experiments", hide_test=False).rows == []


def test_functions_of_two_long_texts_do_not_compare_each_place_with_each(filled):
    """SQLite's own take minutes for these, in one instruction, which nothing can stop."""
    from evsys_dashboard.api.query import QueryRefused

    long = f"with y as (select {repeated('a', 6)} v), x as (select v || v || v as text, v || 'b' as part from y)"
    assert run(filled, f"{long} select instr(text, part), length(replace(text, part, '')) from x").rows == [
        [0, 3_000_000]
    ]
    for cut in ("trim", "ltrim", "rtrim"):
        with pytest.raises(QueryRefused, match="more than 100 characters to cut"):
            run(filled, f"{long} select length({cut}(text, part)) from x")


@pytest.mark.parametrize(
    "call",
    [
        "replace('a-b-c', '-', '+')", "replace('abc', '', 'x')", "replace(null, 'a', 'b')", "replace(12, 1, 3)",
        "replace('é€é', 'é', '')", "instr('abcabc', 'c')", "instr('abc', 'x')", "instr('abc', '')", "instr(null, 'a')",
        "instr(1234, 23)", "trim('  a b  ')", "ltrim('  a ')", "rtrim(' a  ')", "trim('xxaxbxx', 'x')",
        "ltrim('xyxa', 'xy')", "rtrim('axyx', 'yx')", "trim('abc', '')", "trim(null)", "trim('a', null)",
        "typeof(trim(5))",
    ],
)  # fmt: skip
def test_functions_of_text_answer_as_those_of_sqlite(filled, call):
    import sqlite3

    assert run(filled, f"select {call}").rows == [
        list(sqlite3.connect(":memory:").execute(f"select {call}").fetchone())
    ]
