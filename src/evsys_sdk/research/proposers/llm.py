"""A model is asked for the next change: any inference client, as `openai`, `anthropic` or a server of your own."""

from __future__ import annotations

import random
from typing import Any

from pydantic import Field, field_validator

from evsys_sdk import registry
from evsys_sdk.config.base import InferenceSpec, Params
from evsys_sdk.errors import EvsysError
from evsys_sdk.registry import register_proposer
from evsys_sdk.research.question import question_text, read_answer
from evsys_sdk.research.state import Proposal, ResearchState
from evsys_sdk.training.prompt_search import checked_spec


@register_proposer("llm")
class LlmProposer:
    """Ask once; an answer that is no legal proposal is shown its problems, once."""

    class Config(Params):
        inference: InferenceSpec
        """The model: an inference client, `{kind, params}`."""
        max_tokens: int = Field(default=2048, ge=16)
        """Of an answer; thinking counts."""
        temperature: float = Field(default=1.0, ge=0)
        """Of the answers."""

        @field_validator("inference")
        @classmethod
        def _is_a_client(cls, spec: InferenceSpec) -> InferenceSpec:
            return checked_spec(spec, registry.inference)

    wants_context = True

    def __init__(self, **params: Any):
        self.cfg = self.Config(**params)
        self.client = registry.inference.build(self.cfg.inference.kind, dict(self.cfg.inference.params))

    def propose(self, state: ResearchState, space: Any, rng: random.Random) -> Proposal | None:
        incumbent = state.incumbent
        if incumbent is None:
            return None
        before = self._used()
        messages = [{"role": "user", "content": question_text(state, space, rng)}]
        wrong = ""
        for _ in range(2):
            answer = self.client.generate(
                prompt=messages, max_tokens=self.cfg.max_tokens, temperature=self.cfg.temperature
            )
            try:
                found = read_answer(answer, incumbent.recipe, space)
            except EvsysError as exc:
                wrong = str(exc)
                told = f"That cannot be tried: {wrong}\nAnswer again, with the JSON object alone."
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": told}]
                continue
            return self._proposal(incumbent.number, found.changes, found.claim, found.confidence, before)
        return self._proposal(incumbent.number, {}, wrong, None, before, operator="none")

    def _proposal(
        self, parent: int, changes: dict[str, Any], claim: str, confidence: float | None,
        before: tuple[int, float], *, operator: str = "agent",
    ) -> Proposal:  # fmt: skip
        tokens, usd = (now - then for now, then in zip(self._used(), before, strict=True))
        return Proposal(
            parent=parent, changes=changes, claim=claim, operator=operator, confidence=confidence, tokens=int(tokens),
            usd=usd,
        )  # fmt: skip

    def _used(self) -> tuple[int, float]:
        """Tokens and dollars that the client has used so far; none for one of a project that does not count."""
        usage = getattr(self.client, "usage", None)
        if usage is None:
            return 0, 0.0
        return usage.input_tokens + usage.output_tokens, usage.cost_usd or 0.0
