"""Harbor trial: an agent's work on a task that needs an environment, as an unmodified harbor `Trial` in a `TrialQueue`.

In: a `TrialJob`. Out: an `Outcome`. harbor owns the environment, the phases, the time limits and the retries; here a
task becomes a task directory and a `TrialConfig`, and a `TrialResult` becomes an outcome. Objects that live (the
policy, the verifier function) do not fit into a config, so the config names them and harbor's classes look them up.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harbor.models.job.config import RetryConfig
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig, VerifierConfig
from harbor.models.trial.result import TrialResult
from harbor.models.verifier.result import VerifierResult
from harbor.trial.hooks import TrialEvent, TrialHookEvent
from harbor.trial.queue import TrialQueue
from harbor.verifier.base import BaseVerifier

from evsys_sdk.errors import FOREIGN, BackendUnavailable, VerifierFailed, shorten
from evsys_sdk.protocols import SANDBOX, EnvironmentSpec
from evsys_sdk.rollout.task_dirs import has_own_tests, name_problem, task_directory, write_task
from evsys_sdk.rollout.trial import (
    AGENT_TIMEOUT,
    INFRASTRUCTURE,
    NEVER_RETRIED,
    STOPS,
    Outcome,
    Phase,
    Scratch,
    TrialFailure,
    TrialJob,
    cause_of_group,
    is_being_cancelled,
    own_timeout,
    turns_of,
    usage_of,
)

SANDBOX_CLASS = "evsys_sdk.rollout.sandbox:SandboxEnvironment"
PRINTED_CHARS, SHOWN_CHARS = 2000, 400
"""How much of what the tests printed is kept in the record, and shown in an error: the end of it."""


async def run(job: TrialJob) -> Outcome:
    """The agent's work, begun again where that may help."""
    folder = task_directory(job.task)
    wrong = name_problem(folder) if folder is not None else None
    if wrong is not None:
        return Outcome(failure=TrialFailure(phase="environment", type="DataError", message=wrong))
    scratch = Scratch("evsys-trial-")
    work = _Work(job=job)
    _under_way[job.policy.name] = work
    try:
        outcome = await work.run(scratch.path)
        trial = (job.settings.trials_dir or scratch.path / "trials") / job.policy.name
        return _with_output_of_tests(outcome, trial, scratch.path)
    finally:
        del _under_way[job.policy.name]
        scratch.remove()
        # harbor makes loggers named after the trial, which Python keeps for ever.
        known = logging.Logger.manager.loggerDict
        for name in [name for name in known if f".{job.policy.name}." in f"{name}."]:
            del known[name]


def _with_output_of_tests(outcome: Outcome, trial: Path, scratch: Path) -> Outcome:
    """What the tests printed, in the record, and in the message where they could not grade. The message does not say
    where this one rollout's files lay: what befell many rollouts reads the same."""
    printed = [file.read_text(errors="replace").strip() for file in sorted(trial.glob("**/test-stdout.txt"))]
    text = "\n".join(filter(None, printed))
    failure = outcome.failure
    if failure is not None and failure.phase == "verifier" and printed:
        end = text[-SHOWN_CHARS:].strip()
        said = f"the tests printed: {shorten(end, SHOWN_CHARS)}" if end else "the tests printed nothing"
        failure = replace(failure, message=f"{failure.message}; {said}")
    if failure is not None:
        failure = replace(failure, message=failure.message.replace(f"{trial}/", "").replace(f"{scratch}/", ""))
    graded = outcome.metadata.get("verifier")
    about = {**(graded if isinstance(graded, dict) else {}), "printed": text[-PRINTED_CHARS:]}
    metadata = {**outcome.metadata, "verifier": about} if text else outcome.metadata
    return replace(outcome, failure=failure, metadata=metadata)


@dataclass(slots=True, kw_only=True)
class _Work:
    """What is known of a trial while it runs, over all its attempts."""

    job: TrialJob
    handled: BaseException | None = field(default_factory=sys.exception)
    """An exception that the caller is handling at the start; it is none of the agent's."""
    attempt: int = 0
    agent_failed: bool = False
    own_timeout: str | None = None
    """What the agent's own TimeoutError said, which harbor takes for the end of its time."""
    answer: str = ""
    about: dict[str, object] = field(default_factory=dict)

    async def run(self, folder: Path) -> Outcome:
        retries = RetryConfig(
            max_retries=self.job.retry_policy.retries,
            include_exceptions=set(INFRASTRUCTURE),
            exclude_exceptions=set(NEVER_RETRIED),
            min_wait_sec=self.job.retry_policy.backoff_seconds,
            wait_multiplier=2.0,
        )
        # A queue for each trial: how many run at a time is decided by the engine's places.
        queue = TrialQueue(1, retries, hooks={event: [self.on_event] for event in TrialEvent})
        try:
            result = await queue.submit(_config(self.job, folder))
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            return self._without_result(
                TrialFailure(phase="agent", type="CancelledError", message="the agent stopped itself")
            )
        except STOPS:
            raise
        except FOREIGN as exc:  # the trial could not even be made, or its agent called sys.exit()
            # harbor makes agents in one module: was it there when this was raised?
            modules = {frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(exc.__traceback__)}
            phase: Phase = "constructor" if "harbor.agents.factory" in modules else "environment"
            phase = "agent" if self.agent_failed else phase
            return self._without_result(TrialFailure(phase=phase, type=type(exc).__name__, message=str(exc)))
        return self._outcome(result)

    async def on_event(self, event: TrialHookEvent) -> None:
        """harbor's hooks pass through here, in the order in which things happen."""
        if event.event is TrialEvent.START:
            self.attempt += 1
            self.agent_failed, self.own_timeout, self.answer, self.about = False, None, "", {}
            self.job.policy.begin_again()
        if event.event is TrialEvent.AGENT_END:
            # A hook of an agent that is failing runs inside its exception; harbor does not record it before.
            failing = sys.exception()
            self.agent_failed = failing is not self.handled
            self.own_timeout = own_timeout(failing.__cause__) if self.agent_failed and failing else None
        if event.event is TrialEvent.VERIFICATION_START:
            self.answer = self._answer(event.result)
        await self.job.emit(event.event.value, self.attempt)
        lost = event.event is TrialEvent.AGENT_END and self.job.policy.failure is not None
        if lost and not is_being_cancelled():
            self.agent_failed = True
            raise BackendUnavailable(self.job.policy.failure)  # whatever the agent made of it
        if event.event is TrialEvent.AGENT_END and self.agent_failed and (cause := cause_of_group(sys.exception())):
            raise cause  # harbor would keep no more of it than `ExceptionGroup`

    def _answer(self, result: TrialResult) -> str:
        policy = self.job.policy
        turns = turns_of(result.agent_result, policy)
        return policy.final_answer if policy.turns or policy.answer else turns[-1].text if turns else ""

    def _without_result(self, failure: TrialFailure) -> Outcome:
        turns, about = self.job.policy.turns, dict[str, object](lane="trial")
        return Outcome(turns=turns, failure=failure, attempts=max(1, self.attempt), metadata=about)

    def _outcome(self, result: TrialResult) -> Outcome:
        steps = result.step_results or []
        contexts = [result.agent_result, *(step.agent_result for step in steps)]
        reports = [context for context in contexts if context is not None]
        info = next((i for i in (result.exception_info, *(step.exception_info for step in steps)) if i), None)
        message = self.own_timeout if info and info.exception_type == AGENT_TIMEOUT else None
        failure = info and TrialFailure(
            phase=self._phase(result), type=info.exception_type, message=message or info.exception_message
        )
        for stop in STOPS:  # what must end the run reaches us as no more than a name
            if failure is not None and stop.__name__ == failure.type:
                raise stop(failure.message)
        reward, about, wrong = _reward(result)
        return Outcome(
            turns=self.job.policy.turns or [turn for context in reports for turn in turns_of(context, self.job.policy)],
            reward=reward,
            failure=failure or wrong,
            attempts=max(1, self.attempt),
            cost_usd=sum(context.cost_usd or 0.0 for context in reports),
            metadata={"lane": "trial", **(usage_of(reports[0]) if len(reports) == 1 else {}), **about, **self.about},
        )

    def _phase(self, result: TrialResult) -> Phase:
        if self.agent_failed:
            return "agent"
        if result.step_results or result.verifier is not None:
            return "verifier"
        # After the agent and before the verifier it is the environment's turn again: logs and artifacts.
        return "setup" if result.agent_setup is not None and result.agent_execution is None else "environment"


_under_way: dict[str, _Work] = {}
"""By the name of the policy."""


class AnswerVerifier(BaseVerifier):
    """Grades the agent's answer with the task's own verifier, where that needs no look into the environment."""

    def __init__(self, *, policy: str, **rest: Any) -> None:
        super().__init__(**rest)
        self.work = _under_way[policy]

    async def verify(self) -> VerifierResult:
        verdict = await self.work.job.grade(self.work.job.task, self.work.answer)
        if verdict.info:
            self.work.about["verifier"] = verdict.info
        return VerifierResult(rewards={"reward": verdict.reward})


def _config(job: TrialJob, folder: Path) -> TrialConfig:
    name, limits = job.policy.name, job.settings.limits
    own = task_directory(job.task)
    graded_by_tests = has_own_tests(job.task)
    ours = (job.task.metadata.get("harbor") or {}).get("limits") or {}
    return TrialConfig(
        task=TaskConfig(path=own or write_task(job.task, folder / "task")),
        trial_name=name,
        trials_dir=job.settings.trials_dir or folder / "trials",
        agent=AgentConfig(
            name=job.agent.harbor_name,
            import_path=None if job.agent.harbor_name else job.agent.import_path,
            model_name=job.agent.model_name,
            kwargs=job.agent.arguments(name),
            override_setup_timeout_sec=limits.setup_seconds,
            # None leaves the limit of the task.toml in force, which ours would override.
            override_timeout_sec=None if ours.get("agent_seconds") else limits.agent_seconds,
        ),
        environment=environment_config(job.settings.environment),
        verifier=VerifierConfig(
            import_path=None if graded_by_tests else f"{__name__}:{AnswerVerifier.__name__}",
            kwargs={} if graded_by_tests else {"policy": name},
            override_timeout_sec=None if ours.get("verifier_seconds") else limits.verifier_seconds,
        ),
    )


def environment_config(spec: EnvironmentSpec) -> EnvironmentConfig:
    """The environment in harbor's words."""
    if spec.kind == SANDBOX:
        return EnvironmentConfig(import_path=SANDBOX_CLASS, kwargs=spec.params)
    if ":" in spec.kind or "." in spec.kind:
        path = spec.kind if ":" in spec.kind else ":".join(spec.kind.rsplit(".", 1))
        return EnvironmentConfig(import_path=path, kwargs=spec.params)
    return EnvironmentConfig(type=spec.kind, kwargs=spec.params)


def _reward(result: TrialResult) -> tuple[float | None, dict[str, object], TrialFailure | None]:
    """The one number, all numbers where there are more, and why there is none where that is not plain."""
    rewards = (result.verifier_result.rewards if result.verifier_result is not None else None) or {}
    if not rewards or getattr(result, "reward_valid", None) is False:  # harbor 0.25 says which rewards do not count
        return None, {}, None
    about: dict[str, object] = {"rewards": dict(rewards)} if len(rewards) > 1 else {}
    if len(rewards) > 1 and "reward" not in rewards:
        message = f"the verifier gave {', '.join(sorted(rewards))}; the one that counts must be called `reward`"
        return None, about, TrialFailure(phase="verifier", type=VerifierFailed.__name__, message=message)
    return float(rewards.get("reward", next(iter(rewards.values())))), about, None
