"""Several algorithms in a row on one set of weights: what a phase learnt is where the next one begins.

In: phases, each an algorithm and, if it needs other rows than the run's, its data. Out: one `RunResult`, with the final
weights of the last phase. Steps count on from phase to phase, and every metric carries the name of its phase.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field, field_validator, model_validator

from evsys_sdk import registry
from evsys_sdk.config.base import AlgorithmConfig, Name, Params
from evsys_sdk.config.models import DataConfig
from evsys_sdk.errors import BackendError, DataError, EvsysError
from evsys_sdk.protocols import Row, RunContext, RunResult
from evsys_sdk.registry import Registry, register_algorithm
from evsys_sdk.surface import Capabilities
from evsys_sdk.training.phases import PhaseHooks, PhaseLog, PhaseSteps


class Phase(Params):
    """One algorithm of a combo."""

    algorithm: AlgorithmConfig
    """The algorithm of this phase, with its params."""
    data: DataConfig | None = None
    """Rows of this phase's own; by default the run's."""
    name: Name | None = Field(default=None, pattern=r"^[\w.-]+$")
    """What its metrics begin with; by default the algorithm's kind."""

    @field_validator("algorithm")
    @classmethod
    def _algorithm_is_right(cls, block: AlgorithmConfig) -> AlgorithmConfig:
        _check(registry.algorithms, block.kind, block.params)
        return block

    @field_validator("data")
    @classmethod
    def _transforms_are_right(cls, data: DataConfig | None) -> DataConfig | None:
        for spec in data.transforms if data else []:
            _check(registry.transforms, spec.kind, spec.params)
        return data


def _check(kinds: Registry, kind: str, params: dict[str, Any]) -> None:
    """Raise with everything that is wrong with a block inside this one."""
    try:
        problems = registry.check_params(kinds.get(kind), params)
    except EvsysError as exc:
        raise ValueError(str(exc)) from exc
    if problems:
        said = "; ".join(f"{problem.path}: {problem.message}".removeprefix(": ") for problem in problems)
        raise ValueError(f"params of {kinds.kind} {kind!r}: {said}")


@register_algorithm("combo")
class Combo:
    """Phases in a row, the weights handed on from each to the next."""

    class Config(Params):
        phases: list[Phase] = Field(min_length=1)
        """Phases in order: an algorithm each, with data of its own where that differs."""

        @model_validator(mode="after")
        def _distinct(self) -> Combo.Config:
            twice = [name for name, count in Counter(names_of(self.phases)).items() if count > 1]
            if twice:
                raise ValueError(f"phase names must differ; twice: {', '.join(twice)}")
            return self

        @model_validator(mode="after")
        def _one_adapter(self) -> Combo.Config:
            ranks = {name: _rank_of(phase) for name, phase in zip(names_of(self.phases), self.phases, strict=True)}
            if len({rank for rank in ranks.values() if rank is not None}) > 1:
                said = ", ".join(f"{name}: {rank}" for name, rank in ranks.items())
                raise ValueError(
                    f"the phases hand one adapter on, so lora_rank must be the same in all of them ({said})"
                )
            return self

    def __init__(self, **params: Any):
        self.cfg = self.Config(**params)

    @property
    def goes_on(self) -> bool:
        """Whether an interrupted run resumes from its checkpoint in every phase."""
        return all(getattr(build(phase), "goes_on", True) for phase in self.cfg.phases)

    def needs(self, capabilities: Capabilities) -> str | None:
        """What the backend lacks for any of the phases."""
        for name, phase in zip(names_of(self.cfg.phases), self.cfg.phases, strict=True):
            needs = getattr(build(phase), "needs", None)
            lack = needs(capabilities) if needs else None
            if lack:
                return f"phase {name!r}: {lack}"
        return None

    def train(self, ctx: RunContext) -> RunResult:
        """Run the phases; everything that can be known to be wrong is looked at before the first one."""
        service = ctx.extras.get("backend_handles", {}).get("service")
        lack = self.needs(service.capabilities) if service else None
        if lack:
            raise BackendError(f"combo: {lack}")
        legs = [self._leg(index, name, ctx) for index, name in enumerate(names_of(self.cfg.phases))]
        rows = {key: ctx.extras.get(key) for key in ("train_rows", "n_train_rows")}
        try:
            return _chain(legs, ctx)
        finally:
            ctx.extras.update(rows)

    def _leg(self, index: int, name: str, ctx: RunContext) -> Leg:
        phase = self.cfg.phases[index]
        rows: list[Row] = ctx.extras.get("train_rows", [])
        if phase.data is not None:
            load = ctx.extras.get("load_rows")
            if load is None:
                raise DataError(f"phase {name!r} has data of its own, which only a run from a config can load")
            rows = load(phase.data, f"algorithm.params.phases[{index}].data")
        # Built by the run where there is one, which then knows what of its settings was read.
        make = ctx.extras.get("build_algorithm")
        place = f"algorithm.params.phases[{index}].algorithm"
        return Leg(name=name, algorithm=make(phase.algorithm, place) if make else build(phase), rows=rows)


def _rank_of(phase: Phase) -> int | None:
    """The rank that the phase trains with; None where its algorithm has no such setting."""
    field = getattr(registry.config_model(registry.algorithms.get(phase.algorithm.kind)), "model_fields", {})
    return phase.algorithm.params.get("lora_rank", field["lora_rank"].default) if "lora_rank" in field else None


def build(phase: Phase) -> Any:
    """The phase's algorithm."""
    return registry.algorithms.build(phase.algorithm.kind, dict(phase.algorithm.params))


def names_of(phases: list[Phase]) -> list[str]:
    """The phases' names: as given, else the kind, with a number where several phases have the same."""
    kinds = [phase.algorithm.kind for phase in phases]
    names = []
    for index, phase in enumerate(phases):
        kind = kinds[index]
        numbered = f"{kind}_{kinds[: index + 1].count(kind)}" if kinds.count(kind) > 1 else kind
        names.append(phase.name or numbered)
    return names


@dataclass(slots=True, kw_only=True)
class Leg:
    """A phase, ready to run."""

    name: str
    algorithm: Any
    rows: list[Row]

    def train(self, ctx: RunContext, start_from: str | None, steps: PhaseSteps) -> RunResult:
        """Run the phase on its own rows, from given weights."""
        ctx.extras["train_rows"] = self.rows  # callbacks look there too
        ctx.extras["n_train_rows"] = len(self.rows)
        own = replace(
            ctx,
            start_from=start_from,
            stage=self.name if ctx.stage is None else f"{ctx.stage}.{self.name}",
            log_store=PhaseLog(ctx.log_store, steps),
            hooks=None if ctx.hooks is None else PhaseHooks(ctx.hooks, steps),
        )
        trained = self.algorithm.train(own)
        if not isinstance(trained, RunResult):
            raise EvsysError(f"phase {self.name!r}: train() must return a RunResult, not {type(trained).__name__}")
        return trained


def _chain(legs: list[Leg], ctx: RunContext) -> RunResult:
    """Run leg after leg, each from the weights of the one before."""
    result = RunResult(run_id=ctx.run_id, status="completed", metrics={"steps": 0, "tokens": 0})
    start = ctx.start_from
    for leg in legs:
        if start is None and leg is not legs[0]:
            raise BackendError(f"phase {leg.name!r} has nothing to start from: the one before left no resumable state")
        steps = PhaseSteps(name=leg.name, first=int(result.metrics["steps"]))
        trained = leg.train(ctx, start, steps)
        _merge(result, trained, steps)
        start = trained.artifacts.get("final_checkpoint")
        if trained.status != "completed":
            break
    for name in sorted(result.artifacts.keys() & {"final_checkpoint", "final_sampler"}):
        ctx.log_store.log_artifact(name, result.artifacts[name])
    return result


def _merge(result: RunResult, trained: RunResult, phase: PhaseSteps) -> None:
    """Add what a phase came to; status, error and final weights are those of the last one."""
    result.status, result.error = trained.status, trained.error
    result.metrics |= phase.named(trained.metrics)
    result.metrics["steps"] += max(phase.done, trained.metrics.get("steps", 0))
    result.metrics["tokens"] += trained.metrics.get("tokens", 0)
    of_phases = {key: path for key, path in result.artifacts.items() if "/" in key}
    here = {f"{phase.name}/{key}": path for key, path in trained.artifacts.items()}
    result.artifacts = of_phases | here | trained.artifacts
    if trained.extras:
        result.extras.setdefault("phases", {})[phase.name] = trained.extras
