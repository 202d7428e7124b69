"""Evaluate a model on rows whose answer is one identifier: pass@k, by the very answer and by its aliases.

In: rows, aliases, and an `InferenceClient`. Out: `EvalArtifacts`, and with an output directory `predictions.jsonl`,
`retry_report.json`, `summary.md` and, last, `summary.json`. Every call is tried again when it fails; one that fails for
good is in the retry report and counts as an error, not as a wrong answer that somebody gave. Folding is `scoring`'s.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evsys_sdk.answers import wanted_answer
from evsys_sdk.asyncs import run_async
from evsys_sdk.atomic import write_json, write_text
from evsys_sdk.errors import DataError, EvsysError
from evsys_sdk.eval.aliases import LEVELS, AliasMatcher, Level
from evsys_sdk.eval.prompts import DEFAULT_SYSTEM, chat_messages, extract_predicted_slug
from evsys_sdk.eval.retry import MAX_ATTEMPTS, RetryReport, acall_with_retry
from evsys_sdk.eval.row_eval import Prompt, Question, ask_text, gathered, question_of
from evsys_sdk.eval.scoring import score_one, scores_of_task, why_invalid
from evsys_sdk.eval.summary import EvalArtifacts, EvalSummary, format_summary_markdown
from evsys_sdk.jsonl import read_rows, reason, write_rows
from evsys_sdk.protocols import FinishedRollouts, Rollout, Row, Score, TaskScores, Turn
from evsys_sdk.redaction import redact
from evsys_sdk.registry import metrics

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
    sleep: Callable[[float], Awaitable[None]] = field(default=asyncio.sleep, repr=False)

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
        asked = {**row, "prompt": chat_messages(row["query"], system)} if _is_query(row) else row
        question_of(asked, 0)
        return asked

    rows = list(read_rows(path, convert)) if not str(path).endswith(".json") else [*map(convert, _json_list(path))]
    if not rows:
        raise DataError(f"{path} has no rows")
    return rows


def _is_query(row: Row) -> bool:
    return isinstance(row.get("query"), str) and not any(row.get(key) for key in ("prompt", "messages", "inputs"))


def _json_list(path: str | Path) -> list[Row]:
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise DataError(f"{path}: {getattr(exc, 'strerror', None) or reason(exc)}") from exc
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: expected a list of objects")
    return rows


def evaluate_model(
    client: Any,
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
    client: Any,
    rows: Sequence[Row] | str | Path,
    *,
    matcher: AliasMatcher | None = None,
    output_dir: str | Path | None = None,
    config: ModelEvalConfig | None = None,
    finished: FinishedRollouts | None = None,
) -> EvalArtifacts:
    """The same, awaited."""
    cfg = config or ModelEvalConfig()

    async def ask(prompt: Prompt, sample: int) -> str:
        stop = list(cfg.stop) or None
        return await ask_text(client, prompt, max_tokens=cfg.max_tokens, temperature=cfg.temperature, stop=stop)

    try:
        return await evaluate_answers(ask, rows, matcher=matcher, output_dir=output_dir, config=cfg, finished=finished)
    finally:
        if callable(getattr(client, "aclose", None)):
            await client.aclose()


async def evaluate_answers(
    ask: AskSample,
    rows: Sequence[Row] | str | Path,
    *,
    matcher: AliasMatcher | None = None,
    output_dir: str | Path | None = None,
    config: ModelEvalConfig | None = None,
    finished: FinishedRollouts | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> EvalArtifacts:
    """The same for anything that answers; `ask` is told which sample it is, so that samples can differ by seed."""
    cfg, matcher, started = config or ModelEvalConfig(), matcher or AliasMatcher(), clock()
    loaded = load_eval_dataset(rows) if isinstance(rows, str | Path) else rows
    questions = _questions(loaded)
    report = RetryReport()
    groups = await _answers(questions, ask, cfg, report, finished, clock)
    marked = [
        [_marked(rollout, question, matcher, cfg) for rollout in group]
        for question, group in zip(questions, groups, strict=True)
    ]
    everything = [rollout for group in marked for rollout in group]
    summary = EvalSummary(
        model=cfg.model_name,
        n_rows=len(questions),
        num_samples=cfg.num_samples,
        scores=_scores(questions, marked, matcher, cfg.num_samples),
        n_unreadable=sum(r.status == "ok" and r.metadata["predicted"] is None for r in everything),
        retry_report=report,
        seconds=clock() - started,
        error=why_invalid(_tasks(questions, marked, "alias"), everything),
    )
    folder = None if output_dir is None else Path(output_dir)
    return _write(EvalArtifacts(summary=summary, rollouts=everything, output_dir=folder))


def _questions(rows: Sequence[Row]) -> list[Question]:
    if not rows:
        raise DataError("there are no rows to evaluate on")
    questions = [question_of(row, index) for index, row in enumerate(rows)]
    seen = Counter(question.id for question in questions)
    return [
        question if seen[question.id] == 1 else replace(question, id=f"{question.id} (row {index})")
        for index, question in enumerate(questions)
    ]


async def _answers(
    questions: Sequence[Question],
    ask: AskSample,
    cfg: ModelEvalConfig,
    report: RetryReport,
    finished: FinishedRollouts | None,
    clock: Callable[[], float],
) -> list[list[Rollout]]:
    """Per question, an answer per sample."""
    slots = asyncio.Semaphore(cfg.batch_size)

    async def answer(question: Question, sample: int) -> Rollout:
        known = finished.find(question.id, sample) if finished is not None else None
        if known is not None:
            report.add(known.metadata["attempts"])  # the report is of the evaluation, not of this process
            return known
        async with slots:
            rollout = await _answer(question, sample, ask, cfg, report, clock)
            if finished is not None:
                finished.add(question.id, sample, rollout)
            return rollout

    each = cfg.num_samples
    made = await gathered([asyncio.ensure_future(answer(one, n)) for one in questions for n in range(each)])
    return [made[first : first + each] for first in range(0, len(made), each)]


async def _answer(
    question: Question,
    sample: int,
    ask: AskSample,
    cfg: ModelEvalConfig,
    report: RetryReport,
    clock: Callable[[], float],
) -> Rollout:
    started, own = clock(), RetryReport()

    text = await acall_with_retry(
        lambda: ask(question.prompt, sample),
        key=question.id,
        max_attempts=cfg.max_attempts,
        report=own,
        sleep=cfg.sleep,
    )
    failure = own.failures[0] if own.failures else None
    report.add(1 + own.total_retries, failure)
    turns = [] if text is None else [Turn(prompt_tokens=[], completion_tokens=[], logprobs=[], text=text)]
    return Rollout(
        task_id=question.id,
        turns=turns,
        status="infra_error" if failure else "ok",
        error=failure.error if failure else None,
        seconds=clock() - started,
        metadata={
            "sample": sample,
            "attempts": 1 + own.total_retries,
            "prompt": question.prompt,
            "target": question.target,
        },
    )


def _marked(rollout: Rollout, question: Question, matcher: AliasMatcher, cfg: ModelEvalConfig) -> Rollout:
    """With the answer that was read, and how it matches; the reward is 1 for the answer or a verified alias."""
    if rollout.status != "ok":
        return replace(rollout, metadata={**rollout.metadata, "predicted": None, "match": None})
    predicted = cfg.extract(rollout.completion)
    found = matcher.match(predicted, question.target)
    reward = float(found in ("exact", "alias"))
    return replace(rollout, reward=reward, metadata={**rollout.metadata, "predicted": predicted, "match": found})


def _scores(
    questions: Sequence[Question], groups: Sequence[Sequence[Rollout]], matcher: AliasMatcher, num_samples: int
) -> list[Score]:
    levels = LEVELS if matcher.has_secondary else LEVELS[:2]
    return [
        score_one(f"{PREFIXES[level]}_pass@{k}", metrics.build(f"pass@{k}", {}), _tasks(questions, groups, level))
        for level in levels
        for k in dict.fromkeys((1, num_samples))
    ]


def _tasks(questions: Sequence[Question], groups: Sequence[Sequence[Rollout]], level: Level) -> list[TaskScores]:
    """The rows with the rewards of one level: matches at it, or more strictly, count."""
    counted = LEVELS[: LEVELS.index(level) + 1]
    return [
        scores_of_task(
            question.id,
            [
                rollout
                if rollout.reward is None
                else replace(rollout, reward=float(rollout.metadata["match"] in counted))
                for rollout in group
            ],
            target=wanted_answer(question.target),
        )
        for question, group in zip(questions, groups, strict=True)
    ]


def _write(found: EvalArtifacts) -> EvalArtifacts:
    """The files, the summary last: where it is, everything is."""
    if found.output_dir is None:
        return found
    summary = found.summary
    assert found.predictions_path and found.retry_report_path and found.markdown_path and found.summary_path
    write_rows(found.predictions_path, map(_prediction, found.rollouts), record=True)
    write_json(found.retry_report_path, summary.retry_report.to_dict())
    write_text(found.markdown_path, format_summary_markdown(summary, title=f"Evaluation of {summary.model}"))
    write_json(found.summary_path, summary.to_dict())
    return found


def _prediction(rollout: Rollout) -> dict[str, Any]:
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
