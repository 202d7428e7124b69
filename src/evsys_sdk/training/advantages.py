"""How much better than expected each rollout was, and how much each of its tokens should therefore weigh.

In: rewards of one group, lengths of rollouts, logprobs. Out: plain numbers, one per rollout or per token. Losses are
sums over tokens, so every normalisation happens here, as a factor on the advantage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Literal

AdvantageName = Literal["centred", "grpo", "dr_grpo", "rloo"]
Normalisation = Literal["token", "sequence", "constant"]
GRPO_EPSILON = 1e-4
"""Keeps a group of nearly equal rewards from being blown up; TRL's value."""


def centred(rewards: Sequence[float]) -> list[float]:
    """The reward minus the group's mean."""
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def grpo(rewards: Sequence[float]) -> list[float]:
    """Centred, in units of the group's standard deviation (of a sample, as in TRL)."""
    # Shao et al. 2024 (DeepSeekMath), section 4.1.2: the outcome's reward, normalised within its group.
    spread = stdev(rewards) if len(rewards) > 1 else 0.0
    return [advantage / (spread + GRPO_EPSILON) for advantage in centred(rewards)]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """Centred and nothing more: dividing by the deviation favours tasks that are nearly always or never solved."""
    # Liu et al. 2025, Understanding R1-Zero-Like Training; its other half is `constant` in `token_weights`.
    return centred(rewards)


def rloo(rewards: Sequence[float]) -> list[float]:
    """The reward minus the mean of the others (leave one out); 0 for a rollout that has no others."""
    n = len(rewards)
    # Ahmadian et al. 2024. With m the mean of all n: r - (n m - r) / (n - 1) = (r - m) n / (n - 1).
    return [advantage * n / (n - 1) for advantage in centred(rewards)] if n > 1 else [0.0] * n


def reward_alone(rewards: Sequence[float]) -> list[float]:
    """The reward itself: plain REINFORCE, for groups of one, which have no mean to compare with."""
    return list(rewards)


ADVANTAGES: dict[AdvantageName, Callable[[Sequence[float]], list[float]]] = {
    "centred": centred,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
}
USUAL_NORMALISATION: dict[AdvantageName, Normalisation] = {
    "centred": "token",
    "grpo": "sequence",
    "dr_grpo": "constant",
    "rloo": "token",
}
"""What each advantage's own paper divides the loss by."""


def is_constant(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards are all the same, so that there is nothing to prefer."""
    return max(rewards) == min(rewards)


def token_weights(lengths: Sequence[int], how: Normalisation, *, asked: int, max_tokens: int) -> list[float]:
    """What one token of each rollout counts: `token` lets all tokens of the batch count the same, `sequence` all
    rollouts, `constant` divides by the rollouts that were `asked` for x `max_tokens`: neither a rollout's length nor
    what became of the others changes what its tokens weigh."""
    if how == "token":
        return [1.0 / sum(lengths)] * len(lengths)
    if how == "sequence":
        return [1.0 / (len(lengths) * length) for length in lengths]
    return [1.0 / (asked * max_tokens)] * len(lengths)


def differences(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> list[list[float]]:
    """Token by token, `above` minus `below`."""
    return [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(above, below, strict=True)]


def mean_of(parts: Sequence[Sequence[float]]) -> float:
    """The mean over all tokens; NaN when there is none."""
    count = sum(map(len, parts))
    # fsum rounds once, so the mean does not depend on how tokens are spread over parts.
    return math.fsum(value for part in parts for value in part) / count if count else math.nan


def kl_penalty(drift: Sequence[Sequence[float]], coefficient: float = 1.0, *, centre: bool = True) -> list[list[float]]:
    """What each token pays for its drift (the policy's logprob minus the reference's). Centred, it is paid or paid out
    by comparison with the average token: the same gradient on average, with far less noise."""
    # A baseline: E[grad log p] is 0, so a constant that is taken off every token leaves the expected gradient as it is.
    # This one is made from the same tokens, which biases it by about one part in their number.
    mean = mean_of(drift) if centre else 0.0
    return [[coefficient * (mean - value) for value in part] for part in drift]
