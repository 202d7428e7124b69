"""What the model did while it was trained, for people to read.

In: the rollouts of a step. Out: lines in `<run_dir>/logs/training/rollouts.jsonl`, at most so many per step. They stay
on disk; only rollouts of evaluations go to a dashboard.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from evsys_sdk.jsonl import encode_record
from evsys_sdk.protocols import Rollout
from evsys_sdk.redaction import redact_rollout

FILE = Path("logs") / "training" / "rollouts.jsonl"


def log_rollouts(run_dir: Path, step: int, rollouts: list[Rollout], *, limit: int, stage: str | None = None) -> None:
    """Append the first `limit` rollouts of a step."""
    if limit == 0:
        return
    path = run_dir / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        encode_record({"step": step, "stage": stage, "completion": rollout.completion, **told})
        for rollout, told in ((one, redact_rollout(asdict(one))) for one in rollouts[:limit])
    ]
    with open(path, "ab") as handle:
        handle.write(b"".join(lines))


def trim(run_dir: Path, stage: str | None, *, upto: int) -> None:
    """Remove a stage's lines of steps later than `upto`, which are going to be done again."""
    path = run_dir / FILE
    if not path.is_file():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines]
    kept = [line for line, row in zip(lines, rows, strict=True) if row["stage"] != stage or row["step"] <= upto]
    if len(kept) < len(lines):
        path.write_bytes(b"".join(kept))


def carry_over(source: Path, run_dir: Path, counts: Callable[[str | None, int], bool]) -> None:
    """Take over the lines of an earlier attempt, set aside in `source`, whose stage and step still count."""
    try:
        lines = (source / FILE).read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return
    rows = [(line, json.loads(line)) for line in lines if line.endswith(b"\n")]
    (run_dir / FILE).parent.mkdir(parents=True, exist_ok=True)
    (run_dir / FILE).write_bytes(b"".join(line for line, row in rows if counts(row["stage"], row["step"])))
