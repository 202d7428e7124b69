"""The tinker backend against our own server: connecting, what it can do, and the same learning as `local`."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading

import pytest

pytest.importorskip("torch", reason="needs the extra local")
pytest.importorskip("tinker", reason="needs the extra tinker")

from evsys_engine.server import background_server
from evsys_engine.server.run import ServerAddress
from evsys_sdk.backends import tinker_clients
from evsys_sdk.backends.tinker import HOSTED_TINKER, TinkerBackend, api_key, capabilities_of, default_address
from evsys_sdk.backends.tinker_watch import Watch, as_our_error, pause_seconds
from evsys_sdk.config.schema import ModelConfig
from evsys_sdk.errors import BackendError, BackendUnavailable, EvsysAuthError
from evsys_sdk.registry import backends
from evsys_sdk.training_api import AdamParams, Datum, ModelInput, TensorData

TINY = ModelConfig(name="tiny-random")


@pytest.fixture
def prepare(tmp_path):
    opened = []

    def make(model=TINY, kind="tinker", **params):
        backend = backends.build(kind, params)
        handles = backend.prepare(model=model, run_dir=tmp_path)
        opened.append((backend, handles))
        return handles["service"]

    yield make
    for backend, handles in opened:
        backend.teardown(handles)


@pytest.fixture
def closed_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield listener.getsockname()[1]


async def _trained(service):
    tokens = service.get_tokenizer().encode("the sky is blue")
    inputs = {"target_tokens": TensorData(tokens[1:], "int64"), "weights": TensorData([1.0] * (len(tokens) - 1))}
    client, said = await service.create_training_client(rank=4, seed=3), []
    for _ in range(3):
        said.append(await client.forward_backward([Datum(ModelInput(tuple(tokens[:-1])), inputs)], "cross_entropy"))
        await client.optim_step(AdamParams(learning_rate=1e-2))
    return [output.logprobs for output in said]


async def test_the_same_seed_learns_the_same_here_and_on_the_local_backend(tinker_server, prepare):
    here = await _trained(prepare(kind="local", threads=1))
    there = await _trained(prepare(base_url=tinker_server.url))
    assert there == here


async def test_the_output_layer_is_adapted_when_asked(tinker_server, prepare):
    without = await _trained(prepare(base_url=tinker_server.url))
    adapted = await _trained(prepare(base_url=tinker_server.url, train_unembed=True))
    assert adapted[0] == without[0] and adapted[2] != without[2]


async def test_two_servers_at_once_and_an_untouched_environment(tinker_server, tiny_engine, tmp_path, prepare):
    before = dict(os.environ)
    with background_server(tiny_engine, tmp_path / "second") as second:
        services = [prepare(base_url=server.url) for server in (tinker_server, second)]
        for service in services:
            await service.create_training_client(rank=4, seed=0)
        loaded = [[len(s.models) for s in server.service.sessions.all()] for server in (tinker_server, second)]
        assert loaded[0][-1] == 1 and loaded[1] == [1]
        services[1].close()
    assert dict(os.environ) == before


def test_nobody_at_the_address_is_said_soon(closed_port, prepare):
    with pytest.raises(BackendUnavailable, match=r"does not answer \(.*refused.*evsys engine serve"):
        prepare(base_url=f"http://127.0.0.1:{closed_port}", timeout_seconds=0.5)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://", "tinker://x"])
def test_what_is_no_address_is_said(url, prepare, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    with pytest.raises(BackendError, match="is no address"):
        prepare(base_url=url)


@pytest.mark.parametrize("has_module", [True, False], ids=["tinker 0.36", "tinker 0.25"])
def test_either_version_of_the_client_is_reached_with_an_address_or_without(
    has_module, tinker_server, prepare, monkeypatch
):
    if not has_module:  # as in SkyRL's environment; the client itself has imported what it needs
        monkeypatch.setitem(sys.modules, "tinker.lib.base_url", None)
    prepare(base_url=tinker_server.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    monkeypatch.setenv("TINKER_BASE_URL", f"{tinker_server.url}/")
    prepare()
    assert default_address({}) == default_address({"TINKER_BASE_URL": ""}) == HOSTED_TINKER
    assert default_address({"TINKER_BASE_URL": "http://h/x/"}) == "http://h/x"


def test_an_unknown_model_is_answered_with_those_there_are(tinker_server, prepare):
    with pytest.raises(BackendError, match="'tiny-randon' is not a model of this server; closest: tiny-random"):
        prepare(ModelConfig(name="tiny-randon"), base_url=tinker_server.url)


def test_a_server_whose_model_cannot_be_used_is_left_without_a_heartbeat(
    tinker_server, prepare, tinker_holders, monkeypatch
):
    with pytest.raises(BackendError):
        prepare(ModelConfig(name="tiny-randon"), base_url=tinker_server.url)
    assert tinker_holders and all(holder._closed for holder in tinker_holders)

    def broken(tokenizer):
        raise ValueError("no chat template")

    before = len(tinker_holders)
    monkeypatch.setattr("evsys_sdk.backends.tinker.ChatTokenizer", broken)
    with pytest.raises(BackendError, match="no chat template"):
        prepare(base_url=tinker_server.url)
    assert len(tinker_holders) > before and all(holder._closed for holder in tinker_holders)


def test_a_server_that_lets_us_in_too_late_is_left_without_a_heartbeat(
    tinker_server, prepare, tinker_holders, monkeypatch
):
    from tinker import ServiceClient

    create, in_time = ServiceClient.create_sampling_client, threading.Event()

    def late(self, **kwargs):
        assert in_time.wait(300)
        return create(self, **kwargs)

    monkeypatch.setattr(ServiceClient, "create_sampling_client", late)
    with pytest.raises(BackendUnavailable, match="did not let us in within 2 s"):
        prepare(base_url=tinker_server.url, timeout_seconds=2)
    in_time.set()
    [connecting] = [thread for thread in threading.enumerate() if thread.name == "evsys-tinker-connect"]
    connecting.join(300)
    assert tinker_holders and all(holder._closed for holder in tinker_holders)


def test_a_service_that_broke_is_left_without_a_heartbeat(tinker_server, prepare, tinker_holders, monkeypatch):
    service = prepare(base_url=tinker_server.url)
    monkeypatch.setattr(type(service.watch), "is_well", property(lambda watch: False))
    service.close()
    assert len(tinker_holders) == 2 and all(holder._closed for holder in tinker_holders)


def test_the_key_comes_from_the_named_variable_and_a_wrong_one_is_said(tiny_engine, tmp_path, prepare, monkeypatch):
    with background_server(tiny_engine, tmp_path / "locked", ServerAddress(key="tml-secret")) as locked:
        with pytest.raises(EvsysAuthError, match="refuses the key"):
            prepare(base_url=locked.url)
        monkeypatch.setenv("MY_KEY", "tml-secret")
        prepare(base_url=locked.url, api_key_env="MY_KEY").close()


def test_a_key_is_needed_for_a_server_elsewhere():
    assert api_key("http://127.0.0.1:1", "K", {}) == api_key("http://[::1]:1", "K", {}) == "tml-local"
    assert api_key("http://localhost:1", "K", {"K": "tml-mine"}) == "tml-mine"
    for url in (None, "https://10.0.0.5:8000", "http://localhost.example.org", "http://example.org/?x=127.0.0.1"):
        with pytest.raises(EvsysAuthError, match="set K"):
            api_key(url, "K", {})


def test_our_own_server_tells_what_it_can_do(tinker_server, prepare):
    card = prepare(base_url=tinker_server.url).capabilities
    assert card.losses == {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro"}
    assert card.full_fine_tuning and card.custom_loss and card.topk_prompt_logprobs and card.resume
    assert not card.average_weights


def test_the_context_length_is_known_here_and_on_the_local_backend(tinker_server, prepare):
    there = prepare(base_url=tinker_server.url)
    assert there.context_length == prepare(kind="local").context_length == 2048


def test_of_other_servers_the_protocol_is_believed_less_what_the_config_says():
    card = capabilities_of(None, [])
    assert card.topk_prompt_logprobs and "dro" in card.losses and not card.full_fine_tuning
    poorer = capabilities_of(None, ["dro", "topk_prompt_logprobs", "custom_loss"])
    assert "dro" not in poorer.losses and "ppo" in poorer.losses
    assert not poorer.topk_prompt_logprobs and not poorer.custom_loss and poorer.prompt_logprobs
    assert not capabilities_of({"losses": ["cross_entropy"]}, []).resume, "what a server does not tell it has not"


async def test_all_weights_are_refused_where_only_adapters_are_trained(tinker_server, prepare):
    service = prepare(base_url=tinker_server.url, lacks=["full_fine_tuning"])
    with pytest.raises(BackendError, match="set lora_rank to 1 or more"):
        await service.create_training_client(rank=0, seed=0)
    assert not tinker_server.service.sessions.all()[-1].models


def test_a_lack_that_is_none_is_refused():
    with pytest.raises(Exception, match="topk_prompt_logprobs"):
        TinkerBackend(lacks=["topk"])


def test_pauses_grow_and_the_server_may_ask_for_longer_ones():
    pauses = [pause_seconds(tries, None) for tries in (1, 2, 3, 20)]
    assert pauses == [0.2, 0.4, 0.8, 10.0]
    assert pause_seconds(1, "3") == 3.0 and pause_seconds(1, "9999") == 60.0 and pause_seconds(1, "Wed, 21 Oct") == 0.2


def test_a_failure_that_is_long_past_does_not_count():
    now = [0.0]
    watch = Watch("server", 5.0, clock=lambda: now[0])
    watch.note("asample", 0.0, "status 503")
    now[0] = 60.0
    watch.note("asample", 59.0, "status 503")
    assert watch.worst is not None and watch.worst[1].since == 0.0, "still failing"
    now[0] = 200.0
    assert watch.worst is None
    watch.note("asample", 199.0, "status 503")
    assert watch.worst is not None and watch.worst[1].since == 199.0
    watch.note("asample", 200.0, None)
    watch.note("telemetry", 200.0, "status 503")
    assert watch.worst is None


def _refusal(status, body):
    import httpx
    import tinker

    response = httpx.Response(status, request=httpx.Request("POST", "http://server"))
    return tinker.APIStatusError("Error code: ...", response=response, body=body)


@pytest.mark.parametrize(
    ("failure", "kind", "said"),
    [
        (_refusal(503, None), BackendUnavailable, "does not answer"),
        (_refusal(429, {"detail": "slow down"}), BackendUnavailable, "does not answer: slow down"),
        (_refusal(404, {"detail": "no such session"}), BackendUnavailable, "as after a restart: no such session"),
        (_refusal(401, {"detail": "wrong key"}), EvsysAuthError, "refuses the key: wrong key"),
        (_refusal(422, {"detail": [{"msg": "Input should be 'ppo'", "loc": []}]}), BackendError, "should be 'ppo'"),
        (TimeoutError("late"), BackendUnavailable, "does not answer"),
        (ValueError("no tensor"), BackendError, "training failed: ValueError: no tensor"),
        (BackendError("ours"), BackendError, "ours"),
    ],
)
def test_a_failure_of_the_client_says_what_it_means_for_the_run(failure, kind, said):
    error = as_our_error(failure, "training", "http://server")
    assert type(error) is kind and said in str(error)


def test_a_failure_that_the_client_has_wrapped_is_unwrapped():
    wrapped = ValueError("Error retrieving result: ... with status 404 for self.request_id='1'")
    wrapped.__cause__ = _refusal(404, {"detail": "unknown session"})
    error = as_our_error(wrapped, "optim_step", "http://server")
    assert isinstance(error, BackendUnavailable) and str(error).endswith("as after a restart: unknown session")
    assert type(as_our_error(wrapped, "sampling", "http://server", names_a_path=True)) is BackendError


async def until(happened, seconds=120):
    async with asyncio.timeout(seconds):
        while not happened():
            await asyncio.sleep(0.005)


async def test_loading_a_state_leaves_no_idle_adapter_on_the_server(tinker_server, prepare, monkeypatch):
    monkeypatch.setattr(tinker_clients, "UNLOAD_SECONDS", 120)  # what is tested is that it comes, not how soon
    service = prepare(base_url=tinker_server.url)
    session = tinker_server.service.sessions.all()[-1]
    client = await service.create_training_client(rank=4, seed=3)
    [first] = session.models
    state = await client.save_state("kept")
    owed = client.save_state("also-kept")  # not awaited: the server must answer before it lets the adapter go
    await client.load_state(state)
    # The server answers an unload with a promise and keeps it on its own thread: the test waits, it does not peek.
    await until(lambda: len(session.models) == 1 and first not in session.models)
    await client.load_state(await owed)
    await until(lambda: len(session.models) == 1)
    assert await client.save_weights_for_sampler("after")


async def test_a_server_that_cannot_unload_does_not_stop_a_run(tinker_server, prepare, monkeypatch):
    async def refuse(body):
        raise RuntimeError("not here")

    service = prepare(base_url=tinker_server.url)
    client = await service.create_training_client(rank=4, seed=3)
    state = await client.save_state("kept")
    service.watch.timeout_seconds = 5  # only now: a busy machine may take longer than that to connect
    monkeypatch.setattr(tinker_clients, "UNLOAD_SECONDS", 0.5)
    monkeypatch.setattr(tinker_server.service, "unload_model", refuse)
    monkeypatch.setattr(tinker_server.service, "_unload", refuse)
    await client.load_state(state)
    assert service.watch.is_well and await client.save_state("after")
