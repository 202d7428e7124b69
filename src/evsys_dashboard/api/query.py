"""Read-only SQL over one project: `POST /api/v1/projects/<project>/query`, and `evsys query`.

In: one SELECT. Out: columns and rows, within limits on time, rows and bytes. The statement sees five views (`VIEWS`)
that hold only the project; tables, other projects, sessions, keys and files are out of its reach, by the database's own
checks and not by reading the text:

- SQLite: a read-only connection for this statement alone. Its authorizer allows base tables only from inside views
  with a name that is drawn anew each time. Not by the views' public names: SQLite reports the name of any subquery as
  the origin of a read, so `WITH experiments AS (SELECT * FROM dashboard_apikey)` would pass for the view.
- PostgreSQL: a login role per project that owns nothing and may read the views of one schema. Not `SET ROLE`: a
  statement can undo that with `set_config('role', 'none')` and run text with `query_to_xml`. The views find the project
  by `session_user`, which a statement cannot change.

Conditions of the statement must not be tried on rows of other projects, or an error would tell about these: in SQLite
`LIMIT -1` keeps them out of the views, in PostgreSQL `security_barrier`.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.urls import path

from evsys_dashboard import auth
from evsys_dashboard.api.resources import QueryAnswer, answer
from evsys_dashboard.auth import Refusal
from evsys_dashboard.request_body import finite, parse_body

MAX_SECONDS = 5.0
MAX_ROWS = 10_000
MAX_BYTES = 8 * 1024 * 1024
MAX_VALUE_BYTES = 4 * 1024 * 1024
MAX_COLUMNS = 100
"""All columns of all views together are fewer; 2,000 copies of one long value would fill the memory in a single row."""
MAX_SQL = 50_000
ROW_TOO_LARGE = f"one row has more than {MAX_BYTES // 1024**2} MB; ask for fewer columns, or cut them with substr()"
STEPS_BETWEEN_LOOKS = 10_000
"""Instructions of SQLite's machine between two looks at the clock: about a millisecond."""

# {project} is the condition on the project; {test} hides texts of test rollouts from an agent's key.
VIEWS = {
    "experiments": """SELECT e.id, e.name, e.status, e.hypothesis, e.verdict, e.conclusion, e.metric, e.best_arm,
        e.best_value, e.best_low, e.best_high, e.training_mark, e.n_tasks, e.n_seeds, e.n_arms, e.n_runs,
        e.n_errors, e.cost_usd, e.seconds, e.model, e.backend, e.algorithm, e.tags, e.config, e.metadata,
        e.parent_experiment_id, e.created, e.ended, e.updated FROM dashboard_experiment e WHERE {project}""",
    "runs": """SELECT e.id, e.experiment_id, e.name, e.arm, e.seed, e.status, e.recipe_kind, e.last_step, e.error,
        e.conclusion, e.run_config, e.metrics, e.created, e.ended, e.updated
        FROM dashboard_generation e WHERE {project}""",
    "evals": """SELECT e.id, g.experiment_id, e.generation_id AS run_id, g.arm, g.seed, e.name, e.split, e.stage,
        e.step, e.metrics, e.scores, e.breakdown, e.error, e.seconds, e.n_rollouts, e.created
        FROM dashboard_eval e JOIN dashboard_generation g ON g.id = e.generation_id WHERE {project}""",
    "metrics": """SELECT e.experiment_id, e.id AS run_id, e.arm, e.seed, k.name, k.n, k.last_step,
        CASE k.last_kind WHEN 1 THEN 'NaN' WHEN 2 THEN 'Infinity' WHEN 3 THEN '-Infinity'
        ELSE CAST(k.last AS text) END AS last_text, k.last, k.low, k.high
        FROM dashboard_generation e JOIN dashboard_metrickey k ON k.generation_id = e.id WHERE {project}""",
    # The answer of a test task is withheld where `{test}` is 1, and where the evaluation that would name the split has
    # not arrived.
    "rollouts": """SELECT e.id, g.experiment_id, e.generation_id AS run_id, g.arm, g.seed, e.eval_id,
        v.name AS benchmark, v.split, v.step, e.task_id, e.reward, e.status,
        CASE WHEN {test} AND COALESCE(v.split, 'test') = 'test' THEN NULL ELSE e.completion END AS completion, e.created
        FROM dashboard_prediction e JOIN dashboard_generation g ON g.id = e.generation_id
        LEFT JOIN dashboard_eval v ON v.id = e.eval_id AND v.project_id = e.project_id WHERE {project}""",
}
"""View -> its definition. `tags`, `config`, `metrics`, `scores` and `breakdown` are JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryResult:
    columns: list[str]
    rows: list[list[Any]]
    truncated: bool
    seconds: float


class QueryRefused(Exception):
    """The statement is not allowed, wrong, or took too long; the text says which."""


def check_sql(sql: str) -> None:
    if not sql.strip():
        raise QueryRefused(f"the statement is empty; e.g. select name, verdict from experiments ({', '.join(VIEWS)})")
    if len(sql) > MAX_SQL:
        raise QueryRefused(f"the statement has {len(sql):,} characters; at most {MAX_SQL:,}")
    if "\x00" in sql or re.search("[\ud800-\udfff]", sql):
        raise QueryRefused("the statement holds a character that no database reads (NUL, or half a surrogate pair)")


def collect(cursor: Iterable[Any], columns: list[str], started: float) -> QueryResult:
    """Rows up to the limits."""
    rows: list[list[Any]] = []
    size = 0
    for row in cursor:
        size += sum(len(value) if isinstance(value, str | bytes) else 16 for value in row)
        if len(rows) >= MAX_ROWS or (rows and size > MAX_BYTES):
            return QueryResult(columns=columns, rows=rows, truncated=True, seconds=time.monotonic() - started)
        if size > MAX_BYTES:
            raise QueryRefused(ROW_TOO_LARGE)
        rows.append([_plain(value) for value in row])
    return QueryResult(columns=columns, rows=rows, truncated=False, seconds=time.monotonic() - started)


def _plain(value: Any) -> Any:
    """A value as JSON takes it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | dict):
        return finite(value)
    return str(value)


# SQLite.

FUNCTION_NAMES = """abs acos asin atan atan2 avg ceil ceiling char coalesce concat concat_ws cos count cume_dist date
    datetime degrees dense_rank exp first_value floor glob group_concat hex ifnull iif instr json json_array
    json_array_length json_extract json_group_array json_group_object json_object json_quote json_type json_valid
    julianday lag last_value lead length like ln log log10 log2 lower ltrim max min mod nth_value ntile nullif
    octet_length percent_rank pi pow power quote radians random rank replace round row_number rtrim sign sin sqrt
    strftime string_agg substr substring sum tan time timediff total trim trunc typeof unicode unixepoch upper -> ->>"""
FUNCTIONS = frozenset(FUNCTION_NAMES.split())
"""What a statement may call: of SQLite's those that read nothing but their arguments, without `printf` and `format`,
which write two billion characters of a `%.*c` before anything can stop them."""
TABLE_FUNCTIONS = frozenset(["json_each", "json_tree"])
MAX_TRIMMED = 100
"""Different characters that one trim() may cut."""


def _as_text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _replace(text: Any, old: Any, new: Any) -> str | None:
    if text is None or old is None or new is None:
        return None
    text, old, new = _as_text(text), _as_text(old), _as_text(new)
    if not old:
        return text
    if len(text) + text.count(old) * (len(new) - len(old)) > MAX_VALUE_BYTES:
        raise ValueError
    return text.replace(old, new)


def _find(text: Any, part: Any) -> int | None:
    return None if text is None or part is None else _as_text(text).find(_as_text(part)) + 1


def _strip(cut: Callable[[str, str], str]) -> Callable[..., str | None]:
    def trim(text: Any, characters: Any = " ") -> str | None:
        if text is None or characters is None:
            return None
        found = _as_text(characters)
        if len(found) > MAX_TRIMMED:
            raise ValueError
        return cut(_as_text(text), found)

    return trim


OWN_FUNCTIONS: tuple[tuple[str, int, Callable[..., str | int | None]], ...] = (
    ("replace", 3, _replace),
    ("instr", 2, _find),
    *((name, n, _strip(cut)) for name, cut in (("trim", str.strip), ("ltrim", str.lstrip), ("rtrim", str.rstrip))
      for n in (1, 2)),
)  # fmt: skip
"""Name, number of arguments, and our own in place of SQLite's. Those compare each place with each: two texts of 4 MB
take minutes in a single instruction, and the clock is looked at only between instructions."""


def query_sqlite(path: str, project_id: str, sql: str, *, hide_test: bool = False) -> QueryResult:
    """Run one statement on a database file; QueryRefused where it is not allowed, wrong, or takes too long."""
    check_sql(sql)
    started = time.monotonic()
    uri = f"file:{path.replace('%', '%25').replace('?', '%3f').replace('#', '%23')}?mode=ro"
    database = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=MAX_SECONDS, cached_statements=0)
    try:
        token = secrets.token_hex(16)
        quoted = project_id.replace("'", "''")
        for name, text in VIEWS.items():
            body = text.format(project=f"e.project_id = '{quoted}'", test="1" if hide_test else "0")
            database.execute(f'CREATE TEMP VIEW "{name}_{token}" AS {body} LIMIT -1')
            database.execute(f'CREATE TEMP VIEW "{name}" AS SELECT * FROM "{name}_{token}" LIMIT -1')
        # Made now: SQLite makes a table function at its first use, by a CREATE that the authorizer would refuse.
        for name in TABLE_FUNCTIONS:
            database.execute(f"SELECT 1 FROM {name}('[]')").fetchall()
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        database.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, MAX_COLUMNS)
        database.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        # A pattern is tried at each place of a text, also between two looks at the clock.
        database.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 200)
        for name, n_arguments, function in OWN_FUNCTIONS:
            database.create_function(name, n_arguments, function, deterministic=True)
        database.setlimit(sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 200)
        database.setlimit(sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 100)
        database.setlimit(sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0)
        inner = {f"{name}_{token}" for name in VIEWS}

        def authorize(action: int, first: str | None, second: str | None, _: str | None, origin: str | None) -> int:
            if action == sqlite3.SQLITE_SELECT:
                return sqlite3.SQLITE_OK
            if action == sqlite3.SQLITE_FUNCTION and second in FUNCTIONS:
                return sqlite3.SQLITE_OK
            if action == sqlite3.SQLITE_READ and (
                origin in inner or first in VIEWS or first in inner or first in TABLE_FUNCTIONS
            ):
                return sqlite3.SQLITE_OK
            return sqlite3.SQLITE_DENY

        row_bytes = 0

        def read_text(data: bytes) -> str:
            # Called for each text of a row while the row is made: afterwards would be too late to refuse it.
            nonlocal row_bytes
            row_bytes += len(data)
            if row_bytes > MAX_BYTES:
                raise QueryRefused(ROW_TOO_LARGE)
            return data.decode()

        def read_rows(cursor: sqlite3.Cursor) -> Iterator[Any]:
            nonlocal row_bytes
            while (row := cursor.fetchone()) is not None:
                row_bytes = 0
                yield row

        database.text_factory = read_text
        late = False

        def look_at_clock() -> int:
            nonlocal late
            late = time.monotonic() - started > MAX_SECONDS
            return int(late)

        database.set_authorizer(authorize)
        database.set_progress_handler(look_at_clock, STEPS_BETWEEN_LOOKS)
        try:
            cursor = database.execute(sql)
            if cursor.description is None:
                raise QueryRefused("only a SELECT is possible here")
            return collect(read_rows(cursor), [column[0] for column in cursor.description], started)
        except sqlite3.Error as exc:
            if "user-defined function raised" in str(exc):
                raise QueryRefused(
                    f"a replace() would make more than {MAX_VALUE_BYTES // 1024**2} MB, or a trim() has more than "
                    f"{MAX_TRIMMED} characters to cut; ask for less"
                ) from None
            if late:
                raise QueryRefused(f"the statement took longer than {MAX_SECONDS:g} s; ask for less") from None
            raise QueryRefused(_reason(str(exc).replace(f"_{token}", ""))) from None
        except (OverflowError, UnicodeError, MemoryError) as exc:
            raise QueryRefused(f"{type(exc).__name__}: the result holds what cannot be read") from None
    finally:
        database.close()


def _reason(text: str) -> str:
    if "not authorized" in text or "prohibited" in text or "authorizer" in text:
        return f"not allowed ({text}): only SELECT over {', '.join(VIEWS)}, without recursion"
    if "no such table" in text or text.startswith("relation "):
        return f"{text}; there are: {', '.join(VIEWS)}"
    return text


# PostgreSQL.

SCHEMA = "evsys_query"
ROWS_PER_FETCH = 500
SETUP_LOCK = 7_305_114_218
"""Of `pg_advisory_xact_lock`: several processes of a server may set up at once."""


def role_of(project_id: str, *, hide_test: bool) -> tuple[str, str]:
    """Name and password of a project's role; both from the server's secret, so that nothing of them is stored."""

    def derived(what: str) -> str:
        text = f"{what}\0{project_id}\0{hide_test}"
        return hmac.new(settings.SECRET_KEY.encode(), text.encode(), hashlib.sha256).hexdigest()

    return f"evsys_query_{derived('role')[:24]}", derived("password")


def set_up_postgresql(project_id: str, *, hide_test: bool) -> None:
    """Make the schema, its views and the project's role, or bring them up to date."""
    from django.db import Error, transaction
    from psycopg import sql as text

    role, password = role_of(project_id, hide_test=hide_test)
    own = f"(SELECT r.project_id FROM {SCHEMA}.roles r WHERE r.name = session_user)"
    hidden = f"COALESCE((SELECT r.hide_test FROM {SCHEMA}.roles r WHERE r.name = session_user), true)"
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [SETUP_LOCK])
            cursor.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
            cursor.execute(
                f"CREATE TABLE IF NOT EXISTS {SCHEMA}.roles "
                "(name text PRIMARY KEY, project_id text NOT NULL, hide_test boolean NOT NULL)"
            )
            for name, body in VIEWS.items():
                made = body.format(project=f"e.project_id = {own}", test=hidden)
                # Made anew: the columns of a table may have changed since.
                cursor.execute(f"DROP VIEW IF EXISTS {SCHEMA}.{name}")
                cursor.execute(f"CREATE VIEW {SCHEMA}.{name} WITH (security_barrier) AS {made}")
            cursor.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [role])
            # One that is there is given its password alone: naming other rights takes a superuser, also to deny them.
            made = "ALTER ROLE {}" if cursor.fetchone() else (
                "CREATE ROLE {} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOINHERIT NOREPLICATION CONNECTION LIMIT 8"
            )  # fmt: skip
            statement = text.SQL(f"{made} PASSWORD {{}}").format(text.Identifier(role), text.Literal(password))
            cursor.execute(statement.as_string(cursor.connection))
            cursor.execute(
                f"INSERT INTO {SCHEMA}.roles VALUES (%s, %s, %s) ON CONFLICT (name) DO NOTHING",
                [role, project_id, hide_test],
            )
            cursor.execute("SELECT rolname FROM pg_roles JOIN evsys_query.roles ON rolname = name")
            for (name,) in cursor.fetchall():
                cursor.execute(f'GRANT USAGE ON SCHEMA {SCHEMA} TO "{name}"')
                for view in VIEWS:
                    cursor.execute(f'GRANT SELECT ON {SCHEMA}.{view} TO "{name}"')
            cursor.execute("SELECT current_database()")
            cursor.execute(f'GRANT CONNECT ON DATABASE "{cursor.fetchone()[0]}" TO "{role}"')
    except Error as exc:
        user = connection.settings_dict["USER"] or "<user>"
        raise QueryRefused(
            f"the server's database user may not make the role that SQL is read with ({str(exc).splitlines()[0]}); "
            f'ask the administrator of PostgreSQL for: ALTER ROLE "{user}" CREATEROLE; '
            f'GRANT CREATE ON DATABASE "{connection.settings_dict["NAME"]}" TO "{user}";'
        ) from None


def drop_views(*, plan: Sequence[object] = (), **_: Any) -> None:
    """Before a migration: PostgreSQL alters no column that a view reads. The next statement makes the views anew."""
    if plan and connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            for name in VIEWS:
                cursor.execute("SELECT to_regclass(%s)", [f"{SCHEMA}.{name}"])
                if cursor.fetchone()[0]:
                    cursor.execute(f"DROP VIEW {SCHEMA}.{name}")


_ready: set[str] = set()
"""Roles that this process has set up."""


def query_postgresql(project_id: str, sql: str, *, hide_test: bool = False) -> QueryResult:
    """Run one statement as the project's role; QueryRefused where it is not allowed, wrong, or takes too long."""
    import psycopg

    check_sql(sql)
    role, password = role_of(project_id, hide_test=hide_test)
    if role not in _ready:
        set_up_postgresql(project_id, hide_test=hide_test)
        _ready.add(role)
    given = connection.get_connection_params()
    address = {key: given[key] for key in ("host", "port", "dbname") if given.get(key)}
    started = time.monotonic()
    try:
        options = f"-c statement_timeout={int(MAX_SECONDS * 1000)} -c search_path={SCHEMA} -c work_mem=16MB"
        options += " -c default_transaction_read_only=on"
        opened = psycopg.connect(
            **address, user=role, password=password, options=options, connect_timeout=int(MAX_SECONDS), autocommit=False
        )
        # Closed without a commit: `lo_create` and `pg_notify` are allowed in a read-only transaction, and undone so.
        with closing(opened) as database:
            database.read_only = True
            # A cursor on the server: rows beyond the limits are never sent. DECLARE takes one SELECT and nothing else.
            with database.cursor(name="evsys") as cursor:
                cursor.execute(sql.encode())
                columns = [column.name for column in cursor.description or []]
                return collect(_fetch_in_time(database, cursor, started), columns, started)
    except psycopg.errors.QueryCanceled:
        raise QueryRefused(f"the statement took longer than {MAX_SECONDS:g} s; ask for less") from None
    except psycopg.Error as exc:
        if isinstance(exc, psycopg.OperationalError | psycopg.errors.UndefinedTable):
            _ready.discard(role)  # the role or the views may have been dropped since, as by a migration
        if isinstance(exc, psycopg.OperationalError) and "pg_hba.conf" in str(exc):
            raise QueryRefused(
                f"PostgreSQL lets the role {role} not in ({str(exc).splitlines()[0]}); add a line to pg_hba.conf that "
                "lets roles named evsys_query_* in by password from the dashboard's server"
            ) from None
        raise QueryRefused(_reason(str(exc).splitlines()[0] if str(exc) else type(exc).__name__)) from None


def _fetch_in_time(database: Any, cursor: Any, started: float) -> Iterator[Any]:
    """The rows of a cursor on the server. Its time limit is for each FETCH alone, and a row may call `set_config`."""
    while (left := MAX_SECONDS - (time.monotonic() - started)) > 0:
        database.execute(f"SET LOCAL statement_timeout = {int(left * 1000) + 1}")
        rows = cursor.fetchmany(ROWS_PER_FETCH)
        if not rows:
            return
        yield from rows
    raise QueryRefused(f"the statement took longer than {MAX_SECONDS:g} s; ask for less")


def run_query(project_id: str, sql: str, *, hide_test: bool) -> QueryResult:
    """Run one statement on the server's database."""
    if connection.vendor == "postgresql":
        return query_postgresql(project_id, sql, hide_test=hide_test)
    return query_sqlite(str(connection.settings_dict["NAME"]), project_id, sql, hide_test=hide_test)


@auth.api
def query(request: HttpRequest, project: str) -> HttpResponse:
    """POST {sql}: one SELECT over the project's views."""
    if request.method != "POST":
        raise Refusal(405, f"{request.method} is not possible here; use POST with {{sql}}")
    visitor = auth.visitor_for(request, project)
    body = parse_body(request.body, request.headers.get("Content-Encoding", ""))
    sql = body.get("sql")
    if not isinstance(sql, str):
        raise Refusal(422, "sql: give one SELECT as text")
    try:
        found = run_query(visitor.project.pk, sql, hide_test=not visitor.may_see_test_rows)
    except QueryRefused as exc:
        raise Refusal(422, f"sql: {exc}") from None
    return answer(
        QueryAnswer(columns=found.columns, rows=found.rows, truncated=found.truncated, seconds=round(found.seconds, 4))
    )


urlpatterns = [path("api/v1/projects/<str:project>/query", query)]
