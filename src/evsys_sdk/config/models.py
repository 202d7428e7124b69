"""What was asked: the YAML as typed, strict models. An unknown key is an error at every level.

In: plain dicts. Out: `ExperimentConfig` and its parts. Names, types and defaults are those of the published
reference; what we added is said in the field's own line. How files are read is `files`, how sweeps
expand is `matrix`, how mistakes are told is `explain`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from evsys_sdk.config.reading import Tracked

JsonDict = dict[str, Any]
SCHEMA_VERSION = 1


class Strict(Tracked, BaseModel):
    """A config model: unknown keys are refused, and reads are noted (see `reading`)."""

    model_config = ConfigDict(extra="forbid", validate_default=False, protected_namespaces=())


class Params(Tracked, BaseModel):
    """Base for an extension's `Config`. Optional: any pydantic model works."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    if any(ord(letter) < 32 or 0xD800 <= ord(letter) <= 0xDFFF for letter in text):
        raise ValueError("must be plain text without control characters")
    return text


Name = Annotated[str, AfterValidator(_not_blank)]


class KindSpec(Strict):
    """`{kind, params}`: a registry key and the settings of what it names."""

    kind: Name
    params: JsonDict = Field(default_factory=dict)


class AlgorithmConfig(KindSpec): ...


class VerifierSpec(KindSpec): ...


class MetricSpec(KindSpec): ...


class TransformSpec(KindSpec): ...


class InferenceSpec(KindSpec): ...


class CallbackSpec(KindSpec): ...


class DataStoreSpec(KindSpec):
    kind: Name = "local"


class LogStoreSpec(KindSpec):
    kind: Name = "jsonl"


class BackendConfig(KindSpec):
    kind: Name = "tinker"


class ModelConfig(Strict):
    """Which weights to start from."""

    name: Name
    load_checkpoint_path: str | None = None
    renderer_name: str | None = None


class DataConfig(Strict):
    """Where raw rows come from and how they become training rows."""

    source_kind: Literal["jsonl", "json", "in_memory", "hf_dataset"] = "jsonl"
    path: str | None = None
    rows: list[JsonDict] | None = None
    hf_dataset: str | None = None
    hf_split: str = "train"
    dataset_id: str | None = None
    """A workspace dataset by id; the source keys above are then not used."""
    dataset_name: str | None = None
    """A workspace dataset by name: its newest version."""
    transforms: list[TransformSpec] = Field(default_factory=list)

    @model_validator(mode="after")
    def _has_a_source(self) -> DataConfig:
        if self.dataset_id and self.dataset_name:
            raise ValueError("dataset_id and dataset_name are both set; keep one")
        if self.dataset_id or self.dataset_name:
            return self
        needed = {"jsonl": "path", "json": "path", "in_memory": "rows", "hf_dataset": "hf_dataset"}[self.source_kind]
        if getattr(self, needed) is None:
            raise ValueError(f"source_kind {self.source_kind} needs `{needed}` (or dataset_id, or dataset_name)")
        return self


class EvalConfig(Strict):
    """Scoring of the trained model on rows that carry their own answers."""

    enabled: bool = True
    metrics: list[MetricSpec] = Field(default_factory=list)
    inference: InferenceSpec | None = None
    eval_data: DataConfig | None = None
    n_samples: int | None = Field(default=None, ge=1)


class Stage(Strict):
    """One dataset of a continual chain."""

    name: Name
    data: DataConfig


class ContinualConfig(Strict):
    """Train on several datasets in order, each stage starting from the weights of the one before."""

    stages: list[Stage] = Field(min_length=1)

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
    algorithm: AlgorithmConfig
    backend: BackendConfig = Field(default_factory=BackendConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    continual: ContinualConfig | None = None
    seed: int = Field(default=42, ge=0, lt=2**63)
    tags: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _has_data(self) -> RunConfig:
        if self.data is None and self.continual is None:
            raise ValueError("needs `data` (or `continual` with stages)")
        return self


class BenchmarkEntry(Strict):
    """One suite of tasks to score the model on."""

    name: str | None = None
    """Label in the metrics; without `id` and `path` also what is looked up (newest version)."""
    id: str | None = None
    path: str | None = None
    split: Literal["val", "test"] | None = None
    tags: list[str] = Field(default_factory=list)
    run_every: int | None = Field(default=None, ge=1)
    """Score the live model every N steps; without it, once after training."""
    metrics: list[Name] = Field(default_factory=lambda: ["pass@1"], min_length=1)
    num_samples: int | None = Field(default=None, ge=1)
    """Rollouts per task; by default as many as the largest k among the metrics."""
    max_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    limit: int | None = Field(default=None, ge=1)
    breakdown_keys: list[str] = Field(default_factory=list)
    baseline: bool = False
    """Score the untrained model too, first of all."""
    engine: Literal["harbor"] = "harbor"

    @model_validator(mode="after")
    def _complete(self) -> BenchmarkEntry:
        if not (self.name or self.id or self.path):
            raise ValueError("needs `id`, `name` or `path`")
        if self.id and self.path:
            raise ValueError("id and path are both set; keep one")
        roles = {tag for tag in self.tags if tag in ("val", "test")}
        if len(roles | ({self.split} if self.split else set())) > 1:
            raise ValueError("split and tags disagree: an entry is val or test, not both")
        return self

    @property
    def role(self) -> str:
        """`val` or `test`: the label that keeps scores apart and guards selection. Unlabelled means test."""
        if self.split:
            return self.split
        return "val" if "val" in self.tags else "test"

    @property
    def label(self) -> str:
        return self.name or self.id or str(self.path).rstrip("/").split("/")[-1]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


class SuccessMetric(Strict):
    """By which number arms are compared."""

    name: Name
    mode: Literal["max", "min"] = "max"


def _as_success_metric(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class Metadata(Strict):
    """Free-form notes, in which the keys that the SDK reads are typed."""

    model_config = ConfigDict(extra="allow")

    hypothesis: str = ""
    tags: list[str] = Field(default_factory=list)
    success_metric: Annotated[SuccessMetric | None, BeforeValidator(_as_success_metric)] = None
    benchmark: Annotated[list[BenchmarkEntry], BeforeValidator(_as_list)] = Field(default_factory=list)

    def __getitem__(self, key: str) -> Any:
        """The reference calls metadata a dict, and it can be read like one."""
        if key not in self:
            raise KeyError(key)
        return getattr(self, key)

    def __contains__(self, key: object) -> bool:
        return key in type(self).model_fields or key in (self.model_extra or {})

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key) if key in self else default

    @model_validator(mode="after")
    def _distinct_benchmarks(self) -> Metadata:
        keys = [(entry.role, entry.label) for entry in self.benchmark]
        twice = sorted({f"{role}/{label}" for role, label in keys if keys.count((role, label)) > 1})
        if twice:
            raise ValueError(f"benchmark entries need distinct names per split; twice: {', '.join(twice)}")
        return self


class MatrixSpec(Strict):
    """A sweep: every combination of the axes, applied to a base run."""

    axes: dict[str, list[Any]] = Field(min_length=1)
    base_run: JsonDict | None = None
    name_template: str | None = None


class ExperimentConfig(Strict):
    """The root of the YAML."""

    version: int = Field(default=SCHEMA_VERSION, ge=1)
    """Of the schema; advisory. A newer one than this SDK knows is reported."""
    name: Name
    description: str = ""
    output_dir: Name = "./outputs"
    data_store: DataStoreSpec = Field(default_factory=DataStoreSpec)
    log_store: LogStoreSpec = Field(default_factory=LogStoreSpec)
    run: RunConfig | None = None
    runs: list[RunConfig] | None = Field(default=None, min_length=1)
    matrix: MatrixSpec | None = None
    base_run: JsonDict | None = None
    """The matrix's base run may also stand here, beside it."""
    callbacks: list[CallbackSpec] = Field(default_factory=list)
    n_repeats: int = Field(default=1, ge=1, le=1000)
    """Seeds per arm."""
    base_seed: int | None = Field(default=None, ge=0, lt=2**63 - 1000)
    """First seed of the repeats; by default each run's own `seed`."""
    max_concurrent_arms: int = Field(default=1, ge=1)
    imports: list[Name] | None = None
    """Modules to import before look-ups. By default a `src/` package beside the config or at the project's root."""
    parent_experiment_id: str | None = None
    metadata: Metadata = Field(default_factory=Metadata)

    @model_validator(mode="after")
    def _exactly_one(self) -> ExperimentConfig:
        given = [key for key in ("run", "runs", "matrix") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of run, runs, matrix must be set; found {' and '.join(given) or 'none'}")
        if self.base_run is not None and self.matrix is None:
            raise ValueError("base_run belongs to matrix, and there is none")
        return self

    def all_runs(self) -> list[RunConfig]:
        """Every arm, the sweep expanded."""
        from evsys_sdk.config.matrix import expanded

        config = expanded(self)
        return [config.run] if config.run is not None else list(config.runs or [])
