"""The rollouts that a record holds, read back without touching it.

In: a journal, a run's directory, or a file of rollouts. Out: `StoredEval`s. The journal comes first: it has every
rollout of every evaluation once, also of a run that was interrupted and taken up. Without it the `logs/` of the
`local_logger` are read. Training rollouts are in `logs/training/rollouts.jsonl`, the first few of each step.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from evsys_sdk.constants import EXPERIMENT_RESULT_FILE, JOURNAL_FILE, RUN_RESULT_FILE
from evsys_sdk.errors import DataError, EvsysError, shorten
from evsys_sdk.files import read_rows
from evsys_sdk.protocols import EvalResult, Rollout, Turn
from evsys_sdk.record.journal import TASKS, Journal, connect, read_eval
from evsys_sdk.record.local_logger import FOLDERS
from evsys_sdk.record.models import ExperimentRecord, RunRecord

TRAIN = "train"
"""The split of rollouts that were trained on."""
ROLLOUTS_FILE = "rollouts.jsonl"
SPLITS = {**{folder: split for split, folder in FOLDERS.items()}, "training": TRAIN}
"""Folder in `logs/` -> split."""
_LAST_STEP = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEval:
    """One evaluation as it was recorded; or the training rollouts of one run or stage."""

    run: str
    split: str
    name: str
    rollouts: list[Rollout]
    step: int | None = None
    stage: str | None = None
    metrics: list[str] = field(default_factory=list)
    """Metrics that the evaluation was scored with, where that is known."""
    clusters: dict[str, str] = field(default_factory=dict)
    """task_id -> the template it was made from, where tasks are not independent."""

    @property
    def label(self) -> str:
        return self.name if self.split == self.name else f"{self.split}/{self.name}"


class StoredJournal(Journal):
    """A journal that is only read."""

    def __init__(self, path: Path):
        self.path, self._lock = path, threading.Lock()
        # Without a write-ahead log no process has it open; then SQLite need not make files beside it to read it.
        quiet = not path.with_name(path.name + "-wal").exists()
        how = "immutable=1" if quiet else "mode=ro"
        with self._error_boundary():
            self._db = connect(f"file:{quote(str(path.absolute()))}?{how}", uri=True)

    def runs(self) -> list[str]:
        """Ids of the runs that were begun, in order."""
        query = "SELECT run FROM attempts WHERE run != '' GROUP BY run ORDER BY min(rowid)"
        return [run for (run,) in self.read(query, ())]

    def evals(self, run: str) -> list[EvalResult]:
        """The evaluations of the last attempt at a run, with their rollouts."""
        last = self.latest(run)
        if last is None:
            return []
        found = [event for event in last.events(upto=_LAST_STEP) if event.kind in ("eval", "final_eval")]
        return [read_eval(event.data, last) for event in found]

    def questions(self, run: str, benchmark: str) -> dict[str, dict[str, Any]]:
        """What the tasks of a benchmark (`val/tools`) asked and expected, by task id (`question_to_data`)."""
        query = "SELECT data FROM events WHERE run = ? AND kind = ? AND key = ? AND superseded = 0 ORDER BY id DESC"
        rows = self.read(f"{query} LIMIT 1", (run, TASKS, benchmark))
        found: dict[str, dict[str, Any]] = json.loads(rows[0][0])["tasks"] if rows else {}
        return found


def evals_in_journal(path: Path, names: Mapping[str, str]) -> list[StoredEval]:
    """What the journal holds of the runs with these ids, which are called by these names."""
    with closing(StoredJournal(path)) as journal:
        return [
            StoredEval(
                run=name,
                split=found.split,
                name=found.name,
                rollouts=found.rollouts,
                step=found.step,
                stage=found.stage,
                metrics=[score.metric for score in found.scores],
                clusters=found.clusters,
            )
            for run, name in names.items()
            for found in journal.evals(run)
            if found.rollouts
        ]


def run_ids_in(path: Path) -> list[str]:
    """Ids (`experiment/run`) of the runs in a journal."""
    with closing(StoredJournal(path)) as journal:
        return journal.runs()


def evals_in_logs(run_dir: Path, run: str) -> list[StoredEval]:
    """What the `local_logger` wrote of a run's evaluations."""
    folders = [run_dir / "logs" / folder for folder in SPLITS if SPLITS[folder] != TRAIN]
    files = [folder / ROLLOUTS_FILE for folder in folders if (folder / ROLLOUTS_FILE).is_file()]
    return [stored for file in files for stored in evals_in_file(file, run)]


def training_rollouts(run_dir: Path, run: str) -> list[StoredEval]:
    """What was kept of the rollouts that a run was trained on."""
    file = run_dir / "logs" / "training" / ROLLOUTS_FILE
    return evals_in_file(file, run) if file.is_file() else []


def evals_in_file(path: Path, run: str) -> list[StoredEval]:
    """The rollouts of a file, sorted into the evaluations that they belong to."""
    groups: dict[tuple[str, str, str, int | None, str | None], list[Rollout]] = {}
    own_split = SPLITS.get(path.parent.name, "eval")
    for line, rollout in read_rows(path, lambda row: (row, rollout_of_line(row))):
        split, of_run = line.get("split") or own_split, str(line.get("run") or line.get("model") or run)
        name, step = str(line.get("eval") or path.stem.partition(".")[0]), line.get("step")
        if split == TRAIN:  # a few rollouts of each step: together they say something, step by step they would not
            name, step = TRAIN, None
        groups.setdefault((of_run, split, name, step, line.get("stage")), []).append(rollout)
    return [
        StoredEval(run=run_name, split=split, name=name, step=step, stage=stage, rollouts=rollouts)
        for (run_name, split, name, step, stage), rollouts in groups.items()
    ]


def rollout_of_line(line: dict[str, Any]) -> Rollout:
    """A line as a rollout. One of your own making needs `task_id` and `completion`; `expected` and `instruction`, where
    it has them, stand for a task that is not at hand."""
    if line.get("task_id") is None:
        raise DataError(f"this rollout has no `task_id`; it has: {shorten(', '.join(map(str, line)), 100)}")
    if not isinstance(line.get("turns"), list) and not isinstance(line.get("completion"), str):
        raise DataError("this rollout has no `completion` (and no `turns`), so there is nothing to grade")
    said: dict[str, object] = {
        "prompt_tokens": [],
        "completion_tokens": [],
        "logprobs": [],
        "text": line.get("completion"),
    }
    turns = [said] if line.get("turns") is None else line["turns"]
    metadata = dict(line.get("metadata") or {})
    # `target` and `prompt` are what evaluations of rows call them (`eval.row_eval`).
    metadata |= {name: line[key] for key, name in (("expected", "target"), ("instruction", "prompt")) if key in line}
    try:
        return Rollout(
            task_id=str(line["task_id"]),
            turns=[Turn(**turn) for turn in turns],
            reward=None if line.get("reward") is None else float(line["reward"]),
            status=line.get("status") or "ok",
            error=line.get("error"),
            seconds=float(line.get("seconds") or 0.0),
            cost_usd=float(line.get("cost_usd") or 0.0),
            metadata=metadata,
        )
    except (TypeError, ValueError) as exc:
        raise DataError(f"this is not a rollout: {exc}") from exc


def metrics_beside(file: Path) -> list[str]:
    """What an evaluation apart from any run (`evsys benchmark run`) was scored with; its settings lie beside its
    rollouts."""
    settings = file.parent / "settings.json"
    if file.name != ROLLOUTS_FILE or not settings.exists():
        return []
    try:
        folding = json.loads(settings.read_text()).get("folding")
    except (OSError, ValueError, AttributeError) as exc:
        raise EvsysError(f"{settings} cannot be read: {exc}") from exc
    return list(folding.get("metrics") or []) if isinstance(folding, dict) else []


def journal_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.{JOURNAL_FILE}"


def experiments_in(folder: Path) -> list[str]:
    """Names, as their files have them, of the experiments whose records lie in a folder."""
    found = {
        file.name.removesuffix(f".{kind}")
        for kind in (JOURNAL_FILE, EXPERIMENT_RESULT_FILE)
        for file in folder.glob(f"*.{kind}")
    }
    return sorted(found)


def experiment_result(folder: Path, name: str) -> ExperimentRecord | None:
    """The experiment's record, if it has one; `name` is that of its files."""
    return ExperimentRecord.load(folder / f"{name}.{EXPERIMENT_RESULT_FILE}")


def runs_with_records(folder: Path, experiment: str) -> Iterator[tuple[Path, RunRecord]]:
    """Run directories in `folder` that say they belong to the experiment, with their records."""
    for file in sorted(folder.glob(f"*/{RUN_RESULT_FILE}")):
        record = RunRecord.load(file.parent)
        if record and record.experiment == experiment:
            yield file.parent, record
