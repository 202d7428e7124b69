"""The real client and server over the real engine with a tiny model: the wire says what the engine says."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from evsys_engine.engine import Engine
from evsys_engine.server import background_server
from evsys_engine.types import AdamParams, LoraSettings, SampleRequest, TrainingDatum

tinker = pytest.importorskip("tinker")
types = tinker.types

ADAM = types.AdamParams(learning_rate=0.01)
PROMPT = [10, 20, 30, 40, 50]


@pytest.fixture(scope="module")
def engine(model_dirs):
    return Engine.load(model_dirs["llama"], device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    with background_server(engine, tmp_path_factory.mktemp("checkpoints")) as running:
        yield running


@pytest.fixture
def training(client, engine):
    return client.create_lora_training_client(base_model=str(engine.info.path), rank=4, seed=3, train_unembed=False)


def datum(tokens=PROMPT, **inputs):
    inputs = inputs or {"weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **inputs},
    )


def logprobs_of(training, tokens=PROMPT):
    output = training.forward([datum(tokens)], "cross_entropy").result()
    return output.loss_fn_outputs[0]["logprobs"].to_numpy()


def step(training, data=None, loss_fn="cross_entropy", config=None):
    done = training.forward_backward(data or [datum()], loss_fn, config)
    moved = training.optim_step(ADAM)
    return done.result().metrics["loss:sum"], moved.result().metrics["grad_norm"]


def test_training_over_the_wire_is_training_in_the_process(training, engine):
    local = engine.create_adapter(LoraSettings(rank=4, seed=3))
    inputs = {
        "target_tokens": np.array(PROMPT[1:]),
        "weights": np.array([1.0, -0.5, 0.0, 2.0], dtype=np.float32),
    }
    for _ in range(3):
        there = step(training, [datum(weights=[1.0, -0.5, 0.0, 2.0])])
        here = local.forward_backward([TrainingDatum(tokens=PROMPT[:-1], inputs=inputs)], "cross_entropy")
        norm = local.optim_step(AdamParams(learning_rate=0.01, eps=1e-12))["grad_norm"]
        assert there == (pytest.approx(here.metrics["loss:sum"]), pytest.approx(norm))
    inputs["weights"] = np.ones(4, dtype=np.float32)
    told = local.forward([TrainingDatum(tokens=PROMPT[:-1], inputs=inputs)], "cross_entropy").logprobs[0]
    np.testing.assert_array_equal(logprobs_of(training), told)


def test_target_tokens_alone_are_a_cross_entropy_with_weights_of_one(training):
    alone = types.Datum(
        model_input=types.ModelInput.from_ints(PROMPT[:-1]), loss_fn_inputs={"target_tokens": PROMPT[1:]}
    )
    losses = [training.forward([one], "cross_entropy").result().metrics["loss:sum"] for one in (alone, datum())]
    assert losses[0] == losses[1] > 0


def test_supervised_training_lowers_the_loss(training):
    losses = [step(training)[0] for _ in range(10)]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("loss_fn", "config"),
    [("importance_sampling", None), ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}), ("cispo", None)],
)
def test_policy_losses_follow_the_advantages(training, loss_fn, config):
    old = logprobs_of(training)
    for _ in range(3):
        step(training, [datum(logprobs=old.tolist(), advantages=[1.0, 1.0, -1.0, 1.0])], loss_fn, config)
    new = logprobs_of(training)
    assert new[0] > old[0] and new[2] < old[2]


def test_a_custom_loss_moves_the_weights_as_its_gradient_says(training):
    def only_the_second(data, logprobs):
        return -2.0 * logprobs[0][1], {}

    before = logprobs_of(training)
    output = training.forward_backward_custom([datum()], only_the_second).result()
    training.optim_step(ADAM).result()
    assert output.metrics["loss:sum"] == pytest.approx(-2.0 * before[1], rel=1e-4)
    assert logprobs_of(training)[1] > before[1]


def test_samples_and_prompt_logprobs_are_the_samplers_own(client, engine):
    sampler = client.create_sampling_client(base_model=str(engine.info.path))
    params = types.SamplingParams(max_tokens=6, seed=5, temperature=0.7, top_k=50)
    there = sampler.sample(
        types.ModelInput.from_ints(PROMPT), 3, params, include_prompt_logprobs=True, topk_prompt_logprobs=4
    ).result()
    asked = SampleRequest(
        tokens=PROMPT, num_samples=3, max_tokens=6, seed=5, temperature=0.7, top_k=50,
        prompt_logprobs=True, topk_prompt_logprobs=4,
    )  # fmt: skip
    here = engine.load_sampler(None).sample([asked])[0]
    assert [row.tokens for row in there.sequences] == [row.tokens for row in here.sequences]
    for row, own in zip(there.sequences, here.sequences, strict=True):
        assert row.logprobs == pytest.approx(own.logprobs, abs=1e-4)
    assert there.prompt_logprobs[0] is None
    assert there.prompt_logprobs[1:] == pytest.approx(here.prompt_logprobs[1:], abs=1e-4)
    assert [[token for token, _ in row] for row in there.topk_prompt_logprobs[1:]] == [
        [token for token, _ in row] for row in here.topk_prompt_logprobs[1:]
    ]


def test_a_sampler_says_what_the_trained_weights_say(training):
    for _ in range(3):
        step(training)
    trained = logprobs_of(training)
    sampler = training.save_weights_and_get_sampling_client()
    told = sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result()
    assert told[1:] == pytest.approx(trained.tolist(), abs=1e-4)
    step(training)
    assert sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result() == told


def test_a_stop_string_stays_and_an_empty_list_stops_nothing(client, engine):
    sampler = client.create_sampling_client(base_model=str(engine.info.path))

    def draw(**options):
        params = types.SamplingParams(max_tokens=30, seed=1, temperature=1.5, **options)
        return sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params).result().sequences[0]

    free = draw(stop=[])
    assert (len(free.tokens), free.stop_reason) == (30, "length")
    piece = engine.tokenizer.decode(free.tokens[4:6])
    stopped = draw(stop=[piece])
    assert stopped.stop_reason == "stop" and len(stopped.tokens) <= 6
    assert engine.tokenizer.decode(stopped.tokens).endswith(piece)
    by_id = draw(stop=[free.tokens[4]])
    assert by_id.tokens[-1] == free.tokens[4] and by_id.stop_reason == "stop"


def test_many_requests_at_once_come_back_each_with_its_own(client, engine):
    sampler = client.create_sampling_client(base_model=str(engine.info.path))
    prompts = [[5 + n, 6 + n, 7 + n] for n in range(24)]
    params = types.SamplingParams(max_tokens=5, temperature=0)
    waiting = [sampler.sample(types.ModelInput.from_ints(prompt), 1, params) for prompt in prompts]
    own = engine.load_sampler(None)
    for prompt, future in zip(prompts, waiting, strict=True):
        alone = own.sample([SampleRequest(tokens=prompt, max_tokens=5, temperature=0)])[0].sequences[0]
        assert future.result().sequences[0].tokens == alone.tokens


def test_training_resumes_from_a_state_exactly(client, training):
    for _ in range(2):
        step(training)
    path = training.save_state("two").result().path
    resumed = client.create_training_client_from_state_with_optimizer(path)
    np.testing.assert_array_equal(logprobs_of(resumed), logprobs_of(training))
    assert step(resumed) == step(training)
    np.testing.assert_array_equal(logprobs_of(resumed), logprobs_of(training))
    fresh = client.create_training_client_from_state(path)
    step(fresh)
    assert not np.array_equal(logprobs_of(fresh), logprobs_of(training))


def test_all_weights_can_be_trained_and_gone_on_with(client, engine):
    training = client.create_lora_training_client(base_model=str(engine.info.path), rank=0)
    before = logprobs_of(training)
    step(training)
    assert logprobs_of(training).sum() > before.sum()
    path = training.save_state("full").result().path
    resumed = client.create_training_client_from_state_with_optimizer(path)
    np.testing.assert_array_equal(logprobs_of(resumed), logprobs_of(training))
    sampler = training.save_weights_and_get_sampling_client()
    told = sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result()
    assert told[1:] == pytest.approx(logprobs_of(training).tolist(), abs=1e-4)


def test_the_tokenizer_is_the_models_own(client, training, engine, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = "hello, world"
    expected = engine.tokenizer.encode(text)
    assert training.get_tokenizer().encode(text) == expected
    sampler = client.create_sampling_client(base_model=str(engine.info.path))
    assert sampler.get_tokenizer().encode(text) == expected


BAD_BATCHES = {
    "unknown loss": ([datum()], "no_such_loss"),
    "token out of range": ([datum([10, 99_999, 30])], "cross_entropy"),
    "negative token": ([datum([10, -1, 30])], "cross_entropy"),
    "target out of range": ([datum([10, 20, 99_999])], "cross_entropy"),
    "too long": ([datum([10] * 1000)], "cross_entropy"),
    "weights too short": ([datum(weights=[1.0])], "cross_entropy"),
    "no weights": ([datum(advantages=[1.0] * 4)], "cross_entropy"),
    "not a number": ([datum(weights=[1.0, float("nan"), 1.0, 1.0])], "cross_entropy"),
    "no advantages": ([datum(logprobs=[0.0] * 4)], "importance_sampling"),
    "good ones before a bad one": ([datum()] * 5 + [datum([10, 99_999, 30])], "cross_entropy"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_bad_batch_is_the_callers_error_and_leaves_weights_and_gradients_alone(training, name):
    step(training)
    before = logprobs_of(training)
    with pytest.raises(tinker.RequestFailedError) as failed:
        training.forward_backward(*BAD_BATCHES[name]).result()
    assert failed.value.category == "user", failed.value
    np.testing.assert_array_equal(logprobs_of(training), before)
    assert training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"] == 0


def test_a_bad_prompt_is_the_callers_error(client, engine):
    sampler = client.create_sampling_client(base_model=str(engine.info.path))
    params = types.SamplingParams(max_tokens=2)
    for prompt in ([99_999], [-1], []):
        with pytest.raises((tinker.RequestFailedError, tinker.BadRequestError)) as failed:
            sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result()
        assert getattr(failed.value, "category", "user") == "user"
    with pytest.raises(tinker.BadRequestError, match="the model takes"):
        sampler.sample(types.ModelInput.from_ints([1] * 5000), 1, params).result()


def test_a_checkpoint_of_another_model_is_refused(training, model_dirs, tmp_path, connect, server):
    path = training.save_weights_for_sampler("mine").result().path
    state = training.save_state("mine").result().path
    other = Engine.load(model_dirs["qwen3"], device="cpu", dtype="float32")
    shutil.copytree(server.service.checkpoints.folder, tmp_path / "copy")
    with background_server(other, tmp_path / "copy") as foreign:
        client = connect(foreign)
        with pytest.raises(tinker.BadRequestError, match="was trained on"):
            client.create_sampling_client(model_path=path)
        with pytest.raises(tinker.BadRequestError, match="was trained on"):
            client.create_training_client_from_state(state)


def test_peft_reads_a_sampler_checkpoint_from_its_folder(training, server, engine):
    peft = pytest.importorskip("peft")
    import torch
    from transformers import AutoModelForCausalLM

    for _ in range(2):
        step(training)
    path = training.save_weights_for_sampler("for-peft").result().path
    folder = server.service.checkpoints.folder / path.removeprefix("tinker://")
    base = AutoModelForCausalLM.from_pretrained(engine.info.path, dtype=torch.float32)
    logits = peft.PeftModel.from_pretrained(base, folder)(torch.tensor([PROMPT[:-1]])).logits[0]
    told = torch.log_softmax(logits, -1)[range(4), PROMPT[1:]].detach().numpy()
    np.testing.assert_allclose(told, logprobs_of(training), atol=1e-4)
