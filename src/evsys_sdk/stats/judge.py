"""From the scores of arms to a verdict.

In: `ArmScores`, one per arm, the baseline arm's name, and the untrained model's values where there are some. Out: a
`Verdict`. Pure: no clock, no files, and chance from a fixed seed. An arm without a score is never ranked, and no arm is
called best only for having the highest mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import get_args

from evsys_sdk.constants import UNTRAINED
from evsys_sdk.errors import FOREIGN, EvsysError, not_known
from evsys_sdk.format import count, name_list, shown
from evsys_sdk.logs import get_logger
from evsys_sdk.stats.arm_scores import ArmScores, ArmTable, Values, fixed_table, shared_tasks, table_of
from evsys_sdk.stats.clusters import COPIES
from evsys_sdk.stats.comparison import arm_interval, arm_mean, chance_of, seed_spread
from evsys_sdk.stats.intervals import Estimate
from evsys_sdk.stats.power import PowerQuestion, more_of_both, more_seeds, more_tasks
from evsys_sdk.stats.selection import Rules, estimate_between, holm, is_narrow, ranking, rules_for, winner_of
from evsys_sdk.stats.verdict import ArmVerdict, Comparison, Mode, Verdict, Word

ALPHA = 0.05
"""The conventional level of a test; intervals are 95 %."""
NO_SHARED_TASK = "the two share no task"
ONLY_TASKS = "the interval covers the tasks, not training variance"
NO_SCATTER = "training variance was not measured, so this number has no interval"
SAME_EVERYWHERE = "both scored the same on every task"
SAME_IN_EVERY_RUN = "both have the same value in every run"
TIMES_THE_TASKS, MOST_MORE_SEEDS = 10, 20
"""Plans beyond these are no advice: more than ten times the tasks that there are, or more seeds per arm than that."""
LARGE = 5.0
"""Differences of more margins than this (10 points of pass@1) are not called too small, whatever would settle them."""
WIDE = 10.0
"""Nor are those whose interval reaches further than so many margins (20 points) each way: too little data is not a
small difference."""
FEW_CLUSTERS = 10
"""Templates below which a note warns. Cluster-robust intervals are too short with few clusters, and "few" begins at 20
to 50 (Cameron and Miller 2015, section VI); half of the lower end is a choice."""
BY_CHANCE = 0.01
"""Seeds that would differ as much less often than this are pointed out. A choice: stricter than alpha, since the seeds
of every arm are looked at."""


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
    starts: Mapping[str, Values] | None = None,
    alpha: float = ALPHA,
    margin: float | None = None,
    also: Sequence[tuple[str, str]] = (),
    share: bool = True,
    searched: bool = False,
    looks: int = 1,
    clusters: Mapping[str, str] | None = None,
    clustered_by: str = "",
    per_run: bool = False,
    started_from: str = UNTRAINED,
    unit: str = "",
) -> Verdict:
    """Compare every arm with the baseline arm (the first, unless named) and with the untrained model.

    `also` names further pairs (arm, vs), for predictions; each is judged on its own, without Holm's correction.
    `share=False`: values between 0 and 1 are no shares of anything, but dollars or seconds, say. `searched=True`: the
    arms are trials of a search, none of which is the baseline by coming first; the best is the one on top. `looks`:
    how often these arms were judged with other seeds or tasks, this time included; differences and p-values then hold
    over all looks. `clusters`: task -> the template it was made from, where tasks are not independent; templates are
    then the units of every interval and test, and a note says how they were found (`clustered_by`). `per_run`: the
    values are numbers that a run has once, such as its final loss, and not those of tasks. `starts`: arm -> what it
    scored before training, instead of `untrained`, where arms start from different weights; `started_from` says in
    words what that is.
    """
    _refuse_unknown([scores.arm for scores in arms], mode, baseline_arm)
    baseline = baseline_arm or (None if searched else arms[0].arm)
    tables = {scores.arm: table_of(scores) for scores in arms if scores.why_unranked is None}
    before = _start_tables(tables, starts or (dict.fromkeys(tables, untrained) if untrained else {}))
    # By identity: arms that start from one model share its table, which must not count once per arm.
    distinct = {id(table): table for table in before.values()}.values()
    all_tables = {**{f"{UNTRAINED} {number}": table for number, table in enumerate(distinct)}, **tables}
    compared = tables.get(baseline) if baseline else None
    rules = rules_for(
        all_tables,
        compared or next(iter(before.values()), None),
        mode=mode,
        alpha=alpha,
        margin=margin,
        share=share,
        looks=looks,
        clusters=clusters,
        per_run=per_run,
    )
    to_baseline = [(table, compared) for table in tables.values() if table is not compared] if compared else []
    verdicts = _arm_verdicts(
        arms,
        tables,
        rules,
        {one.arm: one for one in _compare(to_baseline, rules)},
        {one.arm: one for one in _compare([(tables[arm], table) for arm, table in before.items()], rules)},
    )
    ranked = ranking(tables, compared, rules)
    pairs: list[Comparison] = []
    if baseline and compared is None:  # every two arms instead, the higher one first
        pairs = _compare([(tables[arm], tables[vs]) for arm, vs in combinations(ranked, 2)], rules)
    constant = _constant(list(tables.values()))
    is_disjoint = len(tables) > 1 and not any(shared_tasks([a, b]) for a, b in combinations(tables.values(), 2))
    best: str | None
    why: str | None
    if is_disjoint:
        best, why = None, "the arms share no task and cannot be compared"
    elif constant is not None and len(tables) > 1:
        best, why = None, f"every arm {constant_text(constant, verdicts, per_run=per_run, unit=unit)}"
    else:
        best, why = _best(verdicts, ranked, baseline, pairs)
    winner = None if is_disjoint else winner_of(verdicts, tables, ranked, rules, best, pairs)
    against = {(arm, UNTRAINED): table for arm, table in before.items()}
    against |= {(arm, vs): tables[vs] for arm in tables for vs in tables if vs != arm}
    n_clusters = None
    if rules.clusters:
        n_clusters = len({rules.clusters.get(task, task) for table in all_tables.values() for task in table.tasks})
    verdict = Verdict(
        metric=metric,
        mode=mode,
        baseline_arm=baseline,
        alpha=alpha,
        margin=rules.margin if tables else None,
        arms=verdicts,
        best_arm=best,
        why_no_best=why,
        winner=winner,
        others=[_compare([(tables[p[0]], against[p])], rules)[0] for p in dict.fromkeys(also) if p in against],
        pairs=[_without_plan(found, verdicts) for found in pairs],
        share=rules.unit,
        unit=unit,
        constant=constant,
        looks=looks,
        n_clusters=n_clusters,
        start=started_from,
        per_run=per_run,
    )
    return replace(verdict, notes=_notes(verdict, tables, rules, clustered_by))


def _start_tables(arms: Iterable[str], starts: Mapping[str, Values]) -> dict[str, ArmTable]:
    """Arm -> the scores of the model it starts from, where that has any; arms that start from one model share a table.

    One model is one object in `starts`: equal scores alone may be those of two models."""
    models = {id(values): fixed_table(UNTRAINED, values) for values in starts.values()}
    return {arm: models[id(starts[arm])] for arm in arms if arm in starts and models[id(starts[arm])].tasks}


def _refuse_unknown(names: Sequence[str], mode: str, baseline_arm: str | None) -> None:
    if mode not in get_args(Mode):
        raise EvsysError(f"mode: {not_known(mode, 'mode', get_args(Mode))}")
    if not names:
        raise EvsysError("a verdict needs at least one arm")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise EvsysError(f"arms need distinct names; twice: {', '.join(twice)}")
    if baseline_arm is not None and baseline_arm not in names:
        raise EvsysError(f"baseline_arm: {not_known(baseline_arm, 'arm', names)}")


def _compare(pairs: Sequence[tuple[ArmTable, ArmTable]], rules: Rules) -> list[Comparison]:
    """The comparisons of these pairs (arm, vs), as one family under Holm's correction."""
    estimates = [estimate_between(arm, vs, rules) for arm, vs in pairs]
    # Holm's correction is for p-values alone: an interval is that of its one comparison, at the level of this look.
    level = rules.alpha / rules.penalty
    made = []
    for (arm, vs), found in zip(pairs, estimates, strict=True):
        n = len(shared_tasks([arm, vs]))
        comparison = Comparison(
            arm=arm.arm,
            vs=vs.arm,
            verdict="undecided",
            difference=found.value if found else None,
            n_tasks=n,
            n_seeds=(arm.n_seeds, vs.n_seeds),
            only_arm=len(arm.tasks) - n,
            only_vs=len(vs.tasks) - n,
            scope="recipe" if found and (found.seeds or found.is_seed_variance_unknown) else "weights",
        )
        interval = found.interval(1 - level) if found else None
        if found and interval:
            p, p_equivalent = found.p_value(), found.p_equivalent(rules.margin)
            comparison = replace(
                comparison,
                low=interval[0],
                high=interval[1],
                p=None if p is None else min(1.0, p * rules.penalty),
                p_equivalent=None if p_equivalent is None else min(1.0, p_equivalent * rules.penalty),
                standard_error=found.error,
                critical=found.critical(level / 2),
            )
        made.append(comparison)
    different, alike = holm([found.p for found in made]), holm([found.p_equivalent for found in made])
    judged = []
    for comparison, p, q in zip(made, different, alike, strict=True):
        word: Word = "equivalent" if q is not None and q < rules.alpha else "undecided"
        # A proven difference is reported even where it is also proven to be small: the interval shows both.
        if p is not None and p < rules.alpha and comparison.difference:
            word = "better" if comparison.difference * rules.sign > 0 else "worse"
        judged.append(replace(comparison, p_holm=p, p_equivalent=q, verdict=word))
    undecided = sum(found.verdict == "undecided" for found in judged)
    explained = []
    for comparison, estimate, pair in zip(judged, estimates, pairs, strict=True):
        why = _why_no_test(estimate, pair, rules)
        if why:
            comparison = replace(comparison, why=why)
        elif comparison.verdict == "undecided" and estimate is not None:
            # With the decided ones rejected, Holm's factor for the next is the number of those that are open.
            question = PowerQuestion(estimate=estimate, margin=rules.margin, alpha=level / undecided)
            comparison = _with_plan(comparison, question, n_tests=len(pairs))
        explained.append(comparison)
    return explained


def _why_no_test(found: Estimate | None, pair: tuple[ArmTable, ArmTable], rules: Rules) -> str:
    """Why two arms are not tested, or not worth testing; empty where they are."""
    if found is None:
        return NO_SHARED_TASK
    if _constant(pair) is not None or (found.error is None and found.value == 0.0 and _is_same(*pair)):
        return SAME_IN_EVERY_RUN if rules.per_run else SAME_EVERYWHERE
    if found.error is not None:
        return ""
    if rules.per_run and not found.seeds:
        return "a run has one value of it, and only several seeds of each arm show how far such values scatter"
    if rules.per_run:
        return "all seeds of an arm have the same value: there is no variance to test the difference with"
    if found.is_seed_variance_unknown:
        return "one seed does not show how far the seeds of its arm scatter: score more seeds of that arm"
    if found.n_tasks < 2:
        return "one task is shared, and one says nothing of others"
    return "the difference is exactly the same on every task: there is no variance to test it with"


def _constant(tables: Sequence[ArmTable]) -> float | None:
    """The value that all of these arms have on every task, if they have only one; 0 for arms that solve nothing."""
    ends = {float(end) for table in tables for end in (table.values.min(), table.values.max())}
    return ends.pop() if len(ends) == 1 else None


def _is_same(arm: ArmTable, vs: ArmTable) -> bool:
    """True where every run of both has the same value on each task that they share."""
    tasks = shared_tasks([arm, vs])
    first = vs.on(tasks)[0]
    return bool((arm.on(tasks) == first).all() and (vs.on(tasks) == first).all())


def _with_plan(found: Comparison, question: PowerQuestion, *, n_tests: int) -> Comparison:
    """An undecided comparison with the number of tasks or seeds that would settle it, where that is a number worth
    running, and with the reason why it is open."""
    assert found.low is not None and found.high is not None and found.difference is not None
    estimate, margin, n_seeds = question.estimate, question.margin, max(found.n_seeds)
    tasks, seeds = more_tasks(question), more_seeds(question, n_seeds)
    tasks = tasks if tasks is not None and tasks <= TIMES_THE_TASKS * estimate.n_tasks else None
    seeds = seeds if seeds is not None and seeds <= MOST_MORE_SEEDS else None
    both = more_of_both(question, n_seeds) if tasks is None and seeds is None else None
    if both and (both[0] > TIMES_THE_TASKS * estimate.n_tasks or both[1] > MOST_MORE_SEEDS):
        both = None
    units = tasks if both is None else both[0]
    # Where templates are the units, so many more of them come with as many tasks each as those that there are.
    each = found.n_tasks / estimate.n_tasks
    plan = replace(
        found,
        more_tasks=None if tasks is None else math.ceil(tasks * each),
        more_seeds=seeds,
        more_of_both=None if both is None else (math.ceil(both[0] * each), both[1]),
        more_templates=units if each > 1 else None,
    )
    # The interval is not corrected for other arms and the verdict is, so an interval without 0 may be undecided.
    if not found.low <= 0 <= found.high:
        return replace(plan, why=f"not significant once corrected for {n_tests} comparisons")
    if tasks is not None or seeds is not None or both is not None:
        return replace(plan, why="the interval holds both 0 and differences that would matter")
    size = f"{count(n_seeds, 'seed')} per arm"
    size = size if estimate.n_tasks < 2 else f"{count(found.n_tasks, 'task')}, {size}"
    is_large = abs(found.difference) > LARGE * margin
    if is_large and estimate.seeds:
        why = f"the runs scatter too much to settle it with {MOST_MORE_SEEDS} more seeds per arm ({size} now)"
    elif not is_large and found.high - found.low <= 2 * WIDE * margin:
        why = f"the difference is too small to be worth settling at this size ({size})"
    else:  # near 0 it would take very many tasks or seeds: what is missing is data, not a difference
        more = "tasks and seeds" if found.scope == "recipe" and estimate.n_tasks > 1 else "tasks"
        why = f"too little data: the interval is wide ({size}); add {'seeds' if estimate.n_tasks < 2 else more}"
    return replace(plan, why=why)


def _without_plan(found: Comparison, verdicts: Sequence[ArmVerdict]) -> Comparison:
    """No number of tasks settles a comparison with an arm whose rollouts error: it would measure the errors."""
    broken = [arm for arm in verdicts if arm.has_many_errors and arm.arm in (found.arm, found.vs)]
    if not broken or found.verdict != "undecided":
        return found
    arm = broken[0]
    why = f"{arm.n_errors:,} of {arm.n_rollouts:,} rollouts of {arm.arm} errored: more tasks would not settle it"
    return replace(found, more_tasks=None, more_templates=None, more_seeds=None, more_of_both=None, why=why)


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
                training_mark=scores.training_mark,
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
    apart = [arm.arm for arm in verdicts if arm.vs_baseline and arm.vs_baseline.difference is None]
    shares = "shares" if len(apart) == 1 else "share"
    return None, "no arm beats the baseline" + (f" ({name_list(apart)} {shares} no task with it)" if apart else "")


def _notes(verdict: Verdict, tables: Mapping[str, ArmTable], rules: Rules, clustered_by: str) -> list[str]:
    """What a reader must know to take the numbers rightly; what a further look costs comes first."""
    notes, n_clusters, baseline = [], verdict.n_clusters, verdict.baseline_arm
    if rules.looks > 1 and verdict.has_comparisons:
        notes.append(
            f"look {rules.looks} at this question: intervals of differences and p-values are widened (look k is judged "
            "at alpha / k^3), because looking until something is significant finds something among equals"
        )
    if n_clusters is not None:
        how = f" ({clustered_by})" if clustered_by else ""
        # Of the arm with most tasks: others may lack templates, and have fewer columns for that.
        widest = max(tables.values(), key=lambda table: len(table.tasks), default=None)
        units = n_clusters if widest is None else rules.columns(widest).shape[1]
        is_joined = widest and units < len({rules.clusters.get(task, task) for task in widest.tasks})
        joined = f" (their sizes differ much: the small ones are joined, and {units} groups count)" if is_joined else ""
        few = "; so few say little of other templates" if units < FEW_CLUSTERS else ""
        told = (
            f"tasks come from {n_clusters} templates{how}: intervals and tests count templates, not tasks, and more "
            f"tasks means tasks from new templates{joined}{few}"
        )
        if clustered_by == COPIES:
            told = f"some tasks are copies of others: {n_clusters} different tasks are the units of intervals and tests"
        notes.append(told)
    scored = [arm for arm in verdict.arms if arm.mean is not None]
    if rules.per_run and any(arm.low is not None for arm in scored):
        notes.append("a run has one value of this metric: the intervals cover training variance (seeds), and no tasks")
    elif any(arm.n_tasks == 1 and arm.low is not None for arm in scored):
        notes.append("there is one task: the intervals cover training variance (seeds), and not other tasks")
    single = [arm.arm for arm in scored if arm.n_seeds == 1]
    if single and len(single) == len(scored):
        notes.append(one_seed_note(scored, per_run=rules.per_run))
    elif single and rules.per_run:
        notes.append(f"{name_list(single)}: one seed, which has no interval and is compared with nothing")
    elif single:
        told = f"{ONLY_TASKS}, and comparisons with it stay undecided until it has more seeds"
        notes.append(f"{name_list(single)}: one seed; {told}")
    for arm in scored:
        found, seeds = arm.vs_baseline, seed_spread(rules.columns(tables[arm.arm]))
        if seeds and chance_of(seeds) < BY_CHANCE:
            means = ", ".join(f"{seed}: {shown(mean, unit=verdict.unit)}" for seed, mean in arm.seed_means.items())
            notes.append(f"{arm.arm}: its seeds differ by more than noise explains ({means}); its mean rests on them")
        if arm.failed_seeds:  # `seeds 43, 44 without a score (killed) are left out`
            failed, reasons = ", ".join(map(str, arm.failed_seeds)), "; ".join(dict.fromkeys(arm.failed_seeds.values()))
            one = len(arm.failed_seeds) == 1
            left_out = f"without a score ({reasons}) {'is' if one else 'are'} left out"
            notes.append(f"{arm.arm}: seed{'' if one else 's'} {failed} {left_out}, which may flatter")
        if found and found.n_tasks and (found.only_arm or found.only_vs):
            notes.append(
                f"{arm.arm} is compared with {baseline} on the {count(found.n_tasks, 'task')} that both have; "
                f"{found.only_arm} more only in {arm.arm}, {found.only_vs} only in {baseline}"
            )
        if is_narrow(tables[arm.arm], tables):
            notes.append(f"{arm.arm}: scored on {arm.n_tasks} tasks, less than half of what others were scored on")
        if arm.dropped_tasks:
            notes.append(f"{arm.arm}: tasks without a value in every seed are left out, {arm.dropped_tasks} in number")
    return notes


def constant_text(value: float, arms: Sequence[ArmVerdict], *, per_run: bool, unit: str = "") -> str:
    """`scored 0.500 on every task`, `has 0.001 in every run`; `has 0.001` where no arm has a second run."""
    if not per_run:
        return f"scored {shown(value, unit=unit)} on every task"
    return f"has {shown(value, unit=unit)}{' in every run' if any(arm.n_seeds > 1 for arm in arms) else ''}"


def one_seed_note(scored: Sequence[ArmVerdict], *, per_run: bool) -> str:
    """What an interval leaves out where no arm has a second scored seed; more seeds are asked for where none failed."""
    failed = any(arm.failed_seeds for arm in scored)
    who = f"One {'scored ' if failed else ''}seed{'' if len(scored) == 1 else ' per arm'}"
    what = NO_SCATTER if per_run else ONLY_TASKS
    return f"{who}: {what}{'' if failed else '. Use n_repeats: 3'}"
