"""Stopping a run at a step on purpose, to go on with it later or to leave it there.

In: a run's plan with a step to pause at. Out: the run's result as far as it came, with the status `pruned`: that is
what it is unless somebody goes on with it. The loop keeps a checkpoint first; the same plan with a later pause, or
none, goes on from there exactly.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from evsys_sdk.atomic import write_json
from evsys_sdk.constants import RUN_RESULT_FILE
from evsys_sdk.errors import Cancelled
from evsys_sdk.protocols import RunResult
from evsys_sdk.record.callbacks import eval_metrics
from evsys_sdk.record.eval_data import from_data
from evsys_sdk.record.journal import RunJournal

if TYPE_CHECKING:
    from evsys_sdk.running.workbench import Workbench

PAUSED_AT = "paused_at"
"""The note in a run's record: the step after which it was stopped."""


class Paused(Cancelled):
    """The run has come to the step it was to come to."""

    def __init__(self, step: int):
        super().__init__(f"paused at step {step}")
        self.step = step


def metrics_at(journal: RunJournal, step: int) -> dict[str, float]:
    """The last score of each kind and the last step's numbers, as they stood after `step`."""
    found: dict[str, float] = {}
    for event in journal.events(upto=step):
        if event.kind == "step":
            found.update(event.data["metrics"])
        elif event.kind == "eval" and event.at > 0:  # at 0 it was the untrained model
            told = {key: value for key, value in event.data.items() if key not in ("kept", "order")}
            found.update(eval_metrics(from_data(told)))
    return found


def paused_result(bench: Workbench, step: int) -> RunResult:
    """What a run has come to that is paused after `step`."""
    metrics = metrics_at(bench.journal, step)
    scores = {key: value for key, value in metrics.items() if key.startswith(("val/", "test/", "eval/"))}
    loss = {"final_loss": metrics["loss"]} if "loss" in metrics else {}
    return replace(
        bench.result,
        status="pruned",
        metrics={**bench.result.metrics, "steps": step, **loss, **scores},
        extras={**bench.result.extras, PAUSED_AT: step},
    )


def end_key(result: RunResult) -> str:
    """Under which key the journal has the end of a run; it may be paused several times."""
    return f"{result.status}@{result.extras[PAUSED_AT]}" if PAUSED_AT in result.extras else result.status


def was_paused_at(journal: RunJournal, step: int) -> bool:
    """Whether the run stopped after this step because it was to."""
    return any(event.kind == "end" and event.key == f"pruned@{step}" for event in journal.events(upto=0))


def amend(run_dir: Path, result: RunResult) -> None:
    """Put another end into the record of a run that is paused."""
    path = run_dir / RUN_RESULT_FILE
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return  # it left none, so there is nothing that says otherwise
    write_json(path, {**record, "status": result.status, "error": result.error})
