"""An evaluation in a directory of its own, apart from any run: what it is, what of it is done, what came of it.

In: what was asked. Out: a locked directory with

    settings.json     what was asked
    journal.sqlite    every rollout, kept as it ends: a killed evaluation goes on from here
    result.json       the scores; written last, so that it means "finished"
    rollouts.jsonl    of a benchmark: a line per try, in the form of a run's logs

Settings come in two parts: the *subject* decides what the model does (tasks, model, sampling), the *folding* only what
is made of that (metrics, breakdowns, a limit). With the same subject the rollouts are used again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evsys_sdk.atomic import read_object, write_json
from evsys_sdk.constants import JOURNAL_FILE
from evsys_sdk.errors import EvsysError, shorten
from evsys_sdk.jsonl import write_rows
from evsys_sdk.protocols import EvalResult, FinishedRollouts, Rollout
from evsys_sdk.record.environment import config_hash, describe_environment
from evsys_sdk.record.finished import JournalledRollouts
from evsys_sdk.record.journal import Journal
from evsys_sdk.record.local_logger import rollout_record
from evsys_sdk.record.run_dir import ATTEMPTS, open_run_dir, set_aside
from evsys_sdk.redaction import redact_data

SETTINGS_FILE, RESULT_FILE, ROLLOUTS_FILE = "settings.json", "result.json", "rollouts.jsonl"
EVALUATION = "evaluation"

OnRollout = Callable[[Rollout], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is evaluated, and how it is reported; plain JSON."""

    subject: dict[str, Any]
    folding: dict[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        return config_hash(self.subject)

    def data(self) -> dict[str, Any]:
        # Through JSON and back: what was written and read must compare equal.
        settings = redact_data({"subject": self.subject, "folding": self.folding})  # as the file has them
        plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
        return plain


class WatchedRollouts:
    """Finished rollouts, with somebody who is told of each new one."""

    def __init__(self, kept: FinishedRollouts, on_rollout: OnRollout):
        self.kept, self.on_rollout = kept, on_rollout

    def find(self, task_id: str, sample: int) -> Rollout | None:
        return self.kept.find(task_id, sample)

    def add(self, task_id: str, sample: int, rollout: Rollout) -> None:
        self.kept.add(task_id, sample, rollout)
        self.on_rollout(rollout)


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """An evaluation's directory, held by this process."""

    folder: Path
    asked: Asked
    rollouts: JournalledRollouts
    started: datetime

    def finished(self, on_rollout: OnRollout | None = None) -> FinishedRollouts:
        """For whoever makes the rollouts."""
        return self.rollouts if on_rollout is None else WatchedRollouts(self.rollouts, on_rollout)

    def write_rollouts(self, result: EvalResult) -> None:
        """A line per try."""
        lines = (rollout_record(result, rollout) for rollout in result.rollouts)
        write_rows(self.folder / ROLLOUTS_FILE, lines, record=True)

    def finish(self, found: dict[str, Any]) -> dict[str, Any]:
        """Put the result on disk, last of all; returns it."""
        record = {
            **found,
            "settings": self.asked.data(),
            "environment": describe_environment(Path.cwd()),
            "started": self.started.isoformat(timespec="milliseconds"),
            "ts": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        write_json(self.folder / RESULT_FILE, record)
        return record


def finished_result(folder: Path, asked: Asked) -> dict[str, Any] | None:
    """What came of the evaluation in `folder`, if it is finished and nothing else was asked then."""
    found = read_object(folder / RESULT_FILE)
    return found if found and found.get("settings") == asked.data() else None


@contextmanager
def open_evaluation(folder: Path, asked: Asked, *, fresh: bool = False) -> Iterator[Evaluation]:
    """Hold `folder` for this evaluation, with what an earlier process finished of it."""
    _refuse_strangers(folder)
    with open_run_dir(folder):
        _take(folder, asked, fresh)
        write_json(folder / SETTINGS_FILE, asked.data())  # first: it says whose the folder is
        journal = Journal(folder / JOURNAL_FILE)
        try:
            attempt = journal.unfinished(EVALUATION, asked.fingerprint) or journal.begin(EVALUATION, asked.fingerprint)
            rollouts = JournalledRollouts(attempt, EVALUATION)
            yield Evaluation(folder=folder, asked=asked, rollouts=rollouts, started=datetime.now(UTC))
        finally:
            journal.close()


def _refuse_strangers(folder: Path) -> None:
    """Nothing that is not an evaluation's is written beside or set aside."""
    if not folder.is_dir() or (folder / SETTINGS_FILE).exists():
        return
    # Dot-files are a lock, or what a kill left of a file that was being written.
    strangers = sorted(one.name for one in folder.iterdir() if one.name != ATTEMPTS and not one.name.startswith("."))
    if strangers:
        raise EvsysError(
            f"{folder} holds something else ({shorten(', '.join(strangers), 100)}); choose another --output-dir"
        )


def _take(folder: Path, asked: Asked, fresh: bool) -> None:
    """Refuse a folder that holds another evaluation; set aside what is to be made afresh."""
    before = read_object(folder / SETTINGS_FILE)
    if before is None:
        return
    if fresh:
        set_aside(folder)
    elif before["subject"] != asked.data()["subject"]:
        changes = "; ".join(_changes(before["subject"], asked.data()["subject"]))
        raise EvsysError(
            f"{folder} holds another evaluation: {changes}. Choose another --output-dir, or set that one aside with "
            "--fresh"
        )


def _changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for key in dict.fromkeys([*before, *now]):
        if before.get(key) != now.get(key):
            yield f"{key} was {shorten(json.dumps(before.get(key)))} and is {shorten(json.dumps(now.get(key)))}"


def stamp_of(path: str | None) -> str | None:
    """Changes when files at this place are written anew; None for what is no place on this machine."""
    if path is None or not Path(path).exists():
        return None
    files = [Path(path)] if Path(path).is_file() else sorted(file for file in Path(path).rglob("*") if file.is_file())
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return config_hash({"files": facts})[:16]
