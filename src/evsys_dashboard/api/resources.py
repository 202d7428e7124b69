"""The read API for agents and scripts: experiments, runs, suites, changes; and the OpenAPI document of all of it.

In: GET requests with a key or a session. Out: JSON, each answer a pydantic model of this module, so that the document
at `/api/openapi.json` and the answers cannot differ. Lists are paged by a cursor, newest first. Curves and rollouts are
answered by `api.read`, SQL by `api.query`.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from django.db.models import F, Q, QuerySet
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from pydantic import BaseModel, ConfigDict, Field

from evsys_dashboard import auth, suites
from evsys_dashboard.auth import Refusal, Visitor
from evsys_dashboard.changes import changes_since, current_cursor
from evsys_dashboard.models import EvalRow, ExperimentRow, GenerationRow, Project, SuiteVersion
from evsys_dashboard.points import number_of, wire_number
from evsys_dashboard.suites import number_in
from evsys_sdk import __version__

MAX_PAGE = 500
DEFAULT_PAGE = 50
Stored = dict[str, Any]
Number = float | Literal["NaN", "Infinity", "-Infinity"]


class ApiModel(BaseModel):
    """Part of an answer. Additional keys are an error: the document lists all of them."""

    model_config = ConfigDict(extra="forbid")


class RefusalAnswer(ApiModel):
    error: str
    """What is wrong, and what to do."""


class ProjectAnswer(ApiModel):
    id: str
    name: str
    created: float


class ProjectsAnswer(ApiModel):
    projects: list[ProjectAnswer]


class ExperimentSummary(ApiModel):
    """What lists show of an experiment."""

    id: str
    name: str
    status: str
    """running, completed, partial, failed, cancelled, interrupted, invalid, unreadable."""
    hypothesis: str
    verdict: str
    """supported, refuted, undecided, or empty."""
    tags: list[Any]
    metric: str
    best_arm: str
    best_value: float | None
    best_low: float | None
    best_high: float | None
    """95 % interval of the best arm."""
    standing: str
    """How sure it is that `best_arm` won, such as `better than the baseline`; empty where nothing was compared."""
    training_mark: str
    """A warning where the best arm's score is of tasks that it trained on, such as `on training rows`; else empty."""
    n_tasks: int | None
    n_seeds: int | None
    n_arms: int
    n_runs: int
    n_errors: int
    cost_usd: float | None
    seconds: float | None
    model: str
    backend: str
    algorithm: str
    parent_experiment_id: str
    created: float
    """Seconds since the epoch, as every time here."""
    ended: float | None
    updated: float


class ExperimentsAnswer(ApiModel):
    experiments: list[ExperimentSummary]
    next: str | None
    """Pass it as `cursor` for the next page; null at the end."""


class RunSummary(ApiModel):
    """What lists show of a run: one seed of an arm."""

    id: str
    experiment_id: str
    name: str
    arm: str
    seed: int | None
    status: str
    last_step: int | None
    error: str
    created: float
    ended: float | None
    updated: float


class ExperimentAnswer(ExperimentSummary):
    """One experiment with all that is known of it."""

    description: str
    conclusion: str
    notes: list[Any]
    """What people said: {kind, text, by, ts}."""
    config: Stored
    metadata: Stored
    record: Stored | None
    """The whole record (docs/record.md), once there is a result."""
    runs: list[RunSummary]


class RunsAnswer(ApiModel):
    runs: list[RunSummary]
    next: str | None


class MetricSummary(ApiModel):
    name: str
    n: int
    """Points."""
    last_step: int | None
    last: Number | None
    low: float | None
    high: float | None


class EvalAnswer(ApiModel):
    """One evaluation of a run."""

    id: str
    name: str
    split: str
    stage: str
    step: int | None
    """0 is the untrained model; null the final weights."""
    metrics: Stored
    scores: list[Any]
    """metric, value, low, high, n_tasks, n_errors, ..."""
    breakdown: Stored
    benchmark_id: str
    error: str
    seconds: float | None
    n_rollouts: int
    created: float


class RunAnswer(RunSummary):
    """One run with all that is known of it."""

    recipe_kind: str
    run_config: Stored
    metrics: Stored
    artifacts: Stored
    checkpoints: list[Any]
    conclusion: str
    record: Stored | None
    curves: list[MetricSummary]
    evals: list[EvalAnswer]


class SuiteAnswer(ApiModel):
    """One version of a dataset or a benchmark."""

    id: str
    ref: str
    """What a config calls it: `dataset_id`, or a benchmark's `id`."""
    kind: Literal["dataset", "benchmark"]
    name: str
    version: str
    split: str
    n_rows: int | None
    n_bytes: int | None
    sha256: str
    lineage: Stored
    description: str
    complete: bool
    """Whether its rows are here; false for a suite that was only recorded."""
    created: float


class SuitesAnswer(ApiModel):
    suites: list[SuiteAnswer]


class RowsAnswer(ApiModel):
    from_: int = Field(alias="from")
    total: int
    next: int | None
    """Pass it as `from` for the next page; null at the end."""
    rows: list[str]
    """Each the JSON text of one row, as it was uploaded."""


class ChangesAnswer(ApiModel):
    """What changed since a cursor."""

    cursor: str
    experiments: list[str]
    runs: list[str]
    more: bool
    """Whether to ask again at once: there was more than fits into one answer."""


class CurveSeries(ApiModel):
    """One metric of one run, in columns. Of long curves the smallest and the largest value per pixel of `width`."""

    run: str
    name: str
    """Of the run."""
    arm: str
    seed: int | None
    metric: str
    n: int
    """Points in the range that was asked for."""
    step: list[int]
    value: list[Number]
    low: list[float | None] | None = None
    high: list[float | None] | None = None
    """95 % intervals, of scores alone."""


class CurvesAnswer(ApiModel):
    metrics: list[str]
    """All that can be asked for; without `metric` in the question, these alone are answered."""
    series: list[CurveSeries]
    left_out: int
    """Series beyond the limit of one answer; name fewer metrics, or runs by `run`."""


class ToolCallAnswer(ApiModel):
    name: str
    arguments: str


class MessageAnswer(ApiModel):
    """One entry of a transcript."""

    role: str
    """user, assistant, tool, system."""
    text: str
    tool_calls: list[ToolCallAnswer]
    pictures: list[str]
    """Data URLs."""
    n_prompt_tokens: int | None
    n_tokens: int | None
    """Tokens that the model read and wrote."""


class RolloutAnswer(ApiModel):
    """One try of the model at one task."""

    id: str
    task_id: str
    outcome: str
    """passed, failed, or the status of one that errored."""
    status: str
    reward: float | None
    messages: list[MessageAnswer]
    expected: str
    error: str
    verifier: dict[str, str]
    """What the verifier said."""
    metadata: dict[str, str]
    seconds: float | None
    cost_usd: float | None
    n_tokens: int | None


class RolloutsAnswer(ApiModel):
    n: int
    """Rollouts that the filter means."""
    from_: int = Field(alias="from")
    rollouts: list[RolloutAnswer]


class QueryRequest(ApiModel):
    sql: str
    """One SELECT over the views experiments, runs, evals, metrics and rollouts."""


class QueryAnswer(ApiModel):
    columns: list[str]
    rows: list[list[Any]]
    truncated: bool
    """Whether rows beyond the limit were left out."""
    seconds: float


# Rows of the database as answers.


def summarize_experiment(row: ExperimentRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ExperimentSummary.model_fields}


def summarize_run(row: GenerationRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in RunSummary.model_fields}


def describe_experiment(row: ExperimentRow) -> ExperimentAnswer:
    own = ("description", "conclusion", "notes", "config", "metadata", "record")
    runs = row.generations.order_by("arm", "seed", "created", "id")
    return ExperimentAnswer(
        **summarize_experiment(row),
        **{name: getattr(row, name) for name in own},
        runs=[RunSummary(**summarize_run(run)) for run in runs],
    )


def describe_run(row: GenerationRow) -> RunAnswer:
    own = ("recipe_kind", "run_config", "metrics", "artifacts", "checkpoints", "conclusion", "record")
    curves = []
    for key in row.metric_keys.order_by("name"):
        last = number_of(key.last_kind, key.last)
        curves.append(
            MetricSummary(
                name=key.name,
                n=key.n,
                last_step=key.last_step,
                last=None if last is None else wire_number(last),  # type: ignore[arg-type]
                low=key.low,
                high=key.high,
            )
        )
    evals = [describe_eval(one) for one in row.evals.order_by(F("step").asc(nulls_last=True), "created", "id")]
    return RunAnswer(
        **summarize_run(row), **{name: getattr(row, name) for name in own}, curves=curves, evals=evals
    )  # fmt: skip


def describe_eval(row: EvalRow) -> EvalAnswer:
    return EvalAnswer(**{name: getattr(row, name) for name in EvalAnswer.model_fields})


# Paging.


def page_of[T: (ExperimentRow, GenerationRow)](
    found: QuerySet[T], request: HttpRequest
) -> tuple[list[T], str | None]:  # fmt: skip
    """One page, newest first, and the cursor of the next. Rows that arrive in between move nothing."""
    limit = max(1, min(number_in(request, "limit", DEFAULT_PAGE), MAX_PAGE))
    text = request.GET.get("cursor", "")
    if text:
        created, identifier = read_cursor(text)
        # From the last row on instead of by a number: an offset would repeat a row for each that arrived meanwhile.
        found = found.filter(Q(created__lt=created) | Q(created=created, id__lt=identifier))
    # One more than asked for: whether it is there says whether there is a next page.
    rows = list(found.order_by("-created", "-id")[: limit + 1])
    if len(rows) <= limit:
        return rows, None
    last = rows[limit - 1]
    return rows[:limit], make_cursor(last.created, str(last.pk))


def make_cursor(created: float, identifier: str) -> str:
    return base64.urlsafe_b64encode(json.dumps([created, identifier]).encode()).decode()


def read_cursor(text: str) -> tuple[float, str]:
    try:
        created, identifier = json.loads(base64.urlsafe_b64decode(text.encode("ascii")))
        if not (isinstance(created, int | float) and math.isfinite(created) and isinstance(identifier, str)):
            raise ValueError
        if "\x00" in identifier:
            raise ValueError
        return float(created), identifier
    except (ValueError, TypeError, UnicodeError):
        raise Refusal(422, "cursor: this is none of ours; leave it out to begin at the newest") from None


def text_in(request: HttpRequest, name: str) -> str:
    """A parameter of the query string; NUL is nothing that a database compares with."""
    text = request.GET.get(name, "")
    if "\x00" in text:
        raise Refusal(422, f"{name}: a NUL character is no text")
    return text


# Routes.


def answer(model: BaseModel) -> HttpResponse:
    return JsonResponse(model.model_dump(mode="json", by_alias=True))


def list_projects(request: HttpRequest) -> HttpResponse:
    """The projects that the key or the person may see."""
    if "Authorization" in request.headers:
        # A key has one project, whatever its owner may see.
        found: Sequence[Project] = [auth.check_key(request.headers["Authorization"], "", "read").project]
    elif not request.user.is_authenticated:
        raise Refusal(401, "log in, or send an API key: `Authorization: Bearer evk_...`")
    else:
        found = list(auth.projects_of(request))
    projects = [ProjectAnswer(id=one.pk, name=one.name, created=one.created) for one in found]
    return answer(ProjectsAnswer(projects=projects))


def list_experiments(visitor: Visitor, request: HttpRequest) -> HttpResponse:
    """Experiments, newest first. Filters: status, verdict, tag, model, backend, algorithm, metric, q (in name or
    hypothesis), min_value and max_value of the best arm, since (updated at or after). status and tag may repeat."""
    found = ExperimentRow.objects.filter(project=visitor.project)
    for name in ("verdict", "model", "backend", "algorithm", "metric"):
        if text := text_in(request, name):
            found = found.filter(**{name: text})
    if statuses := [text for text in request.GET.getlist("status") if text and "\x00" not in text]:
        found = found.filter(status__in=statuses)
    if text := text_in(request, "q"):
        found = found.filter(Q(name__icontains=text) | Q(hypothesis__icontains=text))
    bounds = {"min_value": "best_value__gte", "max_value": "best_value__lte", "since": "updated__gte"}
    for name, condition in bounds.items():
        if text := text_in(request, name):
            try:
                number = float(text)
            except ValueError:
                number = math.nan
            if not math.isfinite(number):
                raise Refusal(422, f"{name}={text[:40]!r}: give a number")
            found = found.filter(**{condition: number})
    for tag in request.GET.getlist("tag"):
        if "\x00" in tag:
            raise Refusal(422, "tag: a NUL character is no text")
        # Tags are a JSON list, which SQLite cannot search: ids of those that have it. Tags of a project are few kB.
        tagged = ExperimentRow.objects.filter(project=visitor.project).values_list("pk", "tags")
        found = found.filter(pk__in=[pk for pk, tags in tagged if tag in tags])
    # A record may have megabytes, and the summary needs nothing of it.
    rows, after = page_of(found.defer("record", "config", "figures", "field_times", "conclusion"), request)
    summaries = [ExperimentSummary(**summarize_experiment(row)) for row in rows]
    return answer(ExperimentsAnswer(experiments=summaries, next=after))


def show_experiment(visitor: Visitor, request: HttpRequest, experiment_id: str) -> HttpResponse:
    """One experiment with its record and its runs."""
    row = ExperimentRow.objects.filter(project=visitor.project, pk=experiment_id).first()
    if row is None:
        raise Refusal(404, f"there is no experiment {experiment_id!r} in this project")
    return answer(describe_experiment(row))


def list_runs(visitor: Visitor, request: HttpRequest) -> HttpResponse:
    """Runs, newest first. Filters: experiment, arm, status."""
    found = GenerationRow.objects.filter(project=visitor.project)
    for name, column in (("experiment", "experiment_id"), ("arm", "arm"), ("status", "status")):
        if text := text_in(request, name):
            found = found.filter(**{column: text})
    rows, after = page_of(found.defer("record", "run_config", "log_tail", "field_times"), request)
    return answer(RunsAnswer(runs=[RunSummary(**summarize_run(row)) for row in rows], next=after))


def show_run(visitor: Visitor, request: HttpRequest, run_id: str) -> HttpResponse:
    """One run with its evaluations and a summary of its curves."""
    row = GenerationRow.objects.filter(project=visitor.project, pk=run_id).first()
    if row is None:
        raise Refusal(404, f"there is no run {run_id!r} in this project")
    return answer(describe_run(row))


def list_suites(visitor: Visitor, request: HttpRequest) -> HttpResponse:
    """Datasets and benchmarks with their versions, newest first. Filters: kind, name."""
    found = suites.visible_suites(visitor.project, kind=text_in(request, "kind"), name=text_in(request, "name"))
    return answer(SuitesAnswer(suites=[SuiteAnswer(**suites.describe_suite(one)) for one in found]))


def _suite(visitor: Visitor, request: HttpRequest, suite_id: str) -> SuiteVersion:
    if "\x00" in suite_id:
        raise Refusal(404, "there is no such dataset or benchmark in this project")
    return suites.find_suite(visitor.project, suite_id, text_in(request, "kind") or None)


def show_suite(visitor: Visitor, request: HttpRequest, suite_id: str) -> HttpResponse:
    """One version by its id or reference, or the newest version of a name. `kind` decides between namesakes."""
    return answer(SuiteAnswer(**suites.describe_suite(_suite(visitor, request, suite_id))))


def suite_rows(visitor: Visitor, request: HttpRequest, suite_id: str) -> HttpResponse:
    """Rows of a complete version, page by page. Rows of a test split are refused to an agent-scoped key."""
    suite = _suite(visitor, request, suite_id)
    suites.refuse_test_rows(visitor, suite)
    if not suite.complete:
        raise Refusal(404, f"{suite_id!r} is only recorded here: its rows were never uploaded")
    page = suites.page_of_rows(suite, number_in(request, "from", 0), number_in(request, "limit", 100))
    return answer(RowsAnswer(**page))


def list_changes(visitor: Visitor, request: HttpRequest) -> HttpResponse:
    """Ids of experiments and runs that changed after `since` (a cursor of an earlier answer; empty: from now on)."""
    text = text_in(request, "since")
    if not text:
        # A first question has nothing to catch up with: the cursor is all it needs.
        cursor = current_cursor(visitor.project)
        return answer(ChangesAnswer(cursor=cursor, experiments=[], runs=[], more=False))
    found = changes_since(visitor.project, text)
    return answer(
        ChangesAnswer(cursor=found.cursor, experiments=found.experiments, runs=found.runs, more=found.has_more)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One route of the API, as the URL map and the document have it."""

    path: str
    """With `<str:name>` for parts."""
    view: Callable[..., HttpResponse] | None
    """None for a route that another module answers."""
    model: type[BaseModel]
    query: tuple[str, ...] = ()
    body: type[BaseModel] | None = None
    summary: str = ""

    @property
    def template(self) -> str:
        """`/api/v1/projects/{project}/runs`."""
        return "/" + self.path.replace("<str:", "{").replace(">", "}")


V1 = "api/v1/projects/<str:project>"
PAGE = ("limit", "cursor")
ROUTES = (
    Route(path="api/v1/projects", view=list_projects, model=ProjectsAnswer),
    Route(
        path=f"{V1}/experiments",
        view=list_experiments,
        model=ExperimentsAnswer,
        query=(
            "status",
            "verdict",
            "tag",
            "model",
            "backend",
            "algorithm",
            "metric",
            "q",
            "min_value",
            "max_value",
            "since",
            *PAGE,
        ),
    ),
    Route(path=f"{V1}/experiments/<str:experiment_id>", view=show_experiment, model=ExperimentAnswer),
    Route(path=f"{V1}/runs", view=list_runs, model=RunsAnswer, query=("experiment", "arm", "status", *PAGE)),
    Route(path=f"{V1}/runs/<str:run_id>", view=show_run, model=RunAnswer),
    Route(
        path=f"{V1}/experiments/<str:experiment_id>/curves",
        view=None,
        model=CurvesAnswer,
        query=("metric", "run", "from", "to", "width"),
        summary="Curves of all runs of an experiment. metric and run may repeat; from and to are steps.",
    ),
    Route(
        path=f"{V1}/runs/<str:run_id>/curves",
        view=None,
        model=CurvesAnswer,
        query=("metric", "from", "to", "width"),
        summary="Curves of one run. metric may repeat; from and to are steps.",
    ),
    Route(
        path=f"{V1}/runs/<str:run_id>/rollouts",
        view=None,
        model=RolloutsAnswer,
        query=("eval", "status", "passed", "task", "key", "q", "from", "limit"),
        summary="Rollouts of a run's evaluations by task, without those of a test split for an agent-scoped key. "
        "passed=1 or 0; key=topic:sums for a value of metadata; q for words in task, question or answer.",
    ),
    Route(path=f"{V1}/suites", view=list_suites, model=SuitesAnswer, query=("kind", "name")),
    Route(path=f"{V1}/suites/<str:suite_id>", view=show_suite, model=SuiteAnswer, query=("kind",)),
    Route(path=f"{V1}/suites/<str:suite_id>/rows", view=suite_rows, model=RowsAnswer, query=("kind", "from", "limit")),
    Route(path=f"{V1}/changes", view=list_changes, model=ChangesAnswer, query=("since",)),
    Route(
        path=f"{V1}/query",
        view=None,
        model=QueryAnswer,
        body=QueryRequest,
        summary="Read-only SQL over views that hold only this project, with limits on time, rows and bytes.",
    ),
)


def _guard(route: Route) -> Callable[..., HttpResponse]:
    view = route.view
    assert view is not None

    # Before the view, so that no view can forget the method, the key or the project.
    @auth.api
    def respond(request: HttpRequest, project: str | None = None, **parts: str) -> HttpResponse:
        if request.method not in ("GET", "HEAD"):
            raise Refusal(405, f"{request.method} is not possible here; use GET")
        if any("\x00" in part for part in (project or "", *parts.values())):
            raise Refusal(404, "a NUL character is in no id")
        if project is None:
            return view(request)
        return view(auth.visitor_for(request, project), request, **parts)

    return respond


def openapi_document() -> dict[str, Any]:
    """The OpenAPI 3.1 document of the read API."""
    from pydantic.json_schema import models_json_schema

    models: set[type[BaseModel]] = {RefusalAnswer, *(route.model for route in ROUTES)}
    models |= {route.body for route in ROUTES if route.body}
    listed = sorted(models, key=lambda model: model.__name__)
    _, shapes = models_json_schema(
        [(model, "serialization") for model in listed], ref_template="#/components/schemas/{model}"
    )

    def content(model: type[BaseModel]) -> dict[str, Any]:
        return {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}

    paths: dict[str, Any] = {}
    for route in ROUTES:
        names = [part[1:-1] for part in route.template.split("/") if part.startswith("{")]
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ] + [{"name": name, "in": "query", "required": False, "schema": {"type": "string"}} for name in route.query]
        refusal = {"description": "Refused, with the reason.", "content": content(RefusalAnswer)}
        operation: dict[str, Any] = {
            "summary": " ".join((route.summary or (route.view.__doc__ if route.view else "") or "").split()),
            "operationId": route.view.__name__ if route.view else "query",
            "parameters": parameters,
            "responses": {
                "200": {"description": "The answer.", "content": content(route.model)},
                **dict.fromkeys(("401", "403", "404", "422"), refusal),
            },
        }
        if route.body:
            operation["requestBody"] = {"required": True, "content": content(route.body)}
        paths[route.template] = {"post" if route.body else "get": operation}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "evsys dashboard",
            "version": __version__,
            "description": "Read API. Send `Authorization: Bearer <key>`; keys are made under Settings > API keys.",
        },
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": shapes.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def openapi(request: HttpRequest) -> HttpResponse:
    return JsonResponse(openapi_document())


urlpatterns = [
    path("api/openapi.json", openapi),
    *(path(route.path, _guard(route)) for route in ROUTES if route.view is not None),
]
