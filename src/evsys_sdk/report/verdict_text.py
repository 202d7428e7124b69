"""The verdict in words.

In: a `Verdict`. Out: lines of text that claim no more than it does: what is wrong with the scores first, then the
result, then a line per arm, then notes.
"""

from __future__ import annotations

from evsys_sdk.constants import UNTRAINED
from evsys_sdk.errors import put_on_one_line
from evsys_sdk.format import (
    amount,
    amount_unit,
    count,
    errors_text,
    interval_text,
    name_list,
    plan_text,
    score_text,
    shown,
)
from evsys_sdk.stats.judge import (
    NO_SCATTER,
    ONLY_TASKS,
    SAME_EVERYWHERE,
    SAME_IN_EVERY_RUN,
    constant_text,
    one_seed_note,
)
from evsys_sdk.stats.verdict import ArmVerdict, Comparison, Verdict, Winner

NOTHING_SOLVED = "Check the answers, the verifier and max_tokens."
ALL_SOLVED = "Use harder tasks to see a difference."
ALL_MEMORISED = "Tasks were in training rows: score on tasks that are not."


def verdict_lines(verdict: Verdict) -> list[str]:
    """Arms with many errors first, then the result, a line per arm, and what a reader must know. For a single arm, its
    line is the result."""
    lines = []
    for arm in (arm for arm in verdict.arms if arm.has_many_errors):
        share = f"{100 * arm.n_errors / arm.n_rollouts:.0f} %"
        first = f"; first error: {put_on_one_line(arm.first_error)}" if arm.first_error else ""
        lines.append(
            f"Warning: {errors_text(arm.n_errors, arm.n_rollouts)} in {arm.arm} ({share}{first}) and count as "
            "failures. Fix the cause before trusting its score."
        )
    # The headline, the top arm's score where arms were compared, and the pairs where the baseline has no score.
    scored = [arm for arm in verdict.arms if arm.mean is not None]
    result: list[str] = []
    if len(verdict.arms) > 1 and verdict.constant is not None and len(scored) > 1:
        result = [f"{constant_scores(verdict)}, so there is nothing to compare.{_constant_advice(verdict)}"]
    elif len(verdict.arms) > 1:
        # A search has no baseline to beat: its first line is that of the arm on top.
        result = [] if verdict.best_arm and verdict.baseline_arm is None else [_headline(verdict)]
        if verdict.winner and len(scored) > 1:
            winner = _arm(verdict, verdict.winner.arm)
            lost = _seeds_left(winner)
            if lost and result and winner.arm == verdict.best_arm:  # the headline has said it in full
                lost = f" ({winner.n_seeds} of {winner.n_launched} seeds)"
            result.append(_winner_line(verdict.winner, verdict, lost))
        if len(scored) > 1 and all(arm.n_seeds == 1 for arm in scored):
            result[0] += f" {one_seed_note(scored, per_run=verdict.per_run)}."
        # The arm on top against each of the others; the record has the other pairs.
        top = [found for found in verdict.pairs if found.arm == verdict.pairs[0].arm]
        result += [f"{found.arm} against {found.vs}: {_comparison(found, verdict)}" for found in top]
        if rest := len(verdict.pairs) - len(top):
            result.append(f"The record has {count(rest, 'more pair')} of arms.")
    lines += result
    for arm in verdict.arms:
        if arm.why_unranked:
            lines.append(f"{arm.arm}: not ranked ({arm.why_unranked})")
            continue
        parts = [_comparison(arm.vs_baseline, verdict)] if arm.vs_baseline else []
        parts += ["the baseline"] if arm.arm == verdict.baseline_arm and len(verdict.arms) > 1 else []
        parts += [_comparison(arm.vs_untrained, verdict)] if arm.vs_untrained else []
        lines.append("; ".join([f"{arm.arm}: {arm_score_text(arm, verdict)}", *parts]))
    # Of one arm with one value, such as a loss, the line above has said all.
    if (
        len(verdict.arms) == 1
        and verdict.constant is not None
        and not (verdict.per_run and verdict.arms[0].n_seeds == 1)
    ):
        lines.append(f"{constant_scores(verdict)}.{_constant_advice(verdict)}")
    # What the headline says already is not repeated as a note.
    said = [what for what in (ONLY_TASKS, NO_SCATTER) if any(what in line for line in result)]
    notes = [note for note in verdict.notes if not any(what in note for what in said)]
    return lines + [f"Note: {note}." for note in notes]


def _headline(verdict: Verdict) -> str:
    if verdict.best_arm is None:
        return f"No best arm by {verdict.metric}: {verdict.why_no_best}."
    best = _arm(verdict, verdict.best_arm)
    name = f"{best.arm}{_seeds_left(best)}{training_note(best)}"
    if verdict.best_arm == verdict.baseline_arm:
        scored = "" if all(arm.mean is not None for arm in verdict.arms) else "scored "
        return f"Best arm by {verdict.metric}: the baseline {name}; every other {scored}arm is worse."
    if best.vs_baseline:
        beaten = _seeds_left(_arm(verdict, best.vs_baseline.vs))
        return f"Best arm by {verdict.metric}: {name}, {effect(best.vs_baseline, verdict)}{beaten}."
    others = [found.vs for found in verdict.pairs if found.arm == best.arm]
    return (
        f"Best of the {len(others) + 1} scored arms by {verdict.metric}: {name}, better than {', '.join(others)}; "
        f"the baseline {verdict.baseline_arm} has no score, so no arm is compared with it."
    )


def _arm(verdict: Verdict, name: str) -> ArmVerdict:
    return next(arm for arm in verdict.arms if arm.arm == name)


def _seeds_left(arm: ArmVerdict) -> str:
    """` (1 of 3 seeds scored, training variance not measured)` for an arm that lost seeds."""
    if not arm.failed_seeds:
        return ""
    lone = ", training variance not measured" if arm.n_seeds == 1 else ""
    return f" ({arm.n_seeds} of {arm.n_launched} seeds scored{lone})"


def training_note(arm: ArmVerdict) -> str:
    """` (on training rows)` for an arm that was scored on what it trained on."""
    return f" ({arm.training_mark})" if arm.training_mark else ""


def _winner_line(winner: Winner, verdict: Verdict, lost: str) -> str:
    n_scored = sum(arm.mean is not None for arm in verdict.arms) - len(winner.not_compared)
    highest = "highest" if verdict.mode == "max" else "lowest"
    tied = f"tied with {name_list(winner.ties)} for " if winner.ties else ""
    best = f", {tied}the {highest} of {n_scored} scored arms" if not winner.above else ""
    best += " that share tasks" if best and winner.not_compared else ""
    own = _arm(verdict, winner.arm)
    text = f"{winner.arm}{lost} scored {shown(winner.observed, unit=verdict.unit)}{training_note(own)}{best}"
    if winner.expected is not None and not own.training_mark:  # of memorised tasks nothing follows for new ones
        expected = interval_text(winner.expected, winner.low, winner.high, unit=verdict.unit)
        text += f"; {expected} expected on new tasks (corrected for selection)"
    if rivals := [arm for arm in winner.rivals if arm not in winner.ties]:  # of a tie this goes without saying
        text += f"; no significant difference from {name_list(rivals)}"
    if winner.not_compared:
        text += f"; not compared with {name_list(winner.not_compared)}: no shared task"
    if winner.above:
        beyond = "higher" if verdict.mode == "max" else "lower"
        text += f"; {name_list(winner.above)} scored {beyond}, but not significantly better than the baseline"
    return f"{text}."


def constant_scores(verdict: Verdict) -> str:
    """`No arm solved any task`, where all values are the same."""
    several, value = len(verdict.arms) > 1, verdict.constant or 0.0
    if verdict.share and verdict.mode == "max" and value in (0.0, 1.0):
        if several:
            return "Every arm solved every task" if value else "No arm solved any task"
        return f"{verdict.arms[0].arm} solved {'every' if value else 'no'} task"
    same = constant_text(value, verdict.arms, per_run=verdict.per_run, unit=verdict.unit)
    return f"{'Every arm' if several else verdict.arms[0].arm} {same}"


def _constant_advice(verdict: Verdict) -> str:
    if not (verdict.share and verdict.mode == "max" and verdict.constant in (0.0, 1.0)):
        return ""
    if verdict.constant:
        return f" {ALL_MEMORISED if any(arm.training_mark for arm in verdict.arms) else ALL_SOLVED}"
    # Every arm scored 0 here, so its difference to the untrained model is minus what that one scored.
    untrained = next((-arm.vs_untrained.difference for arm in verdict.arms
                      if arm.vs_untrained and arm.vs_untrained.difference), 0.0)  # fmt: skip
    if untrained:
        whom = "The untrained model" if verdict.start == UNTRAINED else "Before training it"
        return f" {whom} scored {shown(untrained)}: check the learning rate and the prompt template."
    return f" {NOTHING_SOLVED}"


def arm_score_text(arm: ArmVerdict, verdict: Verdict, *, with_counts: bool = True) -> str:
    """`0.900 [0.802, 0.951], 60 tasks, 1 seed, 2 of 60 rollouts errored`; a table has the counts in other columns."""
    seeds = f"{arm.n_seeds} of {arm.n_launched} seeds" if arm.failed_seeds else count(arm.n_seeds, "seed")
    counts = [seeds] if verdict.per_run else [count(arm.n_tasks, "task"), seeds]
    return score_text(
        arm.mean,
        arm.low,
        arm.high,
        unit=verdict.unit,
        counts=counts if with_counts else (),
        marks=[arm.training_mark],
        n_errors=arm.n_errors,
        n_rollouts=arm.n_rollouts,
    )


def _comparison(found: Comparison, verdict: Verdict) -> str:
    """`undecided: 1.0 points above base (95 % CI ...); about 120 more tasks would settle it`."""
    whom = verdict.start if found.vs == UNTRAINED else found.vs
    if found.difference is None:
        return f"not compared with {whom}: {found.why}"
    if found.why in (SAME_EVERYWHERE, SAME_IN_EVERY_RUN):
        return f"the same as {whom}{same_where(per_run=verdict.per_run, n_seeds=max(found.n_seeds))}"
    text = f"{found.verdict}: {effect(found, verdict)}"
    if found.verdict != "undecided":
        return text
    # What would settle it if the difference stays as it is; or why nothing is named.
    plan = plan_text(found.more_tasks, found.more_seeds, found.more_of_both, found.more_templates)
    excludes_0 = found.low is not None and found.high is not None and not found.low <= 0 <= found.high
    why = f"; {found.why}" if found.why and (excludes_0 or not plan) else ""
    return f"{text}{why}{f'; {plan} would settle it' if plan else ''}"


def same_where(*, per_run: bool, n_seeds: int) -> str:
    """Where two arms are the same: ` on every task`; ` in every run` of a number that a run has once."""
    if not per_run:
        return " on every task"
    return " in every run" if n_seeds > 1 else ""


def effect(found: Comparison, verdict: Verdict) -> str:
    """`13.3 points above base (95 % CI 2.4 to 24.2; p = 0.018, Holm-corrected)`, or below where lower is better."""
    if found.difference is None:
        return f"not compared with {found.vs}: {found.why}"
    sign = -1.0 if found.difference < 0 else 1.0
    facts = []
    if found.low is not None and found.high is not None:
        # Told as an amount below, the interval is turned round, and its ends swap places.
        ends = sorted([found.low * sign, found.high * sign])
        low, high = (amount(end, share=verdict.share, unit=verdict.unit) for end in ends)
        facts.append(f"{100 * (1 - verdict.alpha):g} % CI {low} to {high}")
    if found.p_holm is not None:
        facts.append(f"p {'< 0.001' if found.p_holm < 0.001 else f'= {found.p_holm:.3f}'}, Holm-corrected")
    told = f" ({'; '.join(facts)})" if facts else ""
    whom = verdict.start if found.vs == UNTRAINED else found.vs
    if found.difference == 0:
        return f"the same mean as {whom}{told}"
    unit = amount_unit(share=verdict.share, unit=verdict.unit)
    where = "below" if found.difference < 0 else "above"
    difference = amount(found.difference * sign, share=verdict.share, unit=verdict.unit)
    return f"{difference}{unit} {where} {whom}{told}"
