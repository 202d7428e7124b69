"""One run's log and hooks as a phase of it sees them.

In: what a phase reports, its steps counted from 1. Out: the same to the run's own log store and hooks, the steps
counted on from the phases before and the metrics named after the phase.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from evsys_sdk.protocols import Hooks, KeptWeights, LogStore, Snapshot


@dataclass(slots=True, kw_only=True)
class PhaseSteps:
    """Where a phase stands."""

    name: str
    first: int
    """Steps of the phases before."""
    done: int = 0
    """Steps of this one."""

    def reached(self, step: int) -> None:
        self.done = max(self.done, step)

    def named(self, metrics: dict[str, float]) -> dict[str, float]:
        return {f"{self.name}/{key}": value for key, value in metrics.items()}


@dataclass(slots=True)
class PhaseLog:
    """The run's log store as one phase sees it."""

    store: LogStore
    phase: PhaseSteps

    def log_scalar(self, name: str, value: float, step: int) -> None:
        self.log_metrics({name: value}, step)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.phase.reached(step)
        self.store.log_metrics(self.phase.named(metrics), self.phase.first + step)

    def log_hyperparams(self, hparams: dict[str, Any]) -> None:
        self.store.log_hyperparams({f"{self.phase.name}/{key}": value for key, value in hparams.items()})

    def log_artifact(self, name: str, path: str) -> None:
        self.store.log_artifact(f"{self.phase.name}/{name}", path)

    def close(self) -> None:
        """The store is the run's, which closes it."""


@dataclass(slots=True)
class PhaseHooks:
    """The loop's line to the outside as one phase sees it."""

    hooks: Hooks
    phase: PhaseSteps

    def train_start(self, total_steps: int | None) -> None:
        self.hooks.train_start(None if total_steps is None else self.phase.first + total_steps)

    def step_start(self, step: int) -> None:
        self.hooks.step_start(self.phase.first + step)

    async def step_end(self, step: int, metrics: dict[str, float], snapshot: Snapshot) -> None:
        self.phase.reached(step)
        await self.hooks.step_end(self.phase.first + step, self.phase.named(metrics), snapshot)

    def checkpoint(self, step: int, path: str, *, planned: bool = True) -> None:
        self.hooks.checkpoint(self.phase.first + step, path, planned=planned)

    def flush(self) -> None:
        self.hooks.flush()

    def recorded_steps(self) -> int:
        return max(0, self.hooks.recorded_steps() - self.phase.first)

    async def resumed(self, last: KeptWeights) -> None:
        self.phase.reached(last.step)
        await self.hooks.resumed(
            replace(last, step=self.phase.first + last.step, metrics=self.phase.named(last.metrics))
        )

    def best(self, metric: str, mode: Literal["max", "min"], *, after: int = 0) -> tuple[int, float] | None:
        found = self.hooks.best(metric, mode, after=self.phase.first + after)
        return (found[0] - self.phase.first, found[1]) if found else None

    async def train_end(self, metrics: dict[str, float]) -> None:
        await self.hooks.train_end(self.phase.named(metrics))

    def should_stop(self) -> str | None:
        return self.hooks.should_stop()
