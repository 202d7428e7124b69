"""The curves of runs, as pages and the API give them: logged numbers, and scores of evaluations over steps.

In: runs, names of metrics, a range of steps and a width in pixels. Out: columns per run and metric. A score comes from
the evaluations, with its interval; any other number from the points table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from evsys_dashboard import points
from evsys_dashboard.models import EvalRow, GenerationRow, MetricKey
from evsys_dashboard.request_body import UNSTORABLE
from evsys_dashboard.score_charts import ScorePoint
from evsys_sdk.score_names import score_key

FIRST = ("loss", "reward", "reward/mean")
"""What of a step is shown first, where it is there."""
SYSTEM = "system/"
"""How numbers of the machine begin."""
MOST_SERIES = 400
"""In one answer; a sweep of thousands of runs is looked at arm by arm."""

FIRST_WIDTH = 720
"""Pixels of a chart, two beside each other in a window of up to 1,500; a wider window asks for its own width."""


def first_curves_url(curves_url: str, metrics: Sequence[str]) -> str:
    """What a page asks for first, so that it can be asked for before the scripts that draw it are there."""
    pairs = [("metric", name) for name in metrics]
    return f"{curves_url}?{urlencode([*pairs, ('width', FIRST_WIDTH)])}" if metrics else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRange:
    """The part of the steps that is asked for."""

    first: int | None = None
    last: int | None = None
    width: int = 800

    def holds(self, step: int) -> bool:
        return (self.first is None or step >= self.first) and (self.last is None or step <= self.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunScores:
    """Scores of one run over steps, by their key."""

    by_key: dict[str, list[ScorePoint]] = field(default_factory=dict)


def metric_names(runs: Collection[str]) -> list[str]:
    """What can be drawn of these runs: loss and reward first, then scores, the rest, numbers of the machine last."""
    logged = set(MetricKey.objects.filter(generation_id__in=runs).values_list("name", flat=True).distinct())
    scored = {key for found in scores_of_runs(runs).values() for key in found.by_key}

    # Loss and reward stand at 0 to 2; 10, 20 and 30 leave room between the groups.
    def place(name: str) -> tuple[int, str]:
        if name in FIRST:
            return FIRST.index(name), name
        return (10 if name in scored else 30 if name.startswith(SYSTEM) else 20), name

    return sorted(logged | scored, key=place)


def scores_of_runs(runs: Collection[str]) -> dict[str, RunScores]:
    """Run -> its scores over steps. The score of the final weights, which has no step, stands at the last step."""
    found: dict[str, RunScores] = {}
    rows = EvalRow.objects.filter(generation_id__in=runs).values_list(
        "generation_id", "split", "name", "step", "scores", "metrics", "generation__last_step"
    )
    for run, split, name, step, scores, metrics, last_step in rows:
        at = step if step is not None else last_step
        if at is None:
            continue
        table = found.setdefault(run, RunScores()).by_key
        given = scores or [{"metric": metric, "value": value} for metric, value in (metrics or {}).items()]
        for score in given:
            value = score.get("value") if isinstance(score, dict) else None
            if not isinstance(value, int | float):
                continue
            metric = UNSTORABLE.sub("\ufffd", str(score.get("metric")))  # it becomes a name in URLs
            line = table.setdefault(score_key(split, name, metric), [])
            # Of two scores at one step, that of the finished weights counts.
            if step is None:
                line[:] = [one for one in line if one.step != at]
            elif any(one.step == at for one in line):
                continue
            line.append(ScorePoint(step=at, value=float(value), low=score.get("low"), high=score.get("high")))
    for scores_of_run in found.values():
        for line in scores_of_run.by_key.values():
            line.sort(key=lambda one: one.step)
    return found


def series_of(
    runs: Sequence[GenerationRow], metrics: Iterable[str], steps: StepRange
) -> tuple[list[dict[str, Any]], int]:  # fmt: skip
    """A series per run and metric, in columns, with `low` and `high` where the values have intervals; and how many more
    there are than one answer takes."""
    wanted = list(dict.fromkeys(metrics))
    ids = [run.pk for run in runs]
    scores = scores_of_runs(ids)
    keys = {
        (key.generation_id, key.name): key
        for key in MetricKey.objects.filter(generation_id__in=ids, name__in=wanted, n__gt=0)
    }
    found: list[dict[str, Any]] = []
    left_out = 0
    for metric in wanted:
        for run in runs:
            head = {"run": run.pk, "name": run.name, "arm": run.arm or run.name, "seed": run.seed, "metric": metric}
            line = scores[run.pk].by_key.get(metric) if run.pk in scores else None
            if len(found) >= MOST_SERIES:
                left_out += line is not None or (run.pk, metric) in keys
                continue
            # A score before a logged number of its name: it has an interval.
            if line is not None:
                inside = [one for one in line if steps.holds(one.step)]
                columns: dict[str, Any] = {
                    "n": len(inside),
                    "step": [one.step for one in inside],
                    "value": [points.wire_number(one.value) for one in inside],
                    "low": [one.low for one in inside],
                    "high": [one.high for one in inside],
                }
            elif (key := keys.get((run.pk, metric))) is not None:
                columns = points.curve(key.pk, steps.first, steps.last, steps.width).to_json()
            else:
                continue
            found.append(head | columns)
    return found, left_out
