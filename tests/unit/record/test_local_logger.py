from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evsys_sdk.config.metadata import Hypothesis
from evsys_sdk.data_types import ChatMessagesRow
from evsys_sdk.protocols import EvalResult, Rollout, RunContext, RunResult, Score, Turn
from evsys_sdk.record.local_logger import LocalLogger, conclude

MakeCtx = Callable[..., RunContext]

TURN = Turn(prompt_tokens=[1, 2], completion_tokens=[3], logprobs=[-0.5], text="hi")
SCORE = Score(metric="pass@1", value=0.5, low=0.25, high=0.75, n_tasks=20, n_rollouts=20, n_errors=1)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def evaluated(split: str = "val", **fields: Any) -> EvalResult:
    return EvalResult(**{"name": "tools", "split": split, "step": 50, "scores": [SCORE], **fields})


def test_the_tree_of_a_run(make_ctx: MakeCtx) -> None:
    logger, ctx = LocalLogger(), make_ctx(hypothesis="more data helps", train_rows=[{"q": 1}])
    logger.on_run_start(ctx)
    logger.on_train_start(ctx, 2)
    logger.on_step(ctx, 1, {"loss": float("nan")})
    for split in ("val", "test", "eval"):
        logger.on_eval(ctx, evaluated(split, rollouts=[Rollout(task_id="t", turns=[TURN], reward=1.0)]))
    logger.on_run_end(ctx, RunResult(run_id="r0", status="completed"))
    logs = ctx.output_dir / "logs"
    assert sorted(str(path.relative_to(logs)) for path in logs.rglob("*") if path.is_file()) == [
        "conclusion.md",
        "data/training_data.jsonl",
        "eval/metrics.jsonl",
        "eval/rollouts.jsonl",
        "hypothesis.md",
        "test/metrics.jsonl",
        "test/rollouts.jsonl",
        "training/metrics.jsonl",
        "validation/metrics.jsonl",
        "validation/rollouts.jsonl",
    ]
    assert (logs / "hypothesis.md").read_text() == "more data helps\n"
    assert read(logs / "training" / "metrics.jsonl")[0]["loss"] == "NaN"


def test_an_eval_is_a_line_with_its_scores_and_a_line_per_rollout(make_ctx: MakeCtx) -> None:
    logger, ctx = LocalLogger(), make_ctx()
    broken = Rollout(task_id="t2", status="infra_error", error="sandbox gone")
    result = evaluated(
        rollouts=[Rollout(task_id="t1", turns=[TURN], reward=1.0), broken], breakdown={"kit": {"git": [SCORE]}}
    )
    logger.on_eval(ctx, result)
    folder = ctx.output_dir / "logs" / "validation"
    line = read(folder / "metrics.jsonl")[0]
    assert (line["step"], line["name"], line["val/tools/pass@1"]) == (50, "tools", 0.5)
    assert (line["scores"][0]["low"], line["breakdown"]["kit"]["git"][0]["high"]) == (0.25, 0.75)
    first, second = read(folder / "rollouts.jsonl")
    assert (first["task_id"], first["completion"], first["turns"][0]["completion_tokens"]) == ("t1", "hi", [3])
    assert (second["reward"], second["status"], second["error"]) == (None, "infra_error", "sandbox gone")


def test_all_training_rows_are_written_typed_ones_too(make_ctx: MakeCtx) -> None:
    rows = [{"q": "\ud800"}, ChatMessagesRow(messages=[{"role": "user", "content": "ä"}])]
    ctx = make_ctx(train_rows=rows)
    LocalLogger().on_run_start(ctx)
    first, second = read(ctx.output_dir / "logs" / "data" / "training_data.jsonl")
    assert (first["q"], second["messages"][0]["content"]) == ("\ud800", "ä")


def test_rows_of_a_later_stage_come_behind_the_earlier_ones(make_ctx: MakeCtx) -> None:
    logger, ctx = LocalLogger(), make_ctx(train_rows=[{"stage": 1}])
    logger.on_run_start(ctx)
    logger.on_train_start(ctx, 1)
    ctx.extras["train_rows"] = [{"stage": 2}]
    logger.on_train_start(ctx, 1)
    assert read(ctx.output_dir / "logs" / "data" / "training_data.jsonl") == [{"stage": 1}, {"stage": 2}]


def test_a_run_without_hypothesis_says_so(make_ctx: MakeCtx) -> None:
    ctx = make_ctx()
    LocalLogger().on_run_start(ctx)
    assert "No hypothesis was given" in (ctx.output_dir / "logs" / "hypothesis.md").read_text()


def test_runs_in_threads_do_not_mix(make_ctx: MakeCtx) -> None:
    logger = LocalLogger()

    def run(name: str) -> None:
        ctx = make_ctx(name)
        for step in range(100):
            logger.on_step(ctx, step, {"loss": 1.0})
        logger.on_run_end(ctx, RunResult(run_id=name, status="completed"))

    threads = [threading.Thread(target=run, args=(f"r{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(4):
        lines = read(make_ctx(f"r{n}").output_dir / "logs" / "training" / "metrics.jsonl")
        assert [line["step"] for line in lines] == list(range(100))


def test_a_run_that_broke_off_gets_its_conclusion_at_the_end_of_the_experiment(make_ctx: MakeCtx) -> None:
    logger, ctx = LocalLogger(), make_ctx()
    logger.on_run_start(ctx)
    logger.on_experiment_end([RunResult(run_id="r0", status="failed", error="boom")])
    assert (ctx.output_dir / "logs" / "conclusion.md").read_text().startswith("# r0: failed\n\nError: boom\n")


def test_the_conclusion_says_how_far_each_score_can_be_believed() -> None:
    result = RunResult(run_id="r0", status="completed", metrics={"loss": 0.125, "val/tools/pass@1": 0.5})
    invalid = evaluated("test", step=None, scores=[Score(metric="pass@1", value=None, n_tasks=1, error="all errored")])
    broken = evaluated("test", name="big", step=None, scores=[], error="no such file")
    own = evaluated("eval", name="eval", step=None)
    assert conclude(result, [evaluated(), invalid, broken, own]).splitlines() == [
        "# r0: completed",
        "",
        "- loss = 0.125",
        "- val/tools pass@1 at step 50 = 0.500 [0.250, 0.750], 20 tasks, 1 of 20 rollouts errored",
        "- test/tools pass@1 has no value: all errored (1 task)",
        "- test/big could not be scored: no such file",
        "- eval pass@1 = 0.500 [0.250, 0.750], 20 tasks, 1 of 20 rollouts errored",
    ]


def test_an_unevaluated_run_is_said_to_be_one() -> None:
    assert "It was not evaluated." in conclude(RunResult(run_id="r", status="completed"), [])


def test_a_typed_hypothesis_is_written_as_a_person_would_read_it(make_ctx: MakeCtx) -> None:
    typed = Hypothesis.model_validate({"claim": "It helps.", "prediction": {"arm": "a", "vs": "b", "at_least": 0.05}})
    ctx = make_ctx(hypothesis=typed)
    LocalLogger().on_run_start(ctx)
    assert (ctx.output_dir / "logs" / "hypothesis.md").read_text() == (
        "It helps.\nPrediction: the success metric of a is better than that of b by at least 0.05\n"
    )
