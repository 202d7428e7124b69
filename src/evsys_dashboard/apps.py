"""The Django application."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig


class DashboardConfig(AppConfig):
    name = "evsys_dashboard"
    label = "dashboard"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django.db.models.signals import pre_migrate

        from evsys_dashboard import points  # noqa: F401  (it deletes the points of a curve that is deleted)

        def drop_views(**how: Any) -> None:
            from evsys_dashboard.api import query

            query.drop_views(**how)

        pre_migrate.connect(drop_views, sender=self, weak=False)
