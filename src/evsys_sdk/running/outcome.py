"""What an experiment came to, as an object and as plain data.

In: the results of its runs and their conclusion. Out: `ExperimentResult`, and the summary that `--json` prints and the
record on disk holds.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evsys_sdk.config.models import ExperimentConfig
from evsys_sdk.config.names import directory_name
from evsys_sdk.config.source import source_of
from evsys_sdk.constants import EXPERIMENT_RESULT_FILE
from evsys_sdk.errors import Problem
from evsys_sdk.protocols import RunResult
from evsys_sdk.record.conclusion import Conclusion, ModelScore
from evsys_sdk.record.digest import overall_status
from evsys_sdk.record.run_record import eval_summary


@dataclass(slots=True, kw_only=True)
class ExperimentResult:
    """What an experiment came to."""

    name: str
    runs: list[RunResult]
    conclusion: Conclusion
    output_dir: Path
    models: list[ModelScore] = field(default_factory=list)
    """API models that were scored beside the arms."""
    budget: dict[str, Any] | None = None
    """What it might spend and what it spent, where there was a budget."""
    search: dict[str, Any] | None = None
    """Trials, values and rungs, where a search decided what the arms are."""
    admissions: list[dict[str, Any]] = field(default_factory=list)
    """How test tasks took part in choosing: which setting chose, by which test scores, in words."""
    seconds: float = 0.0
    unread_settings: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """What went wrong beside the runs: hooks of callbacks at the experiment's start and end."""

    @property
    def best_arm(self) -> str | None:
        return self.conclusion.best_arm

    @property
    def status(self) -> str:
        """completed, failed, cancelled or pruned where all runs ended so; else partial."""
        return overall_status(run.status for run in self.runs)

    @property
    def completed(self) -> bool:
        """Whether every run came to its end, or was left behind by a search."""
        return all(run.status in ("completed", "pruned") for run in self.runs)


def summarise(result: ExperimentResult) -> dict[str, Any]:
    """The result as plain data: what `--json` prints and the summary file holds."""
    return {
        "name": result.name,
        "status": result.status,
        "output_dir": str(result.output_dir),
        "seconds": round(result.seconds, 3),
        "best_arm": result.best_arm,
        "conclusion": result.conclusion.text,
        **result.conclusion.findings.data,
        "arms": [asdict(arm) for arm in result.conclusion.arms],
        "models": [
            {"model": score.model, "cost_usd": score.cost_usd, **eval_summary(score.result)} for score in result.models
        ],
        "budget": result.budget,
        "leakage": leakage_of(result.runs),
        "search": result.search,
        "test_selection": result.admissions,
        "unread_settings": result.unread_settings,
        "warnings": result.warnings,
        "runs": [
            {
                "run_id": run.run_id,
                "status": run.status,
                "metrics": run.metrics,
                "artifacts": run.artifacts,
                "error": run.error,
                "evals": [eval_summary(found) for found in run.extras.get("evals", [])],
                "run_dir": run.extras.get("run_dir"),
                "reused_from": _seen_from(result.output_dir, run.extras.get("reused_from")),
            }
            for run in result.runs
        ],
    }


def _seen_from(folder: Path, place: str | None) -> str | None:
    """The folder of the run that was taken over, relative, so that it is found too where both were copied to."""
    return os.path.relpath(place, folder) if place else None


def leakage_of(runs: list[RunResult]) -> list[dict[str, Any]]:
    """What the audits of the runs found; seeds of an arm train on the same rows, and are told once."""
    found = [audit for run in runs for audit in run.extras.get("leakage") or []]
    return [audit for index, audit in enumerate(found) if audit not in found[:index]]


def strict_problems(result: ExperimentResult, config: ExperimentConfig) -> list[Problem]:
    """Under `--strict`: the settings that nothing read, as problems."""
    source = source_of(config)
    return [
        source.located(Problem(path=path, message="unread setting: nothing looked at it during the run"))
        for path in result.unread_settings
    ]


def record_path(output_dir: Path, name: str) -> Path:
    return output_dir / f"{directory_name(name)}.{EXPERIMENT_RESULT_FILE}"


def seconds_in(record: Path) -> float | None:
    """How long an experiment took whose record lies there."""
    try:
        return float(json.loads(record.read_text())["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
