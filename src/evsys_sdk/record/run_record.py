"""The record of one run: `run_result.json`, written whole, last, and whatever happened.

In: what the runner learned. Out: the file, and the same facts in `RunResult.extras` for Python users.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from evsys_sdk.atomic import write_json
from evsys_sdk.constants import RUN_RESULT_FILE
from evsys_sdk.protocols import EvalResult, RunResult
from evsys_sdk.record.callbacks import steering
from evsys_sdk.record.environment import config_hash, describe_environment
from evsys_sdk.redaction import redact_data


def plain_settings(config: BaseModel) -> dict[str, Any]:
    """Given settings as plain data; taking them like this does not count as reading them."""
    return BaseModel.model_dump(config, exclude_unset=True)


@dataclass(slots=True)
class RunRecord:
    """Collects while the run goes on; `write` ends it."""

    experiment: Any
    run: Any
    run_id: str
    run_dir: Path
    folder: Path
    """Where the config lies; its git commit is recorded."""
    started: float = field(default_factory=time.time)
    traceback: str | None = None
    data: list[dict[str, Any]] = field(default_factory=list)
    evals: list[EvalResult] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    benchmarks: dict[str, Any] = field(default_factory=dict)
    """Label -> the benchmark that was scored."""
    leakage: list[dict[str, Any]] = field(default_factory=list)
    """What the rows have in common with benchmarks: an audit per data block and benchmark."""
    options: dict[str, Any] = field(default_factory=dict)
    """How the run was cut short on purpose: `--steps`, `--dry`."""

    def add_data(self, place: str, loaded: Any) -> None:
        """Note which rows went in: where from, how many, and the hash of their source."""
        self.data.append(
            {
                "place": place,
                "source": loaded.source,
                "sha256": loaded.sha256,
                "rows_read": loaded.n_raw,
                "rows": len(loaded.rows),
            }
        )

    def hyperparams(self) -> dict[str, Any]:
        return {
            "experiment": self.experiment.name,
            "run": self.run.name,
            "model": self.run.model.name,
            "backend": self.run.backend.kind,
            "algorithm": self.run.algorithm.kind,
            "params": redact_data(dict(self.run.algorithm.params)),
            "seed": self.run.seed,
            "tags": list(self.run.tags),
        }

    def shared_settings(self) -> dict[str, Any]:
        """Settings of the experiment that reach every run: where data is read, what it is scored on, who steers it."""
        given = plain_settings(self.experiment)
        # How many at a time, how often a lost call is made, and who else is scored, changes nothing about this run.
        beside = ("models", "n_concurrent", "max_attempts")
        entries = given.get("metadata", {}).get("benchmark")
        scored = entries and [{key: entry[key] for key in entry if key not in beside} for entry in entries]
        steered = steering(given.get("callbacks", []))
        shared = {"data_store": given.get("data_store"), "benchmark": scored}
        return {**shared, "callbacks": steered} if steered else shared

    def config_hash(self) -> str:
        """The same for the same settings of this run, whatever the other arms are."""
        settings = plain_settings(self.run)
        return config_hash({"run": settings, "experiment": self.shared_settings(), **self.options})

    def write(self, result: RunResult, *, unread: list[str]) -> RunResult:
        """Complete `result` and put it on disk."""
        warnings = [f"unread setting: {path}" for path in unread] + self.warnings
        notes = {key: value for key, value in result.extras.items() if key not in ("evals", "warnings")}
        result.extras.update(
            run_dir=str(self.run_dir),
            run_name=self.run.name,
            seed=self.run.seed,
            evals=self.evals,
            unread_settings=unread,
            warnings=warnings,
            leakage=self.leakage,
        )
        finished = time.time()
        write_json(
            self.run_dir / RUN_RESULT_FILE,
            {
                "run_id": result.run_id,
                "experiment": self.experiment.name,
                "run": self.run.name,
                "seed": self.run.seed,
                "status": result.status,
                "metrics": result.metrics,
                "artifacts": result.artifacts,
                "evals": [eval_summary(found) for found in self.evals],
                "error": result.error,
                "traceback": self.traceback,
                "warnings": warnings,
                "unread_settings": unread,
                "leakage": self.leakage,
                "notes": notes,
                "options": self.options,
                "hparams": plain_settings(self.run),
                "environment": {
                    **describe_environment(self.folder),
                    "config_hash": self.config_hash(),
                    "data": self.data,
                    "benchmarks": [
                        {"name": label, "sha256": found.sha256, "tasks": len(found.tasks)}
                        for label, found in sorted(self.benchmarks.items())
                    ],
                },
                "started": _clock(self.started),
                "ts": _clock(finished),
                "seconds": round(finished - self.started, 3),
            },
        )
        return result


def eval_summary(result: EvalResult) -> dict[str, Any]:
    """An evaluation without its transcripts, which lie in the run's logs."""
    return {
        "name": result.name,
        "split": result.split,
        "step": result.step,
        "stage": result.stage,
        "on_training_rows": result.on_training_rows,
        "scores": [asdict(score) for score in result.scores],
        "breakdown": {
            key: {value: [asdict(score) for score in scores] for value, scores in parts.items()}
            for key, parts in result.breakdown.items()
        },
        "error": result.error,
        "seconds": round(result.seconds, 3),
    }


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
