"""The `research` block: what `evsys research` may change, spend and ask.

In: the block of the YAML. Out: `ResearchSpec`. `evsys run` does not read it: it runs the config's own recipe.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from evsys_sdk.config.base import KindSpec, Name, Strict
from evsys_sdk.config.run_config import Axis


class ProposerSpec(KindSpec):
    """Who proposes."""

    share: float | None = Field(default=None, gt=0, le=1)
    """At most this part of the launched trials; by default all for `evolve`, 0.3 for every other kind."""


class ResearchBudget(Strict):
    """What the research as a whole may spend; a limit that is not set is none."""

    trials: int | None = Field(default=None, ge=1)
    """Recipes that are launched, the config's own included."""
    steps: int | None = Field(default=None, ge=1)
    """Optimiser steps, over all trials and seeds."""
    tokens: int | None = Field(default=None, ge=1)
    """Tokens trained on."""
    seconds: float | None = Field(default=None, gt=0)
    """Wall-clock time, over all processes that resumed it."""
    usd: float | None = Field(default=None, gt=0)
    """What hosted models charge, proposals included, as far as their prices are known."""

    @model_validator(mode="after")
    def _some_limit(self) -> ResearchBudget:
        if not self.model_fields_set:
            raise ValueError("a budget needs at least one of trials, steps, tokens, seconds, usd")
        return self


class RungSpec(Strict):
    """Judging candidates early: those behind at a rung stop there, the others resume exactly."""

    min_steps: int = Field(ge=1)
    """The first rung."""
    eta: int = Field(default=3, ge=2)
    """Each further rung lies so many times later."""


def _space_form(value: object) -> str:
    return "(auto)" if isinstance(value, str) else "(settings)"


SpaceChoice = Annotated[
    Annotated[Literal["auto"], Tag("(auto)")] | Annotated[dict[str, Axis], Tag("(settings)")],
    Discriminator(_space_form),
]


class ResearchSpec(Strict):
    """How `evsys research` goes about it."""

    goal: Name | None = None
    """`val.pass@1 >= 0.8`: research ends when the incumbent's corrected score is there."""
    budget: ResearchBudget | None = None
    """Required, here or as `--budget`."""
    space: SpaceChoice = "auto"
    """`auto`: every tunable setting of the schemas. Else dotted settings, as in a search."""
    fix: list[Name] = Field(default_factory=list)
    """Settings, or blocks of them, that stay as they are."""
    proposers: list[ProposerSpec] = Field(default_factory=lambda: [ProposerSpec(kind="evolve")], min_length=1)
    """Who proposes."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of the proposals; the runs have their own."""
    max_repeats: int = Field(default=4, ge=1, le=100)
    """Seeds up to which a promising candidate is repeated before it counts as undecided."""
    final_repeats: int = Field(default=3, ge=1, le=100)
    """Fresh seeds with which the winner is scored at the end."""
    rungs: RungSpec | None = None
    """Without them every candidate trains to its end."""
    patience: int = Field(default=20, ge=1)
    """Launched trials without a kept one after which research ends: a plateau."""
