"""The evaluation of `run.eval`: ask the trained model each row's question and compare with the row's own answer.

In: rows of any known shape, metrics, and something that answers prompts. Out: an `EvalResult` named `eval`. Rows with a
verifier are judged by it; all others by comparison with their target. Folding is `scoring`'s, as for benchmarks.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evsys_sdk.answers import answer_in, same_answer, wanted_answer
from evsys_sdk.constants import VERIFIER_SECONDS
from evsys_sdk.data_types import HarborTask, InProcessVerifier, detect_format, from_dict
from evsys_sdk.errors import BackendError, Cancelled, DataError, EvsysError, blame, shorten
from evsys_sdk.eval.scoring import NamedMetric, score_all, scores_of_task, why_invalid
from evsys_sdk.protocols import EvalResult, FinishedRollouts, Rollout, Row, Turn
from evsys_sdk.registry import verifiers

Prompt = str | list[dict[str, Any]]
Ask = Callable[[Prompt], Awaitable[str]]

CONCURRENCY = 16
_DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One row, ready to be asked."""

    id: str
    prompt: Prompt
    target: Any
    verifier: InProcessVerifier | None = None
    instruction: Any = None
    """What the verifier is told the prompt was."""


async def score_rows(
    rows: Sequence[Row],
    *,
    metrics: Sequence[NamedMetric],
    client: Any,
    limit: int | None = None,
    concurrency: int = CONCURRENCY,
    finished: Callable[[str], FinishedRollouts] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> EvalResult:
    """Scores of `client`'s answers to the first `limit` rows; a row that cannot be asked is refused before any is.

    `finished` gives, for the hash of the questions, those that were answered before an interruption."""
    started = clock()
    questions = [question_of(row, index) for index, row in enumerate(rows[:limit])]
    ask, slots = asker(client), asyncio.Semaphore(concurrency)
    done = finished(_hash(questions)) if finished else None

    async def answer(question: Question) -> Rollout:
        known = done.find(question.id, 0) if done else None
        if known is not None:
            return known
        async with slots:
            rollout = await _answered(question, ask, clock)
        if done:
            done.add(question.id, 0, rollout)
        return rollout

    rollouts = await gathered([asyncio.ensure_future(answer(question)) for question in questions])
    tasks = [
        scores_of_task(question.id, [rollout], target=question.target)
        for question, rollout in zip(questions, rollouts, strict=True)
    ]
    return EvalResult(
        name="eval",
        split="eval",
        scores=score_all(metrics, tasks),
        rollouts=rollouts,
        error=why_invalid(tasks, rollouts),
        seconds=clock() - started,
    )


def _hash(questions: Sequence[Question]) -> str:
    """The same for the same questions, answers and verifiers."""
    return hashlib.sha256(json.dumps([asdict(one) for one in questions], default=repr).encode()).hexdigest()


async def gathered(jobs: list[asyncio.Future[Rollout]]) -> list[Rollout]:
    """The results in order; when one raises, the others end with it."""
    try:
        return list(await asyncio.gather(*jobs))
    except BaseException:  # cancelled: what is still under way must not go on behind our back
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        raise


def asker(client: Any) -> Ask:
    """How to ask an InferenceClient: by its `agenerate`, else by its `generate`, in a thread unless that is async."""
    if callable(getattr(client, "agenerate", None)):
        return lambda prompt: client.agenerate(prompt=prompt)
    settings = getattr(client, "cfg", None)
    options = {
        "max_tokens": getattr(settings, "max_tokens", _DEFAULT_MAX_TOKENS),
        "temperature": getattr(settings, "temperature", 0.0),
        "stop": getattr(settings, "stop", None),
    }
    if inspect.iscoroutinefunction(client.generate):
        return lambda prompt: client.generate(prompt=prompt, **options)
    return lambda prompt: asyncio.to_thread(client.generate, prompt=prompt, **options)


async def ask_text(
    client: Any, prompt: Prompt, *, max_tokens: int, temperature: float, stop: Sequence[str] | None = None
) -> str:
    """What an InferenceClient says to a prompt with these settings; in a thread unless it can be awaited."""
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "stop": stop}
    if callable(getattr(client, "agenerate", None)):
        text = await client.agenerate(prompt=prompt, **options)
    elif inspect.iscoroutinefunction(client.generate):
        text = await client.generate(prompt=prompt, **options)
    else:
        text = await asyncio.to_thread(client.generate, prompt=prompt, **options)
    if not isinstance(text, str):
        raise BackendError(f"the client returned {type(text).__name__}, not text")
    return text


async def _answered(question: Question, ask: Ask, clock: Callable[[], float]) -> Rollout:
    started = clock()
    text: str | None = None
    reward, error = None, None
    try:
        with blame(BackendError, f"inference on {question.id}"):
            text = await ask(question.prompt)
        if not isinstance(text, str):
            raise BackendError(f"inference on {question.id} returned {type(text).__name__}, not text")
        reward = await _reward(question, text)
    except Cancelled:
        raise
    except EvsysError as exc:
        error = str(exc)
    turns = [Turn(prompt_tokens=[], completion_tokens=[], logprobs=[], text=text)] if isinstance(text, str) else []
    return Rollout(
        task_id=question.id,
        turns=turns,
        reward=reward,
        status="infra_error" if error else "ok",
        error=error,
        seconds=clock() - started,
        metadata={"prompt": question.prompt, "target": question.target} | _prediction(text),
    )


def _prediction(text: Any) -> dict[str, str]:
    return {"prediction": answer_in(text)} if isinstance(text, str) else {}


async def _reward(question: Question, text: str) -> float:
    plan = question.verifier
    if plan is None:
        return float(same_answer(text, question.target))
    verdict = await verifiers.adapted(plan.fn_name).judge_within(
        VERIFIER_SECONDS, text, plan.expected, plan.params, prompt=question.instruction, task_id=question.id
    )
    return float(verdict.reward)


def question_of(row: Row, index: int) -> Question:
    """What to ask and what to expect, for a row of any known shape; a DataError names what is missing."""
    if detect_format(row) == "harbor_task":
        return _task_question(row, index)
    prompt, target = prompt_of(row), target_of(row)
    if prompt is None or wanted_answer(target) is None:
        what = "no prompt (`prompt`, `messages` or `inputs`)" if prompt is None else "no target"
        keys = shorten(", ".join(map(str, row)), 100)
        raise DataError(
            f"eval row {index} has {what}; it has: {keys}. A target is `tool_slug` or `answer`, `target_assistant`, "
            "a last assistant message, `expected` or `completion`"
        )
    return Question(id=_row_id(row, index), prompt=prompt, target=target)


def _task_question(row: Row, index: int) -> Question:
    try:
        task = from_dict(row)
    except DataError as exc:
        raise DataError(f"eval row {index}: {exc}") from exc
    assert isinstance(task, HarborTask)
    if not isinstance(task.verifier, InProcessVerifier):
        kind = task.verifier.kind
        raise DataError(f"eval row {index}: a verifier of kind {kind!r} cannot judge here; in_process can")
    system = task.metadata.get("system")
    before = [{"role": "system", "content": system}] if system else []
    prompt = shortest([*before, {"role": "user", "content": task.instruction}])
    return Question(
        id=task.task_id,
        prompt=prompt,
        target=task.verifier.expected,
        verifier=task.verifier,
        instruction=task.instruction,
    )


def _row_id(row: Row, index: int) -> str:
    own = next((row[key] for key in ("id", "task_id") if row.get(key) is not None), None)
    return f"row {index}" if own is None else f"row {index} ({own})"


def prompt_of(row: Row) -> Prompt | None:
    """What is put to the model: `prompt`, else the chat before its target, else the inputs."""
    if row.get("prompt"):
        prompt: Prompt = row["prompt"]
        return prompt
    messages = row.get("messages")
    if isinstance(messages, list):
        before = messages[:-1] if _answers_itself(row, messages) else messages
        return shortest(before) if before else None
    inputs = row.get("inputs")
    if isinstance(inputs, dict) and inputs:
        lines = [f"{key}: {value}" for key, value in inputs.items()]
        return "\n".join(lines) if len(lines) > 1 else str(*inputs.values())
    return None


def _answers_itself(row: Row, messages: list[Any]) -> bool:
    """Whether the last message is the answer, and not part of the question."""
    # With `target_assistant` an assistant message at the end would be an earlier turn, unless it is that very target.
    last = messages[-1] if messages else {}
    target = row.get("target_assistant")
    return last.get("role") == "assistant" and target in (None, last.get("content"))


def shortest(messages: list[dict[str, Any]]) -> Prompt:
    """A chat of one user text as just that text: what a client that knows no messages can take."""
    only = messages[0] if len(messages) == 1 else {}
    content = only.get("content")
    return content if only.get("role") == "user" and isinstance(content, str) else messages


def target_of(row: Row) -> Any:
    """The answer in a row: `tool_slug` or `answer` (with `toolkit`), else the assistant's words, else `expected`."""
    columns = {**(row.get("metadata") or {}), **row}
    for key in ("tool_slug", "answer"):
        if columns.get(key) is not None:
            toolkit = {"toolkit": columns["toolkit"]} if columns.get("toolkit") is not None else {}
            return {key: columns[key], **toolkit} if toolkit else columns[key]
    if row.get("target_assistant") is not None:
        return row["target_assistant"]
    messages = row.get("messages") or []
    if messages and messages[-1].get("role") == "assistant":
        return messages[-1].get("content")
    return next((row[key] for key in ("expected", "completion") if row.get(key) is not None), None)
