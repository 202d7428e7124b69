"""A finished experiment judged again against another baseline arm, without training.

In: an experiment's record, and the arm to compare the others with. Out: the new conclusion, in the record, on the page,
in the runs' own conclusions and in the journal. The scores stay as they are: rollouts are read from the journal. That
the baseline was named after the results is part of the conclusion, and a typed hypothesis keeps the outcome it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from evsys_sdk.checks.test_selection import SUCCESS
from evsys_sdk.config.metadata import Hypothesis, Metadata
from evsys_sdk.errors import EvsysError, RecordLost, not_known
from evsys_sdk.experiment.outcome import write_record_page
from evsys_sdk.experiment.verdict import judge_experiment, not_pruned
from evsys_sdk.history.compare import run_dir_of
from evsys_sdk.history.history import ExperimentEntry, load_record
from evsys_sdk.protocols import EvalResult, RunResult
from evsys_sdk.record.environment import config_hash
from evsys_sdk.record.journal import EXPERIMENT, Journal, read_eval
from evsys_sdk.record.layout import hold, stem_of
from evsys_sdk.record.local_logger import repeat_verdict
from evsys_sdk.record.models import (
    ExperimentRecord,
    FirstVerdict,
    JudgedAgain,
    RecordedRun,
    RunRecord,
    from_data,
    in_order,
)
from evsys_sdk.record.rollouts import StoredJournal
from evsys_sdk.report.conclusion import Conclusion, ModelScore, conclude
from evsys_sdk.stats.hypothesis import HypothesisResult

JUDGED = ("verdict", "hypothesis_result", "hypothesis_in_words")
"""What of a record the verdict makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejudged:
    """The result of an experiment, judged again."""

    entry: ExperimentEntry
    baseline_arm: str
    before: str | None
    """The baseline arm until now."""
    conclusion: Conclusion
    runs: list[RunResult]
    models: list[ModelScore]
    record: ExperimentRecord


def rejudge(entry: ExperimentEntry, baseline_arm: str) -> Rejudged:
    """Judge a finished experiment against this arm and rewrite its files; EvsysError where that cannot be."""
    if entry.state in ("running", "interrupted", "unreadable"):
        raise EvsysError(f"{entry.name} is {entry.state}: {_REMEDIES[entry.state]}")
    with hold(entry.record.with_name(f".{stem_of(entry.record)}.lock"), f"experiment {entry.name!r}"):
        record = load_record(entry)
        known = [arm.arm for arm in record.arms]
        if baseline_arm not in known:
            raise EvsysError(f"--baseline-arm: {not_known(baseline_arm, 'arm', known)}")
        if not entry.journal.is_file():
            raise EvsysError(f"{entry.journal} is gone, and with it the rollouts that a verdict rests on")
        found = _judge_again(entry, record, baseline_arm)
        _rewrite_files(found)
    return found


_REMEDIES = {
    "running": "wait until it has ended, then judge it again",
    "interrupted": "run its command again to finish it, then judge it",
    "unreadable": "its record cannot be read",
}


def _judge_again(entry: ExperimentEntry, record: ExperimentRecord, baseline_arm: str) -> Rejudged:
    # The results of every arm as they were when the experiment ended, with their rollouts.
    with closing(StoredJournal(entry.journal)) as journal:
        arms = {arm.arm: [_load_run(entry, run, journal) for run in runs] for arm, runs in record.runs_of()}
    config = record.config
    asked = Metadata.model_validate(config.get("metadata") or {})
    # A typed prediction was judged when it was one: it keeps its outcome, also where it meant the baseline of then.
    typed = isinstance(asked.hypothesis, Hypothesis)
    judging = asked.model_copy(update={"baseline_arm": baseline_arm} | ({"hypothesis": ""} if typed else {}))
    searched = bool(config.get("search")) and config["search"].get("kind") != "grid"
    findings = judge_experiment(not_pruned(arms), judging, searched=searched, name=entry.name, looks=record.looks.count)
    if findings.verdict is None:
        raise EvsysError(f"{entry.name} cannot be judged: {findings.why_not}")
    scored = [arm.arm for arm in findings.verdict.arms if arm.mean is not None]
    if baseline_arm not in scored:
        names = ", ".join(scored) or "none"
        raise EvsysError(f"--baseline-arm: {baseline_arm} has no score to compare with; arms with a score: {names}")
    before = record.verdict.baseline_arm
    first = record.judged_again.first if record.judged_again else None
    # Judged a third time, what was planned is still the baseline of the first.
    first = first or FirstVerdict(baseline_arm=before, best_arm=record.best_arm)
    lines = [*record.looks.warnings, *findings.lines]
    if record.hypothesis_result:
        kept = HypothesisResult(**record.hypothesis_result)
        findings, lines = replace(findings, hypothesis_result=kept), [kept.line, *lines]
    if baseline_arm != first.baseline_arm:  # not the one that the config had planned
        was = f" instead of {first.baseline_arm}" if first.baseline_arm else ""
        chosen = f"the baseline {baseline_arm} was chosen{was} after the results were known"
        lines = [*lines, f"Post hoc: {chosen} (evsys judge)."]
    models = [_model(model) for model in record.models]
    conclusion = conclude(
        arms,
        hypothesis=str(asked.hypothesis or ""),
        success=asked.success_metric,
        findings=replace(findings, lines=lines),
        models=models,
        search=record.search,
        admitted=[str(one["text"]) for one in record.test_selection if one.get("by") != SUCCESS],
    )
    unchanged = {key: value for key, value in record.as_dict().items() if key not in JUDGED}
    changed = {
        "best_arm": conclusion.best_arm,
        "conclusion": conclusion.text,
        "arms": [asdict(arm) for arm in conclusion.arms],
        **conclusion.findings.as_dict(),
        "judged_again": JudgedAgain(
            baseline_arm=baseline_arm, ts=datetime.now(UTC).isoformat(timespec="milliseconds"), first=first
        ),
    }
    return Rejudged(
        entry=entry,
        baseline_arm=baseline_arm,
        before=before,
        conclusion=conclusion,
        runs=[run for results in arms.values() for run in results],
        models=models,
        record=ExperimentRecord.model_validate(unchanged | changed),
    )


def _load_run(entry: ExperimentEntry, run: RecordedRun, journal: StoredJournal) -> RunResult:
    folder = run_dir_of(entry, run)
    own = RunRecord.load(folder) if folder.is_dir() else None
    line = journal.latest(run.run_id)
    evals = in_order([read_eval(event.data, line) for event in line.evals()]) if line else []
    if own is None or own.run_id != run.run_id:
        own = RunRecord(run=run.run_id.rpartition("/")[2])
    return replace(
        own.to_result(folder, evals),
        run_id=run.run_id,
        status=run.status,
        metrics=dict(run.metrics),
        artifacts=run.artifacts,
        error=run.error,
        chosen_steps=run.chosen_steps,
    )


def _model(data: Mapping[str, Any]) -> ModelScore:
    """An API model's score, from its summary in the record."""
    summary = {key: value for key, value in data.items() if key not in ("model", "cost_usd")}
    result: EvalResult = from_data({**summary, "rollouts": []})
    return ModelScore(model=str(data["model"]), result=result, stored_usd=data.get("cost_usd"))


def _rewrite_files(found: Rejudged) -> None:
    """Rewrite the record, the page, the runs' conclusions and the journal, the record first."""
    entry, text = found.entry, found.conclusion.text
    try:
        found.record.write(entry.record)
    except OSError as exc:
        raise RecordLost(f"the record could not be written to {entry.record}: {exc.strerror}") from exc
    verdict = {"best_arm": found.conclusion.best_arm, "text": text, **found.conclusion.findings.as_dict()}
    with closing(Journal(entry.journal)) as journal:
        line = journal.latest(EXPERIMENT)
        if line is not None:
            line.add("verdict", verdict, at=0, key=config_hash(verdict))
    repeat_verdict(found.runs, entry.name, text)
    write_record_page(found.record, entry.record, found.conclusion, found.runs, found.models)
