"""`hf_hub`: the real client uploads to a stand-in of the hub on loopback, and downloads again what it probes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.unit.deployers.hub_stub import HubStub

from evsys_sdk.config.base import DeploySpec
from evsys_sdk.errors import EvsysError
from evsys_sdk.experiment.deployment import build_deployer, deploy_artifact, find_shipped_run, make_artifact

pytest.importorskip("torch", reason="the local backend needs torch")
pytest.importorskip("huggingface_hub", reason="comes with the extra local")
TOKEN, REPO = "hf_token-for-tests-only", "me/say-yes"


@pytest.fixture(scope="module")
def artifact(tiny_trained):
    return make_artifact(tiny_trained.record, find_shipped_run(tiny_trained.record, tiny_trained.path))


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # The stand-in has the hub's LFS protocol; its storage service (Xet) has no protocol that is written down.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with HubStub(TOKEN).running() as stub:
        monkeypatch.setenv("HF_ENDPOINT", stub.url)
        yield stub


def ship(artifact, place, **params):
    spec = DeploySpec(kind="hf_hub", params={"repo": REPO, **params})
    return deploy_artifact(artifact, build_deployer(spec), spec, place / "x.experiment_result.json")


def test_files_and_card_are_uploaded_tagged_probed_and_then_on_main(artifact, hub, tmp_path):
    done = ship(artifact, tmp_path)
    assert done.state == "deployed" and done.probe.compared == "logprobs" and "downloaded again" in done.probe.detail
    assert done.endpoint == f"{hub.url}/{REPO}/tree/{artifact.name}" and done.alias == f"{REPO}@main"
    assert hub.private == {REPO: True}, "private unless asked otherwise"
    assert set(hub.tags[REPO]) == {artifact.name} and set(hub.branches[REPO]) == {"main"}, "no branch is left over"
    files = hub.files(REPO, "main")
    assert files == hub.files(REPO, artifact.name) and {"adapter_model.safetensors", "tokenizer.json"} <= set(files)
    card = files["README.md"].decode()
    assert f'from_pretrained(base, "{REPO}", revision="{artifact.name}")' in card and "## Scores" in card
    assert "base_model: " not in card, "tiny-random is no id of the hub"
    assert json.loads(files["deployment.json"])["digest"] == artifact.digest
    moved = [number for number, (_, path, _) in enumerate(hub.requests) if path.endswith("/commit/main")]
    probed = [number for number, (_, path, _) in enumerate(hub.requests) if "/resolve/" in path]
    assert len(moved) == 1 and min(probed) < moved[0], "main moves once, after the probe"
    assert TOKEN not in (tmp_path / "x.deployments.jsonl").read_text()
    assert ship(artifact, tmp_path).state == "unchanged"


def test_other_weights_get_a_tag_of_their_own_and_replace_the_files_on_main(artifact, hub, tmp_path):
    ship(artifact, tmp_path)
    first = hub.tags[REPO][artifact.name]
    other = replace(artifact, name="say-yes-other", digest="0" * 64)
    done = ship(other, tmp_path, form="merged")
    assert done.state == "deployed" and done.replaced == artifact.name
    assert hub.tags[REPO][artifact.name] == first, "a tag never moves"
    files = hub.files(REPO, "main")
    assert "model.safetensors" in files and "adapter_model.safetensors" not in files, "nothing of the old release stays"


def test_a_failed_probe_leaves_main_alone_and_takes_the_tag_away(artifact, hub, tmp_path):
    before = hub.commits
    case = artifact.fingerprint.cases[0]
    wrong = replace(case, logprobs=tuple(value - 1.0 for value in case.logprobs))
    other = replace(artifact, fingerprint=replace(artifact.fingerprint, cases=(wrong,)))
    done = ship(other, tmp_path)
    assert done.state == "rolled back" and done.probe.difference == pytest.approx(1.0, abs=0.01)
    assert hub.tags[REPO] == {} and set(hub.branches[REPO]) == {"main"} and before
    assert list(hub.files(REPO, "main")) == [".gitattributes"]


def test_a_tag_with_something_else_is_never_reused(artifact, hub, tmp_path):
    hub.add_repo(REPO, private=True)
    hub.tags[REPO][artifact.name] = hub.branches[REPO]["main"]
    with pytest.raises(EvsysError, match=r"has a tag .* that holds something else; delete it, or use another repo"):
        ship(artifact, tmp_path)


def test_an_interrupted_upload_is_repeated(artifact, hub, tmp_path):
    hub.fails_at = f"POST /api/models/{REPO}/tag/"
    with pytest.raises(EvsysError, match=r"403: the token in HF_TOKEN may not write to me/say-yes"):
        ship(artifact, tmp_path)
    assert hub.tags[REPO] == {}
    hub.fails_at = ""
    assert ship(artifact, tmp_path).state == "deployed" and set(hub.branches[REPO]) == {"main"}


def test_a_public_repository_is_refused_unless_it_is_meant(artifact, hub, tmp_path):
    hub.add_repo(REPO, private=False)
    with pytest.raises(EvsysError, match=r"me/say-yes is public; set deploy\.params\.private: false"):
        ship(artifact, tmp_path)
    assert hub.tags[REPO] == {}
    assert ship(artifact, tmp_path, private=False).state == "deployed"


def test_what_is_wrong_with_the_token_and_the_address_is_said(artifact, hub, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hf_wrong-wrong-wrong")
    with pytest.raises(EvsysError, match="401: the token in MY_TOKEN is not known there; make one with write access"):
        ship(artifact, tmp_path, token_env="MY_TOKEN")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(EvsysError, match="token_env: the environment variable HF_TOKEN is not set"):
        ship(artifact, tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(EvsysError, match=r"does not answer .*is the address right \(HF_ENDPOINT\)"):
        ship(artifact, tmp_path, endpoint="http://127.0.0.1:9")
    with pytest.raises(EvsysError, match="Repo id must"):
        ship(artifact, tmp_path, repo="me/say/yes")
