"""What happens around a training loop while it turns: callbacks, in-loop evaluation, stopping.

In: the loop's events. Out: callback calls, evaluations on snapshots that overlap training, log lines, and a
`Cancelled` when the user wants to stop. An evaluation that breaks is a result with an error, never the run's.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

from evsys_sdk.protocols import EvalResult, LogStore, RunContext, Snapshot
from evsys_sdk.record.callbacks import CallbackList, eval_metrics
from evsys_sdk.running.interrupts import StopFlag
from evsys_sdk.running.scoring import Scoring


@dataclass(slots=True)
class StoppableLogStore:
    """The run's log store as the algorithm sees it: any log call is also a moment to stop at."""

    store: LogStore
    stop: StopFlag
    first_step: int = 0
    """Steps of earlier stages of a chain, so that a later stage's curve begins where theirs ended."""
    last_step: int = 0

    def log_scalar(self, name: str, value: float, step: int) -> None:
        self.stop.check()
        self.last_step = max(self.last_step, self.first_step + step)
        self.store.log_scalar(name, value, self.first_step + step)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.stop.check()
        self.last_step = max(self.last_step, self.first_step + step)
        self.store.log_metrics(metrics, self.first_step + step)

    def log_hyperparams(self, hparams: dict[str, Any]) -> None:
        self.store.log_hyperparams(hparams)

    def log_artifact(self, name: str, path: str) -> None:
        self.store.log_artifact(name, path)

    def close(self) -> None:
        self.store.close()


@dataclass(slots=True)
class LoopHooks:
    """`protocols.Hooks` for one run."""

    ctx: RunContext
    callbacks: CallbackList
    scoring: Scoring
    stop: StopFlag
    results: list[EvalResult] = field(default_factory=list)
    stage: str | None = None
    first_step: int = 0
    """Steps of earlier stages: steps count on through a chain, so that its curves do not overlap."""
    steps: int = 0
    """Steps done so far."""
    pending: set[asyncio.Task[None]] = field(default_factory=set)

    def begin_stage(self, name: str | None) -> None:
        """A stage of a chain starts; its own step 1 comes after the last step of the stage before."""
        store = self.ctx.log_store
        logged = store.last_step if isinstance(store, StoppableLogStore) else 0
        self.stage, self.first_step = name, max(self.steps, logged)
        if isinstance(store, StoppableLogStore):
            store.first_step = self.first_step

    def of_this_stage(self) -> list[EvalResult]:
        return [result for result in self.results if result.stage == self.stage]

    def train_start(self, total_steps: int | None) -> None:
        self.callbacks.on_train_start(self.ctx, total_steps)

    async def step_end(self, step: int, metrics: dict[str, float], snapshot: Snapshot) -> None:
        self.steps = self.first_step + step
        self.callbacks.on_step(self.ctx, self.steps, metrics)
        due = self.scoring.due(step)
        if due:
            sampler = await snapshot()
            for entry in due:
                task = asyncio.create_task(self._score(entry, sampler, self.steps))
                self.pending.add(task)
                task.add_done_callback(self.pending.discard)
        self.stop.check()

    async def _score(self, entry: Any, sampler: Any, step: int) -> None:
        self.add(await self.scoring.score(entry, sampler, step=step))

    def add(self, result: EvalResult) -> None:
        """Keep, log and announce a finished evaluation."""
        result = replace(result, stage=self.stage)
        self.results.append(result)
        values = eval_metrics(result)
        if values:
            step = self.steps if result.step is None else result.step
            self.ctx.log_store.log_metrics(values, step - self.first_step)
        self.callbacks.on_eval(self.ctx, result)

    def checkpoint(self, step: int, path: str) -> None:
        self.callbacks.on_checkpoint(self.ctx, self.first_step + step, path)

    async def train_end(self, metrics: dict[str, float]) -> None:
        while self.pending:
            await asyncio.gather(*self.pending)
        self.callbacks.on_train_end(self.ctx, metrics)

    def should_stop(self) -> str | None:
        return self.callbacks.stop_reason(self.ctx.run_id)
