"""One run, left to right: stores, rows, backend, training, evaluation, record.

In: a `RunPlan`. Out: a `RunResult`, and the same on disk in `<run_dir>/run_result.json`. Whatever happens in
between (bad rows, a backend that does not come up, a crash, Ctrl-C), a valid record is left.
"""

from __future__ import annotations

import asyncio
import math
import traceback
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from evsys_sdk import registry
from evsys_sdk.asyncs import Interrupted
from evsys_sdk.data.rows import LoadedRows
from evsys_sdk.errors import FOREIGN, BackendError, Cancelled, EvsysError, not_known
from evsys_sdk.numbers import as_number
from evsys_sdk.protocols import RunContext, RunResult, RunStatus
from evsys_sdk.record.eval_data import in_order
from evsys_sdk.record.run_dir import open_run_dir
from evsys_sdk.rollout.engine import RolloutEngine
from evsys_sdk.rollout.lanes import LaneSettings
from evsys_sdk.running.admissions import refuse_test_questions
from evsys_sdk.running.budget import BudgetSpent
from evsys_sdk.running.http_front import http_front
from evsys_sdk.running.leakage import audit_block
from evsys_sdk.running.live import LoopHooks
from evsys_sdk.running.pausing import Paused, end_key, paused_result
from evsys_sdk.running.resume_hint import STOPPED_AT
from evsys_sdk.running.scoring import Scoring, score_after_training, score_untrained
from evsys_sdk.running.workbench import RunPlan, Workbench
from evsys_sdk.training.render import renderer_for
from evsys_sdk.verifiers.grading import grade


def execute_run(plan: RunPlan) -> RunResult:
    """The result of one run, which is carried out unless it was before."""
    return finished_before(plan) or carry_out(plan)


def finished_before(plan: RunPlan) -> RunResult | None:
    """The result of this very run, if it came to its end in an earlier process."""
    with open_run_dir(plan.run_dir) as run_dir:
        return Workbench.for_plan(plan, run_dir).finished_before()


def carry_out(plan: RunPlan) -> RunResult:
    """Carry out one run and leave its record."""
    with open_run_dir(plan.run_dir) as run_dir:
        bench = Workbench.for_plan(plan, run_dir)
        plan.budget.begin_run(plan.run_id)
        bench.begin_attempt()
        try:
            with plan.stop.working():
                result = _announced(bench, _outcome(bench))
        except Interrupted as exc:
            result = _with_scores(bench, _cancelled(bench, exc))
        # Outside `working`: no signal interrupts the writing of the record.
        written = bench.record.write(result, unread=bench.unread_settings() if result.status == "completed" else [])
        written.extras["resumed"] = bench.resumed
        bench.journal.add("end", {"status": result.status, "error": result.error}, at=0, key=end_key(result))
        return written


def give_up(plan: RunPlan, error: str, *, status: RunStatus = "failed") -> RunResult:
    """Leave the record of a run that cannot be carried out; what it had come to stays to go on from."""
    with open_run_dir(plan.run_dir) as run_dir:
        bench = Workbench.for_plan(plan, run_dir)
        bench.begin_attempt()
        written = bench.record.write(replace(bench.result, status=status, error=error), unread=[])
        bench.journal.add("end", {"status": status, "error": error}, at=0, key=end_key(written))
        return written


def _announced(bench: Workbench, result: RunResult) -> RunResult:
    """The result, which the callbacks have been told."""
    try:
        bench.announce_end(_with_scores(bench, result))
    except (KeyboardInterrupt, Cancelled) as exc:
        return replace(result, status="cancelled", error=str(exc) or "interrupted")
    return result


def _with_scores(bench: Workbench, result: RunResult) -> RunResult:
    result.extras["evals"] = bench.record.evals = in_order(bench.record.evals)
    return result


def _outcome(bench: Workbench) -> RunResult:
    """The run's result, whatever happened to it; what it had come to by then is kept."""
    try:
        return _run(bench)
    except Paused as exc:
        return paused_result(bench, exc.step)
    except BudgetSpent as exc:
        return _stopped_result(bench, exc)
    except (KeyboardInterrupt, Interrupted, Cancelled) as exc:
        return _cancelled(bench, exc)
    except (*FOREIGN, asyncio.CancelledError) as exc:
        if bench.plan.stop.interrupted:  # libraries that are interrupted say so in their own words
            return _cancelled(bench, Interrupted())
        bench.record.traceback = traceback.format_exc()
        error = str(exc) if isinstance(exc, EvsysError) else f"{type(exc).__name__}: {exc}"
        return replace(bench.result, status="failed", error=error)


def _cancelled(bench: Workbench, exc: BaseException) -> RunResult:
    bench.plan.stop.set()
    return _stopped_result(bench, exc)


def _stopped_result(bench: Workbench, exc: BaseException) -> RunResult:
    """The run's result so far, with a note of the step it stopped at and of the checkpoint to resume from."""
    hooks = bench.ctx.hooks if bench.ctx else None
    note = {}
    if isinstance(hooks, LoopHooks):
        algorithm = registry.algorithms.build(bench.plan.run.algorithm.kind, dict(bench.plan.run.algorithm.params))
        resumes = getattr(algorithm, "goes_on", True) and (bench.service is None or bench.service.capabilities.resume)
        note = {STOPPED_AT: {**hooks.stopped_at(), "resumes": resumes}}
    return replace(
        bench.result, status="cancelled", error=str(exc) or "interrupted", extras={**bench.result.extras, **note}
    )


def _run(bench: Workbench) -> RunResult:
    log_store = bench.log_store()
    try:
        data_store, backend = bench.data_store(), bench.backend()
        ctx = bench.context(backend, data_store, log_store)
        bench.plan.callbacks.doing(ctx, "reading data")
        stages = [(name, bench.load(data, place, data_store)) for name, data, place in bench.stages()]
        bench.refuse_other_data()
        for (_, loaded), (_, _, place) in zip(stages, bench.stages(), strict=True):
            audit_block(bench, place, loaded)
        refuse_test_questions(bench)
        log_store.log_hyperparams(bench.record.hyperparams())
        bench.plan.callbacks.doing(ctx, "loading model")
        bench.handles.update(backend.prepare(model=bench.plan.run.model, run_dir=bench.record.run_dir))
        try:
            return _train_and_score(bench, ctx, stages)
        finally:
            bench.tidy("backend teardown", lambda: backend.teardown(bench.handles))
    finally:
        bench.tidy("closing the log store", log_store.close)


def _train_and_score(bench: Workbench, ctx: RunContext, stages: list[tuple[str | None, LoadedRows]]) -> RunResult:
    """Train each stage from the weights of the one before and score after each; usually there is one stage."""
    hooks = _hooks(bench, ctx)
    for number, (name, loaded) in enumerate(stages, 1):
        ctx.stage = name
        ctx.extras.update(train_rows=loaded.rows, n_train_rows=len(loaded.rows))
        if number == 1:
            bench.announce_start()
            score_untrained(bench, hooks)
        hooks.begin_stage(name)
        try:
            trained = bench.algorithm().train(ctx)
        finally:
            hooks.close()
        bench.result = _merge(bench, trained, name)
        if trained.status != "completed":
            break
        bench.result.metrics.update(score_after_training(bench, hooks, trained, loaded.rows))
        ctx.start_from = trained.artifacts.get("final_checkpoint")
        if ctx.start_from is None and number < len(stages):
            raise BackendError(f"stage {name!r} left no resumable state, so the next stage cannot start from it")
    return bench.result


def _hooks(bench: Workbench, ctx: RunContext) -> LoopHooks:
    plan = bench.plan
    service, run = bench.service, plan.run
    renderer = None if service is None else renderer_for(run.model, service.get_tokenizer(), run.backend.kind)
    length = getattr(service, "context_length", None)
    settings = LaneSettings(http_front=partial(http_front, length), context_length=length)
    scoring = Scoring(
        config=plan.experiment,
        engine=RolloutEngine(grade=grade, settings=settings),
        seed=plan.run.seed,
        max_tasks=plan.max_tasks,
        renderer=renderer,
        render_with=bench.renderer_with if run.backend.kind != "mock" else None,
        trained_on=frozenset(data["sha256"] for data in bench.record.data),  # only training data is loaded by now
    )
    hooks = LoopHooks(ctx, plan.callbacks, scoring, plan.stop, bench.journal)
    scoring.finished, hooks.budget, hooks.pause_at = hooks.finished, plan.budget, plan.pause_at
    ctx.hooks, ctx.rollouts, ctx.extras["renderer"] = hooks, scoring.engine, renderer
    # The same objects: what was scored before a crash stays in the record.
    bench.record.evals, bench.record.benchmarks = hooks.results, scoring.loaded
    return hooks


def _merge(bench: Workbench, trained: Any, stage: str | None) -> RunResult:
    """The run's result with that of another stage; what an algorithm may not return is refused or left out aloud."""
    if not isinstance(trained, RunResult):
        raise EvsysError(f"the algorithm's train() must return a RunResult, not {type(trained).__name__}")
    if trained.status not in get_args(RunStatus):
        raise EvsysError(f"the algorithm's RunResult: {not_known(str(trained.status), 'status', get_args(RunStatus))}")
    so_far, prefix = bench.result, f"{stage}/" if stage else ""
    numbers = {
        prefix + str(key): number for key, value in trained.metrics.items() if (number := as_number(value)) is not None
    }
    for key, value in trained.metrics.items():
        number = as_number(value)
        if number is None:
            bench.record.warnings.append(f"metric {key!r} is {type(value).__name__}, not a number; it was left out")
        elif not math.isfinite(number):
            bench.record.warnings.append(f"metric {key!r} is {number}; nothing can be judged by it")
    return RunResult(
        run_id=so_far.run_id,
        status=trained.status,
        metrics={**so_far.metrics, **numbers},
        artifacts={**so_far.artifacts, **{str(key): str(value) for key, value in trained.artifacts.items()}},
        error=trained.error,
        extras={**so_far.extras, **trained.extras},
    )
