"""Metrics: fold what is known of many tasks into one number.

In: `TaskScores`, one per task. Out: a float. A metric is a class with `compute(task_rewards)`, one inner list of
rewards per task, or with `compute(*, predictions, targets)`, one prediction per rollout beside its task's target, or
with `compute(*, rollouts)`, the rollouts of each task; `as_metric` brings all into one form. `pass@k` and `pass^k`
exist for every k. A reward >= 1.0 is a pass.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from numbers import Real
from statistics import fmean
from typing import Any, ClassVar

from pydantic import Field

from evsys_sdk.answers import answer_in, parsed_json, same_answer, target_answer, wanted_answer
from evsys_sdk.config.base import Params
from evsys_sdk.errors import EvsysError, shorten
from evsys_sdk.protocols import MACHINE_FAILURES, Rollout, TaskScores
from evsys_sdk.registry import metrics, register_metric

MetricFunction = Callable[[Sequence[TaskScores]], float]
Rewards = Sequence[Sequence[float]]

PASS = 1.0
FORMS = (
    "a metric is a class with compute(task_rewards) -> float, compute(*, predictions, targets) -> float or "
    "compute(*, rollouts) -> float"
)
_FAMILY = re.compile(r"pass([@^])([1-9]\d{0,5})")


def as_metric(target: object) -> MetricFunction:
    """The one form of a metric, given as a class (then made without params) or as an instance."""
    compute = getattr(target, "compute", None)
    if not callable(compute):
        raise TypeError(f"{target!r} has no compute; {FORMS}")
    if inspect.iscoroutinefunction(compute):
        raise TypeError(f"compute of {target!r} is async; {FORMS}")
    names = inspect.signature(compute).parameters
    # `compute(self, rollouts)` is the first form under another name for its rewards: this one takes it by name only.
    by_rollouts = "rollouts" in names and names["rollouts"].kind is inspect.Parameter.KEYWORD_ONLY
    by_predictions = {"predictions", "targets"} <= set(names)
    # Looked up on a class, `compute` still wants its `self`.
    first = (None,) if inspect.isclass(target) and inspect.isfunction(compute) else ()
    try:
        if by_predictions:
            inspect.signature(compute).bind(*first, predictions=[], targets=[])
        elif by_rollouts:
            inspect.signature(compute).bind(*first, rollouts=[])
        else:
            inspect.signature(compute).bind(*first, [])
    except TypeError as exc:
        raise TypeError(f"compute of {target!r} does not fit ({exc}); {FORMS}") from None

    def metric(tasks: Sequence[TaskScores]) -> float:
        _refuse_empty([task.rewards for task in tasks], "tasks")
        instance: Any = target() if inspect.isclass(target) else target
        value: Any
        if by_predictions:  # what is between <answer> tags is the prediction, and the target
            value = instance.compute(
                predictions=[answer_in(prediction) for task in tasks for prediction in task.predictions],
                targets=[target_answer(task.target) for task in tasks for _ in task.predictions],
            )
        elif by_rollouts:
            if not all(task.rollouts for task in tasks):
                raise EvsysError("this metric looks at rollouts, and these scores come without them")
            value = instance.compute(rollouts=[list(task.rollouts) for task in tasks])
        else:
            value = instance.compute([list(task.rewards) for task in tasks])
        if hasattr(value, "item") and callable(value.item):  # a numpy or torch scalar
            value = value.item()
        if not isinstance(value, Real) or not math.isfinite(value):
            raise EvsysError(f"it returned {shorten(repr(value))}; a metric is a finite number")
        return float(value)

    return metric


def _refuse_empty(groups: Sequence[Sequence[object]], what: str) -> None:
    """A mean over nothing is not 0: it is invalid, and says why."""
    if not groups:
        raise EvsysError(f"invalid: there are no {what}, so there is nothing to measure")
    empty = next((index for index, group in enumerate(groups) if len(group) == 0), None)
    if empty is not None:
        raise EvsysError(f"invalid: task {empty} has no rollouts")


def _refuse_unpaired(predictions: Sequence[str], targets: Sequence[object]) -> None:
    if not predictions:
        raise EvsysError("invalid: there are no predictions, so there is nothing to measure")
    if len(predictions) != len(targets):
        raise EvsysError(f"invalid: {len(predictions)} predictions and {len(targets)} targets; each needs the other")


def samples_needed(name: str, metric: object) -> int:
    """Rollouts per task that a metric asks for: its `k`, or the k of its name, else 1."""
    in_name = _FAMILY.fullmatch(name)
    k = int(in_name[2]) if in_name else getattr(metric, "k", 1)
    return k if isinstance(k, int) else 1


def estimate_pass_at_k(n: int, passed: int, k: int) -> float:
    """Chance that at least one of k tries passes, without bias, from n tries of which some passed."""
    # Chen et al. 2021 (arXiv:2107.03374), equation 1: one minus the share of all choices of k tries in which none
    # passed. `comb` is 0 where fewer than k have failed.
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def estimate_pass_hat_k(n: int, passed: int, k: int) -> float:
    """Chance that all of k tries pass, without bias, from n tries of which some passed."""
    # Yao et al. 2024 (tau-bench, arXiv:2406.12045): the share of all choices of k tries in which each passed.
    return math.comb(passed, k) / math.comb(n, k)


def _mean_estimate(estimate: Callable[[int, int, int], float], task_rewards: Rewards, name: str, k: int) -> float:
    _refuse_empty(task_rewards, "tasks")
    fewest = min(map(len, task_rewards))
    if fewest < k:
        raise EvsysError(
            f"{name} needs {k} rollouts per task and there {'is' if fewest == 1 else 'are'} {fewest}: "
            f"set num_samples to at least {k}"
        )
    return fmean(estimate(len(rewards), _passes(rewards), k) for rewards in task_rewards)


def _passes(rewards: Sequence[float]) -> int:
    return sum(reward >= PASS for reward in rewards)


class _FamilyMember:
    """`pass@k` or `pass^k` for one k; what a look-up of such a name returns."""

    lower_is_better: ClassVar[bool] = False
    name: ClassVar[str]
    k: ClassVar[int]
    estimate: ClassVar[Callable[[int, int, int], float]]

    def compute(self, task_rewards: Rewards) -> float:
        return _mean_estimate(type(self).estimate, task_rewards, self.name, self.k)


@cache
def metric_family(name: str) -> type | None:
    """The metric that a name such as `pass@3` or `pass^3` stands for; None for any other name."""
    found = _FAMILY.fullmatch(name)
    if found is None:
        return None
    any_of = found[1] == "@"
    estimate = staticmethod(estimate_pass_at_k if any_of else estimate_pass_hat_k)
    doc = f"Chance that {'at least one' if any_of else 'each'} of {found[2]} tries passes (unbiased)."
    members = {"name": name, "k": int(found[2]), "estimate": estimate, "__doc__": doc, "__module__": __name__}
    return type(f"Pass{'At' if any_of else 'Hat'}{found[2]}", (_FamilyMember,), members)


@register_metric("pass_at_k")
class PassAtK:
    """Chance that at least one of `k` tries passes (unbiased); `pass@3` is the short form of k = 3."""

    lower_is_better: ClassVar[bool] = False

    name: ClassVar[str]

    class Config(Params):
        k: int = Field(default=1, ge=1)
        """Tries of which one must pass."""

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)

    @property
    def k(self) -> int:
        return self.cfg.k

    def compute(self, task_rewards: Rewards) -> float:
        return _mean_estimate(estimate_pass_at_k, task_rewards, f"pass_at_k with k = {self.k}", self.k)


@register_metric("pass_rate")
class PassRate:
    """Share of a task's rollouts that pass, averaged over tasks: each task counts the same."""

    lower_is_better: ClassVar[bool] = False

    def compute(self, task_rewards: Rewards) -> float:
        _refuse_empty(task_rewards, "tasks")
        return fmean(_passes(rewards) / len(rewards) for rewards in task_rewards)


@register_metric("mean_reward")
class MeanReward:
    """Mean reward, each task counting the same."""

    lower_is_better: ClassVar[bool] = False

    def compute(self, task_rewards: Rewards) -> float:
        _refuse_empty(task_rewards, "tasks")
        return fmean(fmean(rewards) for rewards in task_rewards)


@register_metric("exact_match")
class ExactMatch:
    """Share of answers (inside `<answer>` tags, if there are any) that are the target's."""

    lower_is_better: ClassVar[bool] = False

    def compute(self, *, predictions: Sequence[str], targets: Sequence[object]) -> float:
        _refuse_unpaired(predictions, targets)
        if any(wanted_answer(target) is None for target in targets):
            raise EvsysError("exact_match needs a target for every task; some have none")
        return fmean(same_answer(p, t) for p, t in zip(predictions, targets, strict=True))


@register_metric("toolkit_match")
class ToolkitMatch:
    """Share of answers whose tool belongs to the target's toolkit, whichever tool it is."""

    lower_is_better: ClassVar[bool] = False

    def compute(self, *, predictions: Sequence[str], targets: Sequence[object]) -> float:
        _refuse_unpaired(predictions, targets)
        return fmean(map(self._is_match, predictions, targets))

    @staticmethod
    def _is_match(prediction: str, target: object) -> bool:
        toolkit = target.get("toolkit") if isinstance(target, dict) else None
        if not isinstance(toolkit, str) or not toolkit.strip():
            raise EvsysError(
                "toolkit_match needs `toolkit` in every target, as in {tool_slug: GMAIL_SEND, toolkit: gmail}"
            )
        toolkit, answer = _plain(toolkit), answer_in(prediction)
        fields = parsed_json(answer)
        if isinstance(fields, dict):
            if fields.get("toolkit") is not None:
                return _plain(str(fields["toolkit"])) == toolkit
            answer = str(wanted_answer(fields))
        slug = _plain(answer)
        # `gmailer_send` starts with `gmail` and is another toolkit: the name must end there.
        return slug == toolkit or slug.startswith(f"{toolkit}_")


def _plain(text: str) -> str:
    return re.sub(r"[\s-]+", "_", text.strip().casefold())


def _mean_per_task(rollouts: Sequence[Sequence[Rollout]], measure: Callable[[Rollout], float]) -> float:
    """Mean over tasks of the mean over a task's rollouts; what infrastructure broke off says nothing of the model."""
    _refuse_empty(rollouts, "tasks")
    groups = [[rollout for rollout in group if rollout.status not in MACHINE_FAILURES] for group in rollouts]
    measured = [fmean(map(measure, group)) for group in groups if group]
    if not measured:
        raise EvsysError("invalid: no rollout ran to its end, so there is nothing to measure")
    return fmean(measured)


def tokens_of(rollout: Rollout) -> int:
    """Tokens read and written in all turns; where the turns hold none, what the agent reported."""
    # Every turn's whole prompt: what is read again in each turn counts in each.
    counted = sum(len(turn.prompt_tokens) + len(turn.completion_tokens) for turn in rollout.turns)
    reported = [rollout.metadata.get(name) for name in ("n_input_tokens", "n_output_tokens")]
    if not counted and rollout.turns and all(number is None for number in reported):
        raise EvsysError("the number of tokens is not known: the client tells texts alone; give it `acomplete`")
    return counted or sum(number or 0 for number in reported)


@register_metric("cost")
class Cost:
    """US dollars that one try at a task costs."""

    share: ClassVar[bool] = False
    unit: ClassVar[str] = "USD"
    lower_is_better: ClassVar[bool] = True

    def compute(self, *, rollouts: Sequence[Sequence[Rollout]]) -> float:
        def cost(rollout: Rollout) -> float:
            if rollout.metadata.get("unpriced"):  # its cost_usd of 0 means "not known"
                model = rollout.metadata.get("model", "the model")
                raise EvsysError(
                    f"the price of {model} is not known: give the client of a hosted model `price: {{input, output}}`"
                )
            return rollout.cost_usd

        return _mean_per_task(rollouts, cost)


@register_metric("latency")
class Latency:
    """Seconds that one try at a task takes."""

    share: ClassVar[bool] = False
    unit: ClassVar[str] = "s"
    lower_is_better: ClassVar[bool] = True

    def compute(self, *, rollouts: Sequence[Sequence[Rollout]]) -> float:
        return _mean_per_task(rollouts, lambda rollout: rollout.seconds)


@register_metric("tokens")
class Tokens:
    """Tokens that one try at a task reads and writes."""

    share: ClassVar[bool] = False
    unit: ClassVar[str] = "tokens"
    lower_is_better: ClassVar[bool] = True

    def compute(self, *, rollouts: Sequence[Sequence[Rollout]]) -> float:
        return _mean_per_task(rollouts, tokens_of)


metrics.adapt, metrics.match = as_metric, metric_family
