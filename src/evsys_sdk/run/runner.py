"""One run, left to right: stores, rows, audit, backend, untrained scores, training, scores, record.

In: a `RunPlan`. Out: a `RunResult`, and the same on disk in `<run_dir>/run_result.json`. Whatever happens in
between (bad rows, a backend that does not start, a crash, Ctrl-C), a valid record is left.
"""

from __future__ import annotations

import asyncio
import math
import traceback
from dataclasses import replace
from typing import Literal, get_args

from evsys_sdk import registry
from evsys_sdk.concurrency import Interrupted, run_async
from evsys_sdk.config.load import plain
from evsys_sdk.config.project import search_folders
from evsys_sdk.config.schema import DataConfig, RunConfig
from evsys_sdk.config.yaml_io import source_of
from evsys_sdk.data.rows import LoadedRows
from evsys_sdk.errors import FOREIGN, READABLE, BackendError, Cancelled, EvsysError, StopReason, not_known
from evsys_sdk.format import as_number
from evsys_sdk.history.checkpoint_refs import Weights, checkpoint_path
from evsys_sdk.protocols import Algorithm, Backend, DataStore, LogStore, RunContext, RunResult, RunStatus
from evsys_sdk.record.layout import open_run_dir
from evsys_sdk.record.log_stores import with_log_dir
from evsys_sdk.record.models import read_prompt
from evsys_sdk.redaction import redact_data
from evsys_sdk.run.attempt import RunAttempt, new_record
from evsys_sdk.run.contamination import audit_block, audit_prompt, refuse_test_questions
from evsys_sdk.run.evals import score_trained, score_untrained
from evsys_sdk.run.hooks import LoopHooks
from evsys_sdk.run.plan import RunPlan
from evsys_sdk.run.resume import find_completed, metrics_at, refuse_other_data
from evsys_sdk.run.stop import StoppableLogStore

ENDS: dict[StopReason | Literal["error"], RunStatus] = {
    "user": "cancelled",  # a signal, `evsys stop`, a callback that raises Cancelled
    "budget": "cancelled",
    "pause": "pruned",  # a search left it behind, unless it resumes the run later
    "error": "failed",
}
"""How a run ends, by what broke it off."""


def execute_run(plan: RunPlan) -> RunResult:
    """Return the stored result if the run is complete; otherwise train, score and record it."""
    return load_completed(plan) or attempt_run(plan)


def load_completed(plan: RunPlan) -> RunResult | None:
    """The result of this run, if it is complete or can be reused."""
    with open_run_dir(plan.run_dir) as run_dir:
        return find_completed(plan, new_record(plan, run_dir))


def attempt_run(plan: RunPlan) -> RunResult:
    """Train and score one run, and leave its record."""
    with open_run_dir(plan.run_dir) as run_dir:
        record = new_record(plan, run_dir)
        plan.budget.begin_run(plan.run_id)
        attempt = RunAttempt.begin(plan, record)
        try:
            with plan.stop.working():
                try:
                    result = _run(attempt)
                except (*FOREIGN, KeyboardInterrupt, Interrupted, asyncio.CancelledError) as exc:
                    result = _broken_off(attempt, exc)
                try:
                    attempt.announce_end(result)
                except (KeyboardInterrupt, Cancelled) as exc:
                    result = replace(result, status="cancelled", error=str(exc) or "interrupted")
        except Interrupted as exc:
            result = _broken_off(attempt, exc)
        # Outside `working`: no signal interrupts the writing of the record.
        written = attempt.end(result, unread=attempt.unread_settings() if result.status == "completed" else [])
        written.resumed = attempt.resumed
        return written


def record_failure(plan: RunPlan, error: str, *, status: RunStatus = "failed") -> RunResult:
    """Leave the record of a run that cannot execute; its checkpoints stay, to resume from."""
    with open_run_dir(plan.run_dir) as run_dir:
        attempt = RunAttempt.begin(plan, new_record(plan, run_dir))
        return attempt.end(replace(attempt.result, status=status, error=error), unread=[])


def _run(attempt: RunAttempt) -> RunResult:
    plan, extensions, run = attempt.plan, attempt.extensions, attempt.plan.run
    log = plan.experiment.log_store
    params = with_log_dir(log.kind, dict(log.params), attempt.record.run_dir)
    store: LogStore = extensions.build(registry.log_stores, log, "log_store", params)
    log_store = StoppableLogStore(store, plan.stop, warnings=attempt.record.warnings)
    try:
        data_store: DataStore = extensions.build(registry.data_stores, plan.experiment.data_store, "data_store")
        backend: Backend = extensions.build(registry.backends, run.backend, "backend")
        ctx = attempt.ctx = _context(attempt, backend, data_store, log_store)
        plan.callbacks.doing(ctx, "reading data")
        blocks = _stages(run)
        stages = [(name, attempt.load_rows(data, place, data_store)) for name, data, place in blocks]
        # Before the backend is prepared: a mistake in the rows costs neither a model's loading nor a server's session.
        refuse_other_data(attempt.journal, attempt.record.data)
        for (_, loaded), (_, _, place) in zip(stages, blocks, strict=True):
            audit_block(attempt, place, loaded)
        refuse_test_questions(attempt)
        log_store.log_hyperparams(attempt.record.hyperparams())
        plan.callbacks.doing(ctx, "loading model")
        attempt.handles.update(backend.prepare(model=run.model, run_dir=attempt.record.run_dir))
        try:
            # Scored before the backend goes: the trained weights live in it (docs/decisions/0002).
            return _train_and_score(attempt, ctx, stages)
        finally:
            attempt.clean_up("backend teardown", lambda: backend.teardown(attempt.handles))
    finally:
        attempt.clean_up("closing the log store", log_store.close)


def _train_and_score(attempt: RunAttempt, ctx: RunContext, stages: list[tuple[str | None, LoadedRows]]) -> RunResult:
    """Train each stage from the weights of the one before and score after each; usually there is one stage."""
    hooks = LoopHooks.create(attempt, ctx)
    for number, (name, loaded) in enumerate(stages, 1):
        ctx.stage = name
        ctx.extras.update(train_rows=loaded.rows, n_train_rows=len(loaded.rows))
        algorithm: Algorithm = attempt.extensions.build(registry.algorithms, attempt.plan.run.algorithm, "algorithm")
        hooks.scoring.use_prompt_of(algorithm)
        if number == 1:
            attempt.announce_start()
            run_async(score_untrained(attempt, hooks))
        hooks.begin_stage(name)
        try:
            trained = algorithm.train(ctx)
        finally:
            hooks.close()
        attempt.result = _merge(attempt, trained, name)
        if hooks.chosen is not None:
            attempt.result.chosen_steps[name or ""] = hooks.chosen
        if trained.status != "completed":
            break
        prompt = read_prompt(trained.artifacts)
        if prompt is not None:
            hooks.scoring.system_prompt = prompt
            audit_prompt(attempt, prompt)
        attempt.result.metrics.update(run_async(score_trained(attempt, hooks, trained, loaded.rows)))
        ctx.start_from = trained.artifacts.get("final_checkpoint")
        if ctx.start_from is None and number < len(stages):
            raise BackendError(f"stage {name!r} left no resumable state, so the next stage cannot start from it")
    return attempt.result


def _stages(run: RunConfig) -> list[tuple[str | None, DataConfig, str]]:
    """Name, data and place of each stage; a run without `continual` is one nameless stage."""
    if run.continual is None:
        assert run.data is not None
        return [(None, run.data, "data")]
    stages = run.continual.stages
    return [(stage.name, stage.data, f"continual.stages[{index}].data") for index, stage in enumerate(stages)]


def _context(attempt: RunAttempt, backend: Backend, data_store: DataStore, log_store: StoppableLogStore) -> RunContext:
    """What algorithms and callbacks see of the run."""
    plan, run = attempt.plan, attempt.plan.run

    def find_checkpoint(text: str, weights: Weights) -> str:
        return checkpoint_path(text, weights, search_folders(source_of(plan.experiment)))

    start = run.model.load_checkpoint_path
    return RunContext(
        run_id=plan.run_id,
        output_dir=attempt.record.run_dir,
        config=plan.experiment,
        data_store=data_store,
        log_store=log_store,
        backend=backend,
        seed=run.seed,
        max_steps=plan.max_steps,
        start_from=None if start is None else find_checkpoint(start, "state"),
        resume=attempt.resumed,
        extras={
            "backend_handles": attempt.handles,
            "backend_kind": run.backend.kind,
            "model_name": run.model.name,
            "run_name": run.name,
            "run_config": redact_data(plain(run)),
            "tags": list(run.tags),
            "load_rows": lambda data, place: (
                audit_block(attempt, place, attempt.load_rows(data, place, data_store)).rows
            ),
            "checkpoint_path": find_checkpoint,
            "build_algorithm": lambda spec, place: attempt.extensions.build(registry.algorithms, spec, place),
        },
    )


def _merge(attempt: RunAttempt, trained: object, stage: str | None) -> RunResult:
    """The run's result with that of another stage; a metric that is not a number is left out with a warning."""
    if not isinstance(trained, RunResult):
        raise EvsysError(f"the algorithm's train() must return a RunResult, not {type(trained).__name__}")
    if trained.status not in get_args(RunStatus):
        raise EvsysError(f"the algorithm's RunResult: {not_known(str(trained.status), 'status', get_args(RunStatus))}")
    before, prefix, warnings = attempt.result, f"{stage}/" if stage else "", attempt.record.warnings
    numbers: dict[str, float] = {}
    for key, value in trained.metrics.items():
        number = as_number(value)
        if number is None:
            warnings.append(f"metric {key!r} is {type(value).__name__}, not a number; it was left out")
            continue
        numbers[prefix + str(key)] = number
        if not math.isfinite(number):
            warnings.append(f"metric {key!r} is {number}; nothing can be judged by it")
    return RunResult(
        run_id=before.run_id,
        status=trained.status,
        metrics={**before.metrics, **numbers},
        artifacts={**before.artifacts, **{str(key): str(value) for key, value in trained.artifacts.items()}},
        error=trained.error,
        extras={**before.extras, **trained.extras},
        stopped_early=trained.stopped_early or before.stopped_early,
        chosen_steps=before.chosen_steps,
    )


def _broken_off(attempt: RunAttempt, exc: BaseException) -> RunResult:
    """The result so far of a run that `exc` ended, with where it stopped and what it can resume from."""
    plan, result = attempt.plan, attempt.result
    reason: StopReason | Literal["error"] = "error"
    if isinstance(exc, Cancelled):
        reason = exc.reason
    elif plan.stop.interrupted or isinstance(exc, KeyboardInterrupt | Interrupted):
        # An interrupted library raises an error of its kind.
        reason, exc = "user", exc if isinstance(exc, KeyboardInterrupt) else Interrupted()
    if reason == "error":
        attempt.record.traceback = "".join(traceback.format_exception(exc))
        error = str(exc) if isinstance(exc, READABLE) else f"{type(exc).__name__}: {exc}"
        return replace(result, status=ENDS[reason], error=error)
    if reason == "pause":
        assert isinstance(exc, Cancelled) and exc.step is not None
        metrics = metrics_at(attempt.journal, exc.step)
        scores = {key: value for key, value in metrics.items() if key.startswith(("val/", "test/", "eval/"))}
        loss = {"final_loss": metrics["loss"]} if "loss" in metrics else {}
        return replace(
            result,
            status=ENDS[reason],
            metrics={**result.metrics, "steps": exc.step, **loss, **scores},
            paused_at=exc.step,
        )
    if reason == "user":
        plan.stop.set()  # the other runs of the experiment stop too
    stopped, hooks = None, attempt.ctx.hooks if attempt.ctx else None
    if isinstance(hooks, LoopHooks):
        algorithm = registry.algorithms.build(plan.run.algorithm.kind, dict(plan.run.algorithm.params))
        resumes = attempt.service is None or attempt.service.capabilities.resume
        resumes = resumes and getattr(algorithm, "supports_resume", True)
        stopped = replace(hooks.stopped_at(), resumes=bool(resumes))
    return replace(result, status=ENDS[reason], error=str(exc) or "interrupted", stopped_at=stopped)
