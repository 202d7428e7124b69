"""What of a record is to be graded anew.

In: the path that a user named: a run's directory, an experiment's (or one of its two files), or a file of rollouts.
Out: the evaluations in it, the config they were made by as far as the record has it, and where a new record goes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evsys_sdk.config.names import directory_name
from evsys_sdk.constants import EXPERIMENT_RESULT_FILE, JOURNAL_FILE, MODEL_ROLLOUTS_FILE, RUN_RESULT_FILE
from evsys_sdk.errors import EvsysError
from evsys_sdk.record import stored
from evsys_sdk.record.stored import ROLLOUTS_FILE, StoredEval


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A record, and what of it can be graded anew."""

    evals: list[StoredEval]
    regrades: Path
    """The folder that new records of it are made in, beside the old."""
    training: list[StoredEval] = field(default_factory=list)
    experiment: dict[str, Any] = field(default_factory=dict)
    """Its `experiment_result.json`, if there is one: the config is in it."""
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name of the run -> its `run_result.json`."""


def find_record(target: Path) -> Found:
    """What lies at `target`, or an error that says what was expected there."""
    if target.is_file():
        return _from_file(target)
    if not target.is_dir():
        raise EvsysError(f"there is nothing at {target}")
    experiments = stored.experiments_in(target)
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


def _from_file(file: Path) -> Found:
    for kind in (JOURNAL_FILE, EXPERIMENT_RESULT_FILE):
        if file.name.endswith(f".{kind}"):
            return _from_experiment(file.parent, file.name.removesuffix(f".{kind}"))
    if not file.name.endswith((".jsonl", ".jsonl.gz")):
        raise EvsysError(f"{file} is no file of rollouts: those are .jsonl, one rollout per line")
    file = file.absolute()
    home = next((folder for folder in file.parents if (folder / RUN_RESULT_FILE).is_file()), None)
    result = stored.run_result(home) if home else {}
    of_models = file.name.removesuffix(f".{MODEL_ROLLOUTS_FILE}")
    evals = stored.evals_in_file(file, str(result.get("run") or file.parent.name))
    return Found(
        evals=[replace(one, metrics=stored.metrics_beside(file)) for one in evals],
        regrades=file.with_name(f"{file.name.removesuffix('.gz').removesuffix('.jsonl')}.regrades"),
        experiment=_experiment_of(home, result) if home else stored.experiment_result(file.parent, of_models),
        runs={str(result["run"]): result} if result else {},
    )


def _from_run(run_dir: Path) -> Found:
    result = stored.run_result(run_dir)
    name = str(result.get("run") or run_dir.absolute().name)
    return Found(
        evals=_evals_of_run(run_dir, name, result),
        training=stored.training_rollouts(run_dir, name),
        regrades=run_dir / "regrades",
        experiment=_experiment_of(run_dir, result),
        runs={name: result},
    )


def _evals_of_run(run_dir: Path, name: str, result: dict[str, Any]) -> list[StoredEval]:
    for journal, run_id in _journalled(run_dir.absolute(), result):
        found = stored.evals_in_journal(journal, {run_id: name})
        if found:
            return found
    return stored.evals_in_logs(run_dir, name)


def _journalled(run_dir: Path, result: dict[str, Any]) -> list[tuple[Path, str]]:
    """The journals that tell of this run, and its id in them."""
    if result:
        path = stored.journal_of(run_dir.parent, directory_name(str(result["experiment"])))
        return [(path, str(result["run_id"]))] if path.is_file() else []
    journals = [stored.journal_of(run_dir.parent, name) for name in stored.experiments_in(run_dir.parent)]
    return [
        (path, run_id)
        for path in journals
        if path.is_file()
        for run_id in stored.run_ids_in(path)
        if _may_lie_in(run_dir, *run_id.partition("/")[::2])
    ]


def _may_lie_in(run_dir: Path, experiment: str, run: str) -> bool:
    return run_dir.name in (directory_name(run), f"{directory_name(run)}@{directory_name(experiment)}")


def _experiment_of(run_dir: Path, result: dict[str, Any]) -> dict[str, Any]:
    if not result:
        return {}
    return stored.experiment_result(run_dir.absolute().parent, directory_name(str(result["experiment"])))


def _from_experiment(folder: Path, name: str) -> Found:
    summary, journal = stored.experiment_result(folder, name), stored.journal_of(folder, name)
    run_ids = stored.run_ids_in(journal) if journal.is_file() else []
    prefix = f"{summary['experiment']}/" if summary else ""
    names = {run: run.removeprefix(prefix) if prefix else run.partition("/")[2] for run in run_ids}
    if not names:
        dirs = stored.runs_with_records(folder, str(summary.get("experiment")))
        results = {str(stored.run_result(run_dir)["run"]): run_dir for run_dir in dirs}
    else:
        given = {str(run["run_id"]): Path(str(run.get("run_dir") or "")).name for run in summary.get("runs") or []}
        results = {run: folder / (given.get(run_id) or directory_name(run)) for run_id, run in names.items()}
    evals = stored.evals_in_journal(journal, names) if names else []
    return Found(
        evals=evals or [found for run, path in results.items() for found in stored.evals_in_logs(path, run)],
        training=[found for run, path in results.items() for found in stored.training_rollouts(path, run)],
        regrades=folder / f"{name}.regrades",
        experiment=summary,
        runs={run: stored.run_result(path) for run, path in results.items()},
    )
