"""The judge on arbitrary scores: it answers, its answer is valid JSON, and its numbers fit together."""

from __future__ import annotations

import json
import math
from itertools import combinations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evsys_sdk.constants import UNTRAINED
from evsys_sdk.files import to_json
from evsys_sdk.report.verdict_text import verdict_lines
from evsys_sdk.stats.arm_scores import LARGEST, ArmScores
from evsys_sdk.stats.judge import judge_arms

SETTINGS = settings(
    max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

VALUES = {
    "passes": st.sampled_from([0.0, 1.0]),
    "shares": st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
    "constant": st.just(1.0),
    "zero": st.just(0.0),
    "between": st.floats(0, 1),
    "open": st.floats(-1e6, 1e6),
    "small": st.floats(-1e-9, 1e-9),
    "large": st.floats(-1e30, 1e30),
    "any": st.floats(allow_nan=True, allow_infinity=True),
    "broken": st.sampled_from([0.0, 1.0, math.nan, math.inf, -math.inf]),
}


@st.composite
def worlds(draw):
    """Arms with seeds on tasks of which some are missing, with values of one kind or of a kind per arm."""
    tasks = [f"t{number}" for number in range(draw(st.sampled_from([1, 2, 3, 5, 12])))]
    common = draw(st.sampled_from(sorted(VALUES)))
    arms = []
    for number in range(draw(st.integers(1, 5))):
        values = VALUES[draw(st.sampled_from([common, common, *sorted(VALUES)]))]
        keep = draw(st.sampled_from([1.0, 1.0, 0.7, 0.0]))
        seeds = {}
        for seed in range(draw(st.integers(0, 4))):
            present = [task for task in tasks if keep == 1.0 or draw(st.floats(0, 1)) < keep]
            seeds[seed] = {task: draw(values) for task in present}
        failed = {100: "killed"} if draw(st.booleans()) else {}
        arms.append(ArmScores(arm=f"a{number}", seeds=seeds, failed=failed))
    start = draw(st.sampled_from(["no", "all", "some"]))
    untrained = {task: draw(VALUES[common]) for task in (tasks if start == "all" else tasks[::2])}
    names = [arm.arm for arm in arms]
    pairs = st.lists(st.tuples(st.sampled_from(names), st.sampled_from([*names, UNTRAINED])), max_size=3)
    return {
        "arms": arms,
        "untrained": None if start == "no" else untrained,
        "mode": draw(st.sampled_from(["max", "min"])),
        "share": draw(st.booleans()),
        "searched": draw(st.booleans()),
        "baseline_arm": draw(st.sampled_from([None, *names])),
        "also": draw(pairs),
    }


def _inside(value, low, high, slack=1e-9):
    reach = slack * (1 + max(abs(low), abs(high)))
    return low - reach <= value <= high + reach


def _check_comparison(found, share):
    if found.difference is None:
        assert found.low is None and found.p is None and found.why
        return
    assert math.isfinite(found.difference)
    for p in (found.p, found.p_holm, found.p_equivalent):
        assert p is None or 0.0 <= p <= 1.0
    if found.low is None:
        assert found.verdict == "undecided" and found.p is None and found.why
        return
    assert math.isfinite(found.low) and math.isfinite(found.high) and found.low <= found.high
    assert _inside(found.difference, found.low, found.high)
    if share:
        assert found.low >= -1.0 and found.high <= 1.0
    for more in (found.more_tasks, found.more_seeds, *(found.more_of_both or ())):
        assert more is None or more > 0


def _cells(scores):
    """The values that count: those of tasks that every seed with a value has."""
    return [row[task] for row in scores.usable.values() for task in scores.tasks]


def _check(verdict, arms, untrained, share):
    scored = {arm.arm: arm for arm in verdict.arms if arm.mean is not None}
    tables = {scores.arm: scores for scores in arms}
    values = [value for name in scored for value in _cells(tables[name])]
    values += [value for value in (untrained or {}).values() if abs(value) <= LARGEST]
    share = share and all(0.0 <= value <= 1.0 for value in values)
    for arm in verdict.arms:
        assert (arm.mean is None) == (arm.why_unranked is not None)
        for found in (arm.vs_baseline, arm.vs_untrained):
            if found:
                _check_comparison(found, share)
    for arm in scored.values():
        cells = _cells(tables[arm.arm])
        assert math.isfinite(arm.mean) and _inside(arm.mean, min(cells), max(cells))
        if arm.low is not None:
            assert math.isfinite(arm.low) and math.isfinite(arm.high)
            assert arm.low <= arm.high and _inside(arm.mean, arm.low, arm.high)
            assert not share or (arm.low >= 0.0 and arm.high <= 1.0)
    for found in verdict.others:
        _check_comparison(found, share)
    assert verdict.best_arm is None or verdict.best_arm in scored
    assert (verdict.best_arm is None) == (verdict.why_no_best is not None)
    tasks = [set(tables[name].tasks) for name in scored]
    disjoint = len(tasks) > 1 and not any(one & other for one, other in combinations(tasks, 2))
    assert (verdict.winner is None) == (not scored or disjoint)
    if verdict.winner:
        _check_winner(verdict, scored, tables, share)


def _check_winner(verdict, scored, tables, share):
    winner = verdict.winner
    own = scored[winner.arm]
    assert winner.observed == own.mean and not set(winner.rivals) & set(winner.above)
    assert set(winner.rivals) | set(winner.above) <= set(scored) - {winner.arm}
    made = [arm.vs_baseline for arm in scored.values() if arm.vs_baseline] + verdict.pairs
    for found in [found for found in made if winner.arm in (found.arm, found.vs)]:
        other = found.vs if found.arm == winner.arm else found.arm
        if other in winner.not_compared:
            assert found.difference is None and other not in winner.rivals
            continue
        assert other in winner.above or (other in winner.rivals) == (found.verdict in ("undecided", "equivalent"))
    if winner.expected is None:
        return
    cells = _cells(tables[winner.arm])
    if own.low is None:
        assert _inside(winner.expected, min(cells), max(cells))
    else:
        assert _inside(winner.expected, own.low, own.high)
    if verdict.best_arm and own.verdict == "better":
        base = scored[verdict.baseline_arm].mean
        gap = (winner.expected - base) * (1 if verdict.mode == "max" else -1)
        assert own.n_tasks != own.vs_baseline.n_tasks or own.vs_baseline.only_vs or gap >= -1e-9 * (1 + abs(base))
    if winner.low is not None:
        assert winner.low <= winner.high and _inside(winner.expected, winner.low, winner.high)
        if share:
            assert winner.low >= 0.0 and winner.high <= 1.0


@SETTINGS
@given(worlds())
def test_the_judge_answers_whatever_the_scores_are(world):
    arms = world.pop("arms")
    verdict = judge_arms(arms, metric="pass@1", **world)
    plain = verdict.as_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == json.loads(to_json(plain))
    _check(verdict, arms, world["untrained"], world["share"])
    assert all(isinstance(line, str) and "nan" not in line for line in verdict_lines(verdict))


@st.composite
def worlds_with_wild_arms(draw):
    """A baseline and a better arm, whose seeds agree within one task, and arms whose seeds are at both ends."""
    n_tasks, n_seeds = draw(st.sampled_from([20, 40, 100])), draw(st.integers(2, 4))
    base = draw(st.integers(n_tasks // 5, n_tasks // 2))
    good = draw(st.integers(base + n_tasks // 5, 4 * n_tasks // 5))
    calm = {"base": [base + draw(st.integers(0, 1)) for _ in range(n_seeds)],
            "good": [good + draw(st.integers(0, 1)) for _ in range(n_seeds)]}  # fmt: skip
    wild = {}
    for number in range(draw(st.integers(1, 3))):
        ends = [0, n_tasks, *(draw(st.sampled_from([0, n_tasks])) for _ in range(n_seeds - 2))]
        wild[f"wild{number}"] = [abs(end - draw(st.integers(0, n_tasks // 20))) for end in ends]
    shift = draw(st.integers(0, 7))  # whether seeds pass the same tasks
    return n_tasks, [
        ArmScores(arm=name, seeds={
            seed: {f"t{(task + shift * seed) % n_tasks}": float(task < count) for task in range(n_tasks)}
            for seed, count in enumerate(counts)
        })
        for name, counts in {**calm, **wild}.items()
    ]  # fmt: skip


@SETTINGS
@given(worlds_with_wild_arms())
def test_a_corrected_score_is_not_paid_by_the_scatter_of_other_arms(world):
    n_tasks, arms = world
    verdict = judge_arms(arms, metric="pass@1")
    own = next(arm for arm in verdict.arms if arm.arm == verdict.winner.arm)
    if own.arm == "good" and verdict.winner.expected is not None:
        lowest, highest = min(own.seed_means.values()), max(own.seed_means.values())
        assert lowest - 1 / n_tasks <= verdict.winner.expected <= highest + 1e-9
