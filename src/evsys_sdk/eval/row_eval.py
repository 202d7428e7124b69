"""The evaluation of `run.eval`: ask the trained model each row's question and compare with the row's own answer.

In: rows of any known shape, metrics, and something that answers prompts. Out: an `EvalResult` named `eval`. Rows with a
verifier are judged by it; all others by comparison with their target. Folding is `scoring`'s, as for benchmarks.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from evsys_sdk.answers import answer_in, same_answer, wanted_answer
from evsys_sdk.constants import VERIFIER_SECONDS
from evsys_sdk.data_types import Columns, Content, HarborTask, InProcessVerifier, detect_format, from_dict
from evsys_sdk.errors import BackendError, Cancelled, DataError, EvsysError, error_boundary, shorten
from evsys_sdk.eval.evaluate import evaluate
from evsys_sdk.eval.scoring import NamedMetric
from evsys_sdk.inference.base import Completion, Prompt
from evsys_sdk.protocols import EvalResult, FinishedRollouts, InferenceClient, Rollout, RolloutStatus, Row
from evsys_sdk.registry import verifiers
from evsys_sdk.rollout.client_model import answer_each, call_generate, shortest, with_answer

Ask = Callable[[Prompt], Awaitable[str]]

CONCURRENCY = 16
_DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RowQuestion:
    """One row as an `EvalTask`, ready to be asked."""

    task_id: str
    prompt: Prompt
    target: object
    verifier: InProcessVerifier | None = None
    instruction: Content | None = None
    """What the verifier gets as the prompt."""
    metadata: Columns = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowModel:
    """A client that answers rows: graded by the row's verifier, else by comparison with the row's own answer."""

    ask: Callable[[Prompt], Awaitable[Completion]]
    concurrency: int
    clock: Callable[[], float] = time.monotonic

    async def roll_out(
        self, tasks: Sequence[RowQuestion], *, num_samples: int = 1, finished: FinishedRollouts | None = None
    ) -> list[list[Rollout]]:
        return await answer_each(
            tasks, self._answer, num_samples=num_samples, concurrency=self.concurrency, finished=finished
        )

    async def _answer(self, question: RowQuestion, sample: int) -> Rollout:
        started, plan = self.clock(), question.verifier
        about = {"prompt": question.prompt, "target": question.target}
        rollout = Rollout(task_id=question.task_id, metadata=about)
        reward, error = None, None
        try:
            # Clients and verifiers are the user's code: what they raise becomes this row's error, and the others go
            # their way.
            with error_boundary(BackendError, f"inference on {question.task_id}"):
                answer = await self.ask(question.prompt)
                text: object = answer.text
            if not isinstance(text, str):
                raise BackendError(f"inference on {question.task_id} returned {type(text).__name__}, not text")
            rollout = with_answer(rollout, answer)
            rollout.metadata["prediction"] = answer_in(text)
            if plan is None:
                reward = float(same_answer(text, question.target))
            else:
                verdict = await verifiers.adapted(plan.fn_name).judge_within(
                    VERIFIER_SECONDS,
                    text,
                    plan.expected,
                    plan.params,
                    prompt=question.instruction,
                    task_id=question.task_id,
                )
                reward = float(verdict.reward)
        except Cancelled:
            raise
        except EvsysError as exc:
            error = str(exc)
        status: RolloutStatus = "infra_error" if error else "ok"
        return replace(rollout, reward=reward, status=status, error=error, seconds=self.clock() - started)


async def score_rows(
    rows: Sequence[Row],
    *,
    metrics: Sequence[NamedMetric],
    client: InferenceClient,
    limit: int | None = None,
    concurrency: int = CONCURRENCY,
    finished: Callable[[str], FinishedRollouts] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> EvalResult:
    """Scores of `client`'s answers to the first `limit` rows; a row that cannot be asked is refused before any is.

    `finished` gives, for the hash of the questions, those that were answered before an interruption."""
    # All questions before any answer: a row without a target is found before money is spent.
    questions = [question_of(row, index) for index, row in enumerate(rows[:limit])]
    done = None
    if finished:  # the same hash for the same questions, answers and verifiers
        text = json.dumps([asdict(one) for one in questions], default=repr)
        # By content and not by position: a row that was changed between two attempts is asked again.
        done = finished(hashlib.sha256(text.encode()).hexdigest())
    model = RowModel(ask=_completer(client), concurrency=concurrency, clock=clock)
    return await evaluate(model, questions, metrics, name="eval", split="eval", finished=done, clock=clock)


def asker(client: InferenceClient) -> Ask:
    """How to ask an InferenceClient: by its `agenerate`, else by its `generate`, in a thread unless that is async."""
    agenerate = getattr(client, "agenerate", None)
    if callable(agenerate):
        return lambda prompt: agenerate(prompt=prompt)
    settings = getattr(client, "cfg", None)
    return partial(
        call_generate,
        client.generate,
        max_tokens=getattr(settings, "max_tokens", _DEFAULT_MAX_TOKENS),
        temperature=getattr(settings, "temperature", 0.0),
        stop=getattr(settings, "stop", None),
    )


def _completer(client: InferenceClient) -> Callable[[Prompt], Awaitable[Completion]]:
    """As `asker`, with what the answer took where the client tells: all of ours do, by `acomplete`."""
    acomplete = getattr(client, "acomplete", None)
    if callable(acomplete):
        return lambda prompt: acomplete(prompt=prompt)
    ask = asker(client)

    async def complete(prompt: Prompt) -> Completion:
        return Completion(text=await ask(prompt))

    return complete


def question_of(row: Row, index: int) -> RowQuestion:
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
    own = next((row[key] for key in ("id", "task_id") if row.get(key) is not None), None)
    name = f"row {index}" if own is None else f"row {index} ({own})"
    return RowQuestion(task_id=name, prompt=prompt, target=target)


def _task_question(row: Row, index: int) -> RowQuestion:
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
    return RowQuestion(
        task_id=task.task_id,
        prompt=prompt,
        target=task.verifier.expected,
        verifier=task.verifier,
        instruction=task.instruction,
    )


def prompt_of(row: Row) -> Prompt | None:
    """What is put to the model: `prompt`, else the chat before its target, else the inputs."""
    if row.get("prompt"):
        prompt: Prompt = row["prompt"]
        return prompt
    messages = row.get("messages")
    if isinstance(messages, list):
        last = messages[-1] if messages else {}
        # With `target_assistant` an assistant message at the end is an earlier turn, unless it is that very target.
        is_answer = last.get("role") == "assistant" and row.get("target_assistant") in (None, last.get("content"))
        before = messages[:-1] if is_answer else messages
        return shortest(before) if before else None
    inputs = row.get("inputs")
    if isinstance(inputs, dict) and inputs:
        lines = [f"{key}: {value}" for key, value in inputs.items()]
        return "\n".join(lines) if len(lines) > 1 else str(*inputs.values())
    return None


def target_of(row: Row) -> object:
    """The answer in a row: `tool_slug` or `answer` (with `toolkit`), else the assistant's words, else `expected`."""
    # Where both have it, the row's own column counts.
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


EVAL_DATA = "eval.eval_data"
"""What the leakage audit calls the rows of `run.eval`."""
