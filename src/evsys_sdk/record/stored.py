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

from evsys_sdk import jsonl
from evsys_sdk.constants import EXPERIMENT_RESULT_FILE, JOURNAL_FILE, RUN_RESULT_FILE
from evsys_sdk.errors import DataError, EvsysError, shorten
from evsys_sdk.protocols import EvalResult, Rollout, Turn
from evsys_sdk.record.finished import retold
from evsys_sdk.record.journal import Journal, connect
from evsys_sdk.record.local_logger import FOLDERS

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
    """It was scored with these, where that is known."""
    clusters: dict[str, str] = field(default_factory=dict)
    """task_id -> the template it was made from, where tasks are not independent."""

    @property
    def label(self) -> str:
        return self.name if self.split == self.name else f"{self.split}/{self.name}"


class StoredJournal(Journal):
    """A journal that is only read."""

    def __init__(self, path: Path):
        self.path, self._lock = path, threading.Lock()
        # Without a write-ahead log nobody has it open; then SQLite need not make files beside it to read it.
        quiet = not path.with_name(path.name + "-wal").exists()
        how = "immutable=1" if quiet else "mode=ro"
        with self._blamed():
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
        return [retold(event.data, last) for event in found]


def evals_in_journal(path: Path, names: Mapping[str, str]) -> list[StoredEval]:
    """What the journal holds of the runs with these ids, which are called by these names."""
    with closing(StoredJournal(path)) as journal:
        return [_stored(name, found) for run, name in names.items() for found in journal.evals(run) if found.rollouts]


def run_ids_in(path: Path) -> list[str]:
    """Ids (`experiment/run`) of the runs in a journal."""
    with closing(StoredJournal(path)) as journal:
        return journal.runs()


def _stored(run: str, result: EvalResult) -> StoredEval:
    return StoredEval(
        run=run,
        split=result.split,
        name=result.name,
        rollouts=result.rollouts,
        step=result.step,
        stage=result.stage,
        metrics=[score.metric for score in result.scores],
        clusters=result.clusters,
    )


def evals_in_logs(run_dir: Path, run: str) -> list[StoredEval]:
    """What the `local_logger` wrote of a run's evaluations."""
    folders = [run_dir / "logs" / folder for folder in SPLITS if SPLITS[folder] != TRAIN]
    files = [folder / ROLLOUTS_FILE for folder in folders if (folder / ROLLOUTS_FILE).is_file()]
    return [stored for file in files for stored in evals_in_file(file, run)]


def training_rollouts(run_dir: Path, run: str) -> list[StoredEval]:
    """What was kept of the rollouts that a run was trained on."""
    file = run_dir / "logs" / "training" / ROLLOUTS_FILE
    return evals_in_file(file, run) if file.is_file() else []


Key = tuple[str, str, str, int | None, str | None]


def evals_in_file(path: Path, run: str) -> list[StoredEval]:
    """The rollouts of a file, sorted into the evaluations that they belong to."""
    groups: dict[Key, list[Rollout]] = {}
    own_split = SPLITS.get(path.parent.name, "eval")
    for line, rollout in jsonl.read_rows(path, lambda row: (row, rollout_of_line(row))):
        groups.setdefault(_key(line, run, own_split, path), []).append(rollout)
    return [
        StoredEval(run=run_name, split=split, name=name, step=step, stage=stage, rollouts=rollouts)
        for (run_name, split, name, step, stage), rollouts in groups.items()
    ]


def _key(line: dict[str, Any], run: str, split: str, path: Path) -> Key:
    split = line.get("split") or split
    run = str(line.get("run") or line.get("model") or run)
    if split == TRAIN:  # a few rollouts of each step: together they say something, step by step they would not
        return run, split, TRAIN, None, line.get("stage")
    return run, split, str(line.get("eval") or path.stem.partition(".")[0]), line.get("step"), line.get("stage")


def rollout_of_line(line: dict[str, Any]) -> Rollout:
    """A line as a rollout. One of your own making needs `task_id` and `completion`; `expected` and `instruction`, where
    it has them, stand for a task that is not at hand."""
    if line.get("task_id") is None:
        raise DataError(f"this rollout has no `task_id`; it has: {shorten(', '.join(map(str, line)), 100)}")
    if not isinstance(line.get("turns"), list) and not isinstance(line.get("completion"), str):
        raise DataError("this rollout has no `completion` (and no `turns`), so there is nothing to grade")
    metadata = dict(line.get("metadata") or {})
    metadata |= {name: line[key] for key, name in (("expected", "target"), ("instruction", "prompt")) if key in line}
    try:
        return Rollout(
            task_id=str(line["task_id"]),
            turns=_turns(line),
            reward=_number(line.get("reward")),
            status=line.get("status") or "ok",
            error=line.get("error"),
            seconds=float(line.get("seconds") or 0.0),
            cost_usd=float(line.get("cost_usd") or 0.0),
            metadata=metadata,
        )
    except (TypeError, ValueError) as exc:
        raise DataError(f"this is not a rollout: {exc}") from exc


def _turns(line: dict[str, Any]) -> list[Turn]:
    turns = line.get("turns")
    if turns is None:
        turns = [{"prompt_tokens": [], "completion_tokens": [], "logprobs": [], "text": line["completion"]}]
    return [Turn(**turn) for turn in turns]


def _number(reward: Any) -> float | None:
    return None if reward is None else float(reward)


def metrics_beside(file: Path) -> list[str]:
    """What an evaluation apart from any run (`evsys benchmark run`) was scored with; its settings lie beside its
    rollouts."""
    folding = _json(file.parent / "settings.json").get("folding") if file.name == ROLLOUTS_FILE else None
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


def run_result(run_dir: Path) -> dict[str, Any]:
    """The run's own record, or nothing where it did not get as far."""
    return _json(run_dir / RUN_RESULT_FILE)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise EvsysError(f"{path} cannot be read: {exc}") from exc
    return found if isinstance(found, dict) else {}


def experiment_result(folder: Path, name: str) -> dict[str, Any]:
    """The experiment's own record, or nothing where it did not get as far; `name` is that of its files."""
    return _json(folder / f"{name}.{EXPERIMENT_RESULT_FILE}")


def runs_with_records(folder: Path, experiment: str) -> Iterator[Path]:
    """Run directories in `folder` that say they belong to the experiment."""
    for file in sorted(folder.glob(f"*/{RUN_RESULT_FILE}")):
        if run_result(file.parent).get("experiment") == experiment:
            yield file.parent
