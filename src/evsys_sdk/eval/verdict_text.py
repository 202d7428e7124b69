"""The verdict in words.

In: a `Verdict`. Out: lines of text that claim no more than it does: what is wrong with the scores first, then the
result, then a line per arm, then notes.
"""

from __future__ import annotations

from evsys_sdk.eval.judging import ONLY_TASKS, SAME_EVERYWHERE, one_seed_note
from evsys_sdk.eval.verdict import ArmVerdict, Comparison, Verdict, Winner
from evsys_sdk.numbers import amount, count, plan_text, shown, span

NOTHING_SOLVED = "Check the answers, the verifier and max_tokens."
ALL_SOLVED = "Use harder tasks to see a difference."


def verdict_lines(verdict: Verdict) -> list[str]:
    """Arms with many errors first, then the result, a line per arm, and what a reader must know. For a single arm, its
    line is the result."""
    lines = [_error_warning(arm) for arm in verdict.arms if arm.has_many_errors]
    result = _result(verdict) if len(verdict.arms) > 1 else []
    lines += [*result, *(_arm_line(arm, verdict) for arm in verdict.arms)]
    if len(verdict.arms) == 1 and verdict.constant is not None:
        lines.append(f"{_constant_scores(verdict)}.{_constant_advice(verdict)}")
    # What the headline says already is not repeated as a note.
    notes = [note for note in verdict.notes if not (ONLY_TASKS in note and any(ONLY_TASKS in line for line in result))]
    return lines + [f"Note: {note}." for note in notes]


def _error_warning(arm: ArmVerdict) -> str:
    share = f"{100 * arm.n_errors / arm.n_rollouts:.0f} %"
    first = f"; first error: {' '.join(arm.first_error.split())}" if arm.first_error else ""
    return (
        f"Warning: {_errors(arm)} in {arm.arm} ({share}{first}) and count as failures. "
        "Fix the cause before trusting its score."
    )


def _errors(arm: ArmVerdict) -> str:
    return f"{arm.n_errors:,} of {arm.n_rollouts:,} rollouts errored"


def _result(verdict: Verdict) -> list[str]:
    """The headline, the top arm's score where arms were compared, and the pairs where the baseline has no score."""
    scored = [arm for arm in verdict.arms if arm.mean is not None]
    if verdict.constant is not None and len(scored) > 1:
        return [f"{_constant_scores(verdict)}, so there is nothing to compare.{_constant_advice(verdict)}"]
    top = [_winner_line(verdict.winner, verdict)] if verdict.winner and len(scored) > 1 else []
    lines = [*([] if verdict.best_arm and verdict.baseline_arm is None else [_headline(verdict)]), *top]
    # The first line is the headline, also that of a search, which has no baseline to beat.
    if len(scored) > 1 and all(arm.n_seeds == 1 for arm in scored):
        lines[0] += f" {one_seed_note(scored)}."
    return [*lines, *_pair_lines(verdict)]


def _headline(verdict: Verdict) -> str:
    if verdict.best_arm is None:
        return f"No best arm by {verdict.metric}: {verdict.why_no_best}."
    best = _arm(verdict, verdict.best_arm)
    name = f"{best.arm}{_seeds_left(best)}"
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


def _winner_line(winner: Winner, verdict: Verdict) -> str:
    n_scored = sum(arm.mean is not None for arm in verdict.arms)
    highest = "highest" if verdict.mode == "max" else "lowest"
    best = f", the {highest} of {n_scored} scored arms" if not winner.above else ""
    text = f"{winner.arm}{_seeds_left(_arm(verdict, winner.arm))} scored {shown(winner.observed)}{best}"
    if winner.expected is not None:
        interval = span(winner.low, winner.high)
        text += f"; {shown(winner.expected)}{interval} expected on new tasks (corrected for selection)"
    if winner.rivals:
        text += f"; no significant difference from {', '.join(winner.rivals)}"
    if winner.above:
        beyond = "higher" if verdict.mode == "max" else "lower"
        text += f"; {', '.join(winner.above)} scored {beyond}, but not significantly better than the baseline"
    return f"{text}."


def _pair_lines(verdict: Verdict) -> list[str]:
    """The arm on top against each of the others, where the baseline has no score; the record has the other pairs."""
    if not verdict.pairs:
        return []
    top = verdict.pairs[0].arm
    lines = [f"{top} against {found.vs}: {_comparison(found, verdict)}" for found in verdict.pairs if found.arm == top]
    rest = len(verdict.pairs) - len(lines)
    return [*lines, *([f"The record has {rest} more pair{'' if rest == 1 else 's'} of arms."] if rest else [])]


def _constant_scores(verdict: Verdict) -> str:
    """`No arm solved any task`, where all values are the same."""
    several, value = len(verdict.arms) > 1, verdict.constant or 0.0
    if verdict.share and verdict.mode == "max" and value in (0.0, 1.0):
        if several:
            return "Every arm solved every task" if value else "No arm solved any task"
        return f"{verdict.arms[0].arm} solved {'every' if value else 'no'} task"
    return f"{'Every arm' if several else verdict.arms[0].arm} scored {shown(value)} on every task"


def _constant_advice(verdict: Verdict) -> str:
    if not (verdict.share and verdict.mode == "max" and verdict.constant in (0.0, 1.0)):
        return ""
    if verdict.constant:
        return f" {ALL_SOLVED}"
    untrained = next((-arm.vs_untrained.difference for arm in verdict.arms
                      if arm.vs_untrained and arm.vs_untrained.difference), 0.0)  # fmt: skip
    if untrained:
        return f" The untrained model scored {shown(untrained)}: check the learning rate and the prompt template."
    return f" {NOTHING_SOLVED}"


def _arm_line(arm: ArmVerdict, verdict: Verdict) -> str:
    if arm.why_unranked:
        return f"{arm.arm}: not ranked ({arm.why_unranked})"
    of_all = f"{arm.n_seeds} of {arm.n_launched} seeds"
    counts = of_all if arm.failed_seeds else count(arm.n_seeds, "seed")
    counts = f"{count(arm.n_tasks, 'task')}, {counts}" if arm.n_tasks > 1 or arm.low is None else counts
    score = f"{shown(arm.mean or 0.0)}{span(arm.low, arm.high)}, {counts}"
    if arm.has_many_errors:
        score = f"{_errors(arm)}; {score}"
    elif arm.n_errors:
        score = f"{score}, {_errors(arm)}"
    parts = [_comparison(arm.vs_baseline, verdict)] if arm.vs_baseline else []
    parts += ["the baseline"] if arm.arm == verdict.baseline_arm and len(verdict.arms) > 1 else []
    parts += [_comparison(arm.vs_untrained, verdict)] if arm.vs_untrained else []
    return "; ".join([f"{arm.arm}: {score}", *parts])


def _comparison(found: Comparison, verdict: Verdict) -> str:
    """`undecided: 1.0 points above base (95 % CI ...); about 120 more tasks would settle it`."""
    if found.difference is None:
        return f"not compared with {found.vs}: {found.why}"
    if found.why == SAME_EVERYWHERE:
        return f"the same as {found.vs} on every task"
    return f"{found.verdict}: {effect(found, verdict)}{_needs(found)}"


def effect(found: Comparison, verdict: Verdict) -> str:
    """`13.3 points above base (95 % CI 2.4 to 24.2; p = 0.018, Holm-corrected)`; below, amounts below are told."""
    if found.difference is None:
        return f"not compared with {found.vs}: {found.why}"
    sign = -1.0 if found.difference < 0 else 1.0
    where = "below" if found.difference < 0 else "above"
    told = f"{amount(found.difference * sign, share=verdict.share)}{' points' if verdict.share else ''}"
    facts = []
    if found.low is not None and found.high is not None:
        ends = sorted([found.low * sign, found.high * sign])
        low, high = (amount(end, share=verdict.share) for end in ends)
        facts.append(f"{100 * (1 - verdict.alpha):g} % CI {low} to {high}")
    facts += [f"p {_p(found.p_holm)}, Holm-corrected"] if found.p_holm is not None else []
    return f"{told} {where} {found.vs}{f' ({"; ".join(facts)})' if facts else ''}"


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def _needs(found: Comparison) -> str:
    """What would settle an undecided comparison if the difference stays as it is; or why nothing is named."""
    if found.verdict != "undecided":
        return ""
    plan = plan_text(found.more_tasks, found.more_seeds, found.more_of_both)
    if plan:
        return f"; {plan} would settle it"
    return f"; {found.why}" if found.why else ""
