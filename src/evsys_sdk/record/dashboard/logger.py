"""Pushes a run's record to the dashboard while it grows; offline, into the mirror only.

In: a run's events. Out: an experiment, a generation per run, step metrics, evals with their predictions, and the
conclusion, through `DashboardClient`. Training rollouts stay on disk; only those of evals travel. Every id
follows from the experiment's own: an experiment that is resumed or run again updates its records and makes no new ones.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar

from evsys_sdk.config.base import Params
from evsys_sdk.protocols import EvalResult, Rollout, RunContext, RunResult
from evsys_sdk.record.dashboard.wire import derived_id, new_id
from evsys_sdk.record.local_logger import conclude
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
        self._send_eval(ctx.run_id, result)

    def _send_eval(self, run_id: str, result: EvalResult) -> None:
        generation_id = self._generation_id(run_id)
        own = ("eval", generation_id, result.stage or "", result.split, result.name, str(result.step))
        eval_run_id = self._client.log_eval_run(
            generation_id,
            eval_run_id=derived_id(*own),
            metrics={score.metric: score.value for score in result.scores if score.value is not None},
            name=result.name,
            split=result.split,
            step=result.step,
            stage=result.stage,
            scores=[_without_none(asdict(score)) for score in result.scores],
            breakdown=_without_none(asdict(result)["breakdown"]) if result.breakdown else None,
            error=result.error,
            seconds=result.seconds,
        )
        self._client.log_predictions(generation_id, _predictions(eval_run_id, result.rollouts), eval_run_id=eval_run_id)

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
                    self._send_eval(result.run_id, found)
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
            metrics=_without_none(result.metrics),
            artifacts=result.artifacts,
            error=result.error,
            conclusion=conclusion,
        )
        return conclusion

    def _end_experiment(self, status: str, conclusion: str) -> None:
        best_score = getattr(self._experiment, "best_score", None)
        self._client.update_experiment(self._experiment_id, status=status, conclusion=conclusion, best_score=best_score)
        self._client.finish()

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

    plain = _without_none(to_jsonable_python(model, fallback=str))
    return plain if isinstance(plain, dict) else {}


def _without_none(value: object) -> object:
    """JSON data in which a key without a value is absent, as the documents have it."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _predictions(eval_run_id: str, rollouts: Iterable[Rollout]) -> Iterator[dict[str, object]]:
    """Each under a unique id: which try at which task of which evaluation."""
    seen = Counter[str]()
    for rollout in rollouts:
        seen[rollout.task_id] += 1
        yield {
            "id": derived_id("prediction", eval_run_id, rollout.task_id, str(seen[rollout.task_id])),
            "task_id": rollout.task_id,
            "completion": rollout.completion,
            "turns": [turn.text for turn in rollout.turns],
            "reward": rollout.reward,
            "status": rollout.status,
            "error": rollout.error,
            "seconds": rollout.seconds,
            "cost_usd": rollout.cost_usd,
            "metadata": rollout.metadata,
        }
