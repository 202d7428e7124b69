"""The points of curves: one narrow table, keyed by curve and step.

In: values of steps, possibly twice, late or out of order. Out: the points of a curve, all of them or a minimum and a
maximum per pixel. `MetricKey` keeps a summary of each curve, so that lists never read points. Only this module
writes and reads the table.

NaN and infinities have a `kind` and no value: SQLite turns a NaN into NULL, and min() and max() must not meet one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from django.db import connection
from django.db.models.signals import post_delete
from django.dispatch import receiver

from evsys_dashboard.models import MetricKey

FINITE, NAN, POSITIVE, NEGATIVE = 0, 1, 2, 3
NUMBERS = {NAN: math.nan, POSITIVE: math.inf, NEGATIVE: -math.inf}
WORDS = {NAN: "NaN", POSITIVE: "Infinity", NEGATIVE: "-Infinity"}
MAX_WIDTH = 4096
MAX_STEP = 2**49
"""Largest step either way: (step - first) * width must fit into 64 bits, or PostgreSQL raises."""
MAX_NAME = 300

CREATE_SQLITE = """CREATE TABLE dashboard_point (
    key_id INTEGER NOT NULL, step INTEGER NOT NULL, kind INTEGER NOT NULL, value REAL, ts INTEGER NOT NULL,
    PRIMARY KEY (key_id, step)) WITHOUT ROWID"""
CREATE_POSTGRESQL = """CREATE TABLE dashboard_point (
    key_id bigint NOT NULL, step bigint NOT NULL, kind smallint NOT NULL, value double precision, ts bigint NOT NULL,
    PRIMARY KEY (key_id, step))"""
# `ts` is in milliseconds. Not `>=`: a replay must change no row, and then needs no new summary.
ON_CONFLICT = """ ON CONFLICT (key_id, step)
    DO UPDATE SET kind = excluded.kind, value = excluded.value, ts = excluded.ts
    WHERE excluded.ts > dashboard_point.ts"""
ROWS_AT_ONCE = 500
"""Points in one statement of SQLite: a third faster than one each, and other threads run meanwhile."""
UPSERT_POSTGRESQL = (
    "INSERT INTO dashboard_point (key_id, step, kind, value, ts) "
    "SELECT * FROM unnest(%s::bigint[], %s::bigint[], %s::smallint[], %s::float8[], %s::bigint[])" + ON_CONFLICT
)

POINTS_RANGE = "SELECT count(*), min(value), max(value) FROM dashboard_point WHERE key_id = %s"
LAST_POINT = "SELECT step, kind, value FROM dashboard_point WHERE key_id = %s ORDER BY step DESC LIMIT 1"
UPDATE_KEY = """UPDATE dashboard_metrickey SET n = %s, last_step = %s, last = %s, last_kind = %s, low = %s, high = %s
    WHERE id = %s"""


def _upsert_sqlite(rows: int) -> str:
    values = ", ".join(["(?, ?, ?, ?, ?)"] * rows)
    return f"INSERT INTO dashboard_point (key_id, step, kind, value, ts) VALUES {values}{ON_CONFLICT}"


UPSERT_SQLITE = _upsert_sqlite(ROWS_AT_ONCE)
StepValues = dict[int, tuple[float, int]]
"""Step -> value and time in milliseconds."""
CurveId = tuple[str, str]
"""Id of the generation and name of the metric."""
PointRow = tuple[int, int, int, float | None, int]


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one curve in a range of steps."""

    n: int = 0
    """How many points there are in the range; `step` may hold fewer."""
    step: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    """NaN and infinities among them."""

    def to_json(self) -> dict[str, Any]:
        """Columns, with "NaN", "Infinity" and "-Infinity" for what JSON has no number for."""
        return {"n": self.n, "step": self.step, "value": [wire_number(value) for value in self.value]}


def kind_of(value: float) -> int:
    if math.isfinite(value):
        return FINITE
    return NAN if math.isnan(value) else POSITIVE if value > 0 else NEGATIVE


def number_of(kind: int, value: float | None) -> float | None:
    """The number behind a kind and a value; None where there is none."""
    return value if kind == FINITE else NUMBERS[kind]


def wire_number(value: float) -> float | str:
    """The number as JSON has it."""
    kind = kind_of(value)
    return value if kind == FINITE else WORDS[kind]


def write_points(curves: Mapping[CurveId, StepValues]) -> set[str]:
    """Keep these points, the newest value of each step; returns the generations in which something changed.

    Call it within a transaction: points and summaries belong together."""
    names = MetricKey.objects.filter(generation_id__in={generation for generation, _ in curves})
    keys = {(key.generation_id, key.name): key for key in names}
    missing = [MetricKey(generation_id=one, name=name) for one, name in sorted(curves.keys() - keys.keys())]
    keys |= {(key.generation_id, key.name): key for key in MetricKey.objects.bulk_create(missing)}
    fresh: list[PointRow] = []
    changed: list[MetricKey] = []
    for curve_id, values in curves.items():
        key = keys[curve_id]
        rows = _rows(key.pk, values)
        if key.last_step is None or min(values) > key.last_step:
            # The usual case: the curve grows at its end, so nothing of the old summary can be wrong.
            fresh += rows
            # NaN and infinity would stay for ever in a lowest or highest value.
            finite = [value for value, _ in values.values() if math.isfinite(value)]
            key.n += len(values)
            key.last_step = max(values)
            last = values[key.last_step][0]
            key.last_kind, key.last = kind_of(last), last if math.isfinite(last) else None
            if finite:
                key.low = min(finite) if key.low is None else min(key.low, *finite)
                key.high = max(finite) if key.high is None else max(key.high, *finite)
            changed.append(key)
        elif _upsert(rows):
            # A step was written again or late: the summary anew, from the points.
            with connection.cursor() as cursor:
                cursor.execute(POINTS_RANGE, [key.pk])
                key.n, key.low, key.high = cursor.fetchone()
                cursor.execute(LAST_POINT, [key.pk])
                key.last_step, key.last_kind, key.last = cursor.fetchone()
            changed.append(key)
    _upsert(fresh)
    if changed:
        with connection.cursor() as cursor:
            columns = [(one.n, one.last_step, one.last, one.last_kind, one.low, one.high, one.pk) for one in changed]
            cursor.executemany(UPDATE_KEY, columns)
    return {key.generation_id for key in changed}


def _rows(key_id: int, values: StepValues) -> list[PointRow]:
    if math.isfinite(sum([value for value, _ in values.values()])):  # then each of them is finite
        return [(key_id, step, FINITE, value, ts) for step, (value, ts) in values.items()]
    kinds = [(step, kind_of(value), value, ts) for step, (value, ts) in values.items()]
    return [(key_id, step, kind, value if kind == FINITE else None, ts) for step, kind, value, ts in kinds]


def _upsert(rows: list[PointRow]) -> int:
    """Write rows; returns how many changed."""
    if not rows:
        return 0
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(UPSERT_POSTGRESQL, [list(column) for column in zip(*rows, strict=True)])
            return int(cursor.rowcount)
    changed = 0
    with connection.wrap_database_errors:  # past Django's cursor, which would rewrite the statement at each call
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = rows[start : start + ROWS_AT_ONCE]
            statement = UPSERT_SQLITE if len(part) == ROWS_AT_ONCE else _upsert_sqlite(len(part))
            changed += connection.connection.execute(statement, list(chain.from_iterable(part))).rowcount
    return changed


def curve(key_id: int, first: int | None = None, last: int | None = None, width: int = 1000) -> Curve:
    """The points from step `first` to step `last`: all if there are at most two per pixel of `width`, else the lowest
    and the highest of each pixel, what is not finite, and the first and last point."""
    width = max(1, min(width, MAX_WIDTH))
    low = -MAX_STEP if first is None else max(first, -MAX_STEP)
    high = MAX_STEP if last is None else min(last, MAX_STEP)
    bounds = "SELECT count(*), min(step), max(step) FROM dashboard_point WHERE key_id = %s AND step BETWEEN %s AND %s"
    with connection.cursor() as cursor:
        cursor.execute(bounds, [key_id, low, high])
        n, begin, end = cursor.fetchone()
        if n == 0:
            return Curve()
        if n <= 2 * width:
            points = "SELECT step, kind, value FROM dashboard_point WHERE key_id = %s AND step BETWEEN %s AND %s"
            cursor.execute(points + " ORDER BY step", [key_id, low, high])
            rows = cursor.fetchall()
        else:
            # A pixel is a part of the range that was asked for, or of what there is.
            begin, end = begin if first is None else low, end if last is None else high
            rows = sorted(set(_buckets(cursor, key_id, (low, high), begin, end, width)))
    found = [(step, number_of(kind, value)) for step, kind, value in rows]
    return Curve(n, [step for step, _ in found], [value for _, value in found if value is not None])


def _buckets(
    cursor: Any, key_id: int, limits: tuple[int, int], begin: int, end: int, width: int
) -> Iterator[tuple[int, int, float | None]]:
    inside = [key_id, *limits]
    bucket = f"(step - ({int(begin)})) * {int(width)} / {int(end) - int(begin) + 1}"
    where = "FROM dashboard_point WHERE key_id = %s AND step BETWEEN %s AND %s"
    if connection.vendor == "postgresql":
        for order in ("value", "value DESC"):
            # The pixel comes first in ORDER BY because DISTINCT ON keeps the first row of each.
            query = f"SELECT DISTINCT ON ({bucket}) step, kind, value {where} AND kind = 0 ORDER BY {bucket}, {order}"
            cursor.execute(query, inside)
            yield from cursor.fetchall()
    else:
        for extreme in ("min", "max"):
            # With one min() or max(), SQLite takes the other columns from the row that has it (lang_select 2.5).
            query = f"SELECT step, kind, {extreme}(value) {where} AND kind = 0 GROUP BY {bucket}"
            cursor.execute(query, inside)
            yield from cursor.fetchall()
    cursor.execute(f"SELECT min(step), kind, NULL {where} AND kind <> 0 GROUP BY {bucket}, kind", inside)
    yield from cursor.fetchall()
    for order in ("step", "step DESC"):
        cursor.execute(f"SELECT step, kind, value {where} ORDER BY {order} LIMIT 1", inside)
        yield from cursor.fetchall()


@receiver(post_delete, sender=MetricKey)
def _delete_points(instance: MetricKey, **_: object) -> None:
    # Not a foreign key: its check would cost more than the insert of a point.
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM dashboard_point WHERE key_id = %s", [instance.pk])
