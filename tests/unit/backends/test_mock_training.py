"""The mock's model learns, exactly and repeatably."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from evsys_sdk.backends.mock_model import (
    Adam,
    MockGradients,
    TableModel,
    forward_backward,
    log_softmax,
    named_loss,
    sum_by_row,
)
from evsys_sdk.backends.mock_tokenizer import VOCAB_SIZE, ByteTokenizer
from evsys_sdk.errors import BackendError, MissingDependency
from evsys_sdk.training_api import AdamParams, Datum, ModelInput, TensorData

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="custom losses are written in torch")


def _double(seed=0):
    """A model in double precision, so that finite differences are sharp."""
    model = TableModel(model_name="m", rank=1, seed=seed)
    chance = np.random.default_rng(seed)
    model.weights = chance.normal(0, 1e-3, model.weights.shape)
    model.weights[0] = 0.0
    model.base = model.base.astype(np.float64)
    return model


def _policy_data(seed=0, shape=None):
    chance = np.random.default_rng(seed)
    tokenizer = ByteTokenizer()
    data = []
    for text in ("ab abc", "hello"):
        tokens = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        size = len(tokens)
        inputs = {
            "target_tokens": TensorData(chance.integers(0, VOCAB_SIZE, size).tolist(), "int64"),
            "logprobs": TensorData((-chance.gamma(2.0, size=size)).tolist()),
            "advantages": TensorData(chance.normal(size=size).tolist()),
        }
        data.append(Datum(ModelInput.from_ints(tokens), inputs))
    return data


def _supervised_data(soft=0, seed=0):
    chance = np.random.default_rng(seed)
    tokens = ByteTokenizer().apply_chat_template([{"role": "user", "content": "ab abc"}], add_generation_prompt=True)
    shape = (len(tokens), soft) if soft else (len(tokens),)
    inputs = {
        "target_tokens": TensorData(chance.integers(0, VOCAB_SIZE, np.prod(shape)).tolist(), "int64", shape),
        "weights": TensorData(chance.normal(size=np.prod(shape)).tolist(), "float32", shape),
    }
    return [Datum(ModelInput.from_ints(tokens), inputs)]


@pytest.mark.parametrize(
    ("loss", "data"),
    [
        ("cross_entropy", _supervised_data()),
        ("cross_entropy", _supervised_data(soft=3)),
        ("importance_sampling", _policy_data()),
        ("ppo", _policy_data()),
        ("dro", _policy_data()),
    ],
    ids=["cross_entropy", "soft_targets", "importance_sampling", "ppo", "dro"],
)
def test_gradients_of_the_tables_are_what_finite_differences_say(loss, data):
    model, gradients = _double(), MockGradients()
    forward_backward(model, gradients, data, named_loss(data, loss, None))
    chance = np.random.default_rng(1)

    def value():
        return forward_backward(model, MockGradients(), data, named_loss(data, loss, None)).metrics["loss:sum"]

    for row_index in chance.choice(len(gradients.rows), 12, replace=False):
        row, token = gradients.rows[row_index], int(np.abs(gradients.values[row_index]).argmax())
        kept = model.weights[row, token]
        model.weights[row, token] = kept + 1e-7
        above = value()
        model.weights[row, token] = kept - 1e-7
        below = value()
        model.weights[row, token] = kept
        assert gradients.values[row_index, token] == pytest.approx((above - below) / 2e-7, rel=1e-3, abs=1e-2)


def test_gradients_of_two_calls_add_up_to_that_of_one():
    first, second = _policy_data()
    model, together, apart = _double(), MockGradients(), MockGradients()
    forward_backward(model, together, [first, second], named_loss([first, second], "importance_sampling", None))
    for datum in (first, second):
        forward_backward(model, apart, [datum], named_loss([datum], "importance_sampling", None))
    assert apart.rows.tolist() == together.rows.tolist()
    assert np.allclose(apart.values, together.values, rtol=1e-5, atol=1e-4)


def test_rows_are_summed_however_often_they_occur():
    rows = np.array([5] * 40 + [2, 9, 2, 9, 9])
    values = np.random.default_rng(0).normal(size=(len(rows), 3)).astype(np.float32)
    found, sums = sum_by_row(rows, values, np.arange(len(rows)))
    assert found.tolist() == [2, 5, 9]
    for row, total in zip(found, sums, strict=True):
        assert total == pytest.approx(values[rows == row].sum(axis=0), abs=1e-4)


def test_the_optimiser_takes_adamw_steps_on_touched_rows_alone():
    model, gradients = TableModel(model_name="m", rank=1, seed=None), MockGradients()
    model.weights[3:5] = 1.0
    adam, expected, mean, square = Adam(model), np.ones(VOCAB_SIZE), np.zeros(VOCAB_SIZE), np.zeros(VOCAB_SIZE)
    params = AdamParams(learning_rate=0.1, beta1=0.9, beta2=0.95, weight_decay=0.5)
    chance = np.random.default_rng(0)
    for step in (1, 2, 3):
        gradient = chance.normal(size=VOCAB_SIZE)
        gradients.rows, gradients.values = np.array([3]), gradient[None].astype(np.float32)
        adam.step(model, gradients, params)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.95 * square + 0.05 * gradient**2
        expected -= 0.1 * 0.5 * expected
        expected -= 0.1 * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.95**step)) + 1e-8)
    assert model.weights[3] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert (model.weights[4] == 1.0).all()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's list of mappings")
def test_a_row_costs_its_own_pages_and_no_huge_one():
    model = TableModel(model_name="m", rank=32, seed=None)
    model.weights[::1000] = 1.0  # on many huge pages, if there were any
    address = model.weights[len(model.weights) // 2].ctypes.data
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name:  # a mapping begins
            begin, end = (int(edge, 16) for edge in name.split("-"))
        elif name == "Rss:" and begin <= address < end:
            assert int(values[0]) < model.weights.nbytes / 1024 / 10
            return
    raise AssertionError("the table is in no mapping")


def test_clipping_shrinks_the_gradient_and_reports_its_norm_before():
    """Adam hides a constant factor, so the moments are looked at."""
    model, gradients = TableModel(model_name="m", rank=1, seed=None), MockGradients()
    gradients.rows, gradients.values = np.array([3]), np.full((1, VOCAB_SIZE), 2.0, dtype=np.float32)
    adam = Adam(model)
    norm = adam.step(model, gradients, AdamParams(learning_rate=0.1, grad_clip_norm=1.0))
    assert norm == pytest.approx(2.0 * VOCAB_SIZE**0.5)
    assert np.linalg.norm(adam.mean[3]) == pytest.approx(0.1, rel=1e-5)


async def test_loss_falls_on_what_is_imitated(service, imitate, learn):
    client = await service.create_training_client(rank=8, seed=1)
    data = [imitate("colour of the sky?", "blue"), imitate("colour of grass?", "green")]
    losses = await learn(client, data, steps=20)
    assert losses[-1] < 0.05 * losses[0]


async def test_a_usual_lora_learning_rate_is_enough(service, imitate, learn):
    client = await service.create_training_client(rank=8, seed=1)
    losses = await learn(client, [imitate("colour of the sky?", "blue")], steps=30, rate=1e-4)
    assert losses[-1] < 0.5 * losses[0]


async def test_a_rewarded_token_becomes_likelier_and_a_punished_one_less_likely(service, learn):
    client = await service.create_training_client(rank=8, seed=1)
    tokens = service.get_tokenizer().encode("yes or no? ")
    for target, reward in ((ord("y"), 1.0), (ord("n"), -1.0)):
        zeros = [0.0] * (len(tokens) - 1)
        inputs = {
            "target_tokens": TensorData([*tokens[1:], target], "int64"),
            "logprobs": TensorData([*zeros, -4.6]),
            "advantages": TensorData([*zeros, reward]),
        }
        datum = Datum(ModelInput.from_ints(tokens), inputs)
        before = (await client.forward_backward([datum], "importance_sampling")).logprobs[0][-1]
        await client.optim_step(AdamParams(learning_rate=1e-3))
        after = (await client.forward_backward([datum], "importance_sampling")).logprobs[0][-1]
        assert (after - before) * reward > 0.1


async def test_one_seed_repeats_bit_for_bit_and_another_differs(make_service, imitate, learn):
    data = [imitate("colour of the sky?", "blue")]
    paths = []
    for seed in (1, 1, 2):
        client = await make_service().create_training_client(rank=8, seed=seed)
        losses = await learn(client, data, steps=5)
        paths.append((await client.save_state("x"), losses))
    assert paths[0] == paths[1]  # files are named after their content
    assert paths[0][0] != paths[2][0] and paths[0][1] != paths[2][1]


async def test_the_base_depends_on_the_models_name_alone(make_service):
    prompt = ModelInput.from_ints([*b"hello world"])
    said = [
        await (await make_service(model=name).create_sampling_client()).compute_logprobs(prompt)
        for name in ("a", "a", "b")
    ]
    assert said[0] == said[1] and said[0] != said[2]


async def test_clients_of_one_service_do_not_touch_each_other(service, imitate, learn):
    data = [imitate("q", "a")]
    one, other = [await service.create_training_client(rank=8, seed=1) for _ in range(2)]
    before = (await other.forward_backward(data, "cross_entropy")).logprobs
    await learn(one, data, steps=5)
    assert (await other.forward_backward(data, "cross_entropy")).logprobs == before


async def test_similar_questions_share_what_was_learnt(service, imitate, learn):
    client = await service.create_training_client(rank=8, seed=1)
    cities = ("Paris", "Rome", "Oslo", "Lima")
    data = [imitate(f"weather in {city}", "get_weather") for city in cities]
    data += [imitate(f"mail from {city}", "read_mail") for city in cities]
    await learn(client, data, steps=30)
    path = await client.save_weights_for_sampler("x")
    sampler = await service.create_sampling_client(path)
    tokenizer = service.get_tokenizer()
    for question, answer, other in (
        ("weather in Bern", "get_weather", "read_mail"),
        ("mail from Bern", "read_mail", "get_weather"),
    ):
        likely = {}
        for said in (answer, other):
            datum = imitate(question, said)
            whole = await sampler.compute_logprobs(datum.model_input)
            likely[said] = sum(whole[-len(tokenizer.encode(said)) :])
        assert likely[answer] > likely[other] + 2


async def test_prompts_that_differ_far_back_are_told_apart(service, imitate, learn):
    """Same length, same last tokens, same long words: only the whole prompt tells."""
    client = await service.create_training_client(rank=8, seed=1)
    rest = " elephant giraffes dolphins squirrel: which?"
    await learn(client, [imitate("a" + rest, "yes"), imitate("b" + rest, "not")], steps=30)
    sampler = await service.create_sampling_client(await client.save_weights_for_sampler("x"))
    for first, answer in (("a", "yes"), ("b", "not")):
        whole = await sampler.compute_logprobs(imitate(first + rest, answer).model_input)
        assert sum(whole[-len(answer) :]) > -0.5


@pytest.mark.parametrize(
    ("tokens", "targets", "weights", "said"),
    [
        ([1, 999], [1, 2], [1.0, 1.0], "datum 1: model_input has token 999"),
        ([1, 2], [1, 999], [1.0, 1.0], "datum 1: target_tokens has token 999"),
        ([1, 2], [1], [1.0], "datum 1: target_tokens has shape"),
        ([1, 2], [1, 2], [1.0], "datum 1: weights has shape"),
        ([], [], [], "datum 1: model_input is empty"),
    ],
)
async def test_bad_data_is_refused_and_leaves_the_adapter_as_it_was(
    service, imitate, learn, tokens, targets, weights, said
):
    client = await service.create_training_client(rank=8, seed=1)
    before = await client.save_state("x")
    inputs = {"target_tokens": TensorData(targets, "int64"), "weights": TensorData(weights)}
    bad = Datum(ModelInput.from_ints(tokens), inputs)
    call = client.forward_backward([imitate("q", "a"), bad], "cross_entropy")
    await client.optim_step(AdamParams(learning_rate=1e-3, weight_decay=0.1))
    with pytest.raises(BackendError, match=said):
        await call
    fresh = await service.create_training_client(rank=8, seed=1)
    await fresh.optim_step(AdamParams(learning_rate=1e-3, weight_decay=0.1))
    assert await client.save_state("x") == await fresh.save_state("x") != before


async def test_an_unknown_loss_is_refused_when_awaited_with_the_known_ones(service, imitate):
    client = await service.create_training_client(rank=8, seed=1)
    call = client.forward_backward([imitate("q", "a")], "crossentropy")
    with pytest.raises(BackendError, match="known: cispo, cross_entropy, dro, importance_sampling, ppo"):
        await call


async def test_no_data_is_refused(service):
    client = await service.create_training_client(rank=8, seed=1)
    with pytest.raises(BackendError, match="without data"):
        await client.forward_backward([], "cross_entropy")


async def test_more_rank_is_more_room(service, imitate, learn):
    """Random pairs can only be memorised, which takes rows."""
    chance = np.random.default_rng(0)
    data = [imitate(*("".join(chr(97 + c) for c in chance.integers(0, 26, 12)) for _ in "qa")) for _ in range(60)]
    final = {}
    for rank in (1, 32):
        client = await service.create_training_client(rank=rank, seed=1)
        final[rank] = (await learn(client, data, steps=12))[-1]
    assert final[32] < 0.9 * final[1]


@pytest.mark.skipif(HAS_TORCH, reason="torch is here")
async def test_without_torch_a_custom_loss_says_how_to_install_it(service, imitate):
    assert not service.capabilities.custom_loss
    client = await service.create_training_client(rank=8, seed=1)
    with pytest.raises(MissingDependency, match=r"pip install 'evsys-sdk\[local\]'"):
        await client.forward_backward_custom([imitate("q", "a")], lambda data, logprobs: (0, {}))


@needs_torch
async def test_a_custom_loss_moves_the_weights_as_the_named_one_does(service, imitate):
    import torch

    def mine(data, logprobs):
        weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
        loss = -sum((w * lp).sum() for w, lp in zip(weights, logprobs, strict=True))
        return loss, {"mine": torch.tensor(3.0)}

    data = [imitate("q", "answer"), imitate("another question", "a")]
    ends = []
    for custom in (True, False):
        client = await service.create_training_client(rank=8, seed=1)
        for _ in range(3):
            call = (
                client.forward_backward_custom(data, mine) if custom else client.forward_backward(data, "cross_entropy")
            )
            output = await call
            await client.optim_step(AdamParams(learning_rate=1e-3))
        ends.append(output)
    assert ends[0].metrics["mine"] == 3.0
    assert ends[0].metrics["loss:sum"] == pytest.approx(ends[1].metrics["loss:sum"], rel=1e-4)
    assert ends[0].logprobs[0] == pytest.approx(ends[1].logprobs[0], rel=1e-3, abs=1e-5)


@needs_torch
@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda data, logprobs: 1 / 0, "custom loss .* failed: ZeroDivisionError"),
        (lambda data, logprobs: logprobs[0].sum(), r"must return \(loss, metrics\), not Tensor"),
        (lambda data, logprobs: (0.5, {}), "must return one differentiable number"),
        (lambda data, logprobs: (logprobs[0], {}), "must return one differentiable number"),
    ],
    ids=["raises", "no tuple", "no tensor", "no scalar"],
)
async def test_a_custom_loss_that_is_wrong_is_named(service, imitate, loss, said):
    client = await service.create_training_client(rank=8, seed=1)
    with pytest.raises(BackendError, match=said):
        await client.forward_backward_custom([imitate("q", "a")], loss)


def test_log_softmax_adds_up_to_one():
    logp = log_softmax(np.random.default_rng(0).normal(0, 30, (4, 50)).astype(np.float32))
    assert np.exp(logp).sum(axis=1) == pytest.approx(np.ones(4), abs=1e-5)
