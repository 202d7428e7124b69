"""Pushes a run's record to the dashboard while it grows; offline, into the mirror only.

In: a run's events, and the records once they are written. Out: an experiment, a generation per run, step metrics, evals
with their predictions, the conclusion, the records and the figures, through `DashboardClient`. Training rollouts stay
on disk; only those of evals travel. Every id follows from the experiment's own: an experiment that is resumed or run
again updates its records and makes no new ones.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from evsys_sdk.config.base import Params
from evsys_sdk.config.sweep import directory_name
from evsys_sdk.errors import EvsysError
from evsys_sdk.files import read_object
from evsys_sdk.logs import get_logger
from evsys_sdk.protocols import EvalResult, RunContext, RunResult
from evsys_sdk.record.dashboard.payloads import (
    Questions,
    checkpoints_in,
    eval_fields,
    eval_id,
    figures_beside,
    prediction_fields,
    without_none,
)
from evsys_sdk.record.dashboard.wire import derived_id, new_id
from evsys_sdk.record.local_logger import conclude
from evsys_sdk.record.models import ExperimentRecord, RecordedRun, RunRecord
from evsys_sdk.record.rollouts import StoredJournal, journal_of
from evsys_sdk.registry import register_callback

if TYPE_CHECKING:
    from evsys_sdk.record.dashboard.client import DashboardClient


@register_callback("evsys_logger")
class EvsysLogger:
    """The dashboard's view of an experiment. Credentials come from the EVSYS_ environment variables."""

    only_watches: ClassVar = True

    class Config(Params): ...

    def __init__(
        self, *, client: DashboardClient | None = None, environ: Mapping[str, str] = os.environ, **params: object
    ):
        from evsys_sdk.record.dashboard.client import DashboardClient

        self.cfg = self.Config(**params)
        # Made at once: missing credentials must be said before anything is spent on training.
        self._client = client or DashboardClient(environ=environ)
        self._lock = threading.Lock()
        self._experiment: object = None
        self._experiment_id = ""
        self._evals: dict[str, list[EvalResult]] = {}
        """Per run: the latest result per (stage, split, name)."""
        self._started: set[str] = set()
        self._ended: set[str] = set()

    def on_experiment_start(self, experiment: object) -> None:
        self._experiment = experiment
        self._create_experiment(getattr(experiment, "config", experiment), getattr(experiment, "experiment_id", None))

    def on_run_start(self, ctx: RunContext) -> None:
        with self._lock:
            if not self._experiment_id:  # no `on_experiment_start` came: this run is all there is
                place = ("experiment", self._client.project_id or "", ctx.run_id, str(ctx.output_dir.absolute()))
                self._create_experiment(ctx.config, ctx.extras.get("experiment_id") or derived_id(*place))
        run = _plain(ctx.extras.get("run_config") or {})
        run |= {"seed": ctx.seed, "model_name": ctx.extras.get("model_name"), "tags": ctx.extras.get("tags", [])}
        self._start_run(ctx.run_id, name=ctx.extras.get("run_name"), run_config=run)

    def on_step(self, ctx: RunContext, step: int, metrics: dict[str, float]) -> None:
        self._client.log_step_metric(self._generation_id(ctx.run_id), step, metrics)

    def on_eval(self, ctx: RunContext, result: EvalResult) -> None:
        self._evals.setdefault(ctx.run_id, []).append(replace(result, rollouts=[]))
        self._send_eval(ctx.run_id, result, ctx.output_dir.parent)

    def _send_eval(self, run_id: str, result: EvalResult, folder: Path | None) -> None:
        generation_id = self._generation_id(run_id)
        eval_run_id = self._client.log_eval_run(
            generation_id, eval_run_id=eval_id(generation_id, result), **eval_fields(result)
        )
        asked = self._questions(run_id, folder, result) if result.rollouts else {}
        predictions = prediction_fields(eval_run_id, result.rollouts, asked)
        self._client.log_predictions(generation_id, predictions, eval_run_id=eval_run_id)

    def _questions(self, run_id: str, folder: Path | None, result: EvalResult) -> Questions:
        """What the tasks asked, from the experiment's journal: a rollout has only its task's id."""
        journal = None if folder is None else journal_of(folder, directory_name(run_id.partition("/")[0]))
        if journal is None or not journal.is_file():
            return {}
        try:
            with closing(StoredJournal(journal)) as opened:
                return opened.questions(run_id, f"{result.split}/{result.name}")
        except (EvsysError, ValueError, KeyError) as exc:
            get_logger(__name__).debug("what the tasks of %s asked cannot be read: %s", result.name, exc)
            return {}

    def on_checkpoint(self, ctx: RunContext, step: int, path: str) -> None:
        self._client.update_generation(self._generation_id(ctx.run_id), last_checkpoint={"step": step, "path": path})

    def on_run_end(self, ctx: RunContext, result: RunResult) -> None:
        text = self._end_run(result)
        if self._experiment is None:
            self._end_experiment(result.status, text)

    def on_experiment_end(self, results: list[RunResult]) -> None:
        for result in results:
            if result.run_id not in self._started:  # it failed before it could begin, or was finished before
                name = result.run_name or None
                self._start_run(result.run_id, name=name, run_config=self._run_config(name, result.seed))
                for found in result.evals:
                    self._evals.setdefault(result.run_id, []).append(found)
                    self._send_eval(result.run_id, found, result.run_dir.parent if result.run_dir else None)
            if result.run_id not in self._ended:
                self._end_run(result)
        completed = sum(result.status == "completed" for result in results)
        statuses = {result.status for result in results}
        status = "completed" if completed else "cancelled" if statuses == {"cancelled"} else "failed"
        conclusion = getattr(self._experiment, "conclusion", None)
        text = getattr(conclusion, "text", conclusion) or f"{completed} of {len(results)} runs completed."
        self._end_experiment(status, text)

    def _start_run(self, run_id: str, *, name: str | None = None, run_config: dict[str, Any] | None = None) -> None:
        self._started.add(run_id)
        self._client.create_generation(
            self._experiment_id,
            name=name or run_id,
            recipe_kind=(run_config or {}).get("algorithm", {}).get("kind", ""),
            run_config=run_config,
            generation_id=self._generation_id(run_id),
        )

    def _run_config(self, name: str | None, seed: int | None) -> dict[str, object] | None:
        """The settings of a run that did not start in this process, from the experiment's config."""
        config = getattr(self._experiment, "config", self._experiment)
        arms = config.all_runs() if name and hasattr(config, "all_runs") else []
        arm = next((arm for arm in arms if name in (arm.name, f"{arm.name}__s{seed}")), None)
        return None if arm is None else _plain(arm) | {"name": name, "seed": seed}

    def _end_run(self, result: RunResult) -> str:
        self._ended.add(result.run_id)
        conclusion = conclude(result, self._evals.pop(result.run_id, []))
        self._client.update_generation(
            self._generation_id(result.run_id),
            status=result.status,
            metrics=without_none(result.metrics),
            artifacts=result.artifacts,
            error=result.error,
            conclusion=conclusion,
        )
        return conclusion

    def _end_experiment(self, status: str, conclusion: str) -> None:
        best_score = getattr(self._experiment, "best_score", None)
        self._client.update_experiment(self._experiment_id, status=status, conclusion=conclusion, best_score=best_score)
        if self._experiment is None:
            self._client.finish()
        else:  # its record is written after this, and `record_written` ends the client
            self._client.flush()

    def record_written(self, path: Path) -> None:
        """Send the records of the experiment and its runs, checkpoints and figures: all is on disk by now."""
        record, plain = ExperimentRecord.find(path), read_object(path)
        if record is not None and plain is not None:
            for run in record.runs:
                self._send_run_record(run, path.parent)
            figures = figures_beside(path) or None
            self._client.update_experiment(self._experiment_id, record=without_none(plain), figures=figures)
        self._client.finish()

    def _send_run_record(self, run: RecordedRun, folder: Path) -> None:
        run_dir = folder / (run.reused_from or Path(run.run_dir or run.run_id.partition("/")[2]).name)
        found = read_object(RunRecord.path_in(run_dir))
        if found is not None and run.run_id in self._started:
            self._client.update_generation(
                self._generation_id(run.run_id),
                record=without_none(RunRecord.upgrade(found)),
                checkpoints=checkpoints_in(run_dir) or None,
            )

    def _generation_id(self, run_id: str) -> str:
        # The same run of the same experiment has the same id, in whatever process it resumes.
        return derived_id("generation", self._experiment_id, run_id)

    def _create_experiment(self, config: object, experiment_id: str | None) -> None:
        plain = _plain(config)
        metadata = plain.get("metadata", {})
        hypothesis = metadata.get("hypothesis", "")
        claim = hypothesis.get("claim", "") if isinstance(hypothesis, dict) else hypothesis  # the wire has text
        self._experiment_id = experiment_id or new_id()
        self._client.create_experiment(
            plain.get("name", "experiment"),
            hypothesis=claim,
            experiment_id=self._experiment_id,
            description=plain.get("description", ""),
            tags=metadata.get("tags", []),
            parent_experiment_id=plain.get("parent_experiment_id"),
            config=plain,
        )


def _plain(model: Any) -> dict[str, Any]:
    """A config as plain JSON values."""
    from pydantic_core import to_jsonable_python

    plain = without_none(to_jsonable_python(model, fallback=str))
    return plain if isinstance(plain, dict) else {}
