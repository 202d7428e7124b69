"""Records on their way into the tables: the one place that writes them.

In: what a client sent (`evsys_sdk.record.dashboard.wire`), or what `follow` read from a folder. Out: rows. The same
record may come twice, late, or out of order: per field the value with the newest `ts` counts, so that a replay changes
nothing. A record that is not one is refused with the reason (`Refusal`), before anything of its request is written.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from django.db import connection, models, transaction

from evsys_dashboard.auth import Refusal
from evsys_dashboard.models import TEST, EvalRow, ExperimentRow, GenerationRow, PredictionRow, Project, SuiteVersion
from evsys_dashboard.points import MAX_NAME, MAX_STEP, CurveId, StepValues, write_points
from evsys_dashboard.request_body import (
    EVAL,
    EXPERIMENT,
    GENERATION,
    MAX_SECONDS,
    SUITE,
    ReadFields,
    finite,
    read_dict,
    read_field,
    read_fields,
    read_id,
    read_list,
    read_number,
    read_step,
    read_text,
    read_time,
)
from evsys_dashboard.summary import OF_RECORD, record_of, summarize
from evsys_sdk.history.digest import Digest
from evsys_sdk.record.dashboard import wire

MAX_NUMBERS_PER_STEP = 2000

_lock = threading.RLock()
_last_stamp = 0.0


@contextmanager
def writing() -> Iterator[None]:
    """A transaction, one at a time in this process: SQLite has one writer, and a thread that waits for its turn here
    is faster than one that asks SQLite again and again."""
    with _lock, transaction.atomic():
        yield


class PagesInFlight:
    """How many pages are being answered. Work in the background lets them go first: SQLite has one writer and Python
    one running thread, and neither is fair to one who waits."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()
        self._none = threading.Event()
        self._none.set()

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            self._none.clear()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                self._none.set()

    def wait_until_none(self, seconds: float) -> bool:
        return self._none.wait(seconds)


pages_in_flight = PagesInFlight()


def next_stamp() -> float:
    """The time for `updated`: always later than the one before, also when the clock is set back. Live pages ask for
    what is newer than the newest they have seen, so within `writing` it grows from commit to commit."""
    global _last_stamp
    with _lock:
        if not _last_stamp:
            newest = [
                kind.objects.aggregate(last=models.Max("updated"))["last"] for kind in (ExperimentRow, GenerationRow)
            ]
            _last_stamp = max((one for one in newest if one), default=0.0)
        _last_stamp = max(time.time(), math.nextafter(_last_stamp, math.inf))
        return _last_stamp


FOLLOWED = ("source", "stamp", "created", "ended", "n_runs", "n_arms")
NOT_SHOWN = frozenset(["field_times", "stamp"])
"""Columns whose change no page has to show."""


def apply_fields(row: Any, fields: ReadFields, *, extra_column: str) -> set[str]:
    """Set the fields for which this is the newest value; returns the columns that changed."""
    changed, times = set(), row.field_times
    for key, value in fields.known.items():
        if fields.ts < times.get(key, -math.inf):
            continue
        if times.get(key) != fields.ts:
            times[key] = fields.ts
            changed.add("field_times")
        if getattr(row, key) != value:
            setattr(row, key, value)
            changed.add(key)
    kept = getattr(row, extra_column)
    for key, value in fields.extra.items():
        place = f"{extra_column}.{key}"
        if fields.ts >= times.get(place, -math.inf) and kept.get(key) != value:
            kept[key], times[place] = value, fields.ts
            changed |= {extra_column, "field_times"}
    return changed


# Experiments and runs.


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedColumns:
    """What only the reader of a folder knows of an experiment, for columns that no client sets."""

    source: str
    stamp: str
    created: float
    ended: float | None
    digest: Digest | None
    """Of its record, which then need not be read twice."""
    is_free: bool
    """Whether no row has its id: then none is looked for, and none of its runs."""
    n_runs: int
    n_arms: int


def save_experiment(
    project: Project,
    experiment_id: str,
    body: Mapping[str, object],
    *,
    create: bool,
    own: FollowedColumns | None = None,
) -> ExperimentRow:
    """Create an experiment or set fields of one. `own`: of a followed folder, where 500 are read at the first start."""
    fields = read_fields(body, EXPERIMENT)
    row = None if own and own.is_free else _find(ExperimentRow, project, experiment_id, create=create)
    is_new = row is None
    if row is None:
        if not create:
            raise Refusal(404, f"there is no experiment {experiment_id!r} in this project")
        row = ExperimentRow(id=experiment_id, project=project, name=experiment_id, created=fields.ts)
    changed = apply_fields(row, fields, extra_column="metadata")
    changed |= _note_times(row, fields, is_start=create)
    if changed & {"record", "config", "status"}:
        summarize(row, own.digest if own else None)
    if changed & {"record"} and not is_new:  # a new one has no runs yet
        _name_arms(row)
    for column in FOLLOWED if own else ():
        if getattr(row, column) != getattr(own, column):
            setattr(row, column, getattr(own, column))
            changed.add(column)
    return _store(row, changed, is_new)


def save_generation(project: Project, generation_id: str, body: Mapping[str, object], *, create: bool) -> GenerationRow:
    """Create a run or set fields of one."""
    row = _find(GenerationRow, project, generation_id, create=create)
    is_new = row is None
    if row is None:
        if not create:
            raise Refusal(404, f"there is no run {generation_id!r} in this project")
        ts = read_field(read_number, body, "ts")
        experiment_id = read_field(read_id, body, "experiment_id")
        experiment = _find(ExperimentRow, project, experiment_id)
        if experiment is None:
            # A client sends its own lines before those that an earlier process left, so a run may arrive before its
            # experiment: this row is filled when that arrives.
            experiment = ExperimentRow(id=experiment_id, project=project, name=experiment_id, created=ts)
            _store(experiment, set(), is_new=True)
        row = GenerationRow(id=generation_id, project=project, experiment=experiment, name=generation_id, created=ts)
    changed = _set_generation(row, body, is_start=create)
    _store(row, changed, is_new)
    if is_new or "status" in changed:
        _count_runs(row.experiment_id)
    return row


def drop_result(row: ExperimentRow) -> None:
    """Take out what the row has from a record that can no longer be read: nothing of it counts."""
    fresh = ExperimentRow()
    for column in ("record", "conclusion", *OF_RECORD):
        setattr(row, column, getattr(fresh, column))
    for column in ("record", "conclusion"):
        row.field_times.pop(column, None)
    row.updated = next_stamp()
    row.save()


def save_generations(experiment: ExperimentRow, bodies: Mapping[str, Mapping[str, object]], *, are_new: bool) -> None:
    """Create the runs of an experiment, or set fields of them: by id, with `source` beside the fields of the wire. One
    statement for all where `save_generation` has nine for each. `are_new`: none is looked for."""
    stored = GenerationRow.objects.select_for_update(of=("self",))
    found = {} if are_new else {row.pk: row for row in stored.filter(pk__in=list(bodies))}
    new = []
    for generation_id, body in bodies.items():
        row = found.get(generation_id)
        if row is None:
            ts = read_field(read_number, body, "ts")
            row = GenerationRow(
                id=generation_id, project=experiment.project, experiment=experiment, name=generation_id, created=ts
            )
            new.append(row)
        elif row.project_id != experiment.project_id:
            raise Refusal(409, f"the id {generation_id!r} is taken; make a new one")
        ended = row.ended
        changed = _set_generation(row, {key: body[key] for key in body if key != "source"}, is_start=True)
        # When a run ended is in its record (`follow`), and not when this was read.
        row.ended = ended if row.record and row.status != "running" else None
        if row.source != body["source"]:
            row.source = body["source"]
            changed.add("source")
        if generation_id in found:
            _store(row, changed, is_new=False)
        else:
            row.updated = next_stamp()
    GenerationRow.objects.bulk_create(new)
    if not are_new:  # some runs may be those of an earlier attempt, which the folder has no more
        _count_runs(experiment.pk)


def _set_generation(row: GenerationRow, body: Mapping[str, object], *, is_start: bool) -> set[str]:
    """Set the fields of a request; returns the columns that changed."""
    checkpoint = body.get("last_checkpoint")
    fields = read_fields({key: value for key, value in body.items() if key != "last_checkpoint"}, GENERATION)
    changed = apply_fields(row, fields, extra_column="extra")
    changed |= _note_times(row, fields, is_start=is_start)
    if checkpoint is not None:
        entry = read_field(read_dict, {"last_checkpoint": checkpoint}, "last_checkpoint")
        step = read_field(read_step, entry, "step")
        # By step, so that a checkpoint that is sent again, or late, stands once and in order.
        known = {one["step"]: one for one in row.checkpoints}
        known[step] = {**known.get(step, {}), **entry, "step": step}
        found = [known[key] for key in sorted(known)]
        if found != row.checkpoints:
            row.checkpoints = found
            changed.add("checkpoints")
    if changed & {"name", "run_config"}:
        seed = row.run_config.get("seed", row.seed)
        row.seed = seed if isinstance(seed, int) and not isinstance(seed, bool) and abs(seed) < 2**63 else None
        if "arm" not in row.field_times:  # not said by the client, so by the name of the run: `<arm>__s<seed>`
            row.arm = row.name.removesuffix(f"__s{row.seed}")
        changed |= {"arm", "seed"}
    return changed


def _find[T: models.Model](kind: type[T], project: Project, identifier: str, *, create: bool = True) -> T | None:
    """The row of this project. An id of another project is a Refusal where a row is to be made, since ids are shared by
    all projects; to a change it is as unknown as any other, so that it does not tell that it exists."""
    row: Any = kind._default_manager.select_for_update(of=("self",)).filter(pk=identifier).first()
    if row is None or row.project_id == project.pk:
        return row
    if create:
        raise Refusal(409, f"the id {identifier!r} is taken; make a new one")
    return None


def _note_times(row: Any, fields: ReadFields, *, is_start: bool) -> set[str]:
    changed = set()
    if is_start and fields.ts < row.created:
        row.created = fields.ts
        changed.add("created")
    if "status" in fields.known and row.field_times.get("status") == fields.ts:
        ended = None if row.status == "running" else fields.ts
        if row.ended != ended:
            row.ended = ended
            changed.add("ended")
    return changed


def _store[T: models.Model](row: T, changed: set[str], is_new: bool) -> T:
    """Write a row if anything of it changed."""
    if is_new or changed - NOT_SHOWN:
        row.updated = next_stamp()
        row.save(force_insert=is_new)
    elif changed:
        row.save(update_fields=changed)
    return row


def _name_arms(experiment: ExperimentRow) -> None:
    """Arms of runs as the experiment's record has them, which no name can contradict."""
    record = record_of(experiment)
    for arm, runs in record.runs_of() if record else ():
        ids = [wire.derived_id("generation", experiment.pk, run.run_id) for run in runs]
        GenerationRow.objects.filter(pk__in=ids, experiment=experiment).exclude(arm=arm.arm).update(arm=arm.arm)


def _count_runs(experiment_id: str) -> None:
    runs = GenerationRow.objects.filter(experiment_id=experiment_id)
    counts = runs.aggregate(n_runs=models.Count("pk"), n_arms=models.Count("arm", distinct=True))
    ExperimentRow.objects.filter(pk=experiment_id).exclude(**counts).update(**counts, updated=next_stamp())


# Evaluations, benchmarks, predictions, steps.


def generation_of(project: Project, generation_id: str) -> GenerationRow:
    found = GenerationRow.objects.filter(pk=generation_id, project=project).first()
    if found is None:
        raise Refusal(404, f"there is no run {generation_id!r} in this project")
    return found


def save_eval(
    project: Project, generation: GenerationRow, body: Mapping[str, object], *, may_replace: bool = True
) -> EvalRow:
    """Create an evaluation, or overwrite it by a newer one with its id. Without `may_replace` one with other content is
    a Refusal: an agent's key may not improve the scores it is judged by."""
    identifier, fields = read_field(read_id, body, "id"), read_fields(body, EVAL)
    row = _find(EvalRow, project, identifier)
    if row is not None and not may_replace:
        # A replay of what is stored is no change: clients send again what they are not sure has arrived.
        if fields.extra != row.extra or any(getattr(row, key) != value for key, value in fields.known.items()):
            raise Refusal(
                409, f"the evaluation {identifier!r} is stored with other content, and an agent's key changes none"
            )
        return row
    # An evaluation that anyone called a test stays one: an agent's key may write, and must not open its rows that way.
    is_test = TEST in (fields.known.get("split"), row.split if row else "")
    if row is not None and fields.ts <= row.created:
        if is_test and row.split != TEST:
            row.split = TEST
            row.save(update_fields=["split"])
        return row
    row = row or EvalRow(id=identifier, project=project, generation=generation, name="eval", created=fields.ts)
    for key, value in fields.known.items():
        setattr(row, key, value)
    if is_test:
        row.split = TEST
    row.created, row.extra = fields.ts, fields.extra
    row.n_rollouts = PredictionRow.objects.filter(project=project, eval_id=identifier).count()
    row.save()
    _touch([generation.pk])
    experiment = generation.experiment
    if experiment.record is None:
        before = experiment.spark
        summarize(experiment)
        if experiment.spark != before:
            _store(experiment, {"spark"}, is_new=False)
    return row


def save_benchmark(project: Project, body: Mapping[str, object]) -> SuiteVersion:
    """Record a suite that evaluations refer to. Rows that were uploaded for it stay."""
    identifier, fields = read_field(read_id, body, "id"), read_fields(body, SUITE)
    if SuiteVersion.objects.filter(pk=identifier).exclude(project=project).exists():
        # Clients derive the id from names that can be guessed. "Taken" would tell that another project has the suite.
        identifier = wire.derived_id("benchmark", project.pk, identifier)
    row = _find(SuiteVersion, project, identifier)
    if row is not None and fields.ts <= row.created:
        return row
    row = row or SuiteVersion(
        id=identifier, project=project, kind=SuiteVersion.Kind.BENCHMARK, name=identifier, created=fields.ts
    )
    for key, value in fields.known.items():
        if key == "split" and row.split == TEST:
            continue
        if not row.complete or key == "description":
            setattr(row, key, value)
    row.created, row.fields = fields.ts, fields.extra
    row.save()
    return row


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Points of one run."""

    generation_id: str
    curves: dict[str, StepValues]
    last_step: int


def read_steps(generation_id: str, body: Mapping[str, object]) -> StepBatch:
    """Check a batch of steps: `{"steps": [{"step", "ts", "metrics"}]}`, or one such item."""
    curves: dict[str, StepValues] = {}
    last = -MAX_STEP
    items = read_field(read_list, body, "steps") if "steps" in body else [body]
    # This loop decides how many points a second the server takes: the usual values are seen without a call.
    for item in items:
        if not isinstance(item, dict):
            raise Refusal(422, f"steps: expected objects, got {type(item).__name__}")
        step, ts, metrics = item.get("step"), item.get("ts"), item.get("metrics")
        if type(step) is not int or not -MAX_STEP <= step <= MAX_STEP:
            step = read_field(read_step, item, "step")
        if type(ts) is not float or not 0 <= ts < MAX_SECONDS:
            ts = read_field(read_time, item, "ts")
        if type(metrics) is not dict:
            metrics = read_field(read_dict, item, "metrics")
        if len(metrics) > MAX_NUMBERS_PER_STEP:
            raise Refusal(422, f"step {step} has {len(metrics):,} numbers; at most {MAX_NUMBERS_PER_STEP:,}")
        if step > last:
            last = step
        ts = int(ts * 1000)
        for name, value in metrics.items():
            number = value if type(value) is float else read_field(read_number, metrics, name)
            values = curves.get(name)
            if values is None:
                values = curves.setdefault(name[:MAX_NAME], {})
            if step not in values or values[step][1] <= ts:
                values[step] = (number, ts)
    return StepBatch(generation_id=generation_id, curves=curves, last_step=last)


UPDATE_RUN = """UPDATE dashboard_generation SET heartbeat = %s, updated = %s,
    last_step = CASE WHEN last_step > %s THEN last_step ELSE %s END WHERE id = %s"""


def save_steps(batches: Sequence[StepBatch]) -> None:
    """Write batches whose runs are known to exist."""
    merged: dict[CurveId, StepValues] = {}
    last: dict[str, int] = {}
    for batch in batches:
        for name, values in batch.curves.items():
            kept = merged.setdefault((batch.generation_id, name), values)
            for step, found in values.items() if kept is not values else ():
                if step not in kept or kept[step][1] <= found[1]:
                    kept[step] = found
        last[batch.generation_id] = max(batch.last_step, last.get(batch.generation_id, -MAX_STEP))
    if not last:
        return
    changed = write_points(merged)
    now = time.time()
    with connection.cursor() as cursor:
        for generation_id, step in last.items():
            if generation_id in changed:
                cursor.execute(UPDATE_RUN, [now, next_stamp(), step, step, generation_id])
            else:
                cursor.execute("UPDATE dashboard_generation SET heartbeat = %s WHERE id = %s", [now, generation_id])


OF_PREDICTION = frozenset(["id", "ts", "task_id", "reward", "status", "completion", "eval_run_id"])


@dataclass(frozen=True, slots=True)
class ReadPrediction:
    """A rollout, checked: a row of `PredictionRow`, of which making one takes longer than writing it."""

    id: str
    project_id: str
    generation_id: str
    eval_id: str | None
    task_id: str
    reward: float | None
    status: str
    completion: str
    body: str
    """JSON."""
    created: float


def read_predictions(project: Project, generation_id: str, body: Mapping[str, object]) -> list[ReadPrediction]:
    """Check a batch of rollouts: `{"predictions": [{...}]}`, or one."""
    items = read_field(read_list, body, "predictions") if "predictions" in body else [body]
    found: dict[str, ReadPrediction] = {}
    for item in items:
        if not isinstance(item, dict):
            raise Refusal(422, f"predictions: expected objects, got {type(item).__name__}")
        given = {key: value for key, value in item.items() if value is not None}
        reward = read_field(read_number, given, "reward") if "reward" in given else None
        is_finite = reward is not None and math.isfinite(reward)
        rest = {key: value for key, value in given.items() if key not in OF_PREDICTION}
        if reward is not None and not is_finite:
            rest["reward"] = finite(reward)
        row = ReadPrediction(
            read_field(read_id, given, "id"),
            project.pk,
            generation_id,
            read_field(read_id, given, "eval_run_id") if "eval_run_id" in given else None,
            str(given.get("task_id", ""))[:MAX_NAME],
            reward if is_finite else None,
            str(given.get("status", ""))[:20],
            read_field(read_text, given, "completion") if "completion" in given else "",
            json.dumps(rest),
            read_field(read_time, given, "ts"),
        )
        if row.id not in found or found[row.id].created <= row.created:
            found[row.id] = row
    return list(found.values())


PREDICTION_COLUMNS = [field.name for field in fields(ReadPrediction)]
INSERT_PREDICTION = (
    f"INSERT INTO dashboard_prediction ({', '.join(PREDICTION_COLUMNS)}) "
    f"VALUES ({', '.join(['%s'] * len(PREDICTION_COLUMNS))}) ON CONFLICT (id) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in PREDICTION_COLUMNS if name not in ("id", "project_id"))
)
values_of = attrgetter(*PREDICTION_COLUMNS)


def save_predictions(rows: Iterable[ReadPrediction], *, added: Iterable[ReadPrediction] = ()) -> None:
    """Write rollouts, the newest of each id. `added`: those of keys that may add rollouts and change none."""
    new_only = {row.id: row for row in added}
    wanted = new_only | {row.id: row for row in rows}
    times: dict[str, tuple[str, float]] = {}
    ids = list(wanted)
    for start in range(0, len(ids), 500):
        known = PredictionRow.objects.filter(pk__in=ids[start : start + 500]).values_list("pk", "project_id", "created")
        times |= {pk: (owner, created) for pk, owner, created in known}
    # A replay finds every row there, and writes nothing.
    newer = [
        row
        for pk, row in wanted.items()
        # An id of another project is left alone: overwriting it would reach into that project.
        if pk not in times
        or (row is not new_only.get(pk) and times[pk][0] == row.project_id and row.created > times[pk][1])
    ]
    if not newer:
        return
    with connection.cursor() as cursor:
        cursor.executemany(INSERT_PREDICTION, list(map(values_of, newer)))
    evals = {(row.project_id, row.eval_id) for row in newer if row.eval_id}
    for project_id, eval_id in evals:  # a rollout may name an evaluation of another project, and must not count there
        count = PredictionRow.objects.filter(project_id=project_id, eval_id=eval_id).count()
        EvalRow.objects.filter(project_id=project_id, pk=eval_id).update(n_rollouts=count)
    _touch(sorted({row.generation_id for row in newer}))


def _touch(generations: Sequence[str]) -> None:
    """Live pages that show these runs ask again."""
    GenerationRow.objects.filter(pk__in=generations).update(updated=next_stamp())
