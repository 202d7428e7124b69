"""The verdict in words says no more than its numbers."""

from __future__ import annotations

import numpy as np

from evsys_sdk.eval.arm_scores import ArmScores
from evsys_sdk.eval.judging import judge_arms
from evsys_sdk.eval.verdict_text import verdict_lines


def arm(name, share, seed, tasks=100):
    values = np.random.default_rng(seed).random(tasks) < share
    return ArmScores(arm=name, seeds={42: {f"t{i:03d}": float(value) for i, value in enumerate(values)}})


def text(*arms, **options):
    return "\n".join(verdict_lines(judge_arms(list(arms), metric="pass@1", **options)))


def test_a_proven_winner_is_named_with_its_effect():
    shown = text(arm("base", 0.4, 0), arm("good", 0.9, 1))
    assert shown.startswith("Best arm by pass@1: good, +0.") and "p < 0.001 after Holm" in shown.splitlines()[0]
    assert "Top of 2 arms: good" in shown and "corrected for having been picked" in shown


def test_no_winner_says_so_and_what_would_settle_it():
    shown = text(arm("base", 0.5, 0), arm("maybe", 0.52, 1))
    assert shown.startswith("No best arm by pass@1: no arm beats the baseline.")
    assert "not told apart from it" in shown and "more tasks would settle it" in shown
    assert "Note: base, maybe: one seed" in shown


def test_a_baseline_that_beats_all_is_said():
    assert "the baseline base; every other arm is worse" in text(arm("base", 0.9, 0), arm("bad", 0.3, 1))


def test_an_arm_that_is_not_ranked_stands_with_its_reason():
    shown = text(arm("base", 0.5, 0), ArmScores(arm="lost", failed={42: "killed"}))
    assert shown.startswith("No best arm by pass@1: only one arm has a score") and "Top of" not in shown
    assert "\nlost: not ranked (killed)" in shown and "\nbase: 0.440 [" in shown


def test_the_only_arm_is_told_in_one_line():
    shown = text(arm("lora", 0.9, 0, tasks=48)).splitlines()
    assert shown[0].startswith("lora: 0.") and shown[0].endswith("], 48 tasks, 1 seed")
    assert len(shown) == 2 and shown[1].startswith("Note: lora: one seed")
    assert text(ArmScores(arm="lora", failed={42: "killed"})) == "lora: not ranked (killed)"


def test_seeds_without_a_score_are_counted():
    values = {f"t{i:03d}": float(i % 2) for i in range(40)}
    shown = text(arm("base", 0.5, 0, tasks=40), ArmScores(arm="a", seeds={1: values, 2: values}, failed={3: "killed"}))
    assert "a: 0.500 [" in shown and "40 tasks, 2 of 3 seeds; " in shown


def test_a_search_tells_who_is_on_top_and_of_no_baseline():
    shown = text(arm("t0", 0.5, 0), arm("t1", 0.7, 1), searched=True)
    assert shown.startswith("Top of 2 arms: t1 with 0.") and "baseline" not in shown
    lost = text(ArmScores(arm="t0", failed={1: "x"}), ArmScores(arm="t1", failed={1: "x"}), searched=True)
    assert lost.startswith("No best arm by pass@1: no arm has a score.")


def test_one_task_is_one_task():
    shown = text(arm("base", 0.0, 0, tasks=1), arm("other", 1.0, 0, tasks=1))
    assert "other: 1.000, 1 task, 1 seed; undecided, +1.000 to base; one task is shared" in shown


def test_the_untrained_model_stands_beside():
    shown = text(arm("base", 0.9, 0), untrained={f"t{i:03d}": 0.0 for i in range(100)})
    assert "1 seed; better, +0." in shown and "] to untrained, p < 0.001 after Holm" in shown


def test_what_would_settle_it_is_said_of_the_untrained_model_too():
    shown = text(arm("base", 0.55, 0), untrained={f"t{i:03d}": float(i % 2) for i in range(100)})
    assert "undecided, " in shown and " to untrained, p " in shown and "would settle it" in shown


def test_many_arms_of_one_seed_are_not_all_named():
    shown = text(*(arm(f"a{number}", 0.5, number) for number in range(5)))
    assert "Note: all arms: one seed, so" in shown and "a0, a1" not in shown.split("Note")[1]
