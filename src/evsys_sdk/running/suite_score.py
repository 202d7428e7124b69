"""A standalone score: one model, one suite, one directory. What `evsys benchmark run` does.

In: an `Order`. Out: the result as plain data, and the same on disk. Weights are opened as `evsys serve` opens them and
rolled out by the one rollout engine; a hosted model is asked through its inference client. Whatever can be known to be
wrong is refused before the model is opened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from evsys_sdk import registry
from evsys_sdk.asyncs import run_async
from evsys_sdk.errors import EvsysError, shorten
from evsys_sdk.eval.benchmark import Benchmark, sampling_problem, task_problems
from evsys_sdk.eval.metrics import samples_needed
from evsys_sdk.eval.scoring import is_errored
from evsys_sdk.inference.trained import TrainedModelClient
from evsys_sdk.protocols import AgentSpec, EvalResult, FinishedRollouts, Rollout
from evsys_sdk.record.run_record import eval_summary
from evsys_sdk.rollout.agents import find_agent
from evsys_sdk.rollout.engine import RolloutEngine, refusal
from evsys_sdk.rollout.lanes import LaneSettings
from evsys_sdk.running.hosted import hosted_problems, score_hosted
from evsys_sdk.running.http_front import http_front
from evsys_sdk.running.opening import OpenModel, Target, check_target, open_model
from evsys_sdk.running.standalone import Asked, OnRollout, finished_result, open_evaluation, stamp_of
from evsys_sdk.surface import let_go
from evsys_sdk.task_dirs import has_own_tests
from evsys_sdk.verifiers.grading import grade, grading_problems

SHOWN_PROBLEMS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """A model behind an inference client."""

    kind: str
    name: str
    """The provider's name for it."""
    params: dict[str, Any] = field(default_factory=dict)

    def client(self, max_attempts: int | None = None) -> Any:
        """The client, which makes a lost call so often; a project's own that knows no `model` is built without."""
        cls = registry.inference.get(self.kind)
        if isinstance(cls, type) and issubclass(cls, TrainedModelClient):
            raise EvsysError(f"inference {self.kind!r} asks a model on its backend; say --backend {self.kind} instead")
        retries = {} if max_attempts is None else {"max_retries": max_attempts - 1}
        params = {"model": self.name, **retries, **self.params}
        if retries and any(problem.path == "max_retries" for problem in registry.check_params(cls, params)):
            raise EvsysError(f"inference {self.kind!r} has no max_retries, so --max-attempts cannot be set for it")
        if any(problem.path == "model" for problem in registry.check_params(cls, params)):
            del params["model"]
        return registry.inference.build(self.kind, params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to score, on what, and how."""

    benchmark: Benchmark
    model: Target | Hosted
    metrics: Sequence[str] = ("pass@1",)
    num_samples: int | None = None
    max_tokens: int = 256
    temperature: float = 1.0
    limit: int | None = None
    breakdown_keys: Sequence[str] = ()
    seed: int | None = 42
    """Not for a hosted model."""
    agent: AgentSpec | None = None
    n_concurrent: int = 64
    max_attempts: int | None = None
    """How often a call that the machine broke is made, the first time included; by default as often as the engine, or
    the hosted model's client, does."""

    @property
    def tasks(self) -> list[Any]:
        return self.benchmark.tasks[: self.limit]

    @property
    def each(self) -> int:
        """Rollouts per task."""
        needed = [samples_needed(name, registry.metrics.build(name, {})) for name in self.metrics]
        return self.num_samples or max(needed)

    def asked(self) -> Asked:
        model = asdict(self.model)
        if isinstance(self.model, Target):
            model["written"] = stamp_of(self.model.checkpoint) or stamp_of(self.model.model)
        return Asked(
            subject={
                "benchmark": {"name": self.benchmark.name, "sha256": self.benchmark.sha256},
                "model": model,
                "num_samples": self.each,
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "seed": self.seed if isinstance(self.model, Target) else None,
                "agent": asdict(self.agent) if self.agent else None,
            },
            folding={
                "metrics": list(self.metrics),
                "limit": self.limit,
                "breakdown_keys": list(self.breakdown_keys),
            },
        )

    def known(self, finished: FinishedRollouts) -> int:
        """How many of the rollouts are there already."""
        return sum(finished.find(task.task_id, n) is not None for task in self.tasks for n in range(self.each))

    def check(self) -> None:
        """Refuse what can be known not to work."""
        if not self.metrics:
            raise EvsysError("name at least one metric")
        wrong = [problem for problem in [sampling_problem(self.metrics, self.num_samples)] if problem]
        wrong += task_problems(self.benchmark)
        # `task_problems` has looked at functions of ours; tests in an environment are harbor's to run.
        others = [task for task in self.tasks if not has_own_tests(task) and task.verifier.kind != "in_process"]
        wrong += grading_problems(others)
        wrong += [reason for task in self.tasks if has_own_tests(task) and (reason := refusal(task))][:1]
        if isinstance(self.model, Hosted):
            wrong += hosted_problems(self.tasks)
        if wrong:
            raise EvsysError("\n".join(wrong[:SHOWN_PROBLEMS]))
        if isinstance(self.model, Target):
            check_target(self.model)
        if self.agent is not None:
            find_agent(self.agent)


def score_suite(
    order: Order,
    folder: Path,
    *,
    fresh: bool = False,
    retry_errors: bool = False,
    on_start: Callable[[int, int], None] | None = None,
    on_rollout: OnRollout | None = None,
) -> tuple[dict[str, Any], bool]:
    """The result, and whether it was there already. `on_start` is told how many rollouts there are to be and how many
    are there from before."""
    asked = order.asked()
    known = None if fresh else finished_result(folder, asked)
    if known is not None and not (retry_errors and known["errors"]):
        return known, True
    order.check()
    client = order.model.client(order.max_attempts) if isinstance(order.model, Hosted) else None
    with open_evaluation(folder, asked, fresh=fresh) as evaluation:
        finished = evaluation.finished(on_rollout)
        if on_start is not None:
            on_start(len(order.tasks) * order.each, order.known(finished))
        result = _score(order, client, finished)
        evaluation.write_rollouts(result)
        return evaluation.finish(describe(order, result)), False


def _score(order: Order, client: Any, finished: FinishedRollouts) -> EvalResult:
    options: dict[str, Any] = {
        "metrics": order.metrics,
        "num_samples": order.each,
        "max_tokens": order.max_tokens,
        "temperature": order.temperature,
        "limit": order.limit,
        "breakdown_keys": order.breakdown_keys,
        "finished": finished,
    }
    if isinstance(order.model, Hosted):
        return run_async(score_hosted(order.benchmark, client, concurrency=order.n_concurrent, **options))
    with open_model(order.model) as model:
        return run_async(_score_weights(order, model, options))


async def _score_weights(order: Order, model: OpenModel, options: dict[str, Any]) -> EvalResult:
    length = model.context_length
    settings = LaneSettings(http_front=partial(http_front, length), context_length=length)
    engine = RolloutEngine(concurrency=order.n_concurrent, agent=order.agent, grade=grade, settings=settings)
    engine = engine.limited(max_attempts=order.max_attempts)
    sampler = await model.sampler()
    try:
        return await order.benchmark.score(
            engine=engine, sampler=sampler, renderer=model.renderer(), seed=order.seed, **options
        )
    finally:
        let_go(sampler)


def describe(order: Order, result: EvalResult) -> dict[str, Any]:
    """The result as it is written and printed."""
    suite = order.benchmark
    return {
        "benchmark": {"name": suite.name, "sha256": suite.sha256, "tasks": len(suite.tasks)},
        "model": asdict(order.model),
        **eval_summary(result),
        "errors": errors_in(result.rollouts),
        "usage": usage_of(result.rollouts),
    }


def errors_in(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """What went wrong, and how often; the most frequent first."""
    found = Counter(shorten(rollout.error or rollout.status, 300) for rollout in rollouts if is_errored(rollout))
    return dict(found.most_common())


def usage_of(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Tokens and dollars of all rollouts; a cost that is not known is None."""
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    told = [rollout.metadata for rollout in rollouts if not any(turn.completion_tokens for turn in rollout.turns)]
    unpriced = any(rollout.metadata.get("unpriced") for rollout in rollouts)
    return {
        "input_tokens": sum(len(turn.prompt_tokens) for turn in turns)
        + sum(one.get("n_input_tokens") or 0 for one in told),
        "output_tokens": sum(len(turn.completion_tokens) for turn in turns)
        + sum(one.get("n_output_tokens") or 0 for one in told),
        "cost_usd": None if unpriced else sum(rollout.cost_usd for rollout in rollouts),
    }
