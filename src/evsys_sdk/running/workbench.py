"""What one run works with: its stores, its rows, its extensions, its weights.

In: a `RunPlan`. Out: the pieces the runner puts together, each built with its place in the config, so that unread
settings and bad params can be named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evsys_sdk import registry
from evsys_sdk.config.files import plain
from evsys_sdk.config.models import DataConfig, ExperimentConfig, RunConfig
from evsys_sdk.config.project import path_folders, search_folders
from evsys_sdk.config.reading import forget, note_read, read, unread
from evsys_sdk.config.source import source_of
from evsys_sdk.data.rows import LoadedRows, load_rows
from evsys_sdk.data.workspace import Workspace
from evsys_sdk.errors import FOREIGN, BackendError
from evsys_sdk.protocols import DataStore, Renderer, RunContext, RunResult, RunStatus
from evsys_sdk.record.callbacks import CallbackList
from evsys_sdk.record.journal import EXPERIMENT, Journal, RunJournal
from evsys_sdk.record.log_stores import with_log_dir
from evsys_sdk.record.run_record import RunRecord
from evsys_sdk.redaction import redact_data
from evsys_sdk.running.attempts import begin_or_resume, finished, refuse_other_data, stands_at
from evsys_sdk.running.budget import Budget
from evsys_sdk.running.checkpoint_names import Weights, checkpoint_path
from evsys_sdk.running.interrupts import StopFlag
from evsys_sdk.running.leakage import audit_block
from evsys_sdk.running.live import StoppableLogStore
from evsys_sdk.running.parts import Parts
from evsys_sdk.running.reads import NotingJournal, ReadNotes, read_before, shared_reads
from evsys_sdk.running.reuse import adopt, find_identical, identity_of, note_identity
from evsys_sdk.surface import SamplingClient, TrainingService


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """One run as the experiment wants it."""

    experiment: ExperimentConfig
    run: RunConfig
    index: int
    """Which arm of the experiment this is; for places in messages."""
    run_dir: Path
    callbacks: CallbackList
    stop: StopFlag
    journal: Journal
    fresh: bool = False
    """Begin anew even where an interrupted attempt could be taken up."""
    max_steps: int | None = None
    max_tasks: int | None = None
    budget: Budget = field(default_factory=Budget)
    contents: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the rows, tasks and code that the settings name."""
    ignored: tuple[str, ...] = ()
    """Settings that by the meaning of others are not looked at; they go into the record."""
    pause_at: int | None = None
    """Stop after this step, to go on another time; it is no part of what the run is."""

    @property
    def run_id(self) -> str:
        return f"{self.experiment.name}/{self.run.name}"

    def came_to_nothing(self, status: RunStatus, error: str) -> RunResult:
        """The result of a run that left no record."""
        about = {"run_name": self.run.name, "seed": self.run.seed}
        return RunResult(run_id=self.run_id, status=status, error=error, extras=about)


@dataclass(slots=True)
class Workbench:
    """One run's tools, made when asked for."""

    plan: RunPlan
    record: RunRecord
    result: RunResult
    """What the run has come to so far: what was trained stays in the record even if scoring is interrupted."""
    parts: Parts = field(default_factory=Parts)
    handles: dict[str, Any] = field(default_factory=dict)
    """What the backend's `prepare` gave."""
    ctx: RunContext | None = None
    announced: bool = False
    journal: RunJournal = field(init=False)
    resumed: bool = False

    @classmethod
    def for_plan(cls, plan: RunPlan, run_dir: Path) -> Workbench:
        forget(plan.run)
        folder = source_of(plan.experiment).folder
        options = {"max_steps": plan.max_steps, "max_tasks": plan.max_tasks}
        record = RunRecord(plan.experiment, plan.run, plan.run_id, run_dir, folder=folder, options=options)
        return cls(plan, record, RunResult(run_id=plan.run_id, status="completed"))

    def finished_before(self) -> RunResult | None:
        """The result of this very run, if it came to its end in an earlier process."""
        if self.plan.fresh:
            return None
        plan, run_dir, fingerprint = self.plan, self.record.run_dir, self.record.config_hash()
        earlier = plan.journal.latest(plan.run_id, fingerprint)
        if earlier is None:
            is_child = plan.experiment.parent_experiment_id is not None
            same = find_identical(self.identity, plan.journal.path, is_child=is_child)
            earlier = adopt(same, plan.journal, plan.run_id, fingerprint, run_dir) if same else None
        if earlier is None or earlier.completed:
            return finished(earlier, run_dir) if earlier is not None else None
        return None if plan.pause_at is None else stands_at(earlier, run_dir, plan.pause_at)

    @property
    def identity(self) -> str:
        """What makes a run of another experiment the same as this one."""
        record = self.record
        return identity_of(plain(self.plan.run), {**record.shared_settings(), **record.options}, self.plan.contents)

    def begin_attempt(self) -> None:
        """Take up what an interrupted attempt left, or begin anew and set it aside."""
        attempt, self.resumed = begin_or_resume(
            self.plan.journal,
            self.plan.run_id,
            self.record.config_hash(),
            self.record.run_dir,
            fresh=self.plan.fresh,
        )
        self.journal = NotingJournal(attempt, self._read_notes(attempt))
        note_identity(self.journal, self.identity, self.record.run_dir)

    def _read_notes(self, attempt: RunJournal) -> list[ReadNotes]:
        """What this run reads of its own settings, and of those that it shares with the others."""
        plan, shared = self.plan, self.plan.journal.latest(EXPERIMENT)
        own = ReadNotes(attempt, lambda: [*read(plan.run), *self.parts.read()])
        return [own, ReadNotes(shared, lambda: shared_reads(plan.experiment))] if shared else [own]

    def refuse_other_data(self) -> None:
        refuse_other_data(self.journal, self.record.data)

    def log_store(self) -> StoppableLogStore:
        spec = self.plan.experiment.log_store
        params = with_log_dir(spec.kind, dict(spec.params), self.record.run_dir)
        store = self.parts.build(registry.log_stores, spec, "log_store", params)
        return StoppableLogStore(store, self.plan.stop)

    def data_store(self) -> DataStore:
        store: DataStore = self.parts.build(registry.data_stores, self.plan.experiment.data_store, "data_store")
        return store

    def backend(self) -> Any:
        return self.parts.build(registry.backends, self.plan.run.backend, "backend")

    def algorithm(self) -> Any:
        return self.parts.build(registry.algorithms, self.plan.run.algorithm, "algorithm")

    def load(self, data: DataConfig, place: str, store: DataStore) -> LoadedRows:
        """The rows of a data block, transformed; where they came from goes into the record."""
        source = source_of(self.plan.experiment)
        transforms = [
            (spec.kind, self.parts.build(registry.transforms, spec, f"{place}.transforms[{index}]"))
            for index, spec in enumerate(data.transforms)
        ]
        loaded = load_rows(
            data,
            store=store,
            folders=search_folders(source),
            workspace=Workspace.find(source.folder),
            transforms=transforms,
        )
        self.record.add_data(place, loaded)
        return loaded

    def stages(self) -> Iterator[tuple[str | None, DataConfig, str]]:
        """Name, data and place of each stage; a run without `continual` is one nameless stage."""
        run = self.plan.run
        if run.continual is None:
            assert run.data is not None
            yield None, run.data, "data"
            return
        for index, stage in enumerate(run.continual.stages):
            yield stage.name, stage.data, f"continual.stages[{index}].data"

    def context(self, backend: Any, data_store: DataStore, log_store: StoppableLogStore) -> RunContext:
        plan, run = self.plan, self.plan.run
        self.ctx = RunContext(
            run_id=plan.run_id,
            output_dir=self.record.run_dir,
            config=plan.experiment,
            data_store=data_store,
            log_store=log_store,
            backend=backend,
            seed=run.seed,
            max_steps=plan.max_steps,
            start_from=self._start_weights(),
            resume=self.resumed,
            extras={
                "backend_handles": self.handles,
                "backend_kind": run.backend.kind,
                "model_name": run.model.name,
                "run_name": run.name,
                "run_config": redact_data(plain(run)),
                "tags": list(run.tags),
                "load_rows": lambda data, place: audit_block(self, place, self.load(data, place, data_store)).rows,
                "checkpoint_path": self._checkpoint,
                "build_algorithm": lambda spec, place: self.parts.build(registry.algorithms, spec, place),
            },
        )
        return self.ctx

    def _start_weights(self) -> str | None:
        start = self.plan.run.model.load_checkpoint_path
        return None if start is None else self._checkpoint(start, "state")

    def _checkpoint(self, text: str, weights: Weights) -> str:
        return checkpoint_path(text, weights, search_folders(source_of(self.plan.experiment)))

    def tidy(self, what: str, act: Callable[[], None]) -> None:
        """Clean up; what goes wrong here must not take back what the run has achieved, so it is a warning."""
        try:
            act()
        except FOREIGN as exc:
            self.record.warnings.append(f"{what} failed: {type(exc).__name__}: {exc}")

    def announce_start(self) -> None:
        """Tell the callbacks, once, that the run begins."""
        if self.ctx is not None and not self.announced:
            self.announced = True
            self.plan.callbacks.on_run_start(self.ctx)

    def announce_end(self, result: RunResult) -> None:
        """Tell the callbacks what came of the run; whoever hears of an end has heard of a start."""
        if self.ctx is not None:
            self.announce_start()
            self.plan.callbacks.on_run_end(self.ctx, result)
        self.record.warnings += self.plan.callbacks.errors_of(self.plan.run_id)

    @property
    def service(self) -> TrainingService | None:
        return self.handles.get("service")

    def renderer_with(self, template: str) -> Renderer:
        """A renderer by another chat template than the model's own."""
        from evsys_sdk.training.templates import renderer_with

        if self.service is None:
            raise BackendError(f"backend {self.plan.run.backend.kind!r} has no tokenizer to render with")
        return renderer_with(template, self.service.get_tokenizer(), path_folders(source_of(self.plan.experiment)))

    async def sampler_of(self, trained: RunResult) -> SamplingClient:
        """A sampler over the weights that training left."""
        path = trained.artifacts.get("final_sampler")
        if self.service is None:
            raise BackendError(f"backend {self.plan.run.backend.kind!r} offers no training service to sample from")
        if path is None:
            raise BackendError("there are no weights to sample from: the algorithm left no `final_sampler` artifact")
        return await self.service.create_sampling_client(path)

    def unread_settings(self) -> list[str]:
        """Settings of this run that were given and that nothing read, in this process or in one before it, by their
        names in the config file."""
        source, before = source_of(self.plan.experiment), read_before(self.journal)
        note_read(self.plan.run, before)
        self.parts.note_read(before)
        found = [source.in_run(self.plan.index, path) for path in unread(self.plan.run)]
        for path in self.parts.unread():
            shared = path.startswith(("data_store.", "log_store."))
            found.append(path if shared else source.in_run(self.plan.index, path))
        return list(dict.fromkeys([*found, *self.plan.ignored]))
