"""What the leakage audits of the runs come to, for the conclusion.

In: the results of an experiment's runs, whose extras hold their audits as plain data. Out: lines. The audit itself is
`evsys_sdk.data.leakage`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evsys_sdk.protocols import RunResult

MEANING = "scores on these tasks show memory, not learning"


def leakage_lines(arms: Mapping[str, Sequence[RunResult]]) -> list[str]:
    """`Leakage: 3 of 40 val/tools tasks appear in 5 of 200 training rows (2 verbatim); scores on ...`, a line per
    finding, with the arms it is true of where not all; then what was seen and not counted."""
    lines = [f"Leakage: {names}{text}; {MEANING}." for text, names in _told(arms, "text")]
    return [*lines, *(f"Not counted as leakage: {names}{text}." for text, names in _told(arms, "note"))]


def _told(arms: Mapping[str, Sequence[RunResult]], what: str) -> Iterator[tuple[str, str]]:
    """Each text with the arms that it is true of, as `lr1e-3, lr1e-5: `; nothing where it is true of all arms."""
    arms_of: dict[str, list[str]] = {}
    for arm, results in arms.items():
        for text in dict.fromkeys(text for result in results for text in _texts(result, what)):
            arms_of.setdefault(text, []).append(arm)
    audited = [arm for arm, results in arms.items() if any(result.extras.get("leakage") for result in results)]
    yield from ((text, "" if names == audited else f"{', '.join(names)}: ") for text, names in arms_of.items())


def _texts(result: RunResult, what: str) -> list[str]:
    found: list[dict[str, Any]] = result.extras.get("leakage") or []
    return [
        f"{audit[what]}{_where(audit)}" for audit in found if audit.get(what) and (what == "note" or audit.get("tasks"))
    ]


def _where(audit: dict[str, Any]) -> str:
    return "" if audit.get("place", "data") == "data" else f", {audit['place']}"
