"""The stress test of a suite's verifiers, also of those that look into an environment.

In: tasks. Out: `Findings`. A task whose verifier looks at an answer is stressed with answers. Where tests look at what
was done in an environment, answers say nothing: there harbor's own agents go in, one that does nothing and must not
pass, and one that carries out the task's own solution and must.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from evsys_sdk.data_types import HarborTask
from evsys_sdk.errors import EvsysError
from evsys_sdk.protocols import SANDBOX, AgentSpec, EnvironmentSpec, Rollout
from evsys_sdk.rollout.engine import RolloutEngine
from evsys_sdk.rollout.environment_checks import environment_problem, kind_problem
from evsys_sdk.rollout.lanes import LaneSettings
from evsys_sdk.surface import SamplingParams
from evsys_sdk.task_dirs import has_own_tests, task_directory
from evsys_sdk.verifiers.stress import ORACLE, Findings, Try, findings_of, tries_at

NULL = "null"
OF_HARBOR = {NULL: "nop", ORACLE: "oracle"}
"""Our agents' names, and what harbor calls those that do the same in an environment."""
BELONGS_TO_THE_MACHINE = ("environment", "setup")


async def try_verifiers(tasks: Sequence[HarborTask], *, concurrency: int = 32, environment: str = SANDBOX) -> Findings:
    """Can these tasks be passed without solving them, and does their solution pass?"""
    unusable = await asyncio.to_thread(kind_problem, environment)
    if unusable is not None:
        raise EvsysError(unusable)
    with_tests: list[HarborTask] = []
    tries = await tries_at([task for task in tasks if not has_own_tests(task)], concurrency=concurrency)
    for task in filter(has_own_tests, tasks):
        why = await asyncio.to_thread(environment_problem, task, environment)
        if why is None:
            with_tests.append(task)
        else:
            tries.append(Try(agent=NULL, task=task, reward=None, output="", not_run=why))
    if with_tests:
        settings = LaneSettings(environment=EnvironmentSpec(kind=environment))
        engine = RolloutEngine(concurrency=concurrency, settings=settings)
        tries += await _tries(NULL, with_tests, engine)
        tries += await _tries(ORACLE, [task for task in with_tests if _has_solution(task)], engine)
    return findings_of(tasks, tries)


def _has_solution(task: HarborTask) -> bool:
    folder = task_directory(task)
    return folder is not None and any(folder.rglob("solution/solve.*"))


async def _tries(agent: str, tasks: list[HarborTask], engine: RolloutEngine) -> list[Try]:
    nobody: Any = None  # neither agent asks a model
    groups = await engine.roll_out(
        tasks,
        sampler=nobody,
        renderer=nobody,
        sampling=SamplingParams(max_tokens=1),
        agent=AgentSpec(kind=OF_HARBOR[agent]),
    )
    return [_tried(agent, task, rollouts[0]) for task, rollouts in zip(tasks, groups, strict=True)]


def _tried(agent: str, task: HarborTask, rollout: Rollout) -> Try:
    done = "the task's own solution" if agent == ORACLE else "nothing"
    if rollout.error and rollout.error.startswith(tuple(f"the {phase}" for phase in BELONGS_TO_THE_MACHINE)):
        return Try(agent=agent, task=task, reward=None, output=done, not_run=rollout.error)
    error = rollout.error if rollout.reward is None else None
    return Try(agent=agent, task=task, reward=rollout.reward, output=done, error=error)
