from __future__ import annotations

import json

from evsys_sdk.backends.check import check_service
from evsys_sdk.cli.main import main
from evsys_sdk.config.models import ModelConfig
from evsys_sdk.registry import backends


def test_the_card_of_the_mock_has_no_wrong_line(capsys):
    assert main(["backend", "check", "mock", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert len(findings) == 9 and all(found["ok"] for found in findings)
    details = {found["question"]: found["detail"] for found in findings}
    assert details["resume with optimiser"] == "bit-equal" and details["sampling"] == "a seed repeats"


def test_a_backend_that_is_not_there_is_a_message(capsys):
    assert main(["backend", "check", "mokc"]) == 1
    assert "closest: mock" in capsys.readouterr().err


async def test_a_server_that_divides_its_losses_is_caught(tmp_path):
    """One of the verified deviations of another server: the loss divided by the weight sum."""
    service = backends.build("mock", {}).prepare(model=ModelConfig(name="m"), run_dir=tmp_path)["service"]
    create = service.create_training_client

    async def dividing(*, rank: int, seed: int):
        client = await create(rank=rank, seed=seed)
        real = client.forward_backward

        async def forward_backward(data, loss_fn, config=None):
            output = await real(data, loss_fn, config)
            weight = sum(
                abs(w) for d in data for w in d.loss_fn_inputs.get("weights", d.loss_fn_inputs["target_tokens"]).data
            )
            output.metrics["loss:sum"] /= weight
            return output

        client.forward_backward = forward_backward
        return client

    service.create_training_client = dividing
    wrong = [found.question for found in await check_service(service) if not found.ok]
    assert wrong == ["are losses sums with signed weights"]


async def test_a_sampler_that_follows_training_is_caught(tmp_path):
    service = backends.build("mock", {}).prepare(model=ModelConfig(name="m"), run_dir=tmp_path)["service"]
    clients = []
    create_training, create_sampling = service.create_training_client, service.create_sampling_client

    async def remembered(*, rank: int, seed: int):
        clients.append(await create_training(rank=rank, seed=seed))
        return clients[-1]

    async def live(path=None):
        sampler = await create_sampling(path)
        if path is not None:
            sampler._model = clients[-1]._model
        return sampler

    service.create_training_client, service.create_sampling_client = remembered, live
    wrong = [found.question for found in await check_service(service) if not found.ok]
    assert wrong == ["is a sampler a snapshot"]
