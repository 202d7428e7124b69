"""An experiment makes itself known: to the workspace, so that `evsys history` finds it, and beside its record, so that
`evsys status` and `evsys stop` know its process.

In: a config and where its record will be. Out: a line in the index of the project (`.evsys/`), and a launch record.
Nothing here can fail a run: what cannot be written is done without.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evsys_sdk import __version__
from evsys_sdk.config.load import plain
from evsys_sdk.config.project import project_root
from evsys_sdk.config.schema import ExperimentConfig
from evsys_sdk.config.sweep import REHEARSALS
from evsys_sdk.config.yaml_io import source_of
from evsys_sdk.constants import WORKSPACE_DIR
from evsys_sdk.history.digest import digest_of
from evsys_sdk.history.index import note_results, note_start
from evsys_sdk.logs import get_logger
from evsys_sdk.record.processes import ExperimentProcess, now_text, this_process, write_launch
from evsys_sdk.run.budget import limits_of

CONTENTS = ("contents of ", "tasks of ", "code of ")


def contents(facts: Mapping[str, object]) -> dict[str, str]:
    """Of what an experiment was launched with, the hashes: rows, tasks, code."""
    return {key: str(value) for key, value in facts.items() if key.startswith(CONTENTS)}


def workspaces_of(config: ExperimentConfig) -> list[Path]:
    """The projects around the current folder and around the config; outside of any, the current folder's."""
    roots = dict.fromkeys([project_root(Path.cwd()), project_root(source_of(config).folder)])
    marked = [root for root in roots if (root / WORKSPACE_DIR).is_dir() or (root / "pyproject.toml").is_file()]
    return [root / WORKSPACE_DIR for root in marked or [Path.cwd()]]


def register_start(config: ExperimentConfig, record: Path, facts: Mapping[str, object]) -> None:
    """Note in the history that it has begun; rehearsals are not noted."""
    summary = {"experiment": config.name, "config": plain(config), "contents": contents(facts)}
    _register(config, record, summary, ended=False)


def register_end(config: ExperimentConfig, record: Path, summary: Mapping[str, Any]) -> None:
    """Note in the registry that the experiment's record is on disk."""
    _register(config, record, summary, ended=True)


def _register(config: ExperimentConfig, record: Path, summary: Mapping[str, Any], *, ended: bool) -> None:
    if record.parent.name == REHEARSALS:
        return
    try:
        digest = digest_of(summary)
        for workspace in workspaces_of(config):
            if ended:
                note_results(workspace, {record: digest})
            else:
                note_start(workspace, record, digest, now=time.time())
    except Exception as exc:  # history is a convenience; the run matters
        get_logger(__name__).warning("%s is not in evsys history: %s", config.name, exc)


def note_launch(
    config: ExperimentConfig,
    record: Path,
    *,
    command: Sequence[str] | None = None,
    log: Path | None = None,
    detached: bool = False,
) -> ExperimentProcess:
    """Write beside the record that this process has the experiment."""
    process = this_process()
    launch = ExperimentProcess(
        experiment=config.name,
        pid=process.pid,
        host=process.host,
        born=process.born,
        command=list(command or ["python", *sys.argv]),
        cwd=str(Path.cwd()),
        config=source_of(config).label,
        output_dir=str(record.parent.absolute()),
        record=str(record.absolute()),
        log=None if log is None else str(log.absolute()),
        started=now_text(),
        detached=detached,
        # Off the main thread `stop_on_signals` cannot install handlers, and a signal would not stop the experiment.
        stoppable=threading.current_thread() is threading.main_thread(),
        n_runs=None if config.search else len(config.all_runs()) * config.n_repeats,
        budget=limits_of(config.budget, config.search.budget if config.search else None),
        evsys=__version__,
    )
    try:
        write_launch(launch)
    except OSError as exc:
        say = "evsys status and evsys stop will not know %s: its launch record cannot be written (%s)"
        get_logger(__name__).warning(say, config.name, exc.strerror)
    return launch
