"""The rollout engine: what the model does with tasks, for training, validation and benchmarks alike.

In: tasks, a sampler, a renderer, and an agent if the model is to work inside one. Out: per task a list of `Rollout`s
with the exact tokens and logprobs. Whatever breaks on the way is a rollout with a status and no reward: not an
exception, and never a 0. Only here it is decided which way a rollout goes:

- `single_turn`: no agent, no environment. One prompt, one completion; needs no harbor.
- `in_process`: an agent, no environment. Our own loop over harbor's types.
- `harbor_trial`: a task that needs an environment. harbor's own `Trial`, unmodified.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from evsys_sdk.concurrency import apause_before_retry
from evsys_sdk.data_types import HarborTask, InProcessVerifier
from evsys_sdk.errors import EvsysError
from evsys_sdk.protocols import AgentSpec, EnvironmentSpec, FinishedRollouts, Renderer, Rollout, VerificationResult
from evsys_sdk.registry import verifiers
from evsys_sdk.rollout.agents import BASE_URL, AgentClass, find_agent
from evsys_sdk.rollout.policy import HttpFront, Policy, SampleRetryPolicy, live, say, take_turn
from evsys_sdk.rollout.single_turn import SingleTurnSettings, broken, roll_task
from evsys_sdk.rollout.task_dirs import has_own_tests, needs_of
from evsys_sdk.rollout.trial import STOPS, Grade, Outcome, TrialJob, TrialSettings, all_of, rollout_of
from evsys_sdk.training_api import SamplingClient, SamplingParams, derive_seed

IN_THE_ENVIRONMENT = AgentSpec(kind="chat", params={"max_turns": 20, "tools": ["bash"]})
"""Who works on a task that needs an environment when no agent is named: a chat that can act there."""


def refusal(task: HarborTask) -> str | None:
    """Why an engine that was given no grader cannot do the task, or None."""
    if has_own_tests(task):
        missing = importlib.util.find_spec("harbor") is None
        return f"task {task.task_id!r} needs harbor: pip install 'evsys-sdk[harbor]'" if missing else None
    if isinstance(task.verifier, InProcessVerifier):
        return None
    return f"a verifier of kind {task.verifier.kind!r} needs a rollout engine that this version does not have"


async def grade_in_process(task: HarborTask, answer: str) -> VerificationResult:
    """The verdict of the task's own function; the grader of an engine that is given no other."""
    plan = task.verifier
    assert isinstance(plan, InProcessVerifier)  # others were refused before anything was sampled
    verdict: VerificationResult = await verifiers.adapted(plan.fn_name).ajudge(
        answer, plan.expected, plan.params, prompt=task.instruction, task_id=task.task_id
    )
    return verdict


class HarborRolloutEngine:
    """Many rollouts at a time, each on the way that fits it."""

    def __init__(
        self,
        *,
        concurrency: int = 64,
        retries: int = 2,
        backoff_seconds: float = 0.2,
        agent: AgentSpec | None = None,
        grade: Grade | None = None,
        settings: TrialSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = apause_before_retry,
    ) -> None:
        self.concurrency = concurrency
        self.retry_policy = SampleRetryPolicy(retries=retries, backoff_seconds=backoff_seconds, sleep=sleep)
        self.agent = agent
        self.grade = grade
        self.settings = settings or TrialSettings()
        self.clock = clock
        # A semaphore belongs to one event loop; a run may use several, one after the other.
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def limited(self, *, concurrency: int | None = None, max_attempts: int | None = None) -> HarborRolloutEngine:
        """An engine with so many rollouts at once, or so many tries; this one where neither is given."""
        if concurrency is None and max_attempts is None:
            return self
        own = copy.copy(self)
        if concurrency is not None:
            # `copy` shares the dictionary, and with it the places of the engine that was copied.
            own.concurrency, own._slots = concurrency, WeakKeyDictionary()
        if max_attempts is not None:
            own.retry_policy = replace(self.retry_policy, retries=max_attempts - 1)
        return own

    def in_environment(self, environment: EnvironmentSpec) -> HarborRolloutEngine:
        """This engine, with another environment for tasks that need one; both share their places."""
        other = copy.copy(self)
        other.settings = replace(self.settings, environment=environment)
        return other

    async def roll_out(
        self,
        tasks: Sequence[HarborTask],
        *,
        sampler: SamplingClient,
        renderer: Renderer,
        sampling: SamplingParams,
        num_samples: int = 1,
        agent: AgentSpec | None = None,
        finished: FinishedRollouts | None = None,
    ) -> list[list[Rollout]]:
        """One list per task, in order."""
        spec = agent or self.agent
        worker = find_agent(spec) if spec is not None else None
        asked = SingleTurnSettings(
            sampler=sampler,
            renderer=renderer,
            sampling=sampling,
            num_samples=num_samples,
            grade=self.grade or grade_in_process,
            retry_policy=self.retry_policy,
            clock=self.clock,
            verifier_seconds=self.settings.limits.verifier_seconds,
        )
        done = NoneFinished() if finished is None else finished
        async with self._front(worker) as front:
            return await all_of([self._roll_task(task, asked, worker, front, done) for task in tasks])

    @asynccontextmanager
    async def _front(self, worker: AgentClass | None) -> AsyncIterator[HttpFront | None]:
        """An endpoint for as long as agents that speak HTTP are at work."""
        if worker is None or not worker.speaks_http:
            yield None
            return
        if self.settings.http_front is None:
            raise EvsysError(f"the agent's params say {BASE_URL}, and this engine serves no endpoint")
        async with self.settings.http_front() as front:
            yield front

    async def _roll_task(
        self,
        task: HarborTask,
        asked: SingleTurnSettings,
        worker: AgentClass | None,
        front: HttpFront | None,
        finished: FinishedRollouts,
    ) -> list[Rollout]:
        reason = self._refusal(task)
        if reason is not None:
            return broken(task, reason, asked.num_samples)
        if worker is None and not needs_of(task):
            return await self._answer(task, asked, finished)
        try:
            worker = worker or find_agent(IN_THE_ENVIRONMENT)
        except STOPS:
            raise
        except Exception as exc:
            return broken(task, say(exc), asked.num_samples)
        tries = range(asked.num_samples)
        return await all_of([self._work(task, index, asked, worker, front, finished) for index in tries])

    async def _answer(self, task: HarborTask, asked: SingleTurnSettings, finished: FinishedRollouts) -> list[Rollout]:
        """All rollouts of a task that takes one answer: they are drawn together, and so are done together."""
        found = [finished.find(task.task_id, sample) for sample in range(asked.num_samples)]
        # All or none: one call draws every sample of the task by one seed, so a missing sample cannot be drawn alone.
        if None not in found:
            return [rollout for rollout in found if rollout is not None]
        async with self._slot():
            made = await roll_task(task, asked)
        for sample, rollout in enumerate(made):
            finished.add(task.task_id, sample, rollout)
        # What is on record counts as it is, even where it was drawn or graded otherwise this time.
        return [old or new for old, new in zip(found, made, strict=True)]

    def _refusal(self, task: HarborTask) -> str | None:
        return None if self.grade is not None and not has_own_tests(task) else refusal(task)

    async def _work(
        self,
        task: HarborTask,
        sample: int,
        asked: SingleTurnSettings,
        worker: AgentClass,
        front: HttpFront | None,
        finished: FinishedRollouts,
    ) -> Rollout:
        """One rollout of an agent, unless it is done already."""
        found = finished.find(task.task_id, sample)
        if found is None:
            found = await self._roll(task, sample, asked, worker, front)
            finished.add(task.task_id, sample, found)
        return found

    async def _roll(
        self, task: HarborTask, sample: int, asked: SingleTurnSettings, worker: AgentClass, front: HttpFront | None
    ) -> Rollout:
        async with self._slot():
            await take_turn()
            started = self.clock()
            # Its own seed: a draw must not depend on which rollouts it shares a batch with.
            seed = derive_seed(asked.sampling.seed, task.task_id, "sample", sample)
            policy = Policy(
                task=task,
                sampler=asked.sampler,
                renderer=asked.renderer,
                sampling=replace(asked.sampling, seed=seed),
                retry_policy=self.retry_policy,
                context_length=self.settings.context_length,
            )
            with live(policy), _with_address(worker, policy, front) as agent:
                job = TrialJob(
                    task=task,
                    sample=sample,
                    agent=agent,
                    policy=policy,
                    grade=asked.grade,
                    retry_policy=self.retry_policy,
                    settings=self.settings,
                )
                outcome = await runner_for(task)(job)
            return rollout_of(job, outcome, self.clock() - started)

    def _slot(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if loop not in self._slots:
            self._slots[loop] = asyncio.Semaphore(self.concurrency)
        return self._slots[loop]


class NoneFinished:
    """Every rollout is to be made, and none is kept."""

    def find(self, task_id: str, sample: int) -> Rollout | None:
        return None

    def add(self, task_id: str, sample: int, rollout: Rollout) -> None:
        pass


@contextmanager
def _with_address(worker: AgentClass, policy: Policy, front: HttpFront | None) -> Iterator[AgentClass]:
    if front is None:
        yield worker
        return
    try:
        yield worker.addressed(policy.name, front.open(policy))
    finally:
        front.close(policy)


def runner_for(task: HarborTask) -> Callable[[TrialJob], Coroutine[Any, Any, Outcome]]:
    """What runs an agent on this task: the in-process loop, unless it would have to refuse something."""
    from evsys_sdk.rollout import agent_loop

    if agent_loop.refusal(task) is None:
        return agent_loop.run
    from evsys_sdk.rollout import harbor_trial

    return harbor_trial.run


InProcessRolloutEngine = HarborRolloutEngine
"""The name it had while it knew one way only."""
