"""`vllm` and `sglang` against stubs of their routes: unique names, load, probe, switch, drain, unload."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.deployers.stubs import LoraStub, StubServer

from evsys_sdk import registry
from evsys_sdk.config.base import DeploySpec
from evsys_sdk.errors import EvsysError
from evsys_sdk.experiment.deployment import build_deployer, deploy_artifact, find_shipped_run, make_artifact

pytest.importorskip("torch", reason="the local backend needs torch")
KINDS = ["vllm", "sglang"]


@pytest.fixture(scope="module")
def artifact(tiny_trained):
    return make_artifact(tiny_trained.record, find_shipped_run(tiny_trained.record, tiny_trained.path))


@pytest.fixture
def world(request, artifact, tmp_path):
    """A server, and how to deploy to it."""
    with LoraStub(artifact.fingerprint, kind=request.param).running() as stub:
        params = {"url": stub.url, "path": str(tmp_path / "adapters"), "alias_file": str(tmp_path / "alias.json"),
                  "drain_seconds": 0.0}  # fmt: skip
        yield stub, DeploySpec(kind=request.param, params=params), tmp_path


def ship(artifact, spec, place):
    return deploy_artifact(artifact, build_deployer(spec), spec, place / "x.experiment_result.json")


@pytest.mark.parametrize("world", KINDS, indirect=True)
def test_an_adapter_is_loaded_probed_switched_and_the_old_one_unloaded(artifact, world):
    stub, spec, place = world
    first = ship(artifact, spec, place)
    assert first.state == "deployed" and stub.loaded == {artifact.name: str(place / "adapters" / artifact.name)}
    assert (Path(stub.loaded[artifact.name]) / "adapter_model.safetensors").is_file()
    alias = json.loads((place / "alias.json").read_text())
    named = {"model": artifact.name} | ({"lora_path": artifact.name} if stub.kind == "sglang" else {})
    assert alias["request"] == named and alias["digest"] == artifact.digest
    assert ship(artifact, spec, place).state == "unchanged"
    other = replace(artifact, name="say-yes-other", digest="0" * 64)
    second = ship(other, spec, place)
    assert second.replaced == artifact.name and list(stub.loaded) == ["say-yes-other"]
    paths = [path.rpartition("/")[2] for _, path, _ in stub.requests]
    switched = len(paths) - 1 - paths[::-1].index("load_lora_adapter")
    assert "unload_lora_adapter" not in paths[:switched], "the old adapter stays until the new one was probed"


@pytest.mark.parametrize("world", KINDS, indirect=True)
def test_a_server_that_answers_with_the_base_model_is_rolled_back(artifact, world):
    stub, spec, place = world
    stub.ignores_adapters = True
    done = ship(artifact, spec, place)
    assert done.state == "rolled back" and done.probe.difference == pytest.approx(1.0)
    assert stub.loaded == {} and not (place / "alias.json").exists()


@pytest.mark.parametrize("world", KINDS, indirect=True)
def test_a_server_with_another_base_model_is_refused_before_anything_is_loaded(artifact, world):
    stub, spec, place = world
    stub.base = "Qwen/Qwen3-8B"
    with pytest.raises(EvsysError, match="serves the base model Qwen/Qwen3-8B, and the adapter was trained over tiny"):
        ship(artifact, spec, place)
    assert not any(path.endswith("load_lora_adapter") for _, path, _ in stub.requests)
    renamed = DeploySpec(kind=spec.kind, params={**spec.params, "base_model": "Qwen/Qwen3-8B"})
    assert ship(artifact, renamed, place).state == "deployed", "the same model under another name"


@pytest.mark.parametrize("world", KINDS, indirect=True)
def test_a_server_that_was_started_again_gets_the_adapter_again(artifact, world):
    stub, spec, place = world
    ship(artifact, spec, place)
    stub.loaded.clear()
    again = ship(artifact, spec, place)
    assert again.state == "deployed" and again.replaced is None and list(stub.loaded) == [artifact.name]


@pytest.mark.parametrize("world", KINDS, indirect=True)
def test_a_server_without_the_routes_is_told_how_to_start(artifact, world):
    stub, spec, place = world
    stub.takes_adapters = False
    with pytest.raises(
        EvsysError, match=r"404: Not Found\. Adapters need a server that was started with .*--enable-lora"
    ):
        ship(artifact, spec, place)


def test_an_adapter_that_sglang_says_it_did_not_load_is_an_error(artifact, tmp_path):
    def answer(method, path, body):
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny-random", "parent": None}]}
        return 200, {"success": False, "error_message": "rank 4 is above --max-lora-rank"}

    with StubServer(answer).running() as stub:
        params = {"url": stub.url, "path": str(tmp_path / "a"), "alias_file": str(tmp_path / "alias.json")}
        with pytest.raises(EvsysError, match=r"did not load .*rank 4 is above"):
            ship(artifact, DeploySpec(kind="sglang", params=params), tmp_path)


def test_sglang_names_the_adapter_in_every_request(artifact, tmp_path):
    with LoraStub(artifact.fingerprint, kind="sglang").running() as stub:
        params = {"url": stub.url, "path": str(tmp_path / "a"), "alias_file": str(tmp_path / "alias.json")}
        ship(artifact, DeploySpec(kind="sglang", params=params), tmp_path)
        asked = [body for _, path, body in stub.requests if path == "/generate"]
    assert len(asked) == 4 and all(body["lora_path"] == artifact.name for body in asked)


def test_their_params_are_described():
    for kind in KINDS:
        found = registry.deployers.schema(kind)["properties"]
        assert found["url"]["description"] and found["drain_seconds"]["default"] == 30.0
