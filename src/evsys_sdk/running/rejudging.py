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

from pydantic import BaseModel

from evsys_sdk.atomic import write_json
from evsys_sdk.config.metadata import Hypothesis, Metadata
from evsys_sdk.errors import EvsysError, RecordLost, not_known
from evsys_sdk.eval.hypothesis import HypothesisResult
from evsys_sdk.protocols import EvalResult, RunResult
from evsys_sdk.record import stored
from evsys_sdk.record.conclusion import Conclusion, Findings, ModelScore, conclude
from evsys_sdk.record.environment import config_hash
from evsys_sdk.record.eval_data import from_data, in_order
from evsys_sdk.record.experiment_page import PageFacts, write_page
from evsys_sdk.record.finished import retold
from evsys_sdk.record.history import Entry, read_record, stem_of
from evsys_sdk.record.journal import EXPERIMENT, Journal
from evsys_sdk.record.local_logger import repeat_verdict
from evsys_sdk.record.run_dir import hold
from evsys_sdk.record.setup import setup_of
from evsys_sdk.running.admissions import SUCCESS
from evsys_sdk.running.search_text import search_lines
from evsys_sdk.running.task_values import run_dir_of
from evsys_sdk.running.verdicts import judge_experiment, not_pruned

JUDGED = ("verdict", "hypothesis_result", "hypothesis_in_words")
"""What of a record the verdict makes."""
JUDGED_AGAIN = "judged_again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejudged:
    """What an experiment came to, judged again."""

    entry: Entry
    baseline_arm: str
    before: str | None
    """The baseline arm until now."""
    conclusion: Conclusion
    runs: list[RunResult]
    record: dict[str, Any]


def rejudge(entry: Entry, baseline_arm: str) -> Rejudged:
    """Judge a finished experiment against this arm and rewrite its files; EvsysError where that cannot be."""
    if entry.state in ("running", "interrupted", "unreadable"):
        raise EvsysError(f"{entry.name} is {entry.state}: {_REMEDIES[entry.state]}")
    with hold(entry.record.with_name(f".{stem_of(entry.record)}.lock"), f"experiment {entry.name!r}"):
        record = read_record(entry)
        known = [str(arm["arm"]) for arm in record.get("arms") or []]
        if baseline_arm not in known:
            raise EvsysError(f"--baseline-arm: {not_known(baseline_arm, 'arm', known)}")
        if not entry.journal.is_file():
            raise EvsysError(f"{entry.journal} is gone, and with it the rollouts that a verdict rests on")
        found = _judged(entry, record, baseline_arm)
        _write(found)
    return found


_REMEDIES = {
    "running": "wait until it has ended, then judge it again",
    "interrupted": "run its command again to finish it, then judge it",
    "unreadable": "its record cannot be read",
}


def _judged(entry: Entry, record: dict[str, Any], baseline_arm: str) -> Rejudged:
    arms = _arms(entry, record)
    config = record.get("config") or {}
    asked = Metadata.model_validate(config.get("metadata") or {})
    before = (record.get("verdict") or {}).get("baseline_arm")
    # A typed prediction was judged when it was one: it keeps its outcome, also where it meant the baseline of then.
    typed = isinstance(asked.hypothesis, Hypothesis)
    update = {"baseline_arm": baseline_arm} | ({"hypothesis": ""} if typed else {})
    searched = bool(config.get("search")) and config["search"].get("kind") != "grid"
    judging = BaseModel.model_copy(asked, update=update)
    looks = int((record.get("looks") or {}).get("count") or 1)
    findings = judge_experiment(not_pruned(arms), judging, searched=searched, name=entry.name, looks=looks)
    scored = [arm for arm in (findings.data.get("verdict") or {}).get("arms", []) if arm["mean"] is not None]
    if findings.why_not is None and baseline_arm not in [arm["arm"] for arm in scored]:
        names = ", ".join(arm["arm"] for arm in scored) or "none"
        raise EvsysError(f"--baseline-arm: {baseline_arm} has no score to compare with; arms with a score: {names}")
    if findings.why_not is not None:
        raise EvsysError(f"{entry.name} cannot be judged: {findings.why_not}")
    first = (record.get(JUDGED_AGAIN) or {}).get("first")
    first = first or {"baseline_arm": before, "best_arm": record.get("best_arm")}
    findings = _with_outcome(findings, record)
    conclusion = conclude(
        arms,
        hypothesis=str(asked.hypothesis or ""),
        success=asked.success_metric,
        findings=_with_admission(findings, baseline_arm, first["baseline_arm"]),
        models=[_model(model) for model in record.get("models") or []],
        search=search_lines(record["search"]) if record.get("search") else (),
        admitted=[str(one["text"]) for one in record.get("test_selection") or [] if one.get("by") != SUCCESS],
    )
    again = {"baseline_arm": baseline_arm, "ts": _now(), "first": first}
    kept = {key: value for key, value in record.items() if key not in JUDGED}
    told = kept | {
        "best_arm": conclusion.best_arm,
        "conclusion": conclusion.text,
        "arms": [asdict(arm) for arm in conclusion.arms],
        **conclusion.findings.data,
        JUDGED_AGAIN: again,
    }
    return Rejudged(
        entry=entry,
        baseline_arm=baseline_arm,
        before=before,
        conclusion=conclusion,
        runs=[run for results in arms.values() for run in results],
        record=told,
    )


def _with_outcome(findings: Findings, record: Mapping[str, Any]) -> Findings:
    """The findings with what became of a typed hypothesis at the end of the experiment."""
    judged = record.get("hypothesis_result")
    if not judged:
        return findings
    line = HypothesisResult(**judged).line
    return replace(findings, lines=[line, *findings.lines], data={**findings.data, "hypothesis_result": judged})


def _with_admission(findings: Findings, baseline_arm: str, planned: str | None) -> Findings:
    """The findings, saying so where the baseline is not the one that the config had planned."""
    if baseline_arm == planned:
        return findings
    was = f" instead of {planned}" if planned else ""
    line = f"Post hoc: the baseline {baseline_arm} was chosen{was} after the results were known (evsys judge)."
    return replace(findings, lines=[*findings.lines, line])


def _arms(entry: Entry, record: Mapping[str, Any]) -> dict[str, list[RunResult]]:
    """The results of every arm as they were when the experiment ended, with their rollouts."""
    with closing(stored.StoredJournal(entry.journal)) as journal:
        runs = iter([_run(entry, run, journal) for run in record.get("runs") or []])
        return {str(arm["arm"]): [next(runs) for _ in arm["statuses"]] for arm in record["arms"]}


def _run(entry: Entry, run: Mapping[str, Any], journal: stored.StoredJournal) -> RunResult:
    folder = run_dir_of(entry, run)
    own = stored.run_result(folder) if folder.is_dir() else {}
    own = own if own.get("run_id") == run["run_id"] else {}
    line = journal.latest(str(run["run_id"]))
    extras: dict[str, Any] = {
        **(own.get("notes") or {}),
        **{key: own[key] for key in ("seed", "warnings", "leakage", "reused_from") if key in own},
        "run_name": own.get("run") or str(run["run_id"]).rpartition("/")[2],
        "run_dir": str(folder),
        "evals": in_order([retold(event.data, line) for event in line.evals()]) if line else [],
    }
    return RunResult(
        run_id=str(run["run_id"]),
        status=run["status"],
        metrics=dict(run.get("metrics") or {}),
        artifacts=dict(run.get("artifacts") or {}),
        error=run.get("error"),
        extras=extras,
    )


def _model(told: Mapping[str, Any]) -> ModelScore:
    """An API model's score, from its summary in the record."""
    summary = {key: value for key, value in told.items() if key not in ("model", "cost_usd")}
    result: EvalResult = from_data({**summary, "rollouts": []})
    return ModelScore(model=str(told["model"]), result=result, stored_usd=told.get("cost_usd"))


def _write(found: Rejudged) -> None:
    """Rewrite the record, the page, the runs' conclusions and the journal, the record first."""
    entry, record, text = found.entry, found.record, found.conclusion.text
    try:
        write_json(entry.record, record)
    except OSError as exc:
        raise RecordLost(f"the record could not be written to {entry.record}: {exc.strerror}") from exc
    verdict = {"best_arm": found.conclusion.best_arm, "text": text, **found.conclusion.findings.data}
    with closing(Journal(entry.journal)) as journal:
        line = journal.latest(EXPERIMENT)
        if line is not None:
            line.add("verdict", verdict, at=0, key=config_hash(verdict))
    repeat_verdict(found.runs, entry.name, text)
    config = record.get("config") or {}
    write_page(
        PageFacts(
            name=entry.name,
            file_name=stem_of(entry.record),
            folder=entry.record.parent,
            conclusion=found.conclusion,
            runs=found.runs,
            seconds=float(record.get("seconds") or 0.0),
            description=str(config.get("description") or ""),
            parent=record.get("parent_experiment_id"),
            hypothesis=_claim(config),
            setup=setup_of(config),
            models=[_model(model) for model in record.get("models") or []],
            budget=record.get("budget"),
            warnings=list(record.get("warnings") or []),
        )
    )


def _claim(config: Mapping[str, Any]) -> str:
    return str(Metadata.model_validate(config.get("metadata") or {}).hypothesis or "")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
