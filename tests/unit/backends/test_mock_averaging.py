"""The mock's `average_weights`: a weighted sum of saved weights."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from evsys_sdk.backends.mock import MockBackend
from evsys_sdk.backends.mock_model import restore
from evsys_sdk.config.schema import ModelConfig
from evsys_sdk.errors import BackendError
from evsys_sdk.training_api import AdamParams, Datum, ModelInput, TensorData


async def _trained(service, text, rank=2):
    client = await service.create_training_client(rank=rank, seed=1)
    tokens = [*text.encode()]
    inputs = {"target_tokens": TensorData(tokens[1:], "int64"), "weights": TensorData([1.0] * (len(tokens) - 1))}
    client.forward_backward([Datum(ModelInput.from_ints(tokens[:-1]), inputs)], "cross_entropy")
    await client.optim_step(AdamParams(learning_rate=1e-2))
    return await client.save_weights_for_sampler("w")


@pytest.fixture
def service(tmp_path):
    return MockBackend().prepare(model=ModelConfig(name="m"), run_dir=tmp_path)["service"]


def test_every_weight_is_the_weighted_sum(service):
    async def check():
        paths = [await _trained(service, "hello"), await _trained(service, "world")]
        path = await service.average_weights(paths, [0.75, 0.25], "mix")
        first, second, mixed = (restore(each, "sampler", "m")[0] for each in (*paths, path))
        assert np.allclose(mixed.weights, 0.75 * first.weights + 0.25 * second.weights, atol=1e-7)
        assert (mixed.used == (first.used | second.used)).all()

    assert service.capabilities.average_weights
    asyncio.run(check())


def test_weights_of_unlike_ranks_are_refused(service):
    async def check():
        paths = [await _trained(service, "hello"), await _trained(service, "world", rank=3)]
        await service.average_weights(paths, [0.5, 0.5], "mix")

    with pytest.raises(BackendError, match="cannot average weights of ranks 2, 3"):
        asyncio.run(check())
