"""The research loop over a simulated laboratory: what is kept, what it costs, why it ends, what a kill changes."""

from __future__ import annotations

import random

import pytest

from evsys_sdk.config.research import ResearchBudget, ResearchSpec, RungSpec
from evsys_sdk.errors import EvsysError
from evsys_sdk.research.driver import Approval, Research, ResearchResult
from evsys_sdk.research.journal import ResearchJournal
from evsys_sdk.research.shares import Seat
from evsys_sdk.research.space import Space
from evsys_sdk.research.state import Measurement, Proposal, Prospect, ResearchState

from .simulated import SimulatedLab, change


class Reciter:
    """Proposes what it was given, in order, always as a change of the incumbent."""

    def __init__(self, *proposals: Proposal | None):
        self.proposals = list(proposals)
        self.states: list[ResearchState] = []

    def propose(self, state: ResearchState, space: object, rng: random.Random) -> Proposal | None:
        self.states.append(state)
        mine = sum(trial.number > 0 for trial in state.trials)
        if mine >= len(self.proposals):
            return None
        found = self.proposals[mine]
        assert state.incumbent is not None
        return found and Proposal(
            parent=state.incumbent.number, changes=found.changes, claim=found.claim, operator=found.operator
        )


def research(*proposals: Proposal | None, lab: SimulatedLab | None = None, **more) -> Research:
    spec = ResearchSpec(budget=ResearchBudget(**more.pop("budget", {"trials": 50})), **more.pop("spec", {}))
    seats = more.pop("seats", None) or [Seat(name="scripted", proposer=Reciter(*proposals), cap=0.3)]
    return Research(
        spec=spec, recipe={"x": 0.2, "seed": 42}, laboratory=lab or SimulatedLab(), seats=seats, metric="pass@1",
        direction="max", **more,
    )  # fmt: skip


def words(result: ResearchResult) -> list[str]:
    return [trial.decision or trial.status for trial in result.state.trials]


def test_a_better_recipe_is_kept_and_a_worse_one_discarded():
    result = research(change(0.7), change(0.1), change(0.75)).run()
    assert words(result)[:3] == ["first", "kept", "discarded"]
    assert result.winner.number in (1, 3)
    assert result.state.trials[1].effect.difference == pytest.approx(0.5, abs=0.15)
    assert result.reason == "no proposals"


def test_nothing_is_kept_on_one_seed():
    lab = SimulatedLab()
    research(change(0.8), lab=lab).run()
    looks = [len(plan.seeds) for plan in lab.plans if plan.trial == 1 and plan.purpose == "round"]
    assert looks[0] == 1 and looks[-1] >= 2


def test_a_candidate_that_cannot_be_told_apart_is_undecided_after_max_repeats():
    lab = SimulatedLab()
    result = research(*(change(0.2 + n / 1000) for n in range(1, 30)), lab=lab).run()
    assert "kept" not in words(result)
    assert "undecided" in words(result)
    assert max(len(plan.seeds) for plan in lab.plans if plan.purpose == "round") == 4


@pytest.mark.parametrize(
    ("proposal", "why"),
    [
        (change(1.5), "must be at most 1"),
        (change(0.5, seed=7), "seeds are the driver's"),
        (change(0.5, sampler={"seed": 7}), "seeds are the driver's"),
        (change(0.5, **{"a.b.c": 1}), ""),
        (Proposal(parent=99, changes={"x": 0.5}, claim="?", operator="scripted"), ""),
        (Proposal(parent=0, changes={}, claim="victory", operator="scripted"), "changes nothing"),
    ],
)
def test_what_may_not_be_changed_costs_no_trial(proposal, why):
    class Once(Reciter):
        def propose(self, state, space, rng):
            return proposal if len(state.trials) == 1 else None

    lab = SimulatedLab()
    result = research(lab=lab, seats=[Seat(name="scripted", proposer=Once())]).run()
    if "a.b.c" in proposal.changes:  # the laboratory, not the driver, knows which keys there are
        return
    assert words(result) == ["first", "invalid"]
    assert why in result.state.trials[1].why
    assert result.spent.trials == 1
    assert {plan.trial for plan in lab.plans} == {0}


def test_the_same_recipe_is_not_tried_twice():
    result = research(change(0.1), change(0.1), change(0.2)).run()
    assert words(result) == ["first", "discarded", "duplicate", "duplicate"]
    assert result.spent.trials == 2


def test_a_failed_candidate_is_a_trial_and_the_loop_goes_on():
    result = research(change(0.66), change(0.7)).run()
    assert words(result) == ["first", "failed", "kept"]
    assert result.state.trials[1].why == "out of memory"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"goal": 0.5}, "goal"),
        ({"budget": {"trials": 3}}, "budget"),
        ({"budget": {"steps": 25}}, "budget"),
        ({"spec": {"patience": 2}}, "plateau"),
        ({}, "no proposals"),
    ],
)
def test_it_says_why_it_ended(given, reason):
    result = research(change(0.75), change(0.1), change(0.12), change(0.14), change(0.16), **given).run()
    assert result.reason == reason


def test_a_goal_out_of_reach_ends_on_the_budget():
    result = research(*(change(n / 100) for n in range(30)), goal=0.99, budget={"trials": 8}).run()
    assert (result.reason, result.spent.trials) == ("budget", 8)


def test_the_winner_is_scored_on_seeds_that_no_round_has_seen():
    lab = SimulatedLab()
    result = research(change(0.8), lab=lab, spec={"final_repeats": 3}).run()
    seen = {seed for plan in lab.plans if plan.purpose == "round" for seed in plan.seeds}
    final = [plan for plan in lab.plans if plan.purpose == "final"]
    assert len(final) == 1 and len(final[0].seeds) == 3 and not seen & set(final[0].seeds)
    assert final[0].incumbent["x"] == 0.2
    assert result.final is not None and result.final.candidate is not None


def test_a_rung_leaves_behind_what_lies_below_the_incumbent():
    lab = SimulatedLab()
    spec = {"rungs": RungSpec(min_steps=5, eta=3)}
    result = research(change(0.01), change(0.8), lab=lab, spec=spec).run()
    assert [trial.status for trial in result.state.trials] == ["completed", "pruned", "completed"]
    assert result.state.trials[1].step == 5
    assert [plan.until for plan in lab.plans if plan.trial == 2 and plan.purpose == "round"][:2] == [5, None]


def test_a_declined_proposal_costs_nothing_and_its_reason_is_known_to_the_proposer():
    proposer = Reciter(change(0.5), change(0.8))
    said = iter([Approval(word="no", why="too dear"), Approval(word="yes")])
    result = research(seats=[Seat(name="s", proposer=proposer)], approve=lambda *_: next(said)).run()
    assert words(result) == ["first", "declined", "kept"]
    assert result.spent.trials == 2
    assert "too dear" in proposer.states[1].trials[1].why


def test_a_proposer_that_raises_is_invalid_and_the_next_is_asked():
    class Broken:
        def propose(self, state, space, rng):
            raise ValueError("no idea")

    seats = [Seat(name="broken", proposer=Broken()), Seat(name="good", proposer=Reciter(*[change(0.8)] * 20))]
    result = research(seats=seats).run()
    assert "kept" in words(result)
    assert any("no idea" in trial.why for trial in result.state.trials)


def test_a_proposer_of_rubbish_ends_the_research_and_not_the_patience_of_the_machine():
    class Rubbish:
        asks = 0

        def propose(self, state, space, rng):
            self.asks += 1
            return change(2.0)

    proposer = Rubbish()
    result = research(seats=[Seat(name="rubbish", proposer=proposer)]).run()
    assert result.reason == "no proposals" and result.spent.trials == 1
    assert proposer.asks <= 30


def test_the_share_of_an_agent_is_capped_beside_another():
    def many(shift: float):
        return [change(round(shift + n / 1000, 4)) for n in range(200)]

    seats = [
        Seat(name="evolve", proposer=Reciter(*many(0.05)), cap=1.0),
        Seat(name="agent", proposer=Reciter(*many(0.0501)), cap=0.3),
    ]
    result = research(seats=seats, budget={"trials": 41}, spec={"patience": 100, "max_repeats": 1}).run()
    share = sum(trial.proposer == "agent" for trial in result.state.launched) / 40
    assert 0.1 <= share <= 0.3


class InCharge(Reciter):
    """An optimiser that expects nothing of values below 0.5, and keeps every second round."""

    def keeps_round(self, state: ResearchState, space: object) -> bool:
        return len(state.launched) % 2 == 0

    def promise(self, state: ResearchState, space: object, recipe, rng: random.Random) -> Prospect | None:
        return Prospect(gain=float(recipe["x"] >= 0.5), own=0.5)


def test_an_agent_gets_only_the_trials_that_the_optimiser_expects_no_more_of():
    agent = Reciter(*(change(0.3), change(0.55)) * 20)
    seats = [Seat(name="evolve", proposer=InCharge(*(change(n / 100) for n in range(20, 60)))),
             Seat(name="agent", proposer=agent, cap=0.3)]  # fmt: skip
    space = Space(base={"x": 0.2, "seed": 42})
    result = research(seats=seats, space=space, budget={"trials": 8}, spec={"patience": 50, "max_repeats": 1}).run()
    told = [(trial.recipe["x"], trial.status) for trial in result.state.trials if trial.proposer == "agent"]
    assert (0.55, "completed") in told
    assert {status for x, status in told if x == 0.3} <= {"unpromising"}
    assert all(len(state.launched) % 2 for state in agent.states)


def test_a_config_whose_own_run_fails_is_refused():
    broken = research(change(0.8))
    broken.recipe = {"x": 0.66}
    with pytest.raises(EvsysError, match="out of memory"):
        broken.run()


class Killed(BaseException):
    pass


PROPOSALS = [change(0.5), change(0.1), change(0.66), change(0.5), change(0.8), change(1.5), change(0.79), change(0.3)]


def test_a_kill_at_any_line_of_the_journal_changes_no_decision(tmp_path):
    """The process dies before or after each write; the same command then comes to the same trials, and nothing that
    came to its end is asked or measured twice."""
    undisturbed = research(*PROPOSALS, budget={"trials": 7}).run()
    lines = 0
    for cut in range(1, 200):
        path, lab, proposer, died = tmp_path / f"{cut}.jsonl", SimulatedLab(), Reciter(*PROPOSALS), False
        try:
            _resume(path, lab, proposer, die_at=cut)
        except Killed:
            died = True
        result = _resume(path, lab, proposer)
        assert result.state.trials == undisturbed.state.trials
        assert result.reason == undisturbed.reason and result.winner == undisturbed.winner
        # At most the one that was under way when it died is done again.
        assert len(lab.plans) <= len({_key(plan) for plan in lab.plans}) + 1
        lines = cut
        if not died:
            break
    assert lines > 20


def _key(plan):
    return (plan.trial, tuple(plan.seeds), plan.until, plan.purpose)


def _resume(path, lab, proposer, die_at=None):
    journal = ResearchJournal.open(path)
    if die_at is not None:
        add, count = journal.add, [len(journal.outcomes)]

        class Dying(ResearchJournal):
            def add(self, key, outcome):
                if key not in self.outcomes:
                    count[0] += 1
                    if count[0] == die_at:
                        raise Killed
                return add(key, outcome)

        journal = Dying(path, journal.outcomes)
    return research(lab=lab, seats=[Seat(name="scripted", proposer=proposer, cap=0.3)], journal=journal,
                    budget={"trials": 7}, clock=lambda: 0.0).run()  # fmt: skip


def test_a_stop_in_a_measurement_is_no_result(tmp_path):
    class Stopping(SimulatedLab):
        def measure(self, plan):
            if plan.trial == 2 and not self.calm:
                return Measurement(status="stopped", why="interrupted")
            return super().measure(plan)

    lab = Stopping()
    lab.calm = False
    path = tmp_path / "journal"
    first = research(change(0.5), change(0.8), lab=lab, journal=ResearchJournal.open(path)).run()
    assert (first.reason, first.final, len(first.state.trials)) == ("stopped", None, 2)
    lab.calm = True
    second = research(change(0.5), change(0.8), lab=lab, journal=ResearchJournal.open(path)).run()
    assert len(second.state.trials) == 3 and second.final is not None


def test_a_larger_budget_goes_on_where_the_smaller_ended(tmp_path):
    path = tmp_path / "journal"
    proposals = [change(0.5), change(0.8), change(0.3)]
    first = research(*proposals, journal=ResearchJournal.open(path), budget={"trials": 2}).run()
    second = research(*proposals, journal=ResearchJournal.open(path), budget={"trials": 4}).run()
    assert first.reason == "budget" and second.state.trials[:2] == first.state.trials
    assert len(second.state.trials) == 4


def test_a_line_that_a_crash_cut_short_counts_as_not_written(tmp_path):
    path = tmp_path / "journal"
    ResearchJournal.open(path).add("ask 1", {"a": 1})
    path.write_bytes(path.read_bytes() + b'{"key": "ask 2", "outc')
    journal = ResearchJournal.open(path)
    assert journal.find("ask 2") is None
    journal.add("ask 2", {"a": 2})
    assert ResearchJournal.open(path).outcomes == {"ask 1": {"a": 1}, "ask 2": {"a": 2}}
