"""One attempt at a run: what it has built, trained and recorded so far.

In: a `RunPlan` and its run directory. Out: a `RunAttempt`, which the runner, the evaluations and the contamination
audit share. Extensions are built here with their places in the config, so that bad params can be named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evsys_sdk import registry
from evsys_sdk.config.project import search_folders
from evsys_sdk.config.schema import DataConfig
from evsys_sdk.config.yaml_io import source_of
from evsys_sdk.data.rows import LoadedRows, content_sha256, load_rows
from evsys_sdk.data.workspace import Workspace
from evsys_sdk.errors import FOREIGN, BackendError
from evsys_sdk.protocols import DataStore, RunContext, RunResult
from evsys_sdk.record.journal import IDENTITY, RunJournal
from evsys_sdk.record.models import RunRecorder, in_order
from evsys_sdk.run.plan import ExtensionFactory, NotingJournal, ReadNotes, RunPlan, read_before
from evsys_sdk.run.resume import begin_or_resume, end_key, run_identity
from evsys_sdk.training_api import SamplingClient, TrainingService


def new_record(plan: RunPlan, run_dir: Path) -> RunRecorder:
    """The record of a run about which nothing is known yet."""
    folder = source_of(plan.experiment).folder
    options = {"max_steps": plan.max_steps, "max_tasks": plan.max_tasks}
    return RunRecorder(plan.experiment, plan.run, plan.run_id, run_dir, folder=folder, options=options)


@dataclass(slots=True)
class RunAttempt:
    """The state of one run while it executes."""

    plan: RunPlan
    record: RunRecorder
    journal: RunJournal
    resumed: bool
    """Whether it continues an interrupted attempt."""
    extensions: ExtensionFactory
    result: RunResult
    """The result so far: what was trained stays in the record even if scoring is interrupted."""
    handles: dict[str, Any] = field(default_factory=dict)
    """What the backend's `prepare` returned."""
    ctx: RunContext | None = None
    is_announced: bool = False
    """Whether callbacks had their `on_run_start`."""

    @classmethod
    def begin(cls, plan: RunPlan, record: RunRecorder) -> RunAttempt:
        """Resume an interrupted attempt, or set it aside and start over."""
        journal, resumed = begin_or_resume(
            plan.journal, plan.run_id, record.config_hash(), record.run_dir, fresh=plan.fresh
        )
        extensions = ExtensionFactory()
        journal = NotingJournal(journal, ReadNotes(journal, extensions.read))
        # Other experiments find the run by this event, and reuse it.
        identity = run_identity(plan, record)
        journal.add(IDENTITY, {"run_dir": str(record.run_dir.absolute())}, at=0, key=identity)
        return cls(plan, record, journal, resumed, extensions, RunResult(run_id=plan.run_id, status="completed"))

    def load_rows(self, data: DataConfig, place: str, store: DataStore) -> LoadedRows:
        """The rows of a data block, transformed; their source and hash go into the record."""
        source = source_of(self.plan.experiment)
        transforms = [
            (spec.kind, self.extensions.build(registry.transforms, spec, f"{place}.transforms[{index}]"))
            for index, spec in enumerate(data.transforms)
        ]
        loaded = load_rows(
            data,
            store=store,
            folders=search_folders(source),
            workspace=Workspace.find(source.folder),
            transforms=transforms,
            cache=self.plan.inputs.rows,
        )
        cache = self.plan.inputs.rows
        content = content_sha256(loaded.rows) if cache is None else cache.content_of(data, loaded.rows)
        self.record.add_data(place, loaded, content)
        return loaded

    def clean_up(self, what: str, act: Callable[[], None]) -> None:
        """Run `act`; its failure is a warning, because it must not cost what the run has achieved."""
        try:
            act()
        except FOREIGN as exc:
            self.record.warnings.append(f"{what} failed: {type(exc).__name__}: {exc}")

    def announce_start(self) -> None:
        """Call `on_run_start`, once."""
        if self.ctx is not None and not self.is_announced:
            self.is_announced = True
            self.plan.callbacks.on_run_start(self.ctx)

    def announce_end(self, result: RunResult) -> None:
        """Call `on_run_end`, after an `on_run_start` in any case."""
        result.evals = self.record.evals = in_order(self.record.evals)
        if self.ctx is not None:
            self.announce_start()
            self.plan.callbacks.on_run_end(self.ctx, result)
        self.record.warnings += self.plan.callbacks.errors_of(self.plan.run_id)

    def end(self, result: RunResult, *, unread: list[str]) -> RunResult:
        """Write the record, and after it the journal's last event of the attempt."""
        self.record.evals = in_order(self.record.evals)
        # The event comes last: a journal that says `completed` promises a whole record, on which reuse relies.
        written = self.record.write(result, unread=unread)
        self.journal.add("end", {"status": result.status, "error": result.error}, at=0, key=end_key(result))
        return written

    @property
    def service(self) -> TrainingService | None:
        return self.handles.get("service")

    def require_service(self) -> TrainingService:
        if self.service is None:
            raise BackendError(f"backend {self.plan.run.backend.kind!r} offers no training service to sample from")
        return self.service

    async def sampler_of(self, trained: RunResult) -> SamplingClient:
        """A sampler over the weights that training left."""
        service, path = self.require_service(), trained.artifacts.get("final_sampler")
        if path is None:
            raise BackendError("there are no weights to sample from: the algorithm left no `final_sampler` artifact")
        return await service.create_sampling_client(path)

    def unread_settings(self) -> list[str]:
        """Params of this run's extensions that were given and never read, in any process, and settings that have no
        effect, by their names in the config file."""
        source = source_of(self.plan.experiment)
        self.extensions.note_read(read_before(self.journal))
        found = []
        for path in self.extensions.unread():
            shared = path.startswith(("data_store.", "log_store."))
            found.append(path if shared else source.in_run(self.plan.index, path))
        own, runs = f"runs[{self.plan.index}].", "runs["  # what has no effect in another arm belongs to its record
        ignored = [path for path in self.plan.ignored if not path.startswith(runs) or path.startswith(own)]
        return list(dict.fromkeys([*found, *ignored]))
