"""What loggers for other people's dashboards have in common: a tracker per run, fed from the run's events.

In: the hooks of `protocols.Callback`. Out: calls of a `Tracker`, one per run and attempt: numbers under their names at
their steps, texts, an end. A run that is taken up again is told from its beginning, to a new tracker, so that no point
is there twice. In-loop scores keep their step; scores after training are called `final/...`, so that they are not taken
for another point of a curve.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

from evsys_sdk.protocols import EvalResult, RunContext, RunResult
from evsys_sdk.record.callbacks import eval_metrics
from evsys_sdk.record.run_dir import ATTEMPTS


class Tracker(Protocol):
    """Where do this run's numbers go?"""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def note(self, name: str, text: str) -> None: ...
    def end(self, result: RunResult | None) -> None:
        """The run is over; None when nobody heard what came of it."""
        ...


class TrackingCallback:
    """A callback that opens a tracker per run (`_open`) and keeps it to itself: arms run at the same time."""

    def __init__(self) -> None:
        self._trackers: dict[str, Tracker] = {}
        self._steps: dict[str, int] = {}
        """The last step of each run."""
        self._lock = threading.Lock()
        self._experiment: Any = None

    def _open(self, ctx: RunContext) -> Tracker:
        raise NotImplementedError

    def on_experiment_start(self, experiment: Any) -> None:
        self._experiment = experiment

    def on_run_start(self, ctx: RunContext) -> None:
        tracker = self._open(ctx)
        with self._lock:
            self._trackers[ctx.run_id], self._steps[ctx.run_id] = tracker, 0
        hypothesis = getattr(getattr(ctx.config, "metadata", None), "hypothesis", "")
        if hypothesis:
            tracker.note("hypothesis", str(hypothesis))

    def on_train_start(self, ctx: RunContext, total_steps: int | None) -> None:
        if total_steps is not None:
            self._note(ctx, "total_steps", str(total_steps))

    def on_step(self, ctx: RunContext, step: int, metrics: dict[str, float]) -> None:
        self._steps[ctx.run_id] = step
        self._log(ctx, metrics, step)

    def on_eval(self, ctx: RunContext, result: EvalResult) -> None:
        values = eval_metrics(result)
        if result.step is None:
            values = {f"final/{name}": value for name, value in values.items()}
        step = self._steps.get(ctx.run_id, 0) if result.step is None else result.step
        if values:
            self._log(ctx, values, step)
        if result.error:
            self._note(ctx, f"not scored: {result.split}/{result.name}", result.error)

    def on_checkpoint(self, ctx: RunContext, step: int, path: str) -> None:
        self._note(ctx, "last_checkpoint", f"step {step}: {path}")

    def on_train_end(self, ctx: RunContext, metrics: dict[str, float]) -> None:
        final = {f"final/{name}": value for name, value in metrics.items()}
        if final:
            self._log(ctx, final, self._steps.get(ctx.run_id, 0))

    def on_run_end(self, ctx: RunContext, result: RunResult) -> None:
        self._end(ctx.run_id, result)

    def on_experiment_end(self, results: list[RunResult]) -> None:
        told = {result.run_id: result for result in results}
        for run_id in list(self._trackers):
            self._end(run_id, told.get(run_id))  # a run that broke off did not come to its own end

    def _log(self, ctx: RunContext, metrics: Mapping[str, float], step: int) -> None:
        tracker = self._trackers.get(ctx.run_id)
        if tracker is not None:  # its opening failed, and was reported
            tracker.log(metrics, step)

    def _note(self, ctx: RunContext, name: str, text: str) -> None:
        tracker = self._trackers.get(ctx.run_id)
        if tracker is not None:
            tracker.note(name, text)

    def _end(self, run_id: str, result: RunResult | None) -> None:
        with self._lock:
            tracker = self._trackers.pop(run_id, None)
            self._steps.pop(run_id, None)
        if tracker is not None:
            tracker.end(result)


def run_name(ctx: RunContext) -> str:
    """The run's name within its experiment."""
    return str(ctx.extras.get("run_name") or ctx.run_id.rpartition("/")[2])


def group_name(ctx: RunContext) -> str:
    """The arm that a seed's run belongs to."""
    return run_name(ctx).removesuffix(f"__s{ctx.seed}")


def attempt_number(ctx: RunContext) -> int:
    """1, or more for a run that was begun or taken up anew in its directory."""
    attempts = ctx.output_dir / ATTEMPTS
    earlier = [entry for entry in attempts.iterdir() if entry.name.isdigit()] if attempts.is_dir() else []
    return len(earlier) + 1


def settings_of(ctx: RunContext) -> dict[str, Any]:
    """What the run was asked to do, for the dashboard's table of settings."""
    about = {"seed": ctx.seed, "model_name": ctx.extras.get("model_name"), "attempt": attempt_number(ctx)}
    return {**(ctx.extras.get("run_config") or {}), **{key: value for key, value in about.items() if value is not None}}


def flat(value: Any, place: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`."""
    if not isinstance(value, Mapping) or not value:
        return {place: value} if place else {}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= flat(inner, f"{place}.{key}" if place else str(key))
    return found
