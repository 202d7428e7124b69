"""What the scores of arms allow us to say, and what they do not."""

from __future__ import annotations

import json
import math
from statistics import fmean

import numpy as np
import pytest
from scipy.stats import t as student
from scipy.stats import ttest_ind

from evsys_sdk.errors import EvsysError
from evsys_sdk.stats.arm_scores import ArmScores
from evsys_sdk.stats.comparison import interval
from evsys_sdk.stats.judge import judge_arms


def arm(name, values, *, first_task=0, **fields):
    """An arm from an array of seeds x tasks."""
    rows = np.atleast_2d(np.asarray(values, dtype=float))
    seeds = {
        42 + seed: {f"t{first_task + task:04d}": float(value) for task, value in enumerate(row)}
        for seed, row in enumerate(rows)
    }
    return ArmScores(arm=name, seeds=seeds, **fields)


def passes(share, *, seeds=1, tasks=100, seed=0):
    return (np.random.default_rng(seed).random((seeds, tasks)) < share).astype(float)


def verdict_of(*arms, **options):
    found = judge_arms(list(arms), metric="pass@1", **options)
    json.dumps(found.as_dict(), allow_nan=False)  # plain data, whatever came in
    return found


def by_name(verdict):
    return {one.arm: one for one in verdict.arms}


def test_a_clear_gain_is_found_and_named():
    found = verdict_of(arm("base", passes(0.4)), arm("good", passes(0.8, seed=1)), arm("same", passes(0.4, seed=2)))
    assert (found.best_arm, found.baseline_arm, found.why_no_best) == ("good", "base", None)
    good = by_name(found)["good"].vs_baseline
    assert good.verdict == "better" and good.low > 0 and good.p < good.p_holm < 0.05
    assert good.p_holm == pytest.approx(2 * good.p)
    assert by_name(found)["base"].verdict is None and found.winner.rivals == []


def test_a_loss_is_worse_and_the_baseline_is_best_when_all_are():
    found = verdict_of(arm("bad", passes(0.3)), arm("base", passes(0.8, seed=1)), baseline_arm="base")
    assert by_name(found)["bad"].verdict == "worse" and found.best_arm == "base"


def test_where_lower_is_better_a_lower_mean_wins():
    chance = np.random.default_rng(0)
    slow, fast = chance.normal(900, 100, (2, 80)), chance.normal(700, 100, (2, 80))
    found = verdict_of(arm("slow", slow), arm("fast", fast), mode="min")
    assert found.best_arm == "fast" and found.winner.arm == "fast"
    assert by_name(found)["fast"].vs_baseline.difference < 0
    assert verdict_of(arm("slow", slow), arm("fast", fast)).best_arm == "slow"


def test_arms_that_hardly_differ_on_many_tasks_are_equivalent():
    same = passes(0.7, tasks=4000)
    other = same.copy()
    other[0, :20] = 1 - other[0, :20]
    found = by_name(verdict_of(arm("base", same), arm("twin", other)))["twin"].vs_baseline
    assert found.verdict == "equivalent" and -0.02 < found.low < 0 < found.high < 0.02
    strict = by_name(verdict_of(arm("base", same), arm("twin", other), margin=0.001))["twin"].vs_baseline
    assert strict.verdict == "undecided"


def test_undecided_says_how_much_more_would_settle_it():
    found = by_name(verdict_of(arm("base", passes(0.5)), arm("maybe", passes(0.62, seed=5))))["maybe"].vs_baseline
    assert found.verdict == "undecided" and "0" in found.why
    assert 10 < found.more_tasks <= 1_000 and found.more_seeds is None


def test_a_plan_that_nobody_would_run_is_no_advice():
    base = passes(0.5)
    slightly = base.copy()
    slightly[0, :2] = 1 - slightly[0, :2]
    slightly[0, 2] = 1.0 if base[0, 2] == 0 else 0.0
    found = by_name(verdict_of(arm("base", base), arm("maybe", slightly)))["maybe"].vs_baseline
    assert found.verdict == "undecided" and abs(found.difference) == pytest.approx(0.01)
    assert (found.more_tasks, found.more_seeds, found.more_of_both) == (None, None, None)
    assert found.why == "the difference is too small to be worth settling at this size (100 tasks, 1 seed per arm)"


@pytest.mark.parametrize("value", [0.0, 1.0, 0.25])
@pytest.mark.parametrize("seeds", [1, 3])
def test_arms_with_one_value_everywhere_have_nothing_to_compare(value, seeds):
    found = verdict_of(*(arm(name, np.full((seeds, 40), value)) for name in ("base", "a", "b")))
    assert found.constant == value and found.best_arm is None
    for one in found.arms[1:]:
        plan = one.vs_baseline.more_tasks, one.vs_baseline.more_seeds, one.vs_baseline.more_of_both
        assert plan == (None, None, None) and one.vs_baseline.why == "both scored the same on every task"
    assert verdict_of(arm("base", np.zeros((1, 40))), arm("a", passes(0.5, tasks=40))).constant is None


def test_without_a_scored_baseline_the_other_arms_are_compared_with_each_other():
    base, low, high = ArmScores(arm="base", failed={42: "boom"}), arm("low", passes(0.3)), arm("high", passes(0.9))
    found = verdict_of(base, low, high, untrained={f"t{i:04d}": 0.0 for i in range(100)})
    assert (found.baseline_arm, found.best_arm, found.why_no_best) == ("base", "high", None)
    [pair] = found.pairs
    assert (pair.arm, pair.vs, pair.verdict) == ("high", "low", "better") and found.find("high", "low") is pair
    assert [one.vs_untrained.verdict for one in found.arms[1:]] == ["better", "better"]
    assert all(one.vs_baseline is None for one in found.arms)
    near = arm("near", passes(0.88, seed=4))
    close = verdict_of(base, low, high, near)
    assert close.best_arm is None and "base has no score, and no arm is proven better than all" in close.why_no_best
    assert [(one.arm, one.vs) for one in close.pairs] == [("high", "near"), ("high", "low"), ("near", "low")]
    alone = verdict_of(base, low)
    assert alone.best_arm is None and alone.why_no_best.endswith("only one arm has one") and alone.pairs == []


def test_an_arm_with_many_errors_gets_no_plan():
    base, maybe = arm("base", passes(0.5)), passes(0.62, seed=5)
    found = verdict_of(base, arm("maybe", maybe, n_rollouts=100, n_errors=10)).arms[1]
    assert found.has_many_errors and (found.n_rollouts, found.n_errors) == (100, 10)
    assert found.vs_baseline.verdict == "undecided" and found.vs_baseline.more_tasks is None
    assert found.vs_baseline.why == "10 of 100 rollouts of maybe errored: more tasks would not settle it"
    few = verdict_of(base, arm("maybe", maybe, n_rollouts=100, n_errors=9)).arms[1]
    assert not few.has_many_errors and few.vs_baseline.more_tasks is not None


def test_the_plan_asks_for_no_less_when_more_arms_are_compared():
    base, maybe = arm("base", passes(0.5)), arm("maybe", passes(0.62, seed=5))
    alone = by_name(verdict_of(base, maybe))["maybe"].vs_baseline
    others = [arm(f"x{i}", passes(0.5, seed=10 + i)) for i in range(5)]
    among = by_name(verdict_of(base, maybe, *others))["maybe"].vs_baseline
    assert (alone.low, alone.high) == (among.low, among.high) and among.p_holm > alone.p_holm
    assert among.verdict == "undecided" and among.more_tasks > 0


def test_failed_and_unscored_arms_are_never_ranked_and_say_why():
    crashed = ArmScores(arm="crashed", failed={42: "CUDA out of memory"})
    unscored = arm("unscored", passes(1.0), why_unscored="every rollout errored")
    found = verdict_of(arm("base", passes(0.4)), crashed, unscored)
    assert by_name(found)["crashed"].why_unranked == "CUDA out of memory"
    assert by_name(found)["unscored"].why_unranked == "every rollout errored"
    assert by_name(found)["unscored"].mean is None and found.winner.arm == "base"
    assert found.best_arm is None and "nothing to compare" in found.why_no_best


def test_a_baseline_without_a_score_is_not_replaced_by_another_arm():
    found = verdict_of(ArmScores(arm="base"), arm("a", passes(0.4)), arm("b", passes(0.9, seed=1)))
    assert found.baseline_arm == "base" and found.best_arm == "b", "of the arms that have a score"
    assert by_name(found)["base"].why_unranked == "no seed has a score"
    assert by_name(found)["b"].vs_baseline is None and found.winner.arm == "b"


def test_no_arm_with_a_score_makes_a_verdict_without_a_winner():
    found = verdict_of(ArmScores(arm="a"), ArmScores(arm="b", why_unscored="test split only"))
    assert found.winner is None and found.best_arm is None and found.why_no_best == "no arm has a score"


def test_a_lucky_seed_does_not_win():
    steady = passes(0.6, seeds=3, tasks=200)
    lucky = np.concatenate([passes(0.6, seeds=2, tasks=200, seed=1), passes(0.95, tasks=200, seed=2)])
    found = by_name(verdict_of(arm("base", steady), arm("lucky", lucky)))["lucky"].vs_baseline
    assert found.difference > 0.08 and found.verdict == "undecided" and found.scope == "recipe"
    pooled = by_name(verdict_of(arm("base", steady.mean(axis=0)), arm("lucky", lucky.mean(axis=0))))["lucky"]
    assert pooled.verdict == "better"  # what forgetting about seeds would have said


def test_one_seed_speaks_of_its_weights_only():
    found = verdict_of(arm("base", passes(0.4)), arm("good", passes(0.8, seed=1)))
    assert by_name(found)["good"].vs_baseline.scope == "weights"
    told = "One seed per arm: the interval covers the tasks, not training variance. Use n_repeats: 3"
    assert told in found.notes


def test_one_task_decides_nothing():
    found = verdict_of(arm("base", [[0.0], [0.0]]), arm("other", [[1.0], [1.0]]), untrained={"t0000": 0.0})
    other = by_name(found)["other"]
    assert (other.verdict, other.low, other.vs_baseline.p) == ("undecided", None, None)
    assert "one task" in other.vs_baseline.why and found.winner.expected is None


def test_a_number_per_run_is_judged_by_the_scatter_of_the_seeds():
    """Welch's test with degrees of freedom half-way between Welch's and those of one arm."""
    base, other = [0.354, 0.361, 0.349, 0.358], [0.076, 0.081, 0.073, 0.08]
    found = verdict_of(arm("base", [[v] for v in base]), arm("other", [[v] for v in other]), mode="min", share=False,
                       per_run=True)  # fmt: skip
    compared = by_name(found)["other"].vs_baseline
    welch = ttest_ind(other, base, equal_var=False)
    degrees = (welch.df + 3) / 2
    assert compared.p == pytest.approx(2 * student.sf(abs(welch.statistic), degrees), rel=1e-9)
    reach = student.ppf(0.975, degrees) * abs(compared.difference / welch.statistic)
    ends = compared.difference - reach, compared.difference + reach
    assert (compared.low, compared.high) == pytest.approx(ends, rel=1e-9)
    assert found.best_arm == "other" and compared.scope == "recipe"
    assert found.notes == [
        "a run has one value of this metric: the intervals cover training variance (seeds), and no tasks"
    ]


def test_a_number_per_run_of_single_seeds_is_undecided():
    found = by_name(verdict_of(arm("base", [[3.5]]), arm("other", [[0.7], [0.8]]), mode="min", per_run=True))["other"]
    assert (found.verdict, found.vs_baseline.low) == ("undecided", None) and found.low < 0.75 < found.high
    assert "only several seeds of each arm" in found.vs_baseline.why


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("seeds", [1, 3])
def test_arms_that_all_pass_or_all_fail_are_no_certainty(value, seeds):
    same = np.full((seeds, 50), value)
    found = by_name(verdict_of(arm("base", same), arm("twin", same)))["twin"]
    assert found.verdict == "undecided" and found.vs_baseline.high - found.vs_baseline.low > 0.05
    assert found.high - found.low > 0.05


def test_only_shared_tasks_are_compared_and_the_rest_is_said():
    base, late = passes(0.4), passes(0.8, seed=1)
    found = verdict_of(arm("base", base), arm("late", late, first_task=30))
    compared = by_name(found)["late"].vs_baseline
    assert (compared.n_tasks, compared.only_arm, compared.only_vs) == (70, 30, 30)
    assert compared.difference == pytest.approx(late[0, :70].mean() - base[0, 30:].mean())
    assert any("on the 70 tasks that both have" in note for note in found.notes)


def test_arms_without_a_shared_task_are_undecided():
    found = verdict_of(arm("base", passes(0.1)), arm("other", passes(0.9), first_task=500))
    compared = by_name(found)["other"].vs_baseline
    assert (compared.verdict, compared.difference, compared.why) == ("undecided", None, "the two share no task")
    assert found.winner is None and found.best_arm is None, "a mean over other tasks is no rank"
    assert found.why_no_best == "the arms share no task and cannot be compared"
    assert not any("both have" in note for note in found.notes)


def test_an_arm_that_shares_no_task_with_the_others_is_not_ranked_among_them():
    arms = arm("base", passes(0.3)), arm("other", passes(0.5, seed=1)), arm("apart", passes(0.9), first_task=500)
    found = verdict_of(*arms)
    assert found.winner.arm == "other" and found.winner.not_compared == ["apart"] and "apart" not in found.winner.rivals


def test_a_value_that_is_no_number_is_a_missing_task():
    broken = passes(0.5, seeds=2)
    broken[1, 7] = math.nan
    found = by_name(verdict_of(arm("base", passes(0.5)), arm("broken", broken)))["broken"]
    assert (found.n_tasks, found.dropped_tasks, found.n_seeds) == (99, 1, 2)


def test_a_failed_seed_is_left_out_and_noted():
    found = verdict_of(arm("base", passes(0.5, seeds=3)), arm("a", passes(0.5, seeds=2), failed={44: "killed"}))
    assert by_name(found)["a"].n_seeds == 2 and by_name(found)["a"].failed_seeds == {44: "killed"}
    assert any("a: seed 44 without a score (killed) is left out, which may flatter" in note for note in found.notes)


def test_seeds_that_differ_by_more_than_noise_are_pointed_out():
    steady, lucky = passes(0.6, seeds=3), np.concatenate([passes(0.5, seeds=2, seed=1), passes(0.95, seed=2)])
    notes = verdict_of(arm("base", steady), arm("lucky", lucky)).notes
    assert [note.split(":")[0] for note in notes] == ["lucky"] and "42: 0." in notes[0]


def test_a_search_has_no_baseline_unless_one_is_named_and_its_best_is_the_one_on_top():
    arms = [arm("t0", passes(0.5)), arm("t1", passes(0.55, seed=3)), arm("t2", passes(0.3, seed=4))]
    found = verdict_of(*arms, searched=True)
    assert (found.baseline_arm, found.best_arm, found.why_no_best) == (None, "t1", None)
    assert all(one.vs_baseline is None and one.verdict is None for one in found.arms)
    assert found.winner.arm == "t1" and "t0" in found.winner.rivals and found.winner.expected < found.winner.observed
    named = verdict_of(*arms, searched=True, baseline_arm="t0")
    assert named.baseline_arm == "t0" and named.best_arm is None
    untrained = {f"t{i:04d}": 0.0 for i in range(100)}
    compared = verdict_of(*arms, searched=True, untrained=untrained)
    assert by_name(compared)["t1"].vs_untrained.verdict == "better"


def test_the_margin_of_a_search_on_an_open_scale_comes_from_the_untrained_model():
    arms = [arm("t0", np.full((1, 30), 900.0) + np.arange(30))]
    assert verdict_of(*arms, searched=True, untrained={f"t{i:04d}": 500.0 for i in range(30)}).margin == 10.0


def test_the_winners_interval_reaches_from_the_corrected_score_down_to_the_arms_own_end_on_top():
    clear = verdict_of(arm("base", passes(0.2)), arm("top", passes(0.8, seed=1)))
    top = by_name(clear)["top"]
    assert (clear.winner.low, clear.winner.high) == pytest.approx((top.low, top.high))
    close = [arm(f"a{i}", passes(0.5, seed=20 + i)) for i in range(6)]
    highest = verdict_of(*close)
    top = by_name(highest)[highest.winner.arm]
    assert highest.winner.low < top.low and highest.winner.high == top.high
    lowest = verdict_of(*close, mode="min")
    last = by_name(lowest)[lowest.winner.arm]
    assert lowest.winner.low == last.low and lowest.winner.high > last.high


def test_a_winner_that_passed_everything_may_still_be_perfect():
    near = np.ones((1, 40))
    near[0, 0] = 0.0
    found = verdict_of(arm("near", near), arm("perfect", np.ones((1, 40))))
    assert found.winner.arm == "perfect" and found.winner.high == 1.0 and found.winner.expected < 1.0


def test_every_arm_is_compared_with_the_untrained_model():
    untrained = {f"t{i:04d}": float(i % 10 == 0) for i in range(100)}
    found = verdict_of(arm("base", passes(0.6)), arm("none", passes(0.1, seed=2)), untrained=untrained)
    assert by_name(found)["base"].vs_untrained.verdict == "better"
    assert by_name(found)["none"].vs_untrained.verdict == "undecided"
    assert found.find("base", "untrained") is by_name(found)["base"].vs_untrained


def test_further_pairs_are_judged_on_request():
    arms = [arm("base", passes(0.5)), arm("a", passes(0.3, seed=1)), arm("b", passes(0.9, seed=2))]
    found = verdict_of(*arms, also=[("b", "a"), ("b", "nobody")])
    assert [(one.arm, one.vs) for one in found.others] == [("b", "a")]
    assert found.find("b", "a").p_holm == found.find("b", "a").p


def test_arms_near_the_top_are_named_as_rivals():
    top = passes(0.9, tasks=300)
    near = top.copy()
    near[0, :3] = 1 - near[0, :3]
    found = verdict_of(arm("base", passes(0.5, tasks=300, seed=1)), arm("top", top), arm("near", near))
    assert set(found.winner.rivals) | {found.winner.arm} == {"top", "near"}


def test_the_order_of_tasks_and_arms_changes_no_number():
    arms = [arm(f"a{i}", passes(0.5 + i / 20, seeds=2, seed=i)) for i in range(4)]
    turned = [
        ArmScores(arm=one.arm, seeds={s: dict(reversed(list(v.items()))) for s, v in one.seeds.items()}) for one in arms
    ]
    assert verdict_of(*arms).as_dict() == verdict_of(*turned).as_dict()
    mixed = verdict_of(arms[2], arms[0], arms[3], arms[1], baseline_arm="a0")
    assert by_name(mixed)["a3"].vs_baseline == by_name(verdict_of(*arms))["a3"].vs_baseline


@pytest.mark.parametrize("lone_is_baseline", [False, True])
def test_a_lone_seed_among_arms_with_several_is_not_told_apart(lone_is_baseline):
    lone, several = arm("lone", passes(0.95, tasks=300)), arm("several", passes(0.3, tasks=300, seeds=5, seed=1))
    untrained = dict.fromkeys(several.seeds[next(iter(several.seeds))], 0.0)
    arms = (lone, several) if lone_is_baseline else (several, lone)
    found = by_name(verdict_of(*arms, arm("c", passes(0.3, tasks=300, seeds=5, seed=2)), untrained=untrained))
    compared = found["several" if lone_is_baseline else "lone"].vs_baseline
    assert compared.verdict == "undecided" and compared.scope == "recipe" and abs(compared.difference) > 0.5
    assert (compared.low, compared.p, compared.more_tasks, compared.more_seeds) == (None, None, None, None)
    assert compared.why == ("one seed does not show how far the seeds of its arm scatter: score more seeds of that arm")
    assert found["lone"].vs_untrained.verdict == "undecided" and found["several"].vs_untrained.verdict == "better"


def test_the_interval_of_a_lone_seed_is_the_one_that_its_run_is_printed_with():
    values = np.random.default_rng(5).choice([0.0, 0.25, 0.5, 1.0], (3, 5, 40))
    found = verdict_of(arm("lone", values[0, :1]), arm("b", values[1]), arm("c", values[2]))
    assert (found.arms[0].low, found.arms[0].high) == interval(fmean, values[0, 0].tolist())
    assert any("lone: one seed; the interval covers the tasks" in note for note in found.notes)


def test_a_mode_that_there_is_none_of_is_refused():
    with pytest.raises(EvsysError, match=r"'lower' is not a mode; .*known: max, min"):
        verdict_of(arm("a", passes(0.5)), mode="lower")


def test_a_wrong_baseline_is_answered_with_the_nearest_name():
    with pytest.raises(EvsysError, match="baseline_arm: 'bas' is not an arm; closest: base"):
        verdict_of(arm("base", passes(0.5)), baseline_arm="bas")
    with pytest.raises(EvsysError, match="distinct names; twice: a"):
        verdict_of(arm("a", passes(0.5)), arm("a", passes(0.5)))
    with pytest.raises(EvsysError, match="at least one arm"):
        verdict_of()


@pytest.fixture(scope="module")
def null_verdicts():
    """Six arms with the same chance of 0.8 on 100 tasks, a thousand times over."""
    chance = np.random.default_rng(2026)
    names = [f"t{task:03d}" for task in range(100)]
    found = []
    for _ in range(1000):
        values = (chance.random((6, 100)) < 0.8).astype(float)
        arms = [ArmScores(arm=f"a{i}", seeds={0: dict(zip(names, values[i], strict=True))}) for i in range(6)]
        found.append(judge_arms(arms, metric="pass@1"))
    return found


def test_six_equal_arms_have_a_false_winner_at_most_once_in_twenty(null_verdicts):
    assert sum(found.best_arm is not None for found in null_verdicts) <= 50
    highest = sum(found.winner.arm != "a0" for found in null_verdicts)
    assert highest >= 780  # what taking the maximum would have named


def test_the_reported_score_of_the_picked_arm_is_not_flattered(null_verdicts):
    observed = np.mean([found.winner.observed for found in null_verdicts]) - 0.8
    expected = np.mean([found.winner.expected for found in null_verdicts]) - 0.8
    assert observed > 0.045 and abs(expected) <= 0.005
    covered = np.mean([found.winner.low <= 0.8 <= found.winner.high for found in null_verdicts])
    assert 0.93 <= covered <= 0.975


def test_the_winners_interval_holds_the_truth_also_where_one_arm_is_really_ahead():
    chance, held = np.random.default_rng(9), 0
    share = np.array([0.6] * 5 + [0.7])
    for _ in range(400):
        values = (chance.random((6, 100)) < share[:, None]).astype(float)
        found = judge_arms([arm(f"a{i}", row) for i, row in enumerate(values)], metric="pass@1").winner
        held += found.low <= share[int(found.arm[1:])] <= found.high
    assert 0.93 <= held / 400 <= 0.975


def test_equal_arms_with_restless_seeds_have_no_false_winner_either():
    chance, wrong = np.random.default_rng(5), 0
    names = [f"t{task:03d}" for task in range(100)]
    for _ in range(300):
        share = np.clip(0.6 + chance.normal(0, 0.08, (6, 3, 1)), 0, 1)
        values = (chance.random((6, 3, 100)) < share).astype(float)
        arms = [
            ArmScores(arm=f"a{i}", seeds={s: dict(zip(names, values[i, s], strict=True)) for s in range(3)})
            for i in range(6)
        ]
        wrong += judge_arms(arms, metric="pass@1").best_arm is not None
    assert wrong <= 0.05 * 300 + 5


def test_a_gain_of_fifteen_points_is_found_nearly_always():
    chance, hits = np.random.default_rng(6), 0
    names = [f"t{task:03d}" for task in range(300)]
    for _ in range(100):
        values = [(chance.random(300) < share).astype(float) for share in (0.6, 0.75, 0.6, 0.6)]
        arms = [ArmScores(arm=f"a{i}", seeds={0: dict(zip(names, row, strict=True))}) for i, row in enumerate(values)]
        hits += judge_arms(arms, metric="pass@1").best_arm == "a1"
    assert hits >= 90


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_lone_seed_at_0_or_1_beside_arms_whose_seeds_differ_has_an_interval(value):
    other = np.full((2, 20), value)
    other[0, 0] = 1 - value
    found = verdict_of(arm("lone", np.full((1, 20), value)), arm("several", other))
    [lone, several] = found.arms
    assert lone.mean == value and lone.low <= value <= lone.high and lone.high - lone.low > 0.05
    assert several.verdict in ("undecided", "equivalent")


def test_values_too_large_to_square_count_as_missing():
    huge = np.ones((1, 10))
    huge[0, 3] = 1e200
    found = verdict_of(arm("base", np.zeros((1, 10))), arm("huge", huge), share=False)
    assert found.arms[1].n_tasks == 9 and found.arms[1].dropped_tasks == 1 and found.arms[1].mean == 1.0


def test_an_error_of_the_statistics_is_told_as_a_reason(monkeypatch):
    def fail(*_args, **_kwargs):
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr("evsys_sdk.stats.judge.winner_of", fail)
    with pytest.raises(EvsysError, match="could not be judged: ZeroDivisionError: float division by zero"):
        verdict_of(arm("a", np.ones((1, 4))), arm("b", np.zeros((1, 4))))


@pytest.mark.parametrize("others", [[arm("b", np.ones((2, 9)))], []])
def test_where_nothing_is_compared_no_note_says_how_often_it_was_looked_at(others):
    found = verdict_of(arm("a", np.ones((2, 9))), *others, looks=3)
    assert found.looks == 3 and not found.has_comparisons and not any("look 3" in note for note in found.notes)


def test_a_further_look_at_the_same_arms_is_judged_at_a_smaller_level():
    # 21 of 200 tasks up, 6 down: p is about 0.004 at the first look.
    base, up = np.zeros((1, 200)), np.zeros((1, 200))
    base[0, :106], up[0, 6:127] = 1.0, 1.0
    first, second, third = (verdict_of(arm("base", base), arm("up", up), looks=looks) for looks in (1, 2, 3))
    one, two, three = (found.arms[1].vs_baseline for found in (first, second, third))
    assert (first.looks, third.looks) == (1, 3) and 0.05 / 27 < one.p < 0.05 / 8
    assert (two.p, three.p) == pytest.approx((8 * one.p, 27 * one.p))
    assert three.low < two.low < one.low and one.high < two.high < three.high
    assert [found.arms[1].verdict for found in (first, second, third)] == ["better", "better", "undecided"]
    assert first.arms[1].low == third.arms[1].low, "an arm's own mean is not looked at in search of a difference"
    assert any("look 3 at this question" in note for note in third.notes) and not any("look" in n for n in first.notes)
