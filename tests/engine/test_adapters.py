"""Adapters beside one another: refusals that touch nothing, neighbours that do not notice, threads that take turns."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
)

from evsys_engine.devices import FairLock
from evsys_engine.engine import Engine
from evsys_engine.types import AdamParams, BadRequest, EngineError, LoraSettings, TrainingDatum

ADAM = AdamParams(learning_rate=1e-2)


def weights_of(adapter):
    return [tensor.detach().clone() for tensor in adapter._weights.parameters.values()]


def gradients_of(adapter):
    return [tensor.clone() for tensor in adapter._gradients.tensors]


def same(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def train(adapter, make_data, steps, loss_fn="cross_entropy"):
    losses = []
    for step in steps:
        losses.append(adapter.forward_backward(make_data(seed=step, loss_fn=loss_fn), loss_fn).metrics["loss:sum"])
        adapter.optim_step(ADAM)
    return losses


def datum(tokens=(1, 2, 3), targets=(2, 3, 4), **inputs):
    return TrainingDatum(tokens=tokens, inputs={"target_tokens": np.array(targets), **inputs})


ONES = np.ones(3, np.float32)
BAD = {
    "no data": ([], "cross_entropy", "there is no data"),
    "no tokens": ([datum(tokens=())], "cross_entropy", "datum 0: tokens is empty"),
    "floats": ([datum(tokens=(1.0, 2.0, 3.0))], "cross_entropy", "tokens must hold whole numbers"),
    "nested": ([datum(tokens=((1, 2, 3),))], "cross_entropy", "it is one sequence of ids"),
    "out of range": (
        [datum(tokens=(1, 2, 320), weights=ONES)],
        "cross_entropy",
        "token 320; the vocabulary ends at 319",
    ),
    "negative": ([datum(targets=(1, -1, 2), weights=ONES)], "cross_entropy", "target_tokens has token -1"),
    "too long": ([datum(tokens=[1] * 129, targets=[1] * 129)], "cross_entropy", "129 tokens; .* takes at most 128"),
    "lengths": (
        [datum(targets=(1, 2), weights=ONES)],
        "cross_entropy",
        r"target_tokens has shape \(2,\) but there are 3",
    ),
    "weights": ([datum(weights=ONES[:2])], "cross_entropy", r"weights has shape \(2,\), target_tokens has \(3,\)"),
    "nan": ([datum(weights=ONES * np.nan)], "cross_entropy", "weights has a value that is not finite"),
    "soft without weights": ([datum(targets=np.ones((3, 2), int))], "cross_entropy", "inputs has no 'weights'"),
    "missing": ([datum(weights=ONES)], "ppo", "ppo does not read 'weights'"),
    "absent": ([datum(logprobs=ONES)], "ppo", "inputs has no 'advantages'; it has target_tokens, logprobs"),
    "unknown input": ([datum(weights=ONES, mask=ONES)], "cross_entropy", "does not read 'mask'; it reads weights"),
    "unknown loss": ([datum(weights=ONES)], "gspo", "'gspo' is not a loss; closest: cispo"),
    "soft ppo": ([datum(targets=np.ones((3, 2), int))], "ppo", "ppo takes one target per position, not 2"),
    "no targets": ([TrainingDatum(tokens=[1], inputs={})], "ppo", "inputs has no 'target_tokens'; it has nothing"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_refused_and_changes_nothing(adapter, make_data, case):
    data, loss_fn, said = BAD[case]
    adapter.forward_backward(make_data(), "cross_entropy")
    weights, gradients = weights_of(adapter), gradients_of(adapter)
    good = [datum(weights=ONES)] if loss_fn == "cross_entropy" and data else []
    for call in (adapter.forward, adapter.forward_backward):
        with pytest.raises(BadRequest, match=said.replace("datum 0", f"datum {len(good)}")):
            call(good + data, loss_fn)
    assert same(weights_of(adapter), weights) and same(gradients_of(adapter), gradients)


def test_targets_alone_count_once_each(adapter):
    plain = adapter.forward_backward([datum()], "cross_entropy").metrics["loss:sum"]
    without = gradients_of(adapter)
    adapter.optim_step(AdamParams(learning_rate=0.0))
    assert adapter.forward_backward([datum(weights=ONES)], "cross_entropy").metrics["loss:sum"] == plain
    assert same(gradients_of(adapter), without)


def test_a_bad_setting_of_a_loss_or_the_optimiser_changes_nothing(adapter, make_data):
    adapter.forward_backward(make_data(), "cross_entropy")
    weights, gradients = weights_of(adapter), gradients_of(adapter)
    with pytest.raises(BadRequest, match="'beta' is not a setting"):
        adapter.forward_backward(make_data(), "cross_entropy", {"beta": 1.0})
    with pytest.raises(BadRequest, match="learning_rate must be a number"):
        adapter.optim_step(AdamParams(learning_rate=float("nan")))
    assert same(weights_of(adapter), weights) and same(gradients_of(adapter), gradients)


def test_a_pass_that_breaks_in_the_middle_leaves_the_gradients_as_they_were(llama, adapter, make_data, monkeypatch):
    data = make_data()
    adapter.forward_backward(data, "cross_entropy")
    before, calls = gradients_of(adapter), []

    def out_of_memory(*args):
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("none left")

    monkeypatch.setattr(adapter, "_shared", llama._shared)
    object.__setattr__(llama._shared.limits, "batch_tokens", 20)
    handle = llama.model.base_model.register_forward_pre_hook(out_of_memory)
    with pytest.raises(MemoryError, match="none left"):
        adapter.forward_backward(data, "cross_entropy")
    handle.remove()
    assert len(calls) == 3 and same(gradients_of(adapter), before)
    adapter.optim_step(ADAM)  # the engine is free again


def break_inside(data, logprobs):
    raise KeyError("my own mistake")


@pytest.mark.parametrize(
    ("loss", "error", "said"),
    [
        (break_inside, KeyError, "my own mistake"),
        (lambda data, logprobs: logprobs[0].sum(), BadRequest, r"must return \(loss, metrics\), not Tensor"),
        (lambda data, logprobs: (1.0, {}), BadRequest, "one number as a torch tensor"),
        (lambda data, logprobs: (logprobs[0], {}), BadRequest, "one number as a torch tensor"),
        (lambda data, logprobs: (torch.tensor(1.0), {}), BadRequest, "does not depend on the logprobs"),
        (
            lambda data, logprobs: (logprobs[0].sum(), {"kl": "high"}),
            BadRequest,
            "'kl' .* one number, not 'high'",
        ),
        (lambda data, logprobs: (logprobs[0].sum(), {"kl": logprobs[0]}), BadRequest, "metric 'kl' .* one number"),
        (lambda data, logprobs: (logprobs[0].sum(), [0.1]), BadRequest, "a mapping as metrics"),
    ],
)
def test_a_custom_loss_that_breaks_is_its_callers_matter(adapter, make_data, loss, error, said):
    adapter.forward_backward(make_data(), "cross_entropy")
    before = gradients_of(adapter)
    with pytest.raises(error, match=said):
        adapter.forward_backward_custom(make_data(), loss)
    assert same(gradients_of(adapter), before)
    adapter.forward(make_data(), "cross_entropy")


# UserWarning is what torch gives. Plain "error" would also raise the ResourceWarning of whatever an earlier test left
# to the garbage collector, and fail this test for it.
@pytest.mark.filterwarnings("error::UserWarning")
def test_a_metric_that_still_hangs_on_the_graph_is_a_plain_number(adapter, make_data):
    def loss(data, logprobs):
        total = -sum(part.sum() for part in logprobs)
        return total, {"mean": total / 2}

    metrics = adapter.forward_backward_custom(make_data(), loss).metrics
    assert metrics["mean"] == pytest.approx(metrics["loss:sum"] / 2)


def test_a_custom_loss_may_ask_the_engine_itself(llama, adapter, make_data):
    data, teacher = make_data((9, 4)), llama.create_adapter(LoraSettings(rank=2, seed=8))

    def distance(data_, logprobs):
        theirs = teacher.forward(data, "cross_entropy").logprobs
        return sum((a - torch.tensor(b)).square().sum() for a, b in zip(logprobs, theirs, strict=True)), {}

    found = adapter.forward_backward_custom(data, distance).metrics["loss:sum"]
    assert found == pytest.approx(0, abs=1e-9)  # neither has learned anything yet


def test_the_same_calls_give_the_same_bits_and_another_seed_does_not(llama, model_dirs, make_data):
    again = Engine.load(model_dirs["llama"], device="cpu", dtype="float32")
    one, two, other = (
        engine.create_adapter(LoraSettings(rank=4, seed=seed)) for engine, seed in ((llama, 1), (again, 1), (llama, 2))
    )
    losses = [train(adapter, make_data, range(4)) for adapter in (one, two, other)]
    assert losses[0] == losses[1] != losses[2]
    assert same(weights_of(one), weights_of(two)) and not same(weights_of(one), weights_of(other))


def test_what_else_is_trained_does_not_change_where_a_layer_starts(llama):
    narrow = llama.create_adapter(LoraSettings(rank=4, seed=1, train_mlp=False))._weights.parameters
    wide = llama.create_adapter(LoraSettings(rank=4, seed=1, train_unembed=True))._weights.parameters
    assert narrow.keys() < wide.keys() and all(torch.equal(value, wide[name]) for name, value in narrow.items())
    starts = [value for name, value in wide.items() if name.endswith("q_proj.lora_A")]
    assert not torch.equal(*starts)
    assert all(value.abs().max() <= 1 / 8 and value.std() > 0.06 for value in starts)  # uniform within 1/sqrt(64)


@pytest.mark.parametrize("neighbour", [4, 0])
def test_two_adapters_do_not_disturb_each_other(llama, make_data, neighbour):
    alone, beside = (llama.create_adapter(LoraSettings(rank=4, seed=1)) for _ in range(2))
    other = llama.create_adapter(LoraSettings(rank=neighbour, seed=2))
    base = [tensor.clone() for tensor in llama.model.parameters()]
    train(alone, make_data, range(3))
    for step in range(3):
        beside.forward_backward(make_data(seed=step), "cross_entropy")
        other.forward_backward(make_data(seed=90 + step), "cross_entropy")
        beside.optim_step(ADAM)
        other.optim_step(ADAM)
    assert same(weights_of(alone), weights_of(beside))
    assert same(list(llama.model.parameters()), base)


@pytest.mark.parametrize("rank", [4, 0])
def test_training_lowers_the_loss(llama, make_data, rank):
    adapter = llama.create_adapter(LoraSettings(rank=rank))
    data = make_data()
    for item in data:
        item.inputs["weights"][:] = 1
    losses = []
    for _ in range(15):
        losses.append(adapter.forward_backward(data, "cross_entropy").metrics["loss:sum"])
        adapter.optim_step(ADAM)
    assert losses[-1] < 0.5 * losses[0]


def test_rank_0_over_a_bf16_base_adds_up_steps_that_bf16_cannot_see(model_dirs, make_data):
    engine = Engine.load(model_dirs["llama"], device="cpu", dtype="bfloat16")
    adapter = engine.create_adapter(LoraSettings(rank=0))
    before = weights_of(adapter)
    adapter.forward_backward(make_data(), "cross_entropy")
    adapter.optim_step(AdamParams(learning_rate=1e-6))
    assert not any(torch.equal(a, b) for a, b in zip(weights_of(adapter), before, strict=True))
    for name, own in adapter._weights.model.named_parameters():
        assert torch.equal(own, adapter._weights.parameters[name].bfloat16())


def test_concurrent_threads_get_what_they_would_get_alone(llama, make_data):
    seeds = range(4)
    expected = [llama.create_adapter(LoraSettings(rank=4, seed=seed)) for seed in seeds]
    losses = [train(adapter, make_data, range(3)) for adapter in expected]
    adapters = [llama.create_adapter(LoraSettings(rank=4, seed=seed)) for seed in seeds]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda adapter: train(adapter, make_data, range(3)), adapters))
    assert found == losses
    assert all(same(weights_of(a), weights_of(b)) for a, b in zip(adapters, expected, strict=True))


def test_data_is_read_when_the_call_is_made_not_when_its_turn_comes(llama, adapter, make_data):
    data = make_data()
    expected = adapter.forward(data, "cross_entropy")
    with ThreadPoolExecutor(1) as pool:
        with llama.lock:
            answer = pool.submit(adapter.forward, data, "cross_entropy")
            while not llama.lock._queue:
                time.sleep(0.001)
            for item in data:
                item.inputs["weights"][:] = 7
                item.inputs["target_tokens"][:] = 7
        found = answer.result(timeout=300)
    assert found.metrics == expected.metrics


def test_another_thread_sees_the_plain_model_while_an_adapter_runs(llama, make_data):
    adapter, tokens = llama.create_adapter(LoraSettings(rank=4)), torch.tensor([[1, 2, 3]])
    train(adapter, make_data, range(2))
    plain, seen = llama.model(tokens).logits, []
    with ThreadPoolExecutor(1) as pool:

        def look(*args):
            seen.append(
                pool.submit(lambda: llama.model.base_model.layers[0].self_attn.q_proj(torch.ones(1, 64))).result()
            )

        handle = llama.model.base_model.layers[0].self_attn.register_forward_pre_hook(look)
        adapter.forward(make_data(), "cross_entropy")
        handle.remove()
    assert torch.equal(seen[0], llama.model.base_model.layers[0].self_attn.q_proj(torch.ones(1, 64)))
    assert torch.equal(llama.model(tokens).logits, plain)


def test_a_call_works_whatever_mode_the_callers_torch_is_in(llama, adapter, make_data):
    other = llama.create_adapter(LoraSettings(rank=4, seed=1))
    adapter.forward_backward(make_data(), "cross_entropy")
    with torch.inference_mode():
        other.forward_backward(make_data(), "cross_entropy")
    assert same(gradients_of(adapter), gradients_of(other))


def test_a_closed_adapter_says_so_and_holds_nothing(adapter, make_data):
    adapter.forward_backward(make_data(), "cross_entropy")
    adapter.close()
    adapter.close()
    assert adapter._weights is None and adapter._gradients.tensors == []
    with pytest.raises(EngineError, match="this adapter is closed"):
        adapter.forward(make_data(), "cross_entropy")


def test_impossible_settings_are_refused(llama):
    with pytest.raises(BadRequest, match="rank must be 0"):
        llama.create_adapter(LoraSettings(rank=-1))
    with pytest.raises(BadRequest, match="alpha must be above 0"):
        llama.create_adapter(LoraSettings(rank=2, alpha=0.0))
    with pytest.raises(EngineError, match="nothing to train"):
        llama.create_adapter(LoraSettings(rank=2, train_attn=False, train_mlp=False))


def test_usual_models_are_packed(engine):
    assert engine._shared.packs


def test_a_model_whose_layers_mix_neighbours_gets_one_sequence_at_a_time(save_model, make_data):
    """Short convolutions carry tokens over from what lies before them in the row."""
    folder = save_model(Lfm2ForCausalLM, Lfm2Config, layer_types=["conv", "full_attention"])
    engine = Engine.load(folder, device="cpu", dtype="float32")
    adapter, data = engine.create_adapter(LoraSettings(rank=2)), make_data()
    together = adapter.forward_backward(data, "cross_entropy").logprobs
    alone = [adapter.forward([item], "cross_entropy").logprobs[0] for item in data]
    assert not engine._shared.packs
    for ours, theirs in zip(together, alone, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_model_that_caps_its_logits_can_be_loaded_but_not_trained(save_model):
    folder = save_model(Gemma2ForCausalLM, Gemma2Config, final_logit_softcapping=30.0)
    with pytest.raises(EngineError, match="a Gemma2ForCausalLM does more to its logits than a linear head"):
        Engine.load(folder, device="cpu").create_adapter(LoraSettings(rank=2))


def test_a_model_without_our_layers_trains_all_its_weights(save_model, make_data):
    folder = save_model(GPT2LMHeadModel, GPT2Config, n_embd=64, n_layer=2, n_head=4, n_positions=128)
    engine = Engine.load(folder, device="cpu", dtype="float32")
    losses = train(engine.create_adapter(LoraSettings(rank=0)), lambda **given: make_data((9, 5)), range(4))
    assert losses[-1] < losses[0]
    with pytest.raises(EngineError, match="nothing to train"):
        engine.create_adapter(LoraSettings(rank=4))


def test_the_lock_serves_in_the_order_of_asking():
    lock, served = FairLock(), []

    def ask(number):
        with lock:
            served.append(number)

    lock.acquire()
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for number, thread in enumerate(threads):
        thread.start()
        while len(lock._queue) <= number:
            time.sleep(0.001)
    lock.release()
    for thread in threads:
        thread.join(timeout=300)
    assert served == list(range(8))


def test_a_thread_in_a_loop_cannot_overtake_one_that_waits():
    lock, turns = FairLock(), []

    def loop():
        while "other" not in turns:
            with lock:
                turns.append("loop")
                time.sleep(0.001)

    def once():
        with lock:
            turns.append("other")

    lock.acquire()
    threads = [threading.Thread(target=work) for work in (loop, once)]
    for count, thread in enumerate(threads):
        thread.start()
        while len(lock._queue) <= count:
            time.sleep(0.001)
    lock.release()
    for thread in threads:
        thread.join(timeout=300)
    assert turns[:2] == ["loop", "other"]


def test_the_lock_can_be_taken_twice_by_its_holder_and_released_by_nobody_else():
    lock = FairLock()
    with lock, lock:
        with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="does not hold it"):
            pool.submit(lock.release).result()
    assert lock._owner is None


def test_a_wait_that_is_broken_off_gives_its_place_back(monkeypatch):
    lock = FairLock()
    lock.acquire()

    class Interrupted:
        """A gate at which the second wait is broken off, as Ctrl-C would."""

        def __init__(self):
            self.waits = 0

        def acquire(self):
            self.waits += 1
            if self.waits == 2:
                raise KeyboardInterrupt

    def ask():
        with pytest.raises(KeyboardInterrupt):
            lock.acquire()

    thread = threading.Thread(target=ask)  # it has locks of its own, which must be real
    monkeypatch.setattr("evsys_engine.devices.threading.Lock", Interrupted)
    thread.start()
    thread.join(timeout=300)
    assert not lock._queue
    lock.release()
    assert lock._owner is None
