"""The mock backend's settings: latency and failures on request."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace

import pytest

from evsys_sdk.backends import mock
from evsys_sdk.backends.mock import MockBackend
from evsys_sdk.config.schema import ModelConfig
from evsys_sdk.errors import BackendError, ConfigError
from evsys_sdk.registry import backends
from evsys_sdk.training_api import AdamParams, ModelInput, SamplingParams


@pytest.fixture
async def now(monkeypatch):
    """The loop's clock, and the backend's: whoever waits makes it jump, and nothing else moves it."""
    loop, seconds = asyncio.get_running_loop(), [0.0]
    look = loop._selector.select

    def jump(timeout=None):
        seconds[0] += timeout or 0.0
        return look(0)

    monkeypatch.setattr(loop, "time", lambda: seconds[0])
    monkeypatch.setattr(loop._selector, "select", jump)
    monkeypatch.setattr(mock, "time", SimpleNamespace(monotonic=loop.time))
    return loop.time


async def test_latency_is_waited_for_per_call_in_order(make_service, imitate, now):
    client = await make_service(latency_ms=150).create_training_client(rank=1, seed=1)
    began = now()
    output = client.forward_backward([imitate("q", "a")], "cross_entropy")
    optim = client.optim_step(AdamParams(learning_rate=1e-3))
    assert now() == began  # submitting does not wait
    await optim
    assert now() - began == pytest.approx(0.3)  # it came after the first
    await output
    assert now() - began == pytest.approx(0.3)


async def test_the_latencies_of_two_clients_overlap(make_service, imitate, now):
    service = make_service(latency_ms=150)
    clients = await asyncio.gather(*(service.create_training_client(rank=1, seed=seed) for seed in (1, 2)))

    async def train(client):
        for _ in range(2):
            await client.forward_backward([imitate("q", "a")], "cross_entropy")

    began = now()
    await asyncio.gather(*map(train, clients))
    assert now() - began == pytest.approx(0.3)  # one after the other would be 0.6


async def test_samples_of_one_client_overlap_too(make_service, now):
    sampler = await make_service(latency_ms=150).create_sampling_client()
    began = now()
    prompt = ModelInput.from_ints([*b"hello"])
    await asyncio.gather(*(sampler.sample(prompt, 1, SamplingParams(max_tokens=4)) for _ in range(4)))
    assert now() - began == pytest.approx(0.15)


async def test_the_chosen_optimiser_step_fails_and_changes_nothing(make_service, imitate, learn):
    client = await make_service(fail_at_step=3).create_training_client(rank=1, seed=1)
    data = [imitate("q", "a")]
    await learn(client, data, steps=2)
    before = await client.save_state("x")
    await client.forward_backward(data, "cross_entropy")
    call = client.optim_step(AdamParams(learning_rate=1e-3))
    with pytest.raises(BackendError, match=r"fails at step 3 as configured \(fail_at_step\)"):
        await call
    assert await client.save_state("x") == before


def test_prepare_fails_on_request(tmp_path):
    with pytest.raises(BackendError, match="fail_on_prepare"):
        MockBackend(fail_on_prepare=True).prepare(model=ModelConfig(name="m"), run_dir=tmp_path)


def test_a_misspelt_setting_is_refused():
    with pytest.raises(ConfigError, match=r"latency_m .*closest: latency_ms"):
        backends.build("mock", {"latency_m": 3})


async def test_an_answer_may_be_awaited_twice(service, imitate):
    client = await service.create_training_client(rank=1, seed=1)
    call = client.forward_backward([imitate("q", "a")], "cross_entropy")
    assert await call is await call


def test_looking_up_the_backend_loads_no_numpy():
    code = (
        "import sys; import evsys_sdk.backends.mock, evsys_sdk.algorithms.sft; "
        "sys.exit('numpy' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
