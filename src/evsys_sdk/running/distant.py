"""A run that is carried out in another process than the experiment's.

In: a run's plan, as an `Order` that can be sent. Out: there, the run carried out with stand-ins for what stays with the
experiment (`errands`). The folders that the experiment writes to must be the same for both.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evsys_sdk.config.models import ExperimentConfig, RunConfig
from evsys_sdk.config.project import import_extensions
from evsys_sdk.errors import EvsysError, RunLocked
from evsys_sdk.protocols import RunResult
from evsys_sdk.running.errands import OVER, DistantBudget, DistantCallbacks, DistantJournal, Line
from evsys_sdk.running.interrupts import StopFlag

if TYPE_CHECKING:
    from evsys_sdk.running.workbench import RunPlan

LOCK_SECONDS = 60.0
"""A worker that was lost may go on for a while before it notices; its run directory is waited for so long."""
LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A plan without what stays with the experiment."""

    experiment: ExperimentConfig
    run: RunConfig
    index: int
    run_dir: Path
    journal: Path
    fresh: bool
    max_steps: int | None
    max_tasks: int | None
    contents: Mapping[str, str]
    ignored: tuple[str, ...]
    pause_at: int | None

    @classmethod
    def of(cls, plan: RunPlan, *, fresh: bool) -> Order:
        return cls(
            experiment=plan.experiment,
            run=plan.run,
            index=plan.index,
            run_dir=plan.run_dir,
            journal=plan.journal.path,
            fresh=fresh,
            max_steps=plan.max_steps,
            max_tasks=plan.max_tasks,
            contents=plan.contents,
            ignored=plan.ignored,
            pause_at=plan.pause_at,
        )

    def plan(self, line: Line, stop: StopFlag) -> RunPlan:
        """The plan, with a line to the experiment in place of what stayed there."""
        from evsys_sdk.running.workbench import RunPlan

        callbacks: Any = DistantCallbacks(line)
        return RunPlan(
            experiment=self.experiment,
            run=self.run,
            index=self.index,
            run_dir=self.run_dir,
            callbacks=callbacks,
            stop=stop,
            journal=DistantJournal(line, self.journal),
            fresh=self.fresh,
            max_steps=self.max_steps,
            max_tasks=self.max_tasks,
            budget=DistantBudget(line),
            contents=self.contents,
            ignored=self.ignored,
            pause_at=self.pause_at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How an order came out."""

    result: RunResult
    stopped: bool
    """The run asked for the whole experiment to stop."""


def work(order: Order, line: Line, stop: StopFlag, *, where: str, lock_seconds: float = LOCK_SECONDS) -> Done:
    """Carry out an order in this process."""
    plan = order.plan(line, stop)
    line.run_id = plan.run_id
    try:
        if not order.journal.exists():
            raise EvsysError(
                f"{where} does not see {order.journal.parent.absolute()}: runs on other machines need an output_dir "
                "on a disk that all of them share"
            )
        import_extensions(order.experiment)
        result = _carry_out(plan, lock_seconds)
        result.extras["carried_out_by"] = where
        line.ask(OVER)  # its answer says that everything told before has arrived
        return Done(result=result, stopped=stop.event.is_set() and result.status == "cancelled")
    except BaseException:
        line.tell(OVER)
        raise


def _carry_out(plan: RunPlan, lock_seconds: float) -> RunResult:
    from evsys_sdk.runner import carry_out

    until = time.monotonic() + lock_seconds
    while True:
        try:
            return carry_out(plan)
        except RunLocked:
            if time.monotonic() > until:
                raise
            plan.stop.event.wait(LOOK_SECONDS)
            plan.stop.check()
