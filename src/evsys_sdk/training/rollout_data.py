"""Rollouts become training data; what the machine did wrong in them is left out and counted.

In: groups of `Rollout`s. Out: data per turn, with the exact tokens the model read and wrote and the logprobs it wrote
them with; nothing is ever decoded and encoded again. A verifier that broke is never a reward of 0.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev

from evsys_sdk import files
from evsys_sdk.files import encode_record
from evsys_sdk.protocols import MODEL_FAILURES, Rollout, Turn
from evsys_sdk.redaction import redact_rollout
from evsys_sdk.training.advantages import mean_of
from evsys_sdk.training_api import Datum, ForwardBackwardOutput, ModelInput, TensorData

# What the model did while it was trained, for people to read.
#
# In: the rollouts of a step. Out: lines in `<run_dir>/logs/training/rollouts.jsonl`, at most so many per step. They
# stay on disk; only rollouts of evaluations go to a dashboard.


FILE = Path("logs") / "training" / "rollouts.jsonl"


def log_rollouts(run_dir: Path, step: int, rollouts: list[Rollout], *, limit: int, stage: str | None = None) -> None:
    """Append the first `limit` rollouts of a step."""
    if limit == 0:
        return
    path = run_dir / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        encode_record({"step": step, "stage": stage, "completion": rollout.completion, **told})
        for rollout, told in ((one, redact_rollout(asdict(one))) for one in rollouts[:limit])
    ]
    with open(path, "ab") as handle:
        handle.write(b"".join(lines))


def sync(run_dir: Path) -> None:
    """Make the lines survive a crash of the machine: a run that resumes does not write those of earlier steps again."""
    with suppress(FileNotFoundError):
        files.sync(run_dir / FILE)


def trim(run_dir: Path, stage: str | None, *, upto: int) -> None:
    """Remove a stage's lines of steps later than `upto`, which are going to be done again."""
    path = run_dir / FILE
    if not path.is_file():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines]
    kept = [line for line, row in zip(lines, rows, strict=True) if row["stage"] != stage or row["step"] <= upto]
    if len(kept) < len(lines):
        path.write_bytes(b"".join(kept))


def carry_over(source: Path, run_dir: Path, counts: Callable[[str | None, int], bool]) -> None:
    """Take over the lines of an earlier attempt, set aside in `source`, whose stage and step still count."""
    try:
        lines = (source / FILE).read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return
    # A kill may have cut the last line short.
    rows = [(line, json.loads(line)) for line in lines if line.endswith(b"\n")]
    (run_dir / FILE).parent.mkdir(parents=True, exist_ok=True)
    (run_dir / FILE).write_bytes(b"".join(line for line, row in rows if counts(row["stage"], row["step"])))


Group = list[Rollout]
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

    @property
    def with_tokens(self) -> list[Rollout]:
        """The rollouts in `groups` in which the model wrote something; the others are only compared with."""
        return [rollout for group in self.groups for rollout in group if written(rollout)]


def with_failing_reward(rollout: Rollout, failing_reward: float) -> Rollout:
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
    """Why a rollout must not be trained on, in a word; None when it may.

    Where rewards count, a rollout in which the model failed before its first token, or wrote an empty answer, keeps its
    place in its group: there is nothing of it to train on, but the others are compared with its reward.
    """
    if rollout.status not in ("ok", *MODEL_FAILURES):
        return rollout.status
    if rewards and (rollout.reward is None or not math.isfinite(rollout.reward)):
        return "no_reward"
    has_place = written(rollout) or (rewards and (rollout.turns or rollout.status in MODEL_FAILURES))
    if not has_place or not all(turn.prompt_tokens for turn in rollout.turns):
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
    # One less than the prompt has tokens: target i is token i + 1, so the first token is never a target.
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
    rows = [_normalise(row or (), k) for row in (*before, *targets)]
    shape = (len(rows), k)
    inputs = {
        "target_tokens": TensorData(array("q", [token for row in rows for token, _ in row]), "int64", shape),
        "weights": TensorData(array("f", [share for row in rows for _, share in row]), "float32", shape),
    }
    tokens = [*turn.prompt_tokens, *turn.completion_tokens]
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs)


def _normalise(row: TopK, k: int) -> list[tuple[int, float]]:
    """Exactly `k` pairs of token and probability, which add up to 1; an empty row has weight 0 throughout."""
    best = row[:k]
    total = math.fsum(math.exp(logprob) for _, logprob in best)
    # Padding is token 0 with weight 0: it is in any vocabulary, and cross-entropy multiplies its logprob by 0.
    return [(token, math.exp(logprob) / total) for token, logprob in best] + [(0, 0.0)] * (k - len(best))


def entropy_of(row: TopK) -> float:
    """Of the distribution over these tokens alone, in nats."""
    return -math.fsum(share * math.log(share) for _, share in _normalise(row, len(row)) if share > 0)


def rollout_metrics(groups: Sequence[Group], gated: Gated) -> dict[str, float]:
    """What a step's rollouts were like. Rewards are those of all rollouts that have one, trained on or not."""
    rollouts = [rollout for group in groups for rollout in group]
    rewards = [r.reward for r in rollouts if r.reward is not None and math.isfinite(r.reward)]
    metrics: dict[str, float] = {"rollouts": len(rollouts), "rollouts_dropped": gated.dropped.total()}
    metrics |= {f"dropped/{reason}": count for reason, count in sorted(gated.dropped.items())}
    metrics |= {f"failed/{status}": count for status, count in sorted(gated.failures.items())}
    if rewards:
        metrics |= {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)}
    speaking = gated.with_tokens
    if silent := sum(map(len, gated.groups)) - len(speaking):
        metrics["rollouts_without_tokens"] = silent
    if silent_groups := sum(not any(map(written, group)) for group in gated.groups):
        metrics["groups_without_tokens"] = silent_groups
    if speaking:
        metrics["completion_tokens"] = fmean(map(length_of, speaking))
        # An estimate from the sampled tokens alone, in nats: the mean of -log p over draws from p. It is biased where
        # the temperature is not 1, since these logprobs are the model's own.
        metrics["entropy"] = -mean_of([turn.logprobs for rollout in speaking for turn in written(rollout)])
    return metrics


def sampling_drift(data: Sequence[Datum], outputs: Sequence[ForwardBackwardOutput]) -> dict[str, float]:
    """How far the weights that are trained have moved from those that sampled (`kl_sampling`): 0, but for rounding,
    unless the rollouts are older than the weights or the backend samples with another arithmetic than it trains."""
    trained = [logprobs for output in outputs for logprobs in output.logprobs]
    drift = []
    for datum, now in zip(data, trained, strict=True):
        sampled = datum.loss_fn_inputs["logprobs"].tolist()
        # A token that was sampled with certainty has logprob 0 as well, and is left out with the context.
        drift.append([old - new for old, new in zip(sampled, now, strict=True) if old != 0.0])  # context has 0
    return {"kl_sampling": mean_of(drift)} if any(drift) else {}
