"""The capability card: of good backends, of servers that compute something else, of one that is not there."""

from __future__ import annotations

import json
import socket

import pytest

from evsys_sdk.backends.check import check_service
from evsys_sdk.cli.main import main
from evsys_sdk.config.schema import ModelConfig
from evsys_sdk.errors import BackendError, BackendUnavailable
from evsys_sdk.registry import backends


@pytest.fixture
def service(tmp_path):
    return backends.build("mock", {}).prepare(model=ModelConfig(name="m"), run_dir=tmp_path)["service"]


def _change(service, *, client=lambda client: client, sampler=lambda sampler, path: sampler):
    """A service whose clients have been tampered with."""
    create_client, create_sampler = service.create_training_client, service.create_sampling_client

    async def training(*, rank: int, seed: int):
        return client(await create_client(rank=rank, seed=seed))

    async def sampling(path=None):
        return sampler(await create_sampler(path), path)

    service.create_training_client, service.create_sampling_client = training, sampling
    return service


async def _wrong(service, **options):
    return {found.question: found for found in await check_service(service, **options) if not found.ok}


def test_the_card_of_the_mock_has_no_wrong_line(capsys):
    assert main(["backend", "check", "mock", "--json"]) == 0
    card = json.loads(capsys.readouterr().out)
    assert len(card["findings"]) == 11 and all(found["ok"] for found in card["findings"]) and card["lacks"] == []
    details = {found["question"]: found["detail"] for found in card["findings"]}
    assert details["resume with optimiser"] == "bit-equal" and details["sampling"] == "a seed repeats"


def test_a_backend_that_is_not_there_is_a_message(capsys):
    assert main(["backend", "check", "mokc"]) == 1
    assert "closest: mock" in capsys.readouterr().err


async def test_a_server_that_divides_its_gradients_is_caught(service):
    def dividing(client):
        real = client.forward_backward

        def forward_backward(data, loss_fn, config=None):
            if loss_fn != "cross_entropy" or sum(data[0].loss_fn_inputs["weights"].data) > 0:
                return real(data, loss_fn, config)
            real([_with_positive_weights(data[0])], loss_fn, config)  # what division by a sum below 0 comes to
            gradients, client._gradients = client._gradients, type(client._gradients)()
            answer = real(data, loss_fn, config)
            client._gradients = gradients
            return answer

        client.forward_backward = forward_backward
        return client

    wrong = await _wrong(_change(service, client=dividing))
    assert list(wrong) == ["are losses sums with signed weights"]
    assert "do not cancel out" in wrong["are losses sums with signed weights"].detail
    assert wrong["are losses sums with signed weights"].lacks == ("custom_loss",)


def _with_positive_weights(datum):
    from evsys_sdk.training_api import Datum, TensorData

    weights = [abs(weight) for weight in datum.loss_fn_inputs["weights"].data]
    return Datum(datum.model_input, {**datum.loss_fn_inputs, "weights": TensorData(weights)})


async def test_a_server_that_divides_its_losses_is_caught(service):
    def dividing(client):
        real = client.forward_backward

        def forward_backward(data, loss_fn, config=None):
            answer = real(data, loss_fn, config)
            if loss_fn == "cross_entropy":
                answer._value.metrics["loss:sum"] /= sum(sum(d.loss_fn_inputs["weights"].data) for d in data)
            return answer

        client.forward_backward = forward_backward
        return client

    wrong = await _wrong(_change(service, client=dividing))
    assert list(wrong) == ["are losses sums with signed weights"]
    assert "no sum with signed weights" in wrong["are losses sums with signed weights"].detail


async def test_a_sampler_that_follows_training_is_caught(service):
    clients = []

    def remember(client):
        clients.append(client)
        return client

    def live(sampler, path):
        sampler._model = clients[0]._model if path else sampler._model
        return sampler

    assert list(await _wrong(_change(service, client=remember, sampler=live))) == ["is a sampler a snapshot"]


async def test_sampling_that_overwrites_the_weights_in_training_is_caught(service):
    clients = []

    def remember(client):
        clients.append(client)
        return client

    def overwriting(sampler, path):
        if path:
            clients[0]._model = sampler._model
        return sampler

    wrong = await _wrong(_change(service, client=remember, sampler=overwriting))
    assert "overwrote those in training" in wrong["does sampling leave training alone"].detail


async def test_logprobs_without_the_leading_none_are_caught(service):
    def shortened(sampler, path):
        real = sampler.compute_logprobs

        async def compute_logprobs(prompt):
            return (await real(prompt))[1:]

        sampler.compute_logprobs = compute_logprobs
        return sampler

    wrong = await _wrong(_change(service, sampler=shortened))
    assert list(wrong) == ["prompt logprobs"] and wrong["prompt logprobs"].lacks == ("prompt_logprobs",)
    assert "leaves out the leading None" in wrong["prompt logprobs"].detail


async def test_weights_that_are_gone_after_a_restart_are_caught(service, tmp_path):
    wrong = await _wrong(service, sampler_path=str(tmp_path / "gone.sampler.npz"))
    assert list(wrong) == ["do saved weights survive a restart"]
    assert "gone after a restart" in wrong["do saved weights survive a restart"].detail


async def test_a_loss_that_is_promised_and_not_there_is_named_alone(service):
    def without_dro(client):
        real = client.forward_backward

        def forward_backward(data, loss_fn, config=None):
            if loss_fn == "dro":
                raise BackendError("dro is not offered")
            return real(data, loss_fn, config)

        client.forward_backward = forward_backward
        return client

    found = (await _wrong(_change(service, client=without_dro)))["which losses"]
    assert found.lacks == ("dro",) and "ppo" in found.detail and "not dro: dro is not offered" in found.detail


async def test_a_server_that_goes_away_ends_the_check(service):
    def gone(client):
        raise BackendUnavailable("the server has failed for 300 s")

    with pytest.raises(BackendUnavailable):
        await check_service(_change(service, client=gone))


def test_the_card_of_a_server(tinker_server, capsys):
    assert main(["backend", "check", "tinker", "--base-url", tinker_server.url, "--model", "tiny-random"]) == 0
    out = capsys.readouterr().out
    assert out.count("ok   ") == 11 and "WRONG" not in out and "bit-equal" in out
    path = out.split("--sampler-path ")[1].split()[0]
    options = ["--base-url", tinker_server.url, "--sampler-path", path, "--json"]
    assert main(["backend", "check", "tinker", *options]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][-1]["detail"] == f"{path} can be sampled"


def test_a_server_that_cannot_be_used_is_a_message_and_exit_code_1(tinker_server, capsys, monkeypatch):
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{listener.getsockname()[1]}"
        check = ["backend", "check", "tinker", "--base-url"]
        assert main([*check, nobody, "--set", "timeout_seconds=0.3"]) == 1
        assert f"{nobody} does not answer" in capsys.readouterr().err
    assert main([*check, tinker_server.url, "--model", "gpt-9"]) == 1
    assert "'gpt-9' is not a model of this server" in capsys.readouterr().err
    assert main([*check, "http://192.0.2.1:1"]) == 1
    assert "set TINKER_API_KEY" in capsys.readouterr().err
    assert main(["backend", "check", "mock", "--base-url", tinker_server.url]) == 1
    assert "base_url" in capsys.readouterr().err
