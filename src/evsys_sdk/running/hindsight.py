"""Whether a hypothesis was written when its answer could be known.

In: what the judge found, the results of every arm, and when the experiment was launched. Out: the same findings; where
runs that decide the hypothesis were taken over and had finished before the launch, with the admission in the sentence
that tells the outcome, and without a Brier score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from evsys_sdk.protocols import RunResult
from evsys_sdk.record.conclusion import Findings

OUTCOME = "The hypothesis is "
"""How the line of a conclusion begins that tells the outcome."""


def admit_hindsight(findings: Findings, arms: Mapping[str, Sequence[RunResult]], launched: float | None) -> Findings:
    """The findings with the admission, if there is something to admit."""
    judged: dict[str, Any] | None = findings.data.get("hypothesis_result")
    if judged is None or launched is None:
        return findings
    runs = [run for arm in dict.fromkeys([judged["arm"], judged["vs"]]) for run in arms.get(arm, ())]
    known = sum(_was_known(run, launched) for run in runs)
    if not known:
        return findings
    admission = _admission(known, len(runs))
    told = {**judged, "why": f"{judged['why']}; {admission}", "brier": None, "known_before": True}
    lines = [f"{line.removesuffix('.')}; {admission}." if line.startswith(OUTCOME) else line for line in findings.lines]
    return replace(findings, lines=lines, data={**findings.data, "hypothesis_result": told})


def _was_known(run: RunResult, launched: float) -> bool:
    """Whether it was taken over from an experiment in which it had finished by then; one that finished later in an
    experiment beside this one was known to nobody."""
    finished = run.extras.get("finished_before")
    return "reused_from" in run.extras and datetime.fromisoformat(str(finished)).timestamp() < launched


def _admission(known: int, runs: int) -> str:
    if known < runs:
        return f"{known} of its {runs} runs had finished before this was written: not wholly a prediction"
    return f"its {'run' if runs == 1 else 'runs'} had finished before this was written: a description, not a prediction"
