from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evsys_sdk.config.schema import ExperimentConfig
from evsys_sdk.errors import EvsysAuthError
from evsys_sdk.protocols import EvalResult, Rollout, RunContext, RunResult, Score, Turn
from evsys_sdk.record.dashboard.logger import EvsysLogger

MakeCtx = Callable[..., RunContext]

CONFIG = {
    "name": "exp",
    "metadata": {"hypothesis": "h", "tags": ["t"]},
    "run": {
        "name": "r0",
        "data": {"source_kind": "in_memory", "rows": [{"q": 1}]},
        "model": {"name": "m"},
        "algorithm": {"kind": "sft", "params": {"learning_rate": 0.1}},
    },
}


def play(logger: EvsysLogger, ctx: RunContext, status: Any = "completed") -> None:
    turn = Turn(prompt_tokens=[1], completion_tokens=[2], logprobs=[0.0], text="hi")
    score = Score(metric="pass@1", value=1.0, low=0.5, high=1.0, n_tasks=1)
    logger.on_run_start(ctx)
    logger.on_step(ctx, 1, {"loss": 0.5})
    rollouts = [Rollout(task_id="t", turns=[turn], reward=1.0)]
    logger.on_eval(ctx, EvalResult(name="tools", split="val", step=1, scores=[score], rollouts=rollouts))
    logger.on_checkpoint(ctx, 1, "/weights")
    logger.on_run_end(ctx, RunResult(run_id=ctx.run_id, status=status, metrics={"loss": 0.5}))


def test_an_experiment_with_two_runs_arrives(dashboard: Any, environ: dict[str, str], make_ctx: MakeCtx) -> None:
    logger = EvsysLogger(environ=environ)
    config = ExperimentConfig.model_validate(CONFIG)
    experiment = SimpleNamespace(config=config, conclusion=SimpleNamespace(text="r0 wins"), best_score=0.5)
    logger.on_experiment_start(experiment)
    for name in ("r0", "r1"):
        play(logger, make_ctx(name, run_config=config.run))
    logger.on_experiment_end([RunResult(run_id=name, status="completed") for name in ("r0", "r1")])
    (created,) = dashboard.bodies("/sdk/experiments/")
    assert (created["name"], created["hypothesis"], created["tags"]) == ("exp", "h", ["t"])
    generations = dashboard.bodies("/sdk/generations/")
    assert [(g["name"], g["recipe_kind"], g["experiment_id"]) for g in generations] == [
        ("r0", "sft", created["id"]),
        ("r1", "sft", created["id"]),
    ]
    assert len(dashboard.items("steps")) == 2
    evaluations = dashboard.bodies("/eval/")
    assert (evaluations[0]["metrics"], evaluations[0]["scores"][0]["low"]) == ({"pass@1": 1.0}, 0.5)
    prediction = dashboard.items("predictions")[0]
    assert (prediction["task_id"], prediction["completion"], prediction["reward"]) == ("t", "hi", 1.0)
    assert prediction["eval_run_id"] == evaluations[0]["id"]
    last = dashboard.bodies(f"/generations/{generations[0]['id']}/")[-1]
    assert (
        last["status"] == "completed"
        and "val/tools pass@1 at step 1 = 1.000 [0.500, 1.000], 1 task" in last["conclusion"]
    )
    end = dashboard.bodies(f"/experiments/{created['id']}/")[-1]
    assert (end["status"], end["conclusion"], end["best_score"]) == ("completed", "r0 wins", 0.5)


def test_runs_that_never_started_or_broke_off_are_on_record(
    dashboard: Any, environ: dict[str, str], make_ctx: MakeCtx
) -> None:
    logger = EvsysLogger(environ=environ)
    logger.on_experiment_start(ExperimentConfig.model_validate(CONFIG))
    logger.on_run_start(make_ctx("broke_off"))
    failed = [RunResult(run_id=name, status="failed", error="boom") for name in ("broke_off", "never_started")]
    logger.on_experiment_end(failed)
    names = {g["id"]: g["name"] for g in dashboard.bodies("/sdk/generations/")}
    statuses = {names[i]: dashboard.bodies(f"/generations/{i}/")[-1]["status"] for i in names}
    assert statuses == {"broke_off": "failed", "never_started": "failed"}


def test_a_single_run_without_experiment_hooks_makes_its_own_experiment(
    dashboard: Any, environ: dict[str, str], make_ctx: MakeCtx
) -> None:
    play(EvsysLogger(environ=environ), make_ctx())
    (created,) = dashboard.bodies("/sdk/experiments/")
    assert dashboard.bodies(f"/experiments/{created['id']}/")[-1]["status"] == "completed"


def test_missing_credentials_are_said_when_it_is_built() -> None:
    with pytest.raises(EvsysAuthError, match="EVSYS_API_KEY"):
        EvsysLogger(environ={})


def test_offline_the_record_is_in_the_mirror(tmp_path: Path, make_ctx: MakeCtx) -> None:
    environ = {"EVSYS_OFFLINE": "1", "EVSYS_LOG_DIR": str(tmp_path / "mirror")}
    play(EvsysLogger(environ=environ), make_ctx())
    (path,) = (tmp_path / "mirror" / "local").glob("*.jsonl")
    assert len(path.read_text().splitlines()) == 9
