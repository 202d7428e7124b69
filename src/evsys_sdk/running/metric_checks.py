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
from evsys_sdk.protocols import RunResult
from evsys_sdk.record.conclusion import matching

NUMBERS = ("final_loss", "first_loss", "final_reward", "first_reward", "steps", "tokens")
"""What our own algorithms say of a run, beside its scores."""
OURS = "evsys_sdk."


def metric_problems(config: ExperimentConfig) -> Iterator[Problem]:
    """Metrics that no run will have, of an experiment whose runs are scored; and an untrained model that nobody scores,
    of a hypothesis about it."""
    scores = scores_of(config)
    for place, name in _named(config) if scores else ():
        if not keys_of(config, name) and not may_be_a_number(config, name):
            message = not_known(name, "metric that these runs will have", [*scores, *NUMBERS])
            yield Problem(path=place, value=name, message=message)
    hypothesis = config.metadata.hypothesis
    if isinstance(hypothesis, Hypothesis) and not any(entry.baseline for entry in config.metadata.benchmark):
        for key, whom in (("arm", hypothesis.prediction.arm), ("vs", hypothesis.prediction.vs)):
            if whom == UNTRAINED:
                message = "the untrained model is not scored; set `baseline: true` in an entry of metadata.benchmark"
                yield Problem(path=f"metadata.hypothesis.prediction.{key}", value=whom, message=message)


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
