"""Callbacks that show runs in TensorBoard, Weights & Biases and MLflow.

In: a run's events. Out: event files, wandb runs, MLflow runs, one per run and attempt (`Tracker`). What each library
gets, and how, is known only here; each is loaded when its callback is made.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field

from evsys_sdk.config.base import Params
from evsys_sdk.errors import EvsysError, error_boundary, need
from evsys_sdk.format import visible
from evsys_sdk.protocols import EvalResult, RunContext, RunResult
from evsys_sdk.record.callbacks import eval_metrics
from evsys_sdk.record.layout import ATTEMPTS
from evsys_sdk.record.log_stores import TensorBoardLogStore
from evsys_sdk.redaction import redact
from evsys_sdk.registry import register_callback

# A tracker gets numbers under their names at their steps, texts, and an end. A resumed run is replayed from its
# beginning to a new tracker, so that no point is there twice. In-loop scores keep their step; scores after training are
# called `final/...`, so that they are not taken for another point of a curve.


class Tracker(Protocol):
    """Where do this run's numbers go?"""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def note(self, name: str, text: str) -> None: ...
    def end(self, result: RunResult | None) -> None:
        """The run is over; None when its result is not known."""
        ...


class TrackingCallback:
    """A callback that opens a tracker per run (`_open`) and keeps it to itself: arms run at the same time."""

    def __init__(self) -> None:
        self._trackers: dict[str, Tracker] = {}
        self._steps: dict[str, int] = {}
        """The last step of each run."""
        self._lock = threading.Lock()
        self._experiment: object = None

    def _open(self, ctx: RunContext) -> Tracker:
        raise NotImplementedError

    def on_experiment_start(self, experiment: object) -> None:
        self._experiment = experiment

    def on_run_start(self, ctx: RunContext) -> None:
        tracker = self._open(ctx)
        with self._lock:
            self._trackers[ctx.run_id], self._steps[ctx.run_id] = tracker, 0
        hypothesis = getattr(getattr(ctx.config, "metadata", None), "hypothesis", "")
        if hypothesis:
            tracker.note("hypothesis", clean_text(hypothesis))

    def on_train_start(self, ctx: RunContext, total_steps: int | None) -> None:
        if total_steps is not None:
            self._note(ctx, "total_steps", str(total_steps))

    def on_step(self, ctx: RunContext, step: int, metrics: dict[str, float]) -> None:
        self._steps[ctx.run_id] = step
        self._log(ctx, metrics, step)

    def on_eval(self, ctx: RunContext, result: EvalResult) -> None:
        values = eval_metrics(result)
        if result.step is None:
            # A separate name: at the last step the in-loop score and the final one would be two points at one place.
            values = {f"final/{name}": value for name, value in values.items()}
        step = self._steps.get(ctx.run_id, 0) if result.step is None else result.step
        if values:
            self._log(ctx, values, step)
        if result.error:
            self._note(ctx, f"not scored: {result.split}/{result.name}", result.error)

    def on_checkpoint(self, ctx: RunContext, step: int, path: str) -> None:
        self._note(ctx, "last_checkpoint", f"step {step}: {path}")

    def on_train_end(self, ctx: RunContext, metrics: dict[str, float]) -> None:
        final = {f"final/{name}": value for name, value in metrics.items()}
        if final:
            self._log(ctx, final, self._steps.get(ctx.run_id, 0))

    def on_run_end(self, ctx: RunContext, result: RunResult) -> None:
        self._end(ctx.run_id, result)

    def on_experiment_end(self, results: list[RunResult]) -> None:
        ended = {result.run_id: result for result in results}
        for run_id in list(self._trackers):
            self._end(run_id, ended.get(run_id))  # a run that broke off had no `on_run_end`

    def _log(self, ctx: RunContext, metrics: Mapping[str, float], step: int) -> None:
        tracker = self._trackers.get(ctx.run_id)
        if tracker is not None:  # its opening failed, and was reported
            tracker.log(metrics, step)

    def _note(self, ctx: RunContext, name: str, text: str) -> None:
        tracker = self._trackers.get(ctx.run_id)
        if tracker is not None:
            tracker.note(name, clean_text(text))

    def _end(self, run_id: str, result: RunResult | None) -> None:
        with self._lock:
            tracker = self._trackers.pop(run_id, None)
            self._steps.pop(run_id, None)
        if tracker is not None:
            tracker.end(result)


def clean_text(text: object) -> str:
    """What a tracker gets of a text: no secrets, and control characters as text."""
    return visible(redact(str(text)))


def experiment_name(ctx: RunContext) -> str:
    return clean_text(ctx.config.name)


def run_name(ctx: RunContext) -> str:
    """The run's name within its experiment."""
    return clean_text(ctx.extras.get("run_name") or ctx.run_id.rpartition("/")[2])


def tags_of(ctx: RunContext) -> list[str]:
    return [clean_text(tag) for tag in ctx.extras.get("tags", [])]


def group_name(ctx: RunContext) -> str:
    """The arm that a seed's run belongs to."""
    return run_name(ctx).removesuffix(f"__s{ctx.seed}")


def attempt_number(ctx: RunContext) -> int:
    """1, or more for a run that was begun or taken up anew in its directory."""
    attempts = ctx.output_dir / ATTEMPTS
    earlier = [entry for entry in attempts.iterdir() if entry.name.isdigit()] if attempts.is_dir() else []
    return len(earlier) + 1


def settings_of(ctx: RunContext) -> dict[str, object]:
    """What the run was asked to do, for the dashboard's table of settings."""
    about = {"seed": ctx.seed, "model_name": ctx.extras.get("model_name"), "attempt": attempt_number(ctx)}
    return {**(ctx.extras.get("run_config") or {}), **{key: value for key, value in about.items() if value is not None}}


def flat(value: object, place: str = "") -> dict[str, object]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`."""
    if not isinstance(value, Mapping) or not value:
        return {place: value} if place else {}
    found: dict[str, object] = {}
    for key, inner in value.items():
        found |= flat(inner, f"{place}.{key}" if place else str(key))
    return found


@register_callback("tensorboard_logger")
class TensorBoardLogger(TrackingCallback):
    """Event files in `<run>/logs/tensorboard_logger`; `tensorboard --logdir <output_dir>` shows all arms."""

    only_watches: ClassVar = True
    requires: ClassVar = {"tensorboard": "tensorboard"}

    class Config(Params): ...

    def __init__(self, **params: object):
        super().__init__()
        self.cfg = self.Config(**params)
        need("tensorboard", extra="tensorboard")

    def _open(self, ctx: RunContext) -> Tracker:
        # A separate folder: the log store of the same kind writes its events elsewhere in `logs`.
        store = TensorBoardLogStore(log_dir=str(ctx.output_dir / "logs" / "tensorboard_logger"))
        store.log_hyperparams(settings_of(ctx))
        return _EventFiles(store)


class _EventFiles:
    def __init__(self, store: TensorBoardLogStore):
        self._store = store

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._store.log_metrics(dict(metrics), step)

    def note(self, name: str, text: str) -> None:
        self._store.log_text(name, text)

    def end(self, result: RunResult | None) -> None:
        if result is not None:
            self.note("status", _end_text(result))
        self._store.close()


@register_callback("wandb_logger")
class WandbLogger(TrackingCallback):
    """A wandb run per run, grouped by arm; its files lie in `<run>/logs/wandb`."""

    only_watches: ClassVar = True
    requires: ClassVar = {"wandb": "wandb"}

    class Config(Params):
        project: str | None = None
        """By default the experiment's name."""
        entity: str | None = None
        """The W&B user or team."""
        mode: Literal["online", "offline", "disabled"] | None = None
        """By default what WANDB_MODE says, else online. `offline` needs no network; `wandb sync` sends it later."""
        tags: list[str] = Field(default_factory=list)
        """Tags of the W&B run."""

    def __init__(self, **params: Any):
        super().__init__()
        self.cfg = self.Config(**params)
        self._wandb: Any = need("wandb", extra="wandb")

    def _open(self, ctx: RunContext) -> Tracker:
        folder = ctx.output_dir / "logs" / "wandb"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with error_boundary(EvsysError, "wandb.init"):
            run = self._wandb.init(
                project=self.cfg.project or re.sub(r"[/\\#?%:]", "-", experiment_name(ctx)),
                entity=self.cfg.entity,
                mode=self.cfg.mode,
                name=run_name(ctx),
                group=group_name(ctx),
                tags=list(dict.fromkeys([*self.cfg.tags, *tags_of(ctx)])),
                config={**settings_of(ctx), "experiment": experiment_name(ctx), "run_dir": str(ctx.output_dir)},
                dir=str(folder.parent),  # wandb makes the folder `wandb` in it
                reinit="create_new",  # arms run at the same time
                settings=self._wandb.Settings(silent=True, console="off"),
            )
            # An evaluation reports after later steps, and wandb's own step only moves forward.
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
        return _WandbRun(run)


class _WandbRun:
    def __init__(self, run: Any):
        self._run = run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def note(self, name: str, text: str) -> None:
        self._run.summary[name] = text

    def end(self, result: RunResult | None) -> None:
        if result is not None:
            self.note("status", _end_text(result))
        self._run.finish(exit_code=0 if result is not None and result.status in ("completed", "pruned") else 1)


@register_callback("mlflow_logger")
class MlflowLogger(TrackingCallback):
    """An MLflow run per run, in an MLflow experiment of the experiment's name."""

    only_watches: ClassVar = True
    requires: ClassVar = {"mlflow": "mlflow"}

    class Config(Params):
        tracking_uri: str | None = None
        """A server or `sqlite:///...`; by default MLFLOW_TRACKING_URI, else an SQLite file in output_dir. A folder
        (`file:...`) works, but MLflow 3 keeps that store for old data only: see docs/callbacks.md."""
        experiment: str | None = None
        """By default the experiment's name."""

    def __init__(self, **params: Any):
        super().__init__()
        self.cfg = self.Config(**params)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a logger sends data to the configured server only
        need("mlflow", extra="mlflow")
        self._client: Any = None
        self._experiment_id = ""

    def _open(self, ctx: RunContext) -> Tracker:
        with error_boundary(EvsysError, "MLflow"):
            with self._lock:
                if self._client is None:
                    self._connect(ctx)
            if ctx.resume:
                self._put_away_earlier(ctx)
            return _MlflowRun(self._client, self._create_run(ctx), settings_of(ctx))

    def _connect(self, ctx: RunContext) -> None:
        from mlflow import MlflowClient

        folder = ctx.output_dir.absolute().parent
        uri = self.cfg.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.sqlite'}"
        is_folder = uri.startswith("file:") or "://" not in uri or Path(uri).is_dir()
        if is_folder:  # MLflow 3 refuses a folder unless this is set
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        client, name = MlflowClient(tracking_uri=uri), self.cfg.experiment or experiment_name(ctx)
        found = client.get_experiment_by_name(name)
        artifacts = (folder / "mlflow_artifacts").as_uri() if uri.startswith("sqlite:") else None
        self._experiment_id = found.experiment_id if found else client.create_experiment(name, artifacts)
        self._client = client

    def _create_run(self, ctx: RunContext) -> str:
        tags = {"evsys.run_id": ctx.run_id, "evsys.run_dir": str(ctx.output_dir.absolute())}
        tags |= {"evsys.arm": group_name(ctx), "evsys.attempt": str(attempt_number(ctx))}
        tags |= {"evsys.tags": ", ".join(tags_of(ctx))} if tags_of(ctx) else {}
        run = self._client.create_run(self._experiment_id, run_name=run_name(ctx), tags=tags)
        return str(run.info.run_id)

    def _put_away_earlier(self, ctx: RunContext) -> None:
        """What the interrupted attempt sent is sent again, so its MLflow run goes to MLflow's bin (`restore_run`)."""
        place = str(ctx.output_dir.absolute()).replace("'", "\\'")
        query = f"tags.`evsys.run_dir` = '{place}'"
        order = ["attributes.start_time DESC"]
        for earlier in self._client.search_runs([self._experiment_id], query, max_results=1, order_by=order):
            self._client.delete_run(earlier.info.run_id)

    def on_experiment_end(self, results: list[RunResult]) -> None:
        super().on_experiment_end(results)
        conclusion = getattr(self._experiment, "conclusion", None)
        if self._client is not None and conclusion is not None:
            self._client.set_experiment_tag(
                self._experiment_id, "evsys.conclusion", clean_text(conclusion.text)[:LONGEST_TAG]
            )


LONGEST_TAG = 5000
"""Of what MLflow takes as a tag."""
LONGEST_PARAM = 500
MOST_AT_ONCE = 100
"""Params that MLflow takes in one call."""


class _MlflowRun:
    def __init__(self, client: Any, run_id: str, settings: dict[str, object]):
        from mlflow.entities import Param

        self._client, self._id = client, run_id
        params = [Param(mlflow_name(key), str(value)[:LONGEST_PARAM]) for key, value in flat(settings).items()]
        for start in range(0, len(params), MOST_AT_ONCE):
            client.log_batch(run_id, params=params[start : start + MOST_AT_ONCE])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = [Metric(mlflow_name(name), float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def note(self, name: str, text: str) -> None:
        self._client.set_tag(self._id, f"evsys.{mlflow_name(name)}", text[:LONGEST_TAG])

    def end(self, result: RunResult | None) -> None:
        ends = {"completed": "FINISHED", "failed": "FAILED"}
        if result is not None:
            self.note("status", _end_text(result))
        self._client.set_terminated(self._id, ends.get(result.status, "KILLED") if result else "KILLED")


def mlflow_name(name: str) -> str:
    """`name` in the characters that MLflow takes: `pass@1` is `pass_at_1`."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))


def _end_text(result: RunResult) -> str:
    return clean_text(f"{result.status}: {result.error}") if result.error else result.status
