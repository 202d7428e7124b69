"""What stored rollouts are graded by: the tasks that they answered, with the verifiers of now.

In: a recorded evaluation, and the config it was made by or a benchmark that is named instead. Out: tasks by id. A
rollout keeps the id of its task and not the task; where no task is at hand, a rollout with a `target` is enough.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evsys_sdk import registry
from evsys_sdk.algorithms.combo import Phase, names_of
from evsys_sdk.config.document import Document
from evsys_sdk.config.files import load_yaml, parse_config
from evsys_sdk.config.metadata import BenchmarkEntry
from evsys_sdk.config.models import DataConfig, ExperimentConfig, RunConfig
from evsys_sdk.config.project import project_root, search_folders
from evsys_sdk.config.source import source_of
from evsys_sdk.data.rows import load_rows
from evsys_sdk.data.workspace import Workspace
from evsys_sdk.data_types import HarborTask, InProcessVerifier, detect_format, from_dict
from evsys_sdk.errors import EvsysError
from evsys_sdk.eval.benchmark import Benchmark
from evsys_sdk.protocols import Rollout, Row
from evsys_sdk.record.stored import TRAIN, StoredEval
from evsys_sdk.running.scoring import find_benchmark
from evsys_sdk.training.prompts import read_prompts

Tasks = dict[str, HarborTask]


@dataclass(slots=True, kw_only=True)
class TaskFinder:
    """Finds the tasks of evaluations; each suite is read once."""

    config: ExperimentConfig | None = None
    benchmark: Benchmark | None = None
    """Asked for by the user: it stands for all others."""
    only_targets: bool = False
    """Another verifier will be asked anyway: the rollouts' own targets do where they have them."""
    suites: dict[tuple[str, str], Benchmark] = field(default_factory=dict)

    def tasks_of(self, stored: StoredEval) -> Tasks:
        """The tasks of an evaluation as they are now, by id."""
        if self.benchmark is not None:
            return _by_id(self.benchmark.tasks)
        if self.config is None:
            return {}
        if stored.split == TRAIN:
            return self._training_tasks(stored, self.config)
        if stored.split == "eval":
            carried = all("target" in rollout.metadata for rollout in stored.rollouts)
            return {} if self.only_targets and carried else self._eval_rows(stored, self.config)
        suite = self.suite_of(stored)
        return _by_id(suite.tasks) if suite else {}

    def suite_of(self, stored: StoredEval) -> Benchmark | None:
        """The benchmark that the config names for this evaluation."""
        if self.benchmark is not None or self.config is None:
            return self.benchmark
        key, entry = (stored.split, stored.name), self.entry_of(stored)
        if entry is not None and key not in self.suites:
            self.suites[key] = find_benchmark(entry, self.config)
        return self.suites.get(key)

    def entry_of(self, stored: StoredEval) -> BenchmarkEntry | None:
        """What the config says of this evaluation."""
        entries = self.config.metadata.benchmark if self.config else []
        return next((one for one in entries if (one.role, one.label) == (stored.split, stored.name)), None)

    def _training_tasks(self, stored: StoredEval, config: ExperimentConfig) -> Tasks:
        data = _training_data(_run_of(stored.run, config), stored.stage)
        return {prompt.task.task_id: prompt.task for prompt in read_prompts(rows_of(data, config), "regrade")}

    def _eval_rows(self, stored: StoredEval, config: ExperimentConfig) -> Tasks:
        run = _run_of(stored.run, config)
        data = run.eval.eval_data or _training_data(run, stored.stage)
        tasks = [from_dict(row) for row in rows_of(data, config) if detect_format(row) == "harbor_task"]
        return _by_id([task for task in tasks if isinstance(task, HarborTask)])


def _by_id(tasks: list[HarborTask]) -> Tasks:
    return {task.task_id: task for task in tasks}


def carried_task(rollout: Rollout) -> HarborTask | None:
    """The task that a rollout brings itself: what was asked, and the answer that was wanted."""
    about = rollout.metadata
    if "target" not in about:
        return None
    verifier = InProcessVerifier(fn_name="exact_match", expected=about["target"])
    return HarborTask(task_id=rollout.task_id, instruction=about.get("prompt") or "", verifier=verifier)


def with_verifier(task: HarborTask, fn_name: str, params: dict[str, Any]) -> HarborTask:
    """The task, judged by another verifier, which expects what the old one did."""
    expected = task.verifier.expected if isinstance(task.verifier, InProcessVerifier) else None
    return replace(task, verifier=InProcessVerifier(fn_name=fn_name, expected=expected, params=params))


def config_of(record: dict[str, Any], given: str | None, beside: Path) -> ExperimentConfig | None:
    """The config that a record was made by: the file that is `given`, else the settings in the record."""
    if given is not None:
        return load_yaml(given)
    if "config" not in record:
        return None
    folder = Path(str(record.get("config_folder") or ""))
    # A record that was taken elsewhere still has its project around it, or the user stands in it.
    homes = [folder, project_root(beside), Path.cwd()] if folder.is_absolute() else [project_root(beside), Path.cwd()]
    home = next(path for path in homes if path.is_dir())
    return parse_config(Document(label=f"the config of {record.get('experiment')}", data=record["config"]), folder=home)


def rows_of(data: DataConfig, config: ExperimentConfig) -> list[Row]:
    """The rows of a data block, as a run would read them."""
    source = source_of(config)
    store = registry.data_stores.build(config.data_store.kind, dict(config.data_store.params))
    workspace = Workspace.find(source.folder)
    return load_rows(data, store=store, folders=search_folders(source), workspace=workspace).rows


def _run_of(name: str, config: ExperimentConfig) -> RunConfig:
    arms = {run.name: run for run in config.all_runs()}
    arm = arms.get(name) or arms.get(re.sub(r"__s\d+$", "", name))  # one seed of an arm
    if arm is None:
        raise EvsysError(f"the config has no run {name!r}; it has: {', '.join(arms)}")
    return arm


def _training_data(run: RunConfig, stage: str | None) -> DataConfig:
    """The data block that a stage of the run was trained on: of a chain, of a combo's phase, else the run's."""
    for name, data in _stages(run):
        if stage is not None and (stage == name or stage.startswith(f"{name}.") or stage.endswith(f".{name}")):
            return data
    if run.data is None:
        raise EvsysError(f"run {run.name!r} has no data for stage {stage!r}")
    return run.data


def _stages(run: RunConfig) -> Iterator[tuple[str, DataConfig]]:
    if run.algorithm.kind == "combo":
        phases = [Phase.model_validate(phase) for phase in run.algorithm.params["phases"]]
        yield from ((name, p.data) for name, p in zip(names_of(phases), phases, strict=True) if p.data is not None)
    for stage in run.continual.stages if run.continual else []:
        yield stage.name, stage.data
