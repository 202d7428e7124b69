"""What was asked: the YAML as typed, strict models. An unknown key is an error at every level.

In: plain dicts. Out: `ExperimentConfig` and its parts. Names, types and defaults are those of the published
reference; what we added is said in the field's own line. `load` reads files, `sweep` expands sweeps, and
`evsys_sdk.explain` words the mistakes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from evsys_sdk.config.base import (
    CallbackSpec,
    DataStoreSpec,
    DeploySpec,
    JsonDict,
    LauncherSpec,
    LogStoreSpec,
    Name,
    Strict,
)
from evsys_sdk.config.metadata import Metadata
from evsys_sdk.config.research import ResearchSpec
from evsys_sdk.config.run_config import (
    NEEDED_BY_SOURCE,
    SOURCE_KEYS,
    BudgetSpec,
    ContinualConfig,
    DataConfig,
    EvalConfig,
    MatrixSpec,
    ModelConfig,
    Range,
    RunConfig,
    SearchSpec,
    Stage,
)
from evsys_sdk.config.sweep import expand_sweep, sample_runs

__all__ = [
    "NEEDED_BY_SOURCE",
    "SCHEMA_VERSION",
    "SOURCE_KEYS",
    "BudgetSpec",
    "ContinualConfig",
    "DataConfig",
    "EvalConfig",
    "ExperimentConfig",
    "MatrixSpec",
    "ModelConfig",
    "Range",
    "RunConfig",
    "SearchSpec",
    "Stage",
]

SCHEMA_VERSION = 1


def _read_false_as_off(value: object) -> object:
    return "off" if value is False else value  # YAML 1.1 reads a bare `off` as false


class ExperimentConfig(Strict):
    """The root of the YAML."""

    version: int = Field(default=SCHEMA_VERSION, ge=1)
    """Of the schema; advisory. A newer one than this SDK knows is reported."""
    name: Name
    description: str = ""
    """For people."""
    output_dir: Name = "./outputs"
    """The folder of all records."""
    data_store: DataStoreSpec = Field(default_factory=DataStoreSpec)
    """Where named data is read from."""
    log_store: LogStoreSpec = Field(default_factory=LogStoreSpec)
    """Where numbers per step are written to."""
    run: RunConfig | None = None
    """One run."""
    runs: list[RunConfig] | None = Field(default=None, min_length=1)
    """Several runs, each an arm."""
    matrix: MatrixSpec | None = None
    """A sweep: every combination of its axes is an arm."""
    search: SearchSpec | None = None
    """Instead of a fixed set of arms; its base is `base_run`, or `run`."""
    base_run: JsonDict | None = None
    """The matrix's base run may also stand here, beside it; that of a search does."""
    callbacks: list[CallbackSpec] = Field(default_factory=list)
    """Called at every event of a run."""
    n_repeats: int = Field(default=1, ge=1, le=1000)
    """Seeds per arm."""
    base_seed: int | None = Field(default=None, ge=0, lt=2**63 - 1000)
    """First seed of the repeats; by default each run's own `seed`."""
    max_concurrent_arms: int = Field(default=1, ge=1)
    """Runs at the same time."""
    launcher: LauncherSpec = Field(default_factory=LauncherSpec)
    """Where runs execute: `local`, in this process; `ray`, on a Ray cluster."""
    deploy: DeploySpec | None = None
    """Where the best arm's weights go when the verdict names one; `evsys deploy` does it by hand."""
    budget: BudgetSpec | None = None
    """A hard stop; what was trained and scored until then stays in the record."""
    leakage: Annotated[Literal["error", "warn", "off"], BeforeValidator(_read_false_as_off)] = "warn"
    """What to do when training rows hold tasks of a benchmark that the experiment or the workspace knows."""
    imports: list[Name] | None = None
    """Modules to import before look-ups. By default a `src/` package beside the config or at the project's root."""
    parent_experiment_id: str | None = None
    """The experiment that this one was made from."""
    research: ResearchSpec | None = None
    """What `evsys research` may change and spend; `evsys run` leaves it alone."""
    metadata: Metadata = Field(default_factory=Metadata)
    """Hypothesis, success metric, benchmarks."""

    @model_validator(mode="after")
    def _exactly_one(self) -> ExperimentConfig:
        given = [key for key in ("run", "runs", "matrix", "search") if getattr(self, key) is not None]
        if given == ["run", "search"]:
            if self.base_run is not None:
                raise ValueError("a search has one base, and found run and base_run; keep one")
            return self
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"exactly one of run, runs, matrix, search must be set; found {found}")
        if self.base_run is not None and self.matrix is None and self.search is None:
            raise ValueError("base_run belongs to matrix or search, and there is none")
        return self

    def all_runs(self) -> list[RunConfig]:
        """Every arm, the sweep expanded; of a search that draws, runs that have each value of its space once."""
        if self.search is not None:
            return sample_runs(self)
        config = expand_sweep(self)
        return [config.run] if config.run is not None else list(config.runs or [])
