"""Was the hypothesis right?

In: a hypothesis as the YAML has it, and a verdict by the metric that it predicts. Out: supported, refuted or
inconclusive, with the numbers; and the fingerprint by which a hypothesis is known not to have been changed after the
results were seen.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from evsys_sdk.config.metadata import Hypothesis, Prediction, direction_word
from evsys_sdk.constants import UNTRAINED
from evsys_sdk.format import amount, amount_unit
from evsys_sdk.registry import Direction, better_direction
from evsys_sdk.stats.verdict import Comparison, Verdict

Outcome = Literal["supported", "refuted", "inconclusive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HypothesisResult:
    """What became of a prediction."""

    claim: str
    prediction: str
    outcome: Outcome
    why: str
    fingerprint: str
    metric: str
    arm: str
    vs: str
    direction: str
    at_least: float
    difference: float | None = None
    """Mean of `arm` less mean of `vs`, with its interval."""
    low: float | None = None
    high: float | None = None
    n_tasks: int = 0
    confidence: float | None = None
    brier: float | None = None
    """(confidence - what came out) squared: 0 is sure and right, 0.25 a coin, 1 sure and wrong; None where it was
    known before."""
    known_before: bool = False
    """True where runs that decide it had finished before the experiment was launched: no prediction."""

    @property
    def line(self) -> str:
        """The result as a sentence of the conclusion."""
        return f"The hypothesis is {self.outcome}: {self.why}."

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as JSON takes it."""
        return asdict(self)


def fingerprint(hypothesis: str | Hypothesis) -> str:
    """The same for the same hypothesis, however its YAML was written; another for any change of it."""
    if isinstance(hypothesis, str):
        content: Any = hypothesis.strip()
    else:
        content = hypothesis.model_dump(exclude_defaults=True)  # a default written out changes nothing
        content["claim"] = hypothesis.claim.strip()
        if content["prediction"].get("direction") == "higher":  # once the default, and left out as such
            del content["prediction"]["direction"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def predicted_pair(prediction: Prediction, baseline_arm: str | None) -> tuple[str, str]:
    """The comparison that decides it, as `judge_arms(also=...)` takes it; without a baseline, with the untrained."""
    arm, vs = prediction.arm, prediction.vs or baseline_arm or UNTRAINED
    # `judge_arms` compares arms with the untrained model and never the other way round; `judge_hypothesis` turns it.
    return (vs, arm) if arm == UNTRAINED else (arm, vs)


def judge_hypothesis(hypothesis: Hypothesis, verdict: Verdict) -> HypothesisResult:
    """Supported when the whole interval lies beyond `at_least`, refuted when all of it falls short, else inconclusive.

    The interval is that of this one comparison: it was named before the results, so other arms do not widen it.
    """
    prediction = _with_direction(hypothesis.prediction, verdict.mode)
    vs = prediction.vs or verdict.baseline_arm or UNTRAINED
    found, why_not = _comparison(prediction, vs, verdict)
    outcome, why = _outcome(prediction, found, verdict) if found else ("inconclusive", why_not)
    # A verdict has each pair once, perhaps the other way round: then signs flip and the ends of the interval swap.
    turned = found is not None and found.arm != prediction.arm
    low, high = (found.low, found.high) if found else (None, None)
    difference = found.difference if found else None
    return replace(
        not_judged(hypothesis, verdict.metric, why),
        outcome=outcome,
        vs=vs,
        direction=prediction.direction or "",
        difference=_negate(difference) if turned else difference,
        low=_negate(high) if turned else low,
        high=_negate(low) if turned else high,
        n_tasks=found.n_tasks if found else 0,
        brier=_brier(hypothesis.confidence, outcome),
    )


def not_judged(hypothesis: Hypothesis, metric: str, why: str) -> HypothesisResult:
    """Of an experiment without a verdict."""
    prediction = hypothesis.prediction
    prediction = _with_direction(prediction, better_direction(prediction.metric or metric))
    return HypothesisResult(
        claim=hypothesis.claim,
        prediction=str(prediction),
        outcome="inconclusive",
        why=why,
        fingerprint=fingerprint(hypothesis),
        metric=prediction.metric or metric,
        arm=prediction.arm,
        vs=prediction.vs or "",
        direction=prediction.direction or "",
        at_least=prediction.at_least,
        confidence=hypothesis.confidence,
    )


def _with_direction(prediction: Prediction, mode: Direction) -> Prediction:
    """A prediction without a direction says that its arm is the better one."""
    if prediction.direction is not None:
        return prediction
    return prediction.model_copy(update={"direction": direction_word(mode)})


def _comparison(prediction: Prediction, vs: str, verdict: Verdict) -> tuple[Comparison | None, str]:
    """The comparison, whichever way round it was made; or why there is none."""
    if prediction.arm == vs:
        return None, f"{vs} cannot be compared with itself"
    unranked = {arm.arm: arm.why_unranked for arm in verdict.arms}
    for name in (prediction.arm, vs):
        if name not in unranked and name != UNTRAINED:
            return None, f"there is no arm {name}; arms: {', '.join(unranked)}"
        if unranked.get(name):
            return None, f"{name} has no score: {unranked[name]}"
    found = verdict.find(prediction.arm, vs) or verdict.find(vs, prediction.arm)
    return found, "" if found else f"{prediction.arm} and {vs} were not compared"


def _outcome(prediction: Prediction, found: Comparison, verdict: Verdict) -> tuple[Outcome, str]:
    """`supported`, `+50.0 points (95 % CI +27.5 to +66.2), the whole interval above 0`."""
    if found.low is None or found.high is None or found.difference is None:
        return "inconclusive", found.why
    turned = found.arm != prediction.arm
    low, high = (-found.high, -found.low) if turned else (found.low, found.high)
    difference = -found.difference if turned else found.difference
    share, unit = verdict.share, amount_unit(share=verdict.share, unit=verdict.unit)
    measured, *ends = (amount(value, share=share, unit=verdict.unit, signed=True) for value in (difference, low, high))
    told = f"measured {measured}{unit} (95 % CI {ends[0]} to {ends[1]})"
    up = prediction.direction == "higher"
    bound = prediction.at_least if up else -prediction.at_least
    limit = f"{amount(bound, share=share, unit=verdict.unit, signed=True)}{unit}" if bound else "0"
    goal = f"{'above' if up else 'below'} {limit}"
    if (low > bound) if up else (high < bound):
        return "supported", f"{told}, the whole interval {goal}"
    if (high < bound) if up else (low > bound):
        return "refuted", f"{told}, none of the interval {goal}"
    return "inconclusive", f"{told}, which leaves open whether it is {goal}"


def _negate(value: float | None) -> float | None:
    return None if value is None else -value


def _brier(confidence: float | None, outcome: Outcome) -> float | None:
    if confidence is None or outcome == "inconclusive":
        return None
    return (confidence - (outcome == "supported")) ** 2
