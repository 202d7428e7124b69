"""What the model said: the tasks of an evaluation, one transcript, and the same task across arms and steps.

In: `?run=&eval=&status=&passed=&task=&key=&q=`, `rollout=` for the one that is open, `side=1` for the task side by
side. Out: the page, and a rollout as plain text to download.
"""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import URLPattern, path
from django.views.decorators.http import require_GET

from evsys_dashboard import auth
from evsys_dashboard.api.read import find_run
from evsys_dashboard.follow import ensure_experiment_loaded, ensure_loaded
from evsys_dashboard.models import EvalRow, GenerationRow, PredictionRow, Project
from evsys_dashboard.pages.experiment import attachment
from evsys_dashboard.pages.run import eval_lines
from evsys_dashboard.rollouts import RolloutFilter, outcome_of, read_transcript, select_rollouts
from evsys_sdk.format import score_text

PER_PAGE = 200
MOST_SIDES = 24
STATUSES = ("ok", "agent_error", "infra_error", "timeout", "cancelled")


def chosen_eval(run: GenerationRow, wanted: str) -> EvalRow | None:
    """The evaluation that is named; else that of the finished weights, else the last that has rollouts."""
    rows = [one for one in run.evals.all() if one.n_rollouts] or list(run.evals.all())
    named = [one for one in rows if one.pk == wanted]
    order = sorted(rows, key=lambda one: (one.split != "test", one.step is None, one.step or 0))
    return (named or order[-1:] or [None])[0]


def metadata_keys(rollouts: Any) -> list[str]:
    """Keys and values of metadata that rollouts can be filtered by: short texts and numbers that some share."""
    seen: dict[str, set[str]] = {}
    # A sample: metadata of one benchmark has the same keys in each task.
    for body in rollouts.values_list("body", flat=True)[:500]:
        question = body.get("question") if isinstance(body, dict) else None
        for holder in (question, body):
            metadata = holder.get("metadata") if isinstance(holder, dict) else None
            for key, value in metadata.items() if isinstance(metadata, dict) else ():
                if isinstance(value, str | int | float) and len(str(value)) <= 60 and len(str(key)) <= 60:
                    seen.setdefault(str(key), set()).add(str(value))
    return [f"{key}:{value}" for key, found in sorted(seen.items()) if 1 < len(found) <= 20 for value in sorted(found)]


def sides_of_task(project: Project, run: GenerationRow, one: EvalRow, task_id: str) -> tuple[int, list[dict[str, Any]]]:
    """How often the task was tried in the runs of the experiment, at any step and on the same benchmark; and the first
    of these rollouts."""
    found = (
        PredictionRow.objects.filter(project=project, generation__experiment_id=run.experiment_id, task_id=task_id)
        # A client may name any evaluation, another project's too: its name and step are not for this one to see.
        .filter(eval__project=project, eval__split=one.split, eval__name=one.name)
        .select_related("eval", "generation")
    )

    def place(row: PredictionRow) -> tuple[Any, ...]:
        step = row.eval.step if row.eval else None
        return (row.generation.arm, step is None, step or 0, row.generation.seed or 0, row.created)

    rows = sorted(found, key=place)
    return len(rows), [
        {"row": row, "transcript": read_transcript(row), "when": _when(row.eval)} for row in rows[:MOST_SIDES]
    ]


def _when(one: EvalRow | None) -> str:
    if one is None or one.step is None:
        return "final weights"
    return "untrained" if one.step == 0 else f"step {one.step:,}"


@auth.page
@require_GET
def rollouts_page(request: HttpRequest, project_id: str) -> HttpResponse:
    project = auth.project_for(request, project_id)
    context: dict[str, Any] = {"project": project, "section": "lab"}
    if not request.GET.get("run"):
        runs = GenerationRow.objects.filter(project=project).select_related("experiment").order_by("-created")[:50]
        return render(request, "dashboard/rollouts.html", context | {"runs": runs})
    run = find_run(project, request.GET["run"])
    ensure_loaded(run)
    one = chosen_eval(run, request.GET.get("eval", ""))
    wanted = RolloutFilter.of(request.GET, run=run.pk, eval=one.pk if one else "")
    is_side_by_side = request.GET.get("side") == "1" and one is not None and bool(wanted.task)
    context |= {
        "run": run,
        "experiment": run.experiment,
        "eval": one,
        "lines": eval_lines(list(run.evals.all())),
        "filter": wanted,
        "statuses": STATUSES,
    }
    if is_side_by_side and one is not None:
        ensure_experiment_loaded(run.experiment)
        context["n_sides"], context["sides"] = sides_of_task(project, run, one, wanted.task)
        return render(request, "dashboard/rollouts.html", context)
    found = select_rollouts(project, wanted)
    total = found.count()
    place = request.GET.get("from", "")
    begin = int(place) if place.isdecimal() and len(place) < 10 else 0
    rows = list(found.only("id", "task_id", "reward", "status", "eval_id", "generation_id")[begin : begin + PER_PAGE])
    opened = request.GET.get("rollout", "")
    at = next((index for index, row in enumerate(rows) if row.pk == opened), 0)
    row = PredictionRow.objects.get(pk=rows[at].pk) if rows else None
    every = select_rollouts(project, RolloutFilter(run=run.pk, eval=wanted.eval))

    def link(other: int) -> str:
        page = begin - PER_PAGE if other < 0 else begin + PER_PAGE if other >= len(rows) else begin
        if page < 0 or page >= total:
            return ""
        # On the page before or after, which is not loaded, the first rollout is open.
        near = rows[other].pk if 0 <= other < len(rows) else ""
        return wanted.url(rollout=near, **{"from": str(page) if page else ""})

    context |= {
        "tasks": [
            {"row": one_row, "outcome": outcome_of(one_row), "url": link(index), "is_open": index == at}
            for index, one_row in enumerate(rows)
        ],
        "total": total,
        "n_all": every.count(),
        "number": begin + at + 1,
        "begin": begin,
        "next_page": wanted.url(**{"from": str(begin + PER_PAGE)}) if begin + PER_PAGE < total else "",
        "previous_page": wanted.url(**{"from": str(max(0, begin - PER_PAGE))}) if begin else "",
        "transcript": read_transcript(row) if row else None,
        # Of the evaluation that was looked up in this run: a client may have named one of another project.
        "when": _when(one),
        "next_url": link(at + 1) if rows else "",
        "previous_url": link(at - 1) if rows else "",
        "side_url": wanted.url(task=row.task_id, side="1", passed="", status="", key="", q="") if row else "",
        "keys": metadata_keys(every),
        "breakdown": [(*line, wanted.url(key=f"{line[0]}:{line[1]}")) for line in breakdown_of(one)],
    }
    return render(request, "dashboard/rollouts.html", context)


def breakdown_of(one: EvalRow | None) -> list[tuple[str, str, str]]:
    """Scores by metadata value, as the evaluation has them: key, value, score."""
    found = []
    for key, values in (one.breakdown if one and isinstance(one.breakdown, dict) else {}).items():
        for value, scores in values.items() if isinstance(values, dict) else ():
            for score in scores[:1] if isinstance(scores, list) else ():
                found.append(
                    (str(key), str(value), score_text(score.get("value"), score.get("low"), score.get("high")))
                )
    return found[:40]


@auth.page
@require_GET
def rollout_file(request: HttpRequest, project_id: str, rollout_id: str) -> HttpResponse:
    """A rollout as text, whole."""
    project = auth.project_for(request, project_id)
    row = PredictionRow.objects.filter(project=project, pk=rollout_id).first()
    if row is None:
        raise Http404("there is no such rollout in this project")
    found = read_transcript(row)
    parts = [f"task: {found.task_id}\nstatus: {found.status}\nreward: {found.reward}\n"]
    parts += [f"== {message.role}\n{message.text}\n" for message in found.messages]
    parts += [f"== expected\n{found.expected}\n"] if found.expected else []
    parts += [f"== error\n{found.error}\n"] if found.error else []
    # A model may write half a surrogate pair, which UTF-8 cannot hold: it stands as its escape.
    return attachment("\n".join(parts).encode(errors="backslashreplace"), "text/plain; charset=utf-8",
                      f"rollout-{row.pk[:20]}.txt")  # fmt: skip


urlpatterns: list[URLPattern] = [
    path("p/<str:project_id>/rollouts", rollouts_page),
    path("p/<str:project_id>/rollouts/<str:rollout_id>.txt", rollout_file),
]
