"""The engine with an agent: exact tokens over several turns, own seeds, statuses, and the way that fits the task."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from dataclasses import replace

import pytest

pytest.importorskip("harbor", reason="needs the extra harbor")

from evsys_sandbox.errors import SandboxUnavailable
from evsys_sdk.backends.mock_tokenizer import ByteTokenizer
from evsys_sdk.data_types import HarborTask, InProcessVerifier, LLMJudgeVerifier
from evsys_sdk.errors import Cancelled, EvsysError, MissingDependency, UnknownKind, VerifierFailed
from evsys_sdk.protocols import AgentSpec, VerificationResult
from evsys_sdk.registry import agents, register_agent
from evsys_sdk.rollout.chat_agent import PolicyAgent
from evsys_sdk.rollout.engine import HarborRolloutEngine
from evsys_sdk.rollout.policy import _live, live_policy
from evsys_sdk.rollout.trial import TrialSettings, TrialTimeouts
from evsys_sdk.testing import ScriptedModel
from evsys_sdk.training.rendering import ChatRenderer
from evsys_sdk.training.rollout_data import reason_to_drop
from evsys_sdk.training_api import SampledSequence, SampleOutput, SamplingParams

RENDERER = ChatRenderer(ByteTokenizer())
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
CHAT = AgentSpec(kind="chat")


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


TOOLS = AgentSpec(kind="chat", params={"max_turns": 3, "tools": [f"{__name__}:add"]})


def task(task_id="t", expected="yes", verifier=None, **metadata):
    verifier = verifier or InProcessVerifier(fn_name="exact_match", expected=expected)
    return HarborTask(task_id=task_id, instruction=f"Do {task_id}", verifier=verifier, metadata=metadata)


class Model(ScriptedModel):
    """A scripted model that also notes how it was asked."""

    def __init__(self, script=lambda message: "yes"):
        super().__init__(script)
        self.asked = []

    def sample(self, prompt, num_samples, sampling_params, **options):
        self.asked.append((prompt.to_ints(), num_samples, sampling_params))
        return super().sample(prompt, num_samples, sampling_params, **options)

    @property
    def seeds(self):
        return [params.seed for _, _, params in self.asked]


class InTurn(Model):
    """Says one thing after another."""

    def __init__(self, *replies):
        self.replies = list(replies)
        super().__init__(lambda message: self.replies.pop(0) if len(self.replies) > 1 else self.replies[0])


async def roll(tasks, sampler, agent=CHAT, *, num_samples=1, seed=1, **options):
    engine = HarborRolloutEngine(**{"backoff_seconds": 0.001, **options})
    sampling = SamplingParams(seed=seed, max_tokens=128)
    return await engine.roll_out(
        tasks, sampler=sampler, renderer=RENDERER, sampling=sampling, num_samples=num_samples, agent=agent
    )


@pytest.fixture
def agent(monkeypatch):
    """Registers a class as the agent `mine`."""
    agents.names()
    monkeypatch.setattr(agents, "entries", dict(agents.entries))

    def register(cls):
        register_agent("mine")(cls)
        return AgentSpec(kind="mine")

    return register


async def test_every_turn_has_the_exact_tokens_it_was_asked_with_and_answered():
    model = InTurn(CALL, CALL, "yes")
    [[rollout]] = await roll([task(system="Be short.")], model, TOOLS)
    assert (rollout.status, rollout.reward) == ("ok", 1.0)
    assert [turn.prompt_tokens for turn in rollout.turns] == [prompt for prompt, _, _ in model.asked]
    assert [turn.text for turn in rollout.turns] == [CALL, CALL, "yes"]
    for before, after in zip(rollout.turns, rollout.turns[1:], strict=False):
        whole = [*before.prompt_tokens, *before.completion_tokens]
        assert after.prompt_tokens[: len(whole)] == whole
    assert "tool\n3<|im_end|>" in model.prompts[1] and model.prompts[0].startswith("<|im_start|>system\nBe short.")
    assert reason_to_drop(rollout) is None
    assert rollout.metadata["n_output_tokens"] == sum(len(turn.completion_tokens) for turn in rollout.turns)


async def test_a_turn_has_what_the_tools_said_since_the_turn_before():
    [[rollout]] = await roll([task()], InTurn(CALL, CALL, "yes"), TOOLS)
    assert [turn.observation for turn in rollout.turns] == ["", "3", "3"]


async def test_what_an_agent_of_ones_own_shows_the_model_is_read_from_the_tokens(agent):
    class Asks(PolicyAgent):
        @staticmethod
        def name():
            return "asks"

        async def run(self, instruction, environment, context):
            messages = [{"role": "user", "content": instruction}]
            turn = await self.policy.complete(messages)
            more = [{"role": "assistant", "content": turn.text}, {"role": "user", "content": "Sure?"}]
            await self.policy.complete([*messages, *more])

    [[rollout]] = await roll([task()], InTurn("no", "yes"), agent(Asks))
    assert rollout.turns[0].observation == "" and "Sure?" in rollout.turns[1].observation


async def test_the_model_speaks_at_most_max_turns_times():
    model = InTurn(CALL)
    [[rollout]] = await roll([task()], model, TOOLS)
    assert len(rollout.turns) == 3 and rollout.reward == 0.0


async def test_without_tools_a_call_is_an_answer():
    [[rollout]] = await roll([task(expected=CALL)], InTurn(CALL))
    assert len(rollout.turns) == 1 and rollout.reward == 1.0


async def test_every_rollout_and_every_turn_draws_for_itself_whatever_the_company():
    alone, together = Model(lambda message: CALL), Model(lambda message: CALL)
    await roll([task("b")], alone, TOOLS, num_samples=2)
    await roll([task("a"), task("b")], together, TOOLS, num_samples=2)
    assert len(set(together.seeds)) == 2 * 2 * 3
    assert set(alone.seeds) < set(together.seeds)


async def test_no_seed_stays_none():
    model = Model()
    await roll([task()], model, seed=None)
    assert model.seeds == [None]


async def test_groups_come_back_in_order_and_the_bound_holds_for_rollouts():
    under_way, most = 0, 0

    class Counting(Model):
        async def sample(self, *args, **options):
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0.001)
            under_way -= 1
            return await super().sample(*args, **options)

    groups = await roll([task(str(i)) for i in range(4)], Counting(), num_samples=3, concurrency=5)
    assert [[(r.task_id, r.metadata["sample"]) for r in group] for group in groups] == [
        [(str(i), sample) for sample in range(3)] for i in range(4)
    ]
    assert most == 5


async def test_an_agent_of_ones_own_gets_policy_renderer_and_sampling_params(agent):
    seen = {}

    class Mine(PolicyAgent):
        async def run(self, instruction, environment, context):
            seen.update(instruction=instruction, renderer=self.policy.renderer, tokens=self.policy.sampling.max_tokens)
            await self.policy.complete([{"role": "user", "content": "?"}], max_tokens=2)
            self.policy.answer = "yes"

    [[rollout]] = await roll([task()], InTurn("no no no"), agent(Mine))
    assert seen == {"instruction": "Do t", "renderer": RENDERER, "tokens": 128}
    assert len(rollout.turns[0].completion_tokens) == 2
    assert rollout.reward == 1.0, "the agent's answer counts, not the model's last word"


class Bare:
    """Inherits nothing and has only `run`."""

    def __init__(self, policy, greeting="Hello"):
        self.policy, self.greeting = live_policy(policy), greeting

    async def run(self, instruction, environment, context):
        await self.policy.complete([{"role": "user", "content": f"{self.greeting}: {instruction}"}])


class WithSetup(Bare):
    def setup(self, environment):
        self.greeting = "Ready"


class WithoutArguments:
    def run(self, instruction, environment, context):
        """A plain function that asks no model: nothing to learn from, and no crash."""


@pytest.mark.parametrize(
    ("cls", "params", "asked"),
    [
        (Bare, {}, "Hello: Do t"),
        (Bare, {"greeting": "Hi"}, "Hi: Do t"),
        (WithSetup, {}, "Ready: Do t"),
    ],
)
async def test_a_plain_class_without_a_base_is_an_agent(agent, cls, params, asked):
    model = Model()
    spec = replace(agent(cls), params=params)
    [[rollout]] = await roll([task()], model, spec)
    assert (rollout.status, rollout.reward, rollout.error) == ("ok", 1.0, None)
    assert asked in RENDERER.tokenizer.decode(model.asked[0][0])


async def test_a_plain_class_needs_neither_arguments_nor_setup(agent):
    [[rollout]] = await roll([task()], Model(), agent(WithoutArguments))
    assert (rollout.status, rollout.reward) == ("ok", 0.0)


async def test_a_class_without_run_is_refused_by_name(agent):
    with pytest.raises(EvsysError, match="has no run"):
        await roll([task()], Model(), agent(type("Idle", (), {})))


async def test_a_policy_lives_as_long_as_its_rollout(agent):
    names = []

    class Mine(PolicyAgent):
        async def run(self, instruction, environment, context):
            names.append(self.policy.name)
            assert live_policy(self.policy.name) is self.policy
            raise ValueError("out")

    await roll([task()], Model(), agent(Mine), num_samples=3)
    assert len(set(names)) == 3 and not _live
    with pytest.raises(Exception, match="no live policy"):
        live_policy(names[0])


async def test_what_a_harbor_agent_tells_of_its_tokens_is_taken_and_what_does_not_fit_is_not_trained_on(agent):
    details = {"prompt_token_ids": [[1], [1, 2]], "completion_token_ids": [[*b"no"], [*b"yes"]]}

    class Telling(PolicyAgent):
        async def run(self, instruction, environment, context):
            shifted = instruction == "Do shifted"
            logprobs = [[-1.0, -1.0, -1.0]] if shifted else [[-1.0, -1.0], [-1.0, -1.0, -1.0]]
            context.rollout_details = [{**details, "logprobs": logprobs}]
            context.cost_usd = 0.25

    [[whole], [shifted]] = await roll([task("whole"), task("shifted")], Model(), agent(Telling))
    assert [turn.text for turn in whole.turns] == ["no", "yes"] == [turn.text for turn in shifted.turns]
    assert whole.reward == 1.0 and whole.cost_usd == 0.25 and reason_to_drop(whole) is None
    assert reason_to_drop(shifted) == "unequal_lengths", "its logprobs belong to the other turn"


async def test_a_hanging_agent_times_out_and_leaves_the_others_alone(agent):
    class Hanging(PolicyAgent):
        async def run(self, instruction, environment, context):
            await self.policy.complete([{"role": "user", "content": instruction}])
            if instruction == "Do hang":
                await asyncio.sleep(60)

    settings = TrialSettings(limits=TrialTimeouts(agent_seconds=0.2))
    [[hung], [fine]] = await roll([task("hang"), task("go")], Model(), agent(Hanging), settings=settings)
    assert (hung.status, fine.status) == ("timeout", "ok")
    assert hung.turns and "0.2 seconds" in hung.error
    assert hung.reward == 1.0 and reason_to_drop(hung) is None, "what it had done by then is graded and learnt from"


async def test_a_task_may_have_a_shorter_limit_of_its_own(agent):
    class Slow(PolicyAgent):
        async def run(self, instruction, environment, context):
            await asyncio.sleep(30)

    limited = task(harbor={"needs": [], "limits": {"agent_seconds": 0.1}})
    [[rollout]] = await roll([limited], Model(), agent(Slow))
    assert rollout.status == "timeout"


async def test_a_sampler_that_times_out_is_infrastructure_even_if_the_agent_makes_an_answer_of_it(agent):
    class Stubborn(PolicyAgent):
        async def run(self, instruction, environment, context):
            try:
                await self.policy.complete([{"role": "user", "content": instruction}])
            except Exception:
                self.policy.answer = "yes"

    [[rollout]] = await roll([task()], Model(lambda message: TimeoutError("slow")), agent(Stubborn))
    assert (rollout.status, rollout.reward) == ("infra_error", None)
    assert "TimeoutError: slow" in rollout.error


async def test_tokens_without_their_logprobs_are_infrastructure():
    class Lossy(Model):
        async def sample(self, prompt, num_samples, sampling_params, **options):
            return SampleOutput(sequences=[SampledSequence(tokens=[65, 66], logprobs=[-1.0])])

    [[rollout]] = await roll([task()], Lossy(), retries=0)
    assert rollout.status == "infra_error" and "2 tokens with 1 logprobs" in rollout.error


async def test_a_broken_verifier_gives_no_reward_and_keeps_the_tokens():
    broken = InProcessVerifier(fn_name="regex_match", expected="(")
    [[rollout]] = await roll([task(verifier=broken)], Model())
    assert (rollout.status, rollout.reward) == ("infra_error", None)
    assert rollout.turns and "regex_match" in rollout.error


@pytest.mark.parametrize("agent", [None, CHAT], ids=["no agent", "chat"])
async def test_a_grader_that_is_handed_in_does_every_kind_of_task(agent):
    async def judge(task, answer):
        await asyncio.sleep(0)
        if answer == "garbage":
            raise VerifierFailed("the judge said nothing that can be read")
        return VerificationResult(reward=0.5, info={"why": answer})

    judged = task(verifier=LLMJudgeVerifier(judge_model="m", rubric="r"))
    model = InTurn("good", "garbage")
    groups = [await roll([judged], model, agent, grade=judge) for _ in range(2)]
    good, bad = groups[0][0][0], groups[1][0][0]
    assert (good.reward, good.metadata["verifier"]) == (0.5, {"why": "good"})
    assert (bad.status, bad.reward) == ("infra_error", None) and "nothing that can be read" in bad.error


async def test_without_such_a_grader_the_kind_is_refused_and_nothing_is_sampled():
    model = Model()
    [[rollout]] = await roll([task(verifier=LLMJudgeVerifier(judge_model="m", rubric="r"))], model)
    assert rollout.status == "infra_error" and "'llm_judge'" in rollout.error and model.asked == []


@pytest.mark.parametrize("agent", [None, CHAT], ids=["no agent", "chat"])
@pytest.mark.parametrize("stop", [Cancelled("ctrl-c"), SandboxUnavailable("no bubblewrap")], ids=["user", "machine"])
async def test_what_must_end_the_run_is_not_a_status(agent, stop):
    async def judge(task, answer):
        raise stop

    with pytest.raises(type(stop)):
        await roll([task()], Model(), agent, grade=judge)


async def test_cancelling_the_whole_leaves_nothing_running(agent):
    running, cleaned = [], []

    class Slow(PolicyAgent):
        async def run(self, instruction, environment, context):
            running.append(1)
            try:
                await asyncio.sleep(30)
            finally:
                cleaned.append(1)

    work = asyncio.create_task(roll([task("a"), task("b")], Model(), agent(Slow), num_samples=2))
    while len(running) < 4:
        await asyncio.sleep(0.005)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert len(cleaned) == 4 and not _live


async def test_an_agent_that_wants_an_environment_is_told_how_to_get_one(agent):
    class Shell(PolicyAgent):
        async def run(self, instruction, environment, context):
            await environment.exec("ls")

    [[rollout]] = await roll([task()], Model(), agent(Shell))
    assert rollout.status == "agent_error" and "environment: true" in rollout.error


async def test_logs_that_an_agent_leaves_are_gone_before_the_next_rollout(agent):
    found = []

    class Writing(PolicyAgent):
        async def run(self, instruction, environment, context):
            found.append(list(self.logs_dir.iterdir()))
            (self.logs_dir / "log.txt").write_text("x")

    await roll([task()], Model(), agent(Writing), num_samples=4, concurrency=1)
    assert found == [[], [], [], []]


async def test_an_unknown_agent_and_a_missing_harbor_end_the_call_with_the_remedy(monkeypatch):
    with pytest.raises(UnknownKind, match="closest: chat"):
        await roll([task()], Model(), AgentSpec(kind="chatt"))
    monkeypatch.setitem(sys.modules, "harbor", None)
    with pytest.raises(MissingDependency, match="harbor"):
        await roll([task()], Model(), CHAT)


async def test_without_an_agent_no_harbor_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "harbor", None)
    [[rollout]] = await roll([task()], Model(), None)
    assert (rollout.status, rollout.reward) == ("ok", 1.0)
    [[needy]] = await roll([task(environment=True)], Model(), None)
    assert needy.status == "infra_error" and "evsys-sdk[harbor]" in needy.error


async def test_an_agent_may_be_the_engines_own():
    engine = HarborRolloutEngine(agent=TOOLS)
    [[rollout]] = await engine.roll_out(
        [task()], sampler=InTurn(CALL, "yes"), renderer=RENDERER, sampling=SamplingParams(max_tokens=99)
    )
    assert len(rollout.turns) == 2 and rollout.reward == 1.0


async def test_a_rollout_is_plain_data():
    [[rollout]] = await roll([task()], InTurn(CALL, "yes"), TOOLS)
    json.dumps(rollout.metadata)
    assert rollout.metadata["lane"] == "in_process" and rollout.metadata["attempts"] == 1


async def test_a_crowd_that_wakes_at_once_leaves_the_loop_to_others():
    passes, seen = 0, []

    class Together(Model):
        async def sample(self, *args, **options):
            await asyncio.sleep(0.05)
            return await super().sample(*args, **options)

    class Busy(ByteTokenizer):
        def decode(self, tokens):
            seen.append(passes)
            time.sleep(0.002)
            return super().decode(tokens)

    async def count():
        nonlocal passes
        while True:
            await asyncio.sleep(0)
            passes += 1

    counter = asyncio.create_task(count())
    tasks, renderer = [task(str(i)) for i in range(50)], ChatRenderer(Busy())
    engine = HarborRolloutEngine(concurrency=50)
    await engine.roll_out(tasks, sampler=Together(), renderer=renderer, sampling=SamplingParams())
    counter.cancel()
    assert len(seen) == 50 and seen[-1] - seen[0] >= 10, "50 answers of 2 ms each, in shares of a few ms"


LEFT = threading.Event()


def wait() -> str:
    """Does not come back."""
    LEFT.wait(300)
    return "late"


async def test_a_time_out_in_a_tool_says_so_and_names_it():
    spec = AgentSpec(kind="chat", params={"max_turns": 3, "tools": [f"{__name__}:wait"]})
    called = InTurn('<tool_call>{"name": "wait", "arguments": {}}</tool_call>', "yes")
    try:
        [[rollout]] = await roll([task()], called, spec, settings=TrialSettings(limits=TrialTimeouts(agent_seconds=2)))
    finally:
        LEFT.set()
    assert rollout.status == "timeout" and "(it was waiting for a tool: wait)" in rollout.error


async def test_a_chat_that_outgrows_the_context_is_the_agents_failure_and_is_not_tried_again(agent):
    class Long(PolicyAgent):
        async def run(self, instruction, environment, context):
            await self.policy.complete([{"role": "user", "content": instruction}])
            await self.policy.complete([{"role": "user", "content": "word " * 100}])

    model = Model()
    [[rollout]] = await roll([task()], model, agent(Long), settings=TrialSettings(context_length=100))
    assert (rollout.status, rollout.metadata["attempts"], len(rollout.turns)) == ("agent_error", 1, 1)
    assert "tokens, and the model's context length is 100: shorten" in rollout.error
    [(prompt, _, params)] = model.asked
    assert params.max_tokens == 100 - len(prompt), "no more is asked for than there is room"
