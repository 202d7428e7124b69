"""What lists show of an experiment, repeated from its record.

In: an `Experiment` with its record, or one that is still running. Out: its summary columns, set on the row and not
saved. A record that cannot be understood costs its summary, never the row.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Any

from evsys_dashboard.models import EvalRow, ExperimentRow, MetricKey
from evsys_dashboard.points import curve
from evsys_sdk.history.digest import ArmDigest, Digest, digest_of
from evsys_sdk.record.models import ExperimentRecord, JudgedArm
from evsys_sdk.report.setup import setup_of
from evsys_sdk.score_names import AmbiguousName, resolve, score_key

SPARK_POINTS = 24
OUTCOMES = {"supported": "supported", "refuted": "refuted", "inconclusive": "undecided"}
VS_UNTRAINED = {
    "better": "better than untrained",
    "worse": "worse than untrained",
    "undecided": "no clear difference from untrained",
}
OF_RECORD = ("verdict", "best_arm", "best_value", "best_low", "best_high", "training_mark", "standing", "n_tasks",
             "n_seeds", "n_errors", "seconds", "spark")  # fmt: skip
"""Columns that only a record fills, but for `spark`."""
NOT_A_RECORD = (ValueError, TypeError, KeyError, AttributeError, IndexError)
"""What reading a record of another program may raise."""


def record_of(row: ExperimentRow) -> ExperimentRecord | None:
    """The experiment's record, typed; None where there is none, or none that can be understood."""
    if not row.record:
        return None
    try:
        return ExperimentRecord.model_validate(row.record)
    except NOT_A_RECORD:
        return None


def summarize(row: ExperimentRow, digest: Digest | None = None) -> None:
    """Set the summary columns of `row`. `digest`: of its record, where the caller has it."""
    try:
        _describe_setup(row, row.config)
        record = record_of(row)
        if record is not None:
            _summarize_record(row, record, digest or digest_of(row.record))
        else:
            row.metric = _metric_of(row.config)[:200]
            row.spark = _live_spark(row)
    except NOT_A_RECORD:
        return


def _describe_setup(row: ExperimentRow, config: dict[str, Any]) -> None:
    setup = setup_of(config if config.get("runs") or config.get("run") else {"run": config.get("base_run")})
    row.model, row.backend = setup.get("model", "")[:300], setup.get("backend", "")[:100]
    row.algorithm = setup.get("algorithm", "")[:100]


def _summarize_record(row: ExperimentRow, record: ExperimentRecord, digest: Digest) -> None:
    if record.config:
        _describe_setup(row, record.config)
    top = digest.top
    row.metric = (digest.metric or "")[:200]
    row.verdict = verdict_of(record)
    row.best_arm = (top.arm if top else "")[:300]
    row.best_value = top.mean if top else None
    row.best_low, row.best_high = (top.low, top.high) if top and top.mean is not None else (None, None)
    judged = next((found for found in record.verdict.arms if top and found.arm == top.arm), None)
    row.training_mark = top.training_mark[:200] if top else ""
    row.standing = standing_of(record, judged)[:200] if judged else ""
    row.n_tasks = judged.n_tasks or None if judged else None
    row.n_seeds = len(top.scores) or None if top else None
    row.n_arms, row.n_runs = len(digest.arms), len(record.runs)
    row.n_errors = sum(arm.n_errors for arm in digest.arms)
    row.seconds = digest.seconds
    if "cost_usd" not in row.field_times:  # what the experiment itself counted comes before this estimate
        row.cost_usd = cost_of(record)
    row.spark = _spark(row, record, digest, top)


def verdict_of(record: ExperimentRecord) -> str:
    """supported, refuted or undecided. Only a typed hypothesis can be supported or refuted: of one in words no
    program knows what it predicts, so that it is undecided or, where arms are distinguished, left to the reader."""
    outcome = record.hypothesis_result.get("outcome")
    if isinstance(outcome, str):
        return OUTCOMES.get(outcome, "")
    arms = record.verdict.arms
    compared = [arm.verdict for arm in arms if arm.verdict]
    if not compared:  # a single arm has only the untrained model beside it
        compared = [arm.vs_untrained.verdict for arm in arms if arm.vs_untrained and arm.vs_untrained.verdict]
    return "undecided" if compared and set(compared) == {"undecided"} else ""


def standing_of(record: ExperimentRecord, best: JudgedArm) -> str:
    """How sure it is that the arm with the best score won, in a few words; empty where nothing was compared."""
    if not any(arm.verdict for arm in record.verdict.arms):
        against = best.vs_untrained.verdict if best.vs_untrained else None
        return VS_UNTRAINED.get(against or "", "")
    if record.best_arm is None:
        why = (record.verdict.model_extra or {}).get("why_no_best")
        return why if isinstance(why, str) else "no arm is proven best"
    return "better than the baseline" if best.verdict == "better" else "all other arms are worse"


def cost_of(record: ExperimentRecord, *, rollouts_usd: float | None = None) -> float | None:
    """What hosted models charged, in dollars; None where nothing says. `rollouts_usd`: the sum over the journal."""
    searched = sum(float(run.metrics.get("cost_usd", 0.0)) for run in record.runs if not run.reused_from)
    budget = ((record.budget or {}).get("spent") or {}).get("usd")
    # A budget may or may not count what a prompt search paid: the larger of both never counts it twice.
    usd: list[object] = [one for one in (budget, (rollouts_usd or 0.0) + searched or None) if one is not None]
    spent = [float(one) for one in usd if isinstance(one, int | float)]
    models = [model.get("cost_usd") for model in record.models] if rollouts_usd is None else []
    found = [*([max(spent)] if spent else []), *(float(one) for one in models if isinstance(one, int | float))]
    return sum(found) if found else None


def _metric_of(config: dict[str, Any]) -> str:
    success = (config.get("metadata") or {}).get("success_metric")
    return str((success.get("name") if isinstance(success, dict) else success) or "")


def trend_values(spark: object) -> list[Any]:
    """The numbers of an experiment's small line."""
    found = spark.get("values") if isinstance(spark, dict) else spark  # a list: a row of an earlier version
    return found if isinstance(found, list) else []


def _trend(of: str, values: list[float]) -> dict[str, Any]:
    return {"of": of[:200], "values": values}


def _spark(row: ExperimentRow, record: ExperimentRecord, digest: Digest, top: ArmDigest | None) -> dict[str, Any]:
    """The success metric of the best arm over the steps at which it was scored; where it was scored once, its loss."""
    arm = top or next(iter(digest.arms), None)
    if arm is None:
        return {}
    runs = next((runs for found, runs in record.runs_of() if found.arm == arm.arm), [])
    keys = set(digest.measured)
    found = [
        (one.step, score.value)
        for run in runs
        for one in run.evals
        for score in one.scores
        if one.step is not None and score.value is not None and score_key(one.split, one.name, score.metric) in keys
    ]
    # A mean over seeds for each step; one point would be no line.
    scores = _means(found)
    return _trend(digest.metric or "score", scores) if len(scores) > 1 else _loss_spark(row, arm.arm)


def _means(found: Iterable[tuple[int, float]]) -> list[float]:
    by_step: dict[int, list[float]] = {}
    for step, value in found:
        by_step.setdefault(step, []).append(value)
    return thin([fmean(by_step[step]) for step in sorted(by_step)])


def thin(values: list[float]) -> list[float]:
    """At most `SPARK_POINTS` of the values, the first and last among them."""
    if len(values) <= SPARK_POINTS:
        return values
    last = len(values) - 1
    return [values[round(place * last / (SPARK_POINTS - 1))] for place in range(SPARK_POINTS)]


def _live_spark(row: ExperimentRow) -> dict[str, Any]:
    """Of an experiment without a record: what its evaluations say so far, else its loss."""
    evals = list(
        EvalRow.objects.filter(generation__experiment=row, step__isnull=False).only("split", "name", "metrics", "step")
    )
    keys = sorted({score_key(one.split, one.name, metric) for one in evals for metric in one.metrics})
    metric = _metric_of(row.config)
    try:
        wanted = set(resolve(metric, keys)) if metric else set(keys[:1])
    except AmbiguousName as exc:
        wanted = set(exc.keys)
    found = [
        (one.step, float(value))
        for one in evals
        for metric, value in one.metrics.items()
        if isinstance(value, int | float) and score_key(one.split, one.name, metric) in wanted
    ]
    scores = _means(found)
    return _trend(metric or ", ".join(sorted(wanted)), scores) if len(scores) > 1 else _loss_spark(row, None)


def _loss_spark(row: ExperimentRow, arm: str | None) -> dict[str, Any]:
    if row._state.adding:  # no row yet, so no curves
        return {}
    keys = MetricKey.objects.filter(generation__experiment=row, name="loss", n__gt=1)
    key = (keys.filter(generation__arm=arm) if arm else keys).order_by("generation__created").first()
    if key is None:
        return {}
    found = curve(key.pk, width=SPARK_POINTS * 4)
    return _trend("loss", thin([value for value in found.value if abs(value) < float("inf")]))
