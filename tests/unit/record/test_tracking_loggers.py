"""tensorboard_logger, wandb_logger, mlflow_logger: against stand-ins, and against the real libraries where they are."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from evsys_sdk import registry
from evsys_sdk.errors import MissingDependency
from evsys_sdk.protocols import EvalResult, RunContext, RunResult, Score
from evsys_sdk.record.callbacks import CallbackList
from evsys_sdk.record.trackers import mlflow_name

MakeCtx = Callable[..., RunContext]
SCORE = Score(metric="pass@1", value=0.5)


def play(told: Any, ctx: RunContext, *, steps: int = 3, status: Any = "completed", end: bool = True) -> None:
    """A run with an evaluation that reports when training has gone on, and one after training."""
    told.on_run_start(ctx)
    told.on_train_start(ctx, steps)
    for step in range(1, steps + 1):
        told.on_step(ctx, step, {"loss": 1 / step})
    told.on_eval(ctx, EvalResult(name="tools", split="val", step=1, scores=[SCORE]))
    told.on_checkpoint(ctx, steps, "/weights")
    told.on_train_end(ctx, {"loss": 1 / steps})
    told.on_eval(ctx, EvalResult(name="tools", split="val", scores=[SCORE]))
    if end:
        told.on_run_end(ctx, RunResult(run_id=ctx.run_id, status=status, error=None if status == "completed" else "x"))


class StandInWandb(ModuleType):
    """wandb as the logger sees it: runs that keep what they are told."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[Any] = []

    @staticmethod
    def Settings(**settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **given: Any) -> Any:
        run = SimpleNamespace(given=given, rows=[], summary={}, axes={}, ended=None)
        run.log = run.rows.append
        run.define_metric = lambda name, step_metric=None: run.axes.update({name: step_metric})
        run.finish = lambda exit_code: setattr(run, "ended", exit_code)
        self.runs.append(run)
        return run


class StandInMlflow(ModuleType):
    """MLflow's client in memory."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.runs: list[Any] = []
        self.uris: list[str] = []
        self.experiments: dict[str, str] = {}
        self.lock = threading.Lock()

    def MlflowClient(self, tracking_uri: str) -> StandInMlflow:
        self.uris.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str, artifacts: str | None) -> str:
        return self.experiments.setdefault(name, str(len(self.experiments) + 1))

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        with self.lock:
            info = SimpleNamespace(run_id=str(len(self.runs)), name=run_name)
            self.runs.append(
                SimpleNamespace(info=info, tags=dict(tags), points=[], params={}, status="RUNNING", gone=False)
            )
        return self.runs[-1]

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        self.runs[int(run_id)].points += [(key, value, step) for key, value, _, step in metrics]
        self.runs[int(run_id)].params.update(params)

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.runs[int(run_id)].tags[key] = value

    def set_experiment_tag(self, experiment: str, key: str, value: str) -> None:
        self.experiments[key] = value

    def set_terminated(self, run_id: str, status: str) -> None:
        self.runs[int(run_id)].status = status

    def search_runs(self, experiments: list[str], query: str, max_results: int, order_by: list[str]) -> list[Any]:
        found = [run for run in self.runs if f"'{run.tags['evsys.run_dir']}'" in query and not run.gone]
        return found[::-1][:max_results]

    def delete_run(self, run_id: str) -> None:
        self.runs[int(run_id)].gone = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> StandInWandb:
    module = StandInWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> StandInMlflow:
    module, entities = StandInMlflow(), ModuleType("mlflow.entities")
    entities.__dict__.update(Metric=lambda *fields: fields, Param=lambda *fields: fields)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return module


def build(kind: str, **params: Any) -> CallbackList:
    return CallbackList([(kind, registry.callbacks.build(kind, params))])


@pytest.mark.parametrize(
    ("kind", "extra"), [("wandb_logger", "wandb"), ("mlflow_logger", "mlflow"), ("tensorboard_logger", "tensorboard")]
)
def test_a_missing_package_is_named_with_its_extra(kind: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(MissingDependency, match=rf"evsys-sdk\[{extra}\]"):
        build(kind)


def test_wandb_is_told_every_number_once_and_at_its_step(wandb: StandInWandb, make_ctx: MakeCtx) -> None:
    told = build("wandb_logger", mode="offline", project="p", tags=["a"])
    play(told, make_ctx("exp/lr1__s42", run_name="lr1__s42", run_config={"lr": 1}, tags=["b"]))
    (run,) = wandb.runs
    assert told.errors == []
    assert run.rows == [
        {"loss": 1.0, "step": 1},
        {"loss": 0.5, "step": 2},
        {"loss": 1 / 3, "step": 3},
        {"val/tools/pass@1": 0.5, "step": 1},
        {"final/loss": 1 / 3, "step": 3},
        {"final/val/tools/pass@1": 0.5, "step": 3},
    ]
    # wandb's own step only moves forward and would drop the late evaluation: ours is the axis.
    assert run.axes == {"step": None, "*": "step"}
    given = run.given
    assert (given["project"], given["name"], given["group"], given["mode"]) == ("p", "lr1__s42", "lr1", "offline")
    assert (given["reinit"], given["tags"], given["config"]["lr"]) == ("create_new", ["a", "b"], 1)
    assert (run.summary["status"], run.ended) == ("completed", 0)


SECRET = "sk-proj-Abc123def456ghi789"


def tell_secrets(kind: str, make_ctx: MakeCtx) -> None:
    """A run whose every text holds a key."""
    ctx = make_ctx(run_id="r0", run_name=f"arm {SECRET}", tags=[SECRET], run_config={"note": "plain"})
    ctx.config = SimpleNamespace(
        name=f"lab {SECRET}", metadata=SimpleNamespace(hypothesis=f"{SECRET} \x1b[2J works"), conclusion=None
    )
    told = build(kind)
    told.on_experiment_start(SimpleNamespace(conclusion=SimpleNamespace(text=f"learned with {SECRET}")))
    told.on_run_start(ctx)
    told.on_checkpoint(ctx, 1, f"http://ann:pa55word@127.0.0.1/{SECRET}")
    told.on_eval(ctx, EvalResult(name="tools", split="val", scores=[], error=f"401 for {SECRET}"))
    result = RunResult(run_id="r0", status="failed", error=f"refused {SECRET}")
    told.on_run_end(ctx, result)
    told.on_experiment_end([result])


def test_no_key_is_told_to_wandb(wandb: StandInWandb, make_ctx: MakeCtx) -> None:
    tell_secrets("wandb_logger", make_ctx)
    [run] = wandb.runs
    told = f"{run.given} {run.rows} {run.summary}"
    assert SECRET not in told and "pa55word" not in told and "\\x1b" not in told
    assert run.summary["hypothesis"] == "[redacted] \\u001b[2J works"


def test_no_key_is_told_to_mlflow(mlflow: StandInMlflow, make_ctx: MakeCtx) -> None:
    tell_secrets("mlflow_logger", make_ctx)
    [run] = mlflow.runs
    told = f"{run.info} {run.tags} {run.params} {mlflow.experiments}"
    assert SECRET not in told and "pa55word" not in told and "\\x1b" not in told


def test_a_run_that_failed_ends_as_one_in_wandb(wandb: StandInWandb, make_ctx: MakeCtx) -> None:
    play(build("wandb_logger"), make_ctx("exp/r"), status="failed")
    assert (wandb.runs[0].summary["status"], wandb.runs[0].ended) == ("failed: x", 1)


def test_a_service_that_is_away_costs_one_report_and_no_run(
    wandb: StandInWandb, make_ctx: MakeCtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(**given: Any) -> Any:
        raise RuntimeError("no route to host")

    monkeypatch.setattr(wandb, "init", away)
    told = build("wandb_logger")
    play(told, make_ctx("exp/r"))
    (error,) = told.errors
    assert "on_run_start" in error and "no route to host" in error


def test_mlflow_is_told_every_number_once_and_by_a_name_it_takes(mlflow: StandInMlflow, make_ctx: MakeCtx) -> None:
    told, ctx = build("mlflow_logger"), make_ctx("exp/r", run_config={"algorithm": {"params": {"lr": 1}}})
    told.on_experiment_start(SimpleNamespace(conclusion=SimpleNamespace(text="No arm beats the baseline.")))
    play(told, ctx)
    told.on_experiment_end([])
    (run,) = mlflow.runs
    assert told.errors == []
    assert [point for point in run.points if point[0] == "loss"] == [
        ("loss", 1.0, 1),
        ("loss", 0.5, 2),
        ("loss", 1 / 3, 3),
    ]
    assert ("val/tools/pass_at_1", 0.5, 1) in run.points and ("final/val/tools/pass_at_1", 0.5, 3) in run.points
    assert (run.params["algorithm.params.lr"], run.status, run.tags["evsys.last_checkpoint"]) == (
        "1",
        "FINISHED",
        "step 3: /weights",
    )
    assert mlflow.uris == [f"sqlite:///{ctx.output_dir.parent / 'mlflow.sqlite'}"]
    assert mlflow.experiments["evsys.conclusion"] == "No arm beats the baseline."


def test_a_run_that_resumes_is_told_to_a_new_mlflow_run_and_the_old_one_is_put_away(
    mlflow: StandInMlflow, make_ctx: MakeCtx
) -> None:
    other, ctx = make_ctx("other"), make_ctx("r")
    play(build("mlflow_logger"), other)
    play(build("mlflow_logger"), ctx, steps=2, end=False)  # killed here
    ctx.resume = True
    play(build("mlflow_logger"), ctx, steps=4)
    left = [run for run in mlflow.runs if not run.gone]
    assert [run.info.name for run in left] == ["other", "r"]
    assert [step for name, _, step in left[1].points if name == "loss"] == [1, 2, 3, 4]


def test_a_run_begun_anew_leaves_the_earlier_mlflow_run_where_it_is(mlflow: StandInMlflow, make_ctx: MakeCtx) -> None:
    play(build("mlflow_logger"), make_ctx("r"))
    play(build("mlflow_logger"), make_ctx("r"))
    assert [run.gone for run in mlflow.runs] == [False, False]


@pytest.mark.parametrize("kind", ["wandb_logger", "mlflow_logger"])
def test_arms_at_the_same_time_do_not_mix(
    kind: str, wandb: StandInWandb, mlflow: StandInMlflow, make_ctx: MakeCtx
) -> None:
    told = build(kind)
    contexts = [make_ctx(f"r{n}") for n in range(4)]
    threads = [
        threading.Thread(target=play, args=(told, ctx), kwargs={"steps": 10 + n}) for n, ctx in enumerate(contexts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told.errors == []
    if kind == "wandb_logger":
        found = {run.given["name"]: len([row for row in run.rows if "loss" in row]) for run in wandb.runs}
    else:
        found = {run.info.name: len([point for point in run.points if point[0] == "loss"]) for run in mlflow.runs}
    assert found == {"r0": 10, "r1": 11, "r2": 12, "r3": 13}


def test_a_run_that_broke_off_is_closed_at_the_end_of_the_experiment(wandb: StandInWandb, make_ctx: MakeCtx) -> None:
    told = build("wandb_logger")
    play(told, make_ctx("r"), end=False)
    told.on_experiment_end([RunResult(run_id="r", status="cancelled", error="interrupted")])
    assert (wandb.runs[0].summary["status"], wandb.runs[0].ended) == ("cancelled: interrupted", 1)


@pytest.mark.parametrize(
    ("name", "expected"), [("val/a b/pass@1", "val/a b/pass_at_1"), ("x=1,y", "x_1_y"), ("a.b-c:d", "a.b-c:d")]
)
def test_names_in_the_characters_of_mlflow(name: str, expected: str) -> None:
    assert mlflow_name(name) == expected


def test_tensorboard_shows_each_point_once_and_the_hypothesis(make_ctx: MakeCtx) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    told, ctx = build("tensorboard_logger"), make_ctx("r", hypothesis="more helps")
    play(told, ctx)
    assert told.errors == []
    events = accumulator.EventAccumulator(str(ctx.output_dir / "logs" / "tensorboard_logger"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")][:2] == [(1, 1.0), (2, 0.5)]
    assert [event.step for event in events.Scalars("val/tools/pass@1")] == [1]
    assert [event.step for event in events.Scalars("final/val/tools/pass@1")] == [3]
    assert {"hparams", "hypothesis", "status", "last_checkpoint"} <= set(events.Tags()["tensors"])


@pytest.mark.parametrize("store", ["sqlite", "file"])
def test_the_real_mlflow_keeps_it_without_a_server(
    store: str, make_ctx: MakeCtx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"sqlite:///{tmp_path / 'mlflow.sqlite'}" if store == "sqlite" else (tmp_path / "mlruns").as_uri()
    params = {} if store == "sqlite" else {"tracking_uri": uri}
    ctx = make_ctx("r")
    first = build("mlflow_logger", **params)
    play(first, ctx, steps=2, end=False)
    ctx.resume = True
    second = build("mlflow_logger", **params)
    play(second, ctx, steps=4)
    assert first.errors + second.errors == []
    client = real.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("exp").experiment_id])
    assert [point.step for point in client.get_metric_history(run.info.run_id, "loss")] == [1, 2, 3, 4]
    assert run.info.status == "FINISHED"


def test_the_real_wandb_keeps_it_offline(make_ctx: MakeCtx) -> None:
    pytest.importorskip("wandb")
    told, ctx = build("wandb_logger", mode="offline"), make_ctx("r")
    play(told, ctx)
    assert told.errors == []
    (file,) = (ctx.output_dir / "logs" / "wandb").glob("offline-run-*/*.wandb")
    assert b"val/tools/pass@1" in file.read_bytes()


@pytest.mark.parametrize(("uri", "set_to"), [("file:/tmp/runs", "true"), ("runs", "true"), ("sqlite:///x.db", None)])
def test_a_folder_as_mlflow_store_is_allowed_by_the_variable_that_mlflow_asks_for(
    mlflow: StandInMlflow, make_ctx: MakeCtx, monkeypatch: pytest.MonkeyPatch, uri: str, set_to: str | None
) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    play(build("mlflow_logger", tracking_uri=uri), make_ctx("exp/r"))
    assert mlflow.uris == [uri] and os.environ.get("MLFLOW_ALLOW_FILE_STORE") == set_to
    os.environ.pop("MLFLOW_ALLOW_FILE_STORE", None)
