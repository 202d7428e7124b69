"""One way to grade: whatever kind of verifier a task carries, `grade` awaits its verdict.

In: a task and what the model wrote. Out: a `VerificationResult`, or `VerifierFailed`: never a 0 for a verifier that
broke. Only here the three plans of a task (`in_process`, `llm_judge`, `e2b`) become names in the verifier registry: a
project that registers a verifier under such a name replaces it everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from evsys_sdk.data_types import E2BVerifier, HarborTask, InProcessVerifier, VerifierPayload
from evsys_sdk.errors import EvsysError
from evsys_sdk.protocols import VerificationResult
from evsys_sdk.registry import verifiers
from evsys_sdk.verifiers.adapt import AdaptedVerifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A task's verifier as a name in the registry, with what it is called with."""

    name: str
    expected: Any
    params: dict[str, Any]


async def grade(
    task: HarborTask, completion: str, *, prompt: Any = None, seconds: float = math.inf
) -> VerificationResult:
    """How good is this completion of this task? `prompt` is what was asked, where that is not the task's instruction.

    Built-in functions answer at once; your own, judges and sandboxes let other rollouts go on meanwhile and may be
    cancelled. One that takes longer than `seconds` has failed.
    """
    plan = plan_of(task.verifier)
    asked = task.instruction if prompt is None else prompt
    adapted: AdaptedVerifier = verifiers.adapted(plan.name)
    about: dict[str, Any] = {"prompt": asked, "task_id": task.task_id}
    if seconds < math.inf:
        return await adapted.judge_within(seconds, completion, plan.expected, plan.params, **about)
    return await adapted.ajudge(completion, plan.expected, plan.params, **about)


def plan_of(verifier: VerifierPayload) -> Plan:
    """Which registered verifier carries out this plan, and with what."""
    if isinstance(verifier, InProcessVerifier):
        return Plan(name=verifier.fn_name, expected=verifier.expected, params=verifier.params)
    if isinstance(verifier, E2BVerifier):
        names: tuple[str, ...] = ("dockerfile", "test_sh", "test_state_py")
    else:
        names = ("judge_model", "rubric")
    return Plan(name=verifier.kind, expected=None, params={name: getattr(verifier, name) for name in names})


def grading_problem(task: HarborTask) -> str | None:
    """Why this task could not be graded here, or None: an unknown verifier, wrong params, no sandbox, no judge."""
    plan = plan_of(task.verifier)
    try:
        return verifiers.adapted(plan.name).why_not(plan.params)
    except EvsysError as exc:
        return str(exc)


def grading_problems(tasks: Iterable[HarborTask]) -> list[str]:
    """One line per reason, at the first task that has it: for the check before a run."""
    first: dict[str, str] = {}
    for task in tasks:
        problem = grading_problem(task)
        if problem is not None:
            first.setdefault(problem, task.task_id)
    return [f"task {task_id!r}: {problem}" for problem, task_id in first.items()]
