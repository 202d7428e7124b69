"""What a search can come to: its space, and the run that a set of values makes.

In: an `ExperimentConfig` with a `SearchSpec`. Out: the run of a trial, and a few runs that together have every value of
the space once, by which a search is checked before it begins. Which values are tried is decided while it runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from evsys_sdk.config.document import KeyPath, split_path
from evsys_sdk.config.matrix import Cell, Found, check_axes, run_name, runs_of, with_values
from evsys_sdk.config.models import ExperimentConfig, Range, RunConfig, SearchSpec
from evsys_sdk.config.source import Origin, remember, source_of
from evsys_sdk.errors import ConfigError

SPACE = ("search", "space")
_ENDS = ("low", "high")

Picks = dict[str, int | float]
"""Dotted setting -> the place of its value in the list, or the number itself where the axis is a range."""


def looked_over(config: ExperimentConfig) -> ExperimentConfig:
    """`config` with its search as it was, every mistake in it that can be known told at once."""
    _, origins = _samples(config)
    config = BaseModel.model_copy(config, update=_success_metric(config))
    # The last one is that of the trials, whose values come from anywhere on their axes.
    anywhere: dict[KeyPath, KeyPath] = {split_path(axis): (*SPACE, axis) for axis in _spec(config).space}
    trials = Origin(prefix=_base_run(config)[1], axes=anywhere)
    remember(config, replace(source_of(config), origins=(*origins, trials)))
    return config


def _success_metric(config: ExperimentConfig) -> dict[str, Any]:
    """What the search is for is what its arms are compared by, unless the config says otherwise."""
    objective = _spec(config).objective
    if objective is None or config.metadata.success_metric is not None:
        return {}
    return {"metadata": BaseModel.model_copy(config.metadata, update={"success_metric": objective})}


def sample_runs(config: ExperimentConfig) -> list[RunConfig]:
    """Runs in which every value of the space occurs; of a grid they are all there is."""
    return _samples(config)[0]


def trial_run(config: ExperimentConfig, picks: Picks, number: int) -> RunConfig:
    """The arm that trial `number` is."""
    found = Found()
    runs, _ = runs_of([cell] if (cell := _cell(config, picks, number, found)) else [], found)
    _refuse(config, found)
    return runs[0]


def origin_of_trials(config: ExperimentConfig) -> int:
    """Where among the sources of the runs that of every trial is."""
    return len(source_of(config).origins) - 1


def values_of(spec: SearchSpec, picks: Picks) -> dict[str, Any]:
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


def settled(settings: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings of an experiment with the arms that its search came to in the search's place."""
    return {key: value for key, value in settings.items() if key not in ("search", "base_run", "run")} | {"runs": runs}


def _samples(config: ExperimentConfig) -> tuple[list[RunConfig], list[Origin]]:
    spec, found = _spec(config), Found()
    lists = {path: _ENDS if isinstance(axis, Range) else axis for path, axis in spec.space.items()}
    check_axes(lists, SPACE, found) if spec.kind == "grid" else _check_each(lists, found)
    if config.base_run is None and config.run is None:
        found.add(("base_run",), "is missing; a search needs a base_run, or a run, beside it")
    _refuse(config, found)
    cells = [cell for number, picks in enumerate(_sample_picks(spec)) if (cell := _cell(config, picks, number, found))]
    samples = runs_of(cells, found)
    _refuse(config, found)
    return samples


def _check_each(lists: dict[str, Any], found: Found) -> None:
    """The axes as such; how many combinations they make is no matter where not all are tried."""
    firsts = {path: values[:1] for path, values in lists.items()}
    check_axes(firsts, SPACE, found)


def _sample_picks(spec: SearchSpec) -> Iterator[Picks]:
    if spec.kind == "grid":
        yield from combinations(spec)
        return
    choices = {path: _number_ends(axis) if isinstance(axis, Range) else axis for path, axis in spec.space.items()}
    places = {
        path: list(values) if isinstance(spec.space[path], Range) else list(range(len(values)))
        for path, values in choices.items()
    }
    first = {path: found[0] for path, found in places.items()}
    yield first
    for path, found in places.items():
        yield from (first | {path: place} for place in found[1:])


def _number_ends(axis: Range) -> list[Any]:
    return [int(axis.low), int(axis.high)] if axis.int else [axis.low, axis.high]


def _cell(config: ExperimentConfig, picks: Picks, number: int, found: Found) -> Cell | None:
    spec, (base, place) = _spec(config), _base_run(config)
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
    axes = {split_path(path): _place_of(spec, path, pick) for path, pick in picks.items()}
    return Cell(run=run, values=values, origin=Origin(prefix=place, axes=axes))


def _place_of(spec: SearchSpec, path: str, pick: int | float) -> KeyPath:
    axis = spec.space[path]
    if not isinstance(axis, Range):
        return (*SPACE, path, int(pick))
    return (*SPACE, path, "low" if pick == axis.low else "high")


def _base_run(config: ExperimentConfig) -> tuple[dict[str, Any], KeyPath]:
    if config.run is not None:
        return BaseModel.model_dump(config.run, exclude_unset=True), ("run",)
    return config.base_run or {}, ("base_run",)


def _spec(config: ExperimentConfig) -> SearchSpec:
    assert config.search is not None
    return config.search


def _refuse(config: ExperimentConfig, found: Found) -> None:
    if found.problems:
        source = source_of(config)
        raise ConfigError(source.label, [source.located(problem) for problem in found.problems.values()])
