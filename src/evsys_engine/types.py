"""The engine's words: what goes into a training or sampling call and what comes out.

Semantics are Tinker's: losses are sums over tokens with signed weights, gradients add up until `optim_step`,
position i of the input predicts target i (the caller shifts). Importing this module loads neither numpy nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

type Array = np.ndarray[Any, Any]
type JsonObject = dict[str, Any]
"""As `json.loads` gives it: a manifest, a config of transformers, a body of the protocol."""
LossFunction = Callable[[Sequence[Any], list[Any]], tuple[Any, dict[str, float]]]
"""`(data, logprobs) -> (loss, metrics)` over torch tensors that carry gradients."""


class EngineError(Exception):
    """The engine could not do it."""


class BadRequest(EngineError):
    """The call itself is wrong; nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDatum:
    """One sequence and what its loss reads."""

    tokens: Sequence[int]
    """What the model sees, T ids."""
    inputs: Mapping[str, Array]
    """`target_tokens` int64 [T] (or [T, K] soft targets); `weights` float32 of the same shape (cross_entropy);
    `logprobs` and `advantages` float32 [T] (the policy losses)."""
    source: Any = None
    """The caller's own record of this datum, which a custom loss gets instead of this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """The value of a loss."""

    metrics: dict[str, float]
    """Always has `loss:sum`."""
    logprobs: list[Array]
    """Of the target tokens, float32 [T] (or [T, K]), one per datum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """Settings of one optimiser step."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """0 turns clipping off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    rank: int
    """0 trains all weights of the model (small models only)."""
    seed: int = 0
    alpha: float = 32.0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = False
    targets: tuple[str, ...] = ()
    """The layers to train, by their last name (`q_proj`) or their whole one, instead of the three above; for adapters
    that PEFT made elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw a completion."""

    max_tokens: int = 64
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    """The same seed, prompt and weights give the same completions in any batch; None draws a fresh one."""
    stop: tuple[str | int, ...] = ()
    """Strings or token ids; a stop string is not part of the completion, a stop id is its last token."""
    grammar: str | None = None
    """What each completion has to look like, in llguidance's form; for samplers that say `takes_grammar` only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest(SamplingParams):
    """Completions of one prompt. Row i has its own random stream, made of (seed, i)."""

    tokens: Sequence[int]
    num_samples: int = 1
    end_of_text: bool = True
    """The model's own end stops as well."""
    keep_stop_strings: bool = False
    """A stop string stays at the end instead, as Tinker has it."""
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One completion, as sampled: nothing is ever decoded and encoded again."""

    tokens: list[int]
    logprobs: list[float]
    """Under the model itself (temperature 1)."""
    stop_reason: Literal["stop", "length"] = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    """As long as the prompt; the first is None."""
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What can be said of a loaded model."""

    name: str
    path: Path
    vocab_size: int
    max_length: int
    """Tokens of the longest sequence it takes."""
    parameters: int
    device: str
    dtype: str
    extra: JsonObject = field(default_factory=dict)


class Adapter(Protocol):
    """Trainable weights over the shared base. Calls are executed one after another, in the order they were made."""

    settings: LoraSettings

    def forward(
        self, data: Sequence[TrainingDatum], loss_fn: str, config: Mapping[str, float] | None = None
    ) -> LossOutput:
        """The loss without gradients."""
        ...

    def forward_backward(
        self, data: Sequence[TrainingDatum], loss_fn: str, config: Mapping[str, float] | None = None
    ) -> LossOutput: ...

    def forward_backward_custom(self, data: Sequence[TrainingDatum], loss_fn: LossFunction) -> LossOutput:
        """The caller's loss on torch logprobs: one forward, one backward."""
        ...

    def optim_step(self, settings: AdamParams) -> dict[str, float]:
        """AdamW on the gradients so far, which are then gone; returns `grad_norm`."""
        ...

    def save_state(self, folder: Path) -> None:
        """Weights, optimiser and step count; the folder appears whole or not at all."""
        ...

    def load_state(self, folder: Path, *, optimizer: bool = True) -> None: ...

    def save_weights(self, folder: Path) -> None:
        """Weights alone, as `peft` reads them (rank 0: as `transformers` reads them)."""
        ...

    def close(self) -> None:
        """Give its memory back."""
        ...


class EngineSampler(Protocol):
    """Fixed weights to sample from; later training does not change them."""

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampleOutput]:
        """All requests in one batch."""
        ...

    def close(self) -> None: ...


class EngineApi(Protocol):
    """What the in-process backend and the server need of an engine; thread-safe."""

    info: ModelInfo
    tokenizer: PreTrainedTokenizerBase
    """The model's own Hugging Face tokenizer."""

    def create_adapter(self, settings: LoraSettings) -> Adapter: ...

    def load_sampler(self, folder: Path | None) -> EngineSampler:
        """A sampler over weights that `save_weights` wrote; None means the untouched base model."""
        ...
