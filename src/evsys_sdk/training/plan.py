"""How a loop trains: the settings that all algorithms share, and the plan that the loop follows.

In: `LoopParams`, from the YAML's `algorithm.params`. Out: a `LoopPlan`. Schedule, optimiser and the cadence of
checkpoints are decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from evsys_sdk.config.base import JsonDict, Params, tunable
from evsys_sdk.registry import better_direction
from evsys_sdk.score_names import names_split
from evsys_sdk.training.batch import ScheduleName, learning_rate, warmup_length
from evsys_sdk.training_api import AdamParams


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlan:
    """How many steps, how large, and what is kept."""

    total_steps: int
    learning_rate: Callable[[int], float]
    """Step (1-based) -> rate."""
    grad_accumulation: int = 1
    """Forward/backward calls that one batch is split into."""
    max_grad_norm: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    save_every: int | None = None
    save_at: frozenset[int] = frozenset()
    """Steps to keep the weights of, beside those."""
    best_by: str | None = None
    """The in-loop score that says which evaluated checkpoint is the best one."""
    best_mode: Literal["max", "min"] = "max"

    def adam(self, step: int) -> AdamParams:
        """The optimiser's settings of a step."""
        return AdamParams(
            learning_rate=self.learning_rate(step),
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            grad_clip_norm=self.max_grad_norm,
        )

    def saves(self, step: int) -> bool:
        """Whether the weights are kept after this step. The last step's always are, and a stopped run's."""
        return step in self.save_at or bool(self.save_every and step % self.save_every == 0)


class LoopParams(Params):
    """Settings of every algorithm that trains in steps."""

    not_scored = frozenset(["save_every", "save_at_fractions"])

    learning_rate: float = Field(
        default=1e-4, gt=0, allow_inf_nan=False, json_schema_extra=tunable(1e-6, 1e-2, log=True)
    )
    """Of the optimiser, at its highest."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, json_schema_extra=tunable(0.8, 0.99))
    """AdamW's decay of the running mean of gradients."""
    adam_beta2: float = Field(default=0.95, ge=0, lt=1, json_schema_extra=tunable(0.9, 0.999))
    """AdamW's decay of the running mean of squared gradients."""
    adam_eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False, json_schema_extra=tunable(1e-10, 1e-6, log=True))
    """What AdamW adds to the root of the squares before it divides by it."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False, json_schema_extra=tunable(0.0, 0.3))
    """AdamW's decoupled weight decay: each step takes learning_rate * weight_decay of every trained weight away."""
    num_epochs: int = Field(default=1, ge=1, json_schema_extra=tunable(1, 8, log=True, when={"max_steps": None}))
    """Passes over the rows."""
    max_steps: int | None = Field(default=None, ge=1)
    """The number of steps, however many epochs that takes; wins over `num_epochs`."""
    batch_size: int = Field(default=8, ge=1, json_schema_extra=tunable(1, 64, log=True))
    """Rows per forward/backward call."""
    grad_accumulation: int = Field(default=1, ge=1, json_schema_extra=tunable(1, 8, log=True))
    """Calls per optimiser step, which so learns from batch_size * grad_accumulation rows."""
    max_grad_norm: float = Field(default=0.0, ge=0, allow_inf_nan=False, json_schema_extra=tunable(0.1, 10.0, log=True))
    """Gradients with a larger norm are scaled down to it; 0 turns clipping off."""
    lr_schedule: ScheduleName = Field(default="constant", json_schema_extra=tunable())
    """How the learning rate falls after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises from 0."""
    warmup_fraction: float = Field(
        default=0.0, ge=0, le=1, json_schema_extra=tunable(0.0, 0.3, when={"warmup_steps": 0})
    )
    """Instead of `warmup_steps`: this part of all steps."""
    lora_rank: int = Field(default=8, ge=0, json_schema_extra=tunable(1, 64, log=True))
    """0 trains all weights."""
    save_every: int | None = Field(default=None, ge=1)
    """Keep weights and optimiser every so many steps; an interrupted run resumes from the last ones kept."""
    save_at_fractions: list[Annotated[float, Field(gt=0, le=1)]] = Field(default_factory=list)
    """Keep them also after these parts of all steps: 0.5 is half-way, rounded to the nearest step."""
    best_by: str | None = Field(default=None, min_length=1)
    """An in-loop score, such as `pass@1` or `val/<benchmark>/<metric>`: the run ends with the evaluated weights
    that are best by it."""
    best_mode: Literal["max", "min"] | None = None
    """Whether more or less of `best_by` is better; by default as the metric itself says."""

    @classmethod
    def scored_settings(cls, params: Mapping[str, Any]) -> JsonDict:
        settings = super().scored_settings(params)
        if settings["max_steps"] is not None:
            del settings["num_epochs"]  # `max_steps` wins over it
        return settings

    @field_validator("best_by")
    @classmethod
    def _not_by_the_test_set(cls, metric: str | None) -> str | None:
        if metric and (names_split(metric, "test") or names_split(metric, "eval")):
            raise ValueError("weights are chosen by a validation score: val/<benchmark>/<metric>")
        return metric

    @model_validator(mode="after")
    def _one_warmup(self) -> LoopParams:
        if self.warmup_steps and self.warmup_fraction:
            raise ValueError("warmup_steps and warmup_fraction are both set; keep one")
        return self

    def planned_steps(self, per_epoch: int | None) -> int | None:
        """Steps this recipe asks for; None when it names neither steps nor an amount of data."""
        if self.max_steps is not None:
            return self.max_steps
        return None if per_epoch is None else per_epoch * self.num_epochs

    def plan(self, planned: int, *, at_most: int | None = None) -> LoopPlan:
        """The plan of a loop of `planned` steps, of which `--steps` may allow fewer."""
        # The schedule is the recipe's, so that a run cut short by --steps is the beginning of the full one.
        peak, shape = self.learning_rate, self.lr_schedule
        warmup = warmup_length(planned, warmup_steps=self.warmup_steps, warmup_fraction=self.warmup_fraction)
        total = planned if at_most is None else min(planned, at_most)
        return LoopPlan(
            total_steps=total,
            learning_rate=lambda s: learning_rate(s, peak=peak, total_steps=planned, shape=shape, warmup=warmup),
            grad_accumulation=self.grad_accumulation,
            max_grad_norm=self.max_grad_norm,
            beta1=self.adam_beta1,
            beta2=self.adam_beta2,
            eps=self.adam_eps,
            weight_decay=self.weight_decay,
            save_every=self.save_every,
            save_at=frozenset(max(1, round(part * planned)) for part in self.save_at_fractions),
            best_by=self.best_by,
            best_mode=better_direction(self.best_by or "", self.best_mode),
        )
