"""What an experiment came to, in words that the numbers allow.

In: the results of its runs and the success metric. Out: a ranking of arms by their mean over seeds, and a text.
An arm without a score is never ranked, a test-labelled score never picks a winner, and as long as the difference
between arms has not been tested the text says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evsys_sdk.numbers import shown, span
from evsys_sdk.protocols import EvalResult, RunResult, RunStatus, Score
from evsys_sdk.record.leakage import leakage_lines
from evsys_sdk.score_names import AmbiguousName, resolve, score_key, suite_label

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
    """The same as text, with interval and denominator where one benchmark measured it."""
    why_unranked: str | None = None
    errors: list[str] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return sum(self.scores) / len(self.scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelScore:
    """A model that nobody trained here, on one benchmark: something to compare the arms with, and never an arm."""

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
class Findings:
    """What the judge of the scores found, in words and as plain data."""

    best_arm: str | None = None
    lines: list[str] = field(default_factory=list)
    why_not: str | None = None
    """Why there is no verdict."""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    arms: list[ArmSummary]
    best_arm: str | None
    text: str
    metric: str | None = None
    findings: Findings = field(default_factory=Findings)
    admitted: list[str] = field(default_factory=list)
    """How test tasks took part in choosing, a sentence each."""


def conclude(
    arms: dict[str, list[RunResult]],
    *,
    hypothesis: str,
    success: Any | None,
    findings: Findings,
    models: Sequence[ModelScore] = (),
    search: Sequence[str] = (),
    admitted: Sequence[str] = (),
) -> Conclusion:
    """What the arms came to and what that means; `models` stand beside them. `admitted`: how test tasks took part."""
    name = success.name if success is not None else None
    keys = score_keys(arms, name) if name else []
    summaries = [_summary(arm, results, name, keys) for arm, results in arms.items()]
    lines = [f"Hypothesis: {hypothesis}"] if hypothesis else []
    lines += [*search, *admitted]
    lines += [*([f"No verdict: {findings.why_not}."] if findings.why_not else []), *findings.lines]
    judged = {arm["arm"] for arm in findings.data.get("verdict", {}).get("arms", [])}
    lines += [_arm_line(summary, name) for summary in summaries if summary.arm not in judged]
    lines += leakage_lines(arms)
    lines += _training_row_lines(arms)
    lines += _model_lines(models)
    return Conclusion(
        arms=summaries,
        best_arm=findings.best_arm,
        text="\n".join(lines),
        metric=name,
        findings=findings,
        admitted=list(admitted),
    )


def conclude_without_verdict(arms: Mapping[str, Sequence[RunResult]], why: str) -> Conclusion:
    """The least that can be said: how each run ended, and why the rest is missing."""
    summaries = [ArmSummary(arm=arm, statuses=[run.status for run in runs]) for arm, runs in arms.items()]
    lines = [f"No verdict: {why}.", *(_arm_line(summary, None) for summary in summaries)]
    return Conclusion(arms=summaries, best_arm=None, text="\n".join(lines), findings=Findings(why_not=why))


def _training_row_lines(arms: Mapping[str, Sequence[RunResult]]) -> list[str]:
    """One line that names the scores on rows that were trained on."""
    evals = [one for results in arms.values() for result in results for one in result.extras.get("evals", [])]
    keys = sorted({metric_key(one, score) for one in evals if one.on_training_rows for score in one.scores})
    if not keys:
        return []
    return [
        f"Scored on training rows: {', '.join(keys)}. It shows what was memorised, not how new tasks are done; add a "
        "benchmark, or eval.eval_data."
    ]


def _model_lines(models: Sequence[ModelScore]) -> list[str]:
    """The API models, under a heading that keeps them apart from the arms."""
    lines = [f"  {score.model}: {text}" for score in models for text in _texts(score.result)]
    return ["For comparison, models that were not trained here (never ranked):", *lines] if lines else []


def _texts(result: EvalResult) -> list[str]:
    return [_score_text(result, score) for score in result.scores] or [_score_text(result, None)]


def score_keys(arms: Mapping[str, Sequence[RunResult]], name: str) -> list[str]:
    """The metrics that `name` means, over all arms; none where that is ambiguous, which the verdict then says."""
    try:
        return resolve(name, metric_keys(arms))
    except AmbiguousName:
        return []


def metric_keys(arms: Mapping[str, Sequence[RunResult]]) -> list[str]:
    """Every metric that some run of some arm has."""
    return list(dict.fromkeys(key for results in arms.values() for found in results for key in found.metrics))


def _summary(arm: str, results: Sequence[RunResult], name: str | None, keys: Sequence[str]) -> ArmSummary:
    statuses = [result.status for result in results]
    scored = [(result, score) for result in results if (score := _score_of(result, keys)) is not None]
    scores = [score for _, score in scored]
    evidence = [_evidence(result, score, keys) for result, score in scored]
    why = None
    if not scores:
        why = "no run completed" if "completed" not in statuses else _why_no_score(results, name)
        why = _why_pruned(results) or why
    errors = sorted({result.error for result in results if result.error})
    return ArmSummary(arm=arm, statuses=statuses, scores=scores, evidence=evidence, why_unranked=why, errors=errors)


def _why_no_score(results: Sequence[RunResult], name: str | None) -> str | None:
    """`no score for val.pass@1: all 40 rollouts errored`, as far as an evaluation says why."""
    errors = [one.error for result in results for one in result.extras.get("evals", []) if one.error]
    return f"no score for {name}{f': {errors[0]}' if errors else ''}" if name else None


def _why_pruned(results: Sequence[RunResult]) -> str | None:
    """`pruned at step 10 with val.pass@1 0.412`, for an arm that a search left behind."""
    note = next((result.extras["pruned"] for result in results if "pruned" in result.extras), None)
    if note is None:
        return None
    score = f"no {note['metric']}" if note["value"] is None else f"{note['metric']} {note['value']:.4g}"
    return f"pruned at step {note['step']} with {score}"


def _evidence(result: RunResult, value: float, keys: Sequence[str]) -> str:
    """`0.938 [0.832, 0.979], n=48`; the bare number where it is a mean of benchmarks, or no benchmark's at all."""
    evals: list[EvalResult] = result.extras.get("evals", [])
    # The last one: a score of the final weights comes after those of the loop.
    found = [
        (one, score) for one in evals for score in one.scores if metric_key(one, score) in keys and score.value == value
    ]
    if len(keys) == 1 and found:
        rows = ", on training rows" if found[-1][0].on_training_rows else ""
        return f"{_value(found[-1][1])}, {_counts(found[-1][1])}{rows}"
    last = {metric_key(one, score): score for one in evals for score in one.scores if one.step != 0}
    return f"{value:.3f}{_errors_of([last[key] for key in keys if key in last])}"


def metric_key(result: EvalResult, score: Score) -> str:
    """What the run's metrics call this score: `val/tools/pass@1`."""
    return score_key(result.split, result.name, score.metric)


def _score_of(result: RunResult, keys: Sequence[str]) -> float | None:
    """The success metric of one run; over all their tasks where several benchmarks have it."""
    return over_tasks(result.metrics, keys, task_counts(result)) if result.status == "completed" else None


def task_counts(result: RunResult) -> dict[str, int]:
    """How many tasks each of a run's scores is over."""
    evals: list[EvalResult] = result.extras.get("evals", [])
    return {metric_key(one, score): score.n_tasks for one in evals for score in one.scores}


def over_tasks(metrics: Mapping[str, float], keys: Sequence[str], counts: Mapping[str, int]) -> float | None:
    """The mean of these metrics over all their tasks, as the verdict takes it: a benchmark counts by its size."""
    weights = {key: counts.get(key) or 1 for key in keys if math.isfinite(metrics.get(key, math.nan))}
    total = sum(weights.values())
    return sum(metrics[key] * weight for key, weight in weights.items()) / total if total else None


def _arm_line(summary: ArmSummary, name: str | None) -> str:
    done, n = summary.statuses.count("completed"), len(summary.statuses)
    if set(summary.statuses) == {"pruned"} and summary.why_unranked:
        return f"{summary.arm}: {summary.why_unranked}"
    state = f"{done} of {n} seeds completed" if n > 1 else summary.statuses[0]
    if summary.scores:
        each = f"{summary.mean:.3f}, seeds {_joined(summary.evidence)}" if n > 1 else summary.evidence[0]
        state += f", {name} {each}"
    if summary.why_unranked:
        state += f", not ranked: {summary.why_unranked}"
    return f"{summary.arm}: {state}" + "".join(f" ({error})" for error in summary.errors)


def _joined(texts: Sequence[str]) -> str:
    return ("; " if any(", " in text for text in texts) else ", ").join(texts)


def score_lines(evals: Sequence[EvalResult]) -> list[str]:
    """`val/addition pass@1 = 0.83 [0.70, 0.91], n=40 (untrained 0.05 [0.01, 0.17])` for the last score of each
    benchmark and metric; for a chain of stages, its matrix follows."""
    latest: dict[tuple[str, str, str], tuple[EvalResult, Score | None]] = {}
    untrained: dict[tuple[str, str, str], tuple[EvalResult, Score | None]] = {}
    for result in evals:
        scores: list[Score | None] = [*result.scores] or [None]
        for score in scores:
            place = untrained if result.step == 0 else latest
            place[(result.split, result.name, score.metric if score else "")] = (result, score)
    lines = []
    for key, (result, score) in latest.items():
        lines.append(_score_text(result, score) + _compared(untrained.get(key)))
        lines += _breakdown_lines(result, score)
    lines += [f"untrained: {_score_text(*found)}" for key, found in untrained.items() if key not in latest]
    return lines + stage_matrix(evals)


def stage_matrix(evals: Sequence[EvalResult]) -> list[str]:
    """What each benchmark came to after each stage of a chain: a row per benchmark and metric, a column per stage."""
    stages = list(dict.fromkeys(result.stage for result in evals if result.stage is not None))
    if len(stages) < 2:
        return []
    cells: dict[str, dict[str, str]] = {}
    for result in evals:
        column = "untrained" if result.step == 0 else result.stage
        for score in result.scores:
            row = cells.setdefault(f"{suite_label(result.split, result.name)} {score.metric}", {})
            row[column or ""] = _value(score)
    columns = [name for name in ("untrained", *stages) if any(name in row for row in cells.values())]
    table = [["after stage", *columns], *([name, *(row.get(c, "-") for c in columns)] for name, row in cells.items())]
    widths = [max(len(row[index]) for row in table) for index in range(len(columns) + 1)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _score_text(result: EvalResult, score: Score | None) -> str:
    where = suite_label(result.split, result.name)
    if score is None:
        return f"{where}: not scored ({result.error})"
    if score.value is None:
        return f"{where} {score.metric}: not valid ({str(result.error or score.error).removeprefix('invalid: ')})"
    rows = ", on training rows" if result.on_training_rows else ""
    return f"{where} {score.metric} = {_value(score)}, {_counts(score)}{rows}"


def _counts(score: Score) -> str:
    """The denominator: tasks, rollouts where a task had several, and how many of these nobody could grade."""
    rollouts = f", {score.n_rollouts} rollouts" if score.n_rollouts > score.n_tasks else ""
    return f"n={score.n_tasks}{rollouts}{_errors_of([score])}"


def _errors_of(scores: Sequence[Score]) -> str:
    """`, 2 errors`; nothing where no rollout errored."""
    errors = sum(score.n_errors for score in scores)
    return f", {errors} error{'s' if errors > 1 else ''}" if errors else ""


def _breakdown_lines(result: EvalResult, score: Score | None) -> list[str]:
    """`  by toolkit: mail 0.500 [0.090, 0.910], n=4; maps 1.000 [0.342, 1.000], n=2` for each breakdown key."""
    if score is None:
        return []
    lines = []
    for key, values in result.breakdown.items():
        parts = [
            f"{value} {_value(part)}, {_counts(part)}"
            for value, scores in values.items()
            for part in scores
            if part.metric == score.metric
        ]
        more = f"; and {len(parts) - MOST_VALUES} more in the record" if len(parts) > MOST_VALUES else ""
        lines.append(f"  by {key}: {'; '.join(parts[:MOST_VALUES])}{more}")
    return lines


def _compared(untrained: tuple[EvalResult, Score | None] | None) -> str:
    if untrained is None:
        return ""
    result, score = untrained
    if score is None or score.value is None:
        return f" (untrained: not scored, {score.error if score else result.error})"
    return f" (untrained {_value(score)}{_errors_of([score])})"


def _value(score: Score) -> str:
    if score.value is None:
        return "not valid"
    return shown(score.value) + span(score.low, score.high)
