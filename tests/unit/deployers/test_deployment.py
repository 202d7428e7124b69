"""A deployment from intent to end: what is noted, what is rolled back, and what stays as it was."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from evsys_sdk import registry
from evsys_sdk.cli.main import main
from evsys_sdk.config.base import DeploySpec
from evsys_sdk.errors import EvsysError
from evsys_sdk.experiment.deployment import (
    deploy_arm,
    deploy_artifact,
    find_shipped_run,
    make_artifact,
    why_not_shipped,
)
from evsys_sdk.protocols import Deployment, ProbeResult
from evsys_sdk.record.deployments import deployments_path, read_deployments

PASSED = ProbeResult(compared="logprobs", ok=True, detail="all the same", difference=0.0, tolerance=0.1)
SPEC = DeploySpec(kind="memory")


class MemoryTarget:
    """A target that keeps what it is given, and fails on request."""

    keeps_replaced = False

    def __init__(self) -> None:
        self.loaded: dict[str, Deployment] = {}
        self.alias: str | None = None
        self.finding = PASSED
        self.fails_in = ""

    def _may_fail(self, where):
        if self.fails_in == where:
            raise ConnectionError(f"the server died in {where}")

    def deploy(self, artifact):
        self.loaded[artifact.name] = Deployment(
            kind="memory", name=artifact.name, digest=artifact.digest, endpoint="memory:", alias="live"
        )
        self._may_fail("deploy")
        return self.loaded[artifact.name]

    def probe(self, deployment, artifact):
        self._may_fail("probe")
        return self.finding

    def route(self, deployment):
        self.alias = deployment.name
        self._may_fail("route")

    def retire(self, name):
        self._may_fail("retire")
        del self.loaded[name]

    def current(self):
        return self.loaded.get(self.alias or "")


@pytest.fixture
def artifact(mock_trained):
    return make_artifact(mock_trained.record, find_shipped_run(mock_trained.record, mock_trained.path, "r0"))


def other(artifact):
    """Other weights of the same experiment."""
    return replace(artifact, name="say-yes-ffff", digest="f" * 64)


def test_weights_are_named_after_the_experiment_and_their_content(mock_trained, artifact):
    assert artifact.name == f"say-yes-{artifact.digest[:12]}" and len(artifact.digest) == 64
    again = make_artifact(mock_trained.record, find_shipped_run(mock_trained.record, mock_trained.path, "r0"))
    assert again.digest == artifact.digest and again.fingerprint == artifact.fingerprint
    assert artifact.fingerprint.contrast > 0, "the prompts tell the trained weights from the base model"


def test_the_card_has_data_recipe_scores_and_verdict(artifact):
    card = artifact.card
    assert "16 rows (of 16 read), sha256" in card and '"max_steps": 4' in card and f"sha256 `{artifact.digest}`" in card
    assert "val/val, before training: pass@1 " in card and "val/val, these weights: pass@1 " in card
    assert "], 12 tasks" in card and "## Verdict" in card and "seed" in card


def test_a_deployment_is_loaded_probed_switched_and_noted_with_what_it_replaced(mock_trained, artifact):
    target = MemoryTarget()
    first = deploy_artifact(artifact, target, SPEC, mock_trained.path)
    assert first.state == "deployed" and first.replaced is None and target.alias == artifact.name
    second = deploy_artifact(other(artifact), target, SPEC, mock_trained.path)
    assert second.replaced == artifact.name and set(target.loaded) == {"say-yes-ffff"}, "what was replaced is unloaded"
    states = [json.loads(line)["state"] for line in deployments_path(mock_trained.path).read_text().splitlines()]
    assert states == ["started", "deployed"] * 2
    assert [one.state for one in read_deployments(mock_trained.path)] == ["deployed", "deployed"]


def test_the_same_weights_twice_change_nothing(mock_trained, artifact):
    target = MemoryTarget()
    deploy_artifact(artifact, target, SPEC, mock_trained.path)
    target.fails_in = "deploy"
    again = deploy_artifact(artifact, target, SPEC, mock_trained.path)
    assert again.state == "unchanged" and again.probe.detail == "all the same"


def test_a_failed_probe_leaves_the_alias_where_it_was(mock_trained, artifact):
    target = MemoryTarget()
    deploy_artifact(artifact, target, SPEC, mock_trained.path)
    target.finding = ProbeResult(compared="logprobs", ok=False, detail="they differ by 3", difference=3.0)
    done = deploy_artifact(other(artifact), target, SPEC, mock_trained.path)
    assert done.state == "rolled back" and target.alias == artifact.name and set(target.loaded) == {artifact.name}
    assert f"{artifact.name} still answers" in done.line and "they differ by 3" in done.line


@pytest.mark.parametrize("where", ["deploy", "probe", "route"])
def test_a_target_that_dies_leaves_the_old_or_the_new_weights(mock_trained, artifact, where):
    target = MemoryTarget()
    deploy_artifact(artifact, target, SPEC, mock_trained.path)
    target.fails_in = where
    with pytest.raises(EvsysError, match=f"deployer 'memory'.*the server died in {where}"):
        deploy_artifact(other(artifact), target, SPEC, mock_trained.path)
    assert target.current() is not None
    assert target.alias == ("say-yes-ffff" if where == "route" else artifact.name)
    last = read_deployments(mock_trained.path)[-1]
    assert last.state == "failed" and "the server died" in last.error
    target.fails_in = ""
    assert deploy_artifact(other(artifact), target, SPEC, mock_trained.path).state in ("deployed", "unchanged")


def test_an_old_model_that_cannot_be_unloaded_is_a_warning(mock_trained, artifact):
    target = MemoryTarget()
    deploy_artifact(artifact, target, SPEC, mock_trained.path)
    target.fails_in = "retire"
    done = deploy_artifact(other(artifact), target, SPEC, mock_trained.path)
    assert done.state == "deployed" and target.alias == "say-yes-ffff"
    assert artifact.name in done.warning and "the server died in retire" in done.line


def test_a_killed_deployment_is_seen_as_interrupted_and_can_be_repeated(mock_trained, artifact, monkeypatch):
    class Killed(BaseException):
        """What `kill -9` leaves: nothing after it runs."""

    target = MemoryTarget()
    with monkeypatch.context() as patch:
        patch.setattr(MemoryTarget, "probe", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            deploy_artifact(artifact, target, SPEC, mock_trained.path)
    found = read_deployments(mock_trained.path)
    assert found[-1].state == "started" and "Interrupted" in found[-1].line and target.alias is None
    # The last line of a process that was killed while it wrote is torn.
    with open(deployments_path(mock_trained.path), "a") as file:
        file.write('{"id": "torn')
    assert deploy_artifact(artifact, target, SPEC, mock_trained.path).state == "deployed"
    assert [one.state for one in read_deployments(mock_trained.path)] == ["started", "deployed"]


def test_secrets_do_not_reach_the_record(mock_trained, forget_afterwards):
    class KeyedTarget(MemoryTarget):
        def __init__(self, api_key: str) -> None:
            super().__init__()
            self.key = api_key

        def deploy(self, artifact):
            raise ValueError(f"401 for Bearer {self.key}")

    registry.deployers.register("keyed")(KeyedTarget)
    spec = DeploySpec(kind="keyed", params={"api_key": "hunter2-hunter2-hunter2"})
    with pytest.raises(EvsysError):
        deploy_arm(mock_trained.record, mock_trained.path, spec, arm="r0")
    assert "hunter2" not in deployments_path(mock_trained.path).read_text()


def test_an_arm_that_lost_does_not_ship_by_itself(mock_trained):
    record = mock_trained.record.model_copy(deep=True)
    record.best_arm = None
    assert "names no best arm" in why_not_shipped(record)
    with pytest.raises(EvsysError, match="name an arm with --arm: r0"):
        find_shipped_run(record, mock_trained.path)
    record.best_arm = "r0"
    record.verdict.arms[0].vs_untrained.verdict = "worse"
    assert why_not_shipped(record) == "the arm r0 is worse than the untrained model"
    with pytest.raises(EvsysError, match="'r1' is not an arm"):
        find_shipped_run(record, mock_trained.path, "r1")


def test_the_command_line_says_where_it_can_go(mock_trained, capsys, monkeypatch):
    monkeypatch.chdir(mock_trained.folder)
    assert main(["deploy", str(mock_trained.path), "--arm", "r0"]) == 1
    assert "no deploy block; say where to with --to: " in capsys.readouterr().err
    assert main(["deploy", str(mock_trained.path), "--arm", "r0", "--to", "foldr"]) == 1
    assert "'foldr' is not a deployer; closest: folder" in capsys.readouterr().err
    assert main(["deploy", str(mock_trained.path), "--arm", "r0", "--to", "folder", "--set", "form=tar"]) == 1
    assert "must be one of peft, merged, gguf" in capsys.readouterr().err
    # Weights of the mock are no transformer's: refused by name, and the record says so.
    assert main(["deploy", str(mock_trained.path), "--arm", "r0", "--to", "folder", "--set", "path=out"]) == 1
    assert "only the backend local keeps weights" in capsys.readouterr().err
    assert main(["deployments", str(mock_trained.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["deployments"][0]["state"] == "failed"
