"""Whether the rows of a run can be read, and what a look at the first ones tells before anything is spent.

In: a run and its config. Out: problems with their places in the run. Beyond opening a source, only what is cheap is
looked at: the first rows of a file on this disk, changed by our own row-by-row transforms. An algorithm says what rows
it takes (`check_rows`) and whether its tasks must be graded (`needs_reward`: they are checked as a benchmark's are), a
backend how large the vocabulary is (`vocabulary`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from evsys_sdk import files, registry
from evsys_sdk.checks.benchmarks import undoable_tasks
from evsys_sdk.checks.blocks import AlgorithmRows, Block, build_or_none, check_block
from evsys_sdk.config.project import search_folders
from evsys_sdk.config.schema import NEEDED_BY_SOURCE, SOURCE_KEYS, DataConfig, ExperimentConfig, RunConfig
from evsys_sdk.config.yaml_io import source_of
from evsys_sdk.data.sources import as_rows, is_cheap_to_open, open_source, source_settings
from evsys_sdk.data.stores import LocalDataStore
from evsys_sdk.data.workspace import Workspace
from evsys_sdk.data_types import HarborTask, from_dict
from evsys_sdk.errors import FOREIGN, DataError, EvsysError, Problem, UnknownKind, error_boundary
from evsys_sdk.protocols import SANDBOX, Row

FIRST = 100
"""Rows that are looked at."""
COOKBOOK = "tinker_cookbook"


def source_problems(
    data: DataConfig, config: ExperimentConfig, *, has_store: bool, is_due: Callable[[str], bool]
) -> list[Problem]:
    """Rows that cannot be found or read; paths are relative to the data block. `has_store`: the config's data store
    can be built. `is_due`: whether a file is to be parsed to its end, where a broken line would stop the run."""
    ref = data.dataset_id or data.dataset_name
    source = source_of(config)
    try:
        rows: Iterable[Row] = ()
        if ref is not None:
            workspace = Workspace.find(source.folder)
            path = workspace.pull_dataset(ref)
            if is_due(str(path)):
                rows = files.read_rows(path)
        elif problems := _kind_problems(data):
            return problems
        elif is_cheap_to_open(data.source_kind) and has_store:
            with error_boundary(DataError, f"data store {config.data_store.kind!r}"):
                store = registry.data_stores.build(config.data_store.kind, dict(config.data_store.params))
                opened = open_source(data, store=store, folders=search_folders(source))
            if type(store) is LocalDataStore and is_due(opened.name):
                rows = as_rows(opened.rows(), opened.name)
        for _ in rows:
            pass  # a line that is no JSON object is a DataError
    except EvsysError as exc:
        key = (
            "dataset_id"
            if data.dataset_id
            else "dataset_name"
            if ref
            else NEEDED_BY_SOURCE.get(data.source_kind, "source_kind")
        )
        return [Problem(path=key, message=str(exc), value=getattr(data, key))]
    return []


def _kind_problems(data: DataConfig) -> list[Problem]:
    """Whether the kind of source exists, its packages are installed and its settings fit."""
    try:
        settings = source_settings(data)
    except UnknownKind:
        settings = data.source_params
    problems = []
    for problem in check_block(Block(place="", registry=registry.data_sources, kind=data.source_kind, params=settings)):
        # The keys of the data block: `source_kind`, the common settings, the rest under `source_params`.
        path = problem.path.removeprefix(".").replace("params.", "", 1)
        key = "source_kind" if path == "kind" else path
        is_own = key == "source_kind" or re.split(r"[.\[]", key)[0] in SOURCE_KEYS
        problems.append(replace(problem, path=key if is_own else f"source_params.{key}"))
    return problems


def early_problems(
    run: RunConfig, recipes: list[AlgorithmRows], config: ExperimentConfig, *, is_partial: bool = False
) -> Iterator[Problem]:
    """A renderer, a `top_k` or first rows that a run would stumble over. Blocks that are wrong in themselves are
    reported by their own check. `is_partial`: the project's code was not run, so a verifier that is not registered may
    be the project's."""
    yield from _renderer_problems(run)
    for recipe in recipes:
        algorithm = build_or_none(registry.algorithms, recipe.spec)
        if algorithm is None:
            continue
        top_k = recipe.spec.params.get("top_k")
        if isinstance(top_k, int):
            ask = getattr(build_or_none(registry.backends, run.backend), "vocabulary", None)
            known = ask(run.model.name) if ask else None
            if known is not None and top_k > known:
                message = f"the vocabulary of {run.model.name} has {known} tokens; top_k is at most that"
                yield Problem(path=f"{recipe.place}.params.top_k", value=top_k, message=message)
        if not hasattr(algorithm, "check_rows") or not reads_as_it_says(type(algorithm)):
            continue
        for place, data in recipe.data:
            try:
                seen = first_rows(data, config)
            except DataError as exc:
                yield Problem(path=place, message="; ".join(str(exc).splitlines()))
                continue
            why = _complaint(algorithm, seen.rows, is_partial=is_partial) if seen else None
            # Where the algorithm may not get to see all of the rows, it must be against each of them.
            if why and seen and not seen.all_of_them:
                each = (_complaint(algorithm, [row], is_partial=is_partial) for row in seen.rows)
                why = why if all(each) else None
            if why:
                yield Problem(path=place, message=why)


def _renderer_problems(run: RunConfig) -> Iterator[Problem]:
    """A `renderer_name` that tinker-cookbook does not have; the mock has its own template and reads none."""
    name = run.model.renderer_name
    if name is None or run.backend.kind == "mock":
        return
    # The names that the installed tinker-cookbook documents, read off its source: it takes seconds to import.
    package = find_spec(COOKBOOK)
    folder = next(iter(package.submodule_search_locations or []), None) if package else None
    source = Path(folder) / "renderers" / "__init__.py" if folder else None
    text = source.read_text(encoding="utf-8") if source is not None and source.is_file() else ""
    if name in re.findall(r'- ``"(\w+)"``', text):
        return
    from evsys_sdk.training.rendering import renderer_problem

    why = renderer_problem(name)
    if why is not None:
        yield Problem(path="model.renderer_name", value=name, message=why.removeprefix("model.renderer_name: "))


def reads_as_it_says(algorithm: type) -> bool:
    """Whether its `check_rows` speaks of the rows that it reads: not where a project's subclass of ours reads them its
    own way and leaves our check as it is."""
    # From the subclass up: what comes first decides, a check of rows or a way to read them.
    for base in algorithm.__mro__:
        if "check_rows" in vars(base):
            return True
        if {"setup", "train"} & set(vars(base)) and not base.__module__.startswith("evsys_sdk."):
            return False
    return False


def _complaint(algorithm: Any, rows: list[Row], *, is_partial: bool) -> str | None:
    """What the algorithm has against rows; if it learns from rewards, also what keeps its tasks from having any."""
    try:
        with error_boundary(DataError, "looking at the first rows"):
            rows = copy.deepcopy(rows)
            algorithm.check_rows(rows)
            if not getattr(algorithm, "needs_reward", False):
                return None
            chosen = getattr(algorithm.cfg, "environment", None)
            tasks = [(from_dict(row), f"row {index}") for index, row in enumerate(rows)]
            placed = [(task, place) for task, place in tasks if isinstance(task, HarborTask)]
            environment = chosen.kind if chosen else SANDBOX
            return "; ".join(undoable_tasks(placed, environment=environment, known_only=is_partial)) or None
    except EvsysError as exc:
        return "; ".join(str(exc).splitlines())


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRows:
    """The first rows that training will be offered."""

    rows: list[Row]
    all_of_them: bool = True
    """Training gets every one of them; False where a transform chooses among all rows of the source."""


def first_rows(data: DataConfig, config: ExperimentConfig) -> FirstRows | None:
    """The first rows of a data block, after the transforms that take one at a time; None where a look would cost
    something or could not be trusted."""
    chain = [(spec.kind, build_or_none(registry.transforms, spec)) for spec in data.transforms]
    if not all(type(transform).__module__.startswith("evsys_sdk.") for _, transform in chain):
        return None  # a transform of the project may need all rows, or cost something
    raw = _raw_rows(data, config)
    if raw is None:
        return None
    rows = list(islice(raw, FIRST))
    if not rows:
        raise DataError("there are no training rows in it")
    chosen = False
    for name, transform in chain:
        if transform is None or not hasattr(transform, "stream"):  # it chooses among all rows; `shuffle` drops none
            chosen = chosen or name != "shuffle"
            continue
        try:
            with error_boundary(DataError, f"transform {name!r}"):
                rows = list(transform.stream(rows))
        except DataError:
            if chosen:
                return None  # the row that it stumbled over may not be among the chosen
            raise
    return FirstRows(rows=rows, all_of_them=not chosen) if rows else None


def _raw_rows(data: DataConfig, config: ExperimentConfig) -> Iterable[Row] | None:
    """The rows of a source that lies on this disk, or in the config; others are not opened for a look."""
    source = source_of(config)
    ref = data.dataset_id or data.dataset_name
    try:
        if ref is not None:
            workspace = Workspace.find(source.folder)
            return files.read_rows(workspace.pull_dataset(ref))
        if data.source_kind == "in_memory":
            return copy.deepcopy((data.rows or [])[:FIRST])
        store = build_or_none(registry.data_stores, config.data_store)
        if data.source_kind not in ("jsonl", "csv", "parquet") or type(store) is not LocalDataStore:
            return None
        opened = open_source(data, store=store, folders=search_folders(source))
        return as_rows(opened.rows(), opened.name)
    except FOREIGN:  # a file that is not there is reported by `source_problems`
        return None
