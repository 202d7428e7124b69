"""Two or more experiments, or arms of them, side by side: settings that differ, scores, a verdict on shared tasks, and
the tasks on which they differ.

In: `?e=<experiment id>` for each, `&arm=<experiment id>:<arm>` for arms of one, `&metric=`. Out: the page. The
comparison is that of `evsys compare`, on rollouts from the tables instead of journals: same numbers, same sentences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import URLPattern, path
from django.views.decorators.http import require_GET

from evsys_dashboard import auth
from evsys_dashboard.follow import ensure_experiment_loaded
from evsys_dashboard.models import EvalRow, ExperimentRow, GenerationRow, PredictionRow, Project
from evsys_dashboard.pages.experiment import read_digest, read_record
from evsys_sdk.errors import EvsysError, shorten
from evsys_sdk.history.compare import (
    Compared,
    ComparedArm,
    Judged,
    StoredArm,
    arm_scores,
    compare_sides,
    sides_of,
)
from evsys_sdk.history.history import ExperimentEntry
from evsys_sdk.history.index import Note, Notes
from evsys_sdk.protocols import Rollout, Turn
from evsys_sdk.record.dashboard.wire import derived_id
from evsys_sdk.record.models import ExperimentRecord
from evsys_sdk.record.rollouts import StoredEval
from evsys_sdk.report.verdict_text import verdict_lines

MOST_COMPARED = 12
MOST_TASKS = 200
"""Tasks that are listed; the others are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCell:
    """What one side scored on one task, and where its rollouts are."""

    value: float | None
    url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDifference:
    """One task on which a side differs from the first."""

    task_id: str
    first: TaskCell
    other: TaskCell
    change: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlippedTasks:
    """The tasks on which one side differs from the first, by one measure."""

    label: str
    first: str
    other: str
    n_tasks: int
    gained: list[TaskDifference]
    lost: list[TaskDifference]
    n_gained: int
    n_lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardSide:
    """A side of the comparison with the rows it is made of."""

    row: ExperimentRow
    side: ComparedArm
    arm: StoredArm
    runs: dict[int, GenerationRow]
    """Seed -> the run."""
    evals: dict[tuple[int, str, str], str]
    """Seed, split and name -> id of the evaluation."""


def entry_of(row: ExperimentRow) -> ExperimentEntry:
    """An experiment of the tables as `evsys history` has those on disk."""
    digest = read_digest(row)
    notes = [
        # A client may send notes of another kind; they are shown on the experiment's page and mean nothing here.
        Note(kind=one["kind"], text=str(one.get("text")), by=str(one.get("by") or ""), ts=str(one.get("ts")))
        for one in row.notes
        if isinstance(one, dict) and one.get("kind") in ("invalid", "valid", "conclusion")
    ]
    state = digest.status if row.status == "invalid" and digest.arms else row.status
    return ExperimentEntry(
        digest=digest, record=Path(row.source or row.pk), state=state, when=row.ended or row.created,
        notes=Notes(current=notes),
    )  # fmt: skip


def rollout_of(row: PredictionRow) -> Rollout:
    """A rollout as metrics fold it. Of tokens only their number is stored."""
    body = row.body if isinstance(row.body, dict) else {}
    turns = []
    for one in body.get("turns") or []:
        text, n = (one.get("text"), one.get("completion_tokens")) if isinstance(one, dict) else (one, 0)
        # A bound on what a client may claim: the list below is as long as its number.
        tokens = [0] * (n if isinstance(n, int) and 0 <= n < 10_000_000 else 0)
        turns.append(Turn(prompt_tokens=[], completion_tokens=tokens, logprobs=[], text=str(text or "")))
    return Rollout(
        task_id=row.task_id,
        turns=turns or [Turn(prompt_tokens=[], completion_tokens=[], logprobs=[], text=row.completion)],
        reward=row.reward,
        status=row.status or "ok",
        error=body.get("error"),
        seconds=body.get("seconds") or 0.0,
        cost_usd=body.get("cost_usd") or 0.0,
        metadata=body.get("metadata") or {},
    )


def load_side(row: ExperimentRow, record: ExperimentRecord, side: ComparedArm) -> DashboardSide:
    """The evaluations of an arm's seeds: of the finished weights, or of the last step where there are no others."""
    recorded = next((runs for found, runs in record.runs_of() if found.arm == side.arm.arm), [])
    ids = [derived_id("generation", row.pk, run.run_id) for run in recorded]
    known = {run.pk: run for run in GenerationRow.objects.filter(pk__in=ids).defer("log_tail", "record")}
    evals: dict[int, dict[tuple[str, str], StoredEval]] = {}
    failed: dict[int, str] = {}
    places: dict[tuple[int, str, str], str] = {}
    runs: dict[int, GenerationRow] = {}
    seeds = [known[pk].seed if pk in known else None for pk in ids]
    if None in seeds or len(set(seeds)) < len(seeds):  # a run that did not arrive, or that names no seed
        seeds = list(range(len(ids)))
    for seed, pk, run in zip(seeds, ids, recorded, strict=True):
        last: dict[tuple[str, str], EvalRow] = {}
        found = EvalRow.objects.filter(generation_id=pk) if run.status == "completed" else EvalRow.objects.none()
        # At step 0 the untrained model was scored. Sorted, so that of a suite the last evaluation stays.
        trained = [one for one in found if one.step != 0 and one.n_rollouts]
        for one in sorted(trained, key=lambda one: math.inf if one.step is None else one.step):
            last[one.split, one.name] = one
        at = int(seed or 0)
        evals[at] = {key: stored_eval(one, run.run_id) for key, one in last.items()}
        places |= {(at, *key): one.pk for key, one in last.items()}
        if pk in known:
            runs[at] = known[pk]
        if not last:
            failed[at] = run.error or f"run {run.status}, and no rollouts of it are stored"
    arm = StoredArm(label=side.label, evals=evals, failed=failed)
    return DashboardSide(row=row, side=side, arm=arm, runs=runs, evals=places)


def stored_eval(row: EvalRow, run: str) -> StoredEval:
    scored_by = [str(score.get("metric")) for score in row.scores] or list(row.metrics)
    clusters = row.extra.get("clusters") if isinstance(row.extra, dict) else None
    return StoredEval(
        run=run,
        split=row.split,
        name=row.name,
        # A client of another project may name this evaluation: its rollouts do not count here.
        rollouts=[rollout_of(one) for one in row.predictions.filter(project=row.project_id).order_by("created", "id")],
        step=row.step,
        stage=row.stage or None,
        metrics=scored_by,
        clusters=clusters if isinstance(clusters, dict) else {},
    )


def flipped_tasks(judged: Judged, first: DashboardSide, other: DashboardSide, project: Project) -> FlippedTasks:
    """Tasks on which the means over seeds differ, the largest differences first."""
    measure = (judged.split, judged.name, judged.verdict.metric)
    values = []
    for side in (first, other):
        by_task: dict[str, list[float]] = {}
        for seed in arm_scores(side.arm, measure).seeds.values():
            for task, value in seed.items():
                by_task.setdefault(task, []).append(value)
        values.append({task: fmean(found) for task, found in by_task.items()})
    shared = [task for task in values[0] if task in values[1]]
    sign = -1 if judged.verdict.mode == "min" else 1

    def cell(side: DashboardSide, task: str, value: float) -> TaskCell:
        for (seed, split, name), pk in side.evals.items():
            if (split, name) == measure[:2] and seed in side.runs:
                query = urlencode({"run": side.runs[seed].pk, "eval": pk, "task": task})
                return TaskCell(value=value, url=f"/p/{project.pk}/rollouts?{query}")
        return TaskCell(value=value)

    differ = [
        TaskDifference(
            task_id=task,
            first=cell(first, task, values[0][task]),
            other=cell(other, task, values[1][task]),
            change=values[1][task] - values[0][task],
        )
        for task in shared
        if values[0][task] != values[1][task]
    ]
    differ.sort(key=lambda one: (-abs(one.change), one.task_id))
    gained = [one for one in differ if one.change * sign > 0]
    lost = [one for one in differ if one.change * sign < 0]
    return FlippedTasks(
        label=judged.label, first=first.side.label, other=other.side.label, n_tasks=len(shared),
        gained=gained[:MOST_TASKS], lost=lost[:MOST_TASKS], n_gained=len(gained), n_lost=len(lost),
    )  # fmt: skip


def compare_rows(
    rows: Sequence[ExperimentRow], arms: dict[str, list[str]], metric: str | None
) -> tuple[Compared, list[DashboardSide]]:
    """The comparison; EvsysError where there is none, with the reason."""
    notes: list[str] = []
    chosen: list[tuple[ExperimentRow, ExperimentRecord, ComparedArm]] = []
    for row in rows:
        record = read_record(row) or ExperimentRecord(experiment=row.name)
        for side in sides_of(entry_of(row), record, arms.get(row.pk, []), notes):
            chosen.append((row, record, side))
    if len(chosen) < 2:
        raise EvsysError("a comparison takes two: choose two experiments, or two arms of one")
    labels = [side.label for _, _, side in chosen]
    sides = []
    for row, record, side in chosen:
        if labels.count(side.label) > 1:  # two experiments of one name are distinguished by their ids
            side = replace(side, label=f"{side.label} ({row.pk[:8]})")
        sides.append(load_side(row, record, side))
    found = compare_sides([one.side for one in sides], [one.arm for one in sides], metric=metric, notes=notes)
    return found, sides


@auth.page
@require_GET
def compare_page(request: HttpRequest, project_id: str) -> HttpResponse:
    project = auth.project_for(request, project_id)
    ids = list(dict.fromkeys(filter(None, request.GET.getlist("e"))))[:MOST_COMPARED]
    known = {row.pk: row for row in ExperimentRow.objects.filter(project=project, pk__in=ids)}
    rows = [known[pk] for pk in ids if pk in known]
    for row in rows:
        ensure_experiment_loaded(row)
    wanted: dict[str, list[str]] = {}
    for text in request.GET.getlist("arm"):
        for row in rows:
            if text.startswith(f"{row.pk}:"):
                wanted.setdefault(row.pk, []).append(text.removeprefix(f"{row.pk}:"))
    metric = request.GET.get("metric") or None
    context: dict[str, Any] = {
        "project": project,
        "section": "lab",
        "rows": rows,
        "missing": [pk for pk in ids if pk not in known],
        "metric": metric or "",
        "others": ExperimentRow.objects.filter(project=project)
        .exclude(pk__in=ids)
        .order_by("-created")
        .only("id", "name")[:300],
    }
    try:
        found, sides = compare_rows(rows, wanted, metric)
    except EvsysError as exc:
        found, sides = None, []
        context["problem"] = str(exc).rstrip(".")
    compared = {row.pk: ", ".join(one.side.arm.arm for one in sides if one.row.pk == row.pk) for row in rows}
    context["choices"] = [
        (row, [arm.arm for arm in read_digest(row).arms], wanted.get(row.pk, []), compared[row.pk]) for row in rows
    ]
    if found is None:
        return render(request, "dashboard/compare.html", context)
    keys = list(found.scores)
    context |= {
        "found": found,
        "sides": sides,
        "labels": [side.label for side in found.sides],
        "settings": [
            (key, ["(not set)" if value is None else shorten(str(value), 300) for value in values])
            for key, values in found.settings.items()
        ],
        "scores": [(key, found.score_texts(key)) for key in keys],
        "metrics": [key for key in keys if "/" in key],
        "verdicts": [
            (
                judged,
                verdict_lines(judged.verdict),
                [flipped_tasks(judged, sides[0], one, project) for one in sides[1:]],
            )
            for judged in found.verdicts
        ],
    }
    return render(request, "dashboard/compare.html", context)


urlpatterns: list[URLPattern] = [path("p/<str:project_id>/compare", compare_page)]
