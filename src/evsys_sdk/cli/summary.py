"""What `evsys run` prints for a person when it is done."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from evsys_sdk.cli.arm_table import arm_rows, print_arm_table
from evsys_sdk.record.conclusion import score_lines


def print_summary(result: Any, *, brief: bool = False) -> None:
    """Each run with its numbers, the conclusion, and where the record lies; `brief` leaves out completed runs. On a
    terminal a sweep's completed runs are a table of arms instead."""
    shown = [run for run in result.runs if run.status != "pruned"]  # the conclusion has these in a line each
    rows = arm_rows(result) if sys.stdout.isatty() else []
    for run in [run for run in shown if not ((brief or rows) and run.status == "completed")]:
        print(f"{run.extras.get('run_name', run.run_id)}: {run.status}{_training(run.metrics)}")
        for line in score_lines(run.extras.get("evals", [])):
            print(f"  {line}")
        if run.extras.get("stopped_early"):
            print(f"  stopped early: {run.extras['stopped_early']}")
        if run.error:
            print(f"  error: {run.error}")
        for warning in run.extras.get("warnings", []):
            print(f"  warning: {warning}")
    if rows:
        for warning, names in _shared_warnings(shown).items():
            print(f"warning: {warning} ({names})")
        print_arm_table(result, rows)
    if not brief:
        print()
    for line in result.conclusion.text.splitlines():
        if not (rows and _is_arm_line(line, result)):  # the table has these
            print(line)
    print(f"record: {_short(result.output_dir)} ({result.seconds:.1f} s)")
    if rows:
        print(f"next: evsys show {shlex.quote(result.name)}  # every arm in full")


def _is_arm_line(line: str, result: Any) -> bool:
    return any(line.startswith(f"{one.arm}: ") for one in result.conclusion.arms)


def _shared_warnings(runs: list[Any]) -> dict[str, str]:
    """Each warning of completed runs once, and which runs have it; what leaked stands in the conclusion."""
    completed = [run for run in runs if run.status == "completed"]
    found: dict[str, list[str]] = {}
    for run in completed:
        for warning in [text for text in run.extras.get("warnings", []) if not text.startswith("leakage:")]:
            found.setdefault(warning, []).append(str(run.extras.get("run_name", run.run_id)))
    return {
        warning: f"all {len(names)} runs" if len(names) == len(completed) > 1 else ", ".join(names)
        for warning, names in found.items()
    }


def _training(metrics: dict[str, float]) -> str:
    # A policy's loss says nothing about how good it is; its reward does.
    name = next((name for name in ("reward", "loss") if f"final_{name}" in metrics), None)
    if name is None:
        return ""
    first = f"{metrics[f'first_{name}']:.4f} -> " if f"first_{name}" in metrics else ""
    steps = f" in {metrics['steps']:.0f} steps" if "steps" in metrics else ""
    return f", {name} {first}{metrics[f'final_{name}']:.4f}{steps}"


def _short(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
