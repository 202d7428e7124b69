"""What `evsys run` prints for a person when it is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evsys_sdk.record.conclusion import score_lines


def print_summary(result: Any) -> None:
    """Each run with its numbers, the conclusion, and where the record lies."""
    for run in result.runs:
        print(f"{run.extras.get('run_name', run.run_id)}: {run.status}{_training(run.metrics)}")
        for line in score_lines(run.extras.get("evals", [])):
            print(f"  {line}")
        if run.error:
            print(f"  error: {run.error}")
        for warning in run.extras.get("warnings", []):
            print(f"  warning: {warning}")
    print()
    print(result.conclusion.text)
    print(f"record: {_short(result.output_dir)} ({result.seconds:.1f} s)")


def _training(metrics: dict[str, float]) -> str:
    if "final_loss" not in metrics:
        return ""
    first = f"{metrics['first_loss']:.4f} -> " if "first_loss" in metrics else ""
    steps = f" in {metrics['steps']:.0f} steps" if "steps" in metrics else ""
    return f", loss {first}{metrics['final_loss']:.4f}{steps}"


def _short(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
