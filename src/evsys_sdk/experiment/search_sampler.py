"""Draws the trials of a search.

In: the search's spec and the trials before. Out: the next `SearchTrial`. Optuna's samplers exist only here.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from evsys_sdk.config.schema import Range, SearchSpec
from evsys_sdk.config.sweep import Picks, combinations, count_combinations, count_trials, values_of
from evsys_sdk.errors import need

DRAWS = 16
"""How often a combination that was tried before is drawn again; then one of the untried is taken."""
DIGITS = 6
"""Significant ones of a drawn number, so that its name, its record and its value are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTrial:
    """One point of the space; an arm of the experiment."""

    number: int
    picks: Picks
    params: dict[str, Any]
    """The picks as settings of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTrial:
    """An earlier trial as the sampler may see it."""

    trial: SearchTrial
    value: float | None = None
    """None for one that failed, or is under way."""
    under_way: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSampler:
    """Draws trials with Optuna's samplers, repeatably: what is drawn depends on the seed, the trial's number and the
    values of earlier trials in their order. Each trial has its own study and sampler, rebuilt from these, so a
    search that was killed resumes as if it had not been."""

    spec: SearchSpec
    mode: Literal["max", "min"]

    @property
    def learns(self) -> bool:
        """Whether values of earlier trials change what is drawn."""
        return self.spec.kind == "tpe"

    def ask(self, seen: Sequence[FinishedTrial]) -> SearchTrial:
        """The trial after these, which are all that came before it."""
        number, picks = len(seen), self._pick(seen)
        return SearchTrial(number=number, picks=picks, params=values_of(self.spec, picks))

    def _pick(self, seen: Sequence[FinishedTrial]) -> Picks:
        number, tried = len(seen), {_key(one.trial.picks) for one in seen}
        everything = count_combinations(self.spec) == count_trials(self.spec)
        if self.spec.kind == "grid" or (self.spec.kind == "halving" and everything):  # all are tried: none is drawn
            return self._draw(seen, 0, fixed=next(islice(combinations(self.spec), number, None)))
        for draw in range(DRAWS):
            picks = self._draw(seen, draw)
            # None stands for the endless combinations of a range; those that are untried could not be listed either.
            if count_combinations(self.spec) is None or _key(picks) not in tried:
                return picks
        untried = [picks for picks in combinations(self.spec) if _key(picks) not in tried]
        return untried[_seed(self.spec.seed, number, DRAWS) % len(untried)]

    def _draw(self, seen: Sequence[FinishedTrial], draw: int, *, fixed: Picks | None = None) -> Picks:
        optuna = need("optuna", extra="search")
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # it logs every study, and we make one per trial
        distributions: dict[str, Any] = {}
        for path, axis in self.spec.space.items():
            if not isinstance(axis, Range):  # Optuna gets the indexes of a list, so that values may be anything
                distributions[path] = optuna.distributions.CategoricalDistribution(list(range(len(axis))))
            elif axis.int:
                distributions[path] = optuna.distributions.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
            else:
                distributions[path] = optuna.distributions.FloatDistribution(axis.low, axis.high, log=axis.log)
        seed = _seed(self.spec.seed, len(seen), draw)
        sampler = optuna.samplers.RandomSampler(seed=seed)
        if self.learns:
            sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=self.spec.startup_trials)
        study = optuna.create_study(sampler=sampler, direction="maximize" if self.mode == "max" else "minimize")
        states = optuna.trial.TrialState
        for one in seen if self.learns else ():
            state = states.RUNNING if one.under_way else states.FAIL if one.value is None else states.COMPLETE
            value = one.value if state == states.COMPLETE else None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trial = optuna.trial.create_trial(
                    state=state, value=value, params=dict(one.trial.picks), distributions=distributions
                )
            study.add_trial(trial)
        if fixed is not None:
            study.enqueue_trial(fixed)
        drawn: Picks = study.ask(distributions).params
        picks: Picks = {}
        for path, axis in self.spec.space.items():
            if isinstance(axis, Range) and not axis.int:
                # Rounding may step over an end of the range, and Optuna refuses a past trial with a value outside of
                # it.
                picks[path] = min(max(float(f"{drawn[path]:.{DIGITS}g}"), axis.low), axis.high)
            else:
                picks[path] = int(drawn[path])
        return picks


def _key(picks: Picks) -> tuple[tuple[str, int | float], ...]:
    return tuple(sorted(picks.items()))


def _seed(seed: int, number: int, draw: int) -> int:
    # Not `hash()`: that differs from process to process, and a resumed search must draw the same.
    # Four bytes, as numpy's generators (Optuna's) take seeds below 2 ** 32.
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}/{draw}".encode()).digest()[:4])
