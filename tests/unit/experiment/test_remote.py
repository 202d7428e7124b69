"""A run in another process, without the other process: orders and answers are pickled, a thread is the worker."""

from __future__ import annotations

import pickle
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from inspect import isfunction
from pathlib import Path
from typing import ClassVar

import pytest

from evsys_sdk import redaction
from evsys_sdk.config.load import parse_config
from evsys_sdk.config.yaml_io import Document
from evsys_sdk.errors import Cancelled, EvsysError, RunLocked
from evsys_sdk.experiment.experiment import Experiment, RunOptions
from evsys_sdk.experiment.remote import (
    ContextUpdate,
    RemoteJournal,
    RemoteRunSpec,
    RpcCall,
    RpcConnection,
    RpcReply,
    RpcServer,
    Stub,
    execute_remote,
    sendable,
)
from evsys_sdk.protocols import RunResult
from evsys_sdk.record.layout import open_run_dir
from evsys_sdk.registry import launchers
from evsys_sdk.run.budget import Budget
from evsys_sdk.run.runner import load_completed
from evsys_sdk.run.stop import StopFlag


def sent(value):
    return pickle.loads(pickle.dumps(value))


def serve(line: RpcConnection, server: RpcServer, seen=None) -> None:
    while not server.over:
        for call in line.calls(5):
            answer = server.handle(sent(call))
            if seen is not None:
                seen.append(call.what)
            if answer is not None:
                line.answer(call.number, sent(answer))


@launchers.register("in_a_thread")
class ThreadLauncher:
    """As the Ray launcher does it, with a thread in place of the cluster."""

    calls: ClassVar[list[str]] = []

    def execute(self, plan) -> RunResult:
        before = load_completed(plan)
        if before is not None:
            return before
        line, server = RpcConnection(), RpcServer(plan)
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(
                execute_remote, sent(RemoteRunSpec.of(plan, fresh=plan.fresh)), line, StopFlag(), where="a thread"
            )
            serve(line, server, self.calls)
            return sent(done.result())

    def close(self) -> None: ...


ROWS = [{"prompt": f"say {word}", "completion": word} for word in ("red", "green", "blue", "black")]


def experiment(folder: Path, launcher: str, **top):
    run = {
        "name": "r0",
        "model": {"name": "tiny"},
        "data": {"source_kind": "in_memory", "rows": ROWS, "transforms": [{"kind": "jsonl_to_chat"}]},
        "algorithm": {"kind": "sft", "params": {"max_steps": 6, "batch_size": 2, "save_every": 2}},
        "backend": {"kind": "mock"},
    }
    data = {"name": "e", "output_dir": str(folder), "run": run, "launcher": {"kind": launcher}, **top}
    return Experiment(parse_config(Document(label="config", data=data), folder=folder))


@launchers.register("in_another_process")
class ForgetfulLauncher(ThreadLauncher):
    """What this process knows of secrets the worker's does not."""

    def execute(self, plan) -> RunResult:
        redaction._known = redaction._Known()
        return super().execute(plan)


def test_a_worker_knows_the_secrets_of_the_config(tmp_path, monkeypatch):
    monkeypatch.setattr(redaction, "_known", redaction._Known())
    experiment(tmp_path, "in_another_process", metadata={"api_key": "quite-plain-value-4711"}).run()
    assert redaction.redact("401 for quite-plain-value-4711") == "401 for [redacted]"


class Watcher:
    def __init__(self):
        self.heard = []

    def on_run_start(self, ctx):
        self.heard.append(("start", ctx.extras["run_name"], len(ctx.extras["train_rows"]), ctx.resume))

    def on_step(self, ctx, step, metrics):
        self.heard.append((step, metrics["loss"]))
        ctx.log_store.log_scalar("heard", step, step)

    def on_checkpoint(self, ctx, step, path):
        self.heard.append(("checkpoint", step))

    def on_run_end(self, ctx, result):
        self.heard.append(("end", result.status, result.metrics["steps"]))


def journalled(folder: Path):
    with sqlite3.connect(folder / "e.journal.sqlite") as db:
        return db.execute("SELECT run, attempt, kind, key, at FROM events WHERE run != '' ORDER BY id").fetchall()


@pytest.mark.parametrize("launcher", ["local", "in_a_thread"])
def test_callbacks_can_tell_what_an_earlier_attempt_did(tmp_path, launcher):
    class Steps:
        def __init__(self):
            self.heard = []

        def on_step(self, ctx, step, metrics):
            self.heard.append((step, ctx.replaying))

    told = []
    for steps in (4, 100):
        watcher = Steps()
        experiment(tmp_path, launcher, budget={"steps": steps}).run(RunOptions(watchers=[watcher]))
        told.append(watcher.heard)
    assert told[0] == [(step, False) for step in (1, 2, 3, 4)]
    assert told[1] == [(step, step <= 4) for step in (1, 2, 3, 4, 5, 6)]


def test_it_is_the_run_that_it_would_have_been_here(tmp_path):
    found = {}
    for launcher in ("local", "in_a_thread"):
        watcher, folder = Watcher(), tmp_path / launcher
        [run] = experiment(folder, launcher).run(RunOptions(watchers=[watcher])).runs
        logged = (folder / "r0/logs/metrics.jsonl").read_text()
        found[launcher] = (
            run.metrics,
            watcher.heard,
            [event[2:] for event in journalled(folder) if event[2] != "run"],
        )
        assert run.status == "completed" and logged.count('"heard"') == 6
    assert found["local"] == found["in_a_thread"]
    assert "callbacks.on_step" in ThreadLauncher.calls, "it went through the server"


def test_a_finished_run_is_not_sent_away_again(tmp_path):
    experiment(tmp_path, "in_a_thread").run()
    ThreadLauncher.calls.clear()
    [run] = experiment(tmp_path, "in_a_thread").run().runs
    assert run.status == "completed" and ThreadLauncher.calls == []


def test_a_budget_is_kept_across_processes(tmp_path):
    result = experiment(tmp_path, "in_a_thread", budget={"steps": 4}).run()
    [run] = result.runs
    assert (run.status, run.error) == ("cancelled", "the budget is spent: 4 of 4 steps")
    assert result.budget["spent"]["steps"] == 4


def plan_of(experiment, tmp_path):
    """The plan of the experiment's run, as a launcher gets it."""
    plans = []

    class Taker:
        def execute(self, plan):
            plans.append(plan)
            raise Cancelled("taken")

        def close(self): ...

    launchers.register("taker")(Taker)
    try:
        experiment.config.launcher.kind = "taker"
        experiment.run()
    finally:
        del launchers.entries["taker"]
    return plans[0]


def test_a_folder_that_is_not_shared_is_named(tmp_path):
    plan = plan_of(experiment(tmp_path, "local"), tmp_path)
    order = replace(RemoteRunSpec.of(plan, fresh=False), journal=Path("/not/here/e.journal.sqlite"))
    line, server = RpcConnection(), RpcServer(plan)
    with pytest.raises(EvsysError, match=r"machine 7 does not see /not/here: .* output_dir on a disk"):
        execute_remote(order, line, StopFlag(), where="machine 7")
    serve(line, server)
    assert server.over, "its server reads that it is over"


def test_a_lost_worker_that_still_holds_the_run_is_waited_for(tmp_path):
    plan = plan_of(experiment(tmp_path, "local"), tmp_path)
    order = RemoteRunSpec.of(plan, fresh=False)
    with open_run_dir(plan.run_dir):
        with pytest.raises(RunLocked):
            execute_remote(order, RpcConnection(), StopFlag(), where="here", lock_seconds=0)
        stop = StopFlag()
        threading.Timer(0.2, stop.set).start()
        with pytest.raises(Cancelled):
            execute_remote(order, RpcConnection(), stop, where="here", lock_seconds=60)


class Plan:
    def __init__(self, **parts):
        self.__dict__.update(parts)


def test_what_a_lost_worker_had_begun_is_given_back():
    ended = []

    class Callbacks:
        def on_run_start(self, ctx): ...

        def on_run_end(self, ctx, result):
            ended.append((result.status, result.error))

    budget = Budget(limits={"steps": 2})
    plan = Plan(
        budget=budget,
        callbacks=Callbacks(),
        run_id="e/r",
        run_dir=Path(),
        experiment=None,
        run=Plan(seed=1),
        max_steps=1,
    )
    server = RpcServer(plan)
    for what, args in (("budget.begin_step", ()), ("budget.end_step", (5,)), ("budget.begin_step", ())):
        assert server.handle(RpcCall(run_id="e/r", what=what, args=args, number=1)) == RpcReply()
    refused = server.handle(RpcCall(run_id="e/r", what="budget.begin_step", args=(), number=2))
    assert isinstance(refused.error, Cancelled) and refused.error.reason == "budget"
    server.lose_worker()
    assert budget.reserved == 0 and budget.spent.steps == 1
    assert ended == [], "callbacks had not heard of a start"
    budget.begin_step()  # the place is free again
    update = ContextUpdate(stage=None, start_from=None, resume=False, replaying=False, extras={})
    server.handle(RpcCall(run_id="e/r", what="callbacks.on_run_start", args=(update,), number=3))
    server.lose_worker()
    assert ended == [("cancelled", "its worker was lost")]


def test_a_journal_that_breaks_fails_the_next_question():
    class Journal:
        def write(self, *args):
            raise EvsysError("the disk is full")

        def read(self, *args):
            return [(1,)]

    line, server = RpcConnection(), RpcServer(Plan(journal=Journal()))
    journal = RemoteJournal(line, Path("e.sqlite"))
    journal.write("INSERT", ())
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(journal.read, "SELECT", ())
        for call in [*line.calls(5), *line.calls(1)]:
            answer = server.handle(call)
            if answer is not None:
                line.answer(call.number, answer)
        with pytest.raises(EvsysError, match="the disk is full"):
            asked.result(timeout=300)


def test_the_stand_in_for_a_budget_asks_for_everything():
    own = {name for name, found in vars(Budget).items() if isfunction(found) and not name.startswith("_")}
    line = RpcConnection()
    budget = Stub(line, "budget", unanswered=own)
    for name in sorted(own):
        getattr(budget, name)()
    assert [call.what for call in line.calls(0)] == [f"budget.{name}" for name in sorted(own)]


def test_a_worker_that_is_lost_after_its_last_call_leaves_nothing_to_the_next():
    """Its result did not arrive: the run starts again, is served again, and ends for callbacks once each time."""
    heard = []

    class Callbacks:
        def on_run_start(self, ctx):
            heard.append("start")

        def on_run_end(self, ctx, result):
            heard.append(result.status)

        def doing(self, ctx, what): ...

    plan = Plan(callbacks=Callbacks(), run_id="e/r", run_dir=Path(), experiment=None, run=Plan(seed=1), max_steps=1)
    server, ended = RpcServer(plan), RunResult(run_id="e/r", status="completed")
    update = ContextUpdate(stage=None, start_from=None, resume=False, replaying=False, extras={})
    for what, args in (
        ("callbacks.on_run_start", (update,)),
        ("callbacks.on_run_end", (update, ended)),
        ("over", ()),
    ):
        server.handle(RpcCall(run_id="e/r", what=what, args=args))
    assert server.over and server.broken is None
    server.lose_worker()
    assert not server.over and heard == ["start", "completed"]
    server.handle(RpcCall(run_id="e/r", what="callbacks.doing", args=(update, "loading model")))
    server.lose_worker()
    assert heard == ["start", "completed"], "the second worker had not come to its start"


def test_what_callbacks_log_by_name_reaches_the_run_and_a_misspelt_call_is_theirs():
    class Callbacks:
        def on_run_start(self, ctx):
            ctx.log_store.log_scalar(name="a", value=1.0, step=2)
            with pytest.raises(AttributeError, match="log_scalr"):
                ctx.log_store.log_scalr("a", 1.0, 2)

    plan = Plan(callbacks=Callbacks(), run_id="e/r", run_dir=Path(), experiment=None, run=Plan(seed=1), max_steps=1)
    update = ContextUpdate(stage=None, start_from=None, resume=False, replaying=False, extras={})
    reply = RpcServer(plan).handle(RpcCall(run_id="e/r", what="callbacks.on_run_start", args=(update,), number=1))
    assert sent(reply).value == [("log_scalar", (), {"name": "a", "value": 1.0, "step": 2})]


def test_a_locked_run_directory_is_known_as_one_in_the_other_process():
    told = sent(sendable(RunLocked("run directory x is in use")))
    assert type(told) is RunLocked and str(told) == "run directory x is in use"
    assert type(sent(sendable(ValueError("odd")))) is EvsysError
