"""Evaluate a checkpoint on a dataset with aliases, in a directory of its own. What `evsys eval model` does.

In: a `ModelOrder`. Out: an `EvalSummary`, and the artifacts of `evsys_sdk.eval.evaluate_model` on disk. The model is
opened as `evsys serve` opens it; answers are kept as they come, so that a killed evaluation goes on.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from evsys_sdk import registry
from evsys_sdk.asyncs import run_async
from evsys_sdk.eval.aliases import AliasMatcher
from evsys_sdk.eval.model_eval import ModelEvalConfig, evaluate_answers, load_eval_dataset
from evsys_sdk.eval.prompts import DEFAULT_SYSTEM
from evsys_sdk.eval.summary import EvalArtifacts, EvalSummary
from evsys_sdk.protocols import FinishedRollouts, Row
from evsys_sdk.running.opening import OpenModel, Target, check_target, open_model
from evsys_sdk.running.standalone import Asked, finished_result, open_evaluation, stamp_of
from evsys_sdk.surface import derive_seed, leave_retries_to_caller, let_go


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOrder:
    """What to evaluate, on what, and how."""

    dataset: Path
    matcher: AliasMatcher
    target: Target
    config: ModelEvalConfig
    inference_kind: str
    system: str | None = DEFAULT_SYSTEM
    seed: int = 42

    def asked(self) -> Asked:
        written = stamp_of(self.target.checkpoint) or stamp_of(self.target.model)
        return Asked(
            subject={
                "dataset": {
                    "path": str(self.dataset),
                    "sha256": hashlib.sha256(self.dataset.read_bytes()).hexdigest(),
                },
                "system": self.system,
                "model": {**asdict(self.target), "written": written},
                "num_samples": self.config.num_samples,
                "max_tokens": self.config.max_tokens,
                "temperature": self.config.temperature,
                "seed": self.seed,
            },
            folding={"aliases": self.matcher.sha256},
        )


def score_model(
    order: ModelOrder, folder: Path, *, fresh: bool = False, retry_errors: bool = False
) -> tuple[EvalSummary, bool]:
    """The summary, and whether it was there already."""
    rows = load_eval_dataset(order.dataset, system=order.system)
    asked = order.asked()
    known = None if fresh else finished_result(folder, asked)
    if known is not None:
        before = EvalSummary.from_dict(known)
        if not (retry_errors and before.retry_report.total_failures):
            return before, True
    check_target(order.target)
    with open_evaluation(folder, asked, fresh=fresh) as evaluation:
        found = _evaluate(order, rows, folder, evaluation.finished())
        evaluation.finish(found.summary.to_dict())
        return found.summary, False


def _evaluate(order: ModelOrder, rows: list[Row], folder: Path, finished: FinishedRollouts) -> EvalArtifacts:
    target = order.target
    if target.backend == "tinker":
        tries = {"connect_attempts": order.config.max_attempts}
        target = replace(target, backend_params=tries | target.backend_params)
    with open_model(target) as model:
        return run_async(_ask_all(order, model, rows, folder, finished))


async def _ask_all(
    order: ModelOrder, model: OpenModel, rows: list[Row], folder: Path, finished: FinishedRollouts
) -> EvalArtifacts:
    sampler, renderer, cfg = await model.sampler(), model.renderer(), order.config
    leave_retries_to_caller(model.service)  # `max_attempts` says how often a call is made
    # A client asks the same question with the same seed; samples of one question need a client each.
    clients: list[Any] = []
    for sample in range(cfg.num_samples):
        client = registry.inference.build(order.inference_kind, {"concurrency": cfg.batch_size})
        client.attach(sampler, renderer, derive_seed(order.seed, "sample", sample))
        clients.append(client)

    async def ask(prompt: Any, sample: int) -> str:
        text: str = await clients[sample].agenerate(
            prompt=prompt, max_tokens=cfg.max_tokens, temperature=cfg.temperature
        )
        return text

    try:
        return await evaluate_answers(
            ask, rows, matcher=order.matcher, output_dir=folder, config=cfg, finished=finished
        )
    finally:
        let_go(sampler)
