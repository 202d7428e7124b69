"""One reward out of several: the weighted mean of what other verifiers say.

In: parts, each a registered verifier with a weight. Out: a reward, and in `info` what each part gave. A part that
fails fails the whole: a mean over the parts that happened to work would mean something else each time.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field, field_validator

from evsys_sdk.config.base import JsonDict, Params
from evsys_sdk.errors import READABLE
from evsys_sdk.protocols import VerificationResult
from evsys_sdk.registry import register_verifier, verifiers
from evsys_sdk.verifiers.adapt import AdaptedVerifier


class WeightedPart(Params):
    """One verifier and how much it counts."""

    fn_name: str = Field(min_length=1)
    """The name of the verifier."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Weights need not add up to 1; the reward is divided by their sum."""
    expected: Any = None
    """What this part expects; left out, what the task expects."""
    params: JsonDict = Field(default_factory=dict)


@register_verifier("weighted")
class Weighted:
    """The weighted mean of other verifiers' rewards."""

    class Config(Params):
        parts: list[WeightedPart] = Field(min_length=1)
        """Verifiers and the weight of each."""

        @field_validator("parts")
        @classmethod
        def _has_a_sum(cls, parts: list[WeightedPart]) -> list[WeightedPart]:
            if math.isinf(sum(part.weight for part in parts)):
                raise ValueError("the weights are too large: their sum is not a finite number")
            return parts

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)

    @classmethod
    def why_not(cls, params: JsonDict) -> str | None:
        """The first part that is not registered, or could not judge here."""
        for part in cls.Config(**params).parts:
            try:
                reason = verifiers.adapted(part.fn_name).why_not(part.params)
            except READABLE as exc:
                reason = str(exc)
            if reason:
                return f"part {part.fn_name!r} of verifier 'weighted': {reason}"
        return None

    async def verify(self, *, prompt: object, completion: str, target: object) -> VerificationResult:
        total, parts = 0.0, []
        for part in self.cfg.parts:
            # `expected: null` is a value too: only a part that does not name it takes the task's.
            expected = part.expected if "expected" in part.model_fields_set else target
            adapted: AdaptedVerifier = verifiers.adapted(part.fn_name)
            verdict = await adapted.ajudge(completion, expected, part.params, prompt=prompt)
            total += part.weight * verdict.reward
            info = {"info": verdict.info} if verdict.info else {}
            parts.append({"fn_name": part.fn_name, "weight": part.weight, "reward": verdict.reward, **info})
        return VerificationResult(reward=total / sum(part.weight for part in self.cfg.parts), info={"parts": parts})
