"""One way to grade: whatever kind of verifier a task carries, `grade` awaits its verdict.

In: a task and what the model wrote. Out: a `VerificationResult`, or `VerifierFailed`: never a 0 for a verifier that
broke. Only here the three plans of a task (`in_process`, `llm_judge`, `e2b`) become names in the verifier registry.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from evsys_sdk.answers import answer_in, parsed_json, wanted_answer
from evsys_sdk.config.base import JsonDict
from evsys_sdk.data_types import E2BVerifier, HarborTask, InProcessVerifier, VerifierPayload
from evsys_sdk.errors import READABLE, VerifierFailed, shorten
from evsys_sdk.patterns import matches_nothing
from evsys_sdk.protocols import VerificationResult
from evsys_sdk.registry import verifiers
from evsys_sdk.verifiers.adapt import AdaptedVerifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A task's verifier as a name in the registry, with what it is called with."""

    name: str
    expected: object
    params: JsonDict


async def grade(
    task: HarborTask, completion: str, *, prompt: object = None, seconds: float = math.inf
) -> VerificationResult:
    """How good is this completion of this task? `prompt` is what was asked, where that is not the task's instruction.

    Built-in functions answer at once; your own, judges and sandboxes let other rollouts proceed meanwhile and may be
    cancelled. One that takes longer than `seconds` has failed.
    """
    plan = plan_of(task.verifier)
    asked = task.instruction if prompt is None else prompt
    adapted: AdaptedVerifier = verifiers.adapted(plan.name)
    if seconds == math.inf:
        return await adapted.ajudge(completion, plan.expected, plan.params, prompt=asked, task_id=task.task_id)
    return await adapted.judge_within(
        seconds, completion, plan.expected, plan.params, prompt=asked, task_id=task.task_id
    )


def plan_of(verifier: VerifierPayload) -> Plan:
    """Which registered verifier carries out this plan, and with what."""
    if isinstance(verifier, InProcessVerifier):
        return Plan(name=verifier.fn_name, expected=verifier.expected, params=verifier.params)
    if isinstance(verifier, E2BVerifier):
        names: tuple[str, ...] = ("dockerfile", "test_sh", "test_state_py")
    else:
        names = ("judge_model", "rubric")
    return Plan(name=verifier.kind, expected=None, params={name: getattr(verifier, name) for name in names})


def verifier_names(plan: Plan) -> set[str]:
    """The verifiers that a plan names: its own, and the parts of `weighted`."""
    parts = plan.params.get("parts") if plan.name == "weighted" else None
    return {plan.name, *(str(part.get("fn_name")) for part in parts or [] if isinstance(part, dict))}


def grading_problem(task: HarborTask) -> str | None:
    """Why this task could not be graded here, or None: an unknown verifier, wrong params, no sandbox, no judge."""
    plan = plan_of(task.verifier)
    return missing_for(plan) or never_grades(plan)


def missing_for(plan: Plan) -> str | None:
    """Why this verifier cannot judge here, whatever is expected: it is not registered, its params do not fit, or it
    lacks a sandbox, a judge or a key."""
    try:
        return verifiers.adapted(plan.name).why_not(plan.params)
    except READABLE as exc:
        return str(exc)


_BLANK = "".join(filter(str.isspace, map(chr, range(0x3001)))) + "\u200b\u200c\u200d\u2060\ufeff"
"""White space, and characters that are not seen at all."""
COMPARING = ("exact_match", "contains", "regex_match", "json_match", "numeric_match", "tool_calls_match")
"""The built-in verifiers that compare with what is expected. They refuse a task of which that makes no sense whatever
the completion is, so that they can be asked beforehand."""


def never_grades(plan: Plan) -> str | None:
    """Why a built-in verifier can grade no completion of this task, or none as right: a pattern that does not compile
    or that no text matches, an `expected` that is missing, empty or NaN. None for a project's own verifiers, which
    are not called as a trial."""
    if plan.name == "weighted":
        parts = plan.params.get("parts")
        for part in parts if isinstance(parts, list) else []:
            name, expected = str(part.get("fn_name")), part.get("expected", plan.expected)
            why = never_grades(Plan(name=name, expected=expected, params=part.get("params") or {}))
            if why:
                return f"part {name!r} of verifier 'weighted': {why}"
        return None
    adapted: AdaptedVerifier = verifiers.adapted(plan.name)
    if plan.name not in (*COMPARING, "format_only") or adapted.is_aside:
        return None
    if plan.name in COMPARING:
        if _holds_nan(plan.expected):
            return f"verifier {plan.name!r}: `expected` holds NaN, which equals nothing, so no answer can pass"
        if _is_blank(plan.expected, plan.name) and not (plan.name == "regex_match" and plan.params.get("pattern")):
            return f"verifier {plan.name!r}: `expected` is empty, so no answer can pass"
    if plan.name in ("regex_match", "format_only"):
        pattern = plan.params.get("pattern") or (plan.expected if plan.name == "regex_match" else None)
        if isinstance(pattern, str) and matches_nothing(pattern, re.DOTALL):
            return (
                f"verifier {plan.name!r}: no text matches the pattern {shorten(pattern, 60)!r}, so no answer can pass"
            )
    try:
        adapted.judge("", plan.expected, plan.params)
    except VerifierFailed as exc:
        return str(exc)
    return None


def _holds_nan(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_nan, value.values()))
    if isinstance(value, list):
        return any(map(_holds_nan, value))
    return isinstance(value, float) and math.isnan(value)


def _is_blank(value: object, verifier: str) -> bool:
    """Whether nothing but spaces is left of `expected` when the verifier has taken the answer out of it; of a list, of
    no item. An empty list of calls, say, is an answer."""
    if verifier == "exact_match":
        value = wanted_answer(value)
        if isinstance(value, dict) and not any(item is not None for item in value.values()):
            return True  # `{answer: null}`: no answer is in it
    if isinstance(value, list):
        return bool(value) and all(_is_blank(item, verifier) for item in value)
    if isinstance(value, str):
        if verifier == "exact_match":
            value = answer_in(value)
        elif verifier == "json_match":
            # A model's answer is taken out of its tags first, so a text in which they are empty equals none.
            parsed = parsed_json(value)
            value = parsed if isinstance(parsed, str) else value if parsed is not None else answer_in(value)
        return not value.strip(_BLANK)
    return False


def grading_problems(tasks: Iterable[HarborTask]) -> list[str]:
    """One line per reason, at the first task that has it: for the check before a run."""
    first: dict[str, str] = {}
    for task in tasks:
        problem = grading_problem(task)
        if problem is not None:
            first.setdefault(problem, task.task_id)
    return [f"task {task_id!r}: {problem}" for problem, task_id in first.items()]
