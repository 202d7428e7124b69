"""How far the runs of an experiment have come.

In: its journal, which is only read. Out: a `RunProgress` per run that was begun. A journal that cannot be read, because
it is torn or being made this moment, tells nothing.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evsys_sdk.errors import EvsysError
from evsys_sdk.record.journal import EXPERIMENT
from evsys_sdk.record.rollouts import StoredJournal
from evsys_sdk.score_names import suite_label

# Superseded events lie after the checkpoint that a run was resumed from: those steps were trained again.
LAST = """
SELECT at, data FROM events WHERE run = ? AND attempt = (SELECT max(attempt) FROM attempts WHERE run = ?)
AND superseded = 0 AND kind IN ({kinds}) ORDER BY {order} DESC LIMIT 1"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastScore:
    """What the last evaluation with a score said."""

    benchmark: str
    """`val/tools`, or the split alone for the run's own eval block."""
    step: int | None
    """None after training; 0 for the untrained model."""
    metric: str
    value: float
    n_tasks: int
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """One run that was begun."""

    run: str
    status: str | None
    """How it last ended; None while it has not."""
    step: int
    """The last training step that the journal has."""
    total_steps: int | None = None
    loss: float | None = None
    reward: float | None = None
    score: LastScore | None = None
    run_dir: str | None = None


def progress_in(journal: Path) -> list[RunProgress]:
    """The runs of a journal, in the order they were begun."""
    found = []
    try:
        with closing(StoredJournal(journal)) as opened:
            for run in opened.runs():
                if run == EXPERIMENT:
                    continue
                step, at_step = _last(opened, run, "step", order="at")
                metrics, last_eval = at_step.get("metrics", {}), _last(opened, run, "eval", "final_eval")[1]
                scores = [
                    LastScore(
                        benchmark=suite_label(last_eval["split"], last_eval["name"]),
                        step=last_eval["step"],
                        metric=score["metric"],
                        value=score["value"],
                        n_tasks=score["n_tasks"],
                        unit=score.get("unit", ""),  # journals of earlier versions have none
                    )
                    for score in last_eval.get("scores", [])
                    if score["value"] is not None
                ]
                found.append(
                    RunProgress(
                        run=run.partition("/")[2] or run,
                        status=_last(opened, run, "end")[1].get("status"),
                        step=step,
                        total_steps=_last(opened, run, "train_start")[1].get("total_steps"),
                        loss=metrics.get("loss"),
                        reward=metrics.get("reward/mean"),
                        score=scores[0] if scores else None,
                        run_dir=_last(opened, run, "run", "reused")[1].get("run_dir"),
                    )
                )
    except (EvsysError, ValueError, KeyError):
        return []
    return found


def _last(journal: StoredJournal, run: str, *kinds: str, order: str = "id") -> tuple[int, dict[str, Any]]:
    """Step and data of the last event of these kinds; 0 and nothing where there is none."""
    query = LAST.format(kinds=", ".join("?" * len(kinds)), order=order)
    rows = journal.read(query, (run, run, *kinds))
    return (rows[0][0], json.loads(rows[0][1])) if rows else (0, {})
