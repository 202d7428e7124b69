"""`folder`: real weights as files that other libraries load, with a card; the YAML block and the commands around it."""

from __future__ import annotations

import json

import pytest
from tests.unit.deployers.conftest import train

from evsys_sdk.cli.main import main
from evsys_sdk.config.base import DeploySpec
from evsys_sdk.deployers.folder import FolderDeployer
from evsys_sdk.errors import EvsysError
from evsys_sdk.experiment.deployment import deploy_arm, find_shipped_run, make_artifact

pytest.importorskip("torch", reason="the local backend needs torch")


@pytest.fixture(scope="module")
def artifact(tiny_trained):
    return make_artifact(tiny_trained.record, find_shipped_run(tiny_trained.record, tiny_trained.path))


@pytest.mark.parametrize(
    ("params", "files", "tolerance"),
    [
        ({"form": "peft"}, ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"], 1e-5),
        ({"form": "merged"}, ["config.json", "model.safetensors", "tokenizer.json"], 1e-5),
        ({"form": "gguf", "number_type": "f16"}, ["model.gguf"], 1e-2),
    ],
    ids=["peft", "merged", "gguf"],
)
def test_the_files_load_and_answer_like_the_scored_weights(artifact, tmp_path, params, files, tolerance):
    target = FolderDeployer(path=str(tmp_path / "out"), **params)
    made = target.deploy(artifact)
    assert target.current() is None, "not in use before the probe"
    found = target.probe(made, artifact)
    assert found.ok and found.compared == "logprobs" and found.difference < tolerance
    target.route(made)
    assert target.current() == made
    card = (tmp_path / "out" / "current" / "README.md").read_text()
    assert "## Scores" in card and "## How to load it" in card and artifact.digest in card
    assert set(files) <= {file.name for file in (tmp_path / "out" / artifact.name).iterdir()}
    with pytest.raises(EvsysError, match=r"is in use \(current\)"):
        target.retire(made.name)


def test_other_weights_under_the_name_are_found_by_the_probe(artifact, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    target = FolderDeployer(path=str(tmp_path))
    made = target.deploy(artifact)
    file = tmp_path / artifact.name / "adapter_model.safetensors"
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}  # the base model
    save_file(tensors, file, metadata={"format": "pt"})
    found = target.probe(made, artifact)
    assert found.ok is False and found.difference == pytest.approx(artifact.fingerprint.contrast, abs=1e-4)


def test_a_name_is_never_reused_for_something_else(artifact, tmp_path):
    (tmp_path / artifact.name).mkdir()
    with pytest.raises(EvsysError, match="exists and holds something else"):
        FolderDeployer(path=str(tmp_path)).deploy(artifact)
    assert list((tmp_path / artifact.name).iterdir()) == []


def test_the_yaml_ships_the_best_arm_and_the_record_shows_it(tmp_path, monkeypatch, capsys):
    out = tmp_path / "releases"
    block = {"kind": "folder", "params": {"path": str(out)}}
    trained = train(tmp_path / "project", {"kind": "local", "params": {"dtype": "float32"}}, deploy=block)
    name = (out / "current").readlink().name
    assert f"Deployment: Deployed {name} (arm r0, run r0) to folder" in trained.record.conclusion
    assert "Deployment: " not in (out / "current" / "README.md").read_text()
    page = trained.path.with_name(trained.path.name.replace("experiment_result.json", "experiment.md")).read_text()
    assert "## Deployments" in page and page.count(name) >= 2
    monkeypatch.chdir(tmp_path)
    assert main(["show", str(trained.path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["deployments"]
    assert [(one["state"], one["name"]) for one in shown] == [("deployed", name)]
    assert main(["deploy", str(trained.path)]) == 0, "the config's block, by hand: nothing changes"
    assert f"Already deployed, unchanged: {name}" in capsys.readouterr().out
    assert main(["export", str(trained.path), "--to", "merged", "-o", str(tmp_path / "merged")]) == 0
    assert (tmp_path / "merged" / "config.json").is_file()


def test_a_deploy_block_that_fails_costs_the_experiment_nothing(tmp_path):
    (tmp_path / "taken").write_text("a file where a folder is wanted")
    block = {"kind": "folder", "params": {"path": str(tmp_path / "taken")}}
    trained = train(tmp_path / "project", {"kind": "local"}, steps=2, deploy=block)
    assert trained.record.status == "completed"
    assert "Deployment: Not deployed to folder: " in trained.record.conclusion


def test_deploying_by_hand_names_the_first_seed(tiny_trained, tmp_path):
    spec = DeploySpec(kind="folder", params={"path": str(tmp_path)})
    done = deploy_arm(tiny_trained.record, tiny_trained.path, spec, arm="r0")
    assert done.state == "deployed" and done.run == "r0" and done.endpoint == str(tmp_path / done.name)
