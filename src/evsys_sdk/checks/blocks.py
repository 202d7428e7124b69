"""The `{kind, params}` blocks of a config: where they stand, and whether each names an extension that takes its params.

In: a config or a run. Out: its blocks, its data blocks and its algorithms with the rows they learn from, each with its
place; and problems of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from pydantic import ValidationError

from evsys_sdk import registry
from evsys_sdk.config.base import KindSpec
from evsys_sdk.config.schema import DataConfig, ExperimentConfig, RunConfig
from evsys_sdk.data_types import JsonObject
from evsys_sdk.errors import EvsysError, Problem, UnknownKind, error_boundary
from evsys_sdk.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One `{kind, params}` in the config."""

    place: str
    registry: Registry
    kind: str
    params: JsonObject


class UnknownKindProblem(Problem):
    """A kind that is not registered; where the project's code was not run, that is no mistake."""


def check_block(block: Block) -> list[Problem]:
    """Whether the kind exists, the packages that it `requires` are installed, and its params fit."""
    try:
        target = block.registry.get(block.kind)
    except UnknownKind as exc:
        hint = f"evsys list --kind {block.registry.plural}"
        return [UnknownKindProblem(path=f"{block.place}.kind", message=str(exc), value=block.kind, next_command=hint)]
    # module -> our extra that brings it; two modules of one extra are one remedy
    extras = {extra: module for module, extra in getattr(target, "requires", {}).items() if find_spec(module) is None}
    problems = [
        Problem(
            path=f"{block.place}.kind", value=block.kind, message=f"needs {module}: pip install 'evsys-sdk[{extra}]'"
        )
        for extra, module in extras.items()
    ]
    hint = f"evsys schema {block.registry.kind} {block.kind}"
    return problems + [
        replace(problem, path=f"{block.place}.params.{problem.path}".rstrip("."), next_command=hint)
        for problem in registry.check_params(target, block.params, kind=block.registry.kind)
    ]


def build_or_none(kinds: Registry, spec: KindSpec) -> Any | None:
    """What a block names, with its params; None where that fails, which the check of the block reports."""
    try:
        with error_boundary(EvsysError, spec.kind):
            return kinds.build(spec.kind, dict(spec.params))
    except EvsysError:
        return None


def block_at(place: str, kinds: Registry, spec: KindSpec) -> Block:
    return Block(place=place, registry=kinds, kind=spec.kind, params=spec.params)


def experiment_blocks(config: ExperimentConfig) -> Iterator[Block]:
    """The blocks that belong to no run."""
    yield block_at("data_store", registry.data_stores, config.data_store)
    waiting = [block_at("log_store", registry.log_stores, config.log_store)]
    while waiting:
        block = waiting.pop(0)
        yield block
        children = block.params.get("stores") if block.kind == "multiplex" else None
        for index, child in enumerate(children if isinstance(children, list) else []):
            if isinstance(child, dict) and isinstance(kind := child.get("kind"), str):
                params = child.get("params")
                waiting.append(
                    Block(
                        place=f"{block.place}.params.stores[{index}]",
                        registry=registry.log_stores,
                        kind=kind,
                        params=params if isinstance(params, dict) else {},
                    )
                )
    yield block_at("launcher", registry.launchers, config.launcher)
    for index, proposer in enumerate(config.research.proposers if config.research else []):
        yield block_at(f"research.proposers[{index}]", registry.proposers, proposer)
    if config.deploy is not None:
        yield block_at("deploy", registry.deployers, config.deploy)
    for index, callback in enumerate(config.callbacks):
        yield block_at(f"callbacks[{index}]", registry.callbacks, callback)


def run_blocks(run: RunConfig) -> Iterator[Block]:
    """The blocks of one run, their places relative to it."""
    yield block_at("algorithm", registry.algorithms, run.algorithm)
    yield block_at("backend", registry.backends, run.backend)
    for place, data in data_blocks(run):
        for index, transform in enumerate(data.transforms):
            yield block_at(f"{place}.transforms[{index}]", registry.transforms, transform)
    for index, metric in enumerate(run.eval.metrics):
        yield block_at(f"eval.metrics[{index}]", registry.metrics, metric)
    if run.eval.inference is not None:
        yield block_at("eval.inference", registry.inference, run.eval.inference)


def data_blocks(run: RunConfig) -> Iterator[tuple[str, DataConfig]]:
    """Every data block of a run with its path: `data`, `eval.eval_data`, `continual.stages[i].data`."""
    if run.data is not None:
        yield "data", run.data
    if run.eval.eval_data is not None:
        yield "eval.eval_data", run.eval.eval_data
    if run.continual is not None:
        for index, stage in enumerate(run.continual.stages):
            yield f"continual.stages[{index}].data", stage.data


def all_data(run: RunConfig) -> Iterator[tuple[str, DataConfig]]:
    """Every data block of a run, also those inside the phases of a `combo`."""
    yield from data_blocks(run)
    phases = run.algorithm.params.get("phases") if run.algorithm.kind == "combo" else None
    for index, phase in enumerate(phases if isinstance(phases, list) else []):
        with suppress(ValidationError, TypeError, AttributeError):  # reported by the check of the block
            if phase.get("data") is not None:
                yield f"algorithm.params.phases[{index}].data", DataConfig.model_validate(phase["data"])
    if run.algorithm.kind == "gepa_prompt" and (given := run.algorithm.params.get("val_data")) is not None:
        with suppress(ValidationError, TypeError):
            yield "algorithm.params.val_data", DataConfig.model_validate(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmRows:
    """One algorithm of a run, and the rows it learns from."""

    place: str
    spec: KindSpec
    data: list[tuple[str, DataConfig]]
    """Each data block with its place; a chain has several."""


def recipes_of(run: RunConfig) -> list[AlgorithmRows]:
    """The run's algorithm, or the phases of a combo."""
    stages = run.continual.stages if run.continual else []
    chain = [(f"continual.stages[{number}].data", stage.data) for number, stage in enumerate(stages)]
    own = chain or ([("data", run.data)] if run.data is not None else [])
    if run.algorithm.kind != "combo":
        return [AlgorithmRows(place="algorithm", spec=run.algorithm, data=own)]
    combo = build_or_none(registry.algorithms, run.algorithm)
    recipes = []
    for index, phase in enumerate(combo.cfg.phases if combo else []):
        place = f"algorithm.params.phases[{index}]"
        data = [(f"{place}.data", phase.data)] if phase.data else own
        recipes.append(AlgorithmRows(place=f"{place}.algorithm", spec=phase.algorithm, data=data))
    return recipes
