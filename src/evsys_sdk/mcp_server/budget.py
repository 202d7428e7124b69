"""How much a client may launch.

In: the limits of `evsys mcp` and the configs that are to be launched. Out: permission, or a refusal that says what is
left. The budget belongs to the server process: it ends with it, and every server has its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evsys_sdk.errors import EvsysError


@dataclass(slots=True, kw_only=True)
class LaunchBudget:
    """What was allowed, and what was launched so far."""

    max_runs: int | None = None
    max_seconds: float | None = None
    runs: dict[str, int] = field(default_factory=dict)
    """Record of an experiment -> runs that were planned for it. Resuming an experiment takes no more."""

    def runs_left(self) -> int | None:
        return None if self.max_runs is None else max(0, self.max_runs - sum(self.runs.values()))

    def seconds_left(self, *, for_record: str | None = None) -> float | None:
        """What the other experiments have not taken. One that is running counts with all that it may take."""
        if self.max_seconds is None:
            return None
        others = (record for record in self.runs if record != for_record)
        return max(0.0, self.max_seconds - sum(_seconds_of(Path(record)) for record in others))

    def permit(self, *, name: str, record: str, n_runs: int, starts_again: bool) -> float | None:
        """Refuse what is beyond the budget; the seconds that the experiment may take in all, None for no limit."""
        needed = n_runs if starts_again else max(0, n_runs - self.runs.get(record, 0))
        left = self.runs_left()
        if left is not None and needed > left:
            raise EvsysError(
                f"{name} needs {needed} runs and {left} of the {self.max_runs} runs of this server are left. Launch "
                "fewer arms or seeds, or ask the user to restart the server with a larger --max-runs"
            )
        seconds = self.seconds_left(for_record=record)
        if seconds is not None and seconds < 1:
            raise EvsysError(
                f"the {self.max_seconds:g} seconds of this server are spent; {seconds:.1f} are left. Stop a running "
                "experiment, or ask the user to restart the server with a larger --max-seconds"
            )
        return None if seconds is None else math.floor(seconds)

    def note(self, record: str, n_runs: int, *, starts_again: bool) -> None:
        """Count a launch."""
        before = self.runs.get(record, 0)
        self.runs[record] = before + n_runs if starts_again else max(before, n_runs)

    def plain(self) -> dict[str, Any]:
        seconds = self.seconds_left()
        return {
            "max_runs": self.max_runs,
            "runs_left": self.runs_left(),
            "max_seconds": self.max_seconds,
            "seconds_left": None if seconds is None else round(seconds, 1),
        }


def _seconds_of(record: Path) -> float:
    """What an experiment has taken; while it is running, what it may take."""
    from evsys_sdk.history.history import read_one
    from evsys_sdk.run.status import status_of

    entry = read_one(record)
    status = status_of(entry) if entry else None
    if status is None or status.budget is None:
        return 0.0
    return float(status.budget["limits" if status.is_running else "spent"].get("seconds", 0.0))
