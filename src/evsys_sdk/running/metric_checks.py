"""Whether a metric that an experiment is to be judged by, or its runs are to be stopped by, will exist.

In: a config. Out: problems with their places. A misspelt success metric would otherwise come out when everything is
trained, and by then it is part of what the experiment was launched as.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
OF_A_STEP = ("loss", "lr", "grad_norm", "reward/mean", "entropy", "margin", "accuracy", "completion_tokens", "tokens")
"""What our own algorithms say of a step; backends add to it."""
SPLITS = ("val", "test", "eval")
OURS = "evsys_sdk."
STOPPER = "early_stopping"


def metric_problems(config: ExperimentConfig) -> Iterator[Problem]:
    """Metrics that no run will have, of an experiment whose runs are scored; those that no step will have, of callbacks
    that wait for them; and of a hypothesis, a difference that cannot be and an untrained model that nobody scores."""
    scores = scores_of(config)
    for place, name in _named(config) if scores else ():
        if not keys_of(config, name) and not may_be_a_number(config, name):
            message = not_known(name, "metric that these runs will have", [*scores, *NUMBERS])
            yield Problem(path=place, value=name, message=message)
    yield from _stopping_problems(config)
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


def _stopping_problems(config: ExperimentConfig) -> Iterator[Problem]:
    for index, callback in enumerate(config.callbacks):
        name = callback.params.get("metric")
        if callback.kind != STOPPER or not isinstance(name, str) or not _is_ours(registry.callbacks, STOPPER):
            continue
        if name not in scores_in_training(config) and not _may_be_of_a_step(config, name):
            message = _why_not_in_training(config, name)
            yield Problem(path=f"callbacks[{index}].params.metric", value=name, message=message)


def scores_in_training(config: ExperimentConfig) -> list[str]:
    """The validation scores that are made while a run trains."""
    entries = [entry for entry in config.metadata.benchmark if entry.role == "val" and entry.run_every]
    return [f"val/{entry.label}/{metric}" for entry in entries for metric in entry.metrics]


def _may_be_of_a_step(config: ExperimentConfig, name: str) -> bool:
    """Not the name of a score, nor a number of a whole run; what a project's own algorithm says is not known."""
    if name in OF_A_STEP or name.startswith("test/"):  # the callback itself refuses a test score
        return True
    if name.startswith(tuple(f"{split}{mark}" for split in SPLITS for mark in "./")):
        return False
    is_score = bool(keys_of(config, name)) or _is_ours(registry.metrics, name, default=False)
    return not _all_ours(config) or not (is_score or name in NUMBERS)


def _why_not_in_training(config: ExperimentConfig, name: str) -> str:
    scores = scores_in_training(config)
    meant = _meant(scores, name)
    if meant:
        return f"{name!r} is not a number of a step; closest: {', '.join(meant)}"
    if keys_of(config, name):
        needs = "a step metric, or a val entry of metadata.benchmark with run_every"
        return f"{name!r} is not known while a run trains; early stopping needs {needs}"
    return not_known(name, "number of a step or a score made during training (run_every)", [*scores, *OF_A_STEP])


def scores_of(config: ExperimentConfig) -> list[str]:
    """The scores that every run will have, by their names in the record."""
    entries = [
        f"{entry.role}/{entry.label}/{metric}" for entry in config.metadata.benchmark for metric in entry.metrics
    ]
    blocks = [run.eval for run in config.all_runs() if run.eval.enabled]
    return list(dict.fromkeys([*entries, *(f"eval/{metric.kind}" for block in blocks for metric in block.metrics)]))


def keys_of(config: ExperimentConfig, name: str) -> list[str]:
    """The scores that `name` means."""
    return _meant(scores_of(config), name)


def _meant(scores: Sequence[str], name: str) -> list[str]:
    return matching(RunResult(run_id="", status="completed", metrics=dict.fromkeys(scores, 0.0)), name)


def may_be_a_number(config: ExperimentConfig, name: str) -> bool:
    """Whether an algorithm may say it of a run; what a project's own algorithm says is not known."""
    if name.rsplit("/", 1)[-1] in NUMBERS:  # a stage's own begins with its name
        return True
    if "/" in name or name.partition(".")[0] in SPLITS:
        return False
    return not _all_ours(config)


def _all_ours(config: ExperimentConfig) -> bool:
    kinds = {run.algorithm.kind for run in config.all_runs()}
    return all(_is_ours(registry.algorithms, kind) for kind in kinds)


def _is_ours(kinds: registry.Registry, kind: str, *, default: bool = True) -> bool:
    """Whether the SDK brought it; `default` for what there is not, which the check of its block tells."""
    try:
        return str(kinds.get(kind).__module__).startswith(OURS)
    except EvsysError:
        return default
