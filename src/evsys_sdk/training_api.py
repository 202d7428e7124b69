"""The training surface: the calls every backend answers and the records they carry.

It is Tinker's surface with Tinker's names and semantics, so that a recipe does not care where it runs:
losses are sums over tokens with signed weights, gradients add up until `optim_step`, position i of the
input predicts target i (the caller shifts). A call submits at once and in order; awaiting it collects the
answer. That is what lets a loop submit `forward_backward` and `optim_step` before it awaits either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

# The engine's own records, where they are the same: importing them loads neither torch nor numpy.
from evsys_engine.types import AdamParams, SampleOutput, SamplingParams
from evsys_engine.types import SampledSequence as SampledSequence

if TYPE_CHECKING:
    import numpy as np

Messages = list[dict[str, Any]]
LossCallable = Callable[[list["Datum"], list[Any]], tuple[Any, dict[str, float]]]
"""`(data, logprobs) -> (loss, metrics)`: one tensor of target logprobs per datum, differentiable."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What the model reads: token ids."""

    tokens: tuple[int, ...]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> ModelInput:
        return cls(tuple(tokens))

    def to_ints(self) -> list[int]:
        return list(self.tokens)

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class TensorData:
    """A small named array on its way to a loss."""

    data: Sequence[Any]
    dtype: Literal["int64", "float32"] = "float32"
    shape: tuple[int, ...] | None = None
    """None for one dimension."""

    def tolist(self) -> list[Any]:
        return list(self.data)

    def to_numpy(self) -> np.ndarray[Any, Any]:
        import numpy

        array = numpy.asarray(self.data, dtype=self.dtype)
        return array if self.shape is None else array.reshape(self.shape)

    def to_torch(self) -> Any:
        from evsys_sdk.errors import need

        return need("torch", extra="local").from_numpy(self.to_numpy().copy())


@dataclass(frozen=True, slots=True)
class Datum:
    """One training sequence and what its loss needs (`target_tokens`, `weights`, `logprobs`, `advantages`)."""

    model_input: ModelInput
    loss_fn_inputs: Mapping[str, TensorData]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardOutput:
    """The result of a loss."""

    metrics: dict[str, float]
    """Always has `loss:sum`."""
    logprobs: list[list[float]]
    """Of the target tokens, one list per datum; (N, K) targets row by row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepOutput:
    metrics: dict[str, float] = field(default_factory=dict)
    """May have `grad_norm`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do; a recipe that needs more is refused before anything is spent."""

    losses: frozenset[str]
    custom_loss: bool = False
    prompt_logprobs: bool = False
    topk_prompt_logprobs: bool = False
    resume: bool = False
    """State with optimiser can be saved and loaded."""
    full_fine_tuning: bool = False
    """`rank=0` trains all weights."""
    average_weights: bool = False
    """The service has `average_weights(paths, shares, name)`: sampler weights that are a weighted sum of saved ones."""


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back, with the model's own chat template."""

    eos_token_id: int

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def apply_chat_template(self, messages: Messages, *, add_generation_prompt: bool = False) -> list[int]: ...


@runtime_checkable
class SamplingClient(Protocol):
    """What would these weights say?"""

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        *,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> Awaitable[SampleOutput]: ...

    def compute_logprobs(self, prompt: ModelInput) -> Awaitable[list[float | None]]: ...


@runtime_checkable
class TrainingClient(Protocol):
    """Change these weights."""

    def forward_backward(
        self, data: list[Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> Awaitable[ForwardBackwardOutput]: ...

    def forward_backward_custom(self, data: list[Datum], loss_fn: LossCallable) -> Awaitable[ForwardBackwardOutput]: ...

    def optim_step(self, adam_params: AdamParams) -> Awaitable[OptimStepOutput]: ...

    def save_state(self, name: str) -> Awaitable[str]:
        """Weights and optimiser; returns the path that `load_state` takes."""
        ...

    def load_state(self, path: str, *, optimizer: bool = True) -> Awaitable[None]: ...

    def save_weights_for_sampler(self, name: str) -> Awaitable[str]:
        """Weights only; returns the path that `create_sampling_client` takes."""
        ...

    def get_tokenizer(self) -> Tokenizer: ...


@runtime_checkable
class TrainingService(Protocol):
    """Where training and sampling clients come from; `prepare` hands it over as handles["service"]."""

    capabilities: Capabilities

    def create_training_client(self, *, rank: int, seed: int) -> Awaitable[TrainingClient]: ...
    def create_sampling_client(self, path: str | None = None) -> Awaitable[SamplingClient]:
        """Over saved weights, or over the untrained model when `path` is None."""
        ...

    def get_tokenizer(self) -> Tokenizer: ...


def let_go(sampler: SamplingClient) -> None:
    """Say that this sampler gets no more requests. One that holds memory has a `close()`; others need none."""
    close = getattr(sampler, "close", None)
    if close is not None:
        close()


async def discard_weights(service: TrainingService, path: str) -> None:
    """Say that these sampler weights get no more requests; a service with `discard_weights(path)` deletes them."""
    discard = getattr(service, "discard_weights", None)
    if discard is not None:
        await discard(path)


def leave_retries_to_caller(service: TrainingService) -> None:
    """Say that the caller makes a sampler's failed calls again itself; a service that retries on its own then does not:
    two layers of retries would multiply."""
    leave = getattr(service, "leave_retries_to_caller", None)
    if leave is not None:
        leave()


def text_of(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """What a sampled completion says; the token that ends the turn is not part of it."""
    ended = bool(tokens) and tokens[-1] == tokenizer.eos_token_id
    return tokenizer.decode(tokens[:-1] if ended else tokens)


def derive_seed(seed: int | None, *words: object) -> int | None:
    """A separate seed for each thing named by `words`, so that no draw depends on order or company."""
    if seed is None:
        return None
    # Not `hash`, which is salted per process for text.
    digest = hashlib.sha256(repr((seed, *words)).encode()).digest()
    return int.from_bytes(digest[:4]) >> 1  # 31 bits: every backend's generator takes that
