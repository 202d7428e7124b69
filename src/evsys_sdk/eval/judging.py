"""From the scores of arms to a verdict.

In: `ArmScores`, one per arm, the baseline arm's name, and the untrained model's values where there are some. Out: a
`Verdict`. Pure: no clock, no files, and chance from a fixed seed. An arm without a score is never ranked, and no arm is
called best only for having the highest mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import get_args

from evsys_sdk.constants import UNTRAINED
from evsys_sdk.errors import FOREIGN, EvsysError, not_known
from evsys_sdk.eval.arm_scores import ArmScores, ArmTable, Values, fixed_table, shared_tasks, table_of
from evsys_sdk.eval.estimate import Estimate
from evsys_sdk.eval.paired import arm_interval, arm_mean
from evsys_sdk.eval.power import Question, more_of_both, more_seeds, more_tasks
from evsys_sdk.eval.rules import Rules, estimate_between, rules_for
from evsys_sdk.eval.seed_spread import chance_of, seed_spread
from evsys_sdk.eval.selection import holm
from evsys_sdk.eval.verdict import ArmVerdict, Comparison, Mode, Verdict, Word
from evsys_sdk.eval.winner import is_narrow, ranking, winner_of
from evsys_sdk.logs import get_logger
from evsys_sdk.numbers import shown

ALPHA = 0.05
MOST_NAMED = 3
ONLY_TASKS = "the interval covers the tasks, not training variance"
SAME_EVERYWHERE = "both scored the same on every task"
TIMES_THE_TASKS, MOST_MORE_SEEDS = 10, 20
"""Plans beyond these are no advice: more than ten times the tasks that there are, or more seeds per arm than that."""
LARGE = 5.0
"""Differences of more margins than this (10 points of pass@1) are not called too small, whatever would settle them."""
FEW_CLUSTERS = 10
BY_CHANCE = 0.01
"""Seeds that would differ as much less often than this are pointed out."""


@contextmanager
def catch_statistics_errors() -> Iterator[None]:
    """Turn whatever goes wrong between scores and verdict into an EvsysError that says so: it never costs a record."""
    try:
        yield
    except EvsysError:
        raise
    except FOREIGN as exc:
        what = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
        get_logger(__name__).debug("the arms could not be judged", exc_info=True)
        raise EvsysError(
            f"could not be judged: {what} (an error in evsys: the scores are whole, please report it)"
        ) from exc


@catch_statistics_errors()
def judge_arms(
    arms: Sequence[ArmScores],
    *,
    metric: str,
    mode: Mode = "max",
    baseline_arm: str | None = None,
    untrained: Values | None = None,
    alpha: float = ALPHA,
    margin: float | None = None,
    also: Sequence[tuple[str, str]] = (),
    share: bool = True,
    searched: bool = False,
    looks: int = 1,
    clusters: Mapping[str, str] | None = None,
    clustered_by: str = "",
) -> Verdict:
    """Compare every arm with the baseline arm (the first, unless named) and with the untrained model.

    `also` names further pairs (arm, vs), for predictions; each is judged on its own, without Holm's correction.
    `share=False`: values between 0 and 1 are no shares of anything, but dollars or seconds, say. `searched=True`: the
    arms are trials of a search, none of which is the baseline by coming first; the best is the one on top. `looks`:
    how often these arms were judged with other seeds or tasks, this time included; differences and p-values then hold
    over all looks. `clusters`: task -> the template it was made from, where tasks are not independent; templates are
    then the units of every interval and test, and a note says how they were found (`clustered_by`).
    """
    if mode not in get_args(Mode):
        raise EvsysError(f"mode: {not_known(mode, 'mode', get_args(Mode))}")
    baseline = _checked(arms, baseline_arm, searched=searched)
    tables = {scores.arm: table_of(scores) for scores in arms if scores.why_unranked is None}
    start = fixed_table(UNTRAINED, untrained) if untrained else None
    start = start if start and start.tasks else None
    others = {UNTRAINED: start, **tables} if start else tables
    compared = tables.get(baseline) if baseline else None
    rules = rules_for(
        others,
        compared or start,
        mode=mode,
        alpha=alpha,
        margin=margin,
        share=share,
        looks=looks,
        clusters=clusters,
    )
    to_baseline = _family(tables, compared, rules)
    to_untrained = _family(tables, start, rules)
    verdicts = _arm_verdicts(arms, tables, rules, to_baseline, to_untrained)
    ranked = ranking(tables, compared, rules)
    pairs = _pairs(tables, ranked, rules) if baseline and compared is None else []
    constant = _constant(list(tables.values()))
    best, why = _best(verdicts, ranked, baseline, pairs)
    if constant is not None and len(tables) > 1:
        best, why = None, f"every arm scored {shown(constant)} on every task"
    asked = [pair for pair in dict.fromkeys(also) if pair[0] in tables and pair[1] in others and pair[0] != pair[1]]
    return Verdict(
        metric=metric,
        mode=mode,
        baseline_arm=baseline,
        alpha=alpha,
        margin=rules.margin if tables else None,
        arms=verdicts,
        best_arm=best,
        why_no_best=why,
        winner=winner_of(verdicts, tables, ranked, rules, best),
        others=[_family({arm: tables[arm]}, others[vs], rules)[arm] for arm, vs in asked],
        pairs=[_without_plan(found, verdicts) for found in pairs],
        share=rules.unit,
        constant=constant,
        looks=looks,
        n_clusters=_n_clusters(others, rules),
        notes=[
            *_looks_note(looks),
            *_cluster_note(_n_clusters(others, rules), clustered_by),
            *_notes(verdicts, tables, baseline, rules),
        ],
    )


def _checked(arms: Sequence[ArmScores], baseline_arm: str | None, *, searched: bool) -> str | None:
    names = [scores.arm for scores in arms]
    if not names:
        raise EvsysError("a verdict needs at least one arm")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise EvsysError(f"arms need distinct names; twice: {', '.join(twice)}")
    if baseline_arm is not None and baseline_arm not in names:
        raise EvsysError(f"baseline_arm: {not_known(baseline_arm, 'arm', names)}")
    return baseline_arm or (None if searched else names[0])


def _family(tables: Mapping[str, ArmTable], vs: ArmTable | None, rules: Rules) -> dict[str, Comparison]:
    """Each arm but `vs` itself against `vs`, corrected for their number."""
    if vs is None:
        return {}
    found = _corrected([(table, vs) for table in tables.values() if table is not vs], rules)
    return {one.arm: one for one in found}


def _pairs(tables: Mapping[str, ArmTable], ranked: Sequence[str], rules: Rules) -> list[Comparison]:
    """Every two arms, the higher one first, corrected for the number of pairs."""
    return _corrected([(tables[arm], tables[vs]) for arm, vs in combinations(ranked, 2)], rules)


def _corrected(pairs: Sequence[tuple[ArmTable, ArmTable]], rules: Rules) -> list[Comparison]:
    """The comparisons of these pairs (arm, vs), as one family under Holm's correction."""
    estimates = [estimate_between(arm, vs, rules) for arm, vs in pairs]
    made = [_comparison(arm, vs, found, rules) for (arm, vs), found in zip(pairs, estimates, strict=True)]
    different, alike = holm([found.p for found in made]), holm([found.p_equivalent for found in made])
    judged = [
        replace(found, p_holm=p, p_equivalent=q, verdict=_word(found, p, q, rules))
        for found, p, q in zip(made, different, alike, strict=True)
    ]
    alpha = rules.alpha / rules.penalty / max(1, sum(found.verdict == "undecided" for found in judged))
    return [
        # Two arms that fail every task, or pass every one, give no scatter to plan with.
        replace(found, why=SAME_EVERYWHERE)
        if found.verdict == "undecided" and _constant(pair) is not None
        else _with_needs(found, estimate, rules.margin, alpha)
        for found, estimate, pair in zip(judged, estimates, pairs, strict=True)
    ]


def _constant(tables: Sequence[ArmTable]) -> float | None:
    """The value that all of these arms have on every task, if they have only one; 0 for arms that solve nothing."""
    ends = {float(end) for table in tables for end in (table.values.min(), table.values.max())}
    return ends.pop() if len(ends) == 1 else None


def _comparison(arm: ArmTable, vs: ArmTable, found: Estimate | None, rules: Rules) -> Comparison:
    n = len(shared_tasks([arm, vs])) if found else 0
    bare = Comparison(
        arm=arm.arm,
        vs=vs.arm,
        verdict="undecided",
        difference=found.value if found else None,
        n_tasks=n,
        n_seeds=(arm.n_seeds, vs.n_seeds),
        only_arm=len(arm.tasks) - n,
        only_vs=len(vs.tasks) - n,
        scope="recipe" if found and found.seed_degrees else "weights",
        why=_why_nothing(found, rules),
    )
    interval = found.interval(1 - rules.alpha / rules.penalty) if found else None
    if found is None or interval is None:
        return bare
    return replace(
        bare,
        low=interval[0],
        high=interval[1],
        p=_over_looks(found.p_value(), rules),
        p_equivalent=_over_looks(found.p_equivalent(rules.margin), rules),
        standard_error=found.error,
        critical=found.critical(rules.alpha / rules.penalty / 2),
    )


def _over_looks(p: float | None, rules: Rules) -> float | None:
    return None if p is None else min(1.0, p * rules.penalty)


def _why_nothing(found: Estimate | None, rules: Rules) -> str:
    if found is None:
        return "the two share no task"
    if found.n_tasks < 2 and rules.unit:
        return "one task is shared, and one says nothing of others"
    if found.n_tasks < 2:
        return "there is one value per run, and only several seeds of each arm show how far such values scatter"
    return "" if found.error is not None else "the difference is the same on every task, so its scatter is not known"


def _word(found: Comparison, p: float | None, alike: float | None, rules: Rules) -> Word:
    # A proven difference is told even where it is also proven to be small: the interval shows both.
    if p is not None and p < rules.alpha and found.difference:
        return "better" if found.difference * rules.sign > 0 else "worse"
    return "equivalent" if alike is not None and alike < rules.alpha else "undecided"


def _with_needs(found: Comparison, estimate: Estimate | None, margin: float, alpha: float) -> Comparison:
    """The comparison with the number of tasks or seeds that would settle it, where that is a number worth running."""
    if found.verdict != "undecided" or estimate is None or estimate.error is None:
        return found
    question = Question(estimate=estimate, margin=margin, alpha=alpha)
    n_seeds = max(found.n_seeds)
    tasks, seeds = more_tasks(question), more_seeds(question, n_seeds)
    both = more_of_both(question, n_seeds) if tasks is None and seeds is None else None
    # Where templates are the units, so many more of them come with as many tasks each as those that there are.
    each = found.n_tasks / estimate.n_tasks
    tasks = None if tasks is None else math.ceil(tasks * each)
    both = None if both is None else (math.ceil(both[0] * each), both[1])
    most = TIMES_THE_TASKS * found.n_tasks
    plan = replace(
        found,
        more_tasks=tasks if tasks is not None and tasks <= most else None,
        more_seeds=seeds if seeds is not None and seeds <= MOST_MORE_SEEDS else None,
        more_of_both=both if both is not None and both[0] <= most and both[1] <= MOST_MORE_SEEDS else None,
    )
    if (plan.more_tasks, plan.more_seeds, plan.more_of_both) == (None, None, None):
        return replace(plan, why=_why_no_plan(plan, margin))
    return replace(plan, why=_why_open(found))


def _why_no_plan(found: Comparison, margin: float) -> str:
    """Why it is not said how many tasks or seeds would settle it."""
    size = f"{found.n_tasks:,} tasks, {max(found.n_seeds)} seed{'' if max(found.n_seeds) == 1 else 's'} per arm"
    if abs(found.difference or 0.0) <= LARGE * margin:
        return f"the difference is too small to be worth settling at this size ({size})"
    return f"the runs scatter too much to settle it with {MOST_MORE_SEEDS} more seeds per arm ({size} now)"


def _why_open(found: Comparison) -> str:
    assert found.low is not None and found.high is not None
    if found.low <= 0 <= found.high:
        return "the interval holds both 0 and differences that would matter"
    return "the difference does not stand when all arms that were compared are counted"


def _without_plan(found: Comparison, verdicts: Sequence[ArmVerdict]) -> Comparison:
    """No number of tasks settles a comparison with an arm whose rollouts error: it would measure the errors."""
    broken = [arm for arm in verdicts if arm.has_many_errors and arm.arm in (found.arm, found.vs)]
    if not broken or found.verdict != "undecided":
        return found
    arm = broken[0]
    why = f"{arm.n_errors:,} of {arm.n_rollouts:,} rollouts of {arm.arm} errored: more tasks would not settle it"
    return replace(found, more_tasks=None, more_seeds=None, more_of_both=None, why=why)


def _arm_verdicts(
    arms: Sequence[ArmScores],
    tables: Mapping[str, ArmTable],
    rules: Rules,
    to_baseline: Mapping[str, Comparison],
    to_untrained: Mapping[str, Comparison],
) -> list[ArmVerdict]:
    verdicts = []
    for scores in arms:
        bare = ArmVerdict(arm=scores.arm, why_unranked=scores.why_unranked, failed_seeds=dict(scores.failed))
        table = tables.get(scores.arm)
        if table is not None:
            values = rules.columns(table)
            found = arm_mean(values, rules.pooled)
            interval = arm_interval(values, found, unit=rules.unit, level=rules.level)
            compared = to_baseline.get(scores.arm)
            bare = replace(
                bare,
                mean=found.value,
                low=interval[0] if interval else None,
                high=interval[1] if interval else None,
                n_tasks=len(table.tasks),
                n_seeds=table.n_seeds,
                seed_means=dict(zip(scores.usable, map(float, table.values.mean(axis=1)), strict=True)),
                verdict=compared.verdict if compared else None,
                vs_baseline=compared,
                vs_untrained=to_untrained.get(scores.arm),
                dropped_tasks=scores.dropped_tasks,
                n_rollouts=scores.n_rollouts,
                n_errors=scores.n_errors,
                first_error=scores.first_error,
            )
        verdicts.append(bare)
    return [
        replace(
            arm,
            vs_baseline=arm.vs_baseline and _without_plan(arm.vs_baseline, verdicts),
            vs_untrained=arm.vs_untrained and _without_plan(arm.vs_untrained, verdicts),
        )
        for arm in verdicts
    ]


def _best(
    verdicts: Sequence[ArmVerdict], ranked: Sequence[str], baseline: str | None, pairs: Sequence[Comparison]
) -> tuple[str | None, str | None]:
    """The best arm, or why there is none; `pairs` compare the scored arms where the baseline has no score."""
    words = {arm.arm: arm.verdict for arm in verdicts}
    rest = [arm for arm in ranked if arm != baseline]
    if not ranked:
        return None, "no arm has a score"
    if baseline is None:
        return ranked[0], None
    if len(rest) == len(ranked):
        top = [found for found in pairs if found.arm == ranked[0]]
        if top and all(found.verdict == "better" for found in top):
            return ranked[0], None
        others = "and no arm is proven better than all other scored arms" if top else "and only one arm has one"
        return None, f"the baseline {baseline} has no score, {others}"
    if not rest:
        return None, "only one arm has a score, and there is nothing to compare it with"
    better = [arm for arm in rest if words[arm] == "better"]
    if better:
        return better[0], None
    if all(words[arm] == "worse" for arm in rest):
        return baseline, None
    return None, "no arm beats the baseline"


def _n_clusters(tables: Mapping[str, ArmTable], rules: Rules) -> int | None:
    """How many templates the tasks come from; None where tasks are independent."""
    if not rules.clusters:
        return None
    return len({rules.clusters.get(task, task) for table in tables.values() for task in table.tasks})


def _cluster_note(count: int | None, found_by: str) -> list[str]:
    if count is None:
        return []
    how = f" ({found_by})" if found_by else ""
    few = "; so few say little of other templates" if count < FEW_CLUSTERS else ""
    return [
        f"tasks come from {count} templates{how}: intervals and tests count templates, not tasks, and more tasks means "
        f"tasks from new templates{few}"
    ]


def _looks_note(looks: int) -> list[str]:
    """What a further look costs, said first of all notes."""
    if looks < 2:
        return []
    return [
        f"look {looks} at this question: intervals of differences and p-values are widened (look k is judged at "
        "alpha / k^2), because looking until something is significant finds something among equals"
    ]


def _notes(
    verdicts: Sequence[ArmVerdict], tables: Mapping[str, ArmTable], baseline: str | None, rules: Rules
) -> list[str]:
    """What a reader must know to take the numbers rightly."""
    notes = []
    scored = [arm for arm in verdicts if arm.mean is not None]
    if any(arm.n_tasks == 1 and arm.low is not None for arm in scored):
        notes.append("there is one value per run: the intervals speak of other seeds, and not of other tasks")
    single = [arm.arm for arm in scored if arm.n_seeds == 1]
    if single and len(single) == len(scored):
        notes.append(one_seed_note(scored))
    elif single:
        who = ", ".join(single[:MOST_NAMED]) + (f" and {len(single) - MOST_NAMED} more" * (len(single) > MOST_NAMED))
        notes.append(f"{who}: one seed; {ONLY_TASKS}, which differences take from the arms with several seeds")
    for arm in scored:
        found, seeds = arm.vs_baseline, seed_spread(rules.columns(tables[arm.arm]))
        if seeds and chance_of(seeds) < BY_CHANCE:
            means = ", ".join(f"{seed}: {shown(mean)}" for seed, mean in arm.seed_means.items())
            notes.append(f"{arm.arm}: its seeds differ by more than noise explains ({means}); its mean rests on them")
        if arm.failed_seeds:
            notes.append(f"{arm.arm}: {_left_out(arm.failed_seeds)}, which may flatter")
        if found and (found.only_arm or found.only_vs):
            notes.append(
                f"{arm.arm} is compared with {baseline} on the tasks that both have, {found.n_tasks} in number; "
                f"{found.only_arm} more only in {arm.arm}, {found.only_vs} only in {baseline}"
            )
        if is_narrow(tables[arm.arm], tables):
            notes.append(f"{arm.arm}: scored on {arm.n_tasks} tasks, less than half of what others were scored on")
        if arm.dropped_tasks:
            notes.append(f"{arm.arm}: tasks without a value in every seed are left out, {arm.dropped_tasks} in number")
    return notes


def one_seed_note(scored: Sequence[ArmVerdict]) -> str:
    """What an interval leaves out where no arm has a second scored seed; more seeds are asked for where none failed."""
    failed = any(arm.failed_seeds for arm in scored)
    who = f"One {'scored ' if failed else ''}seed{'' if len(scored) == 1 else ' per arm'}"
    return f"{who}: {ONLY_TASKS}{'' if failed else '. Use n_repeats: 3'}"


def _left_out(failed: Mapping[int, str]) -> str:
    """`seeds 43, 44 without a score (killed) are left out`."""
    seeds, reasons = ", ".join(map(str, failed)), "; ".join(dict.fromkeys(failed.values()))
    one = len(failed) == 1
    return f"seed{'' if one else 's'} {seeds} without a score ({reasons}) {'is' if one else 'are'} left out"
