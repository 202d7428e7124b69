"""An experiment makes itself known to the workspace, so that `evsys history` finds it.

In: a config and where its record will be. Out: a line in the index of the project (`.evsys/`). Nothing here can fail a
run: an index that cannot be written is done without.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evsys_sdk.config.files import plain
from evsys_sdk.config.models import ExperimentConfig
from evsys_sdk.config.names import REHEARSALS
from evsys_sdk.config.root import project_root
from evsys_sdk.config.source import source_of
from evsys_sdk.constants import WORKSPACE_DIR
from evsys_sdk.logs import get_logger
from evsys_sdk.record.digest import digest_of
from evsys_sdk.record.index import note_results, note_start

CONTENTS = ("contents of ", "tasks of ", "code of ")


def contents(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Of what an experiment was launched with, the hashes: rows, tasks, code."""
    return {key: value for key, value in facts.items() if key.startswith(CONTENTS)}


def workspaces_of(config: ExperimentConfig) -> list[Path]:
    """The projects around the current folder and around the config; outside of any, the current folder's."""
    roots = dict.fromkeys([project_root(Path.cwd()), project_root(source_of(config).folder)])
    marked = [root for root in roots if (root / WORKSPACE_DIR).is_dir() or (root / "pyproject.toml").is_file()]
    return [root / WORKSPACE_DIR for root in marked or [Path.cwd()]]


def register_start(config: ExperimentConfig, record: Path, facts: Mapping[str, Any]) -> None:
    """It has begun; rehearsals are not told."""
    told = {"experiment": config.name, "config": plain(config), "contents": contents(facts)}
    _register(config, record, told, ended=False)


def register_end(config: ExperimentConfig, record: Path, summary: Mapping[str, Any]) -> None:
    """Its record is on disk."""
    _register(config, record, summary, ended=True)


def _register(config: ExperimentConfig, record: Path, told: Mapping[str, Any], *, ended: bool) -> None:
    if record.parent.name == REHEARSALS:
        return
    try:
        digest = digest_of(told)
        for workspace in workspaces_of(config):
            if ended:
                note_results(workspace, {record: digest})
            else:
                note_start(workspace, record, digest, now=time.time())
    except Exception as exc:  # history is a convenience; the run matters
        get_logger(__name__).warning("%s is not in evsys history: %s", config.name, exc)
