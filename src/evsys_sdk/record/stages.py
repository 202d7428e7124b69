"""What a chain of stages did to each benchmark: learned, forgotten, transferred.

In: the evaluations of an arm's seeds. Out: tables of numbers. All are means over the seeds that have them, and a
positive number is always good for transfer and bad for forgetting, whether higher or lower scores are better.

- *forgetting* of a benchmark: its best score after an earlier stage, less its score after the last one.
- *transfer* before a stage: its score after the stage before, less that of the untrained model: what the earlier stages
  gave the benchmark before this stage was trained. It needs `baseline: true` on the benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from evsys_sdk.protocols import EvalResult
from evsys_sdk.registry import lower_is_better

BEFORE = ""
"""The column before the first stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One benchmark and metric along the chain."""

    benchmark: str
    scores: dict[str, float]
    """Stage (or BEFORE) -> score after it."""
    forgetting: float | None = None
    transfer: dict[str, float] = field(default_factory=dict)
    """Stage -> transfer before it, from the second stage on."""


def stage_names(seeds: Sequence[Sequence[EvalResult]]) -> list[str]:
    """The stages of a chain in their order; none for a run without."""
    names = list(dict.fromkeys(found.stage for evals in seeds for found in evals if found.stage is not None))
    return names if len(names) > 1 else []


def stage_rows(
    seeds: Sequence[Sequence[EvalResult]], *, lower: Callable[[str], bool] = lower_is_better
) -> list[StageRow]:
    """A row per benchmark and metric; metrics that `lower` holds of are turned round for forgetting and transfer."""
    stages = stage_names(seeds)
    values: dict[tuple[str, str], dict[str, list[float]]] = {}
    for evals in seeds:
        for (name, metric, stage), value in _last_scores(evals).items():
            values.setdefault((name, metric), {}).setdefault(stage, []).append(value)
    means = {key: {stage: fmean(found) for stage, found in cells.items()} for key, cells in values.items()}
    return [
        _row(f"{name} {metric}", scores, stages, lower=lower(metric))
        for (name, metric), scores in means.items()
        if stages
    ]


def _last_scores(evals: Sequence[EvalResult]) -> dict[tuple[str, str, str], float]:
    """The last score of one seed on each benchmark after each stage: that of the weights the stage ended with."""
    found: dict[tuple[str, str, str], float] = {}
    for result in evals:
        stage = BEFORE if result.step == 0 else result.stage
        for score in result.scores:
            if stage is not None and score.value is not None:
                found[f"{result.split}/{result.name}", score.metric, stage] = score.value
    return found


def _row(benchmark: str, scores: dict[str, float], stages: list[str], *, lower: bool) -> StageRow:
    sign = -1 if lower else 1
    earlier = [sign * scores[stage] for stage in stages[:-1] if stage in scores]
    last, untrained = scores.get(stages[-1]), scores.get(BEFORE)
    transfer = {
        stage: sign * (scores[before] - untrained)
        for before, stage in pairwise(stages)
        if untrained is not None and before in scores
    }
    forgetting = max(earlier) - sign * last if earlier and last is not None else None
    return StageRow(benchmark=benchmark, scores=scores, forgetting=forgetting, transfer=transfer)
