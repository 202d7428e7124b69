"""The verdict in words.

In: a `Verdict`. Out: lines of text that claim no more than it does.
"""

from __future__ import annotations

from evsys_sdk.eval.verdict import ArmVerdict, Comparison, Verdict, Winner
from evsys_sdk.numbers import shown, span


def verdict_lines(verdict: Verdict) -> list[str]:
    """The result first, then a line per arm, then what a reader must know. Of the only arm, its line says it all."""
    lines = [] if len(verdict.arms) == 1 else _result(verdict)
    lines += [_arm_line(arm, verdict) for arm in verdict.arms]
    return lines + [f"Note: {note}." for note in verdict.notes]


def _result(verdict: Verdict) -> list[str]:
    scored = [arm for arm in verdict.arms if arm.mean is not None]
    lines = [] if verdict.best_arm and verdict.baseline_arm is None else [_headline(verdict)]
    return lines + ([_winner_line(verdict.winner, len(scored))] if verdict.winner and len(scored) > 1 else [])


def _headline(verdict: Verdict) -> str:
    if verdict.best_arm is None:
        return f"No best arm by {verdict.metric}: {verdict.why_no_best}."
    if verdict.best_arm == verdict.baseline_arm:
        return f"Best arm by {verdict.metric}: the baseline {verdict.best_arm}; every other arm is worse."
    found = next(arm.vs_baseline for arm in verdict.arms if arm.arm == verdict.best_arm)
    return f"Best arm by {verdict.metric}: {verdict.best_arm}, {_effect(found)}." if found else ""


def _winner_line(winner: Winner, n_arms: int) -> str:
    place, others, told = f"Top of {n_arms} arms", winner.rivals, "not told apart from it"
    if winner.above:
        place, others, told = "Its own score", winner.above, "with a higher one, but not proven better"
    seen = f"{place}: {winner.arm} with {shown(winner.observed)}"
    expected = "" if winner.expected is None else f"; corrected for having been picked {shown(winner.expected)}"
    named = f"; {told}: {', '.join(others)}" if others else ""
    return f"{seen}{expected}{span(winner.low, winner.high)}{named}."


def _arm_line(arm: ArmVerdict, verdict: Verdict) -> str:
    if arm.why_unranked:
        return f"{arm.arm}: not ranked ({arm.why_unranked})"
    of_all = f"{arm.n_seeds} of {arm.n_seeds + len(arm.failed_seeds)} seeds"
    counts = of_all if arm.failed_seeds else _count(arm.n_seeds, "seed")
    counts = f"{_count(arm.n_tasks, 'task')}, {counts}" if arm.n_tasks > 1 or arm.low is None else counts
    mean = f"{arm.arm}: {shown(arm.mean or 0.0)}{span(arm.low, arm.high)}, {counts}"
    parts = [_told(arm.vs_baseline)] if arm.vs_baseline else []
    parts += ["the baseline"] if arm.arm == verdict.baseline_arm and len(verdict.arms) > 1 else []
    parts += [_told(arm.vs_untrained)] if arm.vs_untrained else []
    return "; ".join([mean, *parts])


def _told(found: Comparison) -> str:
    return f"{found.verdict}, {_effect(found)}{_needs(found)}"


def _effect(found: Comparison) -> str:
    """`+0.050 [+0.010, +0.090] to base, p 0.012 after Holm`."""
    if found.difference is None:
        return f"not compared with {found.vs}: {found.why}"
    bounds = span(found.low, found.high, signed=True)
    p = "" if found.p_holm is None else f", p {_p(found.p_holm)} after Holm"
    return f"{shown(found.difference, signed=True)}{bounds} to {found.vs}{p}"


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _needs(found: Comparison) -> str:
    """What would settle an undecided comparison, if the difference stays as it is."""
    if found.verdict != "undecided":
        return ""
    if found.low is None:
        return f"; {found.why}" if found.difference is not None else ""
    ways = [_count(found.more_tasks, "more task")] if found.more_tasks is not None else []
    ways += [f"{_count(found.more_seeds, 'more seed')} per arm"] if found.more_seeds is not None else []
    if found.more_of_both is not None:
        tasks, seeds = found.more_of_both
        ways = [f"{_count(tasks, 'more task')} together with {_count(seeds, 'more seed')} per arm"]
    return f"; about {' or '.join(ways)} would settle it" if ways else "; more of the same would not settle it"
