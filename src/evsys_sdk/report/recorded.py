"""Facts of a page from a record on disk, or from one that a server has.

In: an `ExperimentRecord`, and where its file lies. Out: `PageFacts`, the conclusion and the verdict as they were
written: nothing is judged again. What a record of an older version does not have is left out.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from evsys_sdk.config.metadata import Metadata
from evsys_sdk.protocols import RunResult
from evsys_sdk.record.layout import stem_of
from evsys_sdk.record.models import ExperimentRecord, RecordedRun, RunRecord, Stored, from_data
from evsys_sdk.report.conclusion import ArmSummary, Conclusion, ModelScore, VerdictFindings
from evsys_sdk.report.page import PageFacts
from evsys_sdk.report.setup import setup_of
from evsys_sdk.stats.hypothesis import HypothesisResult
from evsys_sdk.stats.verdict import Verdict

SUCCESS = "metadata.success_metric"
"""A test selection by this setting is the success metric itself, of which the page says more."""
_VERDICT: TypeAdapter[Verdict] = TypeAdapter(Verdict)
_HYPOTHESIS: TypeAdapter[HypothesisResult] = TypeAdapter(HypothesisResult)


def recorded_verdict(record: ExperimentRecord) -> Verdict | None:
    """The verdict; None where the record has none, or one of a version that cannot be read."""
    try:
        return _VERDICT.validate_python(record.verdict.model_dump(exclude_unset=True))
    except ValidationError:
        return None


def recorded_hypothesis(record: ExperimentRecord) -> HypothesisResult | None:
    """What became of a typed hypothesis."""
    try:
        return _HYPOTHESIS.validate_python(record.hypothesis_result) if record.hypothesis_result else None
    except ValidationError:
        return None


def hypothesis_words(record: ExperimentRecord) -> str:
    """The hypothesis as text; of a typed one, its claim and what it predicts."""
    try:
        return str(Metadata.model_validate({"hypothesis": record.hypothesis or ""}).hypothesis or "")
    except ValidationError:
        return str(record.hypothesis or "")


def recorded_facts(record: ExperimentRecord, path: Path) -> PageFacts:
    """All that a page shows. `path`: the record's file; of a record without one, any path in an empty folder."""
    verdict = recorded_verdict(record)
    try:
        success = Metadata.model_validate(record.config.get("metadata") or {}).success_metric
    except ValidationError:
        success = None
    findings = VerdictFindings(
        best_arm=record.best_arm,
        verdict=verdict,
        hypothesis_result=recorded_hypothesis(record),
        hypothesis_in_words=record.hypothesis_in_words,
        looks=record.looks,
    )
    arms = [ArmSummary(**{name: getattr(arm, name) for name in ArmSummary.__dataclass_fields__}) for arm in record.arms]
    conclusion = Conclusion(
        arms=arms,
        best_arm=record.best_arm,
        text=record.conclusion,
        metric=verdict.metric if verdict else success.name if success else None,
        findings=findings,
        admitted=[str(one["text"]) for one in record.test_selection if one.get("by") != SUCCESS and "text" in one],
    )
    return PageFacts(
        name=record.experiment,
        file_name=stem_of(path),
        folder=path.parent,
        conclusion=conclusion,
        runs=[_run(run, path.parent) for _, runs in record.runs_of() for run in runs],
        seconds=record.seconds or 0.0,
        description=str(record.config.get("description") or record.description or ""),
        parent=record.parent_experiment_id,
        hypothesis=hypothesis_words(record),
        setup=setup_of(record.config),
        models=[found for one in record.models if (found := _model(one))],
        limits=(record.budget or {}).get("limits") or {},
        warnings=record.warnings,
    )


def _run(run: RecordedRun, folder: Path) -> RunResult:
    given = Path(run.run_dir or run.run_id)
    beside = folder / given.name  # wherever the record has been moved to
    place = beside if beside.is_dir() else given
    own = RunRecord.find(place) if place.is_dir() else None
    is_own = own is not None and own.run_id == run.run_id
    return RunResult(
        run_id=run.run_id,
        status=run.status,
        metrics=dict(run.metrics),
        artifacts=run.artifacts,
        error=run.error,
        evals=run.evals,
        run_dir=place if place.is_dir() else None,
        run_name=own.run if own and is_own else run.run_id.rpartition("/")[2],
        seed=own.seed if own and is_own else None,
        leakage=own.leakage if own and is_own else [],
        reused_from=run.reused_from,
    )


def _model(data: Stored) -> ModelScore | None:
    """A hosted model's score, from its summary in the record."""
    summary = {key: value for key, value in data.items() if key not in ("model", "cost_usd")}
    try:
        result = from_data({**summary, "rollouts": []})
    except (KeyError, TypeError):
        return None
    return ModelScore(model=str(data.get("model") or ""), result=result, stored_usd=data.get("cost_usd"))
