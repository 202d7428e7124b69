"""What a search has asked, heard and decided: events in the experiment's own line of the journal.

In: trials before they run, their values after, and which of them go on. Out: the same after a kill. What is noted once
stands: the values that later trials were drawn by, and the rungs that were decided, do not change any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from evsys_sdk.record.journal import RunJournal
from evsys_sdk.running.search_sampler import Trial

TRIAL, VALUE, RUNG = "trial", "value", "rung"
END = "end"
"""Where a value was measured: at a step, or at the end of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a trial came to at a rung, or in the end."""

    value: float | None
    """None where it has no score there."""
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """Who stopped at a step, and who went on."""

    step: int
    trials: tuple[int, ...]
    go_on: tuple[int, ...]


@dataclass(slots=True)
class SearchState:
    """The search so far."""

    line: RunJournal
    trials: dict[int, Trial] = field(default_factory=dict)
    values: dict[tuple[int, str], Told] = field(default_factory=dict)
    """(trial, step or `end`) -> what it came to there."""
    rungs: dict[int, Rung] = field(default_factory=dict)

    @classmethod
    def of(cls, line: RunJournal) -> SearchState:
        """The search as the journal knows it."""
        state = cls(line)
        for event in line.events(upto=0):
            state._take(event.kind, event.data)
        return state

    def _take(self, kind: str, data: dict[str, Any]) -> None:
        if kind == TRIAL:
            self.trials[data["number"]] = Trial(number=data["number"], picks=data["picks"], params=data["params"])
        elif kind == VALUE:
            told = Told(value=data["value"], status=data["status"])
            self.values[data["number"], data["at"]] = told
        elif kind == RUNG:
            rung = Rung(step=data["step"], trials=tuple(data["trials"]), go_on=tuple(data["go_on"]))
            self.rungs[rung.step] = rung

    def asked(self, trial: Trial) -> None:
        """A trial is going to run."""
        data = {"number": trial.number, "params": trial.params, "picks": trial.picks}
        self._note(TRIAL, str(trial.number), data)

    def told(self, number: int, step: int | None, told: Told) -> None:
        """A trial has run as far as `step`, or to its end."""
        at = END if step is None else str(step)
        self._note(VALUE, f"{number}@{at}", {"number": number, "at": at, "value": told.value, "status": told.status})

    def decided(self, step: int, trials: Sequence[int], go_on: Sequence[int]) -> Rung:
        """At `step` some go on."""
        self._note(RUNG, str(step), {"step": step, "trials": list(trials), "go_on": list(go_on)})
        return self.rungs[step]

    def _note(self, kind: str, key: str, data: dict[str, Any]) -> None:
        self.line.add(kind, data, at=0, key=key)
        self._take(kind, data)
