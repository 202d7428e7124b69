"""The tinker backend: any server that speaks the Tinker protocol, through the real `tinker` client.

In: a model's name and a server's address. Out: a service that answers the training surface with that server's work. The
address and the key are handed to the client; the process's environment is not touched, so two arms can use two servers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from evsys_sdk.backends.chat_tokenizer import ChatTokenizer
from evsys_sdk.config.models import Params
from evsys_sdk.errors import BackendError, EvsysAuthError, blame, need
from evsys_sdk.registry import register_backend
from evsys_sdk.surface import (
    AdamParams,
    Capabilities,
    Datum,
    ForwardBackwardOutput,
    LossCallable,
    ModelInput,
    OptimStepOutput,
    SampledSequence,
    SampleOutput,
    SamplingParams,
)

LOOPBACK_KEY = "tml-local"
"""What a server on this machine gets: the client insists on some key of that form."""
LOSSES = frozenset({"cross_entropy", "importance_sampling", "ppo", "cispo", "dro"})


@register_backend("tinker")
class TinkerBackend:
    """Training on a Tinker-protocol server: hosted Tinker, or `evsys engine serve` (extra `tinker`)."""

    class Config(Params):
        base_url: str | None = None
        """The server; by default the client's own (hosted Tinker)."""
        api_key_env: str = "TINKER_API_KEY"
        """Name of the environment variable that holds the key."""

    def __init__(self, **params: Any):
        self.cfg = self.Config(**params)

    def prepare(self, *, model: Any, run_dir: Path) -> dict[str, Any]:
        tinker = need("tinker", extra="tinker")
        key = api_key(self.cfg.base_url, self.cfg.api_key_env, os.environ)
        with blame(BackendError, f"connecting to {self.cfg.base_url or 'Tinker'}"):
            client = tinker.ServiceClient(base_url=self.cfg.base_url, api_key=key)
            known = [found.model_name for found in client.get_server_capabilities().supported_models]
        if known and model.name not in known:
            shown = ", ".join(str(name) for name in known[:10])
            raise BackendError(f"the server has no model {model.name!r}; it has: {shown}")
        return {"service": TinkerService(client, model.name)}

    def teardown(self, handles: dict[str, Any]) -> None:
        handles["service"].close()


def api_key(base_url: str | None, variable: str, environ: Mapping[str, str]) -> str:
    """The key to use: the variable's, or a dummy for a server on this machine."""
    key = environ.get(variable)
    if key:
        return key
    if base_url and any(host in base_url for host in ("127.0.0.1", "localhost", "[::1]")):
        return LOOPBACK_KEY
    raise EvsysAuthError(f"the tinker backend needs a key: set {variable}, or name a server of your own with base_url")


class TinkerService:
    """Clients of one server for one base model."""

    capabilities = Capabilities(
        losses=LOSSES, custom_loss=True, prompt_logprobs=True, topk_prompt_logprobs=True, resume=True
    )

    def __init__(self, client: Any, model_name: str):
        self.client, self.model_name = client, model_name
        self._tokenizer: ChatTokenizer | None = None

    async def create_training_client(self, *, rank: int, seed: int) -> TinkerTrainingClient:
        if rank < 1:
            raise BackendError("Tinker servers train LoRA adapters only: set lora_rank to 1 or more")
        with blame(BackendError, "creating a training client"):
            inner = await self.client.create_lora_training_client_async(self.model_name, rank=rank, seed=seed)
        return TinkerTrainingClient(self, inner)

    async def create_sampling_client(self, path: str | None = None) -> TinkerSamplingClient:
        with blame(BackendError, "creating a sampling client"):
            if path is None:
                return TinkerSamplingClient(await self.client.create_sampling_client_async(base_model=self.model_name))
            return TinkerSamplingClient(await self.client.create_sampling_client_async(model_path=path))

    def get_tokenizer(self) -> ChatTokenizer:
        if self._tokenizer is None:
            with blame(BackendError, f"the tokenizer of {self.model_name!r}"):
                self._tokenizer = ChatTokenizer(
                    self.client.create_sampling_client(base_model=self.model_name).get_tokenizer()
                )
        return self._tokenizer

    def close(self) -> None:
        self.client.close("success").result()


def collected[T](future: Any, make: Callable[[Any], T], what: str) -> Awaitable[T]:
    """The answer of a call that is already on its way, in our records; its failure as a BackendError."""

    async def collect() -> T:
        with blame(BackendError, what):
            return make(await asyncio.wrap_future(future.future() if hasattr(future, "future") else future))

    return asyncio.ensure_future(collect())


class TinkerTrainingClient:
    """One adapter on the server. The client sends each call when it is made and keeps their order."""

    def __init__(self, service: TinkerService, inner: Any):
        self.service, self.inner = service, inner

    def forward_backward(
        self, data: list[Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> Awaitable[ForwardBackwardOutput]:
        future = self.inner.forward_backward([to_tinker(datum) for datum in data], loss_fn, loss_fn_config)
        return collected(future, _output, f"forward_backward({loss_fn})")

    def forward_backward_custom(self, data: list[Datum], loss_fn: LossCallable) -> Awaitable[ForwardBackwardOutput]:
        # The callable is ours to run, on our own records; the server sees the gradient of the logprobs.
        def loss(theirs: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
            return loss_fn(data, logprobs)

        future = self.inner.forward_backward_custom([to_tinker(datum) for datum in data], loss)
        return collected(future, _output, "forward_backward with a callable loss")

    def optim_step(self, adam_params: AdamParams) -> Awaitable[OptimStepOutput]:
        types = need("tinker", extra="tinker").types
        settings = types.AdamParams(**{name: getattr(adam_params, name) for name in AdamParams.__dataclass_fields__})
        return collected(
            self.inner.optim_step(settings), lambda out: OptimStepOutput(metrics=dict(out.metrics or {})), "optim_step"
        )

    def save_state(self, name: str) -> Awaitable[str]:
        return collected(self.inner.save_state(name), lambda saved: str(saved.path), "save_state")

    def save_weights_for_sampler(self, name: str) -> Awaitable[str]:
        return collected(self.inner.save_weights_for_sampler(name), lambda saved: str(saved.path), "saving weights")

    async def load_state(self, path: str, *, optimizer: bool = True) -> None:
        # The protocol makes a new training client from a state; from here on that is the one we speak for.
        make = (
            self.service.client.create_training_client_from_state_with_optimizer_async
            if optimizer
            else self.service.client.create_training_client_from_state_async
        )
        with blame(BackendError, f"loading state {path}"):
            self.inner = await make(path)

    def get_tokenizer(self) -> ChatTokenizer:
        return self.service.get_tokenizer()


class TinkerSamplingClient:
    """Fixed weights on the server."""

    def __init__(self, inner: Any):
        self.inner = inner

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        *,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> Awaitable[SampleOutput]:
        types = need("tinker", extra="tinker").types
        params = types.SamplingParams(
            max_tokens=sampling_params.max_tokens,
            temperature=sampling_params.temperature,
            top_k=sampling_params.top_k,
            top_p=sampling_params.top_p,
            seed=sampling_params.seed,
            stop=_stop(sampling_params.stop),
        )
        future = self.inner.sample(
            types.ModelInput.from_ints(prompt.to_ints()),
            num_samples,
            params,
            include_prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
        )
        return collected(future, _samples, "sample")

    def compute_logprobs(self, prompt: ModelInput) -> Awaitable[list[float | None]]:
        types = need("tinker", extra="tinker").types
        future = self.inner.compute_logprobs(types.ModelInput.from_ints(prompt.to_ints()))
        return collected(future, list, "compute_logprobs")


def _stop(stop: tuple[str | int, ...]) -> list[str] | list[int] | None:
    words, ids = [s for s in stop if isinstance(s, str)], [s for s in stop if isinstance(s, int)]
    if words and ids:
        raise BackendError("a Tinker server takes stop strings or stop ids, not both at once")
    return words or ids or None


def to_tinker(datum: Datum) -> Any:
    """Our record as the client's."""
    types = need("tinker", extra="tinker").types
    inputs = {
        key: types.TensorData(
            data=value.to_numpy().ravel().tolist(), dtype=value.dtype, shape=list(value.to_numpy().shape)
        )
        for key, value in datum.loss_fn_inputs.items()
    }
    return types.Datum(model_input=types.ModelInput.from_ints(datum.model_input.to_ints()), loss_fn_inputs=inputs)


def _output(result: Any) -> ForwardBackwardOutput:
    logprobs = [list(found["logprobs"].tolist()) if "logprobs" in found else [] for found in result.loss_fn_outputs]
    return ForwardBackwardOutput(metrics=dict(result.metrics), logprobs=logprobs)


def _samples(response: Any) -> SampleOutput:
    return SampleOutput(
        sequences=[
            SampledSequence(tokens=list(s.tokens), logprobs=list(s.logprobs or []), stop_reason=s.stop_reason)
            for s in response.sequences
        ],
        prompt_logprobs=response.prompt_logprobs,
        topk_prompt_logprobs=response.topk_prompt_logprobs,
    )
