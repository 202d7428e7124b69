"""The files of an experiment as a whole: its record, its page, its figures, the rollouts of API models.

In: a config and what the experiment came to. Out: those files in `output_dir`, each beginning with the experiment's
name. Runs keep theirs in directories of their own.
"""

from __future__ import annotations

from datetime import UTC, datetime
from glob import escape
from pathlib import Path
from typing import Any

from evsys_sdk.atomic import make_folder, write_json
from evsys_sdk.config.files import plain
from evsys_sdk.config.models import ExperimentConfig
from evsys_sdk.config.names import directory_name
from evsys_sdk.config.source import source_of
from evsys_sdk.constants import EXPERIMENT_RESULT_FILE, MODEL_ROLLOUTS_FILE
from evsys_sdk.errors import EvsysError, RecordLost
from evsys_sdk.eval.hypothesis import fingerprint
from evsys_sdk.record.experiment_page import PageFacts, write_page
from evsys_sdk.record.run_dir import ATTEMPTS, move_aside, sweep
from evsys_sdk.running.baselines import write_rollouts
from evsys_sdk.running.outcome import ExperimentResult, record_path, summarise
from evsys_sdk.running.registering import register_end

FIGURES = ("curves.png", "curves.svg", "arms.png", "arms.svg")
WRITTEN = (EXPERIMENT_RESULT_FILE, "experiment.md", MODEL_ROLLOUTS_FILE, *FIGURES)
"""The ends of the names of what an experiment comes to."""


def made(folder: Path) -> Path:
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
    """Move what an earlier start of the experiment came to into `<name>.attempts/<number>`."""
    stem = directory_name(name)
    files = {path: path.name for what in WRITTEN if (path := output_dir / f"{stem}.{what}").exists()}
    record = output_dir / f"{stem}.{EXPERIMENT_RESULT_FILE}"
    if record in files:
        files[record] = EXPERIMENT_RESULT_FILE  # with the name of an experiment, it would be one
    move_aside(files, output_dir / f"{stem}.{ATTEMPTS}")


def described(config: ExperimentConfig) -> dict[str, Any]:
    """What the record says of an experiment before it says what came of it."""
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
    }


def write_files(
    config: ExperimentConfig, result: ExperimentResult, about: dict[str, Any], settings: dict[str, Any]
) -> None:
    """All of them; the record holds `about`, the result and the settings. RecordLost where it cannot be written."""
    summary = {**about, **summarise(result), "config": settings}
    path, stem = record_path(result.output_dir, config.name), directory_name(config.name)
    try:
        write_rollouts(result.models, path.with_name(f"{stem}.{MODEL_ROLLOUTS_FILE}"))
        write_json(path, summary)
    except OSError as exc:
        say = f"the experiment's record could not be written to {path}: {exc.strerror}"
        raise RecordLost(f"{say}; the same command goes on from what there is") from exc
    register_end(config, path, summary)
    write_page(PageFacts.of(config, result, stem, settings))
