"""What `evsys run` prints for a person when it is done.

In: an `ExperimentResult`. Out: the runs, the conclusion, the record's place; on a terminal the arms of a sweep as a
table: a row per arm, the best score first, with its interval, the difference to the baseline arm with sign and unit,
the verdict, the seeds and the rollouts that errored. The best arm is marked.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from evsys_sdk.cli.output import print_text, short_path
from evsys_sdk.cli.progress import fitting_names
from evsys_sdk.format import amount, amount_unit, score_text
from evsys_sdk.report.conclusion import score_lines

if TYPE_CHECKING:
    from evsys_sdk.experiment.outcome import ExperimentResult
    from evsys_sdk.protocols import RunResult
    from evsys_sdk.stats.verdict import ArmVerdict, Verdict

BEST = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRow:
    """One arm as the table shows it."""

    mark: str
    """`*` for the best arm, which the verdict names; empty for the others."""
    arm: str
    score: str
    """With its interval."""
    change: str
    """To the baseline arm: `+13.3 points`; `baseline` for that arm itself."""
    verdict: str
    seeds: str
    errors: str

    def cells(self) -> list[str]:
        return [self.mark, self.arm, self.score, self.change, self.verdict, self.seeds, self.errors]


def arm_rows(result: ExperimentResult) -> list[ArmRow]:
    """A row per arm; empty where there is one arm only, or no success metric to compare arms by."""
    verdict, summaries = result.conclusion.findings.verdict, result.conclusion.arms
    if len(summaries) < 2 or verdict is None:
        return []
    judged = {arm.arm: arm for arm in verdict.arms}
    pairs = [(judged[one.arm], one) for one in summaries if one.arm in judged]
    # The best score first, whichever way is better; arms without a score last.
    sign = 1.0 if verdict.mode == "min" else -1.0
    pairs.sort(key=lambda pair: (pair[0].mean is None, sign * (pair[0].mean or 0.0)))
    rows = []
    for arm, one in pairs:
        difference = arm.vs_baseline.difference if arm.vs_baseline else None
        change = "" if difference is None else amount(difference, share=verdict.share, unit=verdict.unit, signed=True)
        change += amount_unit(share=verdict.share, unit=verdict.unit) if change else ""
        unscored = next((status for status in one.statuses if status != "completed"), "not scored")
        launched = len(one.statuses)
        rows.append(
            ArmRow(
                mark=BEST if one.arm == result.conclusion.best_arm else "",
                arm=one.arm,
                score=score_text(arm.mean, arm.low, arm.high, unit=verdict.unit, marks=[one.training_mark])
                if arm.mean is not None
                else "no score",
                change="baseline" if one.arm == verdict.baseline_arm else change,
                verdict=unscored if arm.mean is None else _word(verdict, arm),
                seeds=str(arm.n_seeds) if arm.n_seeds == launched else f"{arm.n_seeds} of {launched}",
                errors=f"{arm.n_errors:,} of {arm.n_rollouts:,}" if arm.n_errors else "",
            )
        )
    return rows


def _word(verdict: Verdict, arm: ArmVerdict) -> str:
    """How the arm compares with the baseline; where all arms scored the same on every task there is nothing to decide,
    and the conclusion below the table says so."""
    if verdict.constant is not None and arm.vs_baseline is not None:
        return "the same"
    return arm.verdict or ""


def print_arm_table(result: ExperimentResult, rows: list[ArmRow]) -> None:
    """Print the rows with rich; columns that are empty in every row are left out."""
    from rich.table import Table
    from rich.text import Text

    from evsys_sdk.format import console_for, harmless

    verdict = result.conclusion.findings.verdict
    metric = ((verdict.metric if verdict else "") or result.conclusion.metric or "score").rpartition("/")[2]
    header = ["", "arm", f"{metric} [95 % CI]", "vs baseline", "verdict", "seeds", "errors"]
    kept = [place for place in range(len(header)) if any(row.cells()[place] for row in rows) or place == 1]
    console = console_for()
    widths = [max(len(header[place]), *(len(row.cells()[place]) for row in rows)) + 2 for place in kept if place != 1]
    names = fitting_names([row.arm for row in rows], console.width - sum(widths))
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for place in kept:
        right = place in (2, 3, 5, 6)
        table.add_column(Text(harmless(header[place])), justify="right" if right else "left", no_wrap=place != 1)
    for row, name in zip(rows, names, strict=True):
        cells, style = replace(row, arm=name).cells(), "bold green" if row.mark else ""
        table.add_row(*(Text(harmless(cells[place]), style=style, overflow="fold") for place in kept))
    console.print(table)
    if any(row.mark for row in rows):
        console.print(Text(f"{BEST} best arm", style="bold green"))


def print_summary(result: ExperimentResult, *, brief: bool = False) -> None:
    """Each run with its numbers, the conclusion, and where the record lies; `brief` leaves out completed runs. On a
    terminal a sweep's completed runs are a table of arms instead."""
    runs = [run for run in result.runs if run.status != "pruned"]  # the conclusion has these in a line each
    rows = arm_rows(result) if sys.stdout.isatty() else []
    printed = [run for run in runs if not ((brief or rows) and run.status == "completed")]
    for run in printed:
        print_text(f"{run.name}: {run.status}{training_text(run.metrics)}")
        lines = score_lines(run.final_evals)
        lines += [
            f"kept the weights of step {step}{f' of stage {stage}' if stage else ''} (best_by)"
            for stage, step in run.chosen_steps.items()
        ]
        lines += [f"stopped early: {run.stopped_early}"] if run.stopped_early else []
        lines += [f"error: {run.error}"] if run.error else []
        lines += [f"warning: {text}" for text in own_warnings(run, result)] if len(runs) == 1 else []
        for line in lines:
            print_text(line, indent="  ")
    if len(runs) > 1:
        names: dict[str, dict[str, None]] = {}  # warning -> the runs that have it, each once
        for run in runs if rows else printed:
            for warning in own_warnings(run, result):
                names.setdefault(warning, {})[run.name] = None
        for warning, of in names.items():
            print_text(f"warning: {warning} ({f'all {len(of)} runs' if len(of) == len(runs) else ', '.join(of)})")
    if rows:
        print_arm_table(result, rows)
    if not brief:
        print()
    for line in result.conclusion.text.splitlines():
        if not (rows and any(line.startswith(f"{one.arm}: ") for one in result.conclusion.arms)):  # the table has these
            print_text(line)
    print_text(f"record: {short_path(result.output_dir)} ({result.seconds:.1f} s)")
    if rows:
        print_text(f"next: evsys show {shlex.quote(result.name)}  # every arm in full")


def own_warnings(run: RunResult, result: ExperimentResult) -> list[str]:
    """The run's warnings; what leaked is not among them where the conclusion says it, once for all runs."""
    return [text for text in run.warnings if text.removeprefix("leakage: ") not in result.conclusion.text]


def training_text(metrics: dict[str, float]) -> str:
    """`, loss 2.3026 -> 0.1054 in 24 steps`; of a policy the reward: its loss does not say how good it is."""
    name = next((name for name in ("reward", "loss") if f"final_{name}" in metrics), None)
    if name is None:
        return ""
    first = f"{metrics[f'first_{name}']:.4f} -> " if f"first_{name}" in metrics else ""
    steps = f" in {metrics['steps']:.0f} steps" if "steps" in metrics else ""
    return f", {name} {first}{metrics[f'final_{name}']:.4f}{steps}"
