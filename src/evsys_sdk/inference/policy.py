"""Clients for the model that this run has trained.

In: a prompt, as text or messages. Out: the answer's text. The runner hands over the run's own sampling client and
renderer (`attach`), so the model is asked in exactly the form it was trained in, wherever it lives: the kinds
`mock`, `local` and `tinker` are one client under the names that configs use.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

from pydantic import Field

from evsys_sdk import registry
from evsys_sdk.data_types import content_text
from evsys_sdk.errors import EvsysError
from evsys_sdk.inference.base import AskingClient, Completion, GenerationRequest
from evsys_sdk.protocols import Renderer
from evsys_sdk.registry import register_inference
from evsys_sdk.training_api import ModelInput, SamplingClient, SamplingParams, derive_seed, text_of


class TrainedModelClient(AskingClient):
    """Asks the trained model; `attach` must come first."""

    usd_per_answer: ClassVar[float | None] = 0.0
    """This machine's own time is not billed; None where a server bills in its own way."""

    class Config(AskingClient.Config):
        temperature: float = Field(default=0.0, ge=0)

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self._model: tuple[SamplingClient, Renderer, int | None] | None = None

    def attach(self, sampler: SamplingClient, renderer: Renderer, seed: int | None = None) -> None:
        """Say which weights answer from now on."""
        self._model = sampler, renderer, seed

    async def _ask(self, question: GenerationRequest) -> Completion:
        if self._model is None:
            raise EvsysError("this client asks the model that a run trained; none is attached, call attach(...) first")
        sampler, renderer, seed = self._model
        began, prompt = time.monotonic(), renderer.prompt(question.messages)
        sampling = SamplingParams(
            max_tokens=question.max_tokens,
            temperature=question.temperature or 0.0,
            stop=question.stop,
            # By the question, not by the order of calls: an answer does not depend on what else is under way.
            seed=derive_seed(seed, question.messages),
        )
        output = await sampler.sample(ModelInput.from_ints(prompt), 1, sampling)
        sequence = output.sequences[0]
        return Completion(
            text=text_of(sequence.tokens, renderer.tokenizer),
            input_tokens=len(prompt),
            output_tokens=len(sequence.tokens),
            cost_usd=self.usd_per_answer,
            stop_reason=sequence.stop_reason,
            seconds=time.monotonic() - began,
        )


@register_inference("mock")
class MockInference(TrainedModelClient):
    """The model trained by this run, on the mock backend. Where no run has attached one, it repeats the last message,
    cut to `max_tokens` words, so that code around a client can be tried without a model."""

    async def _ask(self, question: GenerationRequest) -> Completion:
        if self._model is not None:
            return await super()._ask(question)
        said = content_text(question.messages[-1].get("content")) if question.messages else ""
        for stop in question.stop or ():
            said = said.partition(stop)[0] if stop else said
        words = said.split(" ")
        kept = words[: question.max_tokens]
        return Completion(
            text=" ".join(kept),
            input_tokens=len(words),
            output_tokens=len(kept),
            cost_usd=0.0,
            stop_reason="length" if len(kept) < len(words) else "stop",
        )


@register_inference("local")
class LocalInference(TrainedModelClient):
    """The model trained by this run, on the local backend."""


@register_inference("tinker")
class TinkerInference(TrainedModelClient):
    """The model trained by this run, on Tinker."""

    usd_per_answer = None


def is_trained_here(kind: str) -> bool:
    """Whether clients of this kind ask the model that a run trains."""
    target = registry.inference.get(kind)
    return isinstance(target, type) and issubclass(target, TrainedModelClient)
