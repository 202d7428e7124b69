"""What an experiment came to, in words that the numbers allow.

In: the results of its runs and the success metric. Out: a ranking of arms by their mean over seeds, and a text.
An arm without a score is never ranked, a test-labelled score never picks a winner, and as long as the difference
between arms has not been tested the text says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from evsys_sdk.protocols import EvalResult, RunResult, RunStatus, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """One arm over its seeds."""

    arm: str
    statuses: list[RunStatus]
    scores: list[float] = field(default_factory=list)
    """The success metric of each seed that has one."""
    why_unranked: str | None = None
    errors: list[str] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return sum(self.scores) / len(self.scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    arms: list[ArmSummary]
    best_arm: str | None
    text: str
    metric: str | None = None


def conclude(arms: dict[str, list[RunResult]], *, hypothesis: str, success: Any | None) -> Conclusion:
    """Rank the arms by the success metric and say what that means."""
    name, mode = (success.name, success.mode) if success is not None else (None, "max")
    summaries = [_summary(arm, results, name) for arm, results in arms.items()]
    ranked = sorted((arm for arm in summaries if arm.scores), key=lambda arm: arm.mean, reverse=mode == "max")
    why_no_winner = _why_no_winner(ranked, arms, name)
    best = None if why_no_winner else ranked[0].arm
    lines = [f"Hypothesis: {hypothesis}"] if hypothesis else []
    lines += [_arm_line(summary, name) for summary in summaries]
    if name is None:
        lines.append("No success_metric is named, so arms are not ranked.")
    elif best is None:
        lines.append(f"No best arm by {name}: {why_no_winner}.")
    elif len(summaries) > 1:
        word = "Highest" if mode == "max" else "Lowest"
        lines.append(f"{word} mean {name}: {best}. Whether the arms really differ has not been tested.")
    return Conclusion(arms=summaries, best_arm=best, text="\n".join(lines), metric=name)


def _why_no_winner(ranked: list[ArmSummary], arms: dict[str, list[RunResult]], name: str | None) -> str | None:
    if name is None or not ranked:
        return "no arm has a score for it"
    if all(key.startswith("test/") for results in arms.values() for r in results for key in matching(r, name)):
        return "it was measured on a test benchmark only, and test scores do not select"
    if len(ranked) > 1 and ranked[0].mean == ranked[1].mean:
        return "the first two arms are equal"
    return None


def matching(result: RunResult, name: str) -> list[str]:
    """Metrics of a run that `name` means: the whole key, `val.pass@1`, or a bare last part; val before test."""
    if name in result.metrics:
        return [name]
    split, dot, rest = name.partition(".")
    if dot and split in ("val", "test", "eval"):
        found = [key for key in result.metrics if key.startswith(f"{split}/") and key.endswith(f"/{rest}")]
    else:
        found = [key for key in result.metrics if key.rsplit("/", 1)[-1] == name]
    for wanted in ("val/", "eval/"):
        chosen = [key for key in found if key.startswith(wanted)]
        if chosen:
            return chosen
    return found


def _summary(arm: str, results: Sequence[RunResult], name: str | None) -> ArmSummary:
    statuses = [result.status for result in results]
    scores = [score for result in results if (score := _score_of(result, name)) is not None]
    why = None
    if not scores:
        why = "no run completed" if "completed" not in statuses else f"no score for {name}" if name else None
    errors = sorted({result.error for result in results if result.error})
    return ArmSummary(arm=arm, statuses=statuses, scores=scores, why_unranked=why, errors=errors)


def _score_of(result: RunResult, name: str | None) -> float | None:
    """The success metric of one run; its mean where several benchmarks have it."""
    keys = matching(result, name) if name and result.status == "completed" else []
    numbers = [result.metrics[key] for key in keys if math.isfinite(result.metrics[key])]
    return sum(numbers) / len(numbers) if numbers else None


def _arm_line(summary: ArmSummary, name: str | None) -> str:
    done, n = summary.statuses.count("completed"), len(summary.statuses)
    state = f"{done} of {n} seeds completed" if n > 1 else summary.statuses[0]
    if summary.scores:
        each = f", seeds {', '.join(f'{score:.3f}' for score in summary.scores)}" if n > 1 else ""
        state += f", {name} {summary.mean:.3f}{each}"
    if summary.why_unranked:
        state += f", not ranked: {summary.why_unranked}"
    return f"{summary.arm}: {state}" + "".join(f" ({error})" for error in summary.errors)


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
    lines = [_score_text(*found) + _compared(untrained.get(key)) for key, found in latest.items()]
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
            row = cells.setdefault(f"{result.split}/{result.name} {score.metric}", {})
            row[column or ""] = _value(score)
    columns = [name for name in ("untrained", *stages) if any(name in row for row in cells.values())]
    table = [["after stage", *columns], *([name, *(row.get(c, "-") for c in columns)] for name, row in cells.items())]
    widths = [max(len(row[index]) for row in table) for index in range(len(columns) + 1)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _score_text(result: EvalResult, score: Score | None) -> str:
    where = result.name if result.split == "eval" else f"{result.split}/{result.name}"
    if score is None:
        return f"{where}: not scored ({result.error})"
    if score.value is None:
        return f"{where} {score.metric}: not valid ({score.error})"
    errors = f", {score.n_errors} errors" if score.n_errors else ""
    return f"{where} {score.metric} = {_value(score)}, n={score.n_tasks}{errors}"


def _compared(untrained: tuple[EvalResult, Score | None] | None) -> str:
    if untrained is None:
        return ""
    result, score = untrained
    if score is None or score.value is None:
        return f" (untrained: not scored, {score.error if score else result.error})"
    return f" (untrained {_value(score)})"


def _value(score: Score) -> str:
    if score.value is None:
        return "not valid"
    interval = f" [{score.low:.3f}, {score.high:.3f}]" if score.low is not None and score.high is not None else ""
    return f"{score.value:.3f}{interval}"
