"""The real `tinker` client against the server, over a model whose answers can be worked out."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import numpy as np
import pydantic
import pytest
import torch
from toy_engine import EOS, MAX_LENGTH, VOCABULARY

from evsys_engine.server import ServerLimits, background_server

tinker = pytest.importorskip("tinker")
types = tinker.types

ADAM = types.AdamParams(learning_rate=0.1)


def datum(tokens=(2, 3, 4, 5), targets=(3, 4, 5, EOS), **inputs):
    inputs = inputs or {"weights": [1.0] * len(targets)}
    loss_inputs = {"target_tokens": list(targets), **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=loss_inputs)


def loss_of(training, data=None):
    return training.forward(data or [datum()], "cross_entropy").result().metrics["loss:sum"]


def step(training, data=None, loss_fn="cross_entropy"):
    done = training.forward_backward(data or [datum()], loss_fn)
    moved = training.optim_step(ADAM)
    return done.result(), moved.result()


def test_supervised_training_lowers_the_loss(training):
    losses = [step(training)[0].metrics["loss:sum"] for _ in range(8)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 3


def test_loss_and_logprobs_are_those_of_the_model(training, toy):
    output = training.forward([datum(weights=[1.0, -2.0, 0.0, 0.5])], "cross_entropy").result()
    expected = torch.log_softmax(toy.base, -1)[[2, 3, 4, 5], [3, 4, 5, EOS]]
    np.testing.assert_allclose(output.loss_fn_outputs[0]["logprobs"].to_numpy(), expected, rtol=1e-5)
    weights = torch.tensor([1.0, -2.0, 0.0, 0.5])
    assert output.metrics["loss:sum"] == pytest.approx(-(expected * weights).sum().item(), rel=1e-5)


def test_a_call_this_server_does_not_offer_leaves_the_next_one_alone(training):
    began = time.monotonic()
    with pytest.raises(tinker.NotFoundError, match="save_weights_external"):
        training.save_weights_external("out").result()
    assert loss_of(training) > 0
    assert time.monotonic() - began < 60  # it was 120 s


DROPPED_CALLS = {
    "a name": lambda training: training.save_state(name=5),
    "a sampler's name": lambda training: training.save_weights_for_sampler(name=5),
    "a loss setting": lambda training: training.forward_backward([datum()], "ppo", {"clip_low_threshold": [1, 2]}),
}


@pytest.mark.parametrize("call", DROPPED_CALLS)
def test_a_call_that_the_client_itself_refuses_leaves_the_next_one_alone(training, call):
    step(training)
    began = time.monotonic()
    with pytest.raises((pydantic.ValidationError, TypeError)):  # never sent, but its number is used up
        DROPPED_CALLS[call](training).result()
    assert loss_of(training) > 0
    assert time.monotonic() - began < 60  # it was 120 s


def test_a_norm_that_is_not_finite_reaches_the_client_as_such(training, monkeypatch):
    monkeypatch.setattr("toy_engine.ToyAdapter.optim_step", lambda self, settings: {"grad_norm": float("nan")})
    assert np.isnan(training.optim_step(ADAM).result().metrics["grad_norm"])


def test_gradients_add_up_until_the_optimiser_steps(client, toy):
    def norm_after(calls):
        training = client.create_lora_training_client(base_model=toy.info.name, rank=4)
        for _ in range(calls):
            training.forward_backward([datum()], "cross_entropy").result()
        return training.optim_step(ADAM).result().metrics["grad_norm"]

    assert norm_after(3) == pytest.approx(3 * norm_after(1), rel=1e-5)


def test_soft_targets_and_rows_of_different_width_come_back_in_their_shapes(training):
    soft = datum(targets=[[3, 6], [4, 7], [5, 8], [EOS, 9]], weights=[[0.5, 0.5]] * 4)
    output = training.forward([datum(), soft, datum()], "cross_entropy").result()
    assert [list(out["logprobs"].shape) for out in output.loss_fn_outputs] == [[4], [4, 2], [4]]


def test_sparse_soft_targets_arrive_as_the_dense_ones(training):
    targets, weights = torch.zeros(4, 20, dtype=torch.int64), torch.zeros(4, 20)
    targets[:, 3], weights[:, 3] = torch.tensor([3, 4, 5, EOS]), 1.0
    sparse = types.Datum(
        model_input=types.ModelInput.from_ints([2, 3, 4, 5]),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )
    assert sparse.loss_fn_inputs["weights"].sparse_crow_indices is not None
    assert loss_of(training, [sparse]) == pytest.approx(loss_of(training), rel=1e-5)


def test_a_custom_loss_runs_on_the_client_and_moves_the_weights(training):
    def push_up(data, logprobs):
        return -sum(row.sum() for row in logprobs), {"rows:sum": float(len(logprobs))}

    before = loss_of(training)
    output = training.forward_backward_custom([datum(), datum()], push_up).result()
    training.optim_step(ADAM).result()
    assert output.metrics["loss:sum"] == pytest.approx(2 * before, rel=1e-5)
    assert output.metrics["rows:sum"] == 2
    assert loss_of(training) < before - 0.3


def test_importance_sampling_follows_the_advantages(training):
    old = training.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    for _ in range(5):
        step(training, [datum(logprobs=old, advantages=[1.0, -1.0, 0.0, 1.0])], "importance_sampling")
    new = training.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    assert new[0] > old[0] and new[1] < old[1] and new[2] == pytest.approx(old[2])


def test_a_batch_sent_in_pieces_is_one_batch(training, toy):
    pieces = training._chunked_requests_generator([datum()] * 2500)
    assert len(list(pieces)) == 3  # the client cuts at 1024 and sends the first piece last
    output, moved = step(training, [datum()] * 2500)
    assert len(output.loss_fn_outputs) == 2500
    assert output.metrics["loss:sum"] == pytest.approx(2500 * 17.2554, rel=1e-4)
    assert toy.log[-4:] == ["forward_backward"] * 3 + ["optim_step"]
    assert moved.metrics["grad_norm"] == pytest.approx(2500 * 2.0119, rel=1e-3)


def test_sampling_gives_tokens_logprobs_and_a_reason(client, toy):
    sampler = client.create_sampling_client(base_model=toy.info.name)
    params = types.SamplingParams(max_tokens=12, seed=3, temperature=1.0)
    answer = sampler.sample(types.ModelInput.from_ints([2, 3]), 4, params).result()
    logprobs = torch.log_softmax(toy.base, -1)
    assert len({tuple(row.tokens) for row in answer.sequences}) > 1
    for row in answer.sequences:
        expected = [logprobs[a, b].item() for a, b in zip([3, *row.tokens], row.tokens, strict=False)]
        assert row.logprobs == pytest.approx(expected, rel=1e-5)
        assert row.stop_reason == ("stop" if row.tokens[-1] == EOS else "length")
    assert len({row.sequence_id for row in answer.sequences}) == 4


def test_the_same_seed_gives_the_same_completions(client, toy):
    sampler = client.create_sampling_client(base_model=toy.info.name)

    def draw(seed):
        params = types.SamplingParams(max_tokens=10, seed=seed, stop=[])
        return [row.tokens for row in sampler.sample(types.ModelInput.from_ints([2]), 3, params).result().sequences]

    assert draw(1) == draw(1) != draw(2)


def test_a_completion_ends_at_the_end_of_text_unless_told_otherwise(client, toy):
    toy.base[:, EOS] = 20.0
    sampler = client.create_sampling_client(base_model=toy.info.name)

    def draw(stop):
        params = types.SamplingParams(max_tokens=4, temperature=0, stop=stop)
        return sampler.sample(types.ModelInput.from_ints([2]), 1, params).result().sequences[0].tokens

    assert draw(None) == [EOS]
    assert draw([]) == [EOS] * 4


def test_prompt_logprobs_and_top_k(client, toy):
    sampler = client.create_sampling_client(base_model=toy.info.name)
    prompt = types.ModelInput.from_ints([2, 3, 4, 5])
    expected = torch.log_softmax(toy.base, -1)
    known = [None] + [pytest.approx(expected[a, b].item(), rel=1e-5) for a, b in [(2, 3), (3, 4), (4, 5)]]
    assert sampler.compute_logprobs(prompt).result() == known
    answer = sampler.sample(
        prompt, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result()
    assert answer.prompt_logprobs == known
    assert answer.topk_prompt_logprobs[0] is None
    for place, row in enumerate(answer.topk_prompt_logprobs[1:]):
        assert [token for token, _ in row] == expected[[2, 3, 4][place]].topk(3).indices.tolist()
    assert sampler.compute_logprobs(prompt, prompt_logprobs_last_n=2).result() == [None, None, *known[2:]]


def test_a_sampling_client_is_a_snapshot(training):
    step(training)
    sampler = training.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints([2, 3, 4, 5, EOS])
    before = sampler.compute_logprobs(prompt).result()
    for _ in range(3):
        step(training)
    assert sampler.compute_logprobs(prompt).result() == before
    after = training.save_weights_and_get_sampling_client().compute_logprobs(prompt).result()
    assert sum(after[1:]) > sum(before[1:]) + 1


def test_training_resumes_from_a_state_with_and_without_its_optimiser(client, training):
    for _ in range(3):
        step(training)
    path = training.save_state("three").result().path
    resumed = client.create_training_client_from_state_with_optimizer(path)
    fresh = client.create_training_client_from_state(path)
    assert loss_of(resumed) == loss_of(fresh) == loss_of(training)
    for one in (training, resumed, fresh):
        step(one)
    assert loss_of(resumed) == loss_of(training) != loss_of(fresh)
    assert resumed.get_info().lora_rank == 4


async def test_the_asynchronous_calls_of_the_client_work_too(connect, server, toy):
    client = connect(server)
    training = await client.create_lora_training_client_async(base_model=toy.info.name, rank=4)
    done = await training.forward_backward_async([datum()], "cross_entropy")
    moved = await training.optim_step_async(ADAM)
    await asyncio.gather(done.result_async(), moved.result_async())
    saved = await (await training.save_state_async("s")).result_async()
    again = await client.create_training_client_from_state_async(saved.path)
    assert loss_of(again) < 17


def test_the_tokenizer_loads_from_the_model_folder_without_a_hub(client, training, toy, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert training.get_tokenizer().encode("w5 w6") == [5, 6]
    sampler = client.create_sampling_client(base_model=toy.info.name)
    assert sampler.get_tokenizer().encode("w5 w6") == [5, 6]
    assert sampler.get_base_model() == toy.info.name


def test_two_clients_train_side_by_side_and_do_not_touch_each_other(connect, server, toy):
    targets = {"a": (3, 4, 5, EOS), "b": (7, 8, 9, 10)}
    found = {}

    def work(name):
        client = connect(server)
        training = client.create_lora_training_client(base_model=toy.info.name, rank=4)
        data = [datum(targets=targets[name])]
        first = loss_of(training, data)
        for _ in range(6):
            step(training, data)
        other = targets["b" if name == "a" else "a"]
        found[name] = first - loss_of(training, data), loss_of(training, [datum(targets=other)]), client

    threads = [threading.Thread(target=work, args=(name,)) for name in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    untrained = connect(server).create_lora_training_client(base_model=toy.info.name, rank=4)
    assert all(found[name][0] > 3 for name in targets)
    assert found["a"][1] > loss_of(untrained, [datum(targets=targets["b"])])


def bad_calls():
    yield "unknown loss", lambda t: t.forward_backward([datum()], "dpo_on_the_moon")
    yield "token out of range", lambda t: t.forward_backward([datum(tokens=(2, 3, 4, VOCABULARY))], "cross_entropy")
    yield "target out of range", lambda t: t.forward_backward([datum(targets=(3, 4, 5, -1))], "cross_entropy")
    yield (
        "too long",
        lambda t: t.forward_backward([datum([2] * (MAX_LENGTH + 1), [2] * (MAX_LENGTH + 1))], "cross_entropy"),
    )
    yield "wrong shape", lambda t: t.forward_backward([datum(targets=(3, 4))], "cross_entropy")
    yield "good then bad", lambda t: t.forward_backward([datum(), datum(tokens=(99, 3, 4, 5))], "cross_entropy")
    yield (
        "an image",
        lambda t: t.forward_backward(
            [
                types.Datum(
                    model_input=types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=1)]),
                    loss_fn_inputs={"target_tokens": [3], "weights": [1.0]},
                )
            ],
            "cross_entropy",
        ),
    )
    yield "a loss setting in words", lambda t: t.forward_backward([datum()], "ppo", {"clip": "much"})
    yield "negative learning rate", lambda t: t.optim_step(types.AdamParams(learning_rate=-1.0))
    yield "another optimiser", lambda t: t.optim_step(types.DimuonParams(learning_rate=0.1))
    yield "a name that climbs out", lambda t: t.save_state("../../evil")
    yield "a sampler name that climbs out", lambda t: t.save_weights_for_sampler("..")
    yield "a state that is not there", lambda t: t._load_state_impl("tinker://run/weights/none", False, None)
    yield "a path that climbs out", lambda t: t._load_state_impl("tinker://../weights/..", False, None)


@pytest.mark.parametrize(("name", "call"), list(bad_calls()), ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_call_is_the_callers_error_at_once_and_changes_nothing(training, name, call):
    step(training)
    before = training.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    started = time.monotonic()
    with pytest.raises(tinker.RequestFailedError) as failed:
        call(training).result()
    assert failed.value.category == "user"
    assert time.monotonic() - started < 60, "the client asked again and again"
    after = training.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    assert after == before
    norm = training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
    assert norm == 0, "a refused batch left gradients behind"


def test_bad_sampling_calls_are_refused_at_once(client, toy):
    sampler = client.create_sampling_client(base_model=toy.info.name)
    params = types.SamplingParams(max_tokens=2)
    started = time.monotonic()
    with pytest.raises(tinker.BadRequestError, match="the model takes 64"):
        sampler.sample(types.ModelInput.from_ints([2] * (MAX_LENGTH + 1)), 1, params).result()
    with pytest.raises(tinker.BadRequestError, match="temperature"):
        sampler.sample(types.ModelInput.from_ints([2]), 1, types.SamplingParams(temperature=-1)).result()
    with pytest.raises(tinker.BadRequestError, match="topk_sample_logprobs"):
        sampler.sample(types.ModelInput.from_ints([2]), 1, params, topk_sample_logprobs=2).result()
    assert time.monotonic() - started < 60, "the client asked again and again"


def test_unknown_models_samplers_and_paths_are_refused_at_once(client, training):
    with pytest.raises(tinker.BadRequestError, match="not served here"):
        client.create_lora_training_client(base_model="somebody/else")
    with pytest.raises(tinker.BadRequestError, match="not served here"):
        client.create_sampling_client(base_model="somebody/else")
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        client.create_sampling_client(model_path="tinker://run/sampler_weights/none")
    with pytest.raises(tinker.BadRequestError, match="no name for a checkpoint"):
        client.create_sampling_client(model_path="tinker://../sampler_weights/x")
    state = training.save_state("state").result().path
    with pytest.raises(tinker.BadRequestError, match="save_weights_for_sampler"):
        client.create_sampling_client(model_path=state)
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        client.create_training_client_from_state("tinker://run/weights/none")


def test_a_name_is_taken_once_unless_it_may_be_overwritten(client, training):
    first = training.save_state("same").result().path
    with pytest.raises(tinker.RequestFailedError, match="exists already"):
        training.save_state("same").result()
    step(training)
    assert training.save_state("same", overwrite=True).result().path == first
    assert loss_of(client.create_training_client_from_state(first)) == loss_of(training)


def test_checkpoints_can_be_listed_described_and_deleted(server, client, training):
    state = training.save_state("one", ttl_seconds=3600, user_metadata={"step": "1"}).result().path
    sampler = training.save_weights_for_sampler("two").result().path
    rest = tinker.RestClient(base_url=server.url, api_key="tml-local")
    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    assert {found.tinker_path: found.checkpoint_type for found in listed} == {state: "training", sampler: "sampler"}
    assert listed[0].user_metadata == {"step": "1"} and listed[0].expires_at is not None and listed[0].size_bytes > 100
    run = rest.get_training_run_by_tinker_path(state).result()
    assert run.training_run_id == training.model_id and run.lora_rank == 4
    assert run.last_checkpoint.tinker_path == state and run.last_sampler_checkpoint.tinker_path == sampler
    assert [found.training_run_id for found in rest.list_training_runs().result().training_runs] == [training.model_id]
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    rest.publish_checkpoint_from_tinker_path(state).result()
    public = {found.tinker_path: found.public for found in rest.list_user_checkpoints().result().checkpoints}
    assert public == {state: True, sampler: False}
    rest.unpublish_checkpoint_from_tinker_path(state).result()
    assert not any(found.public for found in rest.list_user_checkpoints().result().checkpoints)
    with pytest.raises(tinker.NotFoundError):
        rest.publish_checkpoint_from_tinker_path(f"{state}-other").result()
    rest.delete_checkpoint_from_tinker_path(sampler).result()
    left = rest.list_user_checkpoints().result()
    assert [(found.tinker_path, found.expires_at) for found in left.checkpoints] == [(state, None)]
    assert left.cursor.total_count == 1
    with pytest.raises(tinker.NotFoundError):
        rest.get_training_run("no-such-run").result()
    rest.holder.close()


def test_a_finished_session_gives_everything_back(connect, server, toy):
    client = connect(server)
    training = client.create_lora_training_client(base_model=toy.info.name, rank=4)
    sampler = training.save_weights_and_get_sampling_client()
    sampler.compute_logprobs(types.ModelInput.from_ints([2, 3])).result()
    assert list((server.service.checkpoints.folder / ".unnamed").rglob("delta.json"))
    client.close("success").result()
    assert toy.closed == 1 and toy.log[-1] == "close sampler"
    assert server.service.sessions.all() == [] and len(server.service.futures) == 0
    assert not list((server.service.checkpoints.folder / ".unnamed").rglob("delta.json"))


def test_the_samplers_used_last_stay_in_memory(toy, tmp_path, connect):
    with background_server(toy, tmp_path, limits=ServerLimits(loaded_samplers=2, unnamed_samplers=4)) as server:
        training = connect(server).create_lora_training_client(base_model=toy.info.name, rank=4)
        prompt, samplers, answers = types.ModelInput.from_ints([2, 3, 4]), [], []
        for _ in range(6):
            step(training)
            samplers.append(training.save_weights_and_get_sampling_client())
            answers.append(samplers[-1].compute_logprobs(prompt).result())
        assert len(server.service.samplers) <= 2
        assert samplers[3].compute_logprobs(prompt).result() == answers[3]  # read from its folder again
        with pytest.raises(tinker.NotFoundError, match="put away"):
            samplers[0].compute_logprobs(prompt).result()
        assert len(list((tmp_path / ".unnamed").rglob("delta.json"))) == 4


def test_a_model_that_was_asked_for_by_name_is_called_by_it(connect, toy, tmp_path):
    path = str(toy.info.path)
    toy.info = replace(toy.info, name="tiny-toy")
    with background_server(toy, tmp_path / "named") as running:
        client = connect(running)
        named = client.create_lora_training_client(base_model="tiny-toy", rank=4)
        found = named.get_info()
        assert (found.model_data.model_name, found.model_data.tokenizer_id) == ("tiny-toy", path)
        assert named.get_tokenizer().vocab_size == toy.info.vocab_size
        by_path = client.create_lora_training_client(base_model=path, rank=4)
        assert by_path.get_info().model_data.model_name == path
        state = named.save_state("one").result().path
        rest = tinker.RestClient(base_url=running.url, api_key="tml-local")
        assert rest.get_training_run(named.model_id).result().base_model == "tiny-toy"
        assert rest.get_weights_info_by_tinker_path(state).result().base_model == "tiny-toy"
        assert client.create_training_client_from_state(state).get_info().model_data.model_name == "tiny-toy"
    toy.info = replace(toy.info, name="renamed")
    with background_server(toy, tmp_path / "named") as running:  # it does not know the old name
        client = connect(running)
        assert client.create_training_client_from_state(state).get_info().model_data.model_name == path
