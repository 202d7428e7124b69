"""The local backend: the engine in this process, real gradients on CPU or GPU.

In: a model's name (built-in, folder, GGUF file, hub id) and a run directory. Out: a service that answers the training
surface. One engine per model stays warm and serves every run of the process; a run adds only its adapter.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import Field

from evsys_engine.losses import LOSSES
from evsys_engine.types import Adapter, EngineSampler, LossOutput, ModelInfo, SampleRequest, TrainingDatum
from evsys_sdk.backends.chat_tokenizer import ChatTokenizer
from evsys_sdk.config.base import Params
from evsys_sdk.errors import BackendError, error_boundary, need
from evsys_sdk.logs import get_logger
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
    from evsys_engine.engine import Engine
    from evsys_engine.sample_queue import SampleQueue


class Closable(Protocol):
    def close(self) -> None: ...


@register_backend("local")
class LocalBackend:
    """True training of a real model on this machine's CPU or GPU (extra `local`)."""

    requires: ClassVar = {"torch": "local", "transformers": "local"}

    class Config(Params):
        # These change rounding alone. If they counted, a second try with another number of threads would pass for the
        # first look at a question.
        not_scored = frozenset(["device", "threads", "max_batch_tokens"])

        device: str = Field(default="auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")
        """`cpu`, `cuda`, `cuda:1`; auto takes a GPU if there is one."""
        dtype: Literal["auto", "float32", "bfloat16"] = "auto"
        """auto takes bfloat16 only where the machine is fast at it."""
        threads: int | None = Field(default=None, ge=1)
        """CPU threads of torch; by default as many as there are cores."""
        max_batch_tokens: int | None = Field(default=None, ge=1)
        """Tokens per forward pass; less needs less memory."""

    def __init__(self, **params: Any):
        self.cfg = self.Config(**params)

    def offers(self) -> Capabilities:
        return LocalService.capabilities

    def model_problem(self, name: str) -> str | None:
        """Why a model of this name cannot be had here, as far as that is known without fetching it."""
        from evsys_engine.models.find import unknown

        return unknown(name)

    def vocabulary(self, name: str) -> int | None:
        """How many tokens the model knows, as far as its config lies here."""
        from evsys_engine.models.cache import cache_folder
        from evsys_engine.models.find import text_config

        folders = [Path(name).expanduser(), cache_folder() / name]
        found = next((folder for folder in folders if (folder / "config.json").is_file()), None)
        return text_config(found).get("vocab_size") if found else None

    def checkpoint_problem(self, path: str, rank: int | None) -> str | None:
        """Why training cannot start from `path`, as far as its files say; `rank` is the recipe's, if it sets one."""
        from evsys_engine.peft_folder import is_peft_folder, read_peft_folder
        from evsys_engine.types import EngineError

        if not is_peft_folder(path):
            return None
        try:
            found = read_peft_folder(path)
        except EngineError as exc:
            return str(exc)
        if rank is not None and rank != found.rank:
            return f"this adapter has rank {found.rank}, and lora_rank is {rank}; leave lora_rank out"
        return None

    def prepare(self, *, model: Any, run_dir: Path) -> dict[str, object]:
        for module, extra in self.requires.items():
            need(module, extra=extra)
        settings = {
            "device": self.cfg.device,
            "dtype": self.cfg.dtype,
            "threads": self.cfg.threads,
            "max_batch_tokens": self.cfg.max_batch_tokens,
        }
        engine = warm_engine(model.name, settings)
        return {"service": LocalService(engine, Path(run_dir).absolute() / "weights")}

    def teardown(self, handles: dict[str, Any]) -> None:
        handles["service"].close()


_engines: dict[tuple[object, ...], Engine] = {}
_loading = threading.Lock()


def warm_engine(name: str, settings: Mapping[str, Any]) -> Engine:
    """The engine of this model and these settings; loaded once, the last one used stays."""
    from evsys_engine.engine import Engine
    from evsys_engine.models import find_model

    with _loading, error_boundary(BackendError, f"loading model {name!r}"):
        # What takes time before the first step, a download or a conversion, is said on stderr; stdout is the result's.
        folder = find_model(name, say=lambda line: print(line, file=sys.stderr, flush=True))
        key = (str(folder.path), *settings.items())
        if key not in _engines:
            _engines.clear()  # one model at a time: memory is the scarce thing
            given = {option: value for option, value in settings.items() if value is not None}
            _engines[key] = Engine.load(folder.path, name=name, **given)
        return _engines[key]


class LocalService:
    """Adapters and samplers over a warm engine; their files lie in the run's directory."""

    capabilities = Capabilities(
        losses=frozenset(LOSSES),
        custom_loss=True,
        prompt_logprobs=True,
        topk_prompt_logprobs=True,
        resume=True,
        full_fine_tuning=True,
        average_weights=True,
    )

    def __init__(self, engine: Engine, folder: Path):
        self.engine, self.folder = engine, folder
        # One thread: calls are done in the order in which they were submitted, as the training surface promises.
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evsys-local")
        self.opened: list[Closable] = []

    def create_training_client(self, *, rank: int, seed: int) -> Awaitable[LocalTrainingClient]:
        from evsys_engine.types import LoraSettings

        def make() -> LocalTrainingClient:
            adapter = self.keep(self.engine.create_adapter(LoraSettings(rank=rank, seed=seed)))
            return LocalTrainingClient(self, adapter)

        return submit(self.worker, make)

    def saved_rank(self, path: str) -> int:
        """The rank of the adapter whose training state, or PEFT folder, is at `path`."""
        from evsys_engine.starting import saved_rank

        with error_boundary(BackendError, "the local engine"):
            return saved_rank(Path(path))

    def create_sampling_client(self, path: str | None = None) -> Awaitable[LocalSamplingClient]:
        from evsys_engine.sample_queue import SampleQueue

        def make() -> LocalSamplingClient:
            sampler = self.engine.load_sampler(Path(path) if path else None)
            return self.keep(LocalSamplingClient(SampleQueue(sampler), sampler, self.opened))

        return submit(self.worker, make)

    def average_weights(self, paths: Sequence[str], shares: Sequence[float], name: str) -> Awaitable[str]:
        """Sampler weights that are the weighted sum of saved ones; returns their path."""
        from evsys_engine.averaging import average_weights

        def average(folder: Path) -> None:
            average_weights([Path(path) for path in paths], shares, folder, self.engine.info)

        return self.save(f"{name}-sampler", average)

    def discard_weights(self, path: str) -> Awaitable[None]:
        """Delete sampler weights of this run that will not be used again."""

        def delete() -> None:
            if Path(path).parent != self.folder:
                raise BackendError(f"{path} is not of this run, so it stays")
            shutil.rmtree(path)

        return submit(self.worker, delete)

    def get_tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer(self.engine.tokenizer)

    @property
    def context_length(self) -> int:
        """Tokens that prompt and completion may have together."""
        return int(self.engine.info.max_length)

    def keep[T: Closable](self, thing: T) -> T:
        self.opened.append(thing)
        return thing

    def save(self, name: str, write: Callable[[Path], None]) -> Awaitable[str]:
        """Have weights written; their place is named after what is in it, so that no checkpoint is ever written over
        another, and the same run, however often it was interrupted, has the same names."""
        from evsys_engine.folders import content_hash, put_in_place

        def act() -> str:
            part = self.folder / f".{name}.{secrets.token_hex(4)}.part"
            write(part)
            folder = self.folder / f"{name}-{content_hash(part)[:12]}"
            put_in_place(part, folder)  # of the same weights, or what is left of them
            return str(folder)

        return submit(self.worker, act)

    def close(self) -> None:
        # The worker first: a call under way uses what is closed after it.
        self.worker.shutdown(wait=True, cancel_futures=True)
        for thing in list(self.opened):
            thing.close()
        self.opened.clear()


def submit[T](worker: ThreadPoolExecutor, act: Callable[[], T]) -> Awaitable[T]:
    """Start `act` now, behind what was submitted before; engine errors come out as BackendErrors."""

    def work() -> T:
        with error_boundary(BackendError, "the local engine"):
            return act()

    return asyncio.wrap_future(worker.submit(work))


class LocalTrainingClient:
    """One adapter; its calls are done in the order they are made."""

    def __init__(self, service: LocalService, adapter: Adapter):
        self.service, self.adapter, self.worker = service, adapter, service.worker

    def forward_backward(
        self, data: list[Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> Awaitable[ForwardBackwardOutput]:
        return submit(
            self.worker, lambda: _output(self.adapter.forward_backward(engine_data(data), loss_fn, loss_fn_config))
        )

    def forward_backward_custom(self, data: list[Datum], loss_fn: LossCallable) -> Awaitable[ForwardBackwardOutput]:
        def guard_loss(data: Sequence[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
            with error_boundary(BackendError, "the custom loss"):
                return loss_fn(list(data), logprobs)

        return submit(self.worker, lambda: _output(self.adapter.forward_backward_custom(engine_data(data), guard_loss)))

    def optim_step(self, adam_params: AdamParams) -> Awaitable[OptimStepOutput]:
        return submit(self.worker, lambda: OptimStepOutput(metrics=self.adapter.optim_step(adam_params)))

    def save_state(self, name: str) -> Awaitable[str]:
        return self.service.save(f"{name}-state", self.adapter.save_state)

    def save_weights_for_sampler(self, name: str) -> Awaitable[str]:
        return self.service.save(f"{name}-sampler", self.adapter.save_weights)

    def load_state(self, path: str, *, optimizer: bool = True) -> Awaitable[None]:
        """Take up a training state, or a PEFT adapter of the same rank; alpha and layers come with the weights."""
        from evsys_engine.starting import saved_settings

        def load() -> None:
            engine, own = self.service.engine, self.adapter.settings
            _warn_of_another_base(Path(path), engine.info)
            saved = saved_settings(Path(path), engine.model, seed=own.seed)
            if saved.rank == own.rank and saved != own:
                self.service.opened.remove(self.adapter)
                self.adapter.close()
                self.adapter = self.service.keep(engine.create_adapter(saved))
            self.adapter.load_state(Path(path), optimizer=optimizer)

        return submit(self.worker, load)

    def get_tokenizer(self) -> ChatTokenizer:
        return self.service.get_tokenizer()


def _warn_of_another_base(path: Path, info: ModelInfo) -> None:
    """A PEFT adapter made elsewhere only names its base model; our own folders carry its fingerprint."""
    from evsys_engine.folders import MANIFEST
    from evsys_engine.peft_folder import is_peft_folder, read_peft_folder

    if not is_peft_folder(path) or (path / MANIFEST).exists():
        return
    base = read_peft_folder(path).base_model
    if base and Path(base).name.lower() not in {Path(info.name).name.lower(), info.path.name.lower()}:
        get_logger(__name__).warning("%s says it was trained over %r, and this run trains %r", path, base, info.name)


class LocalSamplingClient:
    """Fixed weights; requests that wait together are sampled together."""

    takes_grammar = True

    def __init__(self, queue: SampleQueue, sampler: EngineSampler, opened: list[Closable]):
        self.queue, self.sampler, self.opened = queue, sampler, opened

    def close(self) -> None:
        """Give the memory back; may be called twice."""
        self.queue.close()  # before its sampler
        self.sampler.close()
        if self in self.opened:
            self.opened.remove(self)

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        *,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> Awaitable[SampleOutput]:
        request = SampleRequest(
            tokens=prompt.tokens,
            num_samples=num_samples,
            **{name: getattr(sampling_params, name) for name in SamplingParams.__dataclass_fields__},
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
        )
        return self._submit(request)

    async def _submit(self, request: SampleRequest) -> SampleOutput:
        with error_boundary(BackendError, "the local engine"):
            if request.grammar is None:
                answer = self.queue.submit(request)
            else:  # compiling a grammar takes time, the first one of a model about a second
                answer = await asyncio.to_thread(self.queue.submit, request)
            return await asyncio.wrap_future(answer)

    async def compute_logprobs(self, prompt: ModelInput) -> list[float | None]:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        output = await self.sample(prompt, 1, params, include_prompt_logprobs=True)
        return output.prompt_logprobs or []


def engine_data(data: list[Datum]) -> list[TrainingDatum]:
    """Our records as the engine's; a custom loss still sees ours."""
    return [
        TrainingDatum(
            tokens=datum.model_input.tokens,
            inputs={key: value.to_numpy() for key, value in datum.loss_fn_inputs.items()},
            source=datum,
        )
        for datum in data
    ]


def _output(result: LossOutput) -> ForwardBackwardOutput:
    logprobs = [array.ravel().tolist() for array in result.logprobs]  # (N, K) targets row by row
    return ForwardBackwardOutput(metrics=result.metrics, logprobs=logprobs)
