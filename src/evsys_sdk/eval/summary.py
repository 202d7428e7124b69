"""What came of a model evaluation, as objects, as JSON and as markdown.

In: scores and a retry report. Out: an `EvalSummary` that says how far each number can be believed, and `EvalArtifacts`
that says where everything lies.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evsys_sdk.eval.retry import RetryReport
from evsys_sdk.protocols import Rollout, Score

SHOWN_FAILURES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSummary:
    """The scores of one model on one dataset."""

    model: str
    n_rows: int
    num_samples: int
    """Answers per row."""
    scores: list[Score]
    """`exact_pass@1` counts the very answer; `alias_pass@1` also its verified aliases; `secondary_alias_pass@1`, where
    there are any, also the secondary ones."""
    n_unreadable: int = 0
    """Completions in which no answer could be found; they count as wrong."""
    retry_report: RetryReport = field(default_factory=RetryReport)
    seconds: float = 0.0
    error: str | None = None
    """Why there is no valid score, where there is none."""

    @property
    def metrics(self) -> dict[str, float | None]:
        """Name -> value."""
        return {score.metric: score.value for score in self.scores}

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "n_rows": self.n_rows,
            "num_samples": self.num_samples,
            "metrics": self.metrics,
            "scores": [asdict(score) for score in self.scores],
            "n_unreadable": self.n_unreadable,
            "retry_report": self.retry_report.to_dict(),
            "seconds": round(self.seconds, 3),
            "error": self.error,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> EvalSummary:
        given = {name: data[name] for name in ("model", "n_rows", "num_samples", "n_unreadable", "seconds", "error")}
        scores = [Score(**score) for score in data["scores"]]
        return cls(**given, scores=scores, retry_report=RetryReport.from_dict(data["retry_report"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalArtifacts:
    """An evaluation's result, and where its files are; without an output directory there are none."""

    summary: EvalSummary
    rollouts: list[Rollout] = field(default_factory=list)
    """Every answer, row by row."""
    output_dir: Path | None = None

    @property
    def summary_path(self) -> Path | None:
        return self._file(SUMMARY_FILE)

    @property
    def markdown_path(self) -> Path | None:
        return self._file(MARKDOWN_FILE)

    @property
    def predictions_path(self) -> Path | None:
        return self._file(PREDICTIONS_FILE)

    @property
    def retry_report_path(self) -> Path | None:
        return self._file(RETRY_FILE)

    def _file(self, name: str) -> Path | None:
        return None if self.output_dir is None else self.output_dir / name


SUMMARY_FILE, MARKDOWN_FILE = "summary.json", "summary.md"
PREDICTIONS_FILE, RETRY_FILE = "predictions.jsonl", "retry_report.json"


def format_summary_markdown(summary: EvalSummary, title: str = "Model evaluation") -> str:
    """The summary for people."""
    answers = f"{summary.num_samples} answer{'s' if summary.num_samples != 1 else ''} each"
    lines = [
        f"# {title}",
        "",
        f"Model `{summary.model}` on {summary.n_rows} rows, {answers}, in {summary.seconds:.1f} s.",
        "",
        "| metric | score | 95 % interval | rows | answers | errors |",
        "|---|---|---|---|---|---|",
        *map(_row, summary.scores),
    ]
    if summary.error:
        lines += ["", f"**No valid score:** {summary.error}"]
    if summary.n_unreadable:
        lines += ["", f"No answer could be read in {summary.n_unreadable} completions; they count as wrong."]
    return "\n".join([*lines, "", *_retries(summary.retry_report)]) + "\n"


def _row(score: Score) -> str:
    value = "-" if score.value is None else f"{score.value:.4f}"
    interval = "-" if score.low is None or score.high is None else f"{score.low:.4f} to {score.high:.4f}"
    return f"| {score.metric} | {value} | {interval} | {score.n_tasks} | {score.n_rollouts} | {score.n_errors} |"


def _retries(report: RetryReport) -> list[str]:
    lines = [
        f"Calls: {report.total_calls}, tried again: {report.total_retries}, failed for good: {report.total_failures}."
    ]
    lines += [
        f"- `{failure.key}` after {failure.attempts} tries: {' '.join(failure.error.split())}"
        for failure in report.failures[:SHOWN_FAILURES]
    ]
    more = report.total_failures - SHOWN_FAILURES
    return [*lines, f"- and {more} more"] if more > 0 else lines
