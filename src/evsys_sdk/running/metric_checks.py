"""Whether a metric that an experiment is to be judged by will exist.

In: a config. Out: problems with their places. A misspelt success metric would otherwise come out when everything is
trained, and by then it is part of what the experiment was launched as.
"""

from __future__ import annotations

from collections.abc import Iterator

from evsys_sdk import registry
from evsys_sdk.config.metadata import Hypothesis
from evsys_sdk.config.models import ExperimentConfig
from evsys_sdk.constants import UNTRAINED
from evsys_sdk.errors import EvsysError, Problem, not_known
from evsys_sdk.eval.metrics import ExactMatch, PassAtK, PassRate, ToolkitMatch, metric_family
from evsys_sdk.protocols import RunResult
from evsys_sdk.record.conclusion import matching

NUMBERS = ("final_loss", "first_loss", "final_reward", "first_reward", "steps", "tokens")
"""What our own algorithms say of a run, beside its scores."""
OURS = "evsys_sdk."


def metric_problems(config: ExperimentConfig) -> Iterator[Problem]:
    """Metrics that no run will have, of an experiment whose runs are scored; and of a hypothesis: a difference that
    cannot be, and an untrained model that nobody scores."""
    scores = scores_of(config)
    for place, name in _named(config) if scores else ():
        if not keys_of(config, name) and not may_be_a_number(config, name):
            message = not_known(name, "metric that these runs will have", [*scores, *NUMBERS])
            yield Problem(path=place, value=name, message=message)
    yield from _too_large(config)
    hypothesis = config.metadata.hypothesis
    if isinstance(hypothesis, Hypothesis) and not any(entry.baseline for entry in config.metadata.benchmark):
        for key, whom in (("arm", hypothesis.prediction.arm), ("vs", hypothesis.prediction.vs)):
            if whom == UNTRAINED:
                message = "the untrained model is not scored; set `baseline: true` in an entry of metadata.benchmark"
                yield Problem(path=f"metadata.hypothesis.prediction.{key}", value=whom, message=message)


def _too_large(config: ExperimentConfig) -> Iterator[Problem]:
    """A predicted difference that no two shares have: `at_least: 5` where five points were meant."""
    metadata = config.metadata
    prediction = metadata.hypothesis.prediction if isinstance(metadata.hypothesis, Hypothesis) else None
    success = metadata.success_metric.name if metadata.success_metric is not None else None
    name = (prediction.metric if prediction else None) or success
    if prediction is None or name is None or prediction.at_least < 1:
        return
    metrics = [key.rsplit("/", 1)[-1] for key in keys_of(config, name)]
    if metrics and all(map(_is_within_0_and_1, metrics)):
        points = prediction.at_least
        meant = (
            f"{points / 100:g} is {points:g} point{'' if points == 1 else 's'}" if points < 100 else "0.05 is 5 points"
        )
        message = f"{name} lies between 0 and 1, so no difference is larger than 1; {meant}"
        yield Problem(path="metadata.hypothesis.prediction.at_least", value=points, message=message)


def _is_within_0_and_1(metric: str) -> bool:
    """Known of our own only."""
    try:
        found = registry.metrics.get(metric)
    except EvsysError:
        return False  # told by the check of the block
    return found is metric_family(metric) or found in (PassAtK, PassRate, ExactMatch, ToolkitMatch)


def _named(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    metadata = config.metadata
    if metadata.success_metric is not None:
        yield "metadata.success_metric", metadata.success_metric.name
    if isinstance(metadata.hypothesis, Hypothesis) and metadata.hypothesis.prediction.metric is not None:
        yield "metadata.hypothesis.prediction.metric", metadata.hypothesis.prediction.metric


def scores_of(config: ExperimentConfig) -> list[str]:
    """The scores that every run will have, by their names in the record."""
    entries = [
        f"{entry.role}/{entry.label}/{metric}" for entry in config.metadata.benchmark for metric in entry.metrics
    ]
    blocks = [run.eval for run in config.all_runs() if run.eval.enabled]
    return list(dict.fromkeys([*entries, *(f"eval/{metric.kind}" for block in blocks for metric in block.metrics)]))


def keys_of(config: ExperimentConfig, name: str) -> list[str]:
    """The scores that `name` means."""
    scores = dict.fromkeys(scores_of(config), 0.0)
    return matching(RunResult(run_id="", status="completed", metrics=scores), name)


def may_be_a_number(config: ExperimentConfig, name: str) -> bool:
    """Whether an algorithm may say it of a run; what a project's own algorithm says is not known."""
    if name.rsplit("/", 1)[-1] in NUMBERS:  # a stage's own begins with its name
        return True
    if "/" in name or name.partition(".")[0] in ("val", "test", "eval"):
        return False
    kinds = {run.algorithm.kind for run in config.all_runs()}
    return not all(_is_ours(kind) for kind in kinds)


def _is_ours(kind: str) -> bool:
    try:
        return bool(registry.algorithms.get(kind).__module__.startswith(OURS))
    except EvsysError:
        return True  # told by the check of the block
