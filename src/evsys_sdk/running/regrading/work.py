"""Grade stored rollouts anew, without asking the model again.

In: a `Request`. Out: a `Report`: per evaluation the old and the new scores and what changed, and the same on disk in a
folder of its own. The record that was read stays as it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evsys_sdk import registry
from evsys_sdk.asyncs import run_async
from evsys_sdk.atomic import to_json, whole_file, write_json
from evsys_sdk.config.project import import_extensions
from evsys_sdk.data.rows import collector_paused
from evsys_sdk.data_types import HarborTask
from evsys_sdk.errors import EvsysError, closest
from evsys_sdk.eval.benchmark import Benchmark
from evsys_sdk.eval.scoring import NamedMetric
from evsys_sdk.protocols import Rollout
from evsys_sdk.record.eval_data import rollout_to_data
from evsys_sdk.record.stored import ROLLOUTS_FILE, TRAIN, StoredEval
from evsys_sdk.running.regrading.comparing import Comparison, compare, plain
from evsys_sdk.running.regrading.found import Found, find_record
from evsys_sdk.running.regrading.grading import Job, Regraded, graded, refuse_ungradable
from evsys_sdk.running.regrading.tasks import TaskFinder, Tasks, carried_task, config_of, with_verifier

CONCURRENCY = 32
SUMMARY_FILE = "regrade.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to grade, and by what."""

    target: Path
    benchmark: Benchmark | None = None
    """Tasks whose verifiers are used, instead of those that the config names."""
    verifier: str | None = None
    """A registered verifier that stands for every task's own."""
    params: dict[str, Any] = field(default_factory=dict)
    metrics: Sequence[str] = ()
    """Instead of those of the record."""
    only: Sequence[str] = ()
    """Splits, names of evaluations or runs."""
    config: str | None = None
    out: Path | None = None
    concurrency: int = CONCURRENCY


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of it."""

    comparisons: list[Comparison]
    notes: list[str]
    folder: Path
    seconds: float


def regrade(request: Request) -> Report:
    """Read, grade, compare, write."""
    with collector_paused():
        return _regrade(request)


def _regrade(request: Request) -> Report:
    started = time.monotonic()
    out = _free_folder(request.out) if request.out else None
    found = find_record(request.target)
    evals = _chosen(found, request)
    finder = _finder(found, request)
    notes = _changed_suites(found, finder, evals) if request.benchmark is None else []
    jobs = [(stored, _with_tasks(stored, finder.tasks_of(stored), request)) for stored in evals]
    jobs = _with_something(jobs, notes)
    refuse_ungradable({id(task): task for _, pairs in jobs for _, task in pairs if task is not None}.values())
    comparisons = [
        compare(stored, run_async(graded(pairs, request.concurrency)), _metrics(stored, request, found, finder))
        for stored, pairs in jobs
    ]
    folder = out or _next_folder(found.regrades)
    report = Report(comparisons=comparisons, notes=notes, folder=folder, seconds=time.monotonic() - started)
    write(report, request)
    return report


def _chosen(found: Found, request: Request) -> list[StoredEval]:
    """The evaluations that were asked for: by default all of them, and not what was trained on."""
    everything = [*found.evals, *found.training]
    if not request.only:
        if not found.evals:
            hint = "; it has training rollouts: --only train" if found.training else ""
            raise EvsysError(f"{request.target} holds no rollouts of evaluations{hint}")
        return found.evals
    known = {word for stored in everything for word in _words(stored)}
    for word in request.only:
        if word not in known:
            near = closest(word, known)
            hint = f"; closest: {near}" if near else ""
            has = ", ".join(sorted(known)) or "none"
            raise EvsysError(f"--only {word}: the record has no such rollouts{hint}; it has: {has}")
    return [stored for stored in everything if set(request.only) & _words(stored)]


def _words(stored: StoredEval) -> set[str]:
    return {stored.split, stored.name, stored.label, stored.run}


def _finder(found: Found, request: Request) -> TaskFinder:
    """Where tasks come from; the project's own extensions are imported on the way."""
    config = config_of(found.experiment, request.config, found.regrades.absolute().parent)
    if config is not None:
        import_extensions(config)
    return TaskFinder(config=config, benchmark=request.benchmark, only_targets=request.verifier is not None)


def _changed_suites(found: Found, finder: TaskFinder, evals: list[StoredEval]) -> list[str]:
    """Which benchmarks are not what they were when the rollouts were made."""
    notes: dict[str, None] = {}
    for stored in evals:
        suite = finder.suite_of(stored)
        known = found.runs.get(stored.run, {}).get("environment", {}).get("benchmarks", [])
        then = next((one["sha256"] for one in known if one["name"] == f"{stored.split}/{stored.name}"), None)
        if suite is not None and then is not None and suite.sha256 != then:
            notes[f"{stored.label}: the tasks are not the ones of the run any more; graded by those of now"] = None
    return list(notes)


def _with_tasks(stored: StoredEval, tasks: Tasks, request: Request) -> list[Job]:
    known: dict[str, HarborTask | None] = {}
    for rollout in stored.rollouts:
        if rollout.task_id not in known:
            task = tasks.get(rollout.task_id) or carried_task(rollout)
            replaced = task and request.verifier and with_verifier(task, request.verifier, request.params)
            known[rollout.task_id] = replaced or task
    return [(rollout, known[rollout.task_id]) for rollout in stored.rollouts]


def _with_something(jobs: list[tuple[StoredEval, list[Job]]], notes: list[str]) -> list[tuple[StoredEval, list[Job]]]:
    """The evaluations of which at least one task is known; the others are told of."""
    known = [(stored, pairs) for stored, pairs in jobs if any(task is not None for _, task in pairs)]
    for stored, pairs in jobs:
        if all(task is None for _, task in pairs):
            notes.append(f"{stored.label} of {stored.run} is left out: none of its tasks is known")
    if known:
        return known
    first = jobs[0][1][0][0].task_id
    raise EvsysError(
        f"the tasks of these rollouts are not known (e.g. {first!r}): a rollout keeps its task's id, and the task says "
        "what was asked and expected. Name them with --benchmark PATH, or the config with --config FILE; or give each "
        "line of your own file `expected`"
    )


def _metrics(stored: StoredEval, request: Request, found: Found, finder: TaskFinder) -> list[NamedMetric]:
    """What to fold with: as asked, else as the evaluation was, with the mean reward that any verifier changes."""
    if request.metrics:
        return [(name, registry.metrics.build(name, {})) for name in request.metrics]
    own = _metrics_then(stored, found, finder)
    if "mean_reward" not in own:
        own["mean_reward"] = {}
    return [(name, registry.metrics.build(name, params)) for name, params in own.items()]


def _metrics_then(stored: StoredEval, found: Found, finder: TaskFinder) -> dict[str, dict[str, Any]]:
    """Name -> params of the metrics that the evaluation was scored with."""
    block = found.runs.get(stored.run, {}).get("hparams", {}).get("eval", {})
    if stored.split == "eval" and block.get("metrics"):
        return {spec["kind"]: spec.get("params", {}) for spec in block["metrics"]}
    entry = finder.entry_of(stored)
    usual = [] if stored.split == TRAIN else ["pass@1"]
    return {name: {} for name in stored.metrics or (entry.metrics if entry else usual)}


def _free_folder(folder: Path) -> Path:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise EvsysError(f"--out {folder} is not an empty folder; a new record is never written over another")
    return folder


def _next_folder(regrades: Path) -> Path:
    numbers = [int(entry.name) for entry in regrades.glob("*") if entry.name.isdigit()]
    return regrades / str(max(numbers, default=0) + 1)


def write(report: Report, request: Request) -> None:
    """The new record: every rollout with its old and new reward, and last of all the summary."""
    try:
        with whole_file(report.folder / ROLLOUTS_FILE) as handle:
            for comparison in report.comparisons:
                for pair in comparison.pairs:
                    line = to_json(_line(comparison.eval, pair)) + "\n"
                    handle.write(line.encode("utf-8", "backslashreplace"))
        write_json(report.folder / SUMMARY_FILE, summary(report, request))
    except OSError as exc:
        raise EvsysError(f"the new record cannot be written to {report.folder}: {exc.strerror or exc}") from exc


def _line(stored: StoredEval, pair: Regraded) -> dict[str, Any]:
    place = {"run": stored.run, "split": stored.split, "eval": stored.name, "step": stored.step, "stage": stored.stage}
    before = {"old_reward": pair.old.reward, "old_status": pair.old.status, "old_error": pair.old.error}
    return {**place, "completion": pair.new.completion, **rollout_to_data(_in_words(pair.new)), **before}


def _in_words(rollout: Rollout) -> Rollout:
    """The rollout with its tokens counted and not listed: they are in the old record, and a verdict is on words."""
    turns = [replace(turn, prompt_tokens=[], completion_tokens=[], logprobs=[]) for turn in rollout.turns]
    counted = {
        "n_input_tokens": sum(len(turn.prompt_tokens) for turn in rollout.turns),
        "n_output_tokens": sum(len(turn.completion_tokens) for turn in rollout.turns),
    }
    known = {name: count for name, count in counted.items() if count}
    return replace(rollout, turns=turns, metadata={**rollout.metadata, **known})


def summary(report: Report, request: Request) -> dict[str, Any]:
    """The report as plain data: what `--json` prints and `regrade.json` holds."""
    suite = request.benchmark
    return {
        "source": str(request.target.absolute()),
        "benchmark": suite and {"name": suite.name, "sha256": suite.sha256},
        "verifier": request.verifier,
        "params": request.params,
        "evals": [plain(comparison) for comparison in report.comparisons],
        "notes": report.notes,
        "record": str(report.folder),
        "seconds": round(report.seconds, 3),
        "ts": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }
