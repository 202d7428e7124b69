"""Whether a metric that an experiment is to be judged by, or its runs are to be stopped by, will exist.

In: a config. Out: problems with their places. A misspelt success metric would otherwise come out when everything is
trained, and by then it is part of what the experiment was launched as.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from evsys_sdk import registry
from evsys_sdk.config.metadata import Hypothesis
from evsys_sdk.config.models import ExperimentConfig
from evsys_sdk.constants import UNTRAINED
from evsys_sdk.errors import EvsysError, Problem, not_known
from evsys_sdk.eval.metrics import ExactMatch, PassAtK, PassRate, ToolkitMatch, metric_family
from evsys_sdk.score_names import (
    SPLITS,
    AmbiguousName,
    metric_named,
    metric_of,
    names_split,
    readings_of,
    resolve,
    resolve_one,
    score_key,
)

NUMBERS = ("final_loss", "first_loss", "final_reward", "first_reward", "steps", "tokens")
"""What our own algorithms say of a run, beside its scores."""
OF_A_STEP = ("loss", "lr", "grad_norm", "reward/mean", "entropy", "margin", "accuracy", "completion_tokens", "tokens")
"""What our own algorithms say of a step; backends add to it."""
OURS = "evsys_sdk."
STOPPER = "early_stopping"


def metric_problems(config: ExperimentConfig) -> Iterator[Problem]:
    """Metrics that no run will have, of an experiment whose runs are scored; those that no step will have, of callbacks
    that wait for them; and of a hypothesis, a difference that cannot be and an untrained model that nobody scores."""
    scores = scores_of(config)
    for place, name in _named(config) if scores else ():
        message = _why_no_score(config, name)
        if message is not None:
            yield Problem(path=place, value=name, message=message)
    yield from _stopping_problems(config)
    yield from _too_large(config)
    hypothesis = config.metadata.hypothesis
    if isinstance(hypothesis, Hypothesis) and not any(entry.baseline for entry in config.metadata.benchmark):
        for key, whom in (("arm", hypothesis.prediction.arm), ("vs", hypothesis.prediction.vs)):
            if whom == UNTRAINED:
                message = "the untrained model is not scored; set `baseline: true` in an entry of metadata.benchmark"
                yield Problem(path=f"metadata.hypothesis.prediction.{key}", value=whom, message=message)


def _why_no_score(config: ExperimentConfig, name: str) -> str | None:
    """Why a name will not be a metric of these runs, or not one only; None where it will."""
    scores = scores_of(config)
    try:
        keys = resolve(name, scores)
    except AmbiguousName as exc:
        return str(exc)
    if keys or may_be_a_number(config, name):
        return None
    return not_known(name, "metric that these runs will have", [*scores, *NUMBERS])


def with_judged_metrics(config: ExperimentConfig) -> ExperimentConfig:
    """The config with the metrics that it is judged by in the benchmarks that they can mean.

    `success_metric: pass_rate` without `metrics` in the entries is complete: the metric is registered, no entry lists
    it, so every entry that the name can mean measures it too. So do the metrics of a hypothesis and of a search.
    """
    entries = list(config.metadata.benchmark)
    for name in _judged_by(config):
        keys = [key for entry in entries for key in entry.score_keys]
        if name in NUMBERS or any(readings_of(name, key) for key in [*keys, *_eval_scores(config)]):
            continue
        for index, entry in enumerate(entries):
            meant = metric_named(name, split=entry.role, benchmark=entry.label)
            metric = next((found for found in meant if _is_registered(found)), None)
            if metric is not None:
                # A copy: the entry in the config may be shared with what the caller still holds.
                entries[index] = BaseModel.model_copy(entry, update={"metrics": [*entry.metrics, metric]})
    if entries == config.metadata.benchmark:
        return config
    metadata = BaseModel.model_copy(config.metadata, update={"benchmark": entries})
    return BaseModel.model_copy(config, update={"metadata": metadata})


def _judged_by(config: ExperimentConfig) -> list[str]:
    objective = config.search.objective if config.search is not None else None
    return [*(name for _, name in _named(config)), *([objective.name] if objective is not None else [])]


def _is_registered(metric: str) -> bool:
    try:
        registry.metrics.get(metric)
    except EvsysError:
        return False
    return True


def _too_large(config: ExperimentConfig) -> Iterator[Problem]:
    """A predicted difference that no two shares have: `at_least: 5` where five points were meant."""
    metadata = config.metadata
    prediction = metadata.hypothesis.prediction if isinstance(metadata.hypothesis, Hypothesis) else None
    success = metadata.success_metric.name if metadata.success_metric is not None else None
    name = (prediction.metric if prediction else None) or success
    if prediction is None or name is None or prediction.at_least < 1:
        return
    metrics = [metric_of(key) for key in keys_of(config, name)]
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
        message = None if _may_be_of_a_step(config, name) else why_not_in_training(config, name)
        if message is not None:
            yield Problem(path=f"callbacks[{index}].params.metric", value=name, message=message)


def _may_be_of_a_step(config: ExperimentConfig, name: str) -> bool:
    """Not the name of a score, nor a number of a whole run; what a project's own algorithm says is not known."""
    if name in OF_A_STEP or names_split(name, "test"):  # the callback itself refuses a test score
        return True
    if any(names_split(name, split) for split in SPLITS):
        return False
    is_score = any(readings_of(name, key) for key in scores_of(config))
    is_metric = _is_ours(registry.metrics, name, default=False)
    return not is_score and (not _all_ours(config) or not (is_metric or name in NUMBERS))


def why_not_in_training(config: ExperimentConfig, name: str, *, what: str = "") -> str | None:
    """Why a name is not exactly one validation score that is made while a run trains; None where it is."""
    scores = config.metadata.in_loop_scores
    try:
        if resolve_one(name, scores) is not None:
            return None
    except AmbiguousName as exc:
        return str(exc)
    if any(readings_of(name, key) for key in scores_of(config)):
        return (
            f"{name!r} is not scored during training; it needs an entry of metadata.benchmark with `split: val` and "
            "`run_every`"
        )
    of_a_step = [] if what else OF_A_STEP
    wanted = what or "number of a step or a score made during training (run_every)"
    return not_known(name, wanted, [*scores, *of_a_step])


def scores_of(config: ExperimentConfig) -> list[str]:
    """The scores that every run will have, by their names in the record."""
    entries = [key for entry in config.metadata.benchmark for key in entry.score_keys]
    return list(dict.fromkeys([*entries, *_eval_scores(config)]))


def _eval_scores(config: ExperimentConfig) -> list[str]:
    blocks = [run.eval for run in config.all_runs() if run.eval.enabled]
    return [score_key("eval", "eval", metric.kind) for block in blocks for metric in block.metrics]


def keys_of(config: ExperimentConfig, name: str) -> list[str]:
    """The scores that `name` means; none where it is ambiguous, which `metric_problems` reports."""
    try:
        return resolve(name, scores_of(config))
    except AmbiguousName:
        return []


def may_be_a_number(config: ExperimentConfig, name: str) -> bool:
    """Whether an algorithm may say it of a run; what a project's own algorithm says is not known."""
    if name.rsplit("/", 1)[-1] in NUMBERS:  # a stage's own begins with its name
        return True
    if "/" in name or any(names_split(name, split) for split in SPLITS):
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
