"""The mock's weights on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from evsys_sdk.errors import BackendError


@pytest.fixture
async def saved(service, imitate, learn):
    """A trained client's state and its sampler weights."""
    client = await service.create_training_client(rank=8, seed=1)
    await learn(client, [imitate("sky", "blue")], steps=3)
    return await client.save_state("step-3"), await client.save_weights_for_sampler("step-3")


async def test_a_state_comes_back_bit_for_bit(service, saved):
    client = await service.create_training_client(rank=8, seed=99)
    await client.load_state(saved[0])
    assert await client.save_state("step-3") == saved[0]  # named after the content


async def test_training_resumes_from_a_state_as_if_it_had_not_stopped(service, imitate, learn, saved):
    data = [imitate("sky", "blue")]
    whole = await service.create_training_client(rank=8, seed=1)
    await learn(whole, data, steps=7)
    resumed = await service.create_training_client(rank=8, seed=99)
    await resumed.load_state(saved[0])
    await learn(resumed, data, steps=4)
    assert await whole.save_state("end") == await resumed.save_state("end")


async def test_without_the_optimiser_weights_are_the_same_and_moments_are_fresh(service, imitate, learn, saved):
    client = await service.create_training_client(rank=8, seed=99)
    await client.load_state(saved[0], optimizer=False)
    assert await client.save_weights_for_sampler("step-3") == saved[1]
    assert await client.save_state("step-3") != saved[0]


async def test_pending_gradients_are_dropped_by_loading(service, imitate, learn, saved):
    ends = []
    for busy in (True, False):
        client = await service.create_training_client(rank=8, seed=1)
        if busy:
            await client.forward_backward([imitate("other", "thing")], "cross_entropy")
        await client.load_state(saved[0])
        await learn(client, [imitate("sky", "blue")], steps=1)
        ends.append(await client.save_state("end"))
    assert ends[0] == ends[1]


def _torn(content):
    return content[: len(content) // 2]


def _flipped(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("damage", [_torn, _flipped, lambda content: b"", lambda content: b"{}"])
async def test_a_damaged_file_is_refused_and_nothing_of_it_is_loaded(service, saved, damage):
    path = Path(saved[0])
    path.write_bytes(damage(path.read_bytes()))
    client = await service.create_training_client(rank=8, seed=1)
    before = await client.save_state("x")
    with pytest.raises(BackendError, match="is not a whole checkpoint of the mock backend"):
        await client.load_state(str(path))
    assert await client.save_state("x") == before


async def test_a_foreign_archive_is_refused(service, tmp_path):
    import numpy as np

    np.savez(tmp_path / "theirs.npz", weights=np.zeros(3))
    client = await service.create_training_client(rank=8, seed=1)
    with pytest.raises(BackendError, match="not a whole checkpoint"):
        await client.load_state(str(tmp_path / "theirs.npz"))


async def test_a_missing_file_is_named(service):
    with pytest.raises(BackendError, match=r"nowhere\.npz: there is no such checkpoint"):
        await service.create_sampling_client("nowhere.npz")


async def test_the_two_kinds_of_file_are_not_mixed_up(service, saved):
    state, sampler = saved
    client = await service.create_training_client(rank=8, seed=1)
    with pytest.raises(BackendError, match="holds a sampler; this needs what save_state returned"):
        await client.load_state(sampler)
    with pytest.raises(BackendError, match="holds a state; this needs what save_weights_for_sampler returned"):
        await service.create_sampling_client(state)


async def test_another_rank_is_refused_naming_the_right_one(service, saved):
    client = await service.create_training_client(rank=4, seed=1)
    with pytest.raises(BackendError, match="has rank 8, this adapter has 4; set lora_rank: 8"):
        await client.load_state(saved[0])


async def test_weights_of_another_model_are_refused(make_service, saved):
    with pytest.raises(BackendError, match="holds weights for 'mock-model'; this run's model is 'other'"):
        await make_service(model="other").create_sampling_client(saved[1])


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden"])
async def test_a_name_that_could_leave_the_folder_is_refused(service, name):
    client = await service.create_training_client(rank=8, seed=1)
    with pytest.raises(BackendError, match="cannot name a checkpoint"):
        await client.save_state(name)


async def test_saving_never_overwrites_other_weights(service, imitate, learn):
    client = await service.create_training_client(rank=8, seed=1)
    first = await client.save_state("same-name")
    await learn(client, [imitate("q", "a")])
    second = await client.save_state("same-name")
    assert first != second and Path(first).exists() and Path(second).exists()
