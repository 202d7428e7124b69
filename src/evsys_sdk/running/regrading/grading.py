"""The verdict of now on a rollout of then.

In: rollouts and the tasks they are graded by. Out: each before and after. A rollout that never came to an answer cannot
be graded and keeps its error; one whose old verifier broke can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace

from evsys_sdk.data_types import HarborTask
from evsys_sdk.errors import EvsysError
from evsys_sdk.protocols import Rollout
from evsys_sdk.rollout.lanes import STOPS, Limits
from evsys_sdk.task_dirs import has_own_tests
from evsys_sdk.verifiers.grading import grade, grading_problem, plan_of

Job = tuple[Rollout, HarborTask | None]
"""A rollout, and the task it is graded by where that is known."""
AGENT_GAVE_UP = "NonZeroAgentExitCodeError"
"""An agent that ends like this is graded for what it had done by then."""
GONE = "its tests look at the environment, which is gone; grade the answer with --verifier"


@dataclass(frozen=True, slots=True, kw_only=True)
class Regraded:
    """One rollout, before and after."""

    task: HarborTask
    old: Rollout
    new: Rollout

    @property
    def changed(self) -> bool:
        return self.old.reward != self.new.reward


def refuse_ungradable(tasks: Iterable[HarborTask]) -> None:
    """Refuse, before anything is graded, what cannot be: an unknown verifier, no sandbox, an environment long gone."""
    plans = {
        (plan.name, repr(plan.params), has_own_tests(task)): task for task in tasks for plan in [plan_of(task.verifier)]
    }
    problems: dict[str, str] = {}
    for (_, _, gone), task in plans.items():
        problem = GONE if gone else grading_problem(task)
        if problem is not None:
            problems.setdefault(problem, task.task_id)
    if problems:
        raise EvsysError("\n".join(f"task {task_id!r}: {problem}" for problem, task_id in problems.items()))


async def graded(jobs: list[Job], concurrency: int) -> tuple[list[Regraded], int]:
    """Every rollout whose task is known, graded; and how many others there are."""
    todo = [(index, rollout, task) for index, (rollout, task) in enumerate(jobs) if task is not None]
    done: dict[int, Regraded] = {}
    # Each takes the next one when it is through: a plain function then costs no task of its own.
    waiting = iter(todo)

    async def work() -> None:
        for index, rollout, task in waiting:
            done[index] = Regraded(task=task, old=rollout, new=await graded_anew(rollout, task))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(todo))):
            group.create_task(work())
    return [done[index] for index in sorted(done)], len(jobs) - len(todo)


def is_gradable(rollout: Rollout) -> bool:
    """Whether the model came to an answer: then only a verifier can have failed since."""
    about = rollout.metadata
    match rollout.status:
        case "cancelled":
            return False
        case "agent_error":
            return rollout.reward is not None or about.get("exception") == AGENT_GAVE_UP
        case "infra_error":
            in_lane, error = "lane" in about, rollout.error or ""
            return bool(rollout.turns) and (not in_lane or error.startswith("the verifier"))
    return True


def answer_of(rollout: Rollout) -> str:
    """What a verifier looks at: what the agent gave as its answer, else the model's last words."""
    told = rollout.metadata.get("answer")
    return told if isinstance(told, str) else rollout.completion


async def graded_anew(rollout: Rollout, task: HarborTask) -> Rollout:
    """The rollout with the verdict of now, or with the failure to reach one."""
    if not is_gradable(rollout):
        return rollout
    about = {key: value for key, value in rollout.metadata.items() if key != "verifier"}
    try:
        verdict = await grade(task, answer_of(rollout), seconds=Limits().of(task).verifier_seconds)
    except STOPS:
        raise
    except EvsysError as exc:
        return replace(rollout, reward=None, status="infra_error", error=str(exc), metadata=about)
    said = {"verifier": verdict.info} if verdict.info else {}
    healed = rollout.status == "infra_error"
    return replace(
        rollout,
        reward=verdict.reward,
        status="ok" if healed else rollout.status,
        error=None if healed else rollout.error,
        metadata={**about, **said},
    )
