"""One run, left to right: stores, rows, backend, training, evaluation, record.

In: a `RunPlan`. Out: a `RunResult`, and the same on disk in `<run_dir>/run_result.json`. Whatever happens in
between (bad rows, a backend that does not come up, a crash, Ctrl-C), a valid record is left.
"""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import Any

from evsys_sdk.data.rows import LoadedRows
from evsys_sdk.errors import BackendError, Cancelled, EvsysError
from evsys_sdk.protocols import RunContext, RunResult
from evsys_sdk.record.run_dir import open_run_dir
from evsys_sdk.rollout.engine import InProcessRolloutEngine
from evsys_sdk.running.live import LoopHooks
from evsys_sdk.running.scoring import Scoring, score_after_training
from evsys_sdk.running.workbench import RunPlan, Workbench
from evsys_sdk.training.render import ChatRenderer


def execute_run(plan: RunPlan) -> RunResult:
    """Carry out one run and leave its record."""
    with open_run_dir(plan.run_dir) as run_dir, plan.stop.working():
        bench = Workbench.for_plan(plan, run_dir)
        try:
            result = _run(bench)
        except (KeyboardInterrupt, Cancelled) as exc:
            plan.stop.set()
            result = replace(bench.result, status="cancelled", error=str(exc) or "interrupted")
        except Exception as exc:
            bench.record.traceback = traceback.format_exc()
            error = str(exc) if isinstance(exc, EvsysError) else f"{type(exc).__name__}: {exc}"
            result = replace(bench.result, status="failed", error=error)
        result.extras["evals"] = bench.record.evals
        bench.announce_end(result)
        return bench.record.write(result, unread=bench.unread_settings())


def _run(bench: Workbench) -> RunResult:
    log_store = bench.log_store()
    try:
        data_store, backend = bench.data_store(), bench.backend()
        ctx = bench.context(backend, data_store, log_store)
        stages = [(name, bench.load(data, place, data_store)) for name, data, place in bench.stages()]
        log_store.log_hyperparams(bench.record.hyperparams())
        bench.handles.update(backend.prepare(model=bench.plan.run.model, run_dir=bench.record.run_dir))
        try:
            return _train_and_score(bench, ctx, stages)
        finally:
            backend.teardown(bench.handles)
    finally:
        log_store.close()


def _train_and_score(bench: Workbench, ctx: RunContext, stages: list[tuple[str | None, LoadedRows]]) -> RunResult:
    """Train each stage from the weights of the one before and score after each; usually there is one stage."""
    hooks = _hooks(bench, ctx)
    for number, (name, loaded) in enumerate(stages, 1):
        ctx.stage = name
        ctx.extras.update(train_rows=loaded.rows, n_train_rows=len(loaded.rows))
        bench.announce_start()
        hooks.begin_stage(name)
        trained = bench.algorithm().train(ctx)
        bench.result = _merge(bench.result, trained, name)
        if trained.status != "completed":
            break
        bench.result.metrics.update(score_after_training(bench, hooks, trained, loaded.rows))
        ctx.start_from = trained.artifacts.get("final_checkpoint")
        if ctx.start_from is None and number < len(stages):
            raise BackendError(f"stage {name!r} left no resumable state, so the next stage cannot start from it")
    return bench.result


def _hooks(bench: Workbench, ctx: RunContext) -> LoopHooks:
    plan = bench.plan
    service = bench.service
    scoring = Scoring(
        config=plan.experiment,
        engine=InProcessRolloutEngine(),
        seed=plan.run.seed,
        max_tasks=plan.max_tasks,
        renderer=ChatRenderer(service.get_tokenizer()) if service is not None else None,
    )
    hooks = LoopHooks(ctx, plan.callbacks, scoring, plan.stop)
    ctx.hooks, ctx.rollouts = hooks, scoring.engine
    bench.record.evals = hooks.results  # the same list: what was scored before a crash stays in the record
    return hooks


def _merge(so_far: RunResult, trained: Any, stage: str | None) -> RunResult:
    if not isinstance(trained, RunResult):
        raise EvsysError(f"the algorithm's train() must return a RunResult, not {type(trained).__name__}")
    prefix = f"{stage}/" if stage else ""
    return RunResult(
        run_id=so_far.run_id,
        status=trained.status,
        metrics={**so_far.metrics, **{prefix + key: value for key, value in trained.metrics.items()}},
        artifacts={**so_far.artifacts, **trained.artifacts},
        error=trained.error,
        extras={**so_far.extras, **trained.extras},
    )
