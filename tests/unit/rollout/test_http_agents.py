"""Agents that only speak HTTP, trained like any other: the endpoint serves the live policy of their own rollout."""

from __future__ import annotations

import pytest

pytest.importorskip("harbor", reason="needs the extra harbor")
pytest.importorskip("openai", reason="needs the extra frontier")
pytest.importorskip("uvicorn", reason="needs the extra harbor")

import openai
from harbor.agents.base import BaseAgent

from evsys_sdk.backends.mock_tokenizer import ByteTokenizer
from evsys_sdk.data_types import HarborTask, InProcessVerifier
from evsys_sdk.errors import EvsysError
from evsys_sdk.protocols import AgentSpec
from evsys_sdk.rollout.engine import HarborRolloutEngine
from evsys_sdk.rollout.trial import TrialSettings
from evsys_sdk.run.http_policy import http_front
from evsys_sdk.testing import ScriptedModel
from evsys_sdk.training.rendering import ChatRenderer
from evsys_sdk.training.rollout_data import reason_to_drop
from evsys_sdk.training_api import SamplingParams

RENDERER = ChatRenderer(ByteTokenizer())


class Foreign(BaseAgent):
    """A harness that knows OpenAI's client and nothing of ours."""

    def __init__(self, logs_dir, model_name=None, *, api_base, swallow=False, **kwargs):
        super().__init__(logs_dir, model_name, **kwargs)
        self.client = openai.AsyncOpenAI(base_url=api_base, api_key="unused", max_retries=0)
        self.swallow = swallow

    @staticmethod
    def name():
        return "foreign"

    def version(self):
        return "1"

    async def setup(self, environment): ...

    async def run(self, instruction, environment, context):
        messages = [{"role": "user", "content": instruction}]
        try:
            for _ in range(2):
                said = await self.client.chat.completions.create(
                    model=self.model_name, messages=messages, max_tokens=99, temperature=0.1
                )
                messages.append({"role": "assistant", "content": said.choices[0].message.content})
                messages.append({"role": "user", "content": "Sure?"})
        except openai.APIError:
            if not self.swallow:
                raise


def spec(**params):
    told = {"model_name": "{policy}", "api_base": "{base_url}", **params}
    return AgentSpec(kind=f"{__name__}:Foreign", params=told)


class Model(ScriptedModel):
    def __init__(self, script):
        super().__init__(script)
        self.params = []

    def sample(self, prompt, num_samples, sampling_params, **options):
        self.params.append(sampling_params)
        return super().sample(prompt, num_samples, sampling_params, **options)


async def test_a_chat_that_outgrew_the_models_context_is_told_so_as_openai_does():
    model = Model(lambda message: "yes")
    first = len(RENDERER.prompt([{"role": "user", "content": "Well?"}]))
    [rollout] = await roll(model, spec(), front=lambda: http_front(first + 3))
    assert model.params[0].max_tokens == 3  # no more than fits
    assert rollout.status == "agent_error" and f"maximum context length is {first + 3} tokens" in rollout.error
    assert len(model.params) == 1


async def roll(model, agent, *, num_samples=1, front=http_front):
    engine = HarborRolloutEngine(backoff_seconds=0.001, settings=TrialSettings(http_front=front))
    task = HarborTask(
        task_id="t", instruction="Well?", verifier=InProcessVerifier(fn_name="exact_match", expected="yes")
    )
    sampling = SamplingParams(seed=1, max_tokens=8, temperature=0.7)
    [group] = await engine.roll_out(
        [task], sampler=model, renderer=RENDERER, sampling=sampling, num_samples=num_samples, agent=agent
    )
    return group


async def test_every_rollout_has_its_own_turns_with_exact_tokens_and_the_policys_way_of_drawing():
    model = Model({"Well?": "no", "Sure?": "yes"})
    group = await roll(model, spec(), num_samples=3)
    assert [(r.status, r.reward) for r in group] == [("ok", 1.0)] * 3, group[0].error
    for rollout in group:
        assert [turn.text for turn in rollout.turns] == ["no", "yes"]
        assert rollout.turns[0].prompt_tokens == RENDERER.prompt([{"role": "user", "content": "Well?"}])
        assert reason_to_drop(rollout) is None
    assert {(p.temperature, p.max_tokens) for p in model.params} == {(0.7, 8)}
    assert len({p.seed for p in model.params}) == 6


@pytest.mark.parametrize("swallow", [False, True])
async def test_a_sampler_that_fails_behind_the_endpoint_is_infrastructure_whatever_the_harness_makes_of_it(swallow):
    [rollout] = await roll(Model(lambda message: TimeoutError("slow")), spec(swallow=swallow))
    assert (rollout.status, rollout.reward) == ("infra_error", None)
    assert "slow" in rollout.error


async def test_an_engine_without_an_endpoint_says_so():
    with pytest.raises(EvsysError, match="serves no endpoint"):
        await roll(Model({}), spec(), front=None)
