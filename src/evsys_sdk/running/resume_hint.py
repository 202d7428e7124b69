"""What to tell a person whose experiment was stopped: where each run stands, and the command that resumes it.

In: the note that a stopped run leaves in its record, and the command that launched the experiment. Out: sentences.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from evsys_sdk.protocols import RunResult

STOPPED_AT = "stopped_at"
"""The note in a stopped run's record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedRun:
    """Where one run was stopped."""

    run: str
    step: int
    total_steps: int | None
    checkpoint_step: int
    """The step of the newest checkpoint; 0 if there is none."""
    resumes: bool = True
    """False for an algorithm that cannot resume inside its training (TRL's trainers)."""

    def sentence(self) -> str:
        """Where it stopped and what is saved."""
        if self.step == 0:
            return f"Stopped {self.run} before the first step."
        stopped = f"Stopped {self.run} at step {self.step}" + (f" of {self.total_steps}" if self.total_steps else "")
        if not self.checkpoint_step:
            return f"{stopped}; no checkpoint saved: this run will start again."
        if not self.resumes:
            return f"{stopped}; weights saved. This algorithm or backend cannot resume: this run will start again."
        if self.checkpoint_step < self.step:
            return f"{stopped}; the last checkpoint is of step {self.checkpoint_step}."
        return f"{stopped}; checkpoint saved."


def stopped_runs(runs: Iterable[RunResult]) -> list[StoppedRun]:
    """The runs among these that were stopped, and where."""
    return [
        StoppedRun(run=run.extras.get("run_name", run.run_id), **run.extras[STOPPED_AT])
        for run in runs
        if run.status == "cancelled" and STOPPED_AT in run.extras
    ]


def resume_lines(runs: Iterable[RunResult], command: Iterable[str]) -> list[str]:
    """What to tell after an experiment that was stopped; nothing after one that was not."""
    runs = list(runs)
    cancelled = [run for run in runs if run.status == "cancelled"]
    if not cancelled:
        return []
    larger = " (with a larger budget)" if any("budget is spent" in (run.error or "") for run in cancelled) else ""
    told = [run.sentence() for run in stopped_runs(runs)]
    return [*told, f"To resume{larger}: {resume_command(command)}"]


def resume_command(command: Iterable[str]) -> str:
    """The command that resumes an experiment: the one that launched it without its `--fresh`, however short that was
    typed."""
    return shlex.join(word for word in command if not ("--fresh".startswith(word) and len(word) > len("--f")))
