"""Open a model for sampling, outside any run: a model's or a run's name, a run's directory, or weights that a run left.

In: a model's name or path. Out: a `Target` (what it is and where it lives) and, from that, samplers and a
renderer on a prepared backend. `evsys serve`, `evsys benchmark run` and `evsys eval model` all open models here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evsys_sdk import registry
from evsys_sdk.config.base import BackendConfig
from evsys_sdk.config.schema import ModelConfig
from evsys_sdk.constants import RUN_RESULT_FILE
from evsys_sdk.errors import BackendError, EvsysError, error_boundary
from evsys_sdk.history.checkpoint_refs import CheckpointName, NoSuchRun, find_run, weights_at
from evsys_sdk.protocols import Renderer
from evsys_sdk.record.models import RunRecord, read_prompt
from evsys_sdk.training.rendering import renderer_for, with_prompt
from evsys_sdk.training_api import SamplingClient

DEFAULT_BACKEND = "local"
TINKER = "tinker://"
PATH_STARTS = ("/", ".", "~")
"""What begins so is a path, and no name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model to sample from, and where it lives."""

    name: str
    """What people call it."""
    model: str
    """The base model."""
    backend: str
    backend_params: dict[str, object] = field(default_factory=dict)
    renderer_name: str | None = None
    checkpoint: str | None = None
    """Sampler weights; None is the base model as it is."""
    system_prompt: str | None = None
    """Stands before every chat: the prompt that a run of `gepa_prompt` found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """What was asked for, in the asker's words."""

    text: str
    """A run's directory or name, a checkpoint's name (`<run>@final`), sampler weights, or a model's name."""
    backend: str | None = None
    base_model: str | None = None
    """Of weights that do not lie in their run's directory."""
    name: str | None = None
    params: dict[str, object] = field(default_factory=dict)
    """Of the backend; they come before what a run's record says."""
    base_model_flag: str = "--model"
    """How the asker names the base model, for messages."""


def find_target(ref: ModelRef) -> Target:
    """What the words mean."""
    named = CheckpointName.parse(ref.text) or _name_of_run(ref.text)
    if named is not None:
        home = find_run(named.run)
        weights = weights_at(home, named, "sampler")
        # A base model that is named counts more than the record, which a run that is still training does not have.
        if ref.base_model is not None:
            return _given_target(ref, ref.base_model, name=ref.name or ref.base_model, checkpoint=weights)
        if not (home / RUN_RESULT_FILE).is_file():
            raise EvsysError(
                f"{ref.text}: the run has no {RUN_RESULT_FILE} yet; say which model these weights belong to, with "
                f"{ref.base_model_flag}"
            )
        return _from_run(ref, home, weights)
    path = Path(ref.text)
    run_dir = run_dir_around(ref.text)
    if ref.base_model is not None:
        checkpoint = str(path.absolute()) if path.exists() else ref.text
        return _given_target(ref, ref.base_model, name=ref.name or ref.base_model, checkpoint=checkpoint)
    if run_dir is not None:
        return _from_run(ref, run_dir, None if run_dir == path.absolute() else str(path.absolute()))
    _refuse(ref, path)
    return _given_target(ref, ref.text, name=ref.name or path.name, checkpoint=None)


def find_weights(path: str, *, model: str, backend: str, params: dict[str, object]) -> Target:
    """Weights by their path, for a base model that is named; what their run's record says of them must agree."""
    named = CheckpointName.parse(path) or _name_of_run(path)
    around = _around(Path(path)) if named is None else [find_run(named.run)]
    # A record beside the weights says which model they belong to; the caller's word counts only without one.
    in_run = any((folder / RUN_RESULT_FILE).is_file() for folder in around)
    target = find_target(ModelRef(text=path, backend=backend, base_model=None if in_run else model, params=params))
    if target.model != model:
        raise EvsysError(f"{path}: these weights belong to model {target.model!r}, not to {model!r}")
    return target


def _name_of_run(text: str) -> CheckpointName | None:
    """The final weights of the run that is called so; None for paths, addresses and names that no run has, which are
    models'. EvsysError that lists the runs where several are called so."""
    if Path(text).exists() or "://" in text or text.startswith(PATH_STARTS):
        return None
    try:
        find_run(text)
    except NoSuchRun:
        return None
    return CheckpointName(run=text, stage=None, point="final", step=None)


def _around(path: Path) -> list[Path]:
    """The path and the folders it lies in, as far up as a run's weights lie below their run."""
    return [path.absolute(), *path.absolute().parents[:3]] if path.exists() else []


def run_dir_around(checkpoint: str | None) -> Path | None:
    """The directory of the run that left these weights; None for a base model, and for weights that were moved."""
    folders = _around(Path(checkpoint)) if checkpoint else []
    return next((folder for folder in folders if (folder / RUN_RESULT_FILE).is_file()), None)


def _refuse(ref: ModelRef, path: Path) -> None:
    """Refuse what is neither a run, nor weights of one, nor a model."""
    text = ref.text
    if text.startswith(TINKER):
        raise EvsysError(f"{text}: say which model these weights belong to, with {ref.base_model_flag}")
    runs = sorted(str(found.parent) for found in path.glob(f"*/{RUN_RESULT_FILE}"))
    if runs:
        raise EvsysError(f"{text} is an experiment; name one of its runs: {', '.join(runs)}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise EvsysError(
            f"{text} is neither a run (it has no {RUN_RESULT_FILE}) nor a model (it has no config.json); for weights "
            f"that were moved out of their run, name the base model with {ref.base_model_flag}"
        )
    if not path.exists() and text.startswith(PATH_STARTS):
        raise EvsysError(f"{text}: no such file or directory")


def _given_target(ref: ModelRef, model: str, *, name: str, checkpoint: str | None) -> Target:
    # An address names its own server; anything else lies on this machine.
    backend = ref.backend or ("tinker" if (checkpoint or "").startswith(TINKER) else DEFAULT_BACKEND)
    return Target(name=name, model=model, backend=backend, backend_params=dict(ref.params), checkpoint=checkpoint)


def _from_run(ref: ModelRef, run_dir: Path, checkpoint: str | None) -> Target:
    """The weights of a run, on the backend and with the base model that its record names."""
    with error_boundary(EvsysError, f"reading {run_dir / RUN_RESULT_FILE}"):
        record = RunRecord.load(run_dir) or RunRecord()
        model = ModelConfig(**record.hparams["model"])
        backend = BackendConfig(**record.hparams.get("backend", {}))
        checkpoint = checkpoint or record.artifacts.get("final_sampler")
    if checkpoint is None:
        raise EvsysError(f"{run_dir}: this run ({record.status}) left no weights to sample from (final_sampler)")
    # Weights of one engine are files that another cannot read, whatever the base model.
    if ref.backend not in (None, backend.kind):
        raise EvsysError(f"these weights were made on backend {backend.kind!r} and cannot move to {ref.backend!r}")
    return Target(
        name=ref.name or record.run,
        model=model.name,
        backend=backend.kind,
        backend_params={**backend.params, **ref.params},
        renderer_name=model.renderer_name,
        checkpoint=checkpoint,
        system_prompt=read_prompt(record.artifacts, run_dir),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenModel:
    """A target on its backend, ready to be sampled from."""

    target: Target
    config: ModelConfig
    service: Any

    async def sampler(self) -> SamplingClient:
        """Over the target's weights, for the event loop that asks."""
        made: SamplingClient = await self.service.create_sampling_client(self.target.checkpoint)
        return made

    def renderer(self) -> Renderer:
        renderer = renderer_for(self.config, self.service.get_tokenizer(), self.target.backend)
        return with_prompt(renderer, self.target.system_prompt)

    @property
    def context_length(self) -> int | None:
        """Tokens that fit; None where the backend does not say."""
        return getattr(self.service, "context_length", None)


def check_target(target: Target) -> None:
    """Refuse a backend, its params or a model's name that can be known to be wrong without loading anything."""
    backend = registry.backends.build(target.backend, target.backend_params)
    ask = getattr(backend, "model_problem", None)
    problem = ask(target.model) if callable(ask) else None
    if problem:
        raise EvsysError(problem)


@contextmanager
def open_model(target: Target) -> Iterator[OpenModel]:
    """The target's backend, prepared for as long as the block runs."""
    backend = registry.backends.build(target.backend, target.backend_params)
    model = ModelConfig(name=target.model, renderer_name=target.renderer_name)
    # A backend wants a run directory; nothing that is written here is kept.
    with tempfile.TemporaryDirectory(prefix="evsys-open-") as folder:
        handles = backend.prepare(model=model, run_dir=Path(folder))
        try:
            if handles.get("service") is None:
                raise BackendError(f"backend {target.backend!r} offers no training service to sample from")
            yield OpenModel(target=target, config=model, service=handles["service"])
        finally:
            backend.teardown(handles)
