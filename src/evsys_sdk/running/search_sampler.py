"""Which values a trial gets: Optuna's samplers, made repeatable.

In: the search's settings and the trials before this one. Out: the next trial. What is drawn depends on nothing but the
seed, the trial's number and the values of earlier trials in their order: each trial has a study and a sampler of its
own, rebuilt from these. So a search that was killed goes on as if nothing had happened.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from evsys_sdk.config.models import Range, SearchSpec
from evsys_sdk.config.search import Picks, combinations, count_combinations, count_trials, values_of
from evsys_sdk.errors import need

DRAWS = 16
"""How often a combination is drawn anew that was tried before; then the next untried one is taken."""
DIGITS = 6
"""Significant ones of a drawn number, so that its name, its record and its value are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One point of the space; an arm of the experiment."""

    number: int
    picks: Picks
    params: dict[str, Any]
    """The same as settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An earlier trial as the sampler may see it."""

    trial: Trial
    value: float | None = None
    """None for one that failed, or is under way."""
    under_way: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Asks Optuna."""

    spec: SearchSpec
    mode: Literal["max", "min"]

    @property
    def learns(self) -> bool:
        """Whether values of earlier trials change what is drawn."""
        return self.spec.kind == "tpe"

    def ask(self, seen: Sequence[Seen]) -> Trial:
        """The trial after these, which are all that came before it."""
        number, tried = len(seen), {_key(one.trial.picks) for one in seen}
        if self._takes_all:
            picks = next(islice(combinations(self.spec), number, None))
            return self._trial(number, self._drawn(seen, 0, fixed=picks))
        for draw in range(DRAWS):
            picks = self._drawn(seen, draw)
            if count_combinations(self.spec) is None or _key(picks) not in tried:
                return self._trial(number, picks)
        untried = [picks for picks in combinations(self.spec) if _key(picks) not in tried]
        return self._trial(number, untried[_seed(self.spec.seed, number, DRAWS) % len(untried)])

    @property
    def _takes_all(self) -> bool:
        """Whether every combination is tried, so that none need be drawn."""
        everything = count_combinations(self.spec) == count_trials(self.spec)
        return self.spec.kind == "grid" or (self.spec.kind == "halving" and everything)

    def _trial(self, number: int, picks: Picks) -> Trial:
        return Trial(number=number, picks=picks, params=values_of(self.spec, picks))

    def _drawn(self, seen: Sequence[Seen], draw: int, *, fixed: Picks | None = None) -> Picks:
        optuna = _optuna()
        study = self._study(optuna, _seed(self.spec.seed, len(seen), draw))
        distributions = _distributions(optuna, self.spec)
        if self.learns:
            study.add_trials([_told(optuna, one, distributions) for one in seen])
        if fixed is not None:
            study.enqueue_trial(fixed)
        drawn: Picks = study.ask(distributions).params
        return {path: _rounded(drawn[path], axis) for path, axis in self.spec.space.items()}

    def _study(self, optuna: Any, seed: int) -> Any:
        sampler: Any = optuna.samplers.RandomSampler(seed=seed)
        if self.learns:
            sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=self.spec.startup_trials)
        return optuna.create_study(sampler=sampler, direction="maximize" if self.mode == "max" else "minimize")


def _optuna() -> Any:
    optuna = need("optuna", extra="search")
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it tells of every study, and we make one per trial
    return optuna


def _distributions(optuna: Any, spec: SearchSpec) -> dict[str, Any]:
    """The space in Optuna's words; of a list it knows the places, so that values may be anything."""
    found: dict[str, Any] = {}
    for path, axis in spec.space.items():
        if not isinstance(axis, Range):
            found[path] = optuna.distributions.CategoricalDistribution(list(range(len(axis))))
        elif axis.int:
            found[path] = optuna.distributions.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
        else:
            found[path] = optuna.distributions.FloatDistribution(axis.low, axis.high, log=axis.log)
    return found


def _told(optuna: Any, seen: Seen, distributions: dict[str, Any]) -> Any:
    states = optuna.trial.TrialState
    state = states.RUNNING if seen.under_way else states.FAIL if seen.value is None else states.COMPLETE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optuna.trial.create_trial(
            state=state,
            value=seen.value if state == states.COMPLETE else None,
            params=dict(seen.trial.picks),
            distributions=distributions,
        )


def _rounded(value: int | float, axis: list[Any] | Range) -> int | float:
    if not isinstance(axis, Range) or axis.int:
        return int(value)
    return min(max(float(f"{value:.{DIGITS}g}"), axis.low), axis.high)


def _key(picks: Picks) -> tuple[tuple[str, int | float], ...]:
    return tuple(sorted(picks.items()))


def _seed(seed: int, number: int, draw: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}/{draw}".encode()).digest()[:4])
