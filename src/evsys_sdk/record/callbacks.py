"""Who wants to know: the fan-out of a run's events, and the small built-in listeners.

In: the hooks of `protocols.Callback`, called by the runner and the loop. Out: each hook of each callback called
in order; one that raises is reported and the others are called. What the callbacks make of it is theirs.

A callback stops a run early through `stop_reason`: a plain attribute speaks for every run the callback serves,
a method `stop_reason(run_id)` for one; one that decides by scores says so with `waits_for_scores = True`, and one that
leaves runs as they are with `only_watches = True`. Arms run at the same time in threads, so the built-ins keep their
notes per `ctx.run_id`.
"""

from __future__ import annotations

import csv
import inspect
import io
import math
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from evsys_sdk import files, registry
from evsys_sdk.config.base import Params
from evsys_sdk.errors import FOREIGN, Cancelled, EvsysError, closest
from evsys_sdk.format import visible
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import (
    CheckpointEvent,
    EvalEvent,
    EvalResult,
    ExperimentEndEvent,
    ExperimentStartEvent,
    RunContext,
    RunEndEvent,
    RunResult,
    RunStartEvent,
    StepEvent,
    TrainEndEvent,
    TrainStartEvent,
)
from evsys_sdk.record.lines import StepOrder
from evsys_sdk.registry import better_direction, register_callback
from evsys_sdk.score_names import names_split, resolve_one, score_key, step_metric

EVENTS: dict[str, type] = {
    "on_experiment_start": ExperimentStartEvent,
    "on_run_start": RunStartEvent,
    "on_train_start": TrainStartEvent,
    "on_step": StepEvent,
    "on_checkpoint": CheckpointEvent,
    "on_eval": EvalEvent,
    "on_train_end": TrainEndEvent,
    "on_run_end": RunEndEvent,
    "on_experiment_end": ExperimentEndEvent,
}
"""Hook -> the event that it gets; the event's fields are the arguments of the positional form, in order."""
HOOKS = tuple(EVENTS)


class RunHooks:
    """The hooks of a run, each passed to every listener."""

    def _call_hooks(self, hook: str, ctx: RunContext, *args: object) -> None:
        raise NotImplementedError

    def on_run_start(self, ctx: RunContext) -> None:
        self._call_hooks("on_run_start", ctx)

    def on_train_start(self, ctx: RunContext, total_steps: int | None) -> None:
        self._call_hooks("on_train_start", ctx, total_steps)

    def on_step(self, ctx: RunContext, step: int, metrics: dict[str, float]) -> None:
        self._call_hooks("on_step", ctx, step, metrics)

    def on_checkpoint(self, ctx: RunContext, step: int, path: str) -> None:
        self._call_hooks("on_checkpoint", ctx, step, path)

    def on_eval(self, ctx: RunContext, result: EvalResult) -> None:
        self._call_hooks("on_eval", ctx, result)

    def on_train_end(self, ctx: RunContext, metrics: dict[str, float]) -> None:
        self._call_hooks("on_train_end", ctx, metrics)

    def on_run_end(self, ctx: RunContext, result: RunResult) -> None:
        self._call_hooks("on_run_end", ctx, result)

    def doing(self, ctx: RunContext, what: str) -> None:
        """What the run is busy with now, for displays: `loading model`, `scoring`."""
        self._call_hooks("doing", ctx, what)


class CallbackList(RunHooks):
    """Several callbacks as one: `(kind, instance)` pairs, asked in order. Itself a `Callback`."""

    def __init__(self, members: Iterable[tuple[str, object]] = ()):
        self.members = list(members)
        self._failures: dict[tuple[int, str, str], tuple[str, int]] = {}
        self._lock = threading.Lock()
        self._take_events: set[tuple[int, str]] = set()
        for index, (kind, callback) in enumerate(self.members):
            self._take_events |= {(index, hook) for hook in EVENTS if _takes_event(getattr(callback, hook, None))}
            for name in dir(type(callback)):
                if name.startswith("on_") and name not in EVENTS and (near := closest(name, EVENTS)):
                    get_logger(__name__).warning("callback %s: nothing calls %r; closest hook: %s", kind, name, near)

    @classmethod
    def from_specs(cls, specs: Iterable[Any]) -> CallbackList:
        """From the config's `callbacks` list of `{kind, params}`."""
        return cls([(spec.kind, registry.callbacks.build(spec.kind, spec.params)) for spec in specs])

    def on_experiment_start(self, experiment: object) -> None:
        self._call_hooks("on_experiment_start", experiment)

    def on_experiment_end(self, results: list[RunResult]) -> None:
        self._call_hooks("on_experiment_end", results)

    def record_written(self, path: Path) -> None:
        """The experiment's record, its page and figures are on disk: for callbacks that send them elsewhere."""
        for index, (_, callback) in enumerate(self.members):
            take = getattr(callback, "record_written", None)
            if callable(take):
                self._call_hook(index, "record_written", take, path, run_id="")

    def stop_reason(self, run_id: str) -> str | None:
        """Why this run should stop early: the first reason any callback gives, or None."""
        for index, (kind, callback) in enumerate(self.members):
            reason = getattr(callback, "stop_reason", None)
            if callable(reason):
                reason = self._call_hook(index, "stop_reason", reason, run_id, run_id=run_id)
            if reason:
                return f"{kind}: {reason}"
        return None

    def waits_for_scores(self) -> bool:
        """Whether a callback decides by scores of the loop when a run stops: then each is waited for at its step, so
        that the same run stops at the same step however fast the scoring was."""
        return any(getattr(callback, "waits_for_scores", False) for _, callback in self.members)

    @property
    def errors(self) -> list[str]:
        """What went wrong in callbacks: one line per callback, hook and run, with how often."""
        with self._lock:
            return [self._describe(*key, *failure) for key, failure in self._failures.items()]

    def errors_of(self, run_id: str) -> list[str]:
        """The `errors` of one run."""
        with self._lock:
            return [self._describe(*key, *failure) for key, failure in self._failures.items() if key[2] == run_id]

    def _call_hooks(self, hook: str, about: object, *args: object) -> None:
        run_id = getattr(about, "run_id", "")
        for index, (_, callback) in enumerate(self.members):
            method = getattr(callback, hook, None)
            if method is None:
                continue
            if (index, hook) in self._take_events:
                self._call_hook(index, hook, method, EVENTS[hook](about, *args), run_id=run_id)
            else:
                self._call_hook(index, hook, method, about, *args, run_id=run_id)

    def _call_hook(self, index: int, hook: str, method: Any, *args: Any, run_id: str) -> Any:
        try:
            return method(*args)
        except Cancelled:
            raise
        except FOREIGN as exc:
            self._report((index, hook, run_id), exc)
            return None

    def _report(self, key: tuple[int, str, str], exc: BaseException) -> None:
        with self._lock:
            first, times = self._failures.get(key, (f"{type(exc).__name__}: {exc}", 0))
            self._failures[key] = (first, times + 1)
        if times == 0:  # a hook that fails at every step is said once, and counted in `errors`
            shown = None if isinstance(exc, EvsysError | OSError) else exc  # a full disk is nothing to debug
            get_logger(__name__).error("%s (the run continues)", self._describe(*key, first, 1), exc_info=shown)

    def _describe(self, index: int, hook: str, run_id: str, text: str, times: int) -> str:
        often = f", {times} times" if times > 1 else ""
        return f"callback {self.members[index][0]}.{hook} (run {run_id or '-'}{often}): {text}"


def _takes_event(hook: object) -> bool:
    """Whether a hook is written for an event object: its one parameter is called `event`."""
    try:
        return callable(hook) and list(inspect.signature(hook).parameters) == ["event"]
    except (TypeError, ValueError):  # a hook that is not written in Python
        return False


def steering(specs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Of callbacks as a config lists them, those that may change what a run does: kind -> params."""
    found: dict[str, object] = {}
    for spec in specs:
        if steers(spec["kind"]):
            again = sum(name.partition("[")[0] == spec["kind"] for name in found)
            found[f"{spec['kind']}[{again}]" if again else spec["kind"]] = spec.get("params") or {}
    return found


def steers(kind: str) -> bool:
    """Whether such a callback may stop or change a run. Any may whose class does not say of itself that it only
    watches: what a subclass adds is not known, nor is what a project's module says that is not at hand."""
    try:
        target = registry.callbacks.get(kind)
    except EvsysError:
        return True
    return not vars(target).get("only_watches", False) or hasattr(target, "stop_reason")


def eval_metrics(result: EvalResult) -> dict[str, float]:
    """Scores by their names in the logs: `val/<name>/<metric>`, or `eval/<metric>` for the run's own eval block."""
    return {
        score_key(result.split, result.name, score.metric): score.value
        for score in result.scores
        if score.value is not None
    }


@register_callback("print_progress")
class PrintProgress:
    """A plain line on stderr every `every` steps."""

    only_watches: ClassVar = True

    class Config(Params):
        every: int = Field(default=10, ge=1)
        """Steps between two lines."""

    def __init__(self, **params: Any):
        self.cfg = self.Config(**params)
        self._totals: dict[str, int | None] = {}

    def on_train_start(self, ctx: RunContext, total_steps: int | None) -> None:
        self._totals[ctx.run_id] = total_steps

    def on_step(self, ctx: RunContext, step: int, metrics: dict[str, float]) -> None:
        total = self._totals.get(ctx.run_id)
        if not ctx.replaying and (step % self.cfg.every == 0 or step == total):
            place = f"step {step}" if total is None else f"step {step}/{total}"
            numbers = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            print(f"{ctx.run_id}  {place}  {numbers}", file=sys.stderr, flush=True)

    def on_run_end(self, ctx: RunContext, result: RunResult) -> None:
        self._totals.pop(ctx.run_id, None)


@register_callback("csv_metrics")
class CsvMetrics:
    """`<run_dir>/logs/metrics.csv`: a row per step and per eval, a column per metric ever seen."""

    only_watches: ClassVar = True

    class Config(Params):
        file_name: str = "metrics.csv"
        """In the run directory."""

    def __init__(self, **params: Any):
        self.cfg = self.Config(**params)
        self._columns: dict[Path, list[str]] = {}
        self._orders: dict[Path, StepOrder] = {}
        self._lock = threading.Lock()

    def on_step(self, ctx: RunContext, step: int, metrics: dict[str, float]) -> None:
        self._add(ctx, step, metrics)

    def on_eval(self, ctx: RunContext, result: EvalResult) -> None:
        self._add(ctx, result.step, eval_metrics(result), score=f"{result.split}/{result.name}")

    def on_run_end(self, ctx: RunContext, result: RunResult) -> None:
        with self._lock:  # a run that resumes after a pause writes another file
            path = self._path(ctx)
            self._columns.pop(path, None)
            order = self._orders.pop(path, None)
            if order:
                order.settle(path, header=1)

    def _path(self, ctx: RunContext) -> Path:
        return ctx.output_dir / "logs" / self.cfg.file_name

    def _add(self, ctx: RunContext, step: int | None, metrics: dict[str, float], *, score: str = "") -> None:
        path, row = self._path(ctx), {"step": "" if step is None else step, **metrics}
        with self._lock:  # an eval may report while a step does
            self._orders.setdefault(path, StepOrder()).note(step, score)
            columns = self._columns.get(path)
            if columns is None and path.exists():  # of an earlier process
                with open(path, encoding="utf-8", newline="") as handle:
                    columns = next(csv.reader(handle), [])
            columns = columns or []
            fresh = [name for name in row if name not in columns]
            if fresh:  # the header is the first line, so a new column means a new file
                columns = self._columns[path] = columns + fresh
                with files.whole_file(path) as whole:
                    whole.write(_csv_line(columns, {name: name for name in columns}).encode())
                    if path.exists():
                        with open(path, encoding="utf-8", newline="") as old:
                            whole.writelines(_csv_line(columns, line).encode() for line in csv.DictReader(old))
            with open(path, "a", encoding="utf-8", newline="") as handle:
                handle.write(_csv_line(columns, row))


def _csv_line(columns: list[str], row: dict[str, Any]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerow(row)
    return visible(text.getvalue())


@register_callback("early_stopping")
class EarlyStopping:
    """Stop a run when `metric` has not got better by `min_delta` in `patience` observations."""

    class Config(Params):
        metric: str = "loss"
        """A step metric, or a validation score made during training, such as `pass@1` or `val/<name>/<metric>`."""
        mode: Literal["min", "max"] | None = None
        """Whether more or less is better; by default as the metric itself says: less of `loss`, more of `pass@1`."""
        patience: int = Field(default=3, ge=1)
        """Evaluations without an improvement before the run stops."""
        min_delta: float = Field(default=0.0, ge=0)
        """A change that is smaller is no improvement."""

        @field_validator("metric")
        @classmethod
        def _no_test_set(cls, metric: str) -> str:
            if names_split(metric, "test"):
                raise ValueError("a test score must not decide when training stops; use a val/ score or a step metric")
            return metric

    def __init__(self, **params: Any):
        self.cfg = self.Config(**params)
        self._watches: dict[str, _Watch] = {}
        self._score: str | None = None
        """The key of the validation score that `metric` means, if it means one."""

    @property
    def waits_for_scores(self) -> bool:
        return self._score is not None or self.cfg.metric.startswith(("val/", "eval/"))

    def on_experiment_start(self, experiment: Any) -> None:
        self._score = resolve_one(self.cfg.metric, experiment.config.metadata.in_loop_scores)

    def on_train_start(self, ctx: RunContext, total_steps: int | None) -> None:
        self._watches[ctx.run_id] = _Watch()

    def on_step(self, ctx: RunContext, step: int, metrics: dict[str, float]) -> None:
        if self._score is None:  # a score that a benchmark lists comes before a step's number of the same name
            self._see(ctx, step, metrics, step_metric(self.cfg.metric))

    def on_eval(self, ctx: RunContext, result: EvalResult) -> None:
        if result.step is not None and result.split != "test":
            self._see(ctx, result.step, eval_metrics(result), self._score or self.cfg.metric)

    def on_train_end(self, ctx: RunContext, metrics: dict[str, float]) -> None:
        watch = self._watches.get(ctx.run_id)
        if watch is not None and watch.best is None and not watch.worse:
            seen = ", ".join(sorted(watch.names)) or "none"
            raise EvsysError(f"early_stopping watched {self.cfg.metric!r}, which never appeared; seen: {seen}")

    def on_run_end(self, ctx: RunContext, result: RunResult) -> None:
        self._watches.pop(ctx.run_id, None)

    def stop_reason(self, run_id: str) -> str | None:
        watch = self._watches.get(run_id)
        if watch is None or watch.worse < self.cfg.patience:
            return None
        best = "no number yet" if watch.best is None else f"best {watch.best:.6g} at step {watch.best_step}"
        return f"{self.cfg.metric} did not improve in {watch.worse} observations ({best})"

    def _see(self, ctx: RunContext, step: int, metrics: dict[str, float], key: str) -> None:
        watch = self._watches.setdefault(ctx.run_id, _Watch())
        watch.names.update(metrics)
        if key in metrics:
            value = metrics[key] * (1 if better_direction(self.cfg.metric, self.cfg.mode) == "min" else -1)
            watch.observe(step, metrics[key], value, self.cfg.min_delta)


class _Watch:
    """What early stopping has seen of one run."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.best: float | None = None
        self.best_step = 0
        self.worse = 0
        """Observations since the best one."""
        self._lowest = math.inf

    def observe(self, step: int, value: float, cost: float, min_delta: float) -> None:
        # Compared with the best so far, not with the last observation: many changes below `min_delta` add up in the
        # end.
        if cost < self._lowest - min_delta:  # False for NaN: a broken number is no progress
            self.best, self.best_step, self.worse, self._lowest = value, step, 0, cost
        else:
            self.worse += 1
