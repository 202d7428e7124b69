"""Clients for the model that this run has trained.

In: a prompt, as text or messages. Out: the answer's text. The runner hands over the run's own sampling client and
renderer (`attach`), so the model is asked in exactly the form it was trained in, wherever it lives: the kinds
`mock`, `local` and `tinker` are one client under the names that configs use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from evsys_sdk.asyncs import run_async
from evsys_sdk.config.models import Params
from evsys_sdk.errors import EvsysError
from evsys_sdk.protocols import Renderer
from evsys_sdk.registry import register_inference
from evsys_sdk.surface import Messages, ModelInput, SamplingClient, SamplingParams, derive_seed, text_of

Prompt = str | Messages


class TrainedModelClient:
    """Asks the trained model; `attach` must come first."""

    class Config(Params):
        max_tokens: int = Field(default=256, ge=1)
        temperature: float = Field(default=0.0, ge=0)
        stop: list[str] = Field(default_factory=list)
        system_prompt: str | None = None
        """Speaks first, unless the prompt brings a system message of its own."""

    def __init__(self, **params: Any) -> None:
        self.cfg = self.Config(**params)
        self._model: tuple[SamplingClient, Renderer, int | None] | None = None

    def attach(self, sampler: SamplingClient, renderer: Renderer, seed: int | None = None) -> None:
        """Say which weights answer from now on."""
        self._model = sampler, renderer, seed

    def generate(
        self,
        *,
        prompt: Prompt,
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: Sequence[str] | None = None,
    ) -> str:
        """The answer; settings that are not given are the client's own."""
        return run_async(self.agenerate(prompt=prompt, max_tokens=max_tokens, temperature=temperature, stop=stop))

    async def agenerate(
        self,
        *,
        prompt: Prompt,
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: Sequence[str] | None = None,
    ) -> str:
        """The same, awaited: many can be under way at once."""
        if self._model is None:
            raise EvsysError("this client asks the model that a run trained; none is attached, call attach(...) first")
        sampler, renderer, seed = self._model
        messages = self._messages(prompt)
        sampling = SamplingParams(
            max_tokens=self.cfg.max_tokens if max_tokens is None else max_tokens,
            temperature=self.cfg.temperature if temperature is None else temperature,
            stop=tuple(self.cfg.stop if stop is None else stop),
            seed=derive_seed(seed, messages),
        )
        output = await sampler.sample(ModelInput.from_ints(renderer.prompt(messages)), 1, sampling)
        return text_of(output.sequences[0].tokens, renderer.tokenizer)

    def _messages(self, prompt: Prompt) -> Messages:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        system = self.cfg.system_prompt
        if system is None or any(message.get("role") == "system" for message in messages):
            return messages
        return [{"role": "system", "content": system}, *messages]


@register_inference("mock")
class MockInference(TrainedModelClient):
    """The model trained by this run, on the mock backend."""


@register_inference("local")
class LocalInference(TrainedModelClient):
    """The model trained by this run, on the local backend."""


@register_inference("tinker")
class TinkerInference(TrainedModelClient):
    """The model trained by this run, on Tinker."""
