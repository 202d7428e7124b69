"""The steps of an experiment's runs as its journal has them: curves, and what they add up to.

In: a journal that is closed. Out: per run the numbers of its steps, and totals. What a resumed run did anew counts
once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evsys_sdk.record.stored import StoredJournal

Curve = dict[int, float]
"""Step -> value."""

_COUNTED = (
    "FROM events AS e WHERE e.superseded = 0 AND e.attempt = (SELECT max(attempt) FROM attempts WHERE run = e.run)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What the runs took."""

    steps: int = 0
    tokens: int = 0
    usd: float = 0.0
    unpriced: int = 0
    """Rollouts whose price is not known."""


def totals(journal: Path, runs: Collection[str]) -> Totals:
    """Steps and tokens of training, and dollars for rollouts of evaluations, of these runs."""
    steps = tokens = unpriced = 0
    usd = 0.0
    for run, data in _rows(journal, "step"):
        if run in runs:
            steps, tokens = steps + 1, tokens + int(_number(data["metrics"].get("tokens")) or 0)
    for run, data in _rows(journal, "rollout"):
        if run in runs:
            usd += float(data.get("cost_usd") or 0.0)
            unpriced += bool((data.get("metadata") or {}).get("unpriced"))
    return Totals(steps=steps, tokens=tokens, usd=usd, unpriced=unpriced)


def step_curves(journal: Path, metrics: Collection[str]) -> dict[str, dict[str, Curve]]:
    """Run -> metric -> curve, of these metrics; values that are no numbers are left out."""
    curves: dict[str, dict[str, Curve]] = {}
    query = f"SELECT e.run, e.at, e.data {_COUNTED} AND e.kind = 'step' ORDER BY e.id"
    with closing(StoredJournal(journal)) as stored:
        for run, at, data in stored.read(query, ()):
            found = json.loads(data)["metrics"]
            for name in metrics:
                if (value := _number(found.get(name))) is not None:
                    curves.setdefault(run, {}).setdefault(name, {})[at] = value
    return curves


def _rows(journal: Path, kind: str) -> list[tuple[str, dict[str, Any]]]:
    with closing(StoredJournal(journal)) as stored:
        rows = stored.read(f"SELECT e.run, e.data {_COUNTED} AND e.kind = ?", (kind,))
    return [(run, json.loads(data)) for run, data in rows]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
