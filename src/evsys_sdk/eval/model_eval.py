"""Evaluate a model on rows whose answer is one identifier: pass@k, by the very answer and by its aliases.

In: rows, aliases, and an `InferenceClient`. Out: `EvalArtifacts`, and with an output directory `predictions.jsonl`,
`retry_report.json`, `summary.md` and, last, `summary.json`. Every call is tried again when it fails; one that fails for
good is in the retry report and counts as an error, not as a wrong answer. Folding is `scoring`'s.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from evsys_sdk.concurrency import apause_before_retry, pause_before_retry, run_async
from evsys_sdk.errors import (
    BackendUnavailable,
    Cancelled,
    ConfigError,
    DataError,
    EvsysAuthError,
    EvsysError,
    MissingDependency,
)
from evsys_sdk.eval.aliases import DEFAULT_SYSTEM, LEVELS, AliasMatcher, Level, chat_messages, extract_predicted_slug
from evsys_sdk.eval.evaluate import evaluate
from evsys_sdk.eval.row_eval import RowQuestion, question_of
from evsys_sdk.eval.scoring import is_errored
from evsys_sdk.files import read_rows, reason, write_json, write_rows, write_text
from evsys_sdk.format import inline_markdown
from evsys_sdk.inference.base import Prompt
from evsys_sdk.protocols import FinishedRollouts, InferenceClient, Rollout, Row, Score, Turn
from evsys_sdk.redaction import redact
from evsys_sdk.registry import metrics
from evsys_sdk.rollout.client_model import answer_each, ask_text

# Calls that may fail: tried again with growing pauses, and reported when they fail for good.
#
# In: a call. Out: its result; or, once the tries are used up, an entry in a `RetryReport` and None in its place, so
# that one dead call does not end an evaluation of thousands. Without a report the last error is raised. What no
# second try can help (a refused key, a missing package, the user's stop) is raised at once. `BackendUnavailable` is
# not tried again: the client that raised it has tried several times already.


MAX_ATTEMPTS = 3
BASE_DELAY_SECONDS, MAX_DELAY_SECONDS = 0.5, 30.0
TRIED_ALREADY = (BackendUnavailable,)
"""A client that retries raised it when its own tries were used up; another layer of tries would multiply them."""
HOPELESS = (Cancelled, EvsysAuthError, MissingDependency, ConfigError, DataError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryFailure:
    """A call that failed for good."""

    key: str
    """What it was for, such as the row's id."""
    attempts: int
    error: str
    """Of the last try."""


@dataclass(slots=True)
class RetryReport:
    """How the calls of an evaluation went."""

    total_calls: int = 0
    total_retries: int = 0
    """Tries beyond the first."""
    failures: list[RetryFailure] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def total_failures(self) -> int:
        return len(self.failures)

    def add(self, attempts: int, failure: RetryFailure | None = None) -> None:
        """Note a call that took so many tries."""
        with self._lock:
            self.total_calls += 1
            self.total_retries += attempts - 1
            if failure is not None:
                self.failures.append(failure)

    def to_dict(self) -> dict[str, Any]:
        return {
            "total_calls": self.total_calls,
            "total_retries": self.total_retries,
            "total_failures": self.total_failures,
            "failures": [asdict(failure) for failure in self.failures],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RetryReport:
        failures = [RetryFailure(**failure) for failure in data["failures"]]
        return cls(data["total_calls"], data["total_retries"], failures)


async def acall_with_retry[T](
    call: Callable[[], Awaitable[T]],
    *,
    key: str = "",
    max_attempts: int = MAX_ATTEMPTS,
    report: RetryReport | None = None,
    base_delay_seconds: float = BASE_DELAY_SECONDS,
    max_delay_seconds: float = MAX_DELAY_SECONDS,
    sleep: Callable[[float], Awaitable[None]] = apause_before_retry,
) -> T | None:
    """The result of `call`, after at most `max_attempts` tries; the pause doubles from one to the next."""
    if max_attempts < 1:
        raise EvsysError(f"max_attempts is at least 1, not {max_attempts}")
    for attempt in range(1, max_attempts + 1):
        try:
            result = await call()
        except HOPELESS:
            raise
        except Exception as exc:
            if attempt < max_attempts and not isinstance(exc, TRIED_ALREADY):
                await sleep(min(max_delay_seconds, base_delay_seconds * 2 ** (attempt - 1)))
                continue
            if report is None:
                raise
            error = str(exc) if isinstance(exc, EvsysError) else f"{type(exc).__name__}: {exc}"
            report.add(attempt, RetryFailure(key=key, attempts=attempt, error=error))
            return None
        if report is not None:
            report.add(attempt)
        return result
    raise AssertionError("the last try returns or raises")


def call_with_retry[T](
    call: Callable[[], T],
    *,
    key: str = "",
    max_attempts: int = MAX_ATTEMPTS,
    report: RetryReport | None = None,
    base_delay_seconds: float = BASE_DELAY_SECONDS,
    max_delay_seconds: float = MAX_DELAY_SECONDS,
    sleep: Callable[[float], None] = pause_before_retry,
) -> T | None:
    """`acall_with_retry` for a call that is not awaited."""

    async def acall() -> T:
        return call()

    async def pause(seconds: float) -> None:
        sleep(seconds)

    work = acall_with_retry(
        acall, key=key, max_attempts=max_attempts, report=report, base_delay_seconds=base_delay_seconds,
        max_delay_seconds=max_delay_seconds, sleep=pause,
    )  # fmt: skip
    try:
        work.send(None)  # needs no event loop: nothing in it ever waits, so the first step is the last
    except StopIteration as done:
        result: T | None = done.value
        return result
    raise AssertionError("the work has no point at which it could wait")


# What came of a model evaluation, as objects, as JSON and as markdown.
#
# In: scores and a retry report. Out: an `EvalSummary` that says how far each number can be believed, and
# `EvalArtifacts` that says where everything lies.


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
    on_training_rows: bool = False
    """Whether all rows are of those that the weights were trained on, as far as their run's record tells."""
    n_training_rows: int = 0
    """How many of the rows are."""

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
            "on_training_rows": self.on_training_rows,
            "n_training_rows": self.n_training_rows,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> EvalSummary:
        given = {name: data[name] for name in ("model", "n_rows", "num_samples", "n_unreadable", "seconds", "error")}
        scores = [Score(**score) for score in data["scores"]]
        marks = {name: data[name] for name in ("on_training_rows", "n_training_rows") if name in data}
        return cls(**given, **marks, scores=scores, retry_report=RetryReport.from_dict(data["retry_report"]))


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
    ]
    for one in summary.scores:
        value = "-" if one.value is None else f"{one.value:.4f}"
        interval = "-" if one.low is None or one.high is None else f"{one.low:.4f} to {one.high:.4f}"
        lines.append(f"| {one.metric} | {value} | {interval} | {one.n_tasks} | {one.n_rollouts} | {one.n_errors} |")
    if summary.on_training_rows or summary.n_training_rows:
        which = "" if summary.on_training_rows else f" ({summary.n_training_rows} of {summary.n_rows})"
        lines += ["", f"**Scored on training rows{which}:** it shows what was memorised, not learnt."]
    if summary.error:
        lines += ["", f"**No valid score:** {summary.error}"]
    if summary.n_unreadable:
        lines += ["", f"No answer could be read in {summary.n_unreadable} completions; they count as wrong."]
    report = summary.retry_report
    lines += [
        "",
        f"Calls: {report.total_calls}, tried again: {report.total_retries}, failed for good: {report.total_failures}.",
    ]
    lines += [
        f"- `{failure.key}` after {failure.attempts} tries: {' '.join(failure.error.split())}"
        for failure in report.failures[:SHOWN_FAILURES]
    ]
    more = report.total_failures - SHOWN_FAILURES
    lines += [f"- and {more} more"] if more > 0 else []
    return "\n".join(map(inline_markdown, lines)) + "\n"


AskSample = Callable[[Prompt, int], Awaitable[str]]
"""The answer to a prompt, for the sample of that number."""
PREFIXES: dict[Level, str] = {"exact": "exact", "alias": "alias", "secondary": "secondary_alias"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEvalConfig:
    """How a model is asked."""

    max_tokens: int = 256
    temperature: float = 0.0
    num_samples: int = 1
    """Answers per row; with more than one, pass@k is reported for k = 1 and k = num_samples."""
    max_attempts: int = MAX_ATTEMPTS
    """Tries per call."""
    batch_size: int = 16
    """Calls under way at once."""
    stop: tuple[str, ...] = ()
    model_name: str = "model"
    """What the summary calls the model."""
    extract: Callable[[str], str | None] = extract_predicted_slug
    """Reads the answer from a completion."""
    sleep: Callable[[float], Awaitable[None]] = field(default=apause_before_retry, repr=False)

    def __post_init__(self) -> None:
        for name in ("max_tokens", "num_samples", "max_attempts", "batch_size"):
            if getattr(self, name) < 1:
                raise EvsysError(f"{name} is at least 1, not {getattr(self, name)}")


def load_eval_dataset(path: str | Path, *, system: str | None = DEFAULT_SYSTEM) -> list[Row]:
    """The rows of a JSONL file (or of a JSON list), each with a question and an answer.

    A row with `messages`, `prompt` or `inputs` is asked as it stands; one with only a `query` is put behind `system`.
    The answer is `tool_slug` or `answer`, else the target message, else `expected`.
    """

    def convert(row: Row) -> Row:
        if isinstance(row.get("query"), str) and not any(row.get(key) for key in ("prompt", "messages", "inputs")):
            row = {**row, "prompt": chat_messages(row["query"], system)}
        question_of(row, 0)  # refuses a row without a question or an answer
        return row

    if str(path).endswith(".json"):
        try:
            listed = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            raise DataError(f"{path}: {getattr(exc, 'strerror', None) or reason(exc)}") from exc
        if not isinstance(listed, list) or not all(isinstance(row, dict) for row in listed):
            raise DataError(f"{path}: expected a list of objects")
        rows = [convert(row) for row in listed]
    else:
        rows = list(read_rows(path, convert))
    if not rows:
        raise DataError(f"{path} has no rows")
    return rows


def evaluate_model(
    client: InferenceClient,
    rows: Sequence[Row] | str | Path,
    *,
    matcher: AliasMatcher | None = None,
    output_dir: str | Path | None = None,
    config: ModelEvalConfig | None = None,
    finished: FinishedRollouts | None = None,
) -> EvalArtifacts:
    """Score an `InferenceClient` on rows, or on the dataset at a path.

    With `finished`, answers that an interrupted evaluation got are not asked for again.
    """
    return run_async(
        aevaluate_model(client, rows, matcher=matcher, output_dir=output_dir, config=config, finished=finished)
    )


async def aevaluate_model(
    client: InferenceClient,
    rows: Sequence[Row] | str | Path,
    *,
    matcher: AliasMatcher | None = None,
    output_dir: str | Path | None = None,
    config: ModelEvalConfig | None = None,
    finished: FinishedRollouts | None = None,
) -> EvalArtifacts:
    """`evaluate_model` for callers that have an event loop."""
    cfg = config or ModelEvalConfig()

    async def ask(prompt: Prompt, sample: int) -> str:
        stop = list(cfg.stop) or None
        return await ask_text(client, prompt, max_tokens=cfg.max_tokens, temperature=cfg.temperature, stop=stop)

    try:
        return await evaluate_answers(ask, rows, matcher=matcher, output_dir=output_dir, config=cfg, finished=finished)
    finally:
        if callable(close := getattr(client, "aclose", None)):
            await close()


async def evaluate_answers(
    ask: AskSample,
    rows: Sequence[Row] | str | Path,
    *,
    matcher: AliasMatcher | None = None,
    output_dir: str | Path | None = None,
    config: ModelEvalConfig | None = None,
    finished: FinishedRollouts | None = None,
    clock: Callable[[], float] = time.monotonic,
    on_training_rows: bool = False,
    n_training_rows: int = 0,
) -> EvalArtifacts:
    """Score anything that answers; `ask` gets the number of the sample, so that samples can differ by seed."""
    cfg, matcher = config or ModelEvalConfig(), matcher or AliasMatcher()
    loaded = load_eval_dataset(rows) if isinstance(rows, str | Path) else rows
    if not loaded:
        raise DataError("there are no rows to evaluate on")
    questions = [question_of(row, index) for index, row in enumerate(loaded)]
    seen = Counter(question.task_id for question in questions)
    questions = [
        one if seen[one.task_id] == 1 else replace(one, task_id=f"{one.task_id} (row {index})")
        for index, one in enumerate(questions)
    ]
    levels = [
        (f"{PREFIXES[level]}_pass@{k}", LevelPass(level, k))
        for level in (LEVELS if matcher.has_secondary else LEVELS[:2])
        for k in dict.fromkeys((1, cfg.num_samples))
    ]
    result = await evaluate(
        AliasModel(ask=ask, matcher=matcher, cfg=cfg, clock=clock),
        questions,
        levels,
        name=cfg.model_name,
        split="eval",
        num_samples=cfg.num_samples,
        finished=finished,
        clock=clock,
    )
    report = RetryReport()  # of the whole evaluation, also of what an earlier process asked
    for rollout in result.rollouts:
        attempts, error = rollout.metadata["attempts"], rollout.error or rollout.status
        failed = RetryFailure(key=rollout.task_id, attempts=attempts, error=error) if rollout.status != "ok" else None
        report.add(attempts, failed)
    summary = EvalSummary(
        model=cfg.model_name,
        n_rows=len(questions),
        num_samples=cfg.num_samples,
        scores=result.scores,
        n_unreadable=sum(r.status == "ok" and r.metadata["predicted"] is None for r in result.rollouts),
        retry_report=report,
        seconds=result.seconds,
        error=result.error,
        on_training_rows=on_training_rows,
        n_training_rows=n_training_rows,
    )
    folder = None if output_dir is None else Path(output_dir)
    if folder is not None:  # the summary last: where it is, everything is
        write_rows(folder / PREDICTIONS_FILE, map(_to_prediction, result.rollouts), record=True)
        write_json(folder / RETRY_FILE, report.to_dict())
        write_text(folder / MARKDOWN_FILE, format_summary_markdown(summary, title=f"Evaluation of {summary.model}"))
        write_json(folder / SUMMARY_FILE, summary.to_dict())
    return EvalArtifacts(summary=summary, rollouts=result.rollouts, output_dir=folder)


@dataclass(frozen=True, slots=True)
class LevelPass:
    """pass@k where an answer passes that matches at this level or more strictly."""

    level: Level
    k: int

    def compute(self, *, rollouts: Sequence[Sequence[Rollout]]) -> float:
        counted = LEVELS[: LEVELS.index(self.level) + 1]
        passed = [
            [float(not is_errored(one) and one.metadata["match"] in counted) for one in group] for group in rollouts
        ]
        return float(metrics.build(f"pass@{self.k}", {}).compute(passed))


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasModel:
    """Something that answers rows whose answer is one identifier; the reward is 1 for it or a verified alias."""

    ask: AskSample
    matcher: AliasMatcher
    cfg: ModelEvalConfig
    clock: Callable[[], float]

    async def roll_out(
        self, tasks: Sequence[RowQuestion], *, num_samples: int = 1, finished: FinishedRollouts | None = None
    ) -> list[list[Rollout]]:
        groups = await answer_each(
            tasks, self._answer, num_samples=num_samples, concurrency=self.cfg.batch_size, finished=finished
        )
        # Matched here and not when it is answered: other aliases do not need another answer.
        return [
            [self._match(rollout, question) for rollout in group] for question, group in zip(tasks, groups, strict=True)
        ]

    async def _answer(self, question: RowQuestion, sample: int) -> Rollout:
        started, report = self.clock(), RetryReport()
        text = await acall_with_retry(
            lambda: self.ask(question.prompt, sample),
            key=question.task_id,
            max_attempts=self.cfg.max_attempts,
            report=report,
            sleep=self.cfg.sleep,
        )
        return Rollout(
            task_id=question.task_id,
            turns=[] if text is None else [Turn(prompt_tokens=[], completion_tokens=[], logprobs=[], text=text)],
            status="infra_error" if report.failures else "ok",
            error=report.failures[0].error if report.failures else None,
            seconds=self.clock() - started,
            metadata={
                "sample": sample,
                "attempts": 1 + report.total_retries,
                "prompt": question.prompt,
                "target": question.target,
            },
        )

    def _match(self, rollout: Rollout, question: RowQuestion) -> Rollout:
        """The rollout with the answer that was read in it, and how it matches."""
        if rollout.status != "ok":
            return replace(rollout, metadata={**rollout.metadata, "predicted": None, "match": None})
        predicted = self.cfg.extract(rollout.completion)
        found = self.matcher.match(predicted, question.target)
        reward = float(found in ("exact", "alias"))
        return replace(rollout, reward=reward, metadata={**rollout.metadata, "predicted": predicted, "match": found})


def _to_prediction(rollout: Rollout) -> dict[str, object]:
    return {
        "id": rollout.task_id,
        **{key: rollout.metadata.get(key) for key in ("sample", "prompt", "target", "predicted", "match")},
        "correct": None if rollout.reward is None else bool(rollout.reward),
        "completion": rollout.completion,
        "status": rollout.status,
        "error": rollout.error and redact(rollout.error),
        "attempts": rollout.metadata.get("attempts"),
        "seconds": round(rollout.seconds, 3),
    }
