"""What the local backend keeps open and on disk, and what it lets go."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from pathlib import Path

import pytest

pytest.importorskip("torch")

from safetensors.torch import load_file

from evsys_engine import folders
from evsys_sdk.algorithms.rl import RL
from evsys_sdk.algorithms.sdft import SDFT
from evsys_sdk.backends import local
from evsys_sdk.backends.local import LocalBackend
from evsys_sdk.config.schema import ModelConfig
from evsys_sdk.errors import BackendError
from evsys_sdk.rollout.engine import InProcessRolloutEngine
from evsys_sdk.testing import training_context
from evsys_sdk.training_api import AdamParams, Datum, ModelInput, SamplingParams, TensorData

ADAPTER = "adapter_model.safetensors"


@pytest.fixture
def service(tmp_path):
    backend = LocalBackend(threads=1)
    handles = backend.prepare(model=ModelConfig(name="tiny-random"), run_dir=tmp_path)
    yield handles["service"]
    backend.teardown(handles)


async def _trained(service, tokens, rank=2):
    client = await service.create_training_client(rank=rank, seed=1)
    inputs = {"target_tokens": TensorData(tokens[1:], "int64"), "weights": TensorData([1.0] * (len(tokens) - 1))}
    client.forward_backward([Datum(ModelInput.from_ints(tokens[:-1]), inputs)], "cross_entropy")
    await client.optim_step(AdamParams(learning_rate=1e-2))
    return await client.save_weights_for_sampler("w")


def test_averaged_weights_are_the_weighted_sum_and_can_be_sampled(service):
    async def check():
        paths = [await _trained(service, [1, 2, 3, 4]), await _trained(service, [9, 8, 7, 6])]
        mixed = await service.average_weights(paths, [0.75, 0.25], "mix")
        first, second, both = (load_file(Path(path) / ADAPTER) for path in (*paths, mixed))
        for name, tensor in both.items():
            assert tensor.allclose(0.75 * first[name] + 0.25 * second[name], atol=1e-7)
        assert any(not both[name].equal(first[name]) for name in both)
        sampler = await service.create_sampling_client(mixed)
        answer = await sampler.sample(ModelInput.from_ints([1, 2]), 1, SamplingParams(max_tokens=2, seed=0))
        assert len(answer.sequences) == 1

    assert service.capabilities.average_weights
    asyncio.run(check())


def test_weights_of_unlike_ranks_are_not_averaged(service):
    async def check():
        paths = [await _trained(service, [1, 2, 3]), await _trained(service, [1, 2, 3], rank=3)]
        await service.average_weights(paths, [0.5, 0.5], "mix")

    with pytest.raises(BackendError, match="rank, scale or layers"):
        asyncio.run(check())


def test_a_sampler_that_was_let_go_is_not_held(service):
    async def check():
        sampler = await service.create_sampling_client()
        await sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=1))
        sampler.close()
        sampler.close()
        assert service.opened == []
        return weakref.ref(sampler.sampler)

    held = asyncio.run(check())
    gc.collect()
    assert held() is None


def test_a_sampler_that_was_let_go_answers_no_more(service):
    async def check():
        sampler = await service.create_sampling_client()
        sampler.close()
        await sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=1))

    with pytest.raises(BackendError, match="closed"):
        asyncio.run(check())


def test_only_weights_of_this_run_are_deleted(service, tmp_path):
    other = tmp_path / "elsewhere"
    other.mkdir()

    async def check():
        path = await _trained(service, [1, 2, 3])
        await service.discard_weights(path)
        assert not Path(path).exists()
        with pytest.raises(BackendError, match="not of this run"):
            await service.discard_weights(str(other))

    asyncio.run(check())
    assert other.exists()


def test_the_same_weights_saved_again_are_there_at_every_moment(service, monkeypatch, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    if not folders._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot swap two names")
    there, replace = [], os.replace

    async def check():
        client = await service.create_training_client(rank=2, seed=1)
        path = Path(await client.save_weights_for_sampler("w"))

        def watched(*paths):
            replace(*paths)
            there.append(path.exists())

        monkeypatch.setattr(os, "replace", watched)
        assert await client.save_weights_for_sampler("w") == str(path)
        assert there and all(there) and [entry.name for entry in path.parent.iterdir()] == [path.name]

    asyncio.run(check())


def _tasks(verifier):
    return [{"task_id": word, "instruction": word, "verifier": verifier} for word in ("red", "green", "blue", "grey")]


def _folders(tmp_path):
    return sorted(path.name.rsplit("-", 1)[0] for path in (tmp_path / "weights").iterdir())


def test_rollout_weights_go_step_by_step_and_checkpoints_stay(tmp_path):
    backend = LocalBackend(threads=1)
    rows = _tasks({"fn_name": "regex_match", "expected": "[a-m]"})
    ctx = training_context(tmp_path, rows, backend=backend, model_name="tiny-random", rollouts=InProcessRolloutEngine())
    service = ctx.extras["backend_handles"]["service"]
    RL(max_steps=4, batch_size=2, num_samples=4, max_tokens=4, kl_coef=0.1, async_steps=1, save_every=2).train(ctx)
    kept = ["reference-sampler", "step-000002-sampler", "step-000002-state", "step-000004-sampler", "step-000004-state"]
    # The rollouts of step 3 came from the weights before step 2, and the checkpoint after step 2 says so.
    assert [name for name in _folders(tmp_path) if not name.startswith("rollout")] == kept
    assert len(_folders(tmp_path)) <= len(kept) + 1
    assert len(service.opened) == 2, "the adapter and the reference"
    backend.teardown(ctx.extras["backend_handles"])
    assert service.opened == []


def test_a_moving_average_teaches_on_real_weights_and_leaves_only_what_is_needed(tmp_path):
    backend = LocalBackend(threads=1)
    rows = _tasks({"fn_name": "exact_match", "expected": "yes"})
    ctx = training_context(tmp_path, rows, backend=backend, model_name="tiny-random", rollouts=InProcessRolloutEngine())
    SDFT(max_steps=4, batch_size=2, max_tokens=4, top_k=5, teacher="ema", ema_decay=0.5).train(ctx)
    backend.teardown(ctx.extras["backend_handles"])
    final = ["step-000004-sampler", "step-000004-state"]
    assert _folders(tmp_path) == [*final, "teacher-000000-sampler", "teacher-000003-sampler"]


def test_what_takes_time_is_said_on_stderr(monkeypatch, capsys):
    def find(name, *, say):
        say("fetching it")
        raise BackendError("no such model")

    monkeypatch.setattr("evsys_engine.models.find_model", find)
    with pytest.raises(BackendError):
        local.warm_engine("whatever", {})
    heard = capsys.readouterr()
    assert "fetching it" in heard.err and heard.out == ""
