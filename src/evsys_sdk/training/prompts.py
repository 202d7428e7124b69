"""Rows of any format become prompts that the model can be rolled out on.

In: rows: tasks, chats, or inputs with an expected output. Out: `Prompt`s: a task for the rollout engine, and the answer
that the row shows, where it shows one. RL takes its rewards from tasks, so it reads tasks alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from evsys_sdk.data_types import (
    ChatMessagesRow,
    HarborTask,
    InProcessVerifier,
    TargetFormat,
    TypedRow,
    content_text,
    from_dict,
    is_learnt,
    parse_rows,
    task_messages,
)
from evsys_sdk.errors import DataError
from evsys_sdk.registry import verifiers
from evsys_sdk.training_api import Messages

UNJUDGED = InProcessVerifier(fn_name="format_only")
"""A task must name a verifier; rows without a right answer get this one, and its reward is never read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Something to put to the model."""

    task: HarborTask
    answer: str | None = None
    """What the row says the model should answer."""
    judged: bool = True
    """Whether the reward of a rollout on this means anything."""

    @property
    def messages(self) -> Messages:
        return task_messages(self.task)

    @property
    def failing_reward(self) -> float:
        """What a rollout is worth in which the model broke its harness before it could be graded: what the task's
        verifier declares as its `failing_reward`, 0 where it declares none."""
        plan = self.task.verifier
        found: float = verifiers.adapted(
            plan.fn_name if isinstance(plan, InProcessVerifier) else plan.kind
        ).failing_reward
        return found


def read_tasks(rows: Any, algorithm: str) -> list[Prompt]:
    """The rows as tasks, or an error that says how to get some."""
    try:
        tasks = parse_rows(_some(rows), TargetFormat.HARBOR_TASK)
    except DataError as exc:
        raise DataError(f"{exc}\n{algorithm} needs tasks: add the transform to_harbor_task to data.transforms") from exc
    for task in tasks:
        if isinstance(task.verifier, InProcessVerifier):
            verifiers.get(task.verifier.fn_name)  # better now than as an error of every rollout
    return _distinct(Prompt(task=task, answer=_expected_answer(task)) for task in tasks)


def read_prompts(rows: Any, algorithm: str) -> list[Prompt]:
    """The rows as prompts, whichever of the three formats each has."""
    prompts = []
    for index, row in enumerate(_some(rows)):
        try:
            prompts.append(prompt_of(from_dict(row), index))
        except DataError as exc:
            raise DataError(
                f"row {index}: {exc}\n{algorithm} needs chats (jsonl_to_chat) or tasks (to_harbor_task)"
            ) from exc
    return _distinct(prompts)


def prompt_of(row: TypedRow, index: int) -> Prompt:
    """One row as a prompt; `index` names it where it has no id."""
    if isinstance(row, HarborTask):
        return Prompt(task=row, answer=row.metadata.get("demonstration") or _expected_answer(row))
    messages: Messages
    if isinstance(row, ChatMessagesRow):
        messages, answer = row.messages, row.target_assistant
        if messages[-1]["role"] == "assistant":  # the chat up to the assistant's last word, and that word
            if answer is None and is_learnt(messages[-1]):
                answer = content_text(messages[-1].get("content"))
            messages = messages[:-1]
    elif len(row.inputs) != 1:
        raise DataError(f"one input can be a prompt, not {len(row.inputs)}; put them into one text with jsonl_to_chat")
    else:
        messages = [{"role": "user", "content": str(next(iter(row.inputs.values())))}]
        answer = None if row.expected is None else str(row.expected)
    if not messages or messages[-1]["role"] != "user":
        raise DataError("the message before the answer must be the user's")
    *history, last = messages
    task = HarborTask(
        task_id=str(row.metadata.get("id", f"row-{index}")),
        instruction=last["content"],
        # The reward is for the logs alone: sdft and distill, which read such rows, learn from a teacher.
        verifier=UNJUDGED if answer is None else InProcessVerifier(fn_name="exact_match", expected=answer),
        metadata={"history": history} if history else {},
    )
    return Prompt(task=task, answer=answer, judged=answer is not None)


def _expected_answer(task: HarborTask) -> str | None:
    expected = task.verifier.expected if isinstance(task.verifier, InProcessVerifier) else None
    return expected if isinstance(expected, str) else None


def _some(rows: Any) -> list[Any]:
    rows = list(rows or [])
    if not rows:
        raise DataError("there are no training rows")
    return rows


def _distinct(prompts: Iterable[Prompt]) -> list[Prompt]:
    """A task that stands in the data twice gets two names: draws follow from names, and it is to be tried twice."""
    seen: Counter[str] = Counter()
    named = []
    for prompt in prompts:
        name = prompt.task.task_id
        seen[name] += 1
        again = name if seen[name] == 1 else f"{name}#{seen[name]}"
        named.append(replace(prompt, task=replace(prompt.task, task_id=again)))
    return named
