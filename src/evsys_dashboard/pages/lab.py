"""Lab: everything that was tried, newest first.

In: a project and the list that its URL describes (`experiment_filter`). Out: the page, its rows alone for a page that
is open (`rows`: the next hundred, or those that changed), and the list as CSV or JSON. Rows come from the summary
columns; no record and no point is read.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, StreamingHttpResponse
from django.shortcuts import render
from django.urls import URLPattern, path
from django.utils.safestring import SafeString
from django.views.decorators.http import require_safe

from evsys_dashboard import auth
from evsys_dashboard.changes import current_cursor
from evsys_dashboard.experiment_filter import (
    COLUMNS,
    GRAMMAR,
    GROUPS,
    PAGE,
    SHOWN_FIELDS,
    Column,
    ListPage,
    RowGroup,
    find_experiments,
    list_page,
    read_query,
)
from evsys_dashboard.models import ExperimentRow, Project
from evsys_dashboard.spreadsheet import cell
from evsys_dashboard.summary import trend_values
from evsys_dashboard.svg import spark_line
from evsys_sdk.format import count, shown, span

SHOWN_TAGS = 6
LONGEST_NAME = 160
LONGEST_HYPOTHESIS = 240
# A status that a reader must know before any verdict.
DECISIVE = ("running", "failed", "invalid", "cancelled", "interrupted", "unreadable")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabRow:
    """One experiment as the list shows it."""

    experiment: ExperimentRow
    group: RowGroup | None = None

    @property
    def badge(self) -> str:
        """supported, refuted, undecided, or a status that says more; empty for a completed experiment of which the
        reader is the judge."""
        one = self.experiment
        return one.status if one.status in DECISIVE else one.verdict

    @property
    def status(self) -> str:
        """The status, where it is not the badge and a verdict does not say enough."""
        one = self.experiment
        return "" if self.badge == one.status or (self.badge and one.status == "completed") else one.status

    @property
    def is_verdict(self) -> bool:
        """Whether the badge is a verdict and not a status, which looks different."""
        return self.badge == self.experiment.verdict

    @property
    def value(self) -> str:
        found = self.experiment.best_value
        return "" if found is None else shown(found) if math.isfinite(found) else str(found)

    @property
    def interval(self) -> str:
        return span(self.experiment.best_low, self.experiment.best_high).strip()

    @property
    def counts(self) -> str:
        """`48 tasks, 3 seeds`."""
        one = self.experiment
        parts = [count(one.n_tasks, "task")] if one.n_tasks else []
        parts += [count(one.n_seeds, "seed")] if one.n_seeds else []
        return ", ".join(parts)

    @property
    def spark(self) -> SafeString:
        return spark_line(trend_values(self.experiment.spark), self.trend[:60])

    @property
    def trend(self) -> str:
        """What the small line shows: `loss`, or the name of the score; empty where there is no line."""
        found = self.experiment.spark
        if not isinstance(found, dict):  # a row of an earlier version
            return ""
        return str(found.get("of") or "") if len(trend_values(found)) > 1 else ""

    @property
    def tags(self) -> list[str]:
        found = self.experiment.tags
        return [str(tag) for tag in found[:SHOWN_TAGS]] if isinstance(found, list) else []

    @property
    def n_more_tags(self) -> int:
        found = self.experiment.tags
        return max(0, len(found) - SHOWN_TAGS) if isinstance(found, list) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """A column's heading, with what a click on it asks for."""

    column: Column
    url: str
    direction: str


def _context(project: Project, page: ListPage) -> dict[str, object]:
    query = page.query
    return {
        "project": project,
        "section": "lab",
        "page": page,
        "query": query,
        "rows": [LabRow(experiment=row, group=group) for group, row in page.rows],
        "shows": {column.key for column in query.columns},
        "width": len(query.columns) + 1,
        "more_url": "" if page.next_start is None else query.url(**{"from": page.next_start}),
        "longest_name": LONGEST_NAME,
        "longest_hypothesis": LONGEST_HYPOTHESIS,
    }


@require_safe
@auth.page
def home(request: HttpRequest) -> HttpResponse:
    """The visitor's newest project; a page that says how to get one where there is none."""
    newest = auth.projects_of(request).first()
    if newest is not None:
        return HttpResponseRedirect(f"/p/{quote(newest.id, safe='')}/")
    return render(request, "dashboard/no_project.html")


@require_safe
@auth.page
def lab(request: HttpRequest, project: str) -> HttpResponse:
    """The page."""
    found = auth.project_for(request, project)
    cursor = current_cursor(found, [ExperimentRow])  # where the live page begins to ask
    page = list_page(found, read_query(request.GET))
    query = page.query
    context = _context(found, page) | {
        "headings": [
            Heading(column=one, url=query.sort_url(one) if one.sort else "", direction=query.direction(one))
            for one in query.columns
        ],
        "columns": COLUMNS,
        "groups": GROUPS,
        "grammar": GRAMMAR,
        "cursor": cursor,
        "is_empty": not page.total and not ExperimentRow.objects.filter(project=found).exists(),
        "csv_url": f"experiments.csv{query.url()}",
        "json_url": f"experiments.json{query.url()}",
        "plain_url": query.url(q=""),
        "server_url": f"{request.scheme}://{request.get_host()}",
    }
    return render(request, "dashboard/lab.html", context)


@require_safe
@auth.page
def rows(request: HttpRequest, project: str) -> HttpResponse:
    """Rows alone: the next page of the list, or of the experiments named by `id` those that the filter lets through."""
    found = auth.project_for(request, project)
    query = read_query(request.GET)
    # Bounded, as each id is a parameter of the statement, of which SQLite takes 32,766.
    ids = request.GET.getlist("id")[: 10 * PAGE]
    if ids:
        matching, problems = find_experiments(found, query)
        chosen: list[tuple[RowGroup | None, ExperimentRow]] = [(None, row) for row in matching.filter(pk__in=ids)]
        page = ListPage(query=query, total=len(chosen), rows=chosen, problems=problems)
    else:
        page = list_page(found, query)
    return render(request, "dashboard/lab_rows.html", _context(found, page))


@require_safe
@auth.page
def download_csv(request: HttpRequest, project: str) -> StreamingHttpResponse:
    """The whole filtered list as CSV."""
    found, _ = find_experiments(auth.project_for(request, project), read_query(request.GET))

    class Line:
        """A file for `csv.writer` that gives each line back."""

        def write(self, text: str) -> str:
            return text

    def lines() -> Iterator[str]:
        writer = csv.writer(Line())
        yield writer.writerow(SHOWN_FIELDS)
        # In parts: a list of thousands is never whole in memory.
        for row in found.values_list(*SHOWN_FIELDS).iterator(chunk_size=500):
            yield writer.writerow([cell(value) for value in row])

    answer = StreamingHttpResponse(lines(), content_type="text/csv; charset=utf-8")
    answer["Content-Disposition"] = 'attachment; filename="experiments.csv"'
    return answer


@require_safe
@auth.page
def download_json(request: HttpRequest, project: str) -> StreamingHttpResponse:
    """The whole filtered list as JSON, one experiment per line."""
    found, _ = find_experiments(auth.project_for(request, project), read_query(request.GET))

    def lines() -> Iterator[str]:
        # By hand, because `json.dumps` of the whole list would hold every experiment in memory.
        before = "["
        for row in found.values(*SHOWN_FIELDS).iterator(chunk_size=500):
            yield before + "\n" + json.dumps(row, ensure_ascii=False)
            before = ","
        yield "\n]\n" if before == "," else "[]\n"

    answer = StreamingHttpResponse(lines(), content_type="application/json")
    answer["Content-Disposition"] = 'attachment; filename="experiments.json"'
    return answer


urlpatterns: list[URLPattern] = [
    path("", home, name="home"),
    path("p/<str:project>/", lab, name="lab"),
    path("p/<str:project>/rows", rows, name="lab-rows"),
    path("p/<str:project>/experiments.csv", download_csv, name="lab-csv"),
    path("p/<str:project>/experiments.json", download_json, name="lab-json"),
]
