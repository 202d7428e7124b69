"""Losses, logprobs and gradients against plain torch with PEFT, one sequence at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from evsys_engine.engine import Engine
from evsys_engine.lora import ATTENTION, MLP
from evsys_engine.losses import LOSSES
from evsys_engine.types import LoraSettings, TrainingDatum

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def make_adapter(engine, **settings):
    """An adapter in mid-training: B is not zero, so that A has gradients too."""
    adapter = engine.create_adapter(LoraSettings(**{"rank": 4, "seed": 3, **settings}))
    chance = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, tensor in adapter._weights.parameters.items():
            if name.endswith("lora_B"):
                tensor.copy_(torch.randn(tensor.shape, generator=chance) * 0.05)
    return adapter


def gradients_of(adapter):
    return dict(zip(adapter._weights.parameters, adapter._gradients.tensors, strict=True))


class Reference:
    """PEFT over a fresh copy of the model, with the adapter's numbers, and autograd for everything."""

    def __init__(self, adapter, model_dir, *, unembed=False):
        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.tensors = {}
        if adapter.settings.rank == 0:
            self.model = base
            self.tensors = dict(base.named_parameters())
            return
        layers = [*ATTENTION, *MLP] + (["lm_head"] if unembed else [])
        config = LoraConfig(r=adapter.settings.rank, lora_alpha=adapter.settings.alpha, target_modules=layers)
        self.model = get_peft_model(base, config)
        theirs = dict(self.model.named_parameters())
        for name, tensor in adapter._weights.parameters.items():
            self.tensors[name] = theirs[f"base_model.model.{name}.default.weight"]
            with torch.no_grad():
                self.tensors[name].copy_(tensor)

    def logprobs(self, datum):
        targets = torch.as_tensor(datum.inputs["target_tokens"])
        logits = self.model(torch.tensor([datum.tokens])).logits[0]
        return logits.log_softmax(-1).gather(1, targets.reshape(len(targets), -1)).reshape(targets.shape)

    def run(self, data, loss):
        """`(loss, logprobs, gradients by name)` with `loss(logprobs, datum)` added up over the data."""
        logprobs = [self.logprobs(datum) for datum in data]
        total = sum(loss(logp, datum) for logp, datum in zip(logprobs, data, strict=True))
        grads = torch.autograd.grad(total, list(self.tensors.values()), allow_unused=True, materialize_grads=True)
        plain = [logp.detach().numpy() for logp in logprobs]
        return float(total.detach()), plain, dict(zip(self.tensors, grads, strict=True))


def plain_loss(name):
    """The losses as one writes them for autograd, not as the engine does."""

    def value(logp, datum):
        given = {key: torch.as_tensor(array) for key, array in datum.inputs.items()}
        if name == "cross_entropy":
            return -(logp * given["weights"]).sum()
        old, advantage = given["logprobs"], given["advantages"]
        ratio = torch.exp(logp - old)
        if name == "importance_sampling":
            return -(ratio * advantage).sum()
        if name == "ppo":
            return -torch.min(ratio * advantage, torch.clamp(ratio, 0.8, 1.2) * advantage).sum()
        if name == "cispo":
            return -(torch.clamp(ratio, 0.8, 1.2).detach() * advantage * logp).sum()
        return -(logp * advantage - 0.5 * 0.05 * (logp - old) ** 2).sum()

    return value


def assert_same(adapter, output, expected):
    loss, logprobs, grads = expected
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5, abs=1e-4)
    for ours, theirs in zip(output.logprobs, logprobs, strict=True):
        assert ours.dtype == np.float32 and ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, **CLOSE)
    found = gradients_of(adapter)
    assert found.keys() == grads.keys()
    for name, grad in grads.items():
        scale = max(1.0, float(grad.abs().max()))
        np.testing.assert_allclose(found[name].numpy() / scale, grad.numpy() / scale, **CLOSE, err_msg=name)
        assert float(grad.abs().max()) > 0, name


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_every_loss_has_the_gradient_that_autograd_finds(engine, model_dir, make_data, loss_fn):
    adapter, data = make_adapter(engine), make_data(loss_fn=loss_fn)
    expected = Reference(adapter, model_dir).run(data, plain_loss(loss_fn))
    assert_same(adapter, adapter.forward_backward(data, loss_fn), expected)


def test_soft_targets_have_the_gradient_that_autograd_finds(engine, model_dir, make_data):
    adapter, data = make_adapter(engine), make_data(width=3) + make_data((7, 12), seed=1) + make_data((7,), width=5)
    data[0].inputs["target_tokens"][:, 1] = data[0].inputs["target_tokens"][:, 0]  # the same token twice counts twice
    expected = Reference(adapter, model_dir).run(data, plain_loss("cross_entropy"))
    assert_same(adapter, adapter.forward_backward(data, "cross_entropy"), expected)


def test_the_head_is_trained_when_asked_also_where_it_is_tied_to_the_embedding(engine, model_dir, make_data):
    adapter, data = make_adapter(engine, train_unembed=True), make_data()
    expected = Reference(adapter, model_dir, unembed=True).run(data, plain_loss("cross_entropy"))
    assert_same(adapter, adapter.forward_backward(data, "cross_entropy"), expected)


def test_rank_0_has_the_gradients_of_the_whole_model(engine, model_dir, make_data):
    adapter, data = engine.create_adapter(LoraSettings(rank=0)), make_data(width=2)
    expected = Reference(adapter, model_dir).run(data, plain_loss("cross_entropy"))
    assert_same(adapter, adapter.forward_backward(data, "cross_entropy"), expected)


def test_a_custom_loss_has_the_gradient_that_autograd_finds(engine, model_dir, make_data):
    """One that is no sum over tokens: it needs all logprobs at once."""
    adapter, data = make_adapter(engine), make_data()

    def spread(logprobs):
        means = torch.stack([logp.mean() for logp in logprobs])
        return (means[:, None] - means[None]).square().sum() + logprobs[1].square().sum()

    output = adapter.forward_backward_custom(data, lambda data, logprobs: (spread(logprobs), {"seen": len(data)}))
    reference = Reference(adapter, model_dir)
    logprobs = [reference.logprobs(datum) for datum in data]
    total = spread(logprobs)
    grads = torch.autograd.grad(total, list(reference.tensors.values()))
    plain = [logp.detach().numpy() for logp in logprobs]
    assert_same(adapter, output, (float(total.detach()), plain, dict(zip(reference.tensors, grads, strict=True))))
    assert output.metrics["seen"] == len(data)


def test_a_custom_loss_gives_the_same_bits_when_its_graphs_do_not_fit(llama, make_data):
    data = make_data(width=2)

    def loss(data, logprobs):
        return sum((logp**2).sum() for logp in logprobs), {}

    found = []
    for tokens in (10**6, 10):
        llama._shared = dataclasses.replace(
            llama._shared, limits=dataclasses.replace(llama._shared.limits, graph_tokens=tokens, batch_tokens=20)
        )
        adapter = make_adapter(llama)
        output = adapter.forward_backward_custom(data, loss)
        found.append((output.metrics, gradients_of(adapter)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], grad) for name, grad in found[1][1].items())


def test_a_custom_loss_runs_the_model_once_forward(llama, make_data):
    calls, adapter = [], make_adapter(llama)
    llama.model.base_model.register_forward_hook(lambda *args: calls.append(1))
    adapter.forward_backward_custom(make_data((20, 20)), lambda data, logprobs: (logprobs[0].sum(), {}))
    assert len(calls) == 1


def test_a_custom_loss_gets_the_callers_own_records(adapter, make_data):
    first, second = make_data((3, 4))
    first = dataclasses.replace(first, source="mine")
    seen = []

    def loss(data, logprobs):
        seen.extend(data)
        assert all(logp.dtype == torch.float32 and logp.requires_grad and logp.is_leaf for logp in logprobs)
        return logprobs[0].sum(), {}

    adapter.forward_backward_custom([first, second], loss)
    assert seen == ["mine", second]


@pytest.mark.parametrize("budget", [1, 18, 40])
def test_the_token_budget_does_not_change_the_result(model_dirs, make_data, budget):
    data, found = make_data(loss_fn="importance_sampling"), []
    for tokens in (10**6, budget):
        adapter = make_adapter(Engine.load(model_dirs["llama"], device="cpu", dtype="fp32", max_batch_tokens=tokens))
        found.append((adapter.forward_backward(data, "importance_sampling"), gradients_of(adapter)))
    (one, grads), (many, others) = found
    assert one.metrics["loss:sum"] == pytest.approx(many.metrics["loss:sum"], rel=1e-5)
    for ours, theirs in zip(one.logprobs, many.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, **CLOSE)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad.numpy(), others[name].numpy(), **CLOSE)


def test_the_chunks_of_the_head_do_not_change_the_result(llama, make_data):
    data, found = make_data(), []
    for rows in (1000, 7):
        llama._shared.workspace.rows = rows
        llama._shared.workspace._buffers = []
        adapter = make_adapter(llama, train_unembed=True)
        found.append((adapter.forward_backward(data, "cross_entropy"), gradients_of(adapter)))
    assert found[0][0].metrics["loss:sum"] == pytest.approx(found[1][0].metrics["loss:sum"], rel=1e-6)
    for name, grad in found[0][1].items():
        np.testing.assert_allclose(grad.numpy(), found[1][1][name].numpy(), **CLOSE)


def test_gradients_of_several_calls_add_up_to_those_of_one(llama, make_data):
    data, whole, parts = make_data(), make_adapter(llama), make_adapter(llama)
    whole.forward_backward(data, "cross_entropy")
    for datum in data:
        parts.forward_backward([datum], "cross_entropy")
    parts.forward(data, "cross_entropy")  # adds nothing
    for name, grad in gradients_of(whole).items():
        np.testing.assert_allclose(grad.numpy(), gradients_of(parts)[name].numpy(), **CLOSE)


def test_forward_reports_what_forward_backward_does(llama, make_data):
    adapter, data = make_adapter(llama), make_data(loss_fn="ppo")
    tight = {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}
    dry, wet = adapter.forward(data, "ppo", tight), adapter.forward_backward(data, "ppo", tight)
    assert dry.metrics == wet.metrics != adapter.forward(data, "ppo").metrics
    assert all(np.array_equal(a, b) for a, b in zip(dry.logprobs, wet.logprobs, strict=True))


def test_positions_of_weight_zero_get_their_logprobs_too(llama, model_dirs, make_data):
    adapter, (datum,) = make_adapter(llama), make_data((12,))
    silent = TrainingDatum(tokens=datum.tokens, inputs={**datum.inputs, "weights": np.zeros(12, np.float32)})
    output = adapter.forward_backward([silent], "cross_entropy")
    assert output.metrics["loss:sum"] == 0 and adapter._gradients.tensors == []
    expected = Reference(adapter, model_dirs["llama"]).logprobs(datum)
    np.testing.assert_allclose(output.logprobs[0], expected.detach(), **CLOSE)


def test_a_sliding_window_is_kept_in_packed_sequences(save_model, make_data):
    folder = save_model(MistralForCausalLM, MistralConfig, sliding_window=6)
    engine = Engine.load(folder, device="cpu", dtype="float32")
    adapter, data = make_adapter(engine), make_data((20, 4, 20, 11))
    expected = Reference(adapter, folder).run(data, plain_loss("cross_entropy"))
    assert_same(adapter, adapter.forward_backward(data, "cross_entropy"), expected)


def test_a_bf16_base_trains_fp32_adapters_in_nearly_the_same_direction(model_dirs, make_data):
    data, found = make_data(), []
    for dtype in ("float32", "bfloat16"):
        adapter = make_adapter(Engine.load(model_dirs["qwen3"], device="cpu", dtype=dtype), train_unembed=True)
        adapter.forward_backward(data, "cross_entropy")
        assert all(grad.dtype == torch.float32 for grad in adapter._gradients.tensors)
        found.append(torch.cat([grad.flatten() for grad in adapter._gradients.tensors]))
    assert torch.cosine_similarity(*found, dim=0) > 0.99
