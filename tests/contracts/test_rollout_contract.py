"""Both lanes of the rollout engine: our loop and harbor's unmodified Trial end every scenario in the same way."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

pytest.importorskip("harbor", reason="needs the extra harbor")

from harbor.agents.installed.base import NonZeroAgentExitCodeError
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

from evsys_sdk.backends.mock_tokenizer import ByteTokenizer
from evsys_sdk.data_types import HarborTask, InProcessVerifier
from evsys_sdk.errors import BackendError, Cancelled, VerifierFailed
from evsys_sdk.protocols import AgentSpec, VerificationResult
from evsys_sdk.rollout import agent_loop, harbor_trial
from evsys_sdk.rollout.agents import find_agent
from evsys_sdk.rollout.chat_agent import PolicyAgent
from evsys_sdk.rollout.policy import Policy, SampleRetryPolicy, live
from evsys_sdk.rollout.trial import EnvironmentSpec, TrialJob, TrialSettings, TrialTimeouts, rollout_of
from evsys_sdk.testing import ScriptedModel
from evsys_sdk.training.rendering import ChatRenderer
from evsys_sdk.training_api import SamplingParams

LANES = {"in_process": agent_loop.run, "trial": harbor_trial.run}
SHORT = 1.0
"""Seconds of patience in the phase that runs out of it; what comes before the wait in that phase must fit."""
TASK = HarborTask(task_id="t", instruction="Say yes", verifier=InProcessVerifier(fn_name="exact_match", expected="yes"))
DETAILS = {"prompt_token_ids": [[1, 2]], "completion_token_ids": [[*b"yes"]], "logprobs": [[-0.5, -0.5, -0.5]]}

tries: Counter[str] = Counter()
"""By the name of the policy, which stays the same when a rollout is tried again."""


class StubEnvironment(BaseEnvironment):
    """An environment in which nothing happens."""

    @staticmethod
    def type():
        return "stub"

    @property
    def capabilities(self):
        return EnvironmentCapabilities(mounted=True)

    def _validate_definition(self): ...

    async def start(self, force_build): ...

    async def stop(self, delete): ...

    async def exec(self, *args, **kwargs):
        return ExecResult(return_code=0)

    async def upload_file(self, source_path, target_path): ...
    async def upload_dir(self, source_dir, target_dir): ...
    async def download_file(self, source_path, target_path): ...
    async def download_dir(self, source_dir, target_dir): ...


class FullEnvironment(StubEnvironment):
    async def start(self, force_build):
        raise RuntimeError("no room")


class DyingEnvironment(StubEnvironment):
    """Is gone when the agent's logs are fetched."""

    async def prepare_logs_for_host(self):
        raise RuntimeError("it died")


class Scenario(PolicyAgent):
    """Does what the scenario of this name says."""

    def __init__(self, *args, scenario, **kwargs):
        super().__init__(*args, **kwargs)
        self.scenario = scenario
        tries[self.policy.name] += 1

    async def setup(self, environment):
        if self.scenario == "setup_raises":
            raise RuntimeError("no tools")
        if self.scenario == "setup_hangs":
            await asyncio.sleep(3600)

    async def run(self, instruction, environment, context):
        await getattr(self, self.scenario, self.ok)(context)

    async def ok(self, context):
        await self.policy.complete([{"role": "user", "content": "Say yes"}])

    async def two_turns(self, context):
        turn = await self.policy.complete([{"role": "user", "content": "Say yes"}])
        await self.policy.complete_tokens([*turn.prompt_tokens, *turn.completion_tokens, 10])

    async def raises_before_tokens(self, context):
        raise ValueError("lost my way")

    async def raises_after_tokens(self, context):
        await self.ok(context)
        raise ValueError("lost my way")

    async def exits(self, context):
        await self.ok(context)
        raise SystemExit(3)

    async def hangs(self, context):
        await self.ok(context)
        await asyncio.sleep(3600)

    async def inner_timeout(self, context):
        await self.ok(context)
        raise TimeoutError("a tool took too long")

    async def inner_wait(self, context):
        await self.ok(context)
        await asyncio.wait_for(asyncio.sleep(3600), 0.01)

    async def nonzero_exit(self, context):
        await self.ok(context)
        raise NonZeroAgentExitCodeError("exit 2")

    async def tells_later(self, context): ...

    async def tells_nothing(self, context): ...

    async def flaky(self, context):
        await self.ok(context)
        if tries[self.policy.name] == 1:
            raise ConnectionResetError("gone")

    async def always_lost(self, context):
        raise ConnectionResetError("gone")

    async def lost_in_a_group(self, context):
        async with asyncio.TaskGroup() as group:
            group.create_task(self.always_lost(context))
            group.create_task(self.always_lost(context))

    async def mistaken_in_a_group(self, context):
        raise ExceptionGroup("two tools", [ConnectionResetError("gone"), ValueError("a slip")])

    async def swallows(self, context):
        try:
            await self.ok(context)
        except Exception:
            self.policy.answer = "yes"

    async def swallows_and_hangs(self, context):
        await self.swallows(context)
        await asyncio.sleep(3600)

    async def cancels_itself(self, context):
        raise asyncio.CancelledError

    async def user_stops(self, context):
        raise Cancelled("ctrl-c")

    async def user_stops_a_group(self, context):
        async with asyncio.TaskGroup() as group:
            group.create_task(self.user_stops(context))

    def populate_context_post_run(self, context):
        if self.scenario == "tells_later":
            context.rollout_details = [DETAILS]


@dataclass
class World:
    """One scenario on one lane, and what came of it."""

    lane: str
    script: object = "yes"
    grade_with: object = None
    limits: TrialTimeouts = field(default_factory=TrialTimeouts)
    retries: int = 2
    environment: type = StubEnvironment
    events: list = field(default_factory=list)
    calls: int = 0

    async def play(self, scenario, task=TASK):
        model = ScriptedModel(lambda message: self._said())
        sampling = SamplingParams(seed=1, max_tokens=8)
        policy = Policy(
            task=task,
            sampler=model,
            renderer=ChatRenderer(ByteTokenizer()),
            sampling=sampling,
            retry_policy=self.retry_policy(),
        )
        with live(policy):
            job = self.job(policy, scenario, task)
            outcome = await LANES[self.lane](job)
        self.rollout, self.outcome, self.prompts = rollout_of(job, outcome, 0.0), outcome, model.prompts
        return self.rollout

    def _said(self):
        self.calls += 1
        return self.script() if callable(self.script) else self.script

    def retry_policy(self):
        return SampleRetryPolicy(retries=self.retries, backoff_seconds=0.001)

    def job(self, policy, scenario, task):
        stub = EnvironmentSpec(kind=f"{self.environment.__module__}:{self.environment.__name__}")
        return TrialJob(
            task=task,
            sample=0,
            agent=find_agent(
                AgentSpec(kind=f"{Scenario.__module__}:{Scenario.__name__}", params={"scenario": scenario})
            ),
            policy=policy,
            grade=self.grade_with or exact,
            retry_policy=self.retry_policy(),
            settings=TrialSettings(limits=self.limits, environment=stub, on_event=self.note),
        )

    async def note(self, event):
        self.events.append(event.event)


async def exact(task, answer):
    return VerificationResult(reward=float(answer == "yes"))


async def broken_verifier(task, answer):
    raise VerifierFailed("verifier 'x' failed: KeyError: 'y'")


async def slow_verifier(task, answer):
    await asyncio.sleep(3600)


def lost_first(failure):
    answers = [failure, "yes"]
    return lambda: answers.pop(0) if len(answers) > 1 else answers[0]


START = ["start", "environment-start"]
ACTED = [*START, "agent-start", "agent-end"]
GRADED = [*ACTED, "verification-start", "end"]
YES = [*b"yes", ByteTokenizer.eos_token_id]
BRIEF_SETUP, BRIEF_AGENT = TrialTimeouts(setup_seconds=SHORT), TrialTimeouts(agent_seconds=SHORT)
BRIEF_VERIFIER = TrialTimeouts(verifier_seconds=SHORT)


@dataclass
class Expected:
    """How the scenario ends, on either lane."""

    status: str = "ok"
    exception: str | None = None
    reward: float | None = 1.0
    tokens: list = field(default_factory=lambda: [YES])
    attempts: int = 1
    events: list = field(default_factory=lambda: GRADED)


SCENARIOS = {
    "ok": ("ok", {}, Expected()),
    "wrong": ("ok", {"script": "no"}, Expected(reward=0.0, tokens=[[*b"no", ByteTokenizer.eos_token_id]])),
    "two turns": ("two_turns", {}, Expected(tokens=[YES, YES])),
    "agent raises before tokens": (
        "raises_before_tokens", {},
        Expected("agent_error", "ValueError", None, [], events=[*ACTED, "end"]),
    ),
    "agent raises after tokens": (
        "raises_after_tokens", {}, Expected("agent_error", "ValueError", None, events=[*ACTED, "end"]),
    ),
    "agent timeout": ("hangs", {"limits": BRIEF_AGENT}, Expected("timeout", "AgentTimeoutError")),
    "inner timeout": ("inner_timeout", {}, Expected("timeout", "AgentTimeoutError")),
    "nonzero exit": ("nonzero_exit", {}, Expected("agent_error", "NonZeroAgentExitCodeError")),
    "post-run backfill": ("tells_later", {}, Expected(tokens=[[*b"yes"]])),
    "no tokens at all": ("tells_nothing", {}, Expected(reward=0.0, tokens=[])),
    "setup raises": ("setup_raises", {}, Expected("infra_error", "RuntimeError", None, [], events=[*START, "end"])),
    "setup timeout": (
        "setup_hangs", {"limits": BRIEF_SETUP, "retries": 0},
        Expected("infra_error", "AgentSetupTimeoutError", None, [], events=[*START, "end"]),
    ),
    "verifier raises": ("ok", {"grade_with": broken_verifier}, Expected("infra_error", "VerifierFailed", None)),
    "verifier times out": (
        "ok", {"grade_with": slow_verifier, "limits": BRIEF_VERIFIER},
        Expected("infra_error", "VerifierTimeoutError", None),
    ),
    "verifier times out after the agent did": (
        "hangs", {"grade_with": slow_verifier, "limits": replace(BRIEF_AGENT, verifier_seconds=SHORT)},
        Expected("timeout", "AgentTimeoutError", None),
    ),
    "flaky, then ok": ("flaky", {}, Expected(attempts=2, events=[*ACTED, "end", *GRADED])),
    "lost for good": (
        "always_lost", {}, Expected("infra_error", "ConnectionResetError", None, [], 3, [*ACTED, "end"] * 3),
    ),
    "tools used side by side are lost": (
        "lost_in_a_group", {}, Expected("infra_error", "ConnectionResetError", None, [], 3, [*ACTED, "end"] * 3),
    ),
    "one of two tools is lost, and the other is the agent's mistake": (
        "mistaken_in_a_group", {}, Expected("agent_error", "ExceptionGroup", None, [], events=[*ACTED, "end"]),
    ),
    "a timeout is not retried": ("inner_timeout", {"retries": 5}, Expected("timeout", "AgentTimeoutError")),
    "the sampler times out once": ("ok", {"script": lost_first(TimeoutError("slow"))}, Expected()),
    "the sampler times out for good": (
        "ok", {"script": TimeoutError("slow"), "retries": 1},
        Expected("infra_error", "BackendUnavailable", None, [], events=[*ACTED, "end"]),
    ),
    "the agent swallows a lost sampler": (
        "swallows", {"script": BackendError("lost"), "retries": 0},
        Expected("infra_error", "BackendUnavailable", None, [], events=[*ACTED, "end"]),
    ),
    "the agent cancels itself": (
        "cancels_itself", {}, Expected("cancelled", "CancelledError", None, [], events=[*ACTED, "cancel", "end"]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_scenario_ends_the_same_way_on_both_lanes(name, lane):
    scenario, world, expected = SCENARIOS[name]
    world = World(lane, **world)
    rollout = await asyncio.wait_for(world.play(scenario), 120)
    assert (rollout.status, rollout.metadata.get("exception")) == (expected.status, expected.exception), rollout.error
    assert rollout.reward == expected.reward
    assert [turn.completion_tokens for turn in rollout.turns] == expected.tokens
    assert rollout.metadata["attempts"] == expected.attempts
    assert world.events == expected.events
    assert bool(rollout.error) == (rollout.status != "ok")
    assert rollout.metadata["lane"] == lane


@pytest.mark.parametrize("lane", LANES)
async def test_a_system_exit_in_an_agent_ends_its_rollout_and_nothing_else(lane):
    rollout = await World(lane).play("exits")
    assert (rollout.status, rollout.reward) == ("agent_error", None)
    assert rollout.metadata["exception"] == "SystemExit"


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("scenario", ["hangs", "swallows_and_hangs"])
async def test_cancelling_stops_the_agent_and_says_so(scenario, lane):
    world = World(lane, script=BackendError("lost") if scenario == "swallows_and_hangs" else "yes", retries=0)
    work = asyncio.create_task(world.play(scenario))
    while world.calls == 0:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(work, 300)
    assert world.events == [*ACTED, "cancel", "end"]


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("scenario", ["user_stops", "user_stops_a_group"])
async def test_a_user_who_stops_the_run_is_not_a_status(scenario, lane):
    with pytest.raises(Cancelled):
        await World(lane).play(scenario)


@pytest.mark.parametrize("lane", LANES)
async def test_another_try_draws_what_the_first_would_have_drawn(lane):
    world = World(lane)
    await world.play("flaky")
    assert world.calls == 2 and len(set(world.prompts)) == 1
    assert [turn.completion_tokens for turn in world.rollout.turns] == [YES]


@pytest.mark.parametrize("lane", LANES)
async def test_an_exception_that_the_caller_is_handling_is_not_the_agents(lane):
    try:
        raise RuntimeError("somebody else's")
    except RuntimeError:
        rollout = await World(lane, grade_with=broken_verifier).play("ok")
    assert rollout.status == "infra_error" and rollout.error.startswith("the verifier: VerifierFailed")


@pytest.mark.parametrize("environment", [FullEnvironment, DyingEnvironment])
async def test_an_environment_that_breaks_is_not_the_agents_mistake(environment):
    rollout = await World("trial", environment=environment).play("ok", replace(TASK, metadata={"environment": True}))
    assert (rollout.status, rollout.reward) == ("infra_error", None)
    assert rollout.error.startswith("the environment: RuntimeError: ")


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"environment": True}, "metadata.environment"),
        ({"harbor": {"needs": ["steps", "environment.mcp_servers"]}}, "steps, environment.mcp_servers"),
    ],
)
async def test_the_in_process_lane_refuses_by_name_and_the_router_sends_such_a_task_to_harbor(metadata, named):
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.rollout.engine import runner_for

    task = replace(TASK, metadata=metadata)
    assert named in agent_loop.refusal(task)
    with pytest.raises(EvsysError, match=named):
        await World("in_process").play("ok", task)
    assert runner_for(task) is harbor_trial.run and runner_for(TASK) is agent_loop.run


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize(
    ("scenario", "said"), [("inner_timeout", "a tool took too long"), ("inner_wait", "it raised TimeoutError")]
)
async def test_a_time_out_of_the_agents_own_is_not_told_as_the_end_of_its_time(scenario, said, lane):
    rollout = await World(lane).play(scenario)
    assert rollout.status == "timeout" and said in rollout.error and "600" not in rollout.error


@pytest.mark.parametrize("lane", LANES)
async def test_the_end_of_its_time_is_told_as_such(lane):
    rollout = await World(lane, limits=BRIEF_AGENT).play("hangs")
    assert f"timed out after {SHORT} seconds" in rollout.error
