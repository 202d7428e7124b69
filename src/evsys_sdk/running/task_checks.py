"""Whether tasks can be done and graded on this machine, before anything is spent on them.

In: a benchmark, or tasks to train on, each with its place. Out: sentences, each at the first task that has the problem:
a verifier that is not registered or whose params do not fit, no sandbox, no judge, no key, an environment that cannot
be made.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

from evsys_sdk.data_types import HarborTask
from evsys_sdk.eval.benchmark import Benchmark
from evsys_sdk.protocols import SANDBOX
from evsys_sdk.registry import verifiers
from evsys_sdk.rollout.environment_checks import environment_problem
from evsys_sdk.task_dirs import has_own_tests
from evsys_sdk.verifiers.grading import missing_for, never_grades, plan_of

SHOWN = 5
"""Reasons that are told; a suite that is wrong throughout is known by its first ones."""


def undoable(
    benchmark: Benchmark, *, limit: int | None = None, environment: str = SANDBOX, known_only: bool = False
) -> list[str]:
    """`tasks.jsonl:3: task 'a': ... (and 11 other tasks)` for each reason. `known_only`: nothing is said of verifiers
    that are not registered, because the project's code, which may bring them, was not run."""
    placed = list(zip(benchmark.tasks, benchmark.places, strict=True))[:limit]
    return undoable_tasks(placed, environment=environment, known_only=known_only)


def undoable_tasks(
    placed: Iterable[tuple[HarborTask, str]], *, environment: str = SANDBOX, known_only: bool = False
) -> list[str]:
    """Reasons against tasks from anywhere, each with its place."""
    known: dict[str, str | None] = {}
    first: dict[str, str] = {}
    count = Counter[str]()
    for task, place in placed:
        if known_only and plan_of(task.verifier).name not in verifiers.names():
            continue
        why = environment_problem(task, environment) or (None if has_own_tests(task) else _ungradable(task, known))
        if why is not None:
            count[why] += 1
            first.setdefault(why, f"{place}: task {task.task_id!r}")
    told = [f"{first[why]}: {why}{_others(count[why] - 1)}" for why in list(first)[:SHOWN]]
    return [*told, f"and {len(first) - SHOWN} more reasons"] if len(first) > SHOWN else told


def _ungradable(task: HarborTask, known: dict[str, str | None]) -> str | None:
    plan = plan_of(task.verifier)
    # Whether the verifier is there and its params fit is known for all tasks that have them; what is expected differs.
    key = json.dumps([plan.name, plan.params], sort_keys=True, default=repr)
    if key not in known:
        known[key] = missing_for(plan)
    return known[key] or never_grades(plan)


def _others(count: int) -> str:
    return "" if count == 0 else " (and another task)" if count == 1 else f" (and {count} other tasks)"
