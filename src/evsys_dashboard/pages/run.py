"""The page of one run: how it ended, its curves, evaluations, checkpoints, warnings, error and log.

In: a `Generation` row. Out: the page. While the run continues, what it has logged so far; then its record too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import URLPattern, path
from django.utils.safestring import SafeString
from django.views.decorators.http import require_GET
from pydantic import ValidationError

from evsys_dashboard import auth
from evsys_dashboard.api.read import find_run
from evsys_dashboard.changes import current_cursor
from evsys_dashboard.curves import SYSTEM, first_curves_url, metric_names, scores_of_runs
from evsys_dashboard.follow import ensure_loaded
from evsys_dashboard.models import EvalRow, GenerationRow
from evsys_dashboard.pages.experiment import yaml_text
from evsys_dashboard.score_charts import score_plot
from evsys_sdk.format import count, score_text, shown
from evsys_sdk.record.models import RunRecord
from evsys_sdk.score_names import suite_label

FIRST_CURVES = 10
MOST_PLOTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalLine:
    """One evaluation in the table."""

    row: EvalRow
    label: str
    when: str
    scores: list[tuple[str, str]] = field(default_factory=list)


def read_run_record(run: GenerationRow) -> RunRecord | None:
    """The record of a run that has ended; None where there is none or where it is of no known form."""
    try:
        return RunRecord.model_validate(RunRecord.upgrade(dict(run.record))) if run.record else None
    except (ValidationError, TypeError, ValueError):
        return None


def eval_lines(rows: Sequence[EvalRow]) -> list[EvalLine]:
    """Evaluations by step, the finished weights last."""
    lines = []
    for one in sorted(rows, key=lambda row: (row.step is None, row.step or 0, row.split, row.name)):
        when = "final weights" if one.step is None else "untrained" if one.step == 0 else f"step {one.step:,}"
        scores = one.scores or [{"metric": key, "value": value} for key, value in (one.metrics or {}).items()]
        told = []
        for score in scores:
            value, low, high = (
                number if isinstance(number := score.get(key), int | float) and math.isfinite(number) else None
                for key in ("value", "low", "high")
            )
            text = str(score.get("value"))  # NaN is a word, and a client may have sent anything as a metric
            if value is not None:
                n_tasks = score.get("n_tasks") or 0
                counts = [count(n_tasks, "task")] if n_tasks else []
                n_errors, n_rollouts = score.get("n_errors") or 0, score.get("n_rollouts") or 0
                text = score_text(value, low, high, counts=counts, n_errors=n_errors, n_rollouts=n_rollouts)
            told.append((str(score.get("metric")), text))
        stage = f", stage {one.stage}" if one.stage else ""
        lines.append(EvalLine(row=one, label=suite_label(one.split, one.name), when=f"{when}{stage}", scores=told))
    return lines


def score_plots(run: GenerationRow) -> list[tuple[str, SafeString]]:
    """Scores that were measured at more than one step."""
    found = scores_of_runs([run.pk]).get(run.pk)
    plots = []
    for key, points in sorted(found.by_key.items()) if found else ():
        if len(points) > 1:
            is_share = all(0 <= point.value <= 1 for point in points)
            plots.append((key, score_plot(points, title=f"{key} over steps with 95 % intervals", is_share=is_share)))
    return plots[:MOST_PLOTS]


def number_text(value: object) -> str:
    """A count as a count, any other number as scores are written, a word (`NaN`) as it is."""
    if isinstance(value, float) and math.isfinite(value):
        return shown(value) if value != int(value) or abs(value) <= 1 else f"{int(value):,}"
    return f"{value:,}" if isinstance(value, int) else str(value)


@auth.page
@require_GET
def run_page(request: HttpRequest, project_id: str, run_id: str) -> HttpResponse:
    project = auth.project_for(request, project_id)
    # Before the rows are read: what changes in between is then asked for again, and never missed.
    since = current_cursor(project)
    run = find_run(project, run_id)
    ensure_loaded(run)
    record = read_run_record(run)
    names = metric_names([run.pk])
    system = [name for name in names if name.startswith(SYSTEM)]
    plots = score_plots(run)
    scored = scores_of_runs([run.pk]).get(run.pk)
    curves = [name for name in names if not scored or name not in scored.by_key]  # those are drawn or listed above
    stopped = record.stopped_at if record else None
    first_metrics = [name for name in curves if name not in system][:FIRST_CURVES]
    curves_url = f"/api/v1/projects/{quote(project.pk, safe='')}/runs/{quote(run.pk, safe='')}/curves"
    context: dict[str, Any] = {
        "project": project,
        "section": "lab",
        "run": run,
        "experiment": run.experiment,
        "record": record,
        "evals": eval_lines(list(run.evals.all())),
        "plots": plots,
        "metrics": names,
        "first_metrics": first_metrics,
        "system": system,
        "curves_url": curves_url,
        "first_curves": first_curves_url(curves_url, first_metrics),
        "settings_yaml": yaml_text(settings)
        if (settings := run.run_config or (record.hparams if record else {}))
        else "",
        "seconds": record.seconds if record else run.ended - run.created if run.ended else None,
        "error": run.error or (record.error if record else "") or "",
        "traceback": (record.traceback if record else "") or "",
        "warnings": record.warnings if record else [],
        "stopped": stopped,
        "numbers": [(name, number_text(value)) for name, value in sorted((run.metrics or {}).items())],
        "is_live": run.status == "running",
        "since": since,
        "siblings": run.experiment.generations.defer("log_tail", "record").order_by("created", "name")[:200],
    }
    return render(request, "dashboard/run.html", context)


urlpatterns: list[URLPattern] = [path("p/<str:project_id>/runs/<str:run_id>", run_page)]
