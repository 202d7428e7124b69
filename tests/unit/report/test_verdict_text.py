"""The verdict in words says no more than its numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from evsys_sdk.redaction import learn_from_settings
from evsys_sdk.report.verdict_text import verdict_lines
from evsys_sdk.stats.arm_scores import ArmScores
from evsys_sdk.stats.judge import judge_arms


def arm(name, share, seed, tasks=100):
    values = np.random.default_rng(seed).random(tasks) < share
    return ArmScores(arm=name, seeds={42: {f"t{i:03d}": float(value) for i, value in enumerate(values)}})


def text(*arms, **options):
    return "\n".join(verdict_lines(judge_arms(list(arms), metric="pass@1", **options)))


def test_a_proven_winner_is_named_with_its_effect():
    shown = text(arm("base", 0.4, 0), arm("good", 0.9, 1))
    assert shown.splitlines()[0] == (
        "Best arm by pass@1: good, 58.0 points above base (95 % CI 45.5 to 68.2; p < 0.001, Holm-corrected). "
        "One seed per arm: the interval covers the tasks, not training variance. Use n_repeats: 3."
    )
    assert shown.splitlines()[1].startswith("good scored 0.") and ", the highest of 2 scored arms; 0." in shown
    assert "] expected on new tasks (corrected for selection)." in shown and "Note:" not in shown


def test_no_winner_says_so_and_what_would_settle_it():
    shown = text(arm("base", 0.5, 0), arm("maybe", 0.62, 5))
    assert shown.startswith("No best arm by pass@1: no arm beats the baseline. One seed per arm: ")
    assert "; no significant difference from base." in shown and "more tasks would settle it" in shown


def test_a_difference_that_is_too_small_gets_no_absurd_plan():
    shown = text(arm("base", 0.5, 0), arm("maybe", 0.45, 1))
    assert "; the difference is too small to be worth settling at this size (100 tasks, 1 seed per arm)" in shown
    assert "would settle" not in shown


@pytest.mark.parametrize(
    ("base", "other", "told"),
    [
        ([[1, 0, 1, 0, 1, 0]], [[0, 1, 0, 1, 1, 0]],
         "too little data: the interval is wide (6 tasks, 1 seed per arm); add tasks"),
        ([[1] * 9 + [0], [0] * 9 + [1]], [[0] * 9 + [1], [1] * 9 + [0]],
         "too little data: the interval is wide (10 tasks, 2 seeds per arm); add tasks and seeds"),
    ],
)  # fmt: skip
def test_a_wide_interval_is_not_called_a_small_difference(base, other, told):
    """A CI of -39.6 to 39.6 points stood beside `too small to be worth settling`."""
    arms = [
        ArmScores(arm=name, seeds={s: {f"t{i}": float(v) for i, v in enumerate(row)} for s, row in enumerate(rows)})
        for name, rows in (("base", base), ("other", other))
    ]
    shown = text(*arms)
    assert f"; {told}" in shown and "too small" not in shown and "would settle" not in shown


def per_run(name, *values):
    return ArmScores(arm=name, seeds={40 + seed: {"final_loss": value} for seed, value in enumerate(values)})


def test_a_number_that_a_run_has_once_counts_no_tasks():
    once = {"share": False, "mode": "min", "per_run": True}
    single = text(per_run("base", 0.4), per_run("other", 0.3), **once)
    assert (
        "training variance was not measured, so this number has no interval. Use n_repeats: 3."
        in single.splitlines()[0]
    )
    assert (
        "other: 0.300, 1 seed; undecided: 0.100 below base; a run has one value of it, and only several seeds" in single
    )
    same = text(per_run("base", 0.4, 0.4), per_run("other", 0.3, 0.3), **once)
    assert (
        "other: 0.300, 2 seeds; undecided: 0.100 below base; all seeds of an arm have the same value: there is no "
        "variance to test the difference with" in same
    )
    wide = text(per_run("base", 0.4, 0.9), per_run("other", 0.7, 0.59), **once)
    assert "; too little data: the interval is wide (2 seeds per arm); add seeds" in wide
    equal = text(per_run("base", 0.4, 0.4), per_run("other", 0.4, 0.4), **once)
    assert equal.startswith("Every arm has 0.400 in every run, so there is nothing to compare.")
    for shown in (single, same, wide, equal):
        assert " task" not in shown.replace("and no tasks", "")


def test_arms_that_share_no_task_are_not_called_the_same_on_every_task():
    arms = [ArmScores(arm=name, seeds={1: {f"{name}{i}": 1.0 for i in range(9)}}) for name in ("base", "other")]
    shown = text(*arms)
    assert "other: 1.000 [0.701, 1.000], 9 tasks, 1 seed; not compared with base: the two share no task" in shown
    assert "the same as" not in shown


def test_a_tie_is_not_called_the_highest():
    shown = text(arm("base", 0.3, 0), arm("a", 0.6, 1), replace(arm("b", 0.6, 1), arm="b"))
    assert ", tied with b for the highest of 3 scored arms" in shown and ", the highest" not in shown


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize(
    ("value", "headline"),
    [
        (
            0.0,
            "No arm solved any task, so there is nothing to compare. Check the answers, the verifier and max_tokens.",
        ),
        (1.0, "Every arm solved every task, so there is nothing to compare. Use harder tasks to see a difference."),
        (0.5, "Every arm scored 0.500 on every task, so there is nothing to compare."),
    ],
)
def test_arms_that_are_all_the_same_are_told_so_and_no_plan_is_made(value, headline, seeds):
    arms = [
        ArmScores(arm=name, seeds={seed: {f"t{i}": value for i in range(40)} for seed in range(seeds)})
        for name in ("base", "a", "b")
    ]
    lines = text(*arms).splitlines()
    assert lines[0] == headline and "settle" not in "".join(lines) and "expected on new tasks" not in "".join(lines)
    assert lines[2].startswith("a: ") and lines[2].endswith("; the same as base on every task")


def test_arms_that_solve_nothing_although_the_untrained_model_did_are_told_so():
    values = {f"t{i}": 0.0 for i in range(40)}
    arms = [ArmScores(arm=name, seeds={1: values}) for name in ("base", "a")]
    shown = text(*arms, untrained={f"t{i}": float(i % 2) for i in range(40)})
    assert shown.startswith(
        "No arm solved any task, so there is nothing to compare. The untrained model scored 0.500: "
    )
    assert "; worse: 50.0 points below untrained (95 % CI " in shown


def test_the_only_arm_that_solves_nothing_is_told_what_to_check():
    lines = text(ArmScores(arm="r0", seeds={1: {f"t{i}": 0.0 for i in range(40)}})).splitlines()
    assert lines[1] == "r0 solved no task. Check the answers, the verifier and max_tokens."


def test_where_lower_is_better_all_zero_is_no_failure():
    arms = [ArmScores(arm=name, seeds={1: {f"t{i}": 0.0 for i in range(9)}}) for name in ("base", "a")]
    assert text(*arms, mode="min").startswith("Every arm scored 0.000 on every task, so there is nothing to compare.\n")


def test_errors_stand_beside_the_score_and_many_come_first():
    few = replace(arm("few", 0.5, 0), n_rollouts=100, n_errors=2, first_error="boom")
    many = replace(arm("many", 0.62, 5), n_rollouts=60, n_errors=20, first_error="connection\nrefused")
    lines = text(few, many).splitlines()
    assert lines[0] == (
        "Warning: 20 of 60 rollouts errored in many (33 %; first error: connection refused) and count as failures. "
        "Fix the cause before trusting its score."
    )
    assert lines[1].startswith("No best arm by pass@1: ")
    assert next(line for line in lines if line.startswith("few: ")).endswith(
        ", 100 tasks, 1 seed, 2 of 100 rollouts errored; the baseline"
    )
    line = next(line for line in lines if line.startswith("many: "))
    assert line.startswith("many: 20 of 60 rollouts errored; 0.") and "20 of 60 rollouts of many errored: " in line
    assert "would settle it" not in line


def test_a_key_that_an_error_broke_over_lines_is_not_put_together_without_it(monkeypatch):
    monkeypatch.setenv("ZEPHYR_TOKEN", "Qm7-vello-38271-ztt")
    learn_from_settings({})
    broken = replace(arm("many", 0.62, 5), n_rollouts=60, n_errors=20, first_error="401 for Qm7-vel\nlo-38271-ztt")
    assert "; first error: 401 for [redacted]) and count" in text(arm("base", 0.5, 0), broken)


def test_an_arm_with_one_seed_left_is_not_called_best_without_it():
    good = replace(arm("good", 0.9, 1), failed={43: "killed", 44: "killed"})
    headline, second, *_ = text(arm("base", 0.4, 0), good).splitlines()
    assert headline.startswith(
        "Best arm by pass@1: good (1 of 3 seeds scored, training variance not measured), 58.0 points above base (95 %"
    )
    assert second.startswith("good (1 of 3 seeds) scored 0.")
    baseline = replace(arm("base", 0.4, 0), failed={43: "killed"})
    assert (
        text(baseline, arm("good", 0.9, 1))
        .splitlines()[0]
        .endswith(
            "Holm-corrected) (1 of 2 seeds scored, training variance not measured). "
            "One scored seed per arm: the interval covers the tasks, not training variance."
        )
    )


def test_counts_of_arms_agree_with_the_table():
    shown = text(arm("base", 0.4, 0), arm("good", 0.9, 1), ArmScores(arm="lost", failed={1: "x"}))
    assert ", the highest of 2 scored arms; " in shown


def test_without_a_scored_baseline_the_others_are_compared_and_it_is_said():
    lost = ArmScores(arm="base", failed={42: "boom"})
    lines = text(lost, arm("low", 0.3, 0), arm("high", 0.9, 1)).splitlines()
    assert lines[0].startswith(
        "Best of the 2 scored arms by pass@1: high, better than low; the baseline base has no score, so no arm is "
        "compared with it. One seed per arm"
    )
    assert lines[2].startswith("high against low: better: 67.0 points above low (95 % CI ")
    assert lines[3] == "base: not ranked (boom)"
    undecided = text(lost, arm("low", 0.5, 0), arm("high", 0.55, 1), arm("mid", 0.52, 2))
    assert undecided.startswith("No best arm by pass@1: the baseline base has no score, and no arm is proven better ")
    assert "The record has 1 more pair of arms." in undecided


def test_a_baseline_that_beats_all_is_said():
    assert "the baseline base; every other arm is worse" in text(arm("base", 0.9, 0), arm("bad", 0.3, 1))


def test_an_arm_that_is_not_ranked_stands_with_its_reason():
    shown = text(arm("base", 0.5, 0), ArmScores(arm="lost", failed={42: "killed"}))
    assert shown.startswith("No best arm by pass@1: only one arm has a score") and "highest" not in shown
    assert "\nlost: not ranked (killed)" in shown and "\nbase: 0.440 [" in shown


def test_the_only_arm_is_told_in_one_line():
    shown = text(arm("lora", 0.9, 0, tasks=48)).splitlines()
    assert shown[0].startswith("lora: 0.") and shown[0].endswith("], 48 tasks, 1 seed")
    assert len(shown) == 2 and shown[1] == (
        "Note: One seed: the interval covers the tasks, not training variance. Use n_repeats: 3."
    )
    assert text(ArmScores(arm="lora", failed={42: "killed"})) == "lora: not ranked (killed)"


def test_seeds_without_a_score_are_counted():
    values = {f"t{i:03d}": float(i % 2) for i in range(40)}
    shown = text(arm("base", 0.5, 0, tasks=40), ArmScores(arm="a", seeds={1: values, 2: values}, failed={3: "killed"}))
    assert "a: 0.500 [" in shown and "40 tasks, 2 of 3 seeds; " in shown


def test_a_search_tells_who_is_on_top_and_of_no_baseline():
    shown = text(arm("t0", 0.5, 0), arm("t1", 0.7, 1), searched=True)
    assert shown.startswith("t1 scored 0.") and "baseline" not in shown
    assert ", the highest of 2 scored arms; " in shown and "One seed per arm: " in shown.splitlines()[0]
    lost = text(ArmScores(arm="t0", failed={1: "x"}), ArmScores(arm="t1", failed={1: "x"}), searched=True)
    assert lost.startswith("No best arm by pass@1: no arm has a score.")


def test_one_task_is_one_task():
    shown = text(arm("base", 0.0, 0, tasks=1), arm("other", 1.0, 0, tasks=1))
    assert "other: 1.000, 1 task, 1 seed; undecided: 100.0 points above base; one task is shared" in shown


def test_the_untrained_model_stands_beside():
    shown = text(arm("base", 0.9, 0), untrained={f"t{i:03d}": 0.0 for i in range(100)})
    assert "1 seed; better: 84.0 points above untrained (95 % CI " in shown and "; p < 0.001, Holm-corrected)" in shown


def test_what_would_settle_it_is_said_of_the_untrained_model_too():
    shown = text(arm("base", 0.62, 5), untrained={f"t{i:03d}": float(i % 2) for i in range(100)})
    assert "undecided: " in shown and " above untrained (95 % CI " in shown and "would settle it" in shown


def test_many_arms_of_one_seed_are_not_all_named():
    shown = text(*(arm(f"a{number}", 0.5, number) for number in range(5)))
    assert "Note:" not in shown and "One seed per arm: " in shown.splitlines()[0]


def test_an_arm_with_one_seed_among_arms_with_several_is_named():
    values = {f"t{i:03d}": float(i % 2) for i in range(100)}
    arms = [ArmScores(arm=f"a{number}", seeds={1: values}) for number in range(5)]
    shown = text(ArmScores(arm="base", seeds={1: values, 2: values}), *arms)
    told = "one seed; the interval covers the tasks, not training variance, and comparisons with it stay undecided"
    assert f"Note: a0, a1, a2 and 2 more: {told} until it has more seeds" in shown
    assert "One seed per arm" not in shown


def test_a_plan_says_how_many_new_templates_its_tasks_come_from():
    """12 tasks of 3 templates: `about 4 more tasks` stood above a note that templates count, and not tasks."""
    ones = ArmScores(arm="a", seeds={1: {f"t{i}": 1.0 for i in range(12)}})
    shown = text(ones, untrained={f"t{i}": 0.0 for i in range(12)}, clusters={f"t{i}": f"c{i % 3}" for i in range(12)})
    assert "more tasks from 1 new template would settle it" in shown and "tasks come from 3 templates" in shown


def rows(name, *seeds, first_task=0, **options):
    """An arm with a row of values per seed."""
    tables = {s: {f"t{first_task + i:03d}": float(v) for i, v in enumerate(row)} for s, row in enumerate(seeds)}
    return ArmScores(arm=name, seeds=tables, **options)


def test_arms_that_share_no_task_are_said_not_to_be_comparable():
    shown = text(rows("base", [1, 0, 1, 0]), rows("other", [1, 1, 1, 0], first_task=50))
    assert shown.startswith("No best arm by pass@1: the arms share no task and cannot be compared.")
    assert "highest of" not in shown and "no significant difference" not in shown and "0 in number" not in shown
    assert "other: 0.750" in shown and "not compared with base: the two share no task" in shown


def test_an_arm_that_shares_no_task_is_left_out_of_the_ranking_in_words():
    shown = text(rows("base", [1, 0] * 20), rows("other", [1, 1, 0, 0] * 10), rows("apart", [1] * 40, first_task=500))
    assert "for the highest of 2 scored arms that share tasks" in shown
    assert "; not compared with apart: no shared task" in shown and "(apart shares no task with it)" in shown


def test_an_interval_without_0_that_is_undecided_says_why():
    base = [1, 0] * 30
    arms = [rows(f"low{i}", base) for i in range(9)]
    shown = text(rows("base", base), rows("up", [1] * 15 + base[15:]), *arms)
    line = next(line for line in shown.splitlines() if line.startswith("up: "))
    assert "undecided: 11.7 points above base (95 % CI 2." in line
    assert "; not significant once corrected for 10 comparisons" in line


def test_values_that_are_the_same_one_by_one_are_called_the_same():
    shown = text(rows("base", [3.5, 7.0, 1.0]), rows("twin", [3.5, 7.0, 1.0]), rows("up", [4.5, 8.0, 2.0]), share=False)
    assert "twin: 3.833" in shown and "; the same as base on every task" in shown
    assert "the difference is exactly the same on every task: there is no variance to test it with" in shown
    assert "scatter is not known" not in shown


def test_a_difference_of_0_is_not_above_anything():
    shown = text(rows("base", [1, 0, 1, 0]), rows("other", [0, 1, 0, 1]))
    assert "undecided: the same mean as base (95 % CI" in shown and "0.0 points above" not in shown


def test_one_run_has_its_loss_once():
    alone = text(per_run("a", 0.001), share=False, mode="min", per_run=True)
    assert "in every run" not in alone and alone.splitlines()[0] == "a: 0.001, 1 seed"
    pair = text(per_run("a", 0.001), per_run("b", 0.001), share=False, mode="min", per_run=True)
    assert (
        pair.startswith("Every arm has 0.001, so there is nothing to compare.")
        and "b: 0.001, 1 seed; the same as a" in pair
    )
    assert "in every run" not in pair
    again = text(per_run("a", 0.001, 0.001), per_run("b", 0.001, 0.001), share=False, mode="min", per_run=True)
    assert "Every arm has 0.001 in every run" in again


def test_a_best_arm_that_was_scored_on_training_rows_is_marked_in_the_headline():
    base, good = [1, 0] * 30, [1] * 60
    shown = text(rows("base", base), rows("good", good, training_mark="on training rows"))
    assert shown.splitlines()[0].startswith("Best arm by pass@1: good (on training rows), ")


def test_a_low_arm_is_not_said_to_lie_far_below_0():
    """0.022 against 0 had a CI of -13.0 to 17.4 points: the arm itself cannot be below 0."""
    low = [[0] * 45, [0] * 44 + [1], [0] * 43 + [1, 1]]
    verdict = judge_arms([rows("low", *low)], metric="pass@1", untrained={f"t{i:03d}": 0.0 for i in range(45)})
    found = verdict.arms[0].vs_untrained
    assert found.difference == pytest.approx(1 / 45) and -0.08 <= found.low <= 0 < found.high <= verdict.arms[0].high
    high = judge_arms(
        [rows("high", *(1 - np.array(low)))], metric="pass@1", untrained={f"t{i:03d}": 1.0 for i in range(45)}
    )
    assert high.arms[0].vs_untrained.high <= 0.08


def test_the_sentence_on_the_top_arm_names_few_of_many_ties_and_none_of_them_twice():
    same, low = {f"t{n}": float(n % 2) for n in range(40)}, {f"t{n}": float(n % 3 == 0) for n in range(40)}
    arms = [ArmScores(arm="base", seeds={1: low}), *(ArmScores(arm=f"arm{n}", seeds={1: same}) for n in range(8))]
    [line] = [line for line in verdict_lines(judge_arms(arms, metric="pass@1")) if line.startswith("arm0 scored")]
    assert "tied with arm1, arm2, arm3 and 4 more for the highest of 9 scored arms" in line
    assert "no significant difference from base." in line and line.count("arm1") == 1


@pytest.mark.parametrize("mark", ["on training rows", "3 tasks in training rows"])
def test_tasks_that_were_memorised_are_not_said_to_be_too_easy(mark):
    alone = text(rows("a", [1] * 20, training_mark=mark))
    pair = text(rows("a", [1] * 20), rows("b", [1] * 20, training_mark=mark))
    for shown in (alone, pair):
        assert "Tasks were in training rows: score on tasks that are not." in shown and "harder" not in shown
    assert "Use harder tasks to see a difference." in text(rows("a", [1] * 20), rows("b", [1] * 20))


def test_where_more_tasks_alone_are_too_many_a_plan_of_tasks_and_seeds_is_told():
    """It read `the runs scatter too much to settle it with 20 more seeds per arm`: 8 templates and 4 more seeds do."""
    tasks = [f"t{n}" for n in range(20)]
    seeds = {seed: {task: float((n + seed) % 4 < 2) for n, task in enumerate(tasks)} for seed in (0, 1)}
    verdict = judge_arms(
        [ArmScores(arm="mid", seeds=seeds)], metric="pass@1", untrained=dict.fromkeys(tasks, 0.0),
        clusters={task: f"c{n % 4}" for n, task in enumerate(tasks)},
    )  # fmt: skip
    found = verdict.arms[0].vs_untrained
    assert (found.verdict, found.more_tasks, found.more_of_both, found.more_templates) == (
        "undecided",
        None,
        (40, 4),
        8,
    )
    assert "would settle it" in verdict_lines(verdict)[0] and "scatter" not in verdict_lines(verdict)[0]


def test_one_seed_each_on_few_tasks_is_too_little_data_and_not_scatter_of_runs():
    shown = text(
        rows("base", [0, 1, 1, 0]), rows("other", [1, 1, 1, 0]), *(rows(f"x{n}", [0, 1, 1, 0]) for n in "abcd")
    )
    assert "scatter" not in shown
    [line] = [line for line in shown.splitlines() if line.startswith("other: ")]
    assert "too little data: the interval is wide (4 tasks, 1 seed per arm); add tasks" in line
