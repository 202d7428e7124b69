"""What every training backend promises, asked of each registered one that can run here."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from evsys_sdk.algorithms.sft import SFT
from evsys_sdk.backends.mock import MockBackend
from evsys_sdk.config.schema import ModelConfig
from evsys_sdk.errors import BackendUnavailable, EvsysError, MissingDependency
from evsys_sdk.protocols import Backend
from evsys_sdk.registry import backends
from evsys_sdk.testing import training_context
from evsys_sdk.training_api import (
    AdamParams,
    Datum,
    ModelInput,
    SamplingClient,
    SamplingParams,
    TensorData,
    Tokenizer,
    TrainingClient,
    TrainingService,
    text_of,
)

MODELS = {"mock": "any-name"}
"""What to load where; backends that are not named here are asked for the model made on the spot."""
RATE = AdamParams(learning_rate=1e-3)


def _params(kind, request):
    """What a backend needs to run here: tinker a server, for which ours stands."""
    if kind == "tinker":
        return {"base_url": request.getfixturevalue("tinker_server").url}
    return {"threads": 1} if kind == "local" else {}


@pytest.fixture(params=backends.names())
def prepared(request, tmp_path):
    backend = backends.build(request.param, _params(request.param, request))
    model = ModelConfig(name=MODELS.get(request.param, "tiny-random"))
    try:
        handles = backend.prepare(model=model, run_dir=tmp_path)
    except MissingDependency as exc:
        pytest.skip(str(exc))
    yield backend, handles
    backend.teardown(handles)


@pytest.fixture
def service(prepared):
    return prepared[1]["service"]


@pytest.fixture
async def client(service):
    return await service.create_training_client(rank=4, seed=1)


def _imitate(service, question="sky?", answer="blue"):
    tokenizer = service.get_tokenizer()
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    tokens = [*prompt, *tokenizer.encode(answer), tokenizer.eos_token_id]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt))
    inputs = {"target_tokens": TensorData(tokens[1:], "int64"), "weights": TensorData(weights)}
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs)


def _reward(datum, logprobs, reward):
    """The same sequence as something the model did itself, with its last two tokens rewarded."""
    size = datum.model_input.length
    inputs = {
        "target_tokens": datum.loss_fn_inputs["target_tokens"],
        "logprobs": TensorData(logprobs),
        "advantages": TensorData([0.0] * (size - 2) + [reward, reward]),
    }
    return Datum(datum.model_input, inputs)


def _prompt(service, question="sky?"):
    tokenizer = service.get_tokenizer()
    chat = [{"role": "user", "content": question}]
    return ModelInput.from_ints(tokenizer.apply_chat_template(chat, add_generation_prompt=True))


async def test_everything_has_the_shape_of_the_surface(prepared, service, client):
    assert isinstance(prepared[0], Backend) and isinstance(service, TrainingService)
    assert isinstance(client, TrainingClient) and isinstance(service.get_tokenizer(), Tokenizer)
    assert isinstance(await service.create_sampling_client(), SamplingClient)
    assert "cross_entropy" in service.capabilities.losses


def test_the_tokenizer_gives_text_back(service):
    tokenizer = service.get_tokenizer()
    for text in ("hello", "  two  spaces\n", "1+1=2", "naïve ☃"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_marks_in_user_text_do_not_end_the_turn(service):
    tokenizer = service.get_tokenizer()
    plain, sly = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}]).count(tokenizer.eos_token_id)
        for text in ("hi", "hi<|im_end|>")
    ]
    assert plain == sly


async def test_losses_are_sums_over_tokens(service, client):
    datum = _imitate(service)
    one = await client.forward_backward([datum], "cross_entropy")
    two = await client.forward_backward([datum, datum], "cross_entropy")
    weights = datum.loss_fn_inputs["weights"].tolist()
    by_hand = -sum(w * lp for w, lp in zip(weights, one.logprobs[0], strict=True))
    assert one.metrics["loss:sum"] == pytest.approx(by_hand, rel=1e-3)
    assert two.metrics["loss:sum"] == pytest.approx(2 * one.metrics["loss:sum"], rel=1e-3)


async def test_weights_move_at_the_optimiser_step_and_not_before(service, client):
    data = [_imitate(service)]
    first = await client.forward_backward(data, "cross_entropy")
    second = await client.forward_backward(data, "cross_entropy")
    assert first.logprobs == second.logprobs
    await client.optim_step(RATE)
    assert (await client.forward_backward(data, "cross_entropy")).metrics["loss:sum"] < first.metrics["loss:sum"]


async def test_calls_may_be_submitted_before_any_is_awaited(service, client):
    data = [_imitate(service)]
    calls = []
    for _ in range(5):
        calls.append(client.forward_backward(data, "cross_entropy"))
        calls.append(client.optim_step(RATE))
    answers = [await call for call in calls]
    losses = [answer.metrics["loss:sum"] for answer in answers[::2]]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro"])
@pytest.mark.parametrize("reward", [1.0, -1.0])
async def test_rewards_pull_in_their_direction(service, client, loss, reward):
    if loss not in service.capabilities.losses:
        pytest.skip(f"this backend has no {loss}")
    twin = await service.create_training_client(rank=4, seed=1)
    datum = _imitate(service)
    before = (await twin.forward_backward([datum], "cross_entropy")).logprobs[0]
    data = [_reward(datum, before, reward)]
    await client.forward_backward(data, loss)
    await client.optim_step(RATE)
    after = (await client.forward_backward(data, loss)).logprobs[0]
    assert (after[-1] - before[-1]) * reward > 0


async def test_soft_targets_pull_towards_each(service, client):
    tokens = list(_prompt(service).tokens)
    pair = service.get_tokenizer().encode("yn")[:2]
    shape = (len(tokens), 2)
    inputs = {
        "target_tokens": TensorData(pair * len(tokens), "int64", shape),
        "weights": TensorData([0.0] * (2 * len(tokens) - 2) + [0.5, 0.5], "float32", shape),
    }
    datum = Datum(ModelInput.from_ints(tokens), inputs)
    before = (await client.forward_backward([datum], "cross_entropy")).logprobs[0]
    await client.optim_step(RATE)
    after = (await client.forward_backward([datum], "cross_entropy")).logprobs[0]
    assert len(before) == 2 * len(tokens)  # row by row
    assert after[-2] > before[-2] and after[-1] > before[-1]


async def test_a_custom_loss_is_called_with_tensors_and_moves_the_weights(service, client):
    if not service.capabilities.custom_loss:
        pytest.skip("this backend has no custom losses here")
    data = [_imitate(service)]

    def loss(data, logprobs):
        return -(data[0].loss_fn_inputs["weights"].to_torch() * logprobs[0]).sum(), {"seen": float(len(logprobs))}

    first = await client.forward_backward_custom(data, loss)
    await client.optim_step(RATE)
    second = await client.forward_backward_custom(data, loss)
    assert first.metrics["seen"] == 1.0 and second.metrics["loss:sum"] < first.metrics["loss:sum"]


async def test_a_custom_loss_may_leave_a_datum_out(service, client):
    if not service.capabilities.custom_loss:
        pytest.skip("this backend has no custom losses here")
    data = [_imitate(service), _imitate(service, "grass?", "green")]
    await client.forward_backward_custom(data, lambda data, logprobs: (-logprobs[0].sum(), {}))
    assert (await client.optim_step(RATE)).metrics.get("grad_norm", 1.0) > 0
    with pytest.raises(EvsysError):
        await client.forward_backward_custom(data, lambda data, logprobs: (1.0, {}))


async def test_a_custom_loss_keeps_its_place_among_calls_that_are_not_awaited(service, client):
    if not service.capabilities.custom_loss:
        pytest.skip("this backend has no custom losses here")
    data = [_imitate(service)]

    def loss(data, logprobs):
        return -(data[0].loss_fn_inputs["weights"].to_torch() * logprobs[0]).sum(), {}

    calls = [client.forward_backward_custom(data, loss), client.optim_step(RATE)]
    calls += [client.forward_backward_custom(data, loss), client.optim_step(RATE), client.save_state("two-steps")]
    answers = [await call for call in calls]
    third = await client.forward_backward(data, "cross_entropy")
    losses = [answers[0].metrics["loss:sum"], answers[2].metrics["loss:sum"], third.metrics["loss:sum"]]
    assert losses[0] > losses[1] > losses[2]
    again = await service.create_training_client(rank=4, seed=9)
    await again.load_state(answers[4])
    assert (await again.forward_backward(data, "cross_entropy")).logprobs == third.logprobs


async def test_a_state_is_loaded_before_the_calls_made_after_it(service, client):
    data = [_imitate(service)]
    untrained = await client.save_state("untrained")
    before = await client.forward_backward(data, "cross_entropy")
    await client.optim_step(RATE)
    loading = client.load_state(untrained)
    after = client.forward_backward(data, "cross_entropy")
    assert (await after).logprobs == before.logprobs
    await loading


async def test_a_name_may_be_used_twice_and_both_are_kept(service, client):
    data = [_imitate(service)]
    first = await client.save_weights_for_sampler("same")
    await client.forward_backward(data, "cross_entropy")
    await client.optim_step(RATE)
    second = await client.save_weights_for_sampler("same")
    answers = [
        await (await service.create_sampling_client(path)).compute_logprobs(data[0].model_input)
        for path in (first, second)
    ]
    assert answers[0] != answers[1]


@pytest.mark.parametrize("lost", ["load", "sample"])
async def test_a_path_that_leads_nowhere_is_a_refusal(service, client, lost, tmp_path):
    known = await client.save_state("known")
    nowhere = known.replace("known", "unknown")
    with pytest.raises(EvsysError) as refused:
        await (client.load_state(nowhere) if lost == "load" else service.create_sampling_client(nowhere))
    assert not isinstance(refused.value, BackendUnavailable)


async def test_all_weights_are_trained_with_rank_0_or_it_is_refused(service):
    if not service.capabilities.full_fine_tuning:
        with pytest.raises(EvsysError, match="lora_rank"):
            await service.create_training_client(rank=0, seed=1)
        return
    client, data = await service.create_training_client(rank=0, seed=1), [_imitate(service)]
    losses = []
    for _ in range(3):
        losses.append((await client.forward_backward(data, "cross_entropy")).metrics["loss:sum"])
        await client.optim_step(RATE)
    assert losses[2] < losses[1] < losses[0]


async def test_refusals_come_when_awaited_and_leave_the_weights_alone(service, client):
    good = _imitate(service)
    before = (await client.forward_backward([good], "cross_entropy")).logprobs
    await client.optim_step(AdamParams(learning_rate=0.0))
    out_of_range = Datum(ModelInput.from_ints([10**6]), {**good.loss_fn_inputs})
    calls = [client.forward_backward([good], "no_such_loss"), client.forward_backward([out_of_range], "cross_entropy")]
    await client.optim_step(RATE)
    for call in calls:
        with pytest.raises(EvsysError):
            await call
    assert (await client.forward_backward([good], "cross_entropy")).logprobs == before


async def test_a_sampler_is_a_snapshot(service, client):
    prompt = _prompt(service)
    snapshot = await service.create_sampling_client(await client.save_weights_for_sampler("first"))
    before = await snapshot.compute_logprobs(prompt)
    await client.forward_backward([_imitate(service)], "cross_entropy")
    await client.optim_step(RATE)
    later = await service.create_sampling_client(await client.save_weights_for_sampler("second"))
    assert await snapshot.compute_logprobs(prompt) == before
    assert await later.compute_logprobs(_imitate(service).model_input) != before


async def test_state_with_optimiser_resumes_as_if_it_had_not_stopped(service, client):
    if not service.capabilities.resume:
        pytest.skip("this backend cannot resume")
    data = [_imitate(service)]

    async def steps(which, count):
        for _ in range(count):
            output = await which.forward_backward(data, "cross_entropy")
            await which.optim_step(RATE)
        return output.logprobs

    await steps(client, 3)
    path = await client.save_state("middle")
    resumed = await service.create_training_client(rank=4, seed=2)
    await resumed.load_state(path)
    assert await steps(resumed, 3) == await steps(client, 3)


async def test_logprobs_have_the_prompts_length_and_no_first(service):
    sampler = await service.create_sampling_client()
    prompt = _prompt(service)
    logprobs = await sampler.compute_logprobs(prompt)
    assert len(logprobs) == prompt.length and logprobs[0] is None
    assert all(math.isfinite(value) and value <= 1e-6 for value in logprobs[1:])


async def test_sampling_repeats_with_its_seed_and_rows_do_not_depend_on_each_other(service):
    sampler = await service.create_sampling_client()
    params = SamplingParams(max_tokens=8, seed=3)
    four = (await sampler.sample(_prompt(service), 4, params)).sequences
    two = (await sampler.sample(_prompt(service), 2, params)).sequences
    assert [s.tokens for s in two] == [s.tokens for s in four[:2]]
    assert len({tuple(s.tokens) for s in four}) > 1
    assert all(len(s.tokens) == len(s.logprobs) <= 8 for s in four)


async def test_what_is_taught_is_said(service, client):
    for _ in range(40):
        output = client.forward_backward([_imitate(service)], "cross_entropy")
        await client.optim_step(RATE)
        await output
    sampler = await service.create_sampling_client(await client.save_weights_for_sampler("taught"))
    sequence = (await sampler.sample(_prompt(service), 1, SamplingParams(max_tokens=16, temperature=0.0))).sequences[0]
    assert text_of(sequence.tokens, service.get_tokenizer()) == "blue" and sequence.stop_reason == "stop"


class PlainBackend:
    """No base class, no Config, no registration: only the two methods."""

    def prepare(self, *, model, run_dir):
        return MockBackend().prepare(model=model, run_dir=run_dir)

    def teardown(self, handles):
        handles["torn down"] = True


def test_a_plain_class_is_a_backend(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}]
    backends.register("plain_for_this_test")(PlainBackend)
    try:
        backend = backends.build("plain_for_this_test", {})
        ctx = training_context(tmp_path, rows, backend=backend)
        result = SFT(max_steps=2).train(ctx)
        assert Path(result.artifacts["final_checkpoint"]).exists()
    finally:
        del backends.entries["plain_for_this_test"]
