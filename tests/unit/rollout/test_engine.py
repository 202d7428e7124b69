"""The in-process engine: exact tokens, own seeds, and failures that are statuses and never rewards."""

from __future__ import annotations

import asyncio

import pytest

from evsys_sdk.backends.mock_tokenizer import ByteTokenizer
from evsys_sdk.data_types import E2BVerifier, HarborTask, InProcessVerifier, LLMJudgeVerifier
from evsys_sdk.errors import BackendError, BackendUnavailable, Cancelled
from evsys_sdk.registry import register_verifier, verifiers
from evsys_sdk.rollout.engine import InProcessRolloutEngine, refusal
from evsys_sdk.testing import ScriptedModel
from evsys_sdk.training.rendering import ChatRenderer
from evsys_sdk.training_api import SampledSequence, SampleOutput, SamplingParams

RENDERER = ChatRenderer(ByteTokenizer())
END = ByteTokenizer.eos_token_id


def task(task_id="t", expected="yes", fn_name="exact_match", **metadata) -> HarborTask:
    verifier = InProcessVerifier(fn_name=fn_name, expected=expected)
    return HarborTask(task_id=task_id, instruction=f"Do {task_id}", verifier=verifier, metadata=metadata)


class Model(ScriptedModel):
    """A scripted model that also notes how it was asked."""

    def __init__(self, script=lambda message: "yes"):
        super().__init__(script)
        self.calls = []

    def sample(self, prompt, num_samples, sampling_params, **options):
        self.calls.append((prompt.to_ints(), num_samples, sampling_params))
        return super().sample(prompt, num_samples, sampling_params, **options)

    @property
    def seeds(self):
        return [params.seed for _, _, params in self.calls]


async def no_sleep(seconds):
    pass


async def roll(tasks, sampler, *, num_samples=1, sampling=None, **options):
    engine = InProcessRolloutEngine(**{"sleep": no_sleep, **options})
    sampling = sampling or SamplingParams(seed=1)
    return await engine.roll_out(tasks, sampler=sampler, renderer=RENDERER, sampling=sampling, num_samples=num_samples)


async def test_each_task_gets_its_rollouts_in_order():
    groups = await roll([task("a"), task("b")], Model({"Do a": "yes", "Do b": ["no", "yes"]}), num_samples=2)
    assert [[r.reward for r in group] for group in groups] == [[1.0, 1.0], [0.0, 1.0]]
    assert [[r.task_id for r in group] for group in groups] == [["a", "a"], ["b", "b"]]
    assert [r.metadata["sample"] for r in groups[1]] == [0, 1]


async def test_a_turn_keeps_the_exact_tokens_and_the_text_without_the_end_mark():
    sampler = Model()
    [[rollout]] = await roll([task()], sampler)
    turn = rollout.turns[0]
    assert turn.prompt_tokens == sampler.calls[0][0] == RENDERER.prompt([{"role": "user", "content": "Do t"}])
    assert turn.completion_tokens == [*b"yes", END]
    assert turn.logprobs == [0.0] * 4
    assert rollout.completion == "yes"


async def test_a_system_message_in_the_metadata_speaks_first():
    sampler = Model()
    await roll([task(system="Be short.")], sampler)
    assert sampler.prompts[0].startswith("<|im_start|>system\nBe short.<|im_end|>")


async def test_a_tasks_seed_does_not_depend_on_company_or_order():
    alone, together = Model(), Model()
    await roll([task("b")], alone)
    await roll([task("a"), task("b")], together)
    assert alone.seeds == together.seeds[1:] != together.seeds[:1]


async def test_another_seed_draws_otherwise_and_no_seed_stays_none():
    one, two, none = Model(), Model(), Model()
    await roll([task()], one, sampling=SamplingParams(seed=1))
    await roll([task()], two, sampling=SamplingParams(seed=2))
    await roll([task()], none, sampling=SamplingParams(seed=None))
    assert one.seeds != two.seeds
    assert none.seeds == [None]


async def test_no_more_tasks_than_the_bound_are_under_way():
    under_way, most = 0, 0

    class Counting(Model):
        async def sample(self, *args, **options):
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0)
            under_way -= 1
            return await super().sample(*args, **options)

    await roll([task(str(i)) for i in range(20)], Counting(), concurrency=3)
    assert most == 3


def test_an_engine_serves_one_event_loop_after_another():
    engine = InProcessRolloutEngine(concurrency=1)
    for _ in range(2):
        work = engine.roll_out([task("a"), task("b")], sampler=Model(), renderer=RENDERER, sampling=SamplingParams())
        assert len(asyncio.run(work)) == 2


@pytest.mark.parametrize("failure", [BackendError("lost"), TimeoutError("slow"), ConnectionError("gone")])
async def test_a_lost_call_is_tried_twice_more_and_then_an_infra_error(failure):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    sampler = Model(lambda message: failure)
    [group] = await roll([task()], sampler, num_samples=2, sleep=sleep, backoff_seconds=0.5)
    assert len(sampler.calls) == 3 and slept == [0.5, 1.0]
    assert [(r.status, r.reward) for r in group] == [("infra_error", None)] * 2
    assert str(failure) in group[0].error


async def test_a_call_that_comes_back_counts_as_if_nothing_had_happened():
    answers = iter([BackendError("lost"), "yes"])
    [[rollout]] = await roll([task()], Model(lambda message: next(answers)))
    assert (rollout.status, rollout.reward) == ("ok", 1.0)


async def test_a_bug_in_a_sampler_is_told_and_not_retried():
    sampler = Model(lambda message: KeyError("weights"))
    [[rollout]] = await roll([task()], sampler)
    assert len(sampler.calls) == 1
    assert (rollout.status, rollout.error) == ("infra_error", "KeyError: 'weights'")


async def test_one_broken_task_leaves_the_others_alone():
    groups = await roll([task("a"), task("b")], Model({"Do a": ValueError("bad"), "Do b": "yes"}))
    assert [group[0].status for group in groups] == ["infra_error", "ok"]


async def test_a_broken_verifier_gives_no_reward_and_keeps_the_tokens():
    [[rollout]] = await roll([task(fn_name="regex_match", expected="(")], Model())
    assert (rollout.status, rollout.reward) == ("infra_error", None)
    assert "verifier 'regex_match' on task 't'" in rollout.error
    assert rollout.turns[0].text == "yes"


async def test_an_unknown_verifier_is_an_error_with_the_nearest_name():
    [[rollout]] = await roll([task(fn_name="exact_mach")], Model())
    assert rollout.reward is None and "closest: exact_match" in rollout.error


async def test_what_a_verifier_says_stays_with_the_rollout(monkeypatch):
    from evsys_sdk.protocols import VerificationResult

    verifiers.names()
    monkeypatch.setattr(verifiers, "entries", dict(verifiers.entries))

    @register_verifier("explains")
    class Explains:
        def verify(self, *, prompt, completion, target):
            return VerificationResult(reward=0.5, info={"asked": prompt})

    [[rollout]] = await roll([task(fn_name="explains")], Model())
    assert rollout.reward == 0.5 and rollout.metadata["verifier"] == {"asked": "Do t"}


@pytest.mark.parametrize(
    "verifier",
    [E2BVerifier(dockerfile="", test_sh=""), LLMJudgeVerifier(judge_model="m", rubric="r")],
    ids=["e2b", "llm_judge"],
)
async def test_a_task_for_another_engine_is_refused_by_name_without_sampling(verifier):
    hard = HarborTask(task_id="h", instruction="x", verifier=verifier)
    sampler = Model()
    [group] = await roll([hard], sampler, num_samples=2)
    assert [(r.status, r.reward) for r in group] == [("infra_error", None)] * 2
    assert repr(verifier.kind) in group[0].error and refusal(hard) == group[0].error
    assert sampler.calls == []


async def test_completions_that_did_not_come_are_errors():
    class Stingy(Model):
        def sample(self, prompt, num_samples, sampling_params, **options):
            return super().sample(prompt, 1, sampling_params, **options)

    [group] = await roll([task()], Stingy(), num_samples=3)
    assert [r.status for r in group] == ["ok", "infra_error", "infra_error"]
    assert "fewer than the 3 completions" in group[1].error


async def test_tokens_without_their_logprobs_are_an_error():
    class Lossy(Model):
        async def sample(self, prompt, num_samples, sampling_params, **options):
            return SampleOutput(sequences=[SampledSequence(tokens=[65, 66], logprobs=[-1.0])])

    [[rollout]] = await roll([task()], Lossy())
    assert rollout.reward is None and "2 tokens with 1 logprobs" in rollout.error


async def test_a_cancelled_run_passes_through_and_takes_the_others_along():
    started, finished = [], []

    class Slow(Model):
        async def sample(self, prompt, num_samples, sampling_params, **_):
            started.append(1)
            if len(started) == 1:
                raise Cancelled("stop")
            await asyncio.sleep(3600)
            finished.append(1)

    with pytest.raises(Cancelled):
        await asyncio.wait_for(roll([task("a"), task("b")], Slow()), timeout=300)
    assert finished == []


async def test_seconds_are_taken_from_the_clock_that_was_handed_in():
    ticks = iter([10.0, 12.5])
    [[rollout]] = await roll([task()], Model(), clock=lambda: next(ticks))
    assert rollout.seconds == 2.5


class Lost(Model):
    """A sampler whose calls are all lost."""

    def __init__(self, failure):
        super().__init__()
        self.failure = failure

    async def sample(self, prompt, num_samples, sampling_params, **options):
        self.calls.append(prompt.to_ints())
        raise self.failure


@pytest.mark.parametrize("max_attempts", [1, 2, 5])
async def test_a_lost_call_is_made_as_often_as_max_attempts_says(max_attempts):
    sampler, engine = Lost(ConnectionError("gone")), InProcessRolloutEngine(sleep=no_sleep)
    limited = engine.limited(max_attempts=max_attempts)
    [[rollout]] = await limited.roll_out([task()], sampler=sampler, renderer=RENDERER, sampling=SamplingParams(seed=1))
    assert rollout.status == "infra_error" and len(sampler.calls) == max_attempts
    assert limited._slots is engine._slots and engine.limited() is engine, "only what is asked for is its own"


async def test_what_another_layer_has_retried_is_not_tried_again():
    sampler = Lost(BackendUnavailable("the server has failed for 300 s"))
    [[rollout]] = await roll([task()], sampler)
    assert rollout.status == "infra_error" and len(sampler.calls) == 1


async def test_an_engine_with_places_of_its_own_does_not_take_the_others():
    engine = InProcessRolloutEngine(sleep=no_sleep)
    limited = engine.limited(concurrency=2)
    assert (limited.concurrency, engine.concurrency) == (2, 64) and limited._slots is not engine._slots
    assert limited.retry_policy is engine.retry_policy
