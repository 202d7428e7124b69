"""The files of an experiment as a whole: its record, its page, its figures, the rollouts of API models.

In: a config and the result of the experiment. Out: those files in `output_dir`, each beginning with the experiment's
name. Runs keep theirs in their own directories.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from glob import escape
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from evsys_sdk.config.load import plain
from evsys_sdk.config.metadata import Metadata
from evsys_sdk.config.schema import ExperimentConfig
from evsys_sdk.config.sweep import directory_name
from evsys_sdk.config.yaml_io import source_of
from evsys_sdk.constants import EXPERIMENT_RESULT_FILE, MODEL_ROLLOUTS_FILE
from evsys_sdk.errors import EvsysError, Problem, RecordLost
from evsys_sdk.experiment.baselines import write_rollouts
from evsys_sdk.experiment.registration import register_end
from evsys_sdk.files import make_folder
from evsys_sdk.history.digest import overall_status
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import RunResult
from evsys_sdk.record.layout import ATTEMPTS, move_aside, stem_of, sweep
from evsys_sdk.record.models import ExperimentRecord, RecordedRun, eval_summary, say_unreadable
from evsys_sdk.report.conclusion import Conclusion, ModelScore
from evsys_sdk.report.page import PageFacts, write_page
from evsys_sdk.report.setup import setup_of
from evsys_sdk.stats.hypothesis import fingerprint


@dataclass(slots=True, kw_only=True)
class ExperimentResult:
    """The result of an experiment."""

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
    test_selection: list[dict[str, Any]] = field(default_factory=list)
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
        """Whether every run completed, or was left behind by a search."""
        return all(run.status in ("completed", "pruned") for run in self.runs)


def summarise(result: ExperimentResult, about: Mapping[str, object] | None = None) -> ExperimentRecord:
    """The record of a result: what `--json` prints; the file has what `describe` says `about` the experiment too."""
    findings, leakage = result.conclusion.findings, [audit for run in result.runs for audit in run.leakage]
    return ExperimentRecord.model_validate(
        {
            **(about or {}),
            "name": result.name,
            "status": result.status,
            "output_dir": str(result.output_dir),
            "seconds": round(result.seconds, 3),
            "best_arm": result.best_arm,
            "conclusion": result.conclusion.text,
            **findings.as_dict(),
            "arms": [asdict(arm) for arm in result.conclusion.arms],
            "models": [
                {"model": score.model, "cost_usd": score.cost_usd, **eval_summary(score.result)}
                for score in result.models
            ],
            "budget": result.budget,
            # Seeds of an arm train on the same rows: an audit of them is in the record once.
            "leakage": [audit for index, audit in enumerate(leakage) if audit not in leakage[:index]],
            "search": result.search,
            "test_selection": result.test_selection,
            "unread_settings": result.unread_settings,
            "warnings": result.warnings,
            "runs": [_record_run(run, result.output_dir) for run in result.runs],
        }
    )


def _record_run(run: RunResult, folder: Path) -> RecordedRun:
    """One run in the record. Metrics and artifacts come from an algorithm, which may be anyone's: a value that does not
    fit is a warning, and never costs the experiment its record."""
    fields: dict[str, Any] = {
        "run_id": run.run_id,
        "status": run.status,
        "metrics": run.metrics,
        "artifacts": {name: str(place) for name, place in run.artifacts.items()},
        "error": run.error,
        "evals": run.evals,
        "chosen_steps": run.chosen_steps,
        "run_dir": str(run.run_dir) if run.run_dir else None,
        # Relative, so that it is found too where both folders were copied to.
        "reused_from": os.path.relpath(run.reused_from, folder) if run.reused_from else None,
    }
    try:
        return RecordedRun.model_validate(fields)
    except ValidationError as exc:
        say = "the record has a value of %s that does not fit, and readers may refuse it: %s"
        get_logger(__name__).warning(say, run.run_id, say_unreadable(exc))
        return RecordedRun.model_construct(**fields)


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


FIGURES = ("curves.png", "curves.svg", "arms.png", "arms.svg")
WRITTEN = (EXPERIMENT_RESULT_FILE, "experiment.md", MODEL_ROLLOUTS_FILE, *FIGURES)
"""The endings of the names of an experiment's results."""


def make_output_dir(folder: Path) -> Path:
    """The folder, there by now; EvsysError with what is in its way."""
    try:
        make_folder(folder)
    except OSError as exc:
        raise EvsysError(f"output_dir {folder} cannot be used: {_obstacle(exc)}") from exc
    return folder


def _obstacle(exc: OSError) -> str:
    """What is in the way of a folder."""
    place = Path(exc.filename)
    if place.is_symlink() and not place.exists():
        return f"{place} is a link to {place.readlink()}, which is not there"
    return f"{place} is a file" if place.is_file() else str(exc.strerror)


def sweep_leftovers(output_dir: Path, name: str) -> None:
    """Remove half-written files that a kill left."""
    stem = escape(directory_name(name))
    sweep(part for what in WRITTEN for part in output_dir.glob(f".{stem}.{what}.*.part"))


def set_aside(output_dir: Path, name: str) -> None:
    """Move the results of an earlier start of the experiment into `<name>.attempts/<number>`."""
    stem = directory_name(name)
    files = {path: path.name for what in WRITTEN if (path := output_dir / f"{stem}.{what}").exists()}
    record = output_dir / f"{stem}.{EXPERIMENT_RESULT_FILE}"
    if record in files:
        files[record] = EXPERIMENT_RESULT_FILE  # with the name of an experiment, it would be one
    move_aside(files, output_dir / f"{stem}.{ATTEMPTS}")


def describe(
    config: ExperimentConfig,
    options: Mapping[str, object],
    contents: Mapping[str, object],
    settings: Mapping[str, object],
) -> dict[str, object]:
    """What the record says of an experiment before it says what came of it. `contents`: hashes of rows, tasks, code."""
    hypothesis = config.metadata.hypothesis
    return {
        "experiment": config.name,
        "description": config.description,
        "version": config.version,
        "parent_experiment_id": config.parent_experiment_id,
        "tags": config.metadata.tags,
        "hypothesis": plain(config.metadata)["hypothesis"] if hypothesis else "",
        "hypothesis_sha256": fingerprint(hypothesis),
        "config_folder": str(source_of(config).folder),
        "ts": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "options": options,
        "contents": contents,
        "config": settings,
    }


def write_files(config: ExperimentConfig, result: ExperimentResult, about: Mapping[str, object]) -> None:
    """All of them; `about` as `describe` gives it. RecordLost where the record cannot be written."""
    record = summarise(result, about)
    path, stem = record_path(result.output_dir, config.name), directory_name(config.name)
    try:
        # The record after the rollouts: it is what says that the experiment has ended.
        write_rollouts(result.models, path.with_name(f"{stem}.{MODEL_ROLLOUTS_FILE}"))
        record.write(path)
    except OSError as exc:
        say = f"the experiment's record could not be written to {path}: {exc.strerror}"
        raise RecordLost(f"{say}; the same command resumes from what there is") from exc
    # The index stamps its line with the size and time of the file, so the record has to be on disk.
    register_end(config, path, record.as_dict())
    write_record_page(record, path, result.conclusion, result.runs, result.models)


def write_record_page(
    record: ExperimentRecord,
    path: Path,
    conclusion: Conclusion,
    runs: Sequence[RunResult],
    models: Sequence[ModelScore],
) -> None:
    """The page beside a record; the runs and models with their rollouts, which the record does not have."""
    facts = PageFacts(
        name=record.experiment,
        file_name=stem_of(path),
        folder=path.parent,
        conclusion=conclusion,
        runs=runs,
        seconds=record.seconds or 0.0,
        description=str(record.config.get("description") or ""),
        parent=record.parent_experiment_id,
        hypothesis=str(Metadata.model_validate(record.config.get("metadata") or {}).hypothesis or ""),
        setup=setup_of(record.config),
        models=models,
        limits=(record.budget or {}).get("limits") or {},
        warnings=record.warnings,
    )
    write_page(facts)
