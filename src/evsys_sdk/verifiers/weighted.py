"""One reward out of several: the weighted mean of what other verifiers say.

In: parts, each a registered verifier with a weight. Out: a reward, and in `info` what each part gave. A part that
fails fails the whole: a mean over the parts that happened to work would mean something else each time.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from evsys_sdk.config.base import Params
from evsys_sdk.errors import EvsysError
from evsys_sdk.protocols import VerificationResult
from evsys_sdk.registry import register_verifier, verifiers


class Part(Params):
    """One verifier and how much it counts."""

    fn_name: str = Field(min_length=1)
    """The name of the verifier."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Weights need not add up to 1; the reward is divided by their sum."""
    expected: Any = None
    """What this part expects; left out, what the task expects."""
    params: dict[str, Any] = Field(default_factory=dict)


@register_verifier("weighted", yields=True)
class Weighted:
    """The weighted mean of other verifiers' rewards."""

    class Config(Params):
        parts: list[Part] = Field(min_length=1)
        """Verifiers and the weight of each."""

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)

    @classmethod
    def why_not(cls, params: dict[str, Any]) -> str | None:
        """The first part that is not registered, or could not judge here."""
        for part in cls.Config(**params).parts:
            try:
                reason = verifiers.adapted(part.fn_name).why_not(part.params)
            except EvsysError as exc:
                reason = str(exc)
            if reason:
                return f"part {part.fn_name!r} of verifier 'weighted': {reason}"
        return None

    async def verify(self, *, prompt: Any, completion: str, target: Any) -> VerificationResult:
        said = [(part, await _ask(part, prompt, completion, target)) for part in self.cfg.parts]
        total = sum(part.weight * verdict.reward for part, verdict in said)
        parts = [
            {"fn_name": part.fn_name, "weight": part.weight, "reward": verdict.reward, **_info(verdict)}
            for part, verdict in said
        ]
        return VerificationResult(reward=total / sum(part.weight for part, _ in said), info={"parts": parts})


async def _ask(part: Part, prompt: Any, completion: str, target: Any) -> VerificationResult:
    expected = part.expected if "expected" in part.model_fields_set else target
    adapted = verifiers.adapted(part.fn_name)
    return await adapted.ajudge(completion, expected, part.params, prompt=prompt)


def _info(verdict: VerificationResult) -> dict[str, Any]:
    return {"info": verdict.info} if verdict.info else {}
