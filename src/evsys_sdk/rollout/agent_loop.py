"""In process: an agent's work on a task that needs no environment, over harbor's own types and in harbor's own order.

In: a `TrialJob`. Out: an `Outcome`. The phases, their time limits, what is graded after a failure, the order of events
and what is tried again are those of harbor's `Trial` (a test runs both side by side); what is left out is everything a
Trial does on disk. A task that needs more than that is refused by name.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.agents.installed.base import NonZeroAgentExitCodeError
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths
from harbor.trial.errors import AgentSetupTimeoutError, AgentTimeoutError, VerifierTimeoutError

from evsys_sdk.concurrency import within
from evsys_sdk.data_types import HarborTask, content_text
from evsys_sdk.errors import FOREIGN, BackendUnavailable, EvsysError
from evsys_sdk.protocols import VerificationResult
from evsys_sdk.rollout.task_dirs import needs_of
from evsys_sdk.rollout.trial import (
    STOPS,
    Outcome,
    Phase,
    Scratch,
    TrialFailure,
    TrialJob,
    cause_of_group,
    is_being_cancelled,
    is_retried,
    own_timeout,
    turns_of,
    usage_of,
)


def refusal(task: HarborTask) -> str | None:
    """What of this task the in-process loop does not do, by name; None when it can do it."""
    needs = needs_of(task)
    return f"task {task.task_id!r} needs what only a harbor Trial has: {', '.join(needs)}" if needs else None


async def run(job: TrialJob) -> Outcome:
    """The agent's work, begun again where that may help."""
    reason = refusal(job.task)
    if reason is not None:
        raise EvsysError(reason)
    for attempt in count(1):
        outcome = await _Try(job=job, attempt=attempt).run()
        if attempt > job.retry_policy.retries or not is_retried(outcome.failure):
            return outcome
        await job.retry_policy.wait_before(attempt - 1)
    raise AssertionError("count() has no end")


@dataclass(slots=True, kw_only=True)
class _Try:
    """One try; the fields fill up on the way."""

    job: TrialJob
    attempt: int
    phase: Phase = "constructor"
    context: AgentContext = field(default_factory=AgentContext)
    failure: TrialFailure | None = None
    verdict: VerificationResult | None = None

    async def run(self) -> Outcome:
        self.job.policy.begin_again()
        with _logs_dir() as logs_dir:
            await self._run(logs_dir)
        return self._outcome()

    async def _run(self, logs_dir: Path) -> None:
        try:
            agent = self._agent(logs_dir)
        except STOPS:
            raise
        except FOREIGN as exc:
            return self._note(exc)
        await self._emit("start")
        try:
            await self._phases(agent)
        except asyncio.CancelledError as exc:
            self._note(exc)
            await self._emit("cancel")
            # From outside: the rollout ends. An agent that raised CancelledError itself has a result, `cancelled`.
            if is_being_cancelled():
                raise
        except STOPS:
            raise
        except FOREIGN as exc:
            self._note(exc)
        finally:
            await self._emit("end")

    def _agent(self, logs_dir: Path) -> BaseAgent:
        made, policy = self.job.agent, self.job.policy
        agent = made.cls(logs_dir=logs_dir, model_name=made.model_name, **made.arguments(policy.name))
        agent.session_id = f"{policy.name}__agent"
        return agent

    async def _phases(self, agent: BaseAgent) -> None:
        limits = self.job.settings.limits.of(self.job.task)
        self.phase = "environment"
        await self._emit("environment-start")
        self.phase = "setup"
        await _within(
            agent.setup(environment=no_environment()), limits.setup_seconds, AgentSetupTimeoutError, "Agent setup"
        )
        self.phase = "agent"
        try:
            await self._act(agent, limits.agent_seconds)
        except (AgentTimeoutError, NonZeroAgentExitCodeError) as exc:
            self._note(exc)  # what it had done by then can be graded
        finally:
            # harbor's rule (`AgentContext.is_empty`): an agent that has reported anything itself is not asked to.
            if all(getattr(self.context, name) is None for name in type(self.context).model_fields):
                agent.populate_context_post_run(self.context)
        self.phase = "verifier"
        await self._emit("verification-start")
        self.verdict = await _within(self._grade(), limits.verifier_seconds, VerifierTimeoutError, "Verifier execution")

    async def _act(self, agent: BaseAgent, seconds: float) -> None:
        await self._emit("agent-start")
        policy, asked = self.job.policy, content_text(self.job.task.instruction)
        try:
            work = agent.run(instruction=asked, environment=no_environment(), context=self.context)
            await _within(work, seconds, AgentTimeoutError, "Agent execution")
        except BaseExceptionGroup as group:
            raise cause_of_group(group) or group from None
        finally:
            await self._emit("agent-end")
            if policy.failure is not None and not is_being_cancelled():  # whatever the agent made of it
                raise BackendUnavailable(policy.failure)

    async def _grade(self) -> VerificationResult:
        policy = self.job.policy
        turns = turns_of(self.context, policy)
        answer = policy.final_answer if policy.turns or policy.answer else turns[-1].text if turns else ""
        return await self.job.grade(self.job.task, answer)

    def _note(self, exc: BaseException) -> None:
        if self.failure is None:
            self.failure = TrialFailure(phase=self.phase, type=type(exc).__name__, message=str(exc))

    def _outcome(self) -> Outcome:
        verdict = self.verdict
        about = {"verifier": verdict.info} if verdict is not None and verdict.info else {}
        return Outcome(
            turns=turns_of(self.context, self.job.policy),
            reward=verdict.reward if verdict is not None else None,
            failure=self.failure,
            attempts=self.attempt,
            cost_usd=self.context.cost_usd or 0.0,
            metadata={"lane": "in_process", **usage_of(self.context), **about},
        )

    async def _emit(self, event: str) -> None:
        await self.job.emit(event, self.attempt)


async def _within[T](work: Coroutine[object, None, T], seconds: float, error: type[Exception], what: str) -> T:
    # As in harbor, a timeout that the work itself raises ends like ours; a sampler's never gets here.
    try:
        return await within(work, seconds)
    except TimeoutError as exc:
        raise error(own_timeout(exc) or f"{what} timed out after {seconds} seconds") from exc


class _AgentPool:
    """Empty directories for agents' logs. Making one can take longer than all the rest of a rollout."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.root = Scratch("evsys-agents-")
        self.free: list[Path] = []
        atexit.register(self.clear)

    def clear(self) -> None:
        if os.getpid() == self.pid:  # a fork's end is not ours
            self.root.remove()

    def take(self) -> Path:
        try:
            return self.free.pop()
        except IndexError:
            return Path(tempfile.mkdtemp(dir=self.root.path))

    def give_back(self, path: Path) -> None:
        # The next agent must not find another one's logs.
        if os.listdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            self.free.append(path)


_pools: list[_AgentPool] = []


@contextmanager
def _logs_dir() -> Iterator[Path]:
    """An empty directory, for the length of a rollout."""
    if not _pools or _pools[-1].pid != os.getpid():
        _pools.append(_AgentPool())
    pool = _pools[-1]
    path = pool.take()
    try:
        yield path
    finally:
        pool.give_back(path)


class NoEnvironment(BaseEnvironment):
    """What an agent gets where the task has no environment: whatever it wants of it is refused with the remedy."""

    @staticmethod
    def type() -> str:
        return "none"

    def _validate_definition(self) -> None: ...

    async def start(self, force_build: bool) -> None: ...

    async def stop(self, delete: bool) -> None: ...

    async def exec(self, *args: object, **kwargs: object) -> Any:
        raise EvsysError(
            "this task has no environment to run commands in; set `environment: true` in the task's metadata"
        )

    upload_file = upload_dir = download_file = download_dir = exec


@lru_cache(maxsize=1)
def no_environment() -> NoEnvironment:
    """An environment that holds nothing, so that all rollouts can share it."""
    nowhere = Path("no-environment")
    return NoEnvironment(
        environment_dir=nowhere,
        environment_name="none",
        session_id="none",
        trial_paths=TrialPaths(trial_dir=nowhere),
        task_env_config=EnvironmentConfig(),
    )
