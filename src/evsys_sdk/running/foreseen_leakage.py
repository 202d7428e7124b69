"""The leakage audit before a run, for `evsys validate --deep`.

In: a config that is right. Out: a `Problem` per data block and benchmark that has tasks in its rows, for a warning.
Only what is near and cheap is read: files on this disk of up to 100 MB and 100,000 rows, changed by our own transforms.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from evsys_sdk import registry
from evsys_sdk.atomic import to_json
from evsys_sdk.config.files import plain
from evsys_sdk.config.models import DataConfig, ExperimentConfig
from evsys_sdk.config.project import search_folders
from evsys_sdk.config.source import source_of
from evsys_sdk.data.rows import load_rows
from evsys_sdk.data.sources import open_source
from evsys_sdk.data.stores import LocalDataStore
from evsys_sdk.data.workspace import Workspace
from evsys_sdk.errors import EvsysError, Problem
from evsys_sdk.protocols import Row
from evsys_sdk.running.early_checks import recipes_of
from evsys_sdk.running.leakage import audits_of, known_benchmarks

MAX_BYTES, MAX_ROWS = 100_000_000, 100_000


def foreseen_leakage(config: ExperimentConfig) -> list[Problem]:
    """What the runs of this config will warn of, or under `leakage: error` refuse to train on."""
    suites = known_benchmarks(config)[0] if config.leakage != "off" else []
    source, seen, found = source_of(config), set[str](), []
    for place, data in _blocks(config) if suites else ():
        key = to_json(plain(data))
        rows = _cheap_rows(data, config) if key not in seen else None
        seen.add(key)
        for audit in audits_of(rows, suites) if rows else ():
            if not audit.clean:
                found.append(source.located(Problem(path=place, message=f"leakage: {audit.text}")))
    return found


def _blocks(config: ExperimentConfig) -> Iterator[tuple[str, DataConfig]]:
    source = source_of(config)
    for index, run in enumerate(config.all_runs()):
        for recipe in recipes_of(run):
            yield from ((source.in_run(index, place), data) for place, data in recipe.data)


def _cheap_rows(data: DataConfig, config: ExperimentConfig) -> list[Row] | None:
    """The rows as the run will get them; None where that would take long, or somebody else's code."""
    transforms = [registry.transforms.get(spec.kind) for spec in data.transforms]
    ours = all(transform.__module__.startswith("evsys_sdk.") for transform in transforms)
    if not ours or data.source_kind == "hf_dataset" or config.data_store.kind != "local":
        return None
    source, store = source_of(config), LocalDataStore(**config.data_store.params)
    folders, workspace = search_folders(source), Workspace.find(source.folder)
    try:
        opened = open_source(data, store=store, folders=folders, workspace=workspace)
        file = Path(opened.name)
        if file.is_file() and file.stat().st_size > MAX_BYTES:
            return None
        if next(islice(opened.rows(), MAX_ROWS, None), None) is not None:
            return None
        return load_rows(data, store=store, folders=folders, workspace=workspace).rows
    except EvsysError:  # told by the run, with its place
        return None
