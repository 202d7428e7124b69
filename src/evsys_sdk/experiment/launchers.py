"""Runs in the experiment's own process: the launcher that is meant when none is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evsys_sdk.config.base import Params
from evsys_sdk.protocols import RunResult
from evsys_sdk.registry import register_launcher

if TYPE_CHECKING:
    from evsys_sdk.run.plan import RunPlan


@register_launcher("local")
class LocalLauncher:
    """Every run on its own thread, over backends that stay warm for the next."""

    class Config(Params): ...

    def execute(self, plan: RunPlan) -> RunResult:
        from evsys_sdk.run.runner import execute_run

        return execute_run(plan)

    def close(self) -> None:
        """Nothing to give back."""
