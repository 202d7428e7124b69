"""Read routes of curves and rollouts. A person's session or a key of the project may ask.

Rollouts of a test split hold its tasks and answers: an agent-scoped key does not get them.
"""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.urls import URLPattern, path
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_GET

from evsys_dashboard import auth
from evsys_dashboard.curves import StepRange, metric_names, series_of
from evsys_dashboard.follow import ensure_experiment_loaded, ensure_loaded
from evsys_dashboard.models import TEST, ExperimentRow, GenerationRow
from evsys_dashboard.points import MAX_WIDTH
from evsys_dashboard.rollouts import RolloutFilter, read_transcript, select_rollouts

MOST_METRICS = 50
MOST_ROLLOUTS = 500


def find_experiment(project: Any, experiment_id: str) -> ExperimentRow:
    found = ExperimentRow.objects.filter(project=project, pk=experiment_id).first()
    if found is None:
        raise Http404(f"there is no experiment {experiment_id!r} in this project")
    return found


def find_run(project: Any, run_id: str) -> GenerationRow:
    found = GenerationRow.objects.select_related("experiment").filter(project=project, pk=run_id).first()
    if found is None:
        raise Http404(f"there is no run {run_id!r} in this project")
    return found


def whole_number(request: HttpRequest, name: str) -> int | None:
    """A number in the query; a Refusal where it is something else."""
    text = request.GET.get(name, "")
    if not text:
        return None
    try:
        # By way of a float, so that 1e6 is a number of steps too.
        return int(float(text))
    except (ValueError, OverflowError):
        raise auth.Refusal(400, f"{name}={text!r} is not a number") from None


def answer_curves(request: HttpRequest, runs: list[GenerationRow]) -> JsonResponse:
    """Columns for the metrics that are asked for; without any, only their names."""
    metrics = request.GET.getlist("metric")[:MOST_METRICS]
    width = whole_number(request, "width") or 800
    steps = StepRange(
        first=whole_number(request, "from"), last=whole_number(request, "to"), width=max(1, min(width, MAX_WIDTH))
    )
    only = request.GET.getlist("run")
    chosen = [run for run in runs if not only or run.pk in only]
    series, left_out = series_of(chosen, metrics, steps)
    names = metric_names([run.pk for run in runs])
    return JsonResponse({"metrics": names, "series": series, "left_out": left_out})


@auth.api
@require_GET
@gzip_page
def experiment_curves(request: HttpRequest, project_id: str, experiment_id: str) -> HttpResponse:
    project = auth.visitor_for(request, project_id).project
    experiment = find_experiment(project, experiment_id)
    ensure_experiment_loaded(experiment)
    return answer_curves(request, list(experiment.generations.order_by("created", "name")))


@auth.api
@require_GET
@gzip_page  # numbers shrink to a third; they are no secret that a guess beside them could probe for
def run_curves(request: HttpRequest, project_id: str, run_id: str) -> HttpResponse:
    project = auth.visitor_for(request, project_id).project
    run = find_run(project, run_id)
    ensure_loaded(run)
    return answer_curves(request, [run])


@auth.api
@require_GET
def run_rollouts(request: HttpRequest, project_id: str, run_id: str) -> HttpResponse:
    """Rollouts of a run's evaluations, by the filters of the page; `from` and `limit` cut the list."""
    visitor = auth.visitor_for(request, project_id)
    run = find_run(visitor.project, run_id)
    ensure_loaded(run)
    found = select_rollouts(visitor.project, RolloutFilter.of(request.GET, run=run.pk))
    if not visitor.may_see_test_rows:
        # A rollout whose evaluation has not arrived may be of a test split.
        found = found.filter(eval__project=visitor.project).exclude(eval__split=TEST)
    begin = max(0, whole_number(request, "from") or 0)
    limit = max(1, min(whole_number(request, "limit") or 100, MOST_ROLLOUTS))
    rows = found.select_related("eval")[begin : begin + limit]
    return JsonResponse(
        {"n": found.count(), "from": begin, "rollouts": [read_transcript(row).as_dict() for row in rows]}
    )


PROJECT = "api/v1/projects/<str:project_id>"
urlpatterns: list[URLPattern] = [
    path(f"{PROJECT}/experiments/<str:experiment_id>/curves", experiment_curves),
    path(f"{PROJECT}/runs/<str:run_id>/curves", run_curves),
    path(f"{PROJECT}/runs/<str:run_id>/rollouts", run_rollouts),
]
