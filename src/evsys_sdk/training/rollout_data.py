"""Rollouts become training data; what the machine did wrong in them is left out and counted.

In: groups of `Rollout`s. Out: data per turn, with the exact tokens the model read and wrote and the logprobs it wrote
them with; nothing is ever decoded and encoded again. A verifier that broke is never a reward of 0.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev

from evsys_sdk.protocols import Rollout, Turn
from evsys_sdk.surface import Datum, ForwardBackwardOutput, ModelInput, TensorData
from evsys_sdk.training.advantages import mean_of

Group = list[Rollout]
MODEL_FAILURES = ("agent_error", "timeout")
"""What the model did wrong in its harness: a failure with a reward. Only what the machine did wrong (`infra_error`,
`cancelled`) is left out of training, or a policy would learn to break what does not count."""
TopK = Sequence[tuple[int, float]]
"""Tokens that could stand in one place, with their logprobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated:
    """What may be trained on, and why the rest may not."""

    groups: list[Group]
    """Without those that lost all their rollouts."""
    dropped: Counter[str]
    """Reason -> rollouts."""
    failures: Counter[str]
    """Rollouts in `groups` in which the model broke its harness or ran out of time, by status."""
    first_error: str | None = None


def rewarded(rollout: Rollout, failing_reward: float) -> Rollout:
    """The rollout with a reward to learn from: a failure of the model that could not be graded gets the verifier's
    failing reward. A verifier that broke gives none."""
    has_grade = rollout.reward is not None and math.isfinite(rollout.reward)
    return replace(rollout, reward=failing_reward) if rollout.status in MODEL_FAILURES and not has_grade else rollout


def gate(groups: Sequence[Group], *, rewards: bool = True) -> Gated:
    """Keep the rollouts that are whole; `rewards` says whether a reward is needed for that."""
    reasons = [[reason_to_drop(rollout, rewards=rewards) for rollout in group] for group in groups]
    kept = [
        [rollout for rollout, reason in zip(*pair, strict=True) if reason is None]
        for pair in zip(groups, reasons, strict=True)
    ]
    return Gated(
        groups=[group for group in kept if group],
        dropped=Counter(reason for group in reasons for reason in group if reason),
        failures=Counter(rollout.status for group in kept for rollout in group if rollout.status in MODEL_FAILURES),
        first_error=next((rollout.error for group in groups for rollout in group if rollout.error), None),
    )


def reason_to_drop(rollout: Rollout, *, rewards: bool = True) -> str | None:
    """Why a rollout must not be trained on, in a word; None when it may."""
    if rollout.status not in ("ok", *MODEL_FAILURES):
        return rollout.status
    if rewards and (rollout.reward is None or not math.isfinite(rollout.reward)):
        return "no_reward"
    if not written(rollout) or not all(turn.prompt_tokens for turn in rollout.turns):
        return "no_tokens"
    if any(len(turn.completion_tokens) != len(turn.logprobs) for turn in rollout.turns):
        return "unequal_lengths"
    if not all(math.isfinite(logprob) for turn in rollout.turns for logprob in turn.logprobs):
        return "bad_logprobs"
    return None


def written(rollout: Rollout) -> list[Turn]:
    """The turns in which the model wrote something."""
    return [turn for turn in rollout.turns if turn.completion_tokens]


def length_of(rollout: Rollout) -> int:
    """Tokens the model wrote, over all turns."""
    return sum(len(turn.completion_tokens) for turn in rollout.turns)


def rewards_of(group: Group) -> list[float]:
    """The group's rewards; of gated rollouts, so all are there."""
    return [rollout.reward for rollout in group if rollout.reward is not None]


def policy_datum(turn: Turn, advantages: Sequence[float]) -> Datum:
    """One turn for a policy loss. What the model read has advantage 0: it is context, not behaviour."""
    before = [0.0] * (len(turn.prompt_tokens) - 1)
    tokens = [*turn.prompt_tokens, *turn.completion_tokens]
    inputs = {
        "target_tokens": TensorData(array("q", tokens[1:]), "int64"),
        "logprobs": TensorData(array("f", [*before, *turn.logprobs])),
        "advantages": TensorData(array("f", [*before, *advantages])),
    }
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs)


def soft_target_datum(turn: Turn, targets: Sequence[TopK | None], k: int) -> Datum:
    """One turn for cross-entropy with `k` soft targets per written token; None skips a token.

    The targets' probabilities are made to add up to 1 again, since the tail beyond `k` is not known.
    """
    before: list[TopK] = [()] * (len(turn.prompt_tokens) - 1)
    rows = [_normalised(row or (), k) for row in (*before, *targets)]
    shape = (len(rows), k)
    inputs = {
        "target_tokens": TensorData(array("q", [token for row in rows for token, _ in row]), "int64", shape),
        "weights": TensorData(array("f", [share for row in rows for _, share in row]), "float32", shape),
    }
    tokens = [*turn.prompt_tokens, *turn.completion_tokens]
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs)


def _normalised(row: TopK, k: int) -> list[tuple[int, float]]:
    """Exactly `k` pairs of token and probability, which add up to 1; an empty row has weight 0 throughout."""
    best = row[:k]
    total = math.fsum(math.exp(logprob) for _, logprob in best)
    return [(token, math.exp(logprob) / total) for token, logprob in best] + [(0, 0.0)] * (k - len(best))


def entropy_of(row: TopK) -> float:
    """Of the distribution over these tokens alone, in nats."""
    return -math.fsum(share * math.log(share) for _, share in _normalised(row, len(row)) if share > 0)


def rollout_metrics(groups: Sequence[Group], gated: Gated) -> dict[str, float]:
    """What a step's rollouts were like. Rewards are those of all rollouts that have one, trained on or not."""
    rollouts = [rollout for group in groups for rollout in group]
    rewards = [r.reward for r in rollouts if r.reward is not None and math.isfinite(r.reward)]
    metrics: dict[str, float] = {"rollouts": len(rollouts), "rollouts_dropped": gated.dropped.total()}
    metrics |= {f"dropped/{reason}": count for reason, count in sorted(gated.dropped.items())}
    metrics |= {f"failed/{status}": count for status, count in sorted(gated.failures.items())}
    if rewards:
        metrics |= {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)}
    kept = [rollout for group in gated.groups for rollout in group]
    if kept:
        metrics["completion_tokens"] = fmean(map(length_of, kept))
        metrics["entropy"] = -mean_of([turn.logprobs for rollout in kept for turn in written(rollout)])
    return metrics


def sampling_drift(data: Sequence[Datum], outputs: Sequence[ForwardBackwardOutput]) -> dict[str, float]:
    """How far the weights that are trained have moved from those that sampled (`kl_sampling`): 0, but for rounding,
    unless the rollouts are older than the weights or the backend samples with another arithmetic than it trains."""
    trained = [logprobs for output in outputs for logprobs in output.logprobs]
    drift = []
    for datum, now in zip(data, trained, strict=True):
        sampled = datum.loss_fn_inputs["logprobs"].tolist()
        drift.append([old - new for old, new in zip(sampled, now, strict=True) if old != 0.0])  # context has 0
    return {"kl_sampling": mean_of(drift)} if any(drift) else {}
