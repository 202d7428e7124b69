"""What a look at the first rows, at a renderer's name and at the vocabulary tells before anything is spent.

In: a run and its config. Out: problems with their places in the run. Only what is cheap is looked at: the first rows of
a file on this disk, changed by our own row-by-row transforms. An algorithm says what rows it takes (`check_rows`)
and whether its tasks must be graded (`needs_reward`: they are checked as a benchmark's are), a backend how large the
vocabulary is (`vocabulary`); one that does not say is not asked.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from evsys_sdk import jsonl, registry
from evsys_sdk.config.base import KindSpec
from evsys_sdk.config.models import DataConfig, ExperimentConfig, RunConfig
from evsys_sdk.config.project import search_folders
from evsys_sdk.config.source import source_of
from evsys_sdk.data.sources import as_rows, open_source
from evsys_sdk.data.stores import LocalDataStore
from evsys_sdk.data.workspace import Workspace
from evsys_sdk.data_types import HarborTask, from_dict
from evsys_sdk.errors import FOREIGN, DataError, EvsysError, Problem, blame
from evsys_sdk.protocols import SANDBOX, Row
from evsys_sdk.running.task_checks import undoable_tasks

FIRST = 100
"""Rows that are looked at."""
COOKBOOK = "tinker_cookbook"


def early_problems(run: RunConfig, config: ExperimentConfig, *, is_partial: bool = False) -> Iterator[Problem]:
    """Everything of that kind that is wrong with a run. Blocks that are wrong in themselves are told of elsewhere.
    `is_partial`: the project's code was not run, so a verifier that is not registered may be its own."""
    yield from _renderer_problems(run)
    for recipe in recipes_of(run):
        algorithm = _built(registry.algorithms, recipe.spec)
        if algorithm is not None:
            yield from _top_k_problems(recipe, run)
            yield from _row_problems(recipe, algorithm, config, is_partial=is_partial)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One algorithm of a run, and the rows it learns from."""

    place: str
    spec: KindSpec
    data: list[tuple[str, DataConfig]]
    """Each data block with its place; a chain has several."""


def recipes_of(run: RunConfig) -> list[Recipe]:
    """The run's algorithm, or the phases of a combo."""
    chain = [
        (f"continual.stages[{n}].data", s.data) for n, s in enumerate(run.continual.stages if run.continual else [])
    ]
    own = chain or ([("data", run.data)] if run.data is not None else [])
    if run.algorithm.kind != "combo":
        return [Recipe(place="algorithm", spec=run.algorithm, data=own)]
    combo = _built(registry.algorithms, run.algorithm)
    return [
        Recipe(
            place=f"{place}.algorithm",
            spec=phase.algorithm,
            data=[(f"{place}.data", phase.data)] if phase.data else own,
        )
        for index, phase in enumerate(combo.cfg.phases if combo else [])
        for place in [f"algorithm.params.phases[{index}]"]
    ]


def _built(kinds: registry.Registry, spec: KindSpec) -> Any | None:
    try:
        with blame(EvsysError, spec.kind):
            return kinds.build(spec.kind, dict(spec.params))
    except EvsysError:
        return None


def _renderer_problems(run: RunConfig) -> Iterator[Problem]:
    """A `renderer_name` that tinker-cookbook does not have; the mock has its own template and reads none."""
    name = run.model.renderer_name
    if name is None or run.backend.kind == "mock" or name in listed_renderers():
        return
    from evsys_sdk.training.cookbook import renderer_problem  # it takes seconds to import; a known name needs none

    why = renderer_problem(name)
    if why is not None:
        yield Problem(path="model.renderer_name", value=name, message=why.removeprefix("model.renderer_name: "))


def listed_renderers() -> set[str]:
    """The names that the installed tinker-cookbook documents, read off its source."""
    package = find_spec(COOKBOOK)
    folder = next(iter(package.submodule_search_locations or []), None) if package else None
    source = Path(folder) / "renderers" / "__init__.py" if folder else None
    if source is None or not source.is_file():
        return set()
    return set(re.findall(r'- ``"(\w+)"``', source.read_text(encoding="utf-8")))


def _top_k_problems(recipe: Recipe, run: RunConfig) -> Iterator[Problem]:
    top_k, backend = recipe.spec.params.get("top_k"), _built(registry.backends, run.backend)
    ask = getattr(backend, "vocabulary", None)
    if not isinstance(top_k, int) or ask is None:
        return
    known = ask(run.model.name)
    if known is not None and top_k > known:
        message = f"the vocabulary of {run.model.name} has {known} tokens; top_k is at most that"
        yield Problem(path=f"{recipe.place}.params.top_k", value=top_k, message=message)


def _row_problems(recipe: Recipe, algorithm: Any, config: ExperimentConfig, *, is_partial: bool) -> Iterator[Problem]:
    check = _check_of(algorithm, is_partial=is_partial)
    for place, data in recipe.data if check else []:
        try:
            seen = first_rows(data, config)
        except DataError as exc:
            yield Problem(path=place, message=_one_line(exc))
            continue
        why = seen and _why_not(check, seen)
        if why:
            yield Problem(path=place, message=why)


def _check_of(algorithm: Any, *, is_partial: bool) -> Callable[[list[Row]], None] | None:
    """What the algorithm has against rows; if it learns from rewards, also what keeps its tasks from having any."""
    check: Callable[[list[Row]], None] | None = getattr(algorithm, "check_rows", None)
    if check is None or not reads_as_it_says(type(algorithm)):
        return None
    if not getattr(algorithm, "needs_reward", False):
        return check
    chosen = getattr(algorithm.cfg, "environment", None)
    return partial(_check_tasks, check, chosen.kind if chosen else SANDBOX, is_partial)


def _check_tasks(check: Callable[[list[Row]], None], environment: str, is_partial: bool, rows: list[Row]) -> None:
    check(rows)
    tasks = [(from_dict(row), f"row {index}") for index, row in enumerate(rows)]
    placed = [(task, place) for task, place in tasks if isinstance(task, HarborTask)]
    wrong = undoable_tasks(placed, environment=environment, known_only=is_partial)
    if wrong:
        raise DataError("\n".join(wrong))


def reads_as_it_says(algorithm: type) -> bool:
    """Whether its `check_rows` speaks of the rows that it reads: not where a project's subclass of ours reads them its
    own way and leaves our check as it is."""
    for base in algorithm.__mro__:
        if "check_rows" in vars(base):
            return True
        if {"setup", "train"} & set(vars(base)) and not base.__module__.startswith("evsys_sdk."):
            return False
    return False


def _why_not(check: Any, seen: Seen) -> str | None:
    """What the algorithm has against the rows; where it may not get to see them all, only if it is against each."""
    why = _complaint(check, seen.rows)
    if why is None or seen.all_of_them:
        return why
    return why if all(_complaint(check, [row]) for row in seen.rows) else None


def _complaint(check: Any, rows: list[Row]) -> str | None:
    try:
        with blame(DataError, "looking at the first rows"):
            check(copy.deepcopy(rows))
    except EvsysError as exc:
        return _one_line(exc)
    return None


def _one_line(exc: EvsysError) -> str:
    return "; ".join(str(exc).splitlines())


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The first rows that training will be offered."""

    rows: list[Row]
    all_of_them: bool = True
    """Training gets every one of them; False where a transform chooses among all rows of the source."""


def first_rows(data: DataConfig, config: ExperimentConfig) -> Seen | None:
    """The first rows of a data block; None where a look would cost something or could not be trusted."""
    chain = [(spec.kind, _built(registry.transforms, spec)) for spec in data.transforms]
    if not all(type(transform).__module__.startswith("evsys_sdk.") for _, transform in chain):
        return None  # somebody's own: it may need all rows, or cost something
    raw = _raw_rows(data, config)
    if raw is None:
        return None
    rows = list(islice(raw, FIRST))
    if not rows:
        raise DataError("there are no training rows in it")
    return _through(chain, rows)


def _through(chain: list[tuple[str, Any]], rows: list[Row]) -> Seen | None:
    """The rows after the transforms that take one at a time; those that choose among all rows are passed over."""
    chosen = False
    for name, transform in chain:
        if not hasattr(transform, "stream"):
            chosen = chosen or name != "shuffle"  # which leaves none out
            continue
        try:
            with blame(DataError, f"transform {name!r}"):
                rows = list(transform.stream(rows))
        except DataError:
            if chosen:
                return None  # the row that it stumbled over may not be among the chosen
            raise
    return Seen(rows=rows, all_of_them=not chosen) if rows else None


def _raw_rows(data: DataConfig, config: ExperimentConfig) -> Iterable[Row] | None:
    """The rows of a source that lies on this disk, or in the config; others are not opened for a look."""
    source = source_of(config)
    ref = data.dataset_id or data.dataset_name
    try:
        if ref is not None:
            workspace = Workspace.find(source.folder)
            return jsonl.read_rows(workspace.path(workspace.get(ref, "dataset")))
        if data.source_kind == "in_memory":
            return copy.deepcopy((data.rows or [])[:FIRST])
        store = _built(registry.data_stores, config.data_store)
        if data.source_kind not in ("jsonl", "csv", "parquet") or type(store) is not LocalDataStore:
            return None
        opened = open_source(data, store=store, folders=search_folders(source))
        return as_rows(opened.rows(), opened.name)
    except FOREIGN:  # a file that is not there is told of by the check of the block
        return None
