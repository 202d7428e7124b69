"""`tinker`: a checkpoint of our own Tinker server is kept, probed and published through the real client."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.unit.deployers.conftest import train

from evsys_sdk.config.base import DeploySpec
from evsys_sdk.errors import EvsysError
from evsys_sdk.experiment.deployment import build_deployer, deploy_artifact, find_shipped_run, make_artifact

pytest.importorskip("torch", reason="the server needs torch")
tinker = pytest.importorskip("tinker", reason="needs the extra tinker")


@pytest.fixture(scope="module")
def artifact(tinker_server, tmp_path_factory):
    backend = {"kind": "tinker", "params": {"base_url": tinker_server.url}}
    trained = train(tmp_path_factory.mktemp("remote"), backend, steps=4)
    return make_artifact(trained.record, find_shipped_run(trained.record, trained.path, "r0"))


@pytest.fixture
def rest(tinker_server):
    return tinker.RestClient(base_url=tinker_server.url, api_key="tml-local")


def ship(artifact, server, place, **params):
    given = {"base_url": server.url, "path": str(place / "deployed"), **params}
    spec = DeploySpec(kind="tinker", params=given)
    return deploy_artifact(artifact, build_deployer(spec), spec, place / "x.experiment_result.json")


def listed(rest, path):
    found = rest.list_user_checkpoints().result().checkpoints
    return next(one for one in found if one.tinker_path == path)


def test_a_checkpoint_is_kept_probed_named_and_published_only_where_asked(artifact, tinker_server, rest, tmp_path):
    path = artifact.checkpoint
    rest.set_checkpoint_ttl_from_tinker_path(path, 86400).result()
    done = ship(artifact, tinker_server, tmp_path)
    assert done.state == "deployed" and done.endpoint == path and done.probe.compared == "logprobs"
    assert done.probe.difference < 1e-3
    there = listed(rest, path)
    assert there.expires_at is None and not there.public, "kept for good, and private"
    current = tmp_path / "deployed" / "current"
    assert json.loads((current / "deployment.json").read_text())["endpoint"] == path
    card = (current / "README.md").read_text()
    assert f'create_sampling_client(model_path="{path}")' in card and "## Scores" in card
    assert ship(artifact, tinker_server, tmp_path).state == "unchanged"
    assert ship(artifact, tinker_server, tmp_path, public=True).state == "deployed" and listed(rest, path).public
    assert ship(artifact, tinker_server, tmp_path, public=True).state == "unchanged"
    assert ship(artifact, tinker_server, tmp_path).state == "deployed" and not listed(rest, path).public


def test_what_was_replaced_is_unpublished_where_it_is_not_kept(artifact, tinker_server, rest, tmp_path):
    ship(artifact, tinker_server, tmp_path, public=True)
    other = replace(artifact, name="say-yes-other", digest="0" * 64)
    done = ship(other, tinker_server, tmp_path, public=True, keep_replaced=False)
    assert done.replaced == artifact.name and not (tmp_path / "deployed" / artifact.name).exists()
    rest.unpublish_checkpoint_from_tinker_path(artifact.checkpoint).result()


def test_a_failed_probe_publishes_nothing(artifact, tinker_server, rest, tmp_path):
    case = artifact.fingerprint.cases[0]
    wrong = replace(case, logprobs=tuple(value - 1.0 for value in case.logprobs))
    other = replace(artifact, fingerprint=replace(artifact.fingerprint, cases=(wrong,)))
    done = ship(other, tinker_server, tmp_path, public=True)
    assert done.state == "rolled back" and not listed(rest, artifact.checkpoint).public
    assert not (tmp_path / "deployed" / "current").exists()


def test_a_checkpoint_that_is_gone_and_weights_from_elsewhere_are_refused(artifact, tinker_server, tmp_path):
    gone = replace(artifact, checkpoint=f"{artifact.checkpoint}-gone")
    with pytest.raises(EvsysError, match="is not there: it expired or was deleted; train again"):
        ship(gone, tinker_server, tmp_path)
    local = replace(artifact, checkpoint="/runs/r0/final", backend="local")
    with pytest.raises(EvsysError, match=r"live on the backend 'local'.*use --to folder, hf_hub or serve"):
        ship(local, tinker_server, tmp_path)
