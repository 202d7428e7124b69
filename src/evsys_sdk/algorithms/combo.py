"""Several algorithms in a row on one set of weights: what a phase learnt is where the next one begins.

In: phases, each an algorithm and, if it needs other rows than the run's, its data. Out: one `RunResult`, with the final
weights of the last phase. Steps count on from phase to phase, and every metric carries the name of its phase.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from evsys_sdk import registry
from evsys_sdk.config.base import AlgorithmConfig, JsonDict, Name, Params
from evsys_sdk.config.schema import DataConfig
from evsys_sdk.errors import BackendError, DataError, EvsysError
from evsys_sdk.protocols import Hooks, KeptWeights, LogStore, Row, RunContext, RunResult, Snapshot
from evsys_sdk.registry import Registry, register_algorithm
from evsys_sdk.training_api import Capabilities

# A phase reports steps from 1; the run's log store and hooks get them counted on from the phases before, with metrics
# named after the phase.


@dataclass(slots=True, kw_only=True)
class PhaseSteps:
    """Where a phase stands."""

    name: str
    first: int
    """Steps of the phases before."""
    done: int = 0
    """Steps of this one."""

    def reached(self, step: int) -> None:
        self.done = max(self.done, step)

    def named(self, metrics: dict[str, float]) -> dict[str, float]:
        return {f"{self.name}/{key}": value for key, value in metrics.items()}

    def of_step(self, metrics: dict[str, float]) -> dict[str, float]:
        # The budget counts the tokens of a step by this name, whatever the phase.
        return self.named(metrics) | {key: value for key, value in metrics.items() if key == "tokens"}


@dataclass(slots=True)
class PhaseLog:
    """The run's log store as one phase sees it."""

    store: LogStore
    phase: PhaseSteps

    def log_scalar(self, name: str, value: float, step: int) -> None:
        self.log_metrics({name: value}, step)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.phase.reached(step)
        self.store.log_metrics(self.phase.of_step(metrics), self.phase.first + step)

    def log_hyperparams(self, hparams: JsonDict) -> None:
        self.store.log_hyperparams({f"{self.phase.name}/{key}": value for key, value in hparams.items()})

    def log_artifact(self, name: str, path: str) -> None:
        self.store.log_artifact(f"{self.phase.name}/{name}", path)

    def close(self) -> None:
        """The store is the run's, which closes it."""


@dataclass(slots=True)
class PhaseHooks:
    """The loop's line to the outside as one phase sees it."""

    hooks: Hooks
    phase: PhaseSteps

    def train_start(self, total_steps: int | None) -> None:
        self.hooks.train_start(None if total_steps is None else self.phase.first + total_steps)

    def step_start(self, step: int) -> None:
        self.hooks.step_start(self.phase.first + step)

    async def step_end(self, step: int, metrics: dict[str, float], snapshot: Snapshot) -> None:
        self.phase.reached(step)
        await self.hooks.step_end(self.phase.first + step, self.phase.of_step(metrics), snapshot)

    def pay(self, call: str, usd: float) -> None:
        self.hooks.pay(call, usd)

    def check_budget(self) -> None:
        self.hooks.check_budget()

    def checkpoint(self, step: int, path: str, *, planned: bool = True) -> None:
        self.hooks.checkpoint(self.phase.first + step, path, planned=planned)

    def flush(self) -> None:
        self.hooks.flush()

    def recorded_steps(self) -> int:
        return max(0, self.hooks.recorded_steps() - self.phase.first)

    async def resumed(self, last: KeptWeights) -> None:
        self.phase.reached(last.step)
        await self.hooks.resumed(
            replace(last, step=self.phase.first + last.step, metrics=self.phase.of_step(last.metrics))
        )

    def best(self, metric: str, mode: Literal["max", "min"], *, after: int = 0) -> tuple[int, float] | None:
        found = self.hooks.best(metric, mode, after=self.phase.first + after)
        return (found[0] - self.phase.first, found[1]) if found else None

    async def train_end(self, metrics: dict[str, float]) -> None:
        await self.hooks.train_end(self.phase.named(metrics))

    def should_stop(self) -> str | None:
        return self.hooks.should_stop()


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


def _check(kinds: Registry, kind: str, params: JsonDict) -> None:
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
        """Phases in order: an algorithm each, with separate data where that differs."""

        @classmethod
        def scored_settings(cls, params: Mapping[str, Any]) -> JsonDict:
            settings = super().scored_settings(params)
            for phase in settings["phases"]:
                del phase["name"]
                phase["algorithm"] = registry.scored_block(registry.algorithms, **phase["algorithm"])
            return settings

        @model_validator(mode="after")
        def _distinct(self) -> Combo.Config:
            twice = [name for name, count in Counter(names_of(self.phases)).items() if count > 1]
            if twice:
                raise ValueError(f"phase names must differ; twice: {', '.join(twice)}")
            return self

        @model_validator(mode="after")
        def _one_adapter(self) -> Combo.Config:
            ranks: dict[str, int | None] = {}  # None where an algorithm has no such setting
            for name, phase in zip(names_of(self.phases), self.phases, strict=True):
                model = registry.config_model(registry.algorithms.get(phase.algorithm.kind))
                field = model.model_fields.get("lora_rank") if model is not None else None
                ranks[name] = phase.algorithm.params.get("lora_rank", field.default) if field is not None else None
            if len({rank for rank in ranks.values() if rank is not None}) > 1:
                said = ", ".join(f"{name}: {rank}" for name, rank in ranks.items())
                raise ValueError(
                    f"the phases hand one adapter on, so lora_rank must be the same in all of them ({said})"
                )
            return self

    def __init__(self, **params: Any):
        self.cfg = self.Config(**params)

    @property
    def supports_resume(self) -> bool:
        """Whether an interrupted run resumes from its checkpoint in every phase."""
        return all(getattr(build(phase), "supports_resume", True) for phase in self.cfg.phases)

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

    def _leg(self, index: int, name: str, ctx: RunContext) -> PhaseRun:
        phase = self.cfg.phases[index]
        rows: list[Row] = ctx.extras.get("train_rows", [])
        if phase.data is not None:
            load = ctx.extras.get("load_rows")
            if load is None:
                raise DataError(f"phase {name!r} has its own data, which only a run from a config can load")
            rows = load(phase.data, f"algorithm.params.phases[{index}].data")
        # Built by the run where there is one, which then knows what of its settings was read.
        make = ctx.extras.get("build_algorithm")
        place = f"algorithm.params.phases[{index}].algorithm"
        return PhaseRun(name=name, algorithm=make(phase.algorithm, place) if make else build(phase), rows=rows)


def build(phase: Phase) -> object:
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
class PhaseRun:
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


def _chain(legs: list[PhaseRun], ctx: RunContext) -> RunResult:
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
    """Add the result of a phase; status, error and final weights are those of the last one."""
    result.status, result.error = trained.status, trained.error
    result.metrics |= phase.named(trained.metrics)
    # An algorithm need not report `steps`; those that its log calls and hooks told of are counted all the same.
    result.metrics["steps"] += max(phase.done, trained.metrics.get("steps", 0))
    result.metrics["tokens"] += trained.metrics.get("tokens", 0)
    of_phases = {key: path for key, path in result.artifacts.items() if "/" in key}
    here = {f"{phase.name}/{key}": path for key, path in trained.artifacts.items()}
    result.artifacts = of_phases | here | trained.artifacts
    # A phase that stopped early does not end the run: the next one begins, so that is a note of the phase.
    early = {"stopped_early": trained.stopped_early} if trained.stopped_early else {}
    if trained.extras or early:
        result.extras.setdefault("phases", {})[phase.name] = trained.extras | early
