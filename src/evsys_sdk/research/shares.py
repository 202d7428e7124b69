"""Who is asked next: shares of the trials that proposers have and earn.

In: the trials so far, and which proposers sit at the table with what cap. Out: the one to ask. Pure and without chance:
the same trials give the same choice.

Weighted fair queueing: each proposer has a weight, and the next trial goes to whom the fewest trials per weight have
gone. The weight begins as the cap and follows how often a proposer's trials end above the incumbent, per cost.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

from evsys_sdk.research.state import SPENT, Proposer, Trial

CAP, EVOLVE = 0.3, "evolve"
"""Of the launched trials, for every kind but `evolve`: an optimiser with 30 % of an agent's proposals did best where it
was measured, and one with 80 % worse than without (arXiv 2603.24647)."""
LEAST = 0.05
"""Of its cap, which a proposer without any advance keeps, so that it can be seen to have become better."""
PRIOR_ADVANCES, PRIOR_TRIALS = 0.5, 2.0
"""What every proposer is credited with before its own count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A proposer and its share."""

    name: str
    """The proposer's kind; of the second of a kind, `llm-2`."""
    proposer: Proposer
    cap: float = 1.0
    """At most this part of the launched trials, while another proposer has something to propose."""


def next_seat(seats: Sequence[Seat], trials: Sequence[Trial], out: Collection[str]) -> Seat | None:
    """The proposer to ask, of those that are not `out` of this round; None where all are."""
    table = [seat for seat in seats if seat.name not in out]
    if not table:
        return None
    launched = [trial for trial in trials if trial.status in SPENT and trial.number > 0]
    counts = {seat.name: sum(trial.proposer == seat.name for trial in launched) for seat in seats}
    within = [seat for seat in table if counts[seat.name] + 1 <= seat.cap * (len(launched) + 1) or seat.cap == 1]
    weights = weights_of(seats, trials)
    # Of equals the one that is named first in the config.
    return min(within or table, key=lambda seat: (counts[seat.name] + 1) / weights[seat.name])


def weights_of(seats: Sequence[Seat], trials: Sequence[Trial]) -> dict[str, float]:
    """Proposer -> its weight: the cap, times the square of its rate of advances over that of the best. Squared, so that
    a proposer without any has three of sixty trials, and one of two that advances has its cap."""
    launched = [trial for trial in trials if trial.status in SPENT and trial.number > 0]
    steps = fmean(map(steps_of, launched)) if launched else 0.0
    rates = {}
    for seat in seats:
        own = [trial for trial in launched if trial.proposer == seat.name]
        # In trials of usual length; where steps are not known, each trial counts as one.
        cost = sum(steps_of(trial) / steps if steps else 1.0 for trial in own)
        rates[seat.name] = (PRIOR_ADVANCES + sum(map(is_advance, own))) / (PRIOR_TRIALS + cost)
    best = max(rates.values())
    return {seat.name: seat.cap * max(LEAST, (rates[seat.name] / best) ** 2) for seat in seats}


def steps_of(trial: Trial) -> float:
    """Of one seed: that a promising trial is repeated is the doing of the driver, and not of the proposer."""
    return trial.cost.steps / max(trial.n_seeds, 1)


def is_advance(trial: Trial) -> bool:
    """Whether the trial ended above the incumbent of its time. What looks so at first is measured again before it
    counts, and few of the advances are proven and kept: too few to tell proposers apart by them."""
    return trial.effect is not None and trial.effect.difference > 0


def rest_of(trials: Sequence[Trial], name: str) -> int:
    """Rounds that a proposer sits out: 1, 3, 7, at most 15 after 2, 4, 6, 8 proposals in a row that could not be
    tried."""
    wasted = 0
    for trial in reversed([trial for trial in trials if trial.proposer == name]):
        if trial.status not in ("invalid", "duplicate", "unpromising"):
            break
        wasted += 1
    return int(2 ** min(wasted // 2, 4)) - 1
