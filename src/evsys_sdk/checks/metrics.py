"""Whether a metric that an experiment is to be judged by, or its runs are to be stopped by, will exist.

In: a config. Out: problems with their places. A misspelt success metric would otherwise come out when everything is
trained, and by then it is part of what the experiment was launched as.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from evsys_sdk import registry
from evsys_sdk.checks.blocks import recipes_of
from evsys_sdk.config.metadata import Hypothesis, SuccessMetric
from evsys_sdk.config.schema import ExperimentConfig
from evsys_sdk.config.yaml_io import source_of
from evsys_sdk.constants import UNTRAINED
from evsys_sdk.errors import EvsysError, Problem, not_known
from evsys_sdk.eval.metrics import ExactMatch, PassAtK, PassRate, ToolkitMatch, metric_family
from evsys_sdk.score_names import (
    SPLITS,
    TRAIN,
    AmbiguousName,
    metric_named,
    metric_of,
    names_split,
    readings_of,
    resolve,
    resolve_one,
    score_key,
    step_metric,
)

NUMBERS = ("final_loss", "first_loss", "final_reward", "first_reward", "steps", "tokens")
"""What our own algorithms say of a run, beside its scores."""
OF_A_STEP = ("loss", "lr", "grad_norm", "reward/mean", "entropy", "margin", "accuracy", "completion_tokens", "tokens")
"""What our own algorithms say of a step; backends add to it."""
OURS = "evsys_sdk."
STOPPER = "early_stopping"
MODES = get_args(registry.Direction)


def metric_problems(config: ExperimentConfig) -> Iterator[Problem]:
    """Metrics that no run will have, of an experiment whose runs are scored; those that no step will have, of callbacks
    that wait for them; and of a hypothesis, a difference that cannot be and an untrained model that is not scored."""
    if scores_of(config):
        for place, name in _named_metrics(config):
            message = why_no_score(config, name)
            if message is not None:
                yield Problem(path=place, value=name, message=message)
    for index, callback in enumerate(config.callbacks):
        watched = callback.params.get("metric")
        if callback.kind != STOPPER or not isinstance(watched, str) or not _is_ours(registry.callbacks, STOPPER):
            continue
        message = None if _may_be_of_a_step(config, watched) else why_not_in_training(config, watched)
        if message is not None:
            yield Problem(path=f"callbacks[{index}].params.metric", value=watched, message=message)
    hypothesis = config.metadata.hypothesis
    if not isinstance(hypothesis, Hypothesis):
        return
    prediction = hypothesis.prediction
    success = config.metadata.success_metric
    predicted = prediction.metric or (success.name if success is not None else None)
    if predicted is not None and prediction.at_least >= 1:  # `at_least: 5` where five points were meant
        metrics = [metric_of(key) for key in keys_of(config, predicted)]
        if metrics and all(map(_is_within_0_and_1, metrics)):
            points = prediction.at_least
            meant = f"{points / 100:g} is {points:g} point{'' if points == 1 else 's'}"
            message = (
                f"{predicted} lies between 0 and 1, so no difference is larger than 1; "
                f"{meant if points < 100 else '0.05 is 5 points'}"
            )
            yield Problem(path="metadata.hypothesis.prediction.at_least", value=points, message=message)
    if not any(entry.baseline for entry in config.metadata.benchmark):
        for key, whom in (("arm", prediction.arm), ("vs", prediction.vs)):
            if whom == UNTRAINED:
                message = "the untrained model is not scored; set `baseline: true` in an entry of metadata.benchmark"
                yield Problem(path=f"metadata.hypothesis.prediction.{key}", value=whom, message=message)


def why_no_score(config: ExperimentConfig, name: str) -> str | None:
    """Why a name will not be a metric of these runs, or not one only; None where it will."""
    scores = scores_of(config)
    try:
        keys = resolve(name, [*scores, *NUMBERS])
        if keys == [name] and _is_registered(name) and config.metadata.benchmark:
            # `tokens` is a number of every run, and a metric that each benchmark could measure too.
            measured = (score_key(entry.role, entry.label, name) for entry in config.metadata.benchmark)
            raise AmbiguousName(name, [f"{TRAIN}/{name}", *measured])
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
    objective = config.search.objective if config.search is not None else None
    for name in [*(name for _, name in _named_metrics(config)), *([objective.name] if objective is not None else [])]:
        keys = [key for entry in entries for key in entry.score_keys]
        # A name that a score or a number of the run answers to already needs no further metric.
        if name in NUMBERS or any(readings_of(name, key) for key in [*keys, *_eval_scores(config)]):
            continue
        for index, entry in enumerate(entries):
            meant = metric_named(name, split=entry.role, benchmark=entry.label)
            metric = next((found for found in meant if _is_registered(found)), None)
            if metric is not None:
                # A copy: the entry in the config may be shared with what the caller still holds.
                entries[index] = entry.model_copy(update={"metrics": [*entry.metrics, metric]})
    if entries == config.metadata.benchmark:
        return config
    metadata = config.metadata.model_copy(update={"benchmark": entries})
    return config.model_copy(update={"metadata": metadata})


def _is_registered(metric: str) -> bool:
    try:
        registry.metrics.get(metric)
    except EvsysError:
        return False
    return True


def _is_within_0_and_1(metric: str) -> bool:
    """Known of our own metrics only."""
    try:
        found = registry.metrics.get(metric)
    except EvsysError:
        return False  # reported by the check of the block
    return found is metric_family(metric) or found in (PassAtK, PassRate, ExactMatch, ToolkitMatch)


def _named_metrics(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    metadata = config.metadata
    if metadata.success_metric is not None:
        yield "metadata.success_metric", metadata.success_metric.name
    if isinstance(metadata.hypothesis, Hypothesis) and metadata.hypothesis.prediction.metric is not None:
        yield "metadata.hypothesis.prediction.metric", metadata.hypothesis.prediction.metric


def direction_warnings(config: ExperimentConfig) -> list[Problem]:
    """Modes that contradict the metric they belong to: `mode: max` for a loss. Located."""
    modes: list[tuple[str, object, object]] = []  # place, metric, mode
    objective = config.search.objective if config.search is not None else None
    for place, chosen in (("metadata.success_metric", config.metadata.success_metric), ("search.objective", objective)):
        if chosen is not None:
            modes.append((f"{place}.mode", chosen.name, chosen.mode))
    for index, callback in enumerate(config.callbacks):
        if callback.kind == STOPPER and _is_ours(registry.callbacks, STOPPER):
            metric, mode = callback.params.get("metric", "loss"), callback.params.get("mode")
            modes.append((f"callbacks[{index}].params.mode", metric, mode))
    source = source_of(config)
    for index, run in enumerate(config.all_runs()):
        for recipe in recipes_of(run):
            place = source.in_run(index, f"{recipe.place}.params.best_mode")
            modes.append((place, recipe.spec.params.get("best_by"), recipe.spec.params.get("best_mode")))
    found: dict[str, Problem] = {}
    for place, name, mode in modes:
        own = registry.own_direction(name) if isinstance(name, str) and mode in MODES else None
        if own is not None and own != mode:
            message = (
                f"{'less' if own == 'min' else 'more'} of {name} is better by the metric itself, and this says the "
                f"opposite; leave {place.rpartition('.')[2]} out unless you mean that"
            )
            found[place] = Problem(path=place, value=mode, message=message)
    return [source.located(problem) for problem in found.values()]


def _may_be_of_a_step(config: ExperimentConfig, name: str) -> bool:
    """Not the name of a score, nor a number of a whole run; what a project's own algorithm says is not known."""
    if names_split(name, "test"):  # the callback itself refuses a test score
        return True
    number = step_metric(name)
    if number == name and any(names_split(name, split) for split in SPLITS):
        return False
    if number == name and any(readings_of(name, key) for key in scores_of(config)):
        # A metric that a benchmark lists comes before the number of a step of that name, if it is scored in time.
        is_scored_in_time = any(readings_of(name, key) for key in config.metadata.in_loop_scores)
        return name in OF_A_STEP and not is_scored_in_time
    # `tools.pass@1` is the name of a score, whether or not there is such a benchmark: no number of a step that our own
    # algorithms have is called so. A phase's begin with its name: `warmup/tokens`.
    last = number.rpartition("/")[2]
    is_score = "." in last or (last not in OF_A_STEP and _is_ours(registry.metrics, last, default=False))
    return number in OF_A_STEP or not _all_ours(config) or not (is_score or number in NUMBERS)


def why_not_in_training(config: ExperimentConfig, name: str, *, what: str = "") -> str | None:
    """Why a name is not exactly one validation score that is made while a run trains; None where it is."""
    scores = config.metadata.in_loop_scores
    numbers = () if what else OF_A_STEP
    try:
        if resolve_one(name, [*scores, *(number for number in numbers if number == name)]) is not None:
            return None
    except AmbiguousName as exc:
        return str(exc)
    if any(readings_of(name, key) for key in scores_of(config)):
        return (
            f"{name!r} is not scored during training; it needs an entry of metadata.benchmark with `split: val` and "
            "`run_every`"
        )
    wanted = what or "number of a step or a score made during training (run_every)"
    return not_known(name, wanted, [*scores, *numbers])


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
    if name.rsplit("/", 1)[-1] in NUMBERS or name.removeprefix(f"{TRAIN}.") in NUMBERS:  # a stage's own has its name
        return True
    if "/" in name or any(names_split(name, split) for split in SPLITS):
        return False
    return not _all_ours(config)


def _all_ours(config: ExperimentConfig) -> bool:
    kinds = {run.algorithm.kind for run in config.all_runs()}
    return all(_is_ours(registry.algorithms, kind) for kind in kinds)


def _is_ours(kinds: registry.Registry, kind: str, *, default: bool = True) -> bool:
    """Whether the SDK brought it; `default` for what there is not, which the check of its block reports."""
    try:
        return str(kinds.get(kind).__module__).startswith(OURS)
    except EvsysError:
        return default


def objective_of(config: ExperimentConfig) -> SuccessMetric | None:
    """What the search is for."""
    own = config.search.objective if config.search is not None else None
    return own if own is not None else config.metadata.success_metric
