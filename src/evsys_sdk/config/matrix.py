"""Expand a sweep into runs.

In: an `ExperimentConfig` with a `MatrixSpec`. Out: the same config with plain `runs`, one per cell, named
and in order, and for each where its values stood in the file. Everything downstream sees plain runs;
the sweep exists only here. How values are set into a base run and make its name, a search shares (`search`).
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from evsys_sdk.config.document import KeyPath, show_path, split_path
from evsys_sdk.config.explain import known_keys, model_at, problems_of, unknown_key
from evsys_sdk.config.models import ExperimentConfig, RunConfig
from evsys_sdk.config.source import Origin, Source, remember, source_of
from evsys_sdk.errors import ConfigError, Problem

MAX_CELLS = 10_000
AXES = ("matrix", "axes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination of axis values."""

    run: dict[str, Any]
    values: dict[str, Any]
    origin: Origin


@dataclass(slots=True)
class Found:
    """Problems so far, each once: a mistake in the base run shows up in every cell."""

    problems: dict[tuple[str, str], Problem] = field(default_factory=dict)

    def add(self, path: KeyPath, message: str, value: object = None) -> None:
        problem = Problem(path=show_path(path), message=message, value=value, next_command="evsys schema config")
        self.problems.setdefault((problem.path, message), problem)


def expanded(config: ExperimentConfig) -> ExperimentConfig:
    """`config` with its matrix, if any, replaced by the runs it stands for. A search is looked over and stays."""
    if config.search is not None:
        from evsys_sdk.config.search import looked_over

        return looked_over(config)
    if config.matrix is None:
        return config
    found = Found()
    runs, origins = _runs_of(config, found)
    source = source_of(config)
    if found.problems:
        raise ConfigError(source.label, [source.located(p) for p in found.problems.values()])
    plain = BaseModel.model_copy(config, update={"runs": runs, "matrix": None, "base_run": None, "run": None})
    plain.__pydantic_fields_set__.discard("matrix")
    plain.__pydantic_fields_set__.discard("base_run")
    remember(plain, Source(label=source.label, folder=source.folder, lines=source.lines, origins=tuple(origins)))
    return plain


def _runs_of(config: ExperimentConfig, found: Found) -> tuple[list[RunConfig], list[Origin]]:
    return runs_of(_cells(config, found), found)


def runs_of(cells: Iterable[Cell], found: Found) -> tuple[list[RunConfig], list[Origin]]:
    """The cells that are good runs, and where these stand in the file; what is wrong with the others is `found`."""
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


def _cells(config: ExperimentConfig, found: Found) -> Iterator[Cell]:
    matrix = config.matrix
    assert matrix is not None
    base, place = _base_run(config, found)
    if base is None:
        return
    check_axes(matrix.axes, AXES, found)
    if found.problems:
        return
    base_name = str(base.get("name") or config.name)
    choices = [range(len(values)) for values in matrix.axes.values()]
    for picks in itertools.product(*choices):
        values = {axis: matrix.axes[axis][pick] for axis, pick in zip(matrix.axes, picks, strict=True)}
        run = with_values(base, values, AXES, found)
        if run is None:
            return
        place_of_template = ("matrix", "name_template")
        run["name"] = run_name(base_name, values, run, matrix.name_template, place_of_template, found)
        axes: dict[KeyPath, KeyPath] = {
            split_path(axis): (*AXES, axis, pick) for axis, pick in zip(values, picks, strict=True)
        }
        yield Cell(run=run, values=values, origin=Origin(prefix=place, axes=axes))


def with_values(base: dict[str, Any], values: dict[str, Any], place: KeyPath, found: Found) -> dict[str, Any] | None:
    """The base run with these values set into it; None where one does not fit."""
    run = copy.deepcopy(base)
    for axis, value in values.items():
        try:
            set_dotted(run, split_path(axis), copy.deepcopy(value))
        except (IndexError, TypeError, AttributeError, ValueError):
            found.add((*place, axis), "does not fit the base run: there is nothing there to set it in")
            return None
    return run


def _base_run(config: ExperimentConfig, found: Found) -> tuple[dict[str, Any] | None, KeyPath]:
    assert config.matrix is not None
    inside, beside = config.matrix.base_run, config.base_run
    if inside is not None and beside is not None:
        found.add(("base_run",), "is given both inside matrix and beside it; keep one")
        return None, ()
    if inside is None and beside is None:
        found.add(("matrix", "base_run"), "is missing; a matrix needs a base_run, inside it or beside it")
        return None, ()
    return (inside, ("matrix", "base_run")) if inside is not None else (beside, ("base_run",))


def check_axes(axes: Mapping[str, Sequence[Any]], place: KeyPath, found: Found) -> None:
    """What is wrong with the axes that stand at `place`."""
    size = 1
    for axis, values in axes.items():
        if not values:
            found.add((*place, axis), "has no values; an empty axis makes no runs")
        problem = unknown_axis(split_path(axis)) or _overlap(axis, axes)
        if problem:
            found.add((*place, axis), problem)
        size *= max(len(values), 1)
    if size > MAX_CELLS:
        found.add(place, f"makes {size:,} runs; the limit is {MAX_CELLS:,}")


def _overlap(axis: str, axes: Iterable[str]) -> str | None:
    """Two axes of which one lies inside the other would undo each other's values."""
    path = split_path(axis)
    for other in axes:
        inside = split_path(other)
        if other != axis and inside[: len(path)] == path:
            return f"axis {other!r} lies inside it; one would undo the other"
    return None


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
        return f"{value:g}".replace("+", "").replace(".", "p")
    if isinstance(value, dict):
        named = value.get("kind") or value.get("name")
        value = named if named is not None else json.dumps(value, sort_keys=True, default=str)
    elif isinstance(value, list):
        value = "-".join(slug(item) for item in value)
    return re.sub(r"[^A-Za-z0-9_.=@-]+", "-", str(value)).strip("-")


def run_name(
    base: str, values: dict[str, Any], run: dict[str, Any], template: str | None, place: KeyPath, found: Found
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
