"""Who is asked next: an agent has its cap where it advances, and next to nothing where it does not."""

from __future__ import annotations

import pytest

from evsys_sdk.research.shares import Seat, next_seat, weights_of
from evsys_sdk.research.state import Effect, Proposal, Trial, TrialCost

SEATS = [Seat(name="evolve", proposer=None), Seat(name="agent", proposer=None, cap=0.3)]  # type: ignore[arg-type]


def trial(number: int, proposer: str, difference: float | None, *, steps: int = 100, n_seeds: int = 1) -> Trial:
    """A launched trial that ended so far above the incumbent; None: it failed."""
    proposal = Proposal(parent=0, changes={}, claim="", operator=proposer)
    return Trial(
        number=number, proposal=proposal, proposer=proposer, recipe={}, n_seeds=0 if difference is None else n_seeds,
        status="failed" if difference is None else "completed", cost=TrialCost(steps=steps),
        effect=None if difference is None else Effect(difference=difference),
    )  # fmt: skip


def share_of_agent(advances: list[bool], *, evolve_advances_each: int = 4) -> float:
    """Of 59 trials, where the agent's end above the incumbent in this turn, over and over."""
    trials: list[Trial] = []
    for number in range(1, 60):
        seat = next_seat(SEATS, trials, ())
        assert seat is not None
        mine = sum(one.proposer == seat.name for one in trials)
        up = advances[mine % len(advances)] if seat.name == "agent" else mine % evolve_advances_each == 0
        trials.append(trial(number, seat.name, 0.01 if up else -0.02))
    return sum(one.proposer == "agent" for one in trials) / 59


def test_an_agent_that_never_advances_has_three_of_sixty_trials():
    assert share_of_agent([False]) <= 3 / 59


@pytest.mark.parametrize("advances", [[True, False], [False, True]])
def test_an_agent_that_advances_half_of_the_time_has_nearly_its_cap(advances):
    assert 0.2 <= share_of_agent(advances) <= 0.3


def test_an_agent_as_good_as_evolve_has_its_part_of_the_queue():
    assert 0.1 <= share_of_agent([False, False, True, False]) <= 0.3


def test_failed_trials_and_those_not_above_the_incumbent_earn_nothing():
    earned = weights_of(SEATS, [trial(1, "agent", 0.01), trial(2, "evolve", 0.01)])
    for difference in (None, 0.0, -0.01):
        assert weights_of(SEATS, [trial(1, "agent", difference), trial(2, "evolve", 0.01)])["agent"] < earned["agent"]


def test_the_repeats_of_a_promising_trial_do_not_count_against_its_proposer():
    once = weights_of(SEATS, [trial(1, "agent", 0.01), trial(2, "evolve", -0.01)])
    repeated = weights_of(SEATS, [trial(1, "agent", 0.01, steps=400, n_seeds=4), trial(2, "evolve", -0.01)])
    assert once == repeated


def test_an_advance_that_took_ten_times_the_steps_earns_less():
    cheap = weights_of(SEATS, [trial(1, "agent", 0.01), trial(2, "evolve", 0.01)])
    dear = weights_of(SEATS, [trial(1, "agent", 0.01, steps=1000), trial(2, "evolve", 0.01)])
    assert dear["agent"] < cheap["agent"]
