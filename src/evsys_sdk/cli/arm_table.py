"""The arms of a sweep as a table, printed on a terminal when the sweep has ended.

In: an `ExperimentResult`. Out: a row per arm, the best score first: score with its interval, difference to the baseline
arm with sign and unit, verdict, seeds, rollouts that errored. The best arm is marked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from evsys_sdk.cli.progress import short_names
from evsys_sdk.numbers import amount, shown

BEST = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRow:
    """One arm as the table shows it."""

    mark: str
    """`*` for the best arm, which the verdict names; empty for the others."""
    arm: str
    score: str
    interval: str
    change: str
    """To the baseline arm: `+13.3 points`; `baseline` for that arm itself."""
    verdict: str
    seeds: str
    errors: str

    def cells(self) -> list[str]:
        return [self.mark, self.arm, self.score, self.interval, self.change, self.verdict, self.seeds, self.errors]


def arm_rows(result: Any) -> list[ArmRow]:
    """A row per arm; empty where there is one arm only, or no success metric to compare arms by."""
    verdict, summaries = _verdict_of(result), result.conclusion.arms
    judged = {arm["arm"]: arm for arm in verdict.get("arms", [])}
    if len(summaries) < 2 or not judged:
        return []
    share = bool(verdict.get("share"))
    names = dict(zip([one.arm for one in summaries], short_names([one.arm for one in summaries]), strict=True))
    rows = [(judged[one.arm], one) for one in summaries if one.arm in judged]
    sign = 1.0 if verdict.get("mode") == "min" else -1.0
    rows.sort(key=lambda row: (row[0]["mean"] is None, sign * (row[0]["mean"] or 0.0)))
    best, baseline = result.conclusion.best_arm, verdict.get("baseline_arm")
    return [
        ArmRow(
            mark=BEST if one.arm == best else "",
            arm=names[one.arm],
            score="no score" if arm["mean"] is None else _score(arm["mean"], share=share),
            interval=_interval(arm["low"], arm["high"], share=share),
            change="baseline" if one.arm == baseline else _change(arm.get("vs_baseline"), share=share),
            verdict=_verdict(arm, one),
            seeds=_seeds(arm, one),
            errors=f"{arm['n_errors']} of {arm['n_rollouts']}" if arm.get("n_errors") else "",
        )
        for arm, one in rows
    ]


def _verdict_of(result: Any) -> dict[str, Any]:
    """What the statistics said, as the record has it; empty where nothing was judged."""
    found: dict[str, Any] = result.conclusion.findings.data.get("verdict") or {}
    return found


def _score(value: float, *, share: bool) -> str:
    return f"{100 * value:.1f} %" if share else shown(value)


def _interval(low: float | None, high: float | None, *, share: bool) -> str:
    if low is None or high is None:
        return ""
    return f"{100 * low:.1f} to {100 * high:.1f}" if share else f"{shown(low)} to {shown(high)}"


def _change(found: dict[str, Any] | None, *, share: bool) -> str:
    if not found or found.get("difference") is None:
        return ""
    return amount(found["difference"], share=share, signed=True) + (" points" if share else "")


def _verdict(arm: dict[str, Any], summary: Any) -> str:
    if arm["mean"] is None:
        return next((status for status in summary.statuses if status != "completed"), "not scored")
    return str(arm.get("verdict") or "")


def _seeds(arm: dict[str, Any], summary: Any) -> str:
    launched = len(summary.statuses)
    return str(arm["n_seeds"]) if arm["n_seeds"] == launched else f"{arm['n_seeds']} of {launched}"


def print_arm_table(result: Any, rows: list[ArmRow]) -> None:
    """Print the rows with rich; columns that are empty in every row are left out."""
    from rich.table import Table
    from rich.text import Text

    from evsys_sdk.terminal import console_for, visible

    metric = str(_verdict_of(result).get("metric") or result.conclusion.metric or "score")
    metric = metric.rpartition("/")[2]
    header = ["", "arm", metric, "95 % CI", "vs baseline", "verdict", "seeds", "errors"]
    kept = [place for place in range(len(header)) if any(row.cells()[place] for row in rows) or place == 1]
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for place in kept:
        right = place in (2, 3, 4, 6, 7)
        table.add_column(visible(header[place]), justify="right" if right else "left", no_wrap=place != 1)
    for row in rows:
        style = "bold green" if row.mark else ""
        table.add_row(*(Text(visible(row.cells()[place]), style=style, overflow="fold") for place in kept))
    console = console_for()
    console.print(table)
    if any(row.mark for row in rows):
        console.print(Text(f"{BEST} best arm", style="bold green"))
