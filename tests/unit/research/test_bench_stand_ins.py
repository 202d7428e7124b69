"""The stand-ins of `perf/autoresearch/`: what is measured with them is worth no more than they are."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "perf"))

from autoresearch import verbs
from autoresearch.agents import CHEATS, TRICKS, CheatingAgent, ScriptedAgent
from autoresearch.keeps import share_of
from autoresearch.simulation import DrawnLaboratory, compare_quickly, drive, keep_maximum
from autoresearch.worlds import PARAMS, make_hill

from evsys_sdk.research.proposers.evolve import Evolve
from evsys_sdk.research.shares import Seat
from evsys_sdk.research.state import CANDIDATE, INCUMBENT, Proposal, ResearchState, RoundPlan, Trial, apply_changes
from evsys_sdk.stats.judge import judge_arms


@pytest.fixture(scope="module")
def hill():
    return make_hill(3)


def _state(world):
    proposal = Proposal(parent=0, changes={}, claim="", operator="config")
    first = Trial(
        number=0, proposal=proposal, proposer="config", recipe=world.start, status="completed", decision="first"
    )
    return ResearchState(trials=[first], metric="pass@1", direction="max")


def test_answers_average_to_the_true_score(hill):
    recipe = replace(hill, seed=0).start
    found = []
    for task in range(40):  # other draws of tasks, and a seed for each
        world = replace(hill, seed=1000 + task)
        found += world.answers(recipe, task, tasks="test").values()
    assert sum(found) / len(found) == pytest.approx(hill.true_score(recipe), abs=0.02)
    assert hill.answers(recipe, 1) == hill.answers(recipe, 1) != hill.answers(recipe, 2)


def test_about_three_tenths_of_the_space_fails_and_the_start_does_not(hill):
    chance = random.Random(0)
    failed = [hill.fails(apply_changes(hill.start, hill.draw(chance))) for _ in range(500)]
    assert 0.2 < sum(failed) / 500 < 0.4
    assert not hill.fails(hill.start)


@pytest.mark.parametrize("skill", [0.0, 0.5, 1.0])
def test_the_dial_is_the_share_of_proposals_that_point_uphill(hill, skill):
    agent, state, chance = ScriptedAgent(world=hill, skill=skill), _state(hill), random.Random(1)
    up = [
        agent.points_up(hill.start, agent.propose(state, None, chance).changes, hill.true_score(hill.start))
        for _ in range(200)
    ]
    assert sum(up) / 200 == pytest.approx(skill, abs=0.1)


def test_no_cheat_helps_and_all_but_the_boast_are_refused(hill):
    laboratory = DrawnLaboratory(world=hill)
    for cheat in CHEATS:
        child = apply_changes(hill.start, TRICKS[cheat](hill, hill.start, random.Random(0)))
        assert hill.true_score(child) == hill.true_score(hill.start)
        assert bool(laboratory.check(child)) == (cheat == "test"), "seed and eval are the driver's own to refuse"
    agent = CheatingAgent(world=hill, share=1.0, cheats=("seed", "test", "metric"))
    outcome = drive(hill, [Seat(name="agent", proposer=agent)], 0, trials=3)
    assert outcome.launched == outcome.keeps == outcome.test_reads == 0
    assert outcome.invalid == outcome.proposals > 0 and outcome.refused_reads > 0


def test_a_misspelt_setting_launches_nothing(hill):
    agent = ScriptedAgent(world=hill, invalid=1.0)
    outcome = drive(hill, [Seat(name="agent", proposer=agent)], 0, trials=3)
    assert outcome.launched == 0 and outcome.invalid == outcome.proposals > 0


def test_an_agent_that_launches_nothing_changes_no_proposal_of_evolve(hill):
    def seats(*agents):
        return [Seat(name="evolve", proposer=Evolve()), *(Seat(name="agent", proposer=a, cap=0.3) for a in agents)]

    alone = drive(hill, seats(), 0, trials=16)
    beside = drive(hill, seats(ScriptedAgent(world=hill, invalid=1.0)), 0, trials=16)
    assert beside.invalid > 0 and beside.agent_launched == 0
    assert (beside.curve, beside.truth, beside.runs) == (alone.curve, alone.truth, alone.runs)


def test_the_bare_loop_falls_for_every_cheat(hill):
    outcome = keep_maximum(hill, CheatingAgent(world=hill, share=1.0), 0, trials=12)
    assert outcome.false_keeps == outcome.keeps > 3
    assert outcome.test_reads > 0 and outcome.reported > outcome.truth


@pytest.mark.parametrize("seeds", [1, 2, 4])
@pytest.mark.parametrize("looks", [1, 3])
def test_the_quick_comparison_says_what_the_verdict_says(hill, seeds, looks):
    laboratory = DrawnLaboratory(world=hill)
    for rate in (1e-5, 1e-3):
        other = apply_changes(hill.start, {f"{PARAMS}learning_rate": rate})
        arms = [laboratory.arm(INCUMBENT, hill.start, range(seeds)), laboratory.arm(CANDIDATE, other, range(seeds))]
        verdict = judge_arms(arms, metric="pass@1", baseline_arm=INCUMBENT, looks=looks)
        whole = verdict.find(CANDIDATE, INCUMBENT)
        quick, means = compare_quickly(arms[0], arms[1], looks=looks)
        assert (quick.verdict, quick.difference, quick.p) == (whole.verdict, whole.difference, whole.p)
        assert quick.p_holm == whole.p_holm and quick.p_equivalent == whole.p_equivalent
        assert [one.mean for one in means] == pytest.approx([arm.mean for arm in verdict.arms])


def test_a_failed_recipe_costs_steps_and_has_no_score(hill):
    chance = random.Random(2)
    recipe = next(r for r in iter(lambda: apply_changes(hill.start, hill.draw(chance)), None) if hill.fails(r))
    proposal = Proposal(parent=0, changes={}, claim="", operator="test")
    found = DrawnLaboratory(world=hill).measure(
        RoundPlan(trial=1, seeds=[1], candidate=recipe, incumbent=hill.start, proposal=proposal)
    )
    assert found.status == "failed" and found.candidate is None and found.cost.steps > 0


def test_context_names_all_recipes_that_were_tried_whatever_the_best_was_then(tmp_path):
    scores = {
        (1e-2, 4, "constant", 0.75): 0.30,
        (1e-2, 8, "constant", 0.75): 0.31,
        (1e-3, 4, "constant", 0.75): 0.60,
        (1e-3, 4, "linear", 0.75): 0.62,
        (1e-4, 4, "linear", 0.5): 0.90,
        (1e-4, 8, "linear", 0.5): 0.20,
    }
    for number, (settings, score) in enumerate(scores.items()):
        verbs.write_trial(tmp_path, number, settings, score)
    found, _ = verbs.read_context(tmp_path)
    assert found.keys() == scores.keys()


def test_an_interval_of_a_share_is_exact():
    assert share_of(0, 20)["high"] == pytest.approx(0.1684, abs=1e-4)  # 1 - 0.025 ** (1 / 20)
    assert share_of(0, 0)["share"] is None
