"""What a run in another process asks of the experiment's own: journal, budget and callbacks stay there.

In: calls by name, put on a `Line` by the stand-ins below and taken off it by whoever connects the two processes. Out:
their answers, from the `Desk` in the experiment's process. Nothing here knows how the processes are connected.
Journal entries are told and not waited for: they arrive in order, and those that a killed worker did not get rid of
are as if it had been killed a moment earlier.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from evsys_sdk.errors import Cancelled, EvsysError
from evsys_sdk.protocols import RunContext, RunResult
from evsys_sdk.record.callbacks import HOOKS, RunHooks
from evsys_sdk.record.journal import Journal, RunJournal
from evsys_sdk.running.budget import Budget, BudgetSpent
from evsys_sdk.running.workbench import RunPlan

OVER = "over"
"""The last call of a run."""
TOLD_OF = ("backend_kind", "model_name", "run_name", "run_config", "tags", "train_rows", "n_train_rows")
"""What callbacks find in `ctx.extras`; the rest are the worker's own tools."""

STEPS = {"budget.begin_step": 1, "budget.end_step": -1, "budget.give_back_step": -1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Something to be done in the experiment's process."""

    run_id: str
    what: str
    args: tuple[Any, ...]
    number: int | None = None
    """What the answer is sent under; None where nobody waits for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    value: Any = None
    error: BaseException | None = None


class Line:
    """The worker's end of the connection."""

    def __init__(self) -> None:
        self.run_id = ""
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._waiting: dict[int, Future[Any]] = {}
        self._numbers = count()

    def tell(self, what: str, *args: Any) -> None:
        self._calls.put(Call(run_id=self.run_id, what=what, args=args))

    def ask(self, what: str, *args: Any) -> Any:
        """The answer; raises what the call raised there."""
        number, answer = next(self._numbers), Future[Any]()
        self._waiting[number] = answer
        self._calls.put(Call(run_id=self.run_id, what=what, args=args, number=number))
        return answer.result()

    def calls(self, seconds: float) -> list[Call]:
        """What has been asked and told since the last time; waits so long for the first."""
        found = []
        try:
            found.append(self._calls.get(timeout=seconds))
            while True:
                found.append(self._calls.get_nowait())
        except queue.Empty:
            return found

    def answer(self, number: int, answer: Answer) -> None:
        waiting = self._waiting.pop(number)
        if answer.error is not None:
            waiting.set_exception(answer.error)
        else:
            waiting.set_result(answer.value)


def sendable(error: Exception) -> Exception:
    """The error as one that every process can read."""
    for kind in (BudgetSpent, Cancelled, EvsysError):
        if isinstance(error, kind):
            return kind(str(error))
    return EvsysError(f"{type(error).__name__}: {error}")


class DistantJournal(Journal):
    """The experiment's journal, from a process that does not have it."""

    def __init__(self, line: Line, path: Path):
        self.path, self._line = path, line

    def begin(self, run: str, fingerprint: str) -> RunJournal:
        return RunJournal(self, run, self._line.ask("journal.begin", run, fingerprint))

    def write(self, statement: str, values: tuple[Any, ...]) -> None:
        self._line.tell("journal.write", statement, values)

    def sync(self) -> None:
        self._line.ask("journal.sync")  # calls arrive in order: what was told before is synced too

    def read(self, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self._line.ask("journal.read", query, values)
        return rows


class DistantBudget(Budget):
    """The experiment's budget, likewise."""

    __slots__ = ("_line",)

    def __init__(self, line: Line):
        super().__init__()
        self._line = line

    def begin_run(self, run_id: str) -> None:
        self._line.ask("budget.begin_run", run_id)

    def begin_step(self) -> None:
        self._line.ask("budget.begin_step")

    def end_step(self, tokens: float) -> None:
        self._line.tell("budget.end_step", tokens)

    def give_back_step(self) -> None:
        self._line.tell("budget.give_back_step")

    def pay(self, usd: float) -> None:
        self._line.tell("budget.pay", usd)


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """A run's context as callbacks are to see it; `extras` is None where they have not changed."""

    stage: str | None
    start_from: str | None
    resume: bool
    retelling: bool
    extras: dict[str, Any] | None


class DistantCallbacks(RunHooks):
    """The experiment's callbacks, likewise: each hook is called there, with a context of theirs."""

    def __init__(self, line: Line):
        self._line = line
        self._told: list[Any] | None = None
        self._waits: bool | None = None

    def stop_reason(self, run_id: str) -> str | None:
        reason: str | None = self._line.ask("callbacks.stop_reason", run_id)
        return reason

    def waits_for_scores(self) -> bool:
        if self._waits is None:
            self._waits = self._line.ask("callbacks.waits_for_scores")
        return bool(self._waits)

    def errors_of(self, run_id: str) -> list[str]:
        errors: list[str] = self._line.ask("callbacks.errors_of", run_id)
        return errors

    def _tell(self, hook: str, ctx: RunContext, *args: Any) -> None:
        for method, given in self._line.ask(f"callbacks.{hook}", self._news(ctx), *args):
            getattr(ctx.log_store, method)(*given)

    def _news(self, ctx: RunContext) -> News:
        rows = ctx.extras.get("train_rows")  # there may be a million of them: sent once for each stage
        known = self._told is not None and self._told is rows
        extras = None if known else {key: ctx.extras[key] for key in TOLD_OF if key in ctx.extras}
        self._told = rows
        return News(
            stage=ctx.stage, start_from=ctx.start_from, resume=ctx.resume, retelling=ctx.retelling, extras=extras
        )


class CollectedLogs:
    """The log store that callbacks see: what they log is sent to the worker, which has the real one."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def log_scalar(self, name: str, value: float, step: int) -> None:
        self.calls.append(("log_scalar", (name, value, step)))

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append(("log_metrics", (metrics, step)))

    def log_hyperparams(self, hparams: dict[str, Any]) -> None:
        self.calls.append(("log_hyperparams", (hparams,)))

    def log_artifact(self, name: str, path: str) -> None:
        self.calls.append(("log_artifact", (name, path)))

    def close(self) -> None:
        """Whoever opened the real one closes it."""

    def take(self) -> list[tuple[str, tuple[Any, ...]]]:
        taken, self.calls = self.calls, []
        return taken


class _Elsewhere:
    """A tool that only the worker has."""

    def __init__(self, what: str):
        self._what = what

    def __getattr__(self, name: str) -> Any:
        raise EvsysError(f"{self._what} is with the worker that carries out the run; callbacks cannot reach it")


@dataclass(slots=True)
class Desk:
    """Does in the experiment's process what a run elsewhere asks for."""

    plan: RunPlan
    begun: bool = False
    """Whether the worker has come as far as its own attempt in the journal."""
    over: bool = False
    steps_begun: int = 0
    logs: CollectedLogs = field(default_factory=CollectedLogs)
    ctx: RunContext | None = None
    announced: bool = False
    """Whether the callbacks have heard that the run began."""
    broken: Exception | None = None
    """What went wrong with a call that nobody waited for; the next one that somebody waits for says so."""

    def handle(self, call: Call) -> Answer | None:
        """Do it; the answer if one is waited for."""
        try:
            if self.broken is not None and call.number is not None:
                raise self.broken
            value = self._do(call)
        except Exception as exc:
            if call.number is not None:
                return Answer(error=sendable(exc))
            self.broken = exc
            return None
        return None if call.number is None else Answer(value=value)

    def _do(self, call: Call) -> Any:
        place, _, name = call.what.partition(".")
        if place == "callbacks" and name in (*HOOKS, "doing"):
            return self._call_back(name, *call.args)
        if call.what == "journal.begin":
            self.begun = True
            return self.plan.journal.begin(*call.args).attempt
        if call.what == OVER:
            self.over = True
            return None
        method: Callable[..., Any] = getattr(getattr(self.plan, place), name)
        found = method(*call.args)
        self.steps_begun += STEPS.get(call.what, 0)
        return found

    def _call_back(self, hook: str, news: News, *args: Any) -> list[tuple[str, tuple[Any, ...]]]:
        ctx = self._context(news)
        self.announced = self.announced or hook == "on_run_start"
        getattr(self.plan.callbacks, hook)(ctx, *args)
        return self.logs.take()

    def _context(self, news: News) -> RunContext:
        plan = self.plan
        if self.ctx is None:
            self.ctx = RunContext(
                run_id=plan.run_id,
                output_dir=plan.run_dir,
                config=plan.experiment,
                data_store=_Elsewhere("ctx.data_store"),
                log_store=self.logs,
                backend=_Elsewhere("ctx.backend"),
                seed=plan.run.seed,
                max_steps=plan.max_steps,
            )
        self.ctx.stage, self.ctx.start_from = news.stage, news.start_from
        self.ctx.resume, self.ctx.retelling = news.resume, news.retelling
        if news.extras is not None:
            self.ctx.extras.update(news.extras)
        return self.ctx

    def worker_is_lost(self) -> None:
        """What it had begun and not ended is given back, and callbacks hear that the run ends here; it may start again,
        and then they hear of its steps again."""
        for _ in range(self.steps_begun):
            self.plan.budget.give_back_step()
        if self.ctx is not None and self.announced:
            lost = RunResult(run_id=self.plan.run_id, status="cancelled", error="its worker was lost")
            self.plan.callbacks.on_run_end(self.ctx, lost)
        self.steps_begun, self.ctx, self.broken = 0, None, None
