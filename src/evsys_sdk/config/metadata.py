"""What an experiment says of itself: hypothesis, success metric, benchmarks.

In: the `metadata` block of the YAML. Out: `Metadata` and its parts; keys that are not declared stay free.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from evsys_sdk.config.base import InferenceSpec, JsonDict, KindSpec, Name, Strict
from evsys_sdk.protocols import EnvironmentSpec
from evsys_sdk.registry import Direction, better_direction
from evsys_sdk.score_names import score_key


class EnvironmentConfig(KindSpec):
    """Where tasks that need an environment find it; short: the kind alone."""

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec(kind=self.kind, params=dict(self.params))


def as_environment(value: object) -> object:
    """`docker` is short for `{kind: docker}`."""
    return {"kind": value} if isinstance(value, str) else value


EnvironmentChoice = Annotated[EnvironmentConfig, BeforeValidator(as_environment)]


class HostedModel(InferenceSpec):
    """A model that is not trained here, scored beside the arms: an inference client, or short `kind/model`."""

    name: Name | None = None
    """What it is called in the record; by default its `model` param, else its kind."""

    @property
    def label(self) -> str:
        return self.name or str(self.params.get("model") or self.kind)


def _as_hosted_model(value: object) -> object:
    if not isinstance(value, str):
        return value
    kind, _, model = value.partition("/")  # names of models have their own slashes
    return {"kind": kind, "params": {"model": model} if model else {}}


class BenchmarkEntry(Strict):
    """One suite of tasks to score the model on."""

    name: str | None = None
    """Label in the metrics; without `id` and `path` also what is looked up (newest version)."""
    id: str | None = None
    """Of a benchmark in the workspace."""
    path: str | None = None
    """A suite: a .jsonl file of tasks or a folder of task directories."""
    split: Literal["val", "test"] | None = None
    """Test scores select nothing."""
    tags: list[str] = Field(default_factory=list)
    """Words to find it by."""
    run_every: int | None = Field(default=None, ge=1)
    """Score the live model every N steps; without it, once after training."""
    metrics: list[Name] = Field(default_factory=lambda: ["pass@1"], min_length=1)
    """What is computed from the rewards."""
    num_samples: int | None = Field(default=None, ge=1)
    """Rollouts per task; by default as many as the largest k among the metrics."""
    max_tokens: int = Field(default=256, ge=1)
    """Per answer."""
    temperature: float = Field(default=1.0, ge=0)
    """Of the sampling."""
    limit: int | None = Field(default=None, ge=1)
    """Only the first tasks."""
    breakdown_keys: list[str] = Field(default_factory=list)
    """Metadata keys; a score for each of their values."""
    cluster_key: str | None = None
    """Metadata key of what tasks have in common, such as the template they were made from: intervals and verdicts count
    its values, not tasks. Without it, templates are looked for in task ids and texts."""
    baseline: bool = False
    """Score the untrained model too, first of all."""
    agent_import_path: str | None = None
    """The agent that the model works in on these tasks, as in `rl`. Without one it answers once."""
    agent_params: JsonDict = Field(default_factory=dict)
    """Params of the agent."""
    environment: EnvironmentChoice | None = None
    """Where tasks that need an environment find it: `sandbox` (this machine's, the default), `docker` or another of
    harbor's, or where a class of yours is; with settings as `{kind: docker, params: {...}}`."""
    chat_template: str | None = None
    """What renders these tasks instead of the model's own template: Jinja text, a file of it, or the name of a
    tinker-cookbook renderer."""
    n_concurrent: int | None = Field(default=None, ge=1)
    """Rollouts of this entry at a time, beside those of training; by default they share the run's 64 places."""
    max_attempts: int | None = Field(default=None, ge=1)
    """How often a call to the model that the machine broke is made, the first time included; by default 3."""
    models: list[Annotated[HostedModel, BeforeValidator(_as_hosted_model)]] = Field(default_factory=list)
    """API models to score once per experiment, beside the arms and never ranked among them."""
    engine: Literal["harbor"] = "harbor"
    """What carries out the rollouts."""

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

    @model_validator(mode="after")
    def _agent_and_models(self) -> BenchmarkEntry:
        if self.agent_params and self.agent_import_path is None:
            raise ValueError("agent_params are those of an agent: set agent_import_path too")
        if self.models and self.agent_import_path is not None:
            raise ValueError(
                "models are asked in words, without an agent, so their scores would not compare with those of "
                f"{self.agent_import_path}; give them a separate entry"
            )
        labels = [model.label for model in self.models]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"models need distinct names; twice: {', '.join(twice)} (set `name`)")
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

    @property
    def score_keys(self) -> list[str]:
        """How the entry's scores are called in the record."""
        return [score_key(self.role, self.label, metric) for metric in self.metrics]

    @field_validator("metrics")
    @classmethod
    def _no_slash(cls, metrics: list[str]) -> list[str]:
        wrong = next((metric for metric in metrics if "/" in metric), None)
        if wrong is not None:
            raise ValueError(f"a metric's name has no slash, and {wrong!r} has; slashes separate the parts of a score")
        return metrics


def _as_list(value: object) -> object:
    return [value] if isinstance(value, dict) else value


class SuccessMetric(Strict):
    """By which number arms are compared."""

    name: Name
    """The metric; `val/tools/pass@1` or its last part."""
    mode: Literal["max", "min"] | None = None
    """Whether more or less is better; by default as the metric itself says: less of a loss, more of `pass@1`."""

    @property
    def direction(self) -> Direction:
        """`mode`, or where it is not set the metric's own direction."""
        return better_direction(self.name, self.mode)


def as_success_metric(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


DIRECTIONS = {
    "higher": ("higher", "up", "increase", "greater", "more", "max"),
    "lower": ("lower", "down", "decrease", "smaller", "less", "min"),
}


def _as_direction(value: object) -> object:
    """`higher` or `lower`, also where it was said in another word."""
    word = value.strip().lower() if isinstance(value, str) else value
    return next((meant for meant, words in DIRECTIONS.items() if word in words), value)


def direction_word(mode: Direction) -> Literal["higher", "lower"]:
    """`higher` where more is better."""
    return "higher" if mode == "max" else "lower"


class Prediction(Strict):
    """What the numbers will show, if the claim is right."""

    arm: Name
    vs: Name | None = None
    """Another arm, or `untrained`; by default the baseline arm."""
    metric: Name | None = None
    """By default the success metric."""
    direction: Annotated[Literal["higher", "lower"] | None, BeforeValidator(_as_direction)] = None
    """Whether the arm's number is higher or lower; by default whichever of the two is better."""
    at_least: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """By how much, in the metric's own unit: 0.05 is five points of pass@1."""

    def __str__(self) -> str:
        metric, vs = self.metric or "the success metric", self.vs or "the baseline arm"
        by = f" by at least {self.at_least:g}" if self.at_least else ""
        better = self.direction or (direction_word(better_direction(self.metric)) if self.metric else "better")
        return f"{metric} of {self.arm} is {better} than that of {vs}{by}"


class Hypothesis(Strict):
    """A claim that the experiment can decide: frozen at its start, judged at its end."""

    claim: str = Field(min_length=1)
    prediction: Prediction
    confidence: float | None = Field(default=None, ge=0, le=1)
    """How likely you think it is, from 0 to 1; the outcome says how far off that was."""

    def __str__(self) -> str:
        sure = "" if self.confidence is None else f" (confidence {self.confidence:g})"
        return f"{self.claim.rstrip()}\nPrediction: {self.prediction}{sure}"


def _hypothesis_form(value: object) -> str:
    return "(typed)" if isinstance(value, dict | Hypothesis) else "(text)"


TextOrHypothesis = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[Hypothesis, Tag("(typed)")], Discriminator(_hypothesis_form)
]


class Metadata(Strict):
    """Free-form notes, in which the keys that the SDK reads are typed."""

    model_config = ConfigDict(extra="allow")

    hypothesis: TextOrHypothesis = ""
    """Text, or `{claim, prediction, confidence}`, which the finished experiment then judges."""
    tags: list[str] = Field(default_factory=list)
    """Words to find it by."""
    success_metric: Annotated[SuccessMetric | None, BeforeValidator(as_success_metric)] = None
    """What arms are compared by."""
    baseline_arm: Name | None = None
    """The arm that the others are compared with; by default the first."""
    allow_test_selection: bool = False
    """Let test scores pick the best arm; the conclusion then says so."""
    benchmark: Annotated[list[BenchmarkEntry], BeforeValidator(_as_list)] = Field(default_factory=list)
    """Suites of tasks that the weights are scored on."""

    @property
    def in_loop_scores(self) -> list[str]:
        """The validation scores that are made while a run trains."""
        return [key for entry in self.benchmark if entry.role == "val" and entry.run_every for key in entry.score_keys]

    def __getitem__(self, key: str) -> Any:
        """The reference calls metadata a dict, and it can be read like one."""
        if key not in self:
            raise KeyError(key)
        return getattr(self, key)

    def __contains__(self, key: object) -> bool:
        return key in type(self).model_fields or key in (self.model_extra or {})

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]  # pydantic's own gives pairs
        return iter([*type(self).model_fields, *(self.model_extra or {})])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key) if key in self else default

    def keys(self) -> KeysView[str]:
        return KeysView(self)

    def values(self) -> ValuesView[Any]:
        return ValuesView(self)

    def items(self) -> ItemsView[str, Any]:
        return ItemsView(self)

    @model_validator(mode="after")
    def _distinct_benchmarks(self) -> Metadata:
        keys = [(entry.role, entry.label) for entry in self.benchmark]
        twice = sorted({f"{role}/{label}" for role, label in keys if keys.count((role, label)) > 1})
        if twice:
            raise ValueError(f"benchmark entries need distinct names per split; twice: {', '.join(twice)}")
        return self


Mapping.register(Metadata)
