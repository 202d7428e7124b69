"""The verdict: what the scores allow us to say about the arms, as plain data.

In: nothing; `judge` makes it. Out: records that turn into JSON as they are. Every number here is in the metric's own
unit, and differences are always `arm` less `vs`, whether higher or lower is better.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from evsys_sdk.constants import MANY_ERRORS, UNTRAINED

Word = Literal["better", "worse", "equivalent", "undecided"]
Mode = Literal["max", "min"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One arm against another on the tasks that both have."""

    arm: str
    vs: str
    verdict: Word
    difference: float | None
    """Mean of `arm` less mean of `vs`, in the metric's own unit; None when no task is shared."""
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    """Corrected for the number of arms compared with the same `vs`."""
    p_equivalent: float | None = None
    """For a difference of at least the margin, corrected likewise."""
    standard_error: float | None = None
    critical: float | None = None
    """How many standard errors the interval reaches each way."""
    n_tasks: int = 0
    n_seeds: tuple[int, int] = (0, 0)
    only_arm: int = 0
    only_vs: int = 0
    """Tasks that only one of the two has; they are left out."""
    scope: Literal["recipe", "weights"] = "weights"
    """What the interval speaks of: the recipe, other seeds included, or just the weights that were scored."""
    more_tasks: int | None = None
    """For undecided, as `more_seeds`: how many more would settle it four times in five; None where no number would."""
    more_templates: int | None = None
    """New templates that `more_tasks` (or those of `more_of_both`) come from, where templates are the units."""
    more_seeds: int | None = None
    more_of_both: tuple[int, int] | None = None
    """Tasks and seeds, where neither would settle it alone."""
    why: str = ""
    """For undecided, the reason; also why no number of tasks or seeds is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmVerdict:
    """One arm: what it scored and how that compares."""

    arm: str
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    n_tasks: int = 0
    n_seeds: int = 0
    seed_means: dict[int, float] = field(default_factory=dict)
    verdict: Word | None = None
    """Against the baseline arm; None for the baseline arm itself and for an arm that is not ranked."""
    vs_baseline: Comparison | None = None
    vs_untrained: Comparison | None = None
    why_unranked: str | None = None
    failed_seeds: dict[int, str] = field(default_factory=dict)
    dropped_tasks: int = 0
    """Tasks that only some of its seeds have; they are left out."""
    n_rollouts: int = 0
    """Behind the score, over all scored seeds; 0 where that is not known."""
    n_errors: int = 0
    """Of these rollouts, those that errored; they count as failures."""
    first_error: str | None = None
    training_mark: str = ""
    """`on training rows` where it was scored on tasks that it trained on."""

    @property
    def n_launched(self) -> int:
        """Seeds that were run, scored or not."""
        return self.n_seeds + len(self.failed_seeds)

    @property
    def has_many_errors(self) -> bool:
        """True where so many rollouts errored that the score says more about the errors than about the arm."""
        return self.n_errors >= MANY_ERRORS * self.n_rollouts > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """The best arm where one is proven, else the one on top; and what to expect of it."""

    arm: str
    observed: float
    expected: float | None
    """Corrected for having been picked; None where the arms share too few tasks to say."""
    above: list[str] = field(default_factory=list)
    """Arms with a higher score that are not proven better than the baseline."""
    low: float | None = None
    high: float | None = None
    """Interval of `expected`."""
    rivals: list[str] = field(default_factory=list)
    """Arms below it that cannot be distinguished from it."""
    ties: list[str] = field(default_factory=list)
    """Arms with the very same score."""
    not_compared: list[str] = field(default_factory=list)
    """Arms that share no task with it: a higher mean over other tasks says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the scores of one metric allow us to say."""

    metric: str
    mode: Mode
    baseline_arm: str | None
    """None for a search, unless one was named."""
    alpha: float
    margin: float | None
    arms: list[ArmVerdict]
    best_arm: str | None
    """The highest of the arms proven better than the baseline arm; the baseline when all are proven worse; where the
    baseline has no score, the arm proven better than every other scored arm; in a search, the one on top."""
    why_no_best: str | None
    winner: Winner | None
    """None when no arm has a score."""
    others: list[Comparison] = field(default_factory=list)
    """Comparisons that were asked for besides."""
    pairs: list[Comparison] = field(default_factory=list)
    """Every pair of scored arms, the higher first, where the baseline arm has no score; Holm-corrected together."""
    share: bool = False
    """All values lie between 0 and 1 and are shares, so differences are given in points."""
    unit: str = ""
    """Of all values, where the metric has one: `s`, `USD`, `tokens`."""
    constant: float | None = None
    """The one value that every scored arm has on every task, where there is one: nothing to compare."""
    looks: int = 1
    """How often these arms were judged with other seeds or tasks, this time included."""
    n_clusters: int | None = None
    """Templates that the tasks were made from, where these are the units; None where tasks are."""
    start: str = UNTRAINED
    """What `untrained` is: the base model, or the weights that each arm starts from."""
    per_run: bool = False
    """The metric is a number that a run has once, such as its final loss: `n_tasks` then counts no tasks."""
    notes: list[str] = field(default_factory=list)

    def find(self, arm: str, vs: str) -> Comparison | None:
        """The comparison of these two, if it was made."""
        made = [found for one in self.arms for found in (one.vs_baseline, one.vs_untrained) if found]
        made += [*self.others, *self.pairs]
        return next((found for found in made if (found.arm, found.vs) == (arm, vs)), None)

    @property
    def has_comparisons(self) -> bool:
        """Whether anything was compared; False where every arm has the same value on every task."""
        if self.constant is not None and sum(arm.mean is not None for arm in self.arms) > 1:
            return False
        made = [found for one in self.arms for found in (one.vs_baseline, one.vs_untrained) if found]
        return any(found.difference is not None for found in [*made, *self.others, *self.pairs])

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as JSON takes it."""
        plain = asdict(self)
        for arm in plain["arms"]:
            for key in ("seed_means", "failed_seeds"):
                arm[key] = {str(seed): value for seed, value in arm[key].items()}
        return plain
