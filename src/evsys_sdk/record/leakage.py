"""What the leakage audits of the runs come to, for the conclusion.

In: the results of an experiment's runs, whose extras hold their audits as plain data. Out: lines. The audit itself is
`evsys_sdk.data.leakage`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evsys_sdk.protocols import RunResult

MEANING = "Scores on leaked tasks show what was remembered, not what was learned."


def leakage_lines(arms: Mapping[str, Sequence[RunResult]]) -> list[str]:
    """`Leakage: lr1e-3, lr1e-5: 3 of 40 tasks of test/tools stand in ...`, a line per finding, and what it means."""
    arms_of: dict[str, list[str]] = {}
    for arm, results in arms.items():
        for text in dict.fromkeys(text for result in results for text in _texts(result)):
            arms_of.setdefault(text, []).append(arm)
    lines = [f"Leakage: {', '.join(names)}: {text}" for text, names in arms_of.items()]
    return [*lines, MEANING] if lines else []


def _texts(result: RunResult) -> list[str]:
    found: list[dict[str, Any]] = result.extras.get("leakage") or []
    return [f"{audit['text']}{_where(audit)}" for audit in found if audit.get("tasks")]


def _where(audit: dict[str, Any]) -> str:
    return "" if audit.get("place", "data") == "data" else f", {audit['place']}"
