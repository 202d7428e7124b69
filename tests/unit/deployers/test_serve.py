"""`serve`: a running endpoint takes new weights by its admin routes; requests under way end on the old ones."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import requests

from evsys_sdk.config.base import DeploySpec
from evsys_sdk.errors import EvsysError
from evsys_sdk.experiment.deployment import deploy_arm, digest_weights, find_shipped_run
from evsys_sdk.record.deployments import read_deployments
from evsys_sdk.run.open_model import open_model
from evsys_sdk.serving import Endpoint, ModelAdmin, ServedModel, StoredModel, in_background

pytest.importorskip("uvicorn", reason="the endpoint needs uvicorn")
ADMIN = "admin-key-for-tests-only"
SECONDS = 120


class HeldSampler:
    """Answers a chat only after it was let go; in `began` it says that a request is inside."""

    def __init__(self, sampler):
        self.sampler, self.began, self.go_on = sampler, threading.Event(), threading.Event()

    async def sample(self, *arguments, **options):
        self.began.set()
        await asyncio.to_thread(self.go_on.wait, SECONDS)
        return await self.sampler.sample(*arguments, **options)


class WatchedAliases(dict):
    """Aliases that say when one of them moves."""

    def __init__(self, aliases, moved):
        super().__init__(aliases)
        self.moved = moved

    def __setitem__(self, alias, name):
        super().__setitem__(alias, name)
        self.moved.set()


@contextmanager
def serving(trained, monkeypatch, *, base_model=None, wrap=lambda sampler: sampler):
    """An endpoint over the experiment's base model, untrained under the alias `policy`."""
    monkeypatch.setenv("EVSYS_ADMIN_KEY", ADMIN)
    weights = replace(find_shipped_run(trained.record, trained.path, "r0").target, checkpoint=None)
    with open_model(weights) as opened:

        async def load(checkpoint):
            return ServedModel(
                sampler=await opened.service.create_sampling_client(checkpoint),
                renderer=opened.renderer(),
                digest=digest_weights(replace(weights, checkpoint=checkpoint)),
            )

        first = asyncio.run(load(None))
        first.sampler = wrap(first.sampler)
        admin = ModelAdmin(
            key=ADMIN, base_model=base_model or weights.model, load=load, state_file=trained.folder / "served.json",
            first=StoredModel(name="first", path=None, digest=first.digest),
        )  # fmt: skip
        with in_background(Endpoint({"first": first}, aliases={"policy": "first"}, admin=admin)) as found:
            yield found


def spec(found, **params):
    return DeploySpec(kind="serve", params={"url": found.url, **params})


def chat(found, model="policy"):
    body = {"model": model, "messages": [{"role": "user", "content": "?"}], "max_tokens": 2, "temperature": 0}
    return requests.post(f"{found.url}/v1/chat/completions", json=body, timeout=SECONDS).json()


def test_a_deployment_switches_the_alias_live_and_replies_name_the_digest(mock_trained, monkeypatch):
    with serving(mock_trained, monkeypatch) as found:
        before = chat(found)["system_fingerprint"]
        done = deploy_arm(mock_trained.record, mock_trained.path, spec(found), arm="r0")
        assert done.state == "deployed" and done.replaced == "first" and done.probe.compared == "logprobs"
        assert done.probe.difference < 1e-6
        assert chat(found)["system_fingerprint"] == done.digest != before
        assert list(found.endpoint.models) == [done.name], "what was replaced is unloaded"
        again = deploy_arm(mock_trained.record, mock_trained.path, spec(found), arm="r0")
        assert again.state == "unchanged"
        cards = requests.get(f"{found.url}/v1/models", timeout=SECONDS).json()["data"]
        assert cards[0]["id"] == "policy" and cards[0]["root"] == done.name and cards[0]["digest"] == done.digest


def test_a_request_under_way_ends_on_the_weights_it_began_on(mock_trained, monkeypatch):
    held = []

    def wrap(sampler):
        held.append(HeldSampler(sampler))
        return held[0]

    with serving(mock_trained, monkeypatch, wrap=wrap) as found, ThreadPoolExecutor(2) as pool:
        old, moved = found.endpoint.models["first"].digest, threading.Event()
        found.endpoint.aliases = WatchedAliases(found.endpoint.aliases, moved)
        answer = pool.submit(chat, found)
        assert held[0].began.wait(SECONDS)
        deploying = pool.submit(deploy_arm, mock_trained.record, mock_trained.path, spec(found), arm="r0")
        assert moved.wait(SECONDS), "the alias moves while the old request is still inside"
        assert not answer.done()
        held[0].go_on.set()
        assert answer.result(SECONDS)["system_fingerprint"] == old
        assert deploying.result(SECONDS).state == "deployed"


def test_weights_of_another_base_model_are_refused(mock_trained, monkeypatch):
    with serving(mock_trained, monkeypatch, base_model="another-base") as found:
        with pytest.raises(EvsysError, match="has the base model 'another-base', and the weights were trained over"):
            deploy_arm(mock_trained.record, mock_trained.path, spec(found), arm="r0")
        assert found.endpoint.aliases == {"policy": "first"}
    assert read_deployments(mock_trained.path)[-1].state == "failed"


def test_a_server_that_answers_with_other_weights_is_rolled_back(mock_trained, monkeypatch):
    with serving(mock_trained, monkeypatch) as found:
        load = found.endpoint.admin.load

        async def load_base_instead(path):
            """What a server does that ignores the adapter: the right digest over the wrong numbers."""
            wrong, right = await load(None), await load(path)
            wrong.digest = right.digest
            return wrong

        found.endpoint.admin.load = load_base_instead
        done = deploy_arm(mock_trained.record, mock_trained.path, spec(found, tolerance=1e-4), arm="r0")
        assert done.state == "rolled back" and done.probe.ok is False
        assert found.endpoint.aliases == {"policy": "first"} and list(found.endpoint.models) == ["first"]


def test_admin_routes_have_a_key_of_their_own(mock_trained, monkeypatch):
    with serving(mock_trained, monkeypatch) as found:
        ask = requests.get(f"{found.url}/admin/models", timeout=SECONDS)
        assert ask.status_code == 401 and "admin key" in ask.json()["error"]["message"]
        monkeypatch.setenv("EVSYS_ADMIN_KEY", "wrong-wrong-wrong")
        with pytest.raises(EvsysError, match="401"):
            deploy_arm(mock_trained.record, mock_trained.path, spec(found), arm="r0")
        headers = {"Authorization": f"Bearer {ADMIN}"}
        url = f"{found.url}/admin/models"
        bad = requests.post(url, json={"name": "x"}, headers=headers, timeout=SECONDS)
        assert bad.status_code == 400 and bad.json()["error"]["param"] == "path"
        used = requests.delete(f"{url}/first", headers=headers, timeout=SECONDS)
        assert used.status_code == 409 and "answers as policy" in used.json()["error"]["message"]
        wrong = {"name": "x", "path": "/nowhere", "base_model": "tiny-random", "digest": "0"}
        assert requests.post(url, json=wrong, headers=headers, timeout=SECONDS).status_code in (400, 409)


def test_a_dead_server_and_a_missing_key_say_what_to_do(mock_trained, monkeypatch):
    gone = DeploySpec(kind="serve", params={"url": "http://127.0.0.1:9"})
    monkeypatch.delenv("EVSYS_ADMIN_KEY", raising=False)
    with pytest.raises(EvsysError, match="environment variable EVSYS_ADMIN_KEY is not set"):
        deploy_arm(mock_trained.record, mock_trained.path, gone, arm="r0")
    monkeypatch.setenv("EVSYS_ADMIN_KEY", ADMIN)
    with pytest.raises(EvsysError, match=r"no answer .*Is the server running"):
        deploy_arm(mock_trained.record, mock_trained.path, gone, arm="r0")
    assert [one.state for one in read_deployments(mock_trained.path)] == ["failed", "failed"]
