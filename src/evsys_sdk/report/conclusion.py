"""The conclusion of an experiment, in words that the numbers allow.

In: the results of its runs and the success metric. Out: a ranking of arms by their mean over seeds, and a text.
An arm without a score is never ranked, a test-labelled score never picks a winner, and as long as the difference
between arms has not been tested the text says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evsys_sdk.config.metadata import SuccessMetric
from evsys_sdk.constants import START, UNTRAINED
from evsys_sdk.contamination.audit import leakage_lines
from evsys_sdk.errors import shorten
from evsys_sdk.format import benchmark_score_text, name_list, score_text, shown
from evsys_sdk.protocols import EvalResult, RunResult, RunStatus, Score, training_mark
from evsys_sdk.record.models import RecordedLooks
from evsys_sdk.score_names import AmbiguousName, resolve, score_key, suite_label
from evsys_sdk.stats.hypothesis import HypothesisResult
from evsys_sdk.stats.verdict import Verdict

MOST_VALUES = 12
"""Of a breakdown that are printed; the record has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """One arm over its seeds."""

    arm: str
    statuses: list[RunStatus]
    scores: list[float] = field(default_factory=list)
    """The success metric of each seed that has one."""
    evidence: list[str] = field(default_factory=list)
    """The scores as text, with interval and denominator where one benchmark measured them."""
    why_unranked: str | None = None
    errors: list[str] = field(default_factory=list)
    training_mark: str = ""
    """`on training rows` where a run was scored by the success metric on tasks that it trained on."""

    @property
    def mean(self) -> float:
        return sum(self.scores) / len(self.scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelScore:
    """A model that was not trained here, on one benchmark: something to compare the arms with, and never an arm."""

    model: str
    result: EvalResult
    stored_usd: float | None = None
    """What asking it took, where a record says so and its rollouts are not at hand."""

    @property
    def cost_usd(self) -> float | None:
        """What asking it took; None as soon as the price of one answer is not known."""
        if self.stored_usd is not None:
            return self.stored_usd
        rollouts = self.result.rollouts
        unknown = any(rollout.metadata.get("unpriced") for rollout in rollouts)
        return None if unknown or not rollouts else sum(rollout.cost_usd for rollout in rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictFindings:
    """What the scores allow us to say: the verdict, and the lines that the conclusion has of it."""

    best_arm: str | None = None
    lines: list[str] = field(default_factory=list)
    why_not: str | None = None
    """Why there is no verdict."""
    verdict: Verdict | None = None
    hypothesis_result: HypothesisResult | None = None
    """Of a typed hypothesis."""
    hypothesis_in_words: str = ""
    """The answer to a hypothesis that is text."""
    looks: RecordedLooks | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for records, the journal and `--json`; a part that there is not is left out."""
        parts = {
            "verdict": self.verdict and self.verdict.as_dict(),
            "hypothesis_result": self.hypothesis_result and self.hypothesis_result.as_dict(),
            "hypothesis_in_words": self.hypothesis_in_words,
            "looks": self.looks and self.looks.model_dump(exclude_unset=True),
        }
        return {name: part for name, part in parts.items() if part}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    arms: list[ArmSummary]
    best_arm: str | None
    text: str
    metric: str | None = None
    findings: VerdictFindings = field(default_factory=VerdictFindings)
    admitted: list[str] = field(default_factory=list)
    """How test tasks took part in choosing, a sentence each."""


def conclude(
    arms: Mapping[str, Sequence[RunResult]],
    *,
    hypothesis: str,
    success: SuccessMetric | None,
    findings: VerdictFindings,
    models: Sequence[ModelScore] = (),
    search: Mapping[str, Any] | None = None,
    admitted: Sequence[str] = (),
) -> Conclusion:
    """Summarise every arm and write the text; `models` stand beside the arms. `admitted`: how test tasks took part."""
    name = success.name if success is not None else None
    keys = score_keys(arms, name) if name else []
    summaries = [_summarise_arm(arm, results, name, keys) for arm, results in arms.items()]
    lines = [f"Hypothesis: {hypothesis}"] if hypothesis else []
    lines += _unscored_start_lines(arms)
    lines += [*(_search_lines(search) if search else ()), *admitted]
    lines += [*([f"No verdict: {findings.why_not}."] if findings.why_not else []), *findings.lines]
    judged = {arm.arm for arm in findings.verdict.arms} if findings.verdict else set()
    lines += [_arm_line(summary, name) for summary in summaries if summary.arm not in judged]
    lines += leakage_lines(arms)
    lines += _training_lines(arms)
    if models:
        lines.append("For comparison, models that were not trained here (never ranked):")
        for model in models:
            scores: list[Score | None] = [*model.result.scores] or [None]
            lines += [f"  {model.model}: {_benchmark_line(model.result, score)}" for score in scores]
    return Conclusion(
        arms=summaries,
        best_arm=findings.best_arm,
        text="\n".join(lines),
        metric=name,
        findings=findings,
        admitted=list(admitted),
    )


def _training_lines(arms: Mapping[str, Sequence[RunResult]]) -> list[str]:
    """The scores that are wholly on training rows, with the arms where not all of those that have the score."""
    scored: dict[str, list[str]] = {}
    trained_on: dict[str, list[str]] = {}
    for arm, results in arms.items():
        evals = [one for result in results for one in result.evals]
        found = [(metric_key(one, score), one.on_training_rows) for one in evals for score in one.scores]
        for key in {key for key, _ in found}:
            scored.setdefault(key, []).append(arm)
        for key in {key for key, is_marked in found if is_marked}:
            trained_on.setdefault(key, []).append(arm)
    if not trained_on:
        return []
    told = (
        key if names == scored[key] else f"{key} of {name_list(names)}" for key, names in sorted(trained_on.items())
    )
    return [
        f"Scored on training rows: {', '.join(told)}. It shows what was memorised, not how new tasks are done; add a "
        "benchmark, or eval.eval_data."
    ]


def _unscored_start_lines(arms: Mapping[str, Sequence[RunResult]]) -> list[str]:
    """A warning for each benchmark on which the weights before training were to be scored and were not. Weights that
    several runs start from are one model: one score of them is enough."""
    starts = [one for results in arms.values() for result in results for one in result.evals if one.step == 0]
    scored = {(one.start, one.split, one.name) for one in starts if any(s.value is not None for s in one.scores)}
    reasons: dict[tuple[str, str, str], str] = {}
    for one in starts:
        key = (one.start, one.split, one.name)
        if key not in scored:
            error = one.error or next((score.error for score in one.scores if score.error), None) or "no score"
            reasons.setdefault(key, error.removeprefix("invalid: "))
    return [
        f"Warning: no score {f'before training ({start})' if start else 'of the untrained model'} on "
        f"{suite_label(split, name)}: {shorten(' '.join(why.split()), 300)}. No arm is compared with it there."
        for (start, split, name), why in reasons.items()
    ]


def conclude_without_verdict(arms: Mapping[str, Sequence[RunResult]], why: str) -> Conclusion:
    """The least that can be said: how each run ended, and why the rest is missing."""
    summaries = [ArmSummary(arm=arm, statuses=[run.status for run in runs]) for arm, runs in arms.items()]
    lines = [f"No verdict: {why}.", *(_arm_line(summary, None) for summary in summaries)]
    return Conclusion(arms=summaries, best_arm=None, text="\n".join(lines), findings=VerdictFindings(why_not=why))


def score_keys(arms: Mapping[str, Sequence[RunResult]], name: str) -> list[str]:
    """The metrics that `name` means, over all arms; none where that is ambiguous, which the verdict then says."""
    try:
        return resolve(name, metric_keys(arms))
    except AmbiguousName:
        return []


def metric_keys(arms: Mapping[str, Sequence[RunResult]]) -> list[str]:
    """Every metric that some run of some arm has."""
    return list(dict.fromkeys(key for results in arms.values() for found in results for key in found.metrics))


def _summarise_arm(arm: str, results: Sequence[RunResult], name: str | None, keys: Sequence[str]) -> ArmSummary:
    scores: list[float] = []
    evidence: list[str] = []
    for result in (result for result in results if result.status == "completed"):
        value = over_tasks(result.metrics, keys, task_counts(result))
        if value is None:
            continue
        scores.append(value)
        measured = [
            (one, score) for one in result.final_evals for score in one.scores if metric_key(one, score) in keys
        ]
        # A score of the final weights comes after those of the loop.
        same = [(one, score) for one, score in measured if score.value == value]
        if len(keys) == 1 and same:
            one, score = same[-1]
            evidence.append(benchmark_score_text(score, *_task_marks(one)))
        else:  # a mean of benchmarks, or a number that no benchmark measured
            last = {metric_key(one, score): score for one, score in measured if one.step != 0}.values()
            unit = next((score.unit for score in last), "")
            n_errors, n_rollouts = sum(one.n_errors for one in last), sum(one.n_rollouts for one in last)
            evidence.append(score_text(value, unit=unit, n_errors=n_errors, n_rollouts=n_rollouts, errors_first=False))
    why = None
    pruned = next((result.pruned for result in results if result.pruned is not None), None)
    statuses = [result.status for result in results]
    if not scores and pruned is not None:  # `pruned at step 10 with val.pass@1 0.412`
        reached = f"no {pruned.metric}" if pruned.value is None else f"{pruned.metric} {shown(pruned.value)}"
        why = f"pruned at step {pruned.step} with {reached}"
    elif not scores and "completed" not in statuses:
        why = "no run completed"
    elif not scores and name:
        errors = [one.error for result in results for one in result.evals if one.error]
        why = f"no score for {name}{f': {errors[0]}' if errors else ''}"
    return ArmSummary(
        arm=arm,
        statuses=statuses,
        scores=scores,
        evidence=evidence,
        why_unranked=why,
        errors=sorted({result.error for result in results if result.error}),
        training_mark=training_mark_of(results, keys),
    )


def training_mark_of(results: Sequence[RunResult], keys: Sequence[str]) -> str:
    """The strongest mark of the runs' scores by these metrics."""
    evals = [one for result in results for one in result.evals]
    mine = [one for one in evals if any(metric_key(one, score) in keys for score in one.scores)]
    return training_mark(
        any(one.on_training_rows for one in mine), max((one.n_training_tasks for one in mine), default=0)
    )


def metric_key(result: EvalResult, score: Score) -> str:
    """What the run's metrics call this score: `val/tools/pass@1`."""
    return score_key(result.split, result.name, score.metric)


def task_counts(result: RunResult) -> dict[str, int]:
    """How many tasks each of a run's scores is over."""
    evals: list[EvalResult] = result.evals
    return {metric_key(one, score): score.n_tasks for one in evals for score in one.scores}


def over_tasks(metrics: Mapping[str, float], keys: Sequence[str], counts: Mapping[str, int]) -> float | None:
    """The mean of these metrics over all their tasks, as the verdict takes it: a benchmark counts by its size."""
    # A number that no benchmark measured, such as a loss, has no count of tasks and weighs 1.
    weights = {key: counts.get(key) or 1 for key in keys if math.isfinite(metrics.get(key, math.nan))}
    total = sum(weights.values())
    return sum(metrics[key] * weight for key, weight in weights.items()) / total if total else None


def _arm_line(summary: ArmSummary, name: str | None) -> str:
    """An arm that the verdict does not speak of."""
    done, n = summary.statuses.count("completed"), len(summary.statuses)
    if set(summary.statuses) == {"pruned"} and summary.why_unranked:
        return f"{summary.arm}: {summary.why_unranked}"
    state = f"{done} of {n} seeds completed" if n > 1 else summary.statuses[0]
    if summary.scores:
        between = "; " if any(", " in text for text in summary.evidence) else ", "
        each = f"{shown(summary.mean)}, seeds {between.join(summary.evidence)}" if n > 1 else summary.evidence[0]
        state += f", {name} {each}"
    if summary.why_unranked:
        state += f", not ranked: {summary.why_unranked}"
    return f"{summary.arm}: {state}" + "".join(f" ({error})" for error in summary.errors)


def score_lines(evals: Sequence[EvalResult]) -> list[str]:
    """`val/addition pass@1 = 0.830 [0.700, 0.910], 40 tasks (untrained 0.050 [0.010, 0.170])` for the last score of
    each benchmark and metric; for a chain of stages, its matrix follows."""
    latest: dict[tuple[str, str, str], tuple[EvalResult, Score | None]] = {}
    untrained: dict[tuple[str, str, str], tuple[EvalResult, Score | None]] = {}
    for result in evals:
        scores: list[Score | None] = [*result.scores] or [None]
        for score in scores:
            place = untrained if result.step == 0 else latest
            place[(result.split, result.name, score.metric if score else "")] = (result, score)
    lines = []
    for key, (result, score) in latest.items():
        line = _benchmark_line(result, score)
        if key in untrained:
            before, old = untrained[key]
            whom = START if before.start else UNTRAINED
            if old is None or old.value is None:
                why = str(old.error if old else before.error).removeprefix("invalid: ")
                line += f" ({whom}: not scored, {why})"
            else:
                line += f" ({whom} {benchmark_score_text(old, with_counts=False)})"
        lines.append(line)
        # `  by toolkit: mail 0.500 [0.090, 0.910], 4 tasks; maps 1.000 [0.342, 1.000], 2 tasks`
        for by, values in result.breakdown.items() if score else ():
            parts = [
                f"{value} {benchmark_score_text(part)}"
                for value, found in values.items()
                for part in found
                if score and part.metric == score.metric
            ]
            more = f"; and {len(parts) - MOST_VALUES} more in the record" if len(parts) > MOST_VALUES else ""
            lines.append(f"  by {by}: {'; '.join(parts[:MOST_VALUES])}{more}")
    lines += [
        f"{START if found[0].start else UNTRAINED}: {_benchmark_line(*found)}"
        for key, found in untrained.items()
        if key not in latest
    ]
    return lines + stage_matrix(evals)


def stage_matrix(evals: Sequence[EvalResult]) -> list[str]:
    """The score on each benchmark after each stage of a chain: a row per benchmark and metric, a column per stage."""
    stages = list(dict.fromkeys(result.stage for result in evals if result.stage is not None))
    if len(stages) < 2:
        return []
    cells: dict[str, dict[str, str]] = {}
    for result in evals:
        column = "untrained" if result.step == 0 else result.stage
        for score in result.scores:
            row = cells.setdefault(f"{suite_label(result.split, result.name)} {score.metric}", {})
            row[column or ""] = score_text(score.value, score.low, score.high, unit=score.unit)
    columns = [name for name in ("untrained", *stages) if any(name in row for row in cells.values())]
    table = [["after stage", *columns], *([name, *(row.get(c, "-") for c in columns)] for name, row in cells.items())]
    widths = [max(len(row[index]) for row in table) for index in range(len(columns) + 1)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _benchmark_line(result: EvalResult, score: Score | None) -> str:
    where = suite_label(result.split, result.name)
    if score is None:
        return f"{where}: not scored ({result.error})"
    if score.value is None:
        return f"{where} {score.metric}: not valid ({str(result.error or score.error).removeprefix('invalid: ')})"
    return f"{where} {score.metric} = {benchmark_score_text(score, *_task_marks(result))}"


def _task_marks(result: EvalResult) -> list[str]:
    """What a reader must know of the tasks: templates, which are the units of the interval, and training rows."""
    templates = [f"{len(set(result.clusters.values()))} templates"] if result.clusters else []
    return templates + ([result.training_mark] if result.training_mark else [])


def _search_lines(search: Mapping[str, Any]) -> list[str]:
    """How the trials were chosen, how many continued at each rung, and which is the best by the objective."""
    trials, name = search["trials"], search["objective"]
    rungs = [
        f"{len(rung['go_on'])} of {len(rung['trials'])} continued after step {rung['step']}"
        f"{alike_text(rung['left_alike'])}"
        for rung in search["rungs"]
    ]
    decided = f": {', '.join(rungs)}" if rungs else ""
    short = f" of {search['max_trials']}" if len(trials) < search["max_trials"] else ""
    head = f"Search ({search['kind']}, by {name}): {len(trials)}{short} trials{decided}."
    best = next((trial for trial in trials if trial["number"] == search["best"]), None)
    if best is None:
        return [f"{head} No trial ended with a score."]
    values = ", ".join(f"{path.rsplit('.', 1)[-1]}={shorten(str(value), 40)}" for path, value in best["params"].items())
    luck = f"; as the best of {len(trials)} it may owe something to luck" if len(trials) > 1 else ""
    return [head, f"Best trial: {best['arm']} with {name} {shown(best['value'])} ({values}){luck}."]


def alike_text(count: int) -> str:
    """Of a rung whose scores did not tell all trials apart: ` (3 no worse were left behind)`."""
    return f" ({count} no worse {'was' if count == 1 else 'were'} left behind)" if count else ""
