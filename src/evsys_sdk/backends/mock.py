"""The mock backend: a small model that really learns, in this process, without torch.

In: a model's name and a run directory. Out: a service that answers the training surface. A call is computed
at once, so in order; its answer, or its error, arrives when it is awaited, `latency_ms` later if asked.
What the model is and how its files look lives in `mock_model`, how it is sampled in `mock_sampling`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from evsys_engine.losses import LOSSES
from evsys_sdk.backends.mock_tokenizer import ByteTokenizer
from evsys_sdk.config.base import Params
from evsys_sdk.errors import BackendError
from evsys_sdk.registry import register_backend
from evsys_sdk.training_api import (
    AdamParams,
    Capabilities,
    Datum,
    ForwardBackwardOutput,
    LossCallable,
    ModelInput,
    OptimStepOutput,
    SampleOutput,
    SamplingParams,
)

if TYPE_CHECKING:
    from evsys_sdk.backends.mock_model import TableModel


@register_backend("mock")
class MockBackend:
    """A table model with exact gradients; it can be slow or fail on request."""

    class Config(Params):
        not_scored = frozenset(["latency_ms", "fail_on_prepare", "fail_at_step"])

        latency_ms: float = Field(default=0.0, ge=0)
        """Each answer arrives this much later; calls of one training client queue up, clients overlap."""
        fail_on_prepare: bool = False
        """Fail when the model would be loaded."""
        fail_at_step: int | None = Field(default=None, ge=1)
        """The optimiser step, counted per training client, that raises a BackendError."""

    def __init__(self, **params: Any):
        self.cfg = self.Config(**params)

    def offers(self) -> Capabilities:
        return capabilities()

    def vocabulary(self, name: str) -> int:
        """How many tokens the model knows."""
        return ByteTokenizer.vocab_size

    def prepare(self, *, model: Any, run_dir: Path) -> dict[str, object]:
        if self.cfg.fail_on_prepare:
            raise BackendError("the mock backend fails here as configured (fail_on_prepare)")
        latency_seconds, fail_at_step = self.cfg.latency_ms / 1000, self.cfg.fail_at_step
        directory = Path(run_dir).absolute() / "weights"  # paths must outlive a change of folder
        return {"service": MockService(model.name, directory, latency_seconds, fail_at_step)}

    def teardown(self, handles: dict[str, object]) -> None:
        """Nothing to give back: the service holds memory only, and its files stay."""


class MockFuture[T]:
    """A finished call whose answer may still be on its way; may be awaited more than once."""

    __slots__ = ("_error", "_ready_at", "_value")

    def __init__(self, compute: Callable[[], T], ready_at: float = 0.0):
        self._ready_at = ready_at
        self._error: Exception | None = None
        try:
            self._value = compute()
        # Raised where the answer is awaited, as a server's error would be.
        except Exception as exc:
            self._error = exc

    def __await__(self) -> Generator[object, None, T]:
        wait = self._ready_at - time.monotonic()
        if wait > 0:
            # A generator, since `__await__` cannot be a coroutine.
            yield from asyncio.sleep(wait).__await__()
        if self._error is not None:
            raise self._error
        return self._value


def capabilities() -> Capabilities:
    """Everything; custom losses where torch is installed."""
    return Capabilities(
        losses=frozenset(LOSSES),
        custom_loss=importlib.util.find_spec("torch") is not None,
        prompt_logprobs=True,
        topk_prompt_logprobs=True,
        resume=True,
        full_fine_tuning=True,
        average_weights=True,
    )


class MockService:
    """Hands out training and sampling clients over one shared, frozen base."""

    def __init__(self, model_name: str, directory: Path, latency_seconds: float, fail_at_step: int | None):
        self.model_name, self.directory = model_name, directory
        self.latency_seconds, self.fail_at_step = latency_seconds, fail_at_step
        self.capabilities = capabilities()

    def create_training_client(self, *, rank: int, seed: int) -> MockFuture[MockTrainingClient]:
        return MockFuture(lambda: MockTrainingClient(self, rank=rank, seed=seed), self.due())

    def create_sampling_client(self, path: str | None = None) -> MockFuture[MockSamplingClient]:
        return MockFuture(lambda: MockSamplingClient(self, self._model(path)), self.due())

    def average_weights(self, paths: Sequence[str], shares: Sequence[float], name: str) -> MockFuture[str]:
        """Sampler weights that are the weighted sum of saved ones; returns their path."""
        from evsys_sdk.backends.mock_model import average, save

        return MockFuture(
            lambda: save(self.directory, name, average(paths, shares, self.model_name), None),
            self.due(),
        )

    def discard_weights(self, path: str) -> MockFuture[None]:
        """Delete sampler weights of this run."""

        def delete() -> None:
            if Path(path).parent != self.directory:
                raise BackendError(f"{path} does not belong to this run, so it was not deleted")
            Path(path).unlink(missing_ok=True)

        return MockFuture(delete, self.due())

    def get_tokenizer(self) -> ByteTokenizer:
        return ByteTokenizer()

    def due(self, after: float = 0.0) -> float:
        """When an answer asked for now arrives; not before the one that arrives at `after`."""
        return max(time.monotonic(), after) + self.latency_seconds if self.latency_seconds else 0.0

    def _model(self, path: str | None) -> TableModel:
        from evsys_sdk.backends.mock_model import TableModel, restore

        if path is None:
            # Any rank: untrained adapters of all ranks add nothing to the base.
            return TableModel(model_name=self.model_name, rank=1, seed=None)
        return restore(path, "sampler", self.model_name)[0]


class MockTrainingClient:
    """One adapter, its pending gradients and its optimiser."""

    def __init__(self, service: MockService, *, rank: int, seed: int):
        from evsys_sdk.backends.mock_model import Adam, MockGradients, TableModel

        if rank < 0:
            raise BackendError(f"rank must be 0 (full fine-tuning) or more, not {rank}")
        self._service = service
        self._model = TableModel(model_name=service.model_name, rank=rank, seed=seed)
        self._adam = Adam(self._model)
        self._gradients = MockGradients()
        self._optim_calls = 0
        self._busy_until = 0.0

    def _submit[T](self, compute: Callable[[], T]) -> MockFuture[T]:
        # Calls of one client wait in line, as at a server that has one model to change.
        self._busy_until = self._service.due(self._busy_until)
        return MockFuture(compute, self._busy_until)

    def forward_backward(
        self, data: list[Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> MockFuture[ForwardBackwardOutput]:
        from evsys_sdk.backends.mock_model import forward_backward, named_loss

        return self._submit(
            lambda: forward_backward(self._model, self._gradients, data, named_loss(data, loss_fn, loss_fn_config))
        )

    def forward_backward_custom(self, data: list[Datum], loss_fn: LossCallable) -> MockFuture[ForwardBackwardOutput]:
        from evsys_sdk.backends.mock_model import custom_loss, forward_backward

        return self._submit(lambda: forward_backward(self._model, self._gradients, data, custom_loss(data, loss_fn)))

    def optim_step(self, adam_params: AdamParams) -> MockFuture[OptimStepOutput]:
        return self._submit(lambda: self._optim_step(adam_params))

    def _optim_step(self, params: AdamParams) -> OptimStepOutput:
        from evsys_sdk.backends.mock_model import MockGradients

        self._optim_calls += 1
        if self._optim_calls == self._service.fail_at_step:
            raise BackendError(f"the mock backend fails at step {self._optim_calls} as configured (fail_at_step)")
        # Gone before the step is taken: a step that fails must not leave gradients for the next.
        gradients, self._gradients = self._gradients, MockGradients()
        return OptimStepOutput(metrics={"grad_norm": self._adam.step(self._model, gradients, params)})

    def save_state(self, name: str) -> MockFuture[str]:
        """Weights and optimiser; gradients that still wait for `optim_step` are not part of it."""
        from evsys_sdk.backends.mock_model import save

        return self._submit(lambda: save(self._service.directory, name, self._model, self._adam))

    def save_weights_for_sampler(self, name: str) -> MockFuture[str]:
        from evsys_sdk.backends.mock_model import save

        return self._submit(lambda: save(self._service.directory, name, self._model, None))

    def load_state(self, path: str, *, optimizer: bool = True) -> MockFuture[None]:
        return self._submit(lambda: self._load(path, optimizer))

    def _load(self, path: str, optimizer: bool) -> None:
        from evsys_sdk.backends.mock_model import Adam, MockGradients, restore

        model, adam = restore(path, "state", self._model.model_name, self._model.rank)
        self._model, self._gradients = model, MockGradients()
        # Without its optimiser a state is a starting point: a stage of a chain begins with fresh moments.
        self._adam = adam if optimizer and adam is not None else Adam(model)

    def get_tokenizer(self) -> ByteTokenizer:
        return self._service.get_tokenizer()


class MockSamplingClient:
    """Frozen weights to draw from; what is trained later does not change them."""

    takes_grammar = True
    computes_in_call = True
    """`sample` has drawn the completions when it returns: a server calls it on a thread."""

    def __init__(self, service: MockService, model: TableModel):
        self._service, self._model = service, model

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        *,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> MockFuture[SampleOutput]:
        """Logprobs are the model's own: temperature, top-k and top-p change what is drawn, not what is reported."""
        from evsys_sdk.backends.mock_sampling import sample

        return MockFuture(
            lambda: sample(
                self._model, prompt, num_samples, sampling_params, include_prompt_logprobs, topk_prompt_logprobs
            ),
            self._service.due(),
        )

    def compute_logprobs(self, prompt: ModelInput) -> MockFuture[list[float | None]]:
        from evsys_sdk.backends.mock_sampling import prompt_logprobs, read_prompt

        return MockFuture(lambda: prompt_logprobs(self._model, read_prompt(prompt))[0], self._service.due())
