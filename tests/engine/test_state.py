"""State on disk: bit-equal, whole or refused, and only where it fits."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from evsys_engine import state
from evsys_engine.engine import Engine
from evsys_engine.types import AdamParams, BadRequest, LoraSettings

ADAM = AdamParams(learning_rate=1e-2, weight_decay=0.01, grad_clip_norm=1.0)


def train(adapter, make_data, steps):
    for step in steps:
        adapter.forward_backward(make_data(seed=step), "cross_entropy")
        adapter.optim_step(ADAM)


def numbers(adapter):
    """Everything an adapter is: weights, moments, steps, waiting gradients."""
    optimizer = adapter._optimizer
    parts = (adapter._weights.parameters, optimizer.mean, optimizer.square)
    tensors = [tensor.detach().clone() for part in parts for tensor in part.values()]
    return tensors + [gradient.clone() for gradient in adapter._gradients.tensors] + [torch.tensor(optimizer.steps)]


def same(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("rank", [4, 0])
def test_an_interrupted_and_resumed_run_ends_with_the_same_bits(model_dir, make_data, tmp_path, rank):
    settings = LoraSettings(rank=rank, seed=5)
    straight = Engine.load(model_dir, device="cpu", dtype="float32").create_adapter(settings)
    train(straight, make_data, range(6))
    first = Engine.load(model_dir, device="cpu", dtype="float32").create_adapter(settings)
    train(first, make_data, range(3))
    first.save_state(tmp_path / "half")
    train(first, make_data, range(50, 52))  # what was killed after the checkpoint leaves no trace
    second = Engine.load(model_dir, device="cpu", dtype="float32").create_adapter(LoraSettings(rank=rank, seed=99))
    second.load_state(tmp_path / "half")
    train(second, make_data, range(3, 6))
    assert same(numbers(second), numbers(straight))


def test_a_state_without_its_optimiser_starts_it_afresh(llama, make_data, tmp_path):
    adapter, other = (llama.create_adapter(LoraSettings(rank=4)) for _ in range(2))
    train(adapter, make_data, range(2))
    adapter.save_state(tmp_path / "state")
    train(other, make_data, range(3))
    other.load_state(tmp_path / "state", optimizer=False)
    assert other._optimizer.steps == 0 and not any(tensor.any() for tensor in other._optimizer.mean.values())
    pairs = zip(adapter._weights.parameters.values(), other._weights.parameters.values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_loading_drops_gradients_of_the_old_weights(adapter, make_data, tmp_path):
    adapter.save_state(tmp_path / "state")
    before = numbers(adapter)[: len(adapter._weights.parameters)]
    adapter.forward_backward(make_data(), "cross_entropy")
    adapter.load_state(tmp_path / "state")
    assert adapter.optim_step(ADAM) == {"grad_norm": 0.0}
    assert same(list(adapter._weights.parameters.values()), before)


def spoil_truncate(folder):
    path = folder / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def spoil_flip(folder):
    path = folder / "moments.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def spoil_missing(folder):
    (folder / "moments.safetensors").unlink()


def spoil_no_manifest(folder):
    (folder / "evsys.json").unlink()


def spoil_torn_manifest(folder):
    text = (folder / "evsys.json").read_text()
    (folder / "evsys.json").write_text(text[: len(text) // 2])


def spoil_everything(folder):
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoil_truncate, "is damaged: weights.safetensors changed"),
        (spoil_flip, "is damaged: moments.safetensors changed"),
        (spoil_missing, "moments.safetensors is missing"),
        (spoil_no_manifest, "evsys.json is missing"),
        (spoil_torn_manifest, "is not a whole training state folder"),
        (spoil_everything, "there is no such folder"),
    ],
)
def test_a_torn_folder_is_refused_and_the_adapter_stays_as_it_was(adapter, make_data, tmp_path, spoil, said):
    train(adapter, make_data, range(2))
    adapter.save_state(tmp_path / "state")
    train(adapter, make_data, range(2, 4))
    adapter.forward_backward(make_data(), "cross_entropy")
    before = numbers(adapter)
    spoil(tmp_path / "state")
    with pytest.raises(BadRequest, match=said):
        adapter.load_state(tmp_path / "state")
    assert same(numbers(adapter), before)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rank": 8}, "it has rank 4, this adapter has 8"),
        ({"rank": 4, "alpha": 8.0}, "it has alpha 32.0, this adapter has 8.0"),
        ({"rank": 4, "train_mlp": False}, "it has train_mlp True, this adapter has False"),
        ({"rank": 0}, "it has rank 4, this adapter has 0"),
    ],
)
def test_a_state_of_another_shape_is_refused(llama, adapter, tmp_path, settings, said):
    adapter.save_state(tmp_path / "state")
    with pytest.raises(BadRequest, match=said):
        llama.create_adapter(LoraSettings(**settings)).load_state(tmp_path / "state")


def test_a_state_of_another_model_is_refused(adapter, model_dirs, tmp_path):
    adapter.save_state(tmp_path / "state")
    other = Engine.load(model_dirs["qwen3"], name="other", device="cpu").create_adapter(LoraSettings(rank=4))
    with pytest.raises(BadRequest, match=r"was trained over .* not those of 'other'"):
        other.load_state(tmp_path / "state")


def test_the_same_model_under_another_name_path_and_precision_is_the_same_model(adapter, model_dirs, tmp_path):
    adapter.save_state(tmp_path / "state")
    shutil.copytree(model_dirs["llama"], tmp_path / "moved")
    moved = Engine.load(tmp_path / "moved", name="alias", device="cpu", dtype="bfloat16")
    moved.create_adapter(LoraSettings(rank=4)).load_state(tmp_path / "state")


def test_sampler_weights_are_no_state(adapter, tmp_path):
    adapter.save_weights(tmp_path / "weights")
    with pytest.raises(BadRequest, match="holds sampler weights; this needs training state"):
        adapter.load_state(tmp_path / "weights")


def test_a_save_that_fails_leaves_the_old_folder_and_no_litter(adapter, make_data, tmp_path, monkeypatch):
    adapter.save_state(tmp_path / "state")
    old = (tmp_path / "state" / "evsys.json").read_text()
    train(adapter, make_data, range(1))

    def full_disk(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(state, "save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        adapter.save_state(tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / "state" / "evsys.json").read_text() == old


def test_saving_again_replaces_the_folder(adapter, make_data, tmp_path):
    adapter.save_state(tmp_path / "state")
    train(adapter, make_data, range(2))
    adapter.save_state(tmp_path / "state")
    assert json.loads((tmp_path / "state" / "evsys.json").read_text())["steps"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    adapter.load_state(tmp_path / "state")
