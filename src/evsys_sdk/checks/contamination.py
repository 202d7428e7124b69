"""The leakage audit before a run, for `evsys validate` and for the start of an experiment.

In: a config that is right. Out: a `Problem` per data block and benchmark that has tasks in its rows: a warning, or
under `leakage: error` what the experiment is refused for. Only what is near and cheap is read: files on this disk of up
to 100 MB and 100,000 rows, changed by our own transforms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from evsys_sdk import registry
from evsys_sdk.checks.blocks import recipes_of
from evsys_sdk.config.load import plain
from evsys_sdk.config.project import search_folders
from evsys_sdk.config.schema import DataConfig, ExperimentConfig
from evsys_sdk.config.yaml_io import source_of
from evsys_sdk.contamination.audit import (
    EVAL_DATA,
    Audit,
    KnownBenchmark,
    Suite,
    audits_of,
    eval_suite,
    read_benchmarks,
    refusal,
)
from evsys_sdk.data.rows import load_rows
from evsys_sdk.data.sources import is_cheap_to_open, open_source
from evsys_sdk.data.stores import LocalDataStore
from evsys_sdk.data.workspace import Workspace
from evsys_sdk.errors import EvsysError, Problem
from evsys_sdk.eval.benchmark import BenchmarkLoader
from evsys_sdk.files import to_json
from evsys_sdk.protocols import Row

MAX_BYTES, MAX_ROWS = 100_000_000, 100_000


def foreseen_leakage(config: ExperimentConfig, benchmarks: BenchmarkLoader) -> list[Problem]:
    """What the runs of this config will warn of, or under `leakage: error` refuse to train on."""
    source, found = source_of(config), []
    for place, audit in foreseen_audits(config, benchmarks):
        if not audit.clean:
            text = refusal(place, [audit]) if config.leakage == "error" else f"leakage: {audit.text}"
            found.append(source.located(Problem(path=place, message=text)))
    return found


def foreseen_audits(config: ExperimentConfig, benchmarks: BenchmarkLoader) -> Iterator[tuple[str, Audit]]:
    """Each data block's place, with what its rows and a benchmark have in common; none under `leakage: off`."""
    if config.leakage == "off":
        return
    suites, seen = read_benchmarks(config, benchmarks)[0], set[str]()
    for block in _blocks(config):
        if block.key in seen:
            continue
        seen.add(block.key)
        known = [*suites, *_own_suite(block, config)]
        rows = _cheap_rows(block.data, config) if known else None
        for audit in audits_of(rows, known) if rows else ():
            yield block.place, audit


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Rows to train on, and those that the run asks afterwards."""

    place: str
    data: DataConfig
    eval_data: DataConfig | None
    eval_place: str

    @property
    def key(self) -> str:
        return to_json([plain(self.data), self.eval_data and plain(self.eval_data)])


def _blocks(config: ExperimentConfig) -> Iterator[_Block]:
    source = source_of(config)
    for index, run in enumerate(config.all_runs()):
        asked = run.eval.eval_data if run.eval.enabled and run.eval.metrics else None
        for recipe in recipes_of(run):
            for place, data in recipe.data:
                own = source.in_run(index, EVAL_DATA)
                yield _Block(place=source.in_run(index, place), data=data, eval_data=asked, eval_place=own)


def _own_suite(block: _Block, config: ExperimentConfig) -> list[KnownBenchmark]:
    if block.eval_data is None or _cheap_rows(block.eval_data, config) is None:
        return []
    try:
        return [eval_suite(block.eval_data, config, LocalDataStore(**config.data_store.params))]
    except EvsysError:  # told by the run, with its place
        return []


def cheap_eval_suites(config: ExperimentConfig) -> list[tuple[str, Suite]]:
    """The rows of every `eval.eval_data` that can be read here, as benchmarks, each with its place."""
    blocks = {to_json(plain(block.eval_data)): block for block in _blocks(config) if block.eval_data is not None}
    return [(block.eval_place, known.suite) for block in blocks.values() for known in _own_suite(block, config)]


def _cheap_rows(data: DataConfig, config: ExperimentConfig) -> list[Row] | None:
    """The rows as the run will get them; None where that would take long, or run code of a project."""
    transforms = [registry.transforms.get(spec.kind) for spec in data.transforms]
    ours = all(transform.__module__.startswith("evsys_sdk.") for transform in transforms)
    if not ours or not is_cheap_to_open(data.source_kind) or config.data_store.kind != "local":
        return None
    source, store = source_of(config), LocalDataStore(**config.data_store.params)
    folders, workspace = search_folders(source), Workspace.find(source.folder)
    try:
        opened = open_source(data, store=store, folders=folders, workspace=workspace)
        file = Path(opened.name)
        if file.is_file() and file.stat().st_size > MAX_BYTES:
            return None
        # Counted one by one first: `load_rows` holds all of them in memory.
        if next(islice(opened.rows(), MAX_ROWS, None), None) is not None:
            return None
        return load_rows(data, store=store, folders=folders, workspace=workspace).rows
    except EvsysError:  # told by the run, with its place
        return None
