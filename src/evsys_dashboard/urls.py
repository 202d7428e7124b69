"""Every URL of the dashboard, by the module that answers it."""

from __future__ import annotations

from importlib import import_module

from django.urls import URLPattern, URLResolver

MODULES = (
    "auth",  # /login, /login/<token>, /logout
    "ingest_api",  # /api/dashboard/api/sdk/..., but for the hot routes of `asgi`
    "api.read",  # /api/v1/.../curves, /api/v1/.../rollouts
    "api.resources",  # /api/v1/... without curves and rollouts, /api/openapi.json
    "api.query",  # /api/v1/projects/<project>/query
    "suites",  # upload and download of datasets and benchmarks
    "pages.lab",
    "pages.progress",
    "pages.experiment",
    "pages.compare",
    "pages.run",
    "pages.rollouts",
    "pages.suites",
    "pages.settings",
)

urlpatterns: list[URLPattern | URLResolver] = [
    pattern for name in MODULES for pattern in import_module(f"evsys_dashboard.{name}").urlpatterns
]
