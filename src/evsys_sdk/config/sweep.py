"""Which runs a config stands for: the cells of a matrix, the trials of a search, and what they are called.

In: an `ExperimentConfig`. Out: plain `RunConfig`s, named and in order, and for each where its values stood in the file.
Everything downstream sees plain runs. Which values a search tries is decided while it runs; here are the run that a set
of values makes, and a few runs that together have every value of its space once, by which it is checked beforehand.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from evsys_sdk.config.base import JsonDict
from evsys_sdk.config.run_config import Range, RunConfig, SearchSpec
from evsys_sdk.config.yaml_io import Origin, remember, source_of
from evsys_sdk.data_types import JsonObject
from evsys_sdk.errors import ConfigError, Problem
from evsys_sdk.explain import KeyPath, known_keys, model_at, problems_of, show_path, split_path, unknown_key

if TYPE_CHECKING:
    from evsys_sdk.config.schema import ExperimentConfig

MAX_CELLS = 10_000
AXES = ("matrix", "axes")
SPACE = ("search", "space")
MAX_LENGTH = 150
"""Letters of a folder's name; file systems take 255 bytes, and suffixes follow."""
REHEARSALS = "dry"
"""The folder of what `--dry` runs."""

Picks = dict[str, int | float]
"""Dotted setting -> the place of its value in the list, or the number itself where the axis is a range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination of axis values."""

    run: JsonDict
    origin: Origin


@dataclass(slots=True)
class ProblemSet:
    """Problems so far, each once: a mistake in the base run shows up in every cell."""

    problems: dict[tuple[str, str], Problem] = field(default_factory=dict)

    def add(self, path: KeyPath, message: str, value: object = None) -> None:
        problem = Problem(path=show_path(path), message=message, value=value, next_command="evsys schema config")
        self.problems.setdefault((problem.path, message), problem)

    def refuse(self, config: ExperimentConfig) -> None:
        if self.problems:
            source = source_of(config)
            raise ConfigError(source.label, [source.located(problem) for problem in self.problems.values()])


def expand_sweep(config: ExperimentConfig) -> ExperimentConfig:
    """`config` with its matrix, if any, replaced by the runs it stands for. A search is checked and stays."""
    if config.search is not None:
        return _check_search(config)
    if config.matrix is None:
        return config
    found = ProblemSet()
    runs, origins = runs_of(_cells_of_matrix(config, found), found)
    found.refuse(config)
    plain = config.model_copy(update={"runs": runs, "matrix": None, "base_run": None, "run": None})
    # Only fields that were set are written to YAML, and `model_copy` counts those in `update` as set.
    plain.__pydantic_fields_set__.difference_update({"matrix", "base_run", "run"})
    remember(plain, replace(source_of(config), origins=tuple(origins)))
    return plain


def runs_of(cells: Iterable[Cell], found: ProblemSet) -> tuple[list[RunConfig], list[Origin]]:
    """The cells that are good runs, and where these stand in the file; what is wrong with the others is in `found`."""
    runs: list[RunConfig] = []
    origins: list[Origin] = []
    for cell in cells:
        try:
            runs.append(RunConfig.model_validate(cell.run))
            origins.append(cell.origin)
        except ValidationError as exc:
            for problem in problems_of(exc, RunConfig):
                place = cell.origin.place(split_path(problem.path))
                found.add(place, problem.message, problem.value)
    return runs, origins


def _cells_of_matrix(config: ExperimentConfig, found: ProblemSet) -> Iterator[Cell]:
    matrix = config.matrix
    assert matrix is not None
    place: KeyPath = ("base_run",) if matrix.base_run is None else ("matrix", "base_run")
    base = config.base_run if matrix.base_run is None else matrix.base_run
    if matrix.base_run is not None and config.base_run is not None:
        found.add(("base_run",), "is given both inside matrix and beside it; keep one")
        return
    if base is None:
        found.add(("matrix", "base_run"), "is missing; a matrix needs a base_run, inside it or beside it")
        return
    check_axes(matrix.axes, AXES, found)
    if found.problems:
        return
    base_name = str(base.get("name") or config.name)
    for picks in itertools.product(*(range(len(values)) for values in matrix.axes.values())):
        values = {axis: matrix.axes[axis][pick] for axis, pick in zip(matrix.axes, picks, strict=True)}
        run = with_values(base, values, AXES, found)
        if run is None:
            return
        template = matrix.name_template
        run["name"] = run_name(base_name, values, run, template, ("matrix", "name_template"), found)
        axes = {split_path(axis): (*AXES, axis, pick) for axis, pick in zip(values, picks, strict=True)}
        yield Cell(run=run, origin=Origin(prefix=place, axes=axes))


def with_values(base: JsonDict, values: JsonDict, place: KeyPath, found: ProblemSet) -> JsonDict | None:
    """The base run with these values set into it; None where one does not fit."""
    run = copy.deepcopy(base)
    for axis, value in values.items():
        try:
            set_dotted(run, split_path(axis), copy.deepcopy(value))
        except (IndexError, TypeError, AttributeError, ValueError):
            found.add((*place, axis), "does not fit the base run: there is nothing there to set it in")
            return None
    return run


def check_axes(axes: Mapping[str, Sequence[object]], place: KeyPath, found: ProblemSet) -> None:
    """What is wrong with the axes that stand at `place`."""
    size = 1
    for axis, values in axes.items():
        if not values:
            found.add((*place, axis), "has no values; an empty axis makes no runs")
        path = split_path(axis)
        # Two axes of which one lies inside the other would undo each other's values.
        inside = next((other for other in axes if other != axis and split_path(other)[: len(path)] == path), None)
        overlap = f"axis {inside!r} lies inside it; one would undo the other" if inside is not None else None
        problem = unknown_axis(path) or overlap
        if problem:
            found.add((*place, axis), problem)
        size *= max(len(values), 1)
    if size > MAX_CELLS:
        found.add(place, f"makes {size:,} runs; the limit is {MAX_CELLS:,}")


def unknown_axis(path: KeyPath) -> str | None:
    """Why no setting of a run can stand at `path`; below `params` anything goes until deep validation."""
    if not path:
        return "is no path to a setting"
    if path == ("name",):
        return "names are made from the axes; use name_template"
    for end in range(1, len(path) + 1):
        part, parent = path[end - 1], path[: end - 1]
        if isinstance(part, int) or "params" in parent or parent[-1:] == ("rows",) or "rows" in parent:
            continue
        known = known_keys(RunConfig, parent)
        if part not in known:
            return f"not a setting of a run: {show_path(path[:end])} is an {unknown_key(str(part), known)}"
        if end < len(path) and part not in ("params", "rows", "tags") and model_at(RunConfig, path[:end]) is None:
            return f"not a setting of a run: {show_path(path[:end])} holds a single value"
    return None


def set_dotted(target: Any, path: KeyPath, value: Any) -> None:
    """Set the value at `path` in nested dicts and lists, making the mappings on the way."""
    for part in path[:-1]:
        if isinstance(target, list):
            target = target[int(part)]
        else:
            # A single value in the way, such as null, gives way to a mapping.
            if not isinstance(target.get(part), dict | list):
                target[part] = {}
            target = target[part]
    if isinstance(target, list):
        target[int(path[-1])] = value
    else:
        target[path[-1]] = value


def get_dotted(target: Any, path: KeyPath) -> Any:
    """The value at `path`; KeyError when there is none."""
    for part in path:
        try:
            target = target[part]
        except (IndexError, TypeError, KeyError):
            raise KeyError(show_path(path)) from None
    return target


def slug(value: Any) -> str:
    """A value as part of a name: `0.0001` -> `0p0001`, `Qwen/Qwen3-4B` -> `Qwen-Qwen3-4B`."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float):
        # Six digits: values that differ beyond them make one name, which `name_problems` refuses.
        return f"{value:g}".replace("+", "").replace(".", "p")
    if isinstance(value, dict):
        named = value.get("kind") or value.get("name")
        value = named if named is not None else json.dumps(value, sort_keys=True, default=str)
    elif isinstance(value, list):
        value = "-".join(slug(item) for item in value)
    return re.sub(r"[^A-Za-z0-9_.=@-]+", "-", str(value)).strip("-")


def run_name(
    base: str, values: JsonDict, run: JsonDict, template: str | None, place: KeyPath, found: ProblemSet
) -> str:
    """What the run with these values is called; `place` is where the template stands."""
    if template is None:
        parts = [f"{split_path(axis)[-1]}{slug(value)}" for axis, value in values.items()]
        return "__".join([base, *parts])

    def fill(match: re.Match[str]) -> str:
        key = match.group(1)
        if key == "base":
            return base
        try:
            return slug(get_dotted(run, split_path(key)))
        except KeyError:
            known = ", ".join(["base", *values])
            found.add(place, f"{{{key}}} is not in the run; axes: {known}", template)
            return ""

    return re.sub(r"\{([^{}]*)\}", fill, template)


def directory_name(run_name: str) -> str:
    """A run's name as a folder: no separators, no leading dot, never too long for a file system."""
    name = re.sub(r"[^A-Za-z0-9_.=@+-]+", "-", run_name).lstrip(".")
    if not name.strip("-"):
        name = "run-" + hashlib.sha256(run_name.encode()).hexdigest()[:8]
    if len(name) > MAX_LENGTH:
        # The hash is that of the whole name: long names that begin alike stay apart.
        name = f"{name[:MAX_LENGTH]}-{hashlib.sha256(run_name.encode()).hexdigest()[:8]}"
    return name


def name_problems(runs: Sequence[RunConfig], places: Sequence[str]) -> list[Problem]:
    """Runs whose folder is taken: by a run of the same name, or one that only looks different, or by rehearsals."""
    problems = []
    seen: dict[str, int] = {}
    for index, run in enumerate(runs):
        # Lower case: on macOS and Windows, names that differ in case alone are one folder.
        folder = directory_name(run.name).lower()
        if folder == REHEARSALS:
            why = f"the folder {REHEARSALS!r} is that of --dry; call the run something else"
            problems.append(Problem(path=places[index], value=run.name, message=why))
        first = seen.setdefault(folder, index)
        if first == index:
            continue
        other = runs[first].name
        what = "two runs have this name" if other == run.name else f"makes the same folder as run {other!r}"
        problems.append(
            Problem(
                path=places[index], value=run.name, message=f"{what}; names must differ (in a sweep: set name_template)"
            )
        )
    return problems


def _check_search(config: ExperimentConfig) -> ExperimentConfig:
    """`config` with its search as it was; a ConfigError with every mistake in it that can be known beforehand."""
    _, origins = _samples(config)
    search = _spec(config)
    if search.objective is not None and config.metadata.success_metric is None:
        # What the search is for is what its arms are compared by, unless the config says otherwise.
        metadata = config.metadata.model_copy(update={"success_metric": search.objective})
        config = config.model_copy(update={"metadata": metadata})
    else:
        config = config.model_copy()
    # The last origin is that of the trials, whose values come from anywhere on their axes.
    anywhere: dict[KeyPath, KeyPath] = {split_path(axis): (*SPACE, axis) for axis in search.space}
    trials = Origin(prefix=_base_of_search(config)[1], axes=anywhere)
    remember(config, replace(source_of(config), origins=(*origins, trials)))
    return config


def sample_runs(config: ExperimentConfig) -> list[RunConfig]:
    """Runs in which every value of the space occurs; of a grid they are all there is."""
    return _samples(config)[0]


def trial_run(config: ExperimentConfig, picks: Picks, number: int) -> RunConfig:
    """The arm that trial `number` is."""
    found = ProblemSet()
    runs, _ = runs_of([cell] if (cell := _cell_of_trial(config, picks, number, found)) else [], found)
    found.refuse(config)
    return runs[0]


def origin_of_trials(config: ExperimentConfig) -> int:
    """Where among the sources of the runs that of every trial is."""
    return len(source_of(config).origins) - 1


def values_of(spec: SearchSpec, picks: Picks) -> JsonDict:
    """The settings that the picks stand for, in the order of the space."""
    return {
        path: picks[path] if isinstance(axis, Range) else axis[int(picks[path])] for path, axis in spec.space.items()
    }


def combinations(spec: SearchSpec) -> Iterator[Picks]:
    """Every combination of a space without ranges, in the order of a matrix."""
    sizes = [range(len(axis)) for axis in spec.space.values() if not isinstance(axis, Range)]
    for picks in itertools.product(*sizes):
        yield dict(zip(spec.space, picks, strict=True))


def count_combinations(spec: SearchSpec) -> int | None:
    """How many there are; None where a range makes them endless."""
    if any(isinstance(axis, Range) for axis in spec.space.values()):
        return None
    return math.prod(len(axis) for axis in spec.space.values() if not isinstance(axis, Range))


def count_trials(spec: SearchSpec) -> int:
    """Trials of the whole search; no combination is tried twice."""
    return min(count for count in (count_combinations(spec), spec.max_trials) if count is not None)


def replace_search(settings: JsonObject, runs: list[JsonObject]) -> JsonObject:
    """The settings of an experiment with the arms that its search tried in the search's place."""
    return {key: value for key, value in settings.items() if key not in ("search", "base_run", "run")} | {
        "runs": [*runs]
    }


def _samples(config: ExperimentConfig) -> tuple[list[RunConfig], list[Origin]]:
    spec, found = _spec(config), ProblemSet()
    lists = {path: ("low", "high") if isinstance(axis, Range) else axis for path, axis in spec.space.items()}
    # How many combinations they make matters only where all are tried.
    check_axes(lists if spec.kind == "grid" else {path: axis[:1] for path, axis in lists.items()}, SPACE, found)
    if config.base_run is None and config.run is None:
        found.add(("base_run",), "is missing; a search needs a base_run, or a run, beside it")
    found.refuse(config)
    cells = (_cell_of_trial(config, picks, number, found) for number, picks in enumerate(_sample_picks(spec)))
    samples = runs_of([cell for cell in cells if cell is not None], found)
    found.refuse(config)
    return samples


def _sample_picks(spec: SearchSpec) -> Iterator[Picks]:
    """A first combination, then each other value once beside it; of a grid, every combination."""
    if spec.kind == "grid":
        yield from combinations(spec)
        return
    choices: dict[str, list[int | float]] = {}
    for path, axis in spec.space.items():
        if isinstance(axis, Range):
            choices[path] = [int(axis.low), int(axis.high)] if axis.int else [axis.low, axis.high]
        else:
            choices[path] = list(range(len(axis)))
    # One axis at a time: the number of runs grows with the values, not with their combinations.
    first = {path: picks[0] for path, picks in choices.items()}
    yield first
    for path, picks in choices.items():
        yield from (first | {path: pick} for pick in picks[1:])


def _cell_of_trial(config: ExperimentConfig, picks: Picks, number: int, found: ProblemSet) -> Cell | None:
    spec, (base, place) = _spec(config), _base_of_search(config)
    values = values_of(spec, picks)
    run = with_values(base, values, SPACE, found)
    if run is None:
        return None
    name, template = str(base.get("name") or config.name), spec.name_template
    if template is not None:
        template = template.replace("{trial}", f"{number:03d}")
    elif spec.kind != "grid":
        name = f"{name}__t{number:03d}"
    run["name"] = run_name(name, values, run, template, ("search", "name_template"), found)
    axes: dict[KeyPath, KeyPath] = {}
    for path, pick in picks.items():
        axis = spec.space[path]
        last = ("low" if pick == axis.low else "high") if isinstance(axis, Range) else int(pick)
        axes[split_path(path)] = (*SPACE, path, last)
    return Cell(run=run, origin=Origin(prefix=place, axes=axes))


def _base_of_search(config: ExperimentConfig) -> tuple[JsonDict, KeyPath]:
    if config.run is not None:
        return config.run.model_dump(exclude_unset=True), ("run",)
    return config.base_run or {}, ("base_run",)


def _spec(config: ExperimentConfig) -> SearchSpec:
    assert config.search is not None
    return config.search
