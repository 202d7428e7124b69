"""What `agent_loop` and `harbor_trial` share: what they are asked, what they answer, and what an answer means.

In: a `TrialJob`, one try of an agent at one task. Out: an `Outcome`, and from it a `Rollout`. Both end here, so an
exception of the same type in the same phase has the same status, in whichever of them it happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from evsys_sandbox.errors import SandboxUnavailable
from evsys_sandbox.uids import hold
from evsys_sdk.constants import VERIFIER_SECONDS
from evsys_sdk.data_types import HarborTask
from evsys_sdk.errors import Cancelled
from evsys_sdk.protocols import MACHINE_FAILURES, EnvironmentSpec, Rollout, RolloutStatus, Turn, VerificationResult
from evsys_sdk.rollout.agents import AgentClass
from evsys_sdk.rollout.policy import HttpFront, Policy, SampleRetryPolicy
from evsys_sdk.training_api import text_of

# Folders for the length of a rollout, in the machine's temporary directory.
#
# In: what they are called by. Out: an empty folder, which its process holds for as long as it lives. What a killed
# process left is removed by the next one.


Prefix = Literal["evsys-trial-", "evsys-agents-"]
PREFIXES: tuple[Prefix, ...] = ("evsys-trial-", "evsys-agents-")
YOUNG_SECONDS = 60.0
"""A folder may have been made and not be held yet."""


class Scratch:
    """An empty folder that no other process removes while this one lives."""

    def __init__(self, prefix: Prefix) -> None:
        _sweep_once()
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self.held = _hold(self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self.held is not None:
            os.close(self.held)
            self.held = None


@cache
def _sweep_once() -> None:
    root = Path(tempfile.gettempdir())
    for place in [found for prefix in PREFIXES for found in root.glob(f"{prefix}*")]:
        with contextlib.suppress(OSError):
            if time.time() - place.stat().st_mtime > YOUNG_SECONDS and (handle := _hold(place, alone=True)) is not None:
                shutil.rmtree(place, ignore_errors=True)
                os.close(handle)


def _hold(path: Path, *, alone: bool = False) -> int | None:
    try:
        return hold(path, alone=alone)
    except ImportError:  # a system without such locks: nothing is held there, and nothing swept
        return None


Phase = Literal["constructor", "environment", "setup", "agent", "verifier"]
Grade = Callable[[HarborTask, str], Awaitable[VerificationResult]]
"""How good is this answer to this task? Raises VerifierFailed, and never says 0 for a verifier that broke."""

AGENT_TIMEOUT = "AgentTimeoutError"
INFRASTRUCTURE = frozenset(
    {
        # ours
        "BackendError", "BackendUnavailable", "SandboxError",
        # lost connections, of Python and of the usual clients
        "ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError",
        "BrokenPipeError", "ConnectError", "ConnectTimeout", "ReadError", "ReadTimeout", "RemoteProtocolError",
        "APIConnectionError", "APITimeoutError", "Timeout", "RateLimitError", "InternalServerError",
        "ServiceUnavailableError",
        # harbor's own
        "EnvironmentStartTimeoutError", "AgentSetupTimeoutError",
    }
)  # fmt: skip
"""Exceptions, by the name of their type, that say nothing about the model: tried again, and never graded."""
STOPS = (Cancelled, SandboxUnavailable)
"""What ends the run and not a rollout: the user, and a machine on which no rollout of the kind could fare better."""
NEVER_RETRIED = frozenset(
    {
        "BackendError", "BackendUnavailable",  # each call was made again already
        AGENT_TIMEOUT, "VerifierTimeoutError", "VerifierFailed", "NonZeroAgentExitCodeError", "RewardFileNotFoundError",
        "RewardFileEmptyError", "VerifierOutputParseError", "ApiUsageLimitError", "AgentSafetyRefusalError",
        "AgentAuthenticationError", "ModelNotFoundError", "SandboxBuildFailedError",
    }
)  # fmt: skip
"""Said in full, because harbor's own default contradicts its own table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTimeouts:
    """Time limit in seconds; a task directory's own limits come first."""

    setup_seconds: float = 360.0
    agent_seconds: float = 600.0
    verifier_seconds: float = VERIFIER_SECONDS

    def of(self, task: HarborTask) -> TrialTimeouts:
        """These limits, with those that the task names."""
        own = (task.metadata.get("harbor") or {}).get("limits") or {}
        return replace(self, **{name: float(own[name]) for name in self.__dataclass_fields__ if own.get(name)})


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEvent:
    """Something that happened in a rollout; the names are harbor's."""

    event: str
    task_id: str
    sample: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSettings:
    """What holds for every rollout of an engine."""

    limits: TrialTimeouts = field(default_factory=TrialTimeouts)
    environment: EnvironmentSpec = field(default_factory=EnvironmentSpec)
    trials_dir: Path | None = None
    """Where harbor's trial directories stay; without it they are deleted when the rollout is over."""
    on_event: Callable[[RolloutEvent], Awaitable[None]] | None = None
    http_front: Callable[[], AbstractAsyncContextManager[HttpFront]] | None = None
    """Opens an endpoint for agents whose params say `{base_url}`."""
    context_length: int | None = None
    """Of the model, where it is known: an agent that asks with more has made a mistake, and the sampler has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialJob:
    """One agent's work on one task."""

    task: HarborTask
    sample: int
    agent: AgentClass
    policy: Policy
    grade: Grade
    retry_policy: SampleRetryPolicy
    settings: TrialSettings = field(default_factory=TrialSettings)

    async def emit(self, event: str, attempt: int) -> None:
        if self.settings.on_event is not None:
            what = RolloutEvent(event=event, task_id=self.task.task_id, sample=self.sample, attempt=attempt)
            await self.settings.on_event(what)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFailure:
    """The first thing that went wrong."""

    phase: Phase
    type: str
    """Name of the exception's class; harbor keeps no more than that."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of an agent's work."""

    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    failure: TrialFailure | None = None
    attempts: int = 1
    cost_usd: float = 0.0
    metadata: dict[str, object] = field(default_factory=dict)

    @property
    def status(self) -> RolloutStatus:
        return "ok" if self.failure is None else status_of(self.failure)


def status_of(failure: TrialFailure) -> RolloutStatus:
    """Whose failure it is: the model's and its agent's, the clock's, or the machine's, which is not graded."""
    if failure.type == "CancelledError":
        return "cancelled"
    # Constructor and setup come before the model is asked anything, so what breaks there is not the model's doing.
    if failure.type in INFRASTRUCTURE or failure.phase != "agent":
        return "infra_error"
    return "timeout" if failure.type == AGENT_TIMEOUT else "agent_error"


def is_retried(failure: TrialFailure | None) -> bool:
    """Whether another try may help; an agent's own mistakes would only be made again, or be drawn away."""
    return failure is not None and failure.type in INFRASTRUCTURE and failure.type not in NEVER_RETRIED


def cause_of_group(error: BaseException | None) -> BaseException | None:
    """What a group of exceptions, as tools that run side by side raise it, comes down to: one that ends the run, or the
    first where all are the machine's doing; None for any other group and for a single exception."""
    if not isinstance(error, BaseExceptionGroup):
        return None
    parts = _parts(error)
    stop = next((part for part in parts if isinstance(part, STOPS)), None)
    return stop or (parts[0] if all(type(part).__name__ in INFRASTRUCTURE for part in parts) else None)


def _parts(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [part for each in error.exceptions for part in _parts(each)]


_AROUND_THE_WORK = ("asyncio.", "harbor.trial.", "evsys_sdk.concurrency", "evsys_sdk.rollout.agent_loop")


def own_timeout(error: BaseException | None) -> str | None:
    """What a TimeoutError says that came out of the work itself; None where the limit around the work ran out."""
    if not isinstance(error, TimeoutError):
        return None
    # `asyncio.timeout` raises in a frame of asyncio; a TimeoutError of the work has come through frames of other
    # modules.
    modules = {frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)}
    if all(module.startswith(_AROUND_THE_WORK) for module in modules):
        return None
    return f"it raised {type(error).__name__}: {error}".rstrip(": ")


def is_being_cancelled() -> bool:
    """Whether this rollout is being stopped, and not merely a task that its agent has cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def rollout_of(job: TrialJob, outcome: Outcome, seconds: float) -> Rollout:
    """The outcome as everybody else knows it. What cannot be graded has no reward."""
    status, failure = outcome.status, outcome.failure
    error = None
    if failure is not None:
        where = f"the agent's {failure.phase}" if failure.phase in ("constructor", "setup") else f"the {failure.phase}"
        error = f"{where}: {failure.type}: {failure.message}".rstrip(": ")
        if job.policy.waiting and failure.type == AGENT_TIMEOUT:
            error += f" (it was waiting for {job.policy.waiting})"
    about: dict[str, object] = {"sample": job.sample, "attempts": outcome.attempts}
    if job.policy.stop_reason is not None:
        about["stop_reason"] = job.policy.stop_reason
    if job.policy.answer is not None:  # what was graded, where that is not what the model said last
        about["answer"] = job.policy.answer
    if failure is not None:
        about["exception"] = failure.type
    return Rollout(
        task_id=job.task.task_id,
        turns=outcome.turns,
        reward=None if status in MACHINE_FAILURES else outcome.reward,
        status=status,
        error=error,
        seconds=seconds,
        cost_usd=outcome.cost_usd,
        metadata={**about, **outcome.metadata},
    )


def turns_of(context: object, policy: Policy) -> list[Turn]:
    """Every exchange: as the policy wrote it down, or, where the agent never asked it, as the agent tells it.

    What the agent tells is taken as it is: where its lists do not fit together the turns have no logprobs, so that
    they can be read and graded but not be trained on.
    """
    if policy.turns:
        return policy.turns
    turns: list[Turn] = []
    for detail in getattr(context, "rollout_details", None) or []:
        written: Sequence[list[int]] = detail.get("completion_token_ids") or []
        read: Sequence[list[int]] = detail.get("prompt_token_ids") or []
        logprobs: Sequence[list[float]] = detail.get("logprobs") or []
        # A turn without logprobs would shift those of the later turns.
        fits = len(written) == len(read) == len(logprobs)
        turns += [
            Turn(
                prompt_tokens=list(read[index]) if index < len(read) else [],
                completion_tokens=list(tokens),
                logprobs=list(logprobs[index]) if fits and len(logprobs[index]) == len(tokens) else [],
                text=text_of(tokens, policy.renderer.tokenizer),
            )
            for index, tokens in enumerate(written)
        ]
    return turns


def usage_of(context: object) -> dict[str, object]:
    """What the agent says about itself and what it used, as far as it says it."""
    used = {name: getattr(context, name, None) for name in ("n_input_tokens", "n_output_tokens")}
    # Rollouts are written down as JSON, and an agent may have put anything there.
    said = getattr(context, "metadata", None)
    about = {"agent": said and json.loads(json.dumps(said, default=str)), **used}
    return {name: value for name, value in about.items() if value is not None}


BEGUN_AT_ONCE = 64
"""Rollouts begun before the event loop turns to anything else: to begin thousands takes a tenth of a second."""


async def all_of[T](work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; when one is stopped all are, and none is left behind. What ends at once costs no task
    switch."""
    loop = asyncio.get_running_loop()
    jobs: list[asyncio.Task[T]] = []
    try:
        for one in work:
            jobs.append(asyncio.Task(one, loop=loop, eager_start=True))
            if len(jobs) % BEGUN_AT_ONCE == 0:
                await asyncio.sleep(0)
        return list(await asyncio.gather(*jobs))
    except BaseException:
        # Python would warn of coroutines that were never awaited.
        for one in work[len(jobs) :]:
            one.close()
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        raise
