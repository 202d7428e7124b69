"""The manifest of a run's checkpoints."""

from __future__ import annotations

import json

import pytest

from evsys_sdk.errors import BackendError
from evsys_sdk.training.checkpoints import Checkpoint, Manifest


def test_a_completed_checkpoint_is_read_back(tmp_path):
    manifest = Manifest(tmp_path / "checkpoints.json")
    manifest.begin(5)
    done = manifest.complete(Checkpoint(step=5, state="s5", sampler="w5", metrics={"loss": 1.5}))
    assert Manifest.load(manifest.path).last_complete() == done
    assert done.state == "s5" and done.sampler == "w5" and done.metrics == {"loss": 1.5}


def test_a_checkpoint_that_was_only_begun_is_not_trusted(tmp_path):
    manifest = Manifest(tmp_path / "checkpoints.json")
    manifest.complete(Checkpoint(step=5, state="s5", sampler="w5", metrics={}))
    manifest.begin(10)
    read = Manifest.load(manifest.path)
    assert [(c.step, c.complete) for c in read.checkpoints] == [(5, True), (10, False)]
    assert read.last_complete().step == 5


def test_beginning_a_step_again_takes_the_trust_away(tmp_path):
    manifest = Manifest(tmp_path / "checkpoints.json")
    manifest.complete(Checkpoint(step=5, state="s5", sampler="w5", metrics={}))
    manifest.begin(5)
    assert Manifest.load(manifest.path).last_complete() is None


def test_no_manifest_means_no_checkpoints(tmp_path):
    assert Manifest.load(tmp_path / "checkpoints.json").last_complete() is None


def test_a_file_that_is_no_manifest_is_refused(tmp_path):
    path = tmp_path / "checkpoints.json"
    path.write_text(json.dumps({"checkpoints": [{"stp": 1}]}))
    with pytest.raises(BackendError, match=r"checkpoints\.json is not a checkpoint manifest"):
        Manifest.load(path)
