"""A harness that only speaks HTTP is trained: what the endpoint captured moves the weights the right way."""

from __future__ import annotations

import asyncio
from statistics import fmean

import pytest

from evsys_sdk.backends.mock import MockBackend
from evsys_sdk.config.schema import ModelConfig
from evsys_sdk.serving import Capture, Endpoint, ServedModel, running
from evsys_sdk.training.advantages import centred
from evsys_sdk.training.rendering import ChatRenderer
from evsys_sdk.training.rollout_data import policy_datum
from evsys_sdk.training_api import AdamParams

openai = pytest.importorskip("openai", reason="needs the extra openai")

STEPS, ROLLOUTS = 8, 24


async def harness(asker, number):
    """Knows nothing of training: two questions to the model it was given, and its own judgement of the answers."""
    said = ""
    for question in ("first", "second"):
        answer = await asker.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": question}], max_tokens=1, seed=number
        )
        said += answer.choices[0].message.content
    return sum(letter in "abcdefghijklm" for letter in said) / 2


async def test_the_reward_of_a_harness_rises(tmp_path):
    service = MockBackend().prepare(model=ModelConfig(name="m"), run_dir=tmp_path)["service"]
    trainer = await service.create_training_client(rank=8, seed=1)
    renderer, rewards = ChatRenderer(service.get_tokenizer()), []
    endpoint = Endpoint({}, capture=Capture())
    client = openai.AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=0)
    async with running(endpoint) as found, client:
        for step in range(STEPS):
            sampler = await service.create_sampling_client(await trainer.save_weights_for_sampler(f"s{step}"))
            endpoint.models["policy"] = ServedModel(sampler=sampler, renderer=renderer)
            sessions = [f"{step}.{number}" for number in range(ROLLOUTS)]
            seeds = range(step * ROLLOUTS, (step + 1) * ROLLOUTS)
            askers = [client.with_options(base_url=found.base_url(session)) for session in sessions]
            got = await asyncio.gather(*(harness(*pair) for pair in zip(askers, seeds, strict=True)))
            data = [
                policy_datum(turn, [advantage] * len(turn.completion_tokens))
                for session, advantage in zip(sessions, centred(got), strict=True)
                for turn in endpoint.capture.take(session)
            ]
            assert len(data) == 2 * ROLLOUTS
            await trainer.forward_backward(data, "importance_sampling")
            await trainer.optim_step(AdamParams(learning_rate=0.3))
            rewards.append(fmean(got))
    assert rewards[-1] > rewards[0] + 0.3, rewards
