"""Past experiments: the list, one of them, several compared, and what to know before the next.

In: where experiments are, and conditions. Out: typed results; `plain()` is what `--json` prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from evsys_sdk.history.compare import Compared, compare
from evsys_sdk.history.history import ExperimentEntry, History, ResolvedExperiment, read_record, select
from evsys_sdk.history.leaderboard import BenchmarkLooks, looks_of
from evsys_sdk.history.progress import RunProgress, progress_in
from evsys_sdk.operations.place import HistoryPlace, import_metrics
from evsys_sdk.record.deployments import RecordedDeployment, read_deployments


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryList:
    """Experiments, newest first, and how often each set of tasks was selected on."""

    entries: list[ExperimentEntry]
    left_out: int
    """How many more fit, beyond the limit."""
    n_known: int
    looks: list[BenchmarkLooks]
    problems: list[str]

    def plain(self) -> dict[str, Any]:
        return {
            "experiments": [plain_entry(entry) for entry in self.entries],
            "left_out": self.left_out,
            "benchmarks": [one.as_dict() for one in self.looks],
            "problems": self.problems,
        }


def list_experiments(
    place: HistoryPlace,
    *,
    tags: Sequence[str] = (),
    statuses: Sequence[str] = (),
    metrics: Sequence[str] = (),
    limit: int | None = None,
) -> HistoryList:
    """The experiments that fit all conditions."""
    known = place.history()
    looks = looks_of(known.entries)
    found = select(known.entries, tags=tags, statuses=statuses, conditions=metrics)
    return HistoryList(
        entries=list(found[:limit]),
        left_out=max(0, len(found) - limit) if limit else 0,
        n_known=len(known.entries),
        looks=looks,
        problems=list(known.problems),
    )


def plain_entry(entry: ExperimentEntry) -> dict[str, Any]:
    """An experiment as `--json` prints it in a list."""
    digest, notes = entry.digest, entry.notes
    top = digest.top
    return {
        "name": entry.name,
        "status": entry.status,
        "state": entry.state,
        "when": entry.date,
        "record": str(entry.record),
        "tags": digest.tags,
        "hypothesis": digest.hypothesis,
        "setup": digest.setup,
        "untrained": digest.untrained,
        "outcome": digest.outcome,
        "metric": digest.metric,
        "mode": digest.mode,
        "measured": digest.measured,
        "ranked": digest.selects,
        "best_arm": digest.best_arm,
        "top_arm": top.arm if top else None,
        "score": top.mean if top else None,
        "expected": digest.expected,
        "arms": [asdict(arm) | {"mean": arm.mean} for arm in digest.arms],
        "conclusion": digest.conclusion,
        "leakage": digest.leakage,
        "conclusions": [asdict(note) for note in notes.conclusions],
        "invalid": notes.why_invalid,
        "earlier_notes": notes.earlier,
        "parent": digest.parent,
        "seconds": digest.seconds,
        "problem": entry.problem,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownExperiment:
    """One experiment with its whole record, the config included."""

    found: ResolvedExperiment
    record: dict[str, Any]
    progress: list[RunProgress]
    """Of an experiment that is running or was interrupted."""
    deployments: list[RecordedDeployment]

    def plain(self) -> dict[str, Any]:
        return plain_entry(self.found.entry) | {
            "note": self.found.note,
            "progress": [asdict(run) for run in self.progress],
            "deployments": [one.model_dump() for one in self.deployments],
            "record_data": self.record,
        }


def show_experiment(place: HistoryPlace, ref: str | None) -> ShownExperiment:
    """The experiment called `ref`, or the newest."""
    found = place.find_or_newest(ref)
    entry = found.entry
    progress = progress_in(entry.journal) if entry.state in ("running", "interrupted") else []
    deployments = read_deployments(entry.record)
    return ShownExperiment(found=found, record=read_record(entry), progress=progress, deployments=deployments)


def compare_experiments(
    place: HistoryPlace, experiments: Sequence[str], *, metric: str | None = None, imports: Sequence[str] = ()
) -> Compared:
    """Experiments side by side, the first one as the baseline. Imports the project's own metrics."""
    import_metrics(imports)
    return compare(experiments, place.history(), metric=metric)


def plain_compared(found: Compared) -> dict[str, Any]:
    """A comparison as `--json` prints it."""
    sides = [
        {
            "label": side.label,
            "experiment": side.entry.name,
            "arm": side.arm.arm,
            "status": side.entry.status,
            "record": str(side.entry.record),
            "seeds": len(side.arm.scores),
            "training_marks": side.arm.training_marks,
        }
        for side in found.sides
    ]
    verdicts = [{"split": one.split, "benchmark": one.name, **one.verdict.as_dict()} for one in found.verdicts]
    scores = {"settings": found.settings, "scores": found.scores}
    return {"sides": sides, **scores, "verdicts": verdicts, "notes": found.notes}


def tagged_history(place: HistoryPlace, tags: Sequence[str]) -> History:
    """What `evsys context` is made from: the experiments with these tags, or all of them."""
    known = place.history()
    return replace(known, entries=select(known.entries, tags=tags))
