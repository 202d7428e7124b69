"""What `evsys run` prints for a person when it is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evsys_sdk.record.conclusion import score_lines


def print_summary(result: Any, *, brief: bool = False) -> None:
    """Each run with its numbers, the conclusion, and where the record lies; `brief` leaves out completed runs."""
    shown = [run for run in result.runs if run.status != "pruned"]  # the conclusion has these in a line each
    for run in [run for run in shown if not (brief and run.status == "completed")]:
        print(f"{run.extras.get('run_name', run.run_id)}: {run.status}{_training(run.metrics)}")
        for line in score_lines(run.extras.get("evals", [])):
            print(f"  {line}")
        if run.extras.get("stopped_early"):
            print(f"  stopped early: {run.extras['stopped_early']}")
        if run.error:
            print(f"  error: {run.error}")
        for warning in run.extras.get("warnings", []):
            print(f"  warning: {warning}")
    if not brief:
        print()
    print(result.conclusion.text)
    print(f"record: {_short(result.output_dir)} ({result.seconds:.1f} s)")


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
