"""What stored rollouts are graded by: the tasks that they answered, with the verifiers of now.

In: a recorded evaluation, and the config it was made by or a benchmark that is named instead. Out: tasks by id. A
rollout keeps the id of its task and not the task; where no task is at hand, a rollout with a `target` is enough.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evsys_sdk import registry
from evsys_sdk.algorithms.combo import Phase, names_of
from evsys_sdk.config.load import load_yaml, parse_config
from evsys_sdk.config.metadata import BenchmarkEntry
from evsys_sdk.config.project import project_root, search_folders
from evsys_sdk.config.schema import DataConfig, ExperimentConfig, RunConfig
from evsys_sdk.config.sweep import directory_name
from evsys_sdk.config.yaml_io import Document, source_of
from evsys_sdk.constants import EXPERIMENT_RESULT_FILE, JOURNAL_FILE, MODEL_ROLLOUTS_FILE, RUN_RESULT_FILE
from evsys_sdk.data.rows import load_rows
from evsys_sdk.data.workspace import Workspace
from evsys_sdk.data_types import HarborTask, InProcessVerifier, detect_format, from_dict
from evsys_sdk.errors import EvsysError
from evsys_sdk.eval.benchmark import Benchmark, find_benchmark
from evsys_sdk.protocols import Rollout, Row
from evsys_sdk.record import rollouts
from evsys_sdk.record.models import ExperimentRecord, RunRecord
from evsys_sdk.record.rollouts import ROLLOUTS_FILE, TRAIN, StoredEval
from evsys_sdk.training.prompts import read_prompts

# What of a record is to be graded anew.
#
# In: the path that a user named: a run's directory, an experiment's (or one of its two files), or a file of rollouts.
# Out: the evaluations in it, the config they were made by as far as the record has it, and where a new record goes.


@dataclass(frozen=True, slots=True, kw_only=True)
class GradableRecord:
    """A record, and what of it can be graded anew."""

    evals: list[StoredEval]
    regrades: Path
    """The folder that new records of it are made in, beside the old."""
    training: list[StoredEval] = field(default_factory=list)
    experiment: ExperimentRecord | None = None
    """Of the experiment, if it has one: the config is in it."""
    runs: dict[str, RunRecord] = field(default_factory=dict)
    """By the run's name."""


def find_record(target: Path) -> GradableRecord:
    """What lies at `target`, or an error that says what was expected there."""
    if target.is_file():
        return _from_file(target)
    if not target.is_dir():
        raise EvsysError(f"there is nothing at {target}")
    experiments = rollouts.experiments_in(target)
    if len(experiments) > 1:
        named = " or ".join(f"evsys regrade {target / name}.{JOURNAL_FILE}" for name in experiments[:3])
        raise EvsysError(f"{target} holds {len(experiments)} experiments; say which: {named}")
    if experiments:
        return _from_experiment(target, experiments[0])
    if (target / RUN_RESULT_FILE).is_file() or (target / "logs").is_dir():
        return _from_run(target)
    if (target / ROLLOUTS_FILE).is_file():
        return _from_file(target / ROLLOUTS_FILE)
    raise EvsysError(
        f"{target} is no record: expected a run's directory ({RUN_RESULT_FILE}, logs/), an experiment's "
        f"(<name>.{JOURNAL_FILE}) or a file of rollouts (.jsonl)"
    )


def _from_file(file: Path) -> GradableRecord:
    for kind in (JOURNAL_FILE, EXPERIMENT_RESULT_FILE):
        if file.name.endswith(f".{kind}"):
            return _from_experiment(file.parent, file.name.removesuffix(f".{kind}"))
    if not file.name.endswith((".jsonl", ".jsonl.gz")):
        raise EvsysError(f"{file} is no file of rollouts: those are .jsonl, one rollout per line")
    file = file.absolute()
    home = next((folder for folder in file.parents if (folder / RUN_RESULT_FILE).is_file()), None)
    result = RunRecord.load(home) if home else None
    of_models = file.name.removesuffix(f".{MODEL_ROLLOUTS_FILE}")
    evals = rollouts.evals_in_file(file, result.run if result else file.parent.name)
    return GradableRecord(
        evals=[replace(one, metrics=rollouts.metrics_beside(file)) for one in evals],
        regrades=file.with_name(f"{file.name.removesuffix('.gz').removesuffix('.jsonl')}.regrades"),
        experiment=_experiment_of(home, result) if home else rollouts.experiment_result(file.parent, of_models),
        runs={result.run: result} if result else {},
    )


def _from_run(run_dir: Path) -> GradableRecord:
    result = RunRecord.load(run_dir)
    name = result.run if result and result.run else run_dir.absolute().name
    evals: list[StoredEval] = []
    for journal, run_id in _journals_of(run_dir.absolute(), result):
        evals = evals or rollouts.evals_in_journal(journal, {run_id: name})
    return GradableRecord(
        evals=evals or rollouts.evals_in_logs(run_dir, name),
        training=rollouts.training_rollouts(run_dir, name),
        regrades=run_dir / "regrades",
        experiment=_experiment_of(run_dir, result),
        runs={name: result} if result else {},
    )


def _journals_of(run_dir: Path, result: RunRecord | None) -> list[tuple[Path, str]]:
    """The journals that tell of this run, and its id in them."""
    if result:
        path = rollouts.journal_of(run_dir.parent, directory_name(result.experiment))
        return [(path, result.run_id)] if path.is_file() else []
    found = []
    for name in rollouts.experiments_in(run_dir.parent):
        path = rollouts.journal_of(run_dir.parent, name)
        for run_id in rollouts.run_ids_in(path) if path.is_file() else ():
            experiment, _, run = run_id.partition("/")
            if run_dir.name in (directory_name(run), f"{directory_name(run)}@{directory_name(experiment)}"):
                found.append((path, run_id))
    return found


def _experiment_of(run_dir: Path, result: RunRecord | None) -> ExperimentRecord | None:
    if not result:
        return None
    return rollouts.experiment_result(run_dir.absolute().parent, directory_name(result.experiment))


def _from_experiment(folder: Path, name: str) -> GradableRecord:
    summary, journal = rollouts.experiment_result(folder, name), rollouts.journal_of(folder, name)
    run_ids = rollouts.run_ids_in(journal) if journal.is_file() else []
    prefix = f"{summary.experiment}/" if summary else ""
    names = {run: run.removeprefix(prefix) if prefix else run.partition("/")[2] for run in run_ids}
    if not names:
        found = rollouts.runs_with_records(folder, summary.experiment if summary else "")
        results = {record.run: run_dir for run_dir, record in found}
    else:
        given = {run.run_id: Path(run.run_dir or "").name for run in summary.runs} if summary else {}
        results = {run: folder / (given.get(run_id) or directory_name(run)) for run_id, run in names.items()}
    evals = rollouts.evals_in_journal(journal, names) if names else []
    return GradableRecord(
        evals=evals or [found for run, path in results.items() for found in rollouts.evals_in_logs(path, run)],
        training=[found for run, path in results.items() for found in rollouts.training_rollouts(path, run)],
        regrades=folder / f"{name}.regrades",
        experiment=summary,
        runs={run: record for run, path in results.items() if (record := RunRecord.load(path))},
    )


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


def config_of(record: ExperimentRecord | None, given: str | None, beside: Path) -> ExperimentConfig | None:
    """The config that a record was made by: the file that is `given`, else the settings in the record."""
    if given is not None:
        return load_yaml(given)
    if record is None or not record.config:
        return None
    folder = Path(record.config_folder)
    # A record that was taken elsewhere still has its project around it, or the user stands in it.
    homes = [folder, project_root(beside), Path.cwd()] if folder.is_absolute() else [project_root(beside), Path.cwd()]
    home = next(path for path in homes if path.is_dir())
    return parse_config(Document(label=f"the config of {record.experiment}", data=record.config), folder=home)


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
    stages = [(one.name, one.data) for one in run.continual.stages] if run.continual else []
    if run.algorithm.kind == "combo":
        phases = [Phase.model_validate(phase) for phase in run.algorithm.params["phases"]]
        named = zip(names_of(phases), phases, strict=True)
        stages = [*((name, phase.data) for name, phase in named if phase.data is not None), *stages]
    for name, data in stages:
        if stage is not None and (stage == name or stage.startswith(f"{name}.") or stage.endswith(f".{name}")):
            return data
    if run.data is None:
        raise EvsysError(f"run {run.name!r} has no data for stage {stage!r}")
    return run.data
