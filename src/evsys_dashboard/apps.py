"""The Django application."""

from __future__ import annotations

from django.apps import AppConfig


class DashboardConfig(AppConfig):
    name = "evsys_dashboard"
    label = "dashboard"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from evsys_dashboard import points  # noqa: F401  (it deletes the points of a curve that is deleted)
