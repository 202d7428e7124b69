"""A run's data against the benchmarks: the contamination audit of its rows, and eval questions that are test tasks."""

from __future__ import annotations

from evsys_sdk.checks.test_selection import REMEDY, selects_by_eval, sides, that_share
from evsys_sdk.contamination.audit import (
    audits_of,
    eval_suite,
    plain,
    refusal,
    say_at_once,
)
from evsys_sdk.contamination.tasks import BenchmarkTasks
from evsys_sdk.data.rows import LoadedRows, content_sha256
from evsys_sdk.errors import DataError, EvsysError
from evsys_sdk.eval.row_eval import EVAL_DATA
from evsys_sdk.protocols import Row
from evsys_sdk.run.attempt import RunAttempt


def audit_block(attempt: RunAttempt, place: str, loaded: LoadedRows) -> LoadedRows:
    """Audit the rows of one data block; returns them unchanged."""
    plan, record, config = attempt.plan, attempt.record, attempt.plan.experiment
    if config.leakage == "off":
        return loaded
    suites, problems = plan.inputs.audited_benchmarks(config)
    # The rows that the run's `eval` block will ask are a benchmark too.
    evaluation, ctx = plan.run.eval, attempt.ctx
    if evaluation.enabled and evaluation.metrics and evaluation.eval_data is not None and ctx is not None:
        try:
            suites = [*suites, eval_suite(evaluation.eval_data, config, ctx.data_store, plan.inputs.rows)]
        except EvsysError as exc:
            problem = f"leakage: {EVAL_DATA} cannot be read and was not compared with the rows: {exc}"
            problems = [*problems, problem]
    record.warnings += [text for text in problems if text not in record.warnings]
    audits = audits_of(loaded.rows, suites, check=plan.stop.check, on_new=say_at_once)
    record.leakage += [{"place": place, **plain(audit)} for audit in audits]
    found = [audit for audit in audits if not audit.clean]
    record.warnings += [f"leakage: {audit.text}{'' if place == 'data' else f', {place}'}" for audit in found]
    if found and config.leakage == "error":
        raise DataError(refusal(place, found))
    return loaded


def audit_prompt(attempt: RunAttempt, prompt: str) -> None:
    """Audit a prompt that was searched like a row: a prompt that quotes a task is trained on it."""
    rows: list[Row] = [{"messages": [{"role": "user", "content": prompt}]}]
    audit_block(attempt, "prompt", LoadedRows(rows=rows, sha256=content_sha256(rows), source="prompt", n_raw=1))


def refuse_test_questions(attempt: RunAttempt) -> None:
    """Refuse test tasks among the rows of `eval.eval_data` where their score selects. Validation refuses what it can
    read; this is for rows that only the run itself can."""
    config, data, ctx = attempt.plan.experiment, attempt.plan.run.eval.eval_data, attempt.ctx
    if data is None or ctx is None or not selects_by_eval(config):
        return
    tests = list(sides(config, "test", attempt.plan.inputs.benchmarks))
    try:
        tasks = eval_suite(data, config, ctx.data_store, attempt.plan.inputs.rows).suite.tasks if tests else []
    except EvsysError:  # scoring them will say so
        return
    own = [BenchmarkTasks(name=EVAL_DATA, place=EVAL_DATA, tasks=tasks)] if tasks else []
    for overlap in that_share(own, tests):
        if overlap.is_most and not config.metadata.allow_test_selection:
            raise DataError(f"{overlap.text} ({overlap.test.place}), so nothing was trained; {REMEDY}")
        attempt.record.warnings.append(overlap.text)
