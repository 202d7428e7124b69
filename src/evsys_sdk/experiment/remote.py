"""A run in another process than the experiment's: journal, budget and callbacks stay with the experiment.

In: a `RemoteRunSpec`, and an `RpcConnection` on which stand-ins put calls by name. Out: the result; an `RpcServer` in
the experiment's process answers the calls. Nothing here knows how the processes are connected (`ray.py` does).
Journal writes are sent without waiting for an answer: they arrive in order, and those that a killed worker did not
send are as if it had been killed a moment earlier.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evsys_sdk.config.load import plain
from evsys_sdk.config.project import import_extensions
from evsys_sdk.errors import Cancelled, EvsysError, RunLocked
from evsys_sdk.protocols import RunContext, RunResult
from evsys_sdk.record.callbacks import HOOKS, RunHooks
from evsys_sdk.record.journal import Journal, RunJournal
from evsys_sdk.redaction import learn_from_settings
from evsys_sdk.run.stop import StopFlag

if TYPE_CHECKING:
    from evsys_sdk.run.plan import RunPlan

LOCK_SECONDS = 60.0
"""A lost worker may run for a while before it notices; the next one waits so long for its run directory."""
LOCK_POLL_SECONDS = 0.5
STAYS = frozenset(["callbacks", "stop", "journal", "inputs", "budget"])
"""Fields of a plan that do not leave the experiment's process."""
OVER = "over"
"""The last call of a run."""
EXTRAS = ("backend_kind", "model_name", "run_name", "run_config", "tags", "train_rows", "n_train_rows")
"""What callbacks see of `ctx.extras`; the rest are the worker's own tools."""
LOG_METHODS = frozenset(["log_scalar", "log_metrics", "log_hyperparams", "log_artifact"])
STEPS = {"budget.begin_step": 1, "budget.end_step": -1, "budget.give_back_step": -1}
"""By how much a call changes the number of steps that a worker is in the middle of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcCall:
    """A method to call in the experiment's process, as `journal.read` or `budget.pay`."""

    run_id: str
    what: str
    args: tuple[object, ...]
    number: int | None = None
    """Of the answer; None for a call without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcReply:
    value: Any = None
    error: BaseException | None = None


class RpcConnection:
    """The worker's end of the connection."""

    def __init__(self) -> None:
        self.run_id = ""
        self._calls: queue.SimpleQueue[RpcCall] = queue.SimpleQueue()
        self._waiting: dict[int, Future[Any]] = {}
        self._numbers = count()

    def send(self, what: str, *args: object) -> None:
        """Call without waiting for an answer."""
        self._calls.put(RpcCall(run_id=self.run_id, what=what, args=args))

    def call(self, what: str, *args: object) -> Any:
        """The answer; raises what the call raised there."""
        number, answer = next(self._numbers), Future[Any]()
        # Before the call is queued: another thread may bring the answer at once.
        self._waiting[number] = answer
        self._calls.put(RpcCall(run_id=self.run_id, what=what, args=args, number=number))
        return answer.result()

    def calls(self, seconds: float) -> list[RpcCall]:
        """The calls since the last time; waits so long for the first."""
        calls = []
        try:
            calls.append(self._calls.get(timeout=seconds))
            while True:
                calls.append(self._calls.get_nowait())
        except queue.Empty:
            return calls

    def answer(self, number: int, answer: RpcReply) -> None:
        waiting = self._waiting.pop(number)
        if answer.error is not None:
            waiting.set_exception(answer.error)
        else:
            waiting.set_result(answer.value)


def sendable(error: Exception) -> Exception:
    """The error as one that every process can unpickle."""
    if isinstance(error, Cancelled):
        return Cancelled(str(error), reason=error.reason)
    if isinstance(error, RunLocked):  # the experiment then writes nothing into that directory
        return RunLocked(str(error))
    return EvsysError(str(error) if isinstance(error, EvsysError) else f"{type(error).__name__}: {error}")


# The worker's side: a plan whose journal, budget and callbacks are calls to the experiment's process.


class RemoteJournal(Journal):
    """The experiment's journal, from a process that does not have it."""

    def __init__(self, connection: RpcConnection, path: Path):
        self.path, self._connection = path, connection

    def begin(self, run: str, fingerprint: str) -> RunJournal:
        return RunJournal(self, run, self._connection.call("journal.begin", run, fingerprint))

    def write(self, statement: str, values: tuple[object, ...]) -> None:
        self._connection.send("journal.write", statement, values)

    def sync(self) -> None:
        self._connection.call("journal.sync")  # calls arrive in order: what was sent before is synced too

    def read(self, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self._connection.call("journal.read", query, values)
        return rows


class Stub:
    """An object of the experiment's process, from a process that does not have it: its methods are calls."""

    def __init__(self, connection: RpcConnection, name: str, *, unanswered: Collection[str] = ()):
        self._connection, self._name, self._unanswered = connection, name, unanswered

    def __getattr__(self, method: str) -> Callable[..., Any]:
        call = self._connection.send if method in self._unanswered else self._connection.call
        return partial(call, f"{self._name}.{method}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextUpdate:
    """A run's context as callbacks are to see it; `extras` is None where they have not changed."""

    stage: str | None
    start_from: str | None
    resume: bool
    replaying: bool
    extras: dict[str, object] | None


class RemoteCallbacks(RunHooks, Stub):
    """The experiment's callbacks, from a process that does not have them: each hook is called there, with a context
    made there; what they log comes back as the answer."""

    _sent_rows: object = None

    def _call_hooks(self, hook: str, ctx: RunContext, *args: object) -> None:
        rows = ctx.extras.get("train_rows")  # there may be a million of them: sent once for each stage
        is_known, self._sent_rows = rows is not None and self._sent_rows is rows, rows
        update = ContextUpdate(
            stage=ctx.stage,
            start_from=ctx.start_from,
            resume=ctx.resume,
            replaying=ctx.replaying,
            extras=None if is_known else {key: ctx.extras[key] for key in EXTRAS if key in ctx.extras},
        )
        for method, given, named in self._connection.call(f"callbacks.{hook}", update, *args):
            getattr(ctx.log_store, method)(*given, **named)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRunSpec:
    """A plan that can be sent. Both processes must see the same files under its paths."""

    journal: Path
    fields: dict[str, Any]
    """Of the `RunPlan`, except those that stay."""

    @classmethod
    def of(cls, plan: RunPlan, *, fresh: bool) -> RemoteRunSpec:
        sent = {field.name: getattr(plan, field.name) for field in fields(plan) if field.name not in STAYS}
        return cls(journal=plan.journal.path, fields={**sent, "fresh": fresh})


def execute_remote(
    spec: RemoteRunSpec, connection: RpcConnection, stop: StopFlag, *, where: str, lock_seconds: float = LOCK_SECONDS
) -> RunResult:
    """Execute a run in this process, the worker `where`."""
    # Late, here and in `ray`: a launcher is registered whenever a kind is looked up, and most look-ups start no run.
    from evsys_sdk.run.plan import ExperimentInputs, RunPlan
    from evsys_sdk.run.runner import attempt_run

    callbacks: Any = RemoteCallbacks(connection, "callbacks")
    budget: Any = Stub(connection, "budget", unanswered=("end_step", "give_back_step", "pay"))
    plan = RunPlan(
        **spec.fields,
        callbacks=callbacks,
        stop=stop,
        journal=RemoteJournal(connection, spec.journal),
        inputs=ExperimentInputs(spec.fields["experiment"]),
        budget=budget,
    )
    connection.run_id, until = plan.run_id, time.monotonic() + lock_seconds
    try:
        if not spec.journal.exists():
            raise EvsysError(
                f"{where} does not see {spec.journal.parent.absolute()}: runs on other machines need an output_dir "
                "on a disk that all of them share"
            )
        learn_from_settings(plain(plan.experiment))
        import_extensions(plan.experiment)
        result = None
        while result is None:
            try:
                result = attempt_run(plan)
            except RunLocked:
                if time.monotonic() > until:
                    raise
                # Unlike a sleep, this ends as soon as the experiment is stopped.
                stop.event.wait(LOCK_POLL_SECONDS)
                stop.check()
        result.worker = where
        if stop.event.is_set() and result.status == "cancelled":
            connection.send("stop.set")  # a run that the user cancels stops the whole experiment
        return result
    finally:
        # The last in the queue: when it arrives, every write to the journal has arrived too.
        connection.send(OVER)


# The experiment's side.


class CollectedLogs:
    """The log store that callbacks see: what they log is sent to the worker, which has the real one."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...], dict[str, object]]] = []

    def __getattr__(self, method: str) -> Callable[..., None]:
        if method not in LOG_METHODS:
            raise AttributeError(f"a log store has no {method!r}")
        return lambda *args, **named: self.calls.append((method, args, named))

    def close(self) -> None:
        """The worker closes the real one."""


@dataclass(frozen=True, slots=True)
class OnWorker:
    """A tool that only the worker has."""

    what: str

    def __getattr__(self, name: str) -> Any:
        raise EvsysError(f"{self.what} is with the worker that executes the run; callbacks cannot reach it")


@dataclass(slots=True)
class RpcServer:
    """Calls in the experiment's process what a run elsewhere asks for."""

    plan: RunPlan
    begun: bool = False
    """Whether a worker has begun its own attempt in the journal."""
    over: bool = False
    steps_begun: int = 0
    logs: CollectedLogs = field(default_factory=CollectedLogs)
    ctx: RunContext | None = None
    announced: bool = False
    """Whether callbacks had an `on_run_start` and no `on_run_end` yet."""
    broken: Exception | None = None
    """The error of a call without an answer; the next call with one raises it, or the end of the run."""

    def handle(self, call: RpcCall) -> RpcReply | None:
        """Make the call; the answer if the worker waits for one."""
        try:
            if self.broken is not None and call.number is not None:
                raise self.broken
            reply = RpcReply(value=self._make(call))
        except Exception as exc:
            reply = RpcReply(error=sendable(exc))
            self.broken = self.broken or (exc if call.number is None else None)
        return None if call.number is None else reply

    def _make(self, call: RpcCall) -> object:
        if call.what == OVER:
            self.over = True
            return None
        place, _, name = call.what.partition(".")
        method: Callable[..., object] = getattr(getattr(self.plan, place), name)
        if call.what == "journal.begin":
            self.begun = True
            run, fingerprint = map(str, call.args)
            return self.plan.journal.begin(run, fingerprint).attempt
        if place == "callbacks" and name in (*HOOKS, "doing"):
            update, *args = call.args
            assert isinstance(update, ContextUpdate)
            self.announced = name == "on_run_start" or (self.announced and name != "on_run_end")
            method(self._context(update), *args)
            logged, self.logs.calls = self.logs.calls, []
            return logged
        value = method(*call.args)
        # After the call: `begin_step` raises where the budget is spent, and such a step must not be given back.
        self.steps_begun += STEPS.get(call.what, 0)
        return value

    def _context(self, update: ContextUpdate) -> RunContext:
        """The run's context for callbacks: one object for the whole run, as in the experiment's own process."""
        if self.ctx is None:
            self.ctx = RunContext(
                run_id=self.plan.run_id,
                output_dir=self.plan.run_dir,
                config=self.plan.experiment,
                data_store=OnWorker("ctx.data_store"),
                log_store=self.logs,
                backend=OnWorker("ctx.backend"),
                seed=self.plan.run.seed,
                max_steps=self.plan.max_steps,
            )
        self.ctx.stage, self.ctx.start_from = update.stage, update.start_from
        self.ctx.resume, self.ctx.replaying = update.resume, update.replaying
        self.ctx.extras.update(update.extras or {})
        return self.ctx

    def lose_worker(self) -> None:
        """Give back the steps it had begun, and announce the run's end; when the run resumes on another worker,
        callbacks get its start and its steps again."""
        for _ in range(self.steps_begun):
            self.plan.budget.give_back_step()
        if self.ctx is not None and self.announced:
            lost = RunResult(run_id=self.plan.run_id, status="cancelled", error="its worker was lost")
            self.plan.callbacks.on_run_end(self.ctx, lost)
        # `begun` stays true: under --fresh the next worker resumes the attempt and does not start it over.
        self.steps_begun, self.ctx, self.broken, self.announced, self.over = 0, None, None, False, False
