"""One evaluation, whatever answers: weights behind a rollout engine, a hosted model, a client on rows, a record.

In: a model (`roll_out`: tasks in, graded rollouts out), tasks, metrics. Out: an `EvalResult`. How rewards fold into
scores is `scoring`'s; this is the only place that builds an `EvalResult` from rollouts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from evsys_sdk.data_types import Columns, HarborTask
from evsys_sdk.eval.scoring import NamedMetric, break_down, score_all, scores_of_task, why_invalid
from evsys_sdk.protocols import AgentSpec, EvalResult, FinishedRollouts, Renderer, Rollout, RolloutEngine, TaskScores
from evsys_sdk.stats.clusters import Clusters
from evsys_sdk.training_api import SamplingClient, SamplingParams


class EvalTask(Protocol):
    """What scoring needs to know of a task."""

    @property
    def task_id(self) -> str: ...
    @property
    def target(self) -> object: ...
    @property
    def metadata(self) -> Columns: ...


class EvaluatedModel[T](Protocol):
    """What does this model answer to these tasks, and how good is that?"""

    async def roll_out(
        self, tasks: Sequence[T], *, num_samples: int = 1, finished: FinishedRollouts | None = None
    ) -> list[list[Rollout]]:
        """One list per task, in order, of `num_samples` rollouts; those in `finished` are not made again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsModel:
    """Weights that a rollout engine samples from."""

    engine: RolloutEngine
    sampler: SamplingClient
    renderer: Renderer
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=256, temperature=1.0))
    agent: AgentSpec | None = None

    async def roll_out(
        self, tasks: Sequence[HarborTask], *, num_samples: int = 1, finished: FinishedRollouts | None = None
    ) -> list[list[Rollout]]:
        agent = {} if self.agent is None else {"agent": self.agent}  # engines of projects may know no agents
        return await self.engine.roll_out(
            tasks,
            sampler=self.sampler,
            renderer=self.renderer,
            sampling=self.sampling,
            num_samples=num_samples,
            finished=finished,
            **agent,
        )


async def evaluate[T: EvalTask](
    model: EvaluatedModel[T],
    tasks: Sequence[T],
    metrics: Sequence[NamedMetric],
    *,
    name: str,
    split: str,
    num_samples: int = 1,
    finished: FinishedRollouts | None = None,
    breakdown_keys: Sequence[str] = (),
    clusters: Clusters | None = None,
    step: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> EvalResult:
    """Have the model answer every task `num_samples` times and fold the rewards by the metrics."""
    started, clusters = clock(), clusters or Clusters()
    groups = await model.roll_out(tasks, num_samples=num_samples, finished=finished)
    scored = score_tasks(tasks, groups)
    rollouts = [rollout for group in groups for rollout in group]
    return EvalResult(
        name=name,
        split=split,
        scores=score_all(metrics, scored, clusters.of),
        step=step,
        clusters=clusters.of,
        clustered_by=clusters.found_by,
        breakdown=break_down(breakdown_keys, metrics, scored),
        rollouts=rollouts,
        error=why_invalid(scored, rollouts),
        seconds=clock() - started,
    )


def score_tasks(tasks: Iterable[EvalTask], groups: Iterable[Sequence[Rollout]]) -> list[TaskScores]:
    """What is known of each task after its rollouts."""
    return [
        scores_of_task(task.task_id, rollouts, target=task.target, metadata=task.metadata)
        for task, rollouts in zip(tasks, groups, strict=True)
    ]
