"""From the scores of arms to a verdict.

In: `ArmScores`, one per arm, the baseline arm's name, and the untrained model's values where there are some. Out: a
`Verdict`. Pure: no clock, no files, and chance from a fixed seed. An arm without a score is never ranked, and no arm is
called best only for having the highest mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from evsys_sdk.constants import UNTRAINED
from evsys_sdk.errors import EvsysError, not_known
from evsys_sdk.eval.arm_scores import ArmScores, ArmTable, Values, fixed_table, shared_tasks, table_of
from evsys_sdk.eval.paired import (
    Estimate,
    SeedSpread,
    arm_interval,
    arm_mean,
    difference,
    pooled_spread,
    seed_spread,
)
from evsys_sdk.eval.power import Question, more_seeds, more_tasks
from evsys_sdk.eval.selection import holm, picked_score
from evsys_sdk.eval.verdict import ArmVerdict, Comparison, Mode, Verdict, Winner, Word

ALPHA = 0.05
MARGIN = 0.02
"""Differences below this are of no interest: 2 points where values lie between 0 and 1, else 2 % of the baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """How this verdict judges."""

    mode: Mode
    alpha: float
    margin: float
    unit: bool
    """All values lie between 0 and 1."""
    pooled: SeedSpread | None
    """How the seeds of all arms scatter."""

    @property
    def level(self) -> float:
        return 1 - self.alpha

    @property
    def sign(self) -> float:
        return 1.0 if self.mode == "max" else -1.0


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
) -> Verdict:
    """Compare every arm with the baseline arm (the first, unless named) and with the untrained model.

    `also` names further pairs (arm, vs), for predictions; each is judged on its own, without Holm's correction.
    `share=False`: values between 0 and 1 are no shares of anything, but dollars or seconds, say.
    """
    baseline = _checked(arms, baseline_arm)
    tables = {scores.arm: table_of(scores) for scores in arms if scores.why_unranked is None}
    start = fixed_table(UNTRAINED, untrained) if untrained else None
    others = {UNTRAINED: start, **tables} if start and start.tasks else tables
    rules = _rules(others, tables.get(baseline), mode=mode, alpha=alpha, margin=margin, share=share)
    to_baseline = _family(tables, tables.get(baseline), rules)
    to_untrained = _family(tables, start if start and start.tasks else None, rules)
    verdicts = _arm_verdicts(arms, tables, rules, to_baseline, to_untrained)
    best, why = _best(verdicts, baseline, rules)
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
        winner=_winner(verdicts, tables, rules, best),
        others=[_family({arm: tables[arm]}, others[vs], rules)[arm] for arm, vs in asked],
        notes=_notes(verdicts, baseline),
    )


def _checked(arms: Sequence[ArmScores], baseline_arm: str | None) -> str:
    names = [scores.arm for scores in arms]
    if not names:
        raise EvsysError("a verdict needs at least one arm")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise EvsysError(f"arms need distinct names; twice: {', '.join(twice)}")
    if baseline_arm is not None and baseline_arm not in names:
        raise EvsysError(f"baseline_arm: {not_known(baseline_arm, 'arm', names)}")
    return baseline_arm or names[0]


def _rules(
    tables: Mapping[str, ArmTable],
    baseline: ArmTable | None,
    *,
    mode: Mode,
    alpha: float,
    margin: float | None,
    share: bool,
) -> _Rules:
    bounds = [(float(table.values.min()), float(table.values.max())) for table in tables.values()]
    unit = share and all(low >= 0.0 and high <= 1.0 for low, high in bounds)
    if margin is None:
        margin = MARGIN if unit or baseline is None else MARGIN * abs(float(baseline.values.mean()))
    pooled = pooled_spread(seed_spread(table.values) for table in tables.values())
    return _Rules(mode=mode, alpha=alpha, margin=margin, unit=unit, pooled=pooled)


def _family(tables: Mapping[str, ArmTable], vs: ArmTable | None, rules: _Rules) -> dict[str, Comparison]:
    """Each arm but `vs` itself against `vs`, corrected for their number."""
    if vs is None:
        return {}
    pairs = {name: table for name, table in tables.items() if table is not vs}
    estimates = {name: _estimate(table, vs, rules) for name, table in pairs.items()}
    made = [_comparison(table, vs, estimates[name], rules) for name, table in pairs.items()]
    different, alike = holm([found.p for found in made]), holm([found.p_equivalent for found in made])
    judged = [
        replace(found, p_holm=p, p_equivalent=q, verdict=_word(found, p, q, rules))
        for found, p, q in zip(made, different, alike, strict=True)
    ]
    alpha = rules.alpha / max(1, sum(found.verdict == "undecided" for found in judged))
    return {found.arm: _with_needs(found, estimates[found.arm], rules.margin, alpha) for found in judged}


def _estimate(arm: ArmTable, vs: ArmTable, rules: _Rules) -> Estimate | None:
    tasks = shared_tasks([arm, vs])
    if not tasks:
        return None
    return difference(arm.on(tasks), vs.on(tasks), unit=rules.unit, other_is_fixed=vs.fixed, pooled=rules.pooled)


def _comparison(arm: ArmTable, vs: ArmTable, found: Estimate | None, rules: _Rules) -> Comparison:
    n = found.n_tasks if found else 0
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
        why=_why_nothing(found),
    )
    interval = found.interval(rules.level) if found else None
    if found is None or interval is None:
        return bare
    return replace(
        bare,
        low=interval[0],
        high=interval[1],
        p=found.p_value(),
        p_equivalent=found.p_equivalent(rules.margin),
        standard_error=found.error,
        degrees=None if math.isinf(found.degrees) else found.degrees,
    )


def _why_nothing(found: Estimate | None) -> str:
    if found is None:
        return "the two share no task"
    if found.n_tasks < 2:
        return "one task is shared, and one says nothing of others"
    return "" if found.error is not None else "the difference is the same on every task, so its scatter is not known"


def _word(found: Comparison, p: float | None, alike: float | None, rules: _Rules) -> Word:
    # A proven difference is told even where it is also proven to be small: the interval shows both.
    if p is not None and p < rules.alpha and found.difference:
        return "better" if found.difference * rules.sign > 0 else "worse"
    return "equivalent" if alike is not None and alike < rules.alpha else "undecided"


def _with_needs(found: Comparison, estimate: Estimate | None, margin: float, alpha: float) -> Comparison:
    if found.verdict != "undecided" or estimate is None or estimate.error is None:
        return found
    question = Question(estimate=estimate, margin=margin, alpha=alpha)
    tasks, seeds = more_tasks(question), more_seeds(question, max(found.n_seeds))
    return replace(found, more_tasks=tasks, more_seeds=seeds, why=_why_open(found))


def _why_open(found: Comparison) -> str:
    assert found.low is not None and found.high is not None
    if found.low <= 0 <= found.high:
        return "the interval holds both 0 and differences that would matter"
    return "the difference does not stand when all arms that were compared are counted"


def _arm_verdicts(
    arms: Sequence[ArmScores],
    tables: Mapping[str, ArmTable],
    rules: _Rules,
    to_baseline: Mapping[str, Comparison],
    to_untrained: Mapping[str, Comparison],
) -> list[ArmVerdict]:
    verdicts = []
    for scores in arms:
        bare = ArmVerdict(arm=scores.arm, why_unranked=scores.why_unranked, failed_seeds=dict(scores.failed))
        table = tables.get(scores.arm)
        if table is not None:
            found = arm_mean(table.values, rules.pooled)
            interval = arm_interval(table.values, found, unit=rules.unit, level=rules.level)
            compared = to_baseline.get(scores.arm)
            bare = replace(
                bare,
                mean=found.value,
                low=interval[0] if interval else None,
                high=interval[1] if interval else None,
                n_tasks=found.n_tasks,
                n_seeds=table.n_seeds,
                seed_means=dict(zip(scores.usable, map(float, table.values.mean(axis=1)), strict=True)),
                verdict=compared.verdict if compared else None,
                vs_baseline=compared,
                vs_untrained=to_untrained.get(scores.arm),
                dropped_tasks=scores.dropped_tasks,
            )
        verdicts.append(bare)
    return verdicts


def _ranked(verdicts: Sequence[ArmVerdict], rules: _Rules) -> list[ArmVerdict]:
    scored = [arm for arm in verdicts if arm.mean is not None]
    return sorted(scored, key=lambda arm: -rules.sign * (arm.mean or 0.0))


def _best(verdicts: Sequence[ArmVerdict], baseline: str, rules: _Rules) -> tuple[str | None, str | None]:
    """The best arm, or why there is none."""
    ranked = _ranked(verdicts, rules)
    rest = [arm for arm in ranked if arm.arm != baseline]
    if not ranked:
        return None, "no arm has a score"
    if len(rest) == len(ranked):
        return None, f"the baseline arm {baseline} has no score to compare with"
    if not rest:
        return None, "only one arm has a score, and there is nothing to compare it with"
    better = [arm.arm for arm in rest if arm.verdict == "better"]
    if better:
        return better[0], None
    if all(arm.verdict == "worse" for arm in rest):
        return baseline, None
    return None, "no arm beats the baseline"


def _winner(
    verdicts: Sequence[ArmVerdict], tables: Mapping[str, ArmTable], rules: _Rules, best: str | None
) -> Winner | None:
    """The arm at the top (the best arm, where one is proven) with the score to expect of it."""
    ranked = _ranked(verdicts, rules)
    if not ranked:
        return None
    top = next((arm for arm in ranked if arm.arm == best), ranked[0])
    assert top.mean is not None
    tasks = shared_tasks(list(tables.values()))
    expected: float | None = top.mean
    if len(tables) > 1:
        expected = picked_score([table.on(tasks) for table in tables.values()], mode=rules.mode) if tasks else None
    bare = Winner(arm=top.arm, observed=top.mean, expected=expected, rivals=_rivals(top.arm, ranked, tables, rules))
    if expected is None or top.low is None or top.high is None:
        return bare
    shift = expected - top.mean
    low, high = top.low + shift, top.high + shift
    return replace(bare, low=max(0.0, low), high=min(1.0, high)) if rules.unit else replace(bare, low=low, high=high)


def _rivals(top: str, ranked: Sequence[ArmVerdict], tables: Mapping[str, ArmTable], rules: _Rules) -> list[str]:
    """Arms not proven to be behind. The top was picked by looking, so every pair of arms counts as a test."""
    tests = len(ranked) * (len(ranked) - 1) / 2
    rivals = []
    for arm in ranked:
        if arm.arm == top:
            continue
        found = _estimate(tables[top], tables[arm.arm], rules)
        p = found.p_value() if found else None
        if found is None or p is None or p * tests >= rules.alpha or found.value * rules.sign <= 0:
            rivals.append(arm.arm)
    return rivals


def _notes(verdicts: Sequence[ArmVerdict], baseline: str) -> list[str]:
    """What a reader must know to take the numbers rightly."""
    notes = []
    scored = [arm for arm in verdicts if arm.mean is not None]
    single = [arm.arm for arm in scored if arm.n_seeds == 1]
    if single:
        notes.append(
            f"{', '.join(single)}: one seed, so the numbers speak of these weights; another seed may come out otherwise"
        )
    partial = [f"{arm.arm} ({len(arm.failed_seeds)})" for arm in scored if arm.failed_seeds]
    if partial:
        notes.append(f"seeds without a score are left out, which may flatter: {', '.join(partial)}")
    for arm in scored:
        found = arm.vs_baseline
        if found and (found.only_arm or found.only_vs):
            notes.append(
                f"{arm.arm} is compared with {baseline} on the tasks that both have, {found.n_tasks} in number; "
                f"{found.only_arm} more only in {arm.arm}, {found.only_vs} only in {baseline}"
            )
        if arm.dropped_tasks:
            notes.append(f"{arm.arm}: tasks without a value in every seed are left out, {arm.dropped_tasks} in number")
    return notes
