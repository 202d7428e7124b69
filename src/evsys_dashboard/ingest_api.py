"""The routes by which clients create and change experiments, runs, evaluations and benchmarks.

In: requests as `evsys_sdk.record.dashboard.wire` has them, with a key that may write. Out: rows, through `ingest`, and
`{"id": ...}` once they are committed. Steps and predictions, of which there are thousands, are answered by `asgi`.
"""

from __future__ import annotations

from collections.abc import Callable

from django.db import DataError
from django.db.models import Model
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path

from evsys_dashboard import auth, ingest
from evsys_dashboard.auth import Refusal
from evsys_dashboard.models import ApiKey
from evsys_dashboard.request_body import JsonDict, id_in, parse_body
from evsys_sdk.record.dashboard.wire import API_PREFIX

ROOT = f"{API_PREFIX.removeprefix('/')}/sdk"


def _write(request: HttpRequest, method: str, save: Callable[[ApiKey, JsonDict], Model]) -> HttpResponse:
    """Check the key and the body, and save it; answered after the commit."""
    if request.method != method:
        raise Refusal(405, f"{request.method} is not possible here; use {method}")
    key = auth.key_for(request, "write")
    body = parse_body(request.body, request.headers.get("Content-Encoding", ""))
    try:
        with ingest.writing():
            row = save(key, body)
    except DataError as exc:  # e.g. 1e999, which is JSON and no number of any database
        raise Refusal(422, f"the database cannot store this: {exc}") from None
    return JsonResponse({"id": row.pk})


@auth.api
def experiments(request: HttpRequest) -> HttpResponse:
    def save(key: ApiKey, body: JsonDict) -> Model:
        return ingest.save_experiment(key.project, id_in(body), body, create=True)

    return _write(request, "POST", save)


@auth.api
def experiment(request: HttpRequest, experiment_id: str) -> HttpResponse:
    def save(key: ApiKey, body: JsonDict) -> Model:
        return ingest.save_experiment(key.project, experiment_id, body, create=False)

    return _write(request, "PATCH", save)


@auth.api
def generations(request: HttpRequest) -> HttpResponse:
    def save(key: ApiKey, body: JsonDict) -> Model:
        return ingest.save_generation(key.project, id_in(body), body, create=True)

    return _write(request, "POST", save)


@auth.api
def generation(request: HttpRequest, generation_id: str) -> HttpResponse:
    def save(key: ApiKey, body: JsonDict) -> Model:
        return ingest.save_generation(key.project, generation_id, body, create=False)

    return _write(request, "PATCH", save)


@auth.api
def evals(request: HttpRequest, generation_id: str) -> HttpResponse:
    def save(key: ApiKey, body: JsonDict) -> Model:
        # Scores are what an agent is judged by: it may add evaluations and change none.
        may_replace = key.scope != ApiKey.Scope.AGENT
        run = ingest.generation_of(key.project, generation_id)
        return ingest.save_eval(key.project, run, body, may_replace=may_replace)

    return _write(request, "POST", save)


@auth.api
def benchmarks(request: HttpRequest) -> HttpResponse:
    return _write(request, "POST", lambda key, body: ingest.save_benchmark(key.project, body))


urlpatterns = [
    path(f"{ROOT}/experiments/", experiments),
    path(f"{ROOT}/experiments/<str:experiment_id>/", experiment),
    path(f"{ROOT}/generations/", generations),
    path(f"{ROOT}/generations/<str:generation_id>/", generation),
    path(f"{ROOT}/generations/<str:generation_id>/eval/", evals),
    path(f"{ROOT}/benchmarks/", benchmarks),
]
