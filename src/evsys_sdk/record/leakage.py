"""What the leakage audits of the runs come to, for the conclusion.

In: the results of an experiment's runs, whose extras hold their audits as plain data. Out: lines. The audit itself is
`evsys_sdk.data.leakage`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evsys_sdk.protocols import RunResult

MEANING = "Scores on leaked tasks show what was remembered, not what was learned."


def leakage_lines(arms: Mapping[str, Sequence[RunResult]]) -> list[str]:
    """`Leakage: lr1e-3, lr1e-5: 3 of 40 tasks of test/tools stand in ...`, a line per finding, and what it means; then
    what was seen and not counted."""
    lines = [f"Leakage: {names}: {text}" for text, names in _told(arms, "text")]
    noted = [f"Not counted as leakage: {names}: {text}" for text, names in _told(arms, "note")]
    return [*lines, *([MEANING] if lines else []), *noted]


def _told(arms: Mapping[str, Sequence[RunResult]], what: str) -> Iterator[tuple[str, str]]:
    """Each text with the arms that it is true of."""
    arms_of: dict[str, list[str]] = {}
    for arm, results in arms.items():
        for text in dict.fromkeys(text for result in results for text in _texts(result, what)):
            arms_of.setdefault(text, []).append(arm)
    yield from ((text, ", ".join(names)) for text, names in arms_of.items())


def _texts(result: RunResult, what: str) -> list[str]:
    found: list[dict[str, Any]] = result.extras.get("leakage") or []
    return [
        f"{audit[what]}{_where(audit)}" for audit in found if audit.get(what) and (what == "note" or audit.get("tasks"))
    ]


def _where(audit: dict[str, Any]) -> str:
    return "" if audit.get("place", "data") == "data" else f", {audit['place']}"
