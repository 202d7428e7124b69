"""`score_hosted`: a hosted model on benchmark tasks, with its usage, its failures, and nothing asked twice."""

from __future__ import annotations

import asyncio

import pytest

from evsys_sdk.errors import BackendError, EvsysAuthError, EvsysError
from evsys_sdk.eval.benchmark import Benchmark
from evsys_sdk.eval.hosted import score_hosted
from evsys_sdk.inference.base import AskingClient, Completion
from evsys_sdk.registry import register_verifier, verifiers
from evsys_sdk.rollout.client_model import ClientModel, hosted_problems

RED = {"task_id": "red", "instruction": "say red", "verifier": {"fn_name": "exact_match", "expected": "red"}}
BLUE = {"task_id": "blue", "instruction": "say blue", "verifier": {"fn_name": "exact_match", "expected": "blue"}}
SUITE = Benchmark.from_iterable("colours", [RED, BLUE])


class Provider(AskingClient):
    """Says the last word of the question; `script` holds other answers, or errors, for some."""

    def __init__(self, script=None, cost_usd=0.25, **params):
        super().__init__(**params)
        self.script, self.cost_usd, self.asked, self.closed = script or {}, cost_usd, [], 0

    async def _ask(self, question):
        self.asked.append(question)
        text = question.messages[-1]["content"]
        reply = self.script.get(text, text.split()[-1])
        if isinstance(reply, Exception):
            raise reply
        return Completion(text=reply, model="big-1", input_tokens=7, output_tokens=5, cost_usd=self.cost_usd)

    async def aclose(self):
        self.closed += 1


class Kept:
    """Finished rollouts in memory."""

    def __init__(self):
        self.rollouts = {}

    def find(self, task_id, sample):
        return self.rollouts.get((task_id, sample))

    def add(self, task_id, sample, rollout):
        self.rollouts.setdefault((task_id, sample), rollout)


@pytest.fixture(autouse=True)
def registry_as_before(monkeypatch):
    verifiers.names()
    monkeypatch.setattr(verifiers, "entries", dict(verifiers.entries))


async def test_a_hosted_model_is_scored_with_its_tokens_and_its_cost():
    client = Provider({"say blue": "green"})
    metrics = ["pass@1", "cost", "tokens"]
    result = await score_hosted(SUITE, client, metrics=metrics, num_samples=2, max_tokens=9, temperature=0.5)
    assert [score.value for score in result.scores] == [0.5, 0.25, 12.0]
    assert [(r.task_id, r.reward, r.metadata["sample"]) for r in result.rollouts] == [
        ("red", 1.0, 0), ("red", 1.0, 1), ("blue", 0.0, 0), ("blue", 0.0, 1),
    ]  # fmt: skip
    assert {(q.max_tokens, q.temperature) for q in client.asked} == {(9, 0.5)}
    assert client.closed == 1


async def test_an_unknown_price_gives_no_cost_and_not_a_cost_of_zero():
    result = await score_hosted(SUITE, Provider(cost_usd=None), metrics=["pass@1", "cost"])
    assert result.scores[0].value == 1.0
    assert result.scores[1].value is None
    assert "the price of big-1 is not known" in result.scores[1].error


async def test_a_provider_that_fails_is_an_error_and_not_a_zero():
    result = await score_hosted(SUITE, Provider({"say blue": BackendError("overloaded")}))
    broken = result.rollouts[1]
    assert (broken.reward, broken.status, broken.error) == (None, "infra_error", "overloaded")
    assert (result.scores[0].value, result.scores[0].n_errors, result.scores[0].n_rollouts) == (0.5, 1, 2)
    assert (await score_hosted(SUITE, Provider({"say red": OSError("x"), "say blue": OSError("x")}))).scores[
        0
    ].value is None


async def test_a_verifier_that_breaks_keeps_the_answer_and_gives_no_reward():
    @register_verifier("broken_for_hosted")
    def broken(model_output, expected, params):
        raise RuntimeError("no")

    task = {**RED, "verifier": {"fn_name": "broken_for_hosted", "expected": "red"}}
    result = await score_hosted(Benchmark.from_iterable("b", [task, BLUE]), Provider())
    assert (result.rollouts[0].reward, result.rollouts[0].status) == (None, "infra_error")
    assert result.rollouts[0].completion == "red"


async def test_a_verifier_that_hangs_is_given_up():
    async def hang(task, answer):
        await asyncio.sleep(60)

    groups = await ClientModel(Provider(), grade=hang, verifier_seconds=0.01).roll_out(SUITE.tasks[:1])
    assert (groups[0][0].status, groups[0][0].reward) == ("infra_error", None)
    assert "longer than 0.01 seconds" in groups[0][0].error


async def test_a_refused_key_ends_the_evaluation():
    with pytest.raises(EvsysAuthError, match="the key"):
        await score_hosted(SUITE, Provider({"say red": EvsysAuthError("it refused the key")}))


async def test_what_is_finished_is_not_asked_again():
    kept, first, second = Kept(), Provider(), Provider({"say red": "never asked"})
    await score_hosted(SUITE, first, limit=1, num_samples=2, finished=kept)
    result = await score_hosted(SUITE, second, num_samples=2, finished=kept)
    assert [question.messages[-1]["content"] for question in second.asked] == ["say blue", "say blue"]
    assert result.scores[0].value == 1.0
    assert len(kept.rollouts) == 4


async def test_a_plain_client_without_a_base_is_scored_too():
    class Plain:
        def generate(self, *, prompt, max_tokens, temperature, stop):
            return prompt.split()[-1]

    class Wrong:
        async def generate(self, *, prompt, max_tokens, temperature, stop):
            return 7

    assert (await score_hosted(SUITE, Plain())).scores[0].value == 1.0
    result = await score_hosted(SUITE, Wrong())
    assert "returned int, not text" in result.error


async def test_no_more_than_the_given_number_are_under_way():
    at_once = most = 0

    class Slow(Provider):
        async def _ask(self, question):
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0)
            at_once -= 1
            return await super()._ask(question)

    await score_hosted(SUITE, Slow(), num_samples=8, concurrency=3)
    assert most == 3


async def test_a_task_that_needs_an_environment_is_refused_by_name():
    task = {**RED, "metadata": {"environment": {"files": {}}}}
    suite = Benchmark.from_iterable("env", [task])
    assert hosted_problems(suite.tasks) == [
        "task 'red' needs an environment (metadata.environment), and a hosted model only answers questions"
    ]
    assert "needs an environment" in (await score_hosted(suite, Provider())).error
    assert hosted_problems(SUITE.tasks) == []


async def test_an_agent_is_refused():
    from evsys_sdk.protocols import AgentSpec

    with pytest.raises(EvsysError, match="asked without an agent"):
        await score_hosted(SUITE, Provider(), agent=AgentSpec(kind="chat"))
