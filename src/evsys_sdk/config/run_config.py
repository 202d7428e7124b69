"""What one run is, and the sweeps and searches that stand for several: typed, strict models.

In: plain dicts. Out: `RunConfig`, `MatrixSpec`, `SearchSpec` and their parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from evsys_sdk.config.base import (
    AlgorithmConfig,
    BackendConfig,
    InferenceSpec,
    JsonDict,
    MetricSpec,
    Name,
    Strict,
    TransformSpec,
)
from evsys_sdk.config.metadata import SuccessMetric, as_success_metric


class ModelConfig(Strict):
    """Which weights to start from."""

    name: Name
    load_checkpoint_path: str | None = None
    """Weights to train on from: a path, or a checkpoint by name: `<run>@final`, `<run>@step-12`."""
    renderer_name: str | None = None
    """How messages become tokens; by default as the model says."""


SOURCE_KEYS = ("path", "rows", "hf_dataset", "hf_split")
"""Settings of data sources that stand in the `data` block itself."""
NEEDED_BY_SOURCE = {
    "jsonl": "path", "json": "path", "csv": "path", "parquet": "path", "in_memory": "rows", "hf_dataset": "hf_dataset",
}  # fmt: skip


class DataConfig(Strict):
    """Where raw rows come from and how they become training rows."""

    source_kind: str = Field(default="jsonl", min_length=1)
    """Where the rows come from: a registered data source."""
    path: str | None = None
    """A file of rows."""
    rows: list[JsonDict] | None = None
    """The rows themselves, in the YAML."""
    hf_dataset: str | None = None
    """A dataset on the Hugging Face hub."""
    hf_split: str = "train"
    """The split of `hf_dataset`."""
    source_params: JsonDict = Field(default_factory=dict)
    """More settings of the source, as its schema lists them."""
    dataset_id: str | None = None
    """A workspace dataset by id; the source keys above are then not used."""
    dataset_name: str | None = None
    """A workspace dataset by name: its newest version."""
    transforms: list[TransformSpec] = Field(default_factory=list)
    """Applied to the rows, in this order."""

    @model_validator(mode="after")
    def _has_a_source(self) -> DataConfig:
        if self.dataset_id and self.dataset_name:
            raise ValueError("dataset_id and dataset_name are both set; keep one")
        if self.dataset_id or self.dataset_name:
            return self
        needed = NEEDED_BY_SOURCE.get(self.source_kind)
        if needed is not None and getattr(self, needed) is None:
            raise ValueError(f"source_kind {self.source_kind} needs `{needed}` (or dataset_id, or dataset_name)")
        named = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}.get(Path(self.path or "").suffix)
        if named and self.source_kind in ("jsonl", "json"):
            raise ValueError(f"path {self.path!r} is not read as {self.source_kind}; set source_kind: {named}")
        return self


class EvalConfig(Strict):
    """Scoring of the trained model on rows that carry their own answers."""

    enabled: bool = True
    """Whether the rows are scored after training."""
    metrics: list[MetricSpec] = Field(default_factory=list)
    """What is computed from the answers."""
    inference: InferenceSpec | None = None
    """The client that answers; by default the trained weights."""
    eval_data: DataConfig | None = None
    """Rows to ask; by default the training rows."""
    n_samples: int | None = Field(default=None, ge=1)
    """At most so many rows."""


class Stage(Strict):
    """One dataset of a continual chain."""

    name: Name
    data: DataConfig


class ContinualConfig(Strict):
    """Train on several datasets in order, each stage starting from the weights of the one before."""

    stages: list[Stage] = Field(min_length=1)
    """Datasets in the order in which they are trained on."""

    @model_validator(mode="after")
    def _distinct(self) -> ContinualConfig:
        names = [stage.name for stage in self.stages]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"stage names must differ; twice: {', '.join(twice)}")
        return self


class RunConfig(Strict):
    """One arm: a choice of data and a choice of recipe."""

    name: Name
    data: DataConfig | None = None
    """Required, except beside `continual`, whose stages bring their own."""
    model: ModelConfig
    """What is trained."""
    algorithm: AlgorithmConfig
    """How the weights change."""
    backend: BackendConfig = Field(default_factory=BackendConfig)
    """Where the training runs."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    """Scoring of rows after training."""
    continual: ContinualConfig | None = None
    """Stages that are trained one after the other."""
    seed: int = Field(default=42, ge=0, lt=2**63)
    """Of everything that is drawn: rows, weights, samples."""
    tags: list[str] = Field(default_factory=list)
    """Words to find it by."""

    @model_validator(mode="after")
    def _has_data(self) -> RunConfig:
        if self.data is None and self.continual is None:
            raise ValueError("needs `data` (or `continual` with stages)")
        return self


class BudgetSpec(Strict):
    """What an experiment may spend, all its runs together; a limit that is not set is none."""

    steps: int | None = Field(default=None, ge=1)
    """Optimiser steps."""
    tokens: int | None = Field(default=None, ge=1)
    """Tokens trained on."""
    seconds: float | None = Field(default=None, gt=0)
    """Wall-clock time of one `evsys run`."""
    usd: float | None = Field(default=None, gt=0)
    """What hosted models and judges charge, as far as their prices are known."""
    trials: int | None = Field(default=None, ge=1)
    """Runs: arms times seeds."""

    @model_validator(mode="after")
    def _some_limit(self) -> BudgetSpec:
        if not self.model_fields_set:
            raise ValueError("a budget needs at least one of steps, tokens, seconds, usd, trials")
        return self


class MatrixSpec(Strict):
    """A sweep: every combination of the axes, applied to a base run."""

    axes: dict[str, list[Any]] = Field(min_length=1)
    """Setting -> values; a dotted path below the run."""
    base_run: JsonDict | None = None
    """What all arms of the sweep share."""
    name_template: str | None = None
    """How an arm is named, with the last words of its axes in braces."""


class Range(Strict):
    """Numbers from `low` to `high`, both included."""

    low: float = Field(allow_inf_nan=False)
    high: float = Field(allow_inf_nan=False)
    log: bool = False
    """Drawn evenly on a logarithmic scale, as for learning rates."""
    int: bool = False
    """Whole numbers only."""

    @model_validator(mode="after")
    def _not_empty(self) -> Range:
        if self.low >= self.high:
            raise ValueError(f"low must be below high, and {self.low:g} is not below {self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError("a logarithmic range needs low above 0")
        if self.int and not (self.low.is_integer() and self.high.is_integer()):
            raise ValueError("a range of whole numbers needs whole numbers for low and high")
        return self


def _axis_form(value: object) -> str:
    return "(range)" if isinstance(value, dict | Range) else "(values)"


Axis = Annotated[Annotated[list[Any], Tag("(values)")] | Annotated[Range, Tag("(range)")], Discriminator(_axis_form)]


class SearchSpec(Strict):
    """A search: which settings to try next is decided as scores come in."""

    kind: Literal["grid", "random", "tpe", "halving"]
    """grid: every combination. random: drawn evenly. tpe: drawn near what scored well. halving: all begin, the best
    continue."""
    space: dict[str, Axis] = Field(min_length=1)
    """Dotted setting of the run -> a list of values, or `{low, high, log, int}`."""
    objective: Annotated[SuccessMetric | None, BeforeValidator(as_success_metric)] = None
    """What to search for; by default the success metric."""
    max_trials: int | None = Field(default=None, ge=1, le=10_000)
    """Arms; by default every combination, where there are finitely many."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of the draws; the runs have their own."""
    min_steps: int | None = Field(default=None, ge=1)
    """halving: the step at which the first are left behind."""
    eta: int = Field(default=3, ge=2)
    """halving: one in so many continues, to so many times the steps."""
    startup_trials: int = Field(default=10, ge=1)
    """tpe: so many are drawn evenly first."""
    budget: BudgetSpec | None = None
    """Beside the experiment's own; the tighter limit holds."""
    name_template: str | None = None
    """As in a matrix; `{trial}` is the trial's number."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> SearchSpec:
        owners = {"min_steps": "halving", "eta": "halving", "startup_trials": "tpe"}
        for key, kind in owners.items():
            if key in self.model_fields_set and self.kind != kind:
                raise ValueError(f"{key} belongs to kind {kind}, and this is {self.kind}")
        if self.kind == "halving" and self.min_steps is None:
            raise ValueError("halving needs min_steps: the step at which the first trials are left behind")
        if self.kind == "grid" and self.max_trials is not None:
            raise ValueError("a grid is every combination; for max_trials of them use kind random")
        if self.kind != "grid" and self.name_template is not None and "{trial}" not in self.name_template:
            raise ValueError("name_template needs {trial}: two trials may draw values that look alike")
        return self

    @model_validator(mode="after")
    def _has_an_end(self) -> SearchSpec:
        ranges = [path for path, axis in self.space.items() if isinstance(axis, Range)]
        if ranges and self.kind == "grid":
            raise ValueError(f"a grid needs lists of values, and {ranges[0]} is a range; use kind random or tpe")
        if self.max_trials is None and (ranges or self.kind in ("random", "tpe")):
            raise ValueError("max_trials is missing; without it this search has no end")
        return self
