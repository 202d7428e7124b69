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
from evsys_sdk.protocols import SANDBOX, AgentSpec, EnvironmentSpec
from evsys_sdk.rollout.engine import HarborRolloutEngine
from evsys_sdk.rollout.requirements import broken_tests, environment_problem, kind_problem
from evsys_sdk.rollout.task_dirs import has_own_tests, task_directory
from evsys_sdk.rollout.trial import TrialSettings
from evsys_sdk.training_api import SamplingParams
from evsys_sdk.verifiers.stress import ORACLE, StressReport, Try, findings_of, tries_at

NULL = "null"
OF_HARBOR = {NULL: "nop", ORACLE: "oracle"}
"""Our agents' names, and what harbor calls those that do the same in an environment."""
BELONGS_TO_THE_MACHINE = ("environment", "setup")


async def try_verifiers(
    tasks: Sequence[HarborTask], *, concurrency: int = 32, environment: str = SANDBOX
) -> StressReport:
    """Can these tasks be passed without solving them, and does their solution pass?"""
    unusable = await asyncio.to_thread(kind_problem, environment)
    if unusable is not None:
        raise EvsysError(unusable)
    with_tests: list[HarborTask] = []
    tries = await tries_at([task for task in tasks if not has_own_tests(task)], concurrency=concurrency)
    for task in filter(has_own_tests, tasks):
        folder = task_directory(task)
        broken = await asyncio.to_thread(broken_tests, folder) if folder is not None else None
        why = await asyncio.to_thread(environment_problem, task, environment)
        if broken is not None:
            tries.append(Try(agent=NULL, task=task, reward=None, output="", error=broken))
        elif why is None:
            with_tests.append(task)
        else:
            tries.append(Try(agent=NULL, task=task, reward=None, output="", not_run=why))
    if with_tests:
        settings = TrialSettings(environment=EnvironmentSpec(kind=environment))
        engine = HarborRolloutEngine(concurrency=concurrency, settings=settings)
        tries += await _tries(NULL, with_tests, engine)
        solved = [task for task in with_tests if (home := task_directory(task)) and any(home.rglob("solution/solve.*"))]
        tries += await _tries(ORACLE, solved, engine)
    return findings_of(tasks, tries)


async def _tries(agent: str, tasks: list[HarborTask], engine: HarborRolloutEngine) -> list[Try]:
    no_model: Any = None  # neither agent asks a model
    groups = await engine.roll_out(
        tasks,
        sampler=no_model,
        renderer=no_model,
        sampling=SamplingParams(max_tokens=1),
        agent=AgentSpec(kind=OF_HARBOR[agent]),
    )
    done = "the task's own solution" if agent == ORACLE else "nothing"
    tries = []
    for task, [rollout, *_] in zip(tasks, groups, strict=True):
        is_not_run = (rollout.error or "").startswith(tuple(f"the {phase}" for phase in BELONGS_TO_THE_MACHINE))
        tries.append(
            Try(
                agent=agent,
                task=task,
                reward=None if is_not_run else rollout.reward,
                output=done,
                error=rollout.error if rollout.reward is None and not is_not_run else None,
                not_run=rollout.error if is_not_run else None,
            )
        )
    return tries
