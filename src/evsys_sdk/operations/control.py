"""An experiment that runs: ask it to stop, and read what is new.

In: an experiment's name, a cursor. Out: its status, read from disk, with what became of the request or with the events
since the cursor.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evsys_sdk.errors import EvsysError, JournalDamaged
from evsys_sdk.experiment.process import ask_to_stop, wait_for_end
from evsys_sdk.history.history import read_one
from evsys_sdk.operations.place import HistoryPlace
from evsys_sdk.record.processes import ExperimentProcess
from evsys_sdk.record.rollouts import StoredJournal
from evsys_sdk.run.status import Status, status_of
from evsys_sdk.score_names import suite_label

STOP_SECONDS = 60.0
EVENTS = 50
"""Events that one call of `follow_experiment` gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopResult:
    """What became of a request to stop."""

    asked: ExperimentProcess | None
    """The process that was asked; None where none has the experiment."""
    stopped: bool
    """Whether no process has the experiment (any more)."""
    status: Status

    def plain(self) -> dict[str, Any]:
        return {"asked": self.asked is not None, "stopped": self.stopped, **self.status.plain()}


def stop_experiment(
    place: HistoryPlace,
    ref: str,
    *,
    now: bool = False,
    timeout: float = STOP_SECONDS,
    on_asked: Callable[[ExperimentProcess], None] = lambda asked: None,
) -> StopResult:
    """Ask the process of an experiment to stop, and wait for its end at most `timeout` seconds. `on_asked` is called
    before the wait."""
    entry = place.find(ref).entry
    asked = ask_to_stop(entry.record, now=now)
    if asked is not None:
        on_asked(asked)
    stopped = asked is None or wait_for_end(entry.record, timeout)
    return StopResult(asked=asked, stopped=stopped, status=status_of(read_one(entry.record) or entry))


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowEvent:
    """One thing that happened to a run."""

    run: str
    kind: str
    """begun, reused, training, step, score, ended."""
    step: int
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowResult:
    """Where an experiment stands, and what is new since the cursor."""

    since: int
    cursor: int
    """Give it as `since` to see only what comes after."""
    has_more: bool
    """Whether there are events that the limit left out; the cursor lies before them."""
    events: list[FollowEvent]
    status: Status

    def plain(self) -> dict[str, Any]:
        return {
            "experiment": self.status.experiment,
            "state": self.status.state,
            "since": self.since,
            "cursor": self.cursor,
            "has_more": self.has_more,
            "events": [asdict(event) for event in self.events],
            "status": self.status.plain(),
        }


def follow_experiment(place: HistoryPlace, ref: str, *, since: int = 0, limit: int = EVENTS) -> FollowResult:
    """What the journal has beyond `since`, oldest first: runs begun and ended, scores, and of the training steps of a
    run only the last. Returns at once, whether there is news or not."""
    entry = place.find(ref).entry
    # The status is read first: an experiment that it calls finished has all its events in the journal.
    status = status_of(entry)
    cursor, events = _read_events(entry.journal, since)
    shown = events[:limit]
    has_more = len(shown) < len(events)
    return FollowResult(
        since=since,
        cursor=shown[-1][0] if has_more and shown else cursor,
        has_more=has_more,
        events=[event for _, event in shown],
        status=status,
    )


_NEW = """
SELECT id, run, kind, at, data FROM events WHERE id > ? AND id <= ? AND superseded = 0 AND run != ''
AND kind IN ('run', 'reused', 'train_start', 'eval', 'final_eval', 'end')
UNION ALL
SELECT max(id), run, kind, at, data FROM events WHERE id > ? AND id <= ? AND superseded = 0 AND kind = 'step'
GROUP BY run
ORDER BY id"""
# SQLite gives the other columns of a `max()` query from the row that has the maximum.


def _read_events(path: Path, since: int) -> tuple[int, list[tuple[int, FollowEvent]]]:
    """The journal's last event, and what is new with the place of each."""
    if not path.is_file():
        return since, []
    try:
        with closing(StoredJournal(path)) as journal:
            [(newest,)] = journal.read("SELECT coalesce(max(id), 0) FROM events", ())
            if since > newest:
                raise EvsysError(
                    f"--since {since} lies beyond the last event ({newest}); give a cursor of this experiment"
                )
            rows = journal.read(_NEW, (since, newest, since, newest))
    except JournalDamaged:  # the status says so
        return since, []
    return newest, [(number, _event(run, kind, at, json.loads(data))) for number, run, kind, at, data in rows]


def _event(run: str, kind: str, at: int, data: dict[str, Any]) -> FollowEvent:
    name = run.partition("/")[2] or run
    words = {"run": "begun", "train_start": "training", "eval": "score", "final_eval": "score", "end": "ended"}
    detail: dict[str, Any] = {}
    # Only what fits a line for each event; the record has the rest.
    if kind == "train_start":
        detail = {"total_steps": data.get("total_steps")}
    elif kind == "step":
        metrics = data.get("metrics", {})
        detail = {key: metrics[key] for key in ("loss", "reward/mean") if key in metrics}
    elif kind in ("eval", "final_eval"):
        keys = ("metric", "value", "low", "high", "n_tasks", "n_errors")
        scores = [{key: score.get(key) for key in keys} for score in data.get("scores", [])]
        # An evaluation in the loop may end steps after its snapshot; its step is the snapshot's.
        at = data["step"] if data.get("step") is not None else at
        detail = {
            "benchmark": suite_label(data["split"], data["name"]),
            "final": kind == "final_eval" and data.get("step") is None,
            "scores": scores,
        }
    elif kind == "end":
        detail = {"status": data.get("status"), "error": data.get("error")}
    return FollowEvent(run=name, kind=words.get(kind, kind), step=at, detail=detail)
