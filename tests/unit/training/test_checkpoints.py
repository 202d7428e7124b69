"""The manifest of a run's checkpoints."""

from __future__ import annotations

import json

import pytest

from evsys_sdk.errors import BackendError
from evsys_sdk.training.checkpoints import Checkpoint, CheckpointManifest


def test_a_completed_checkpoint_is_read_back(tmp_path):
    manifest = CheckpointManifest(tmp_path / "checkpoints.json")
    manifest.begin(5)
    done = manifest.complete(Checkpoint(step=5, state="s5", sampler="w5", metrics={"loss": 1.5}))
    assert CheckpointManifest.load(manifest.path).last_complete() == done
    assert done.state == "s5" and done.sampler == "w5" and done.metrics == {"loss": 1.5}


def test_a_checkpoint_that_was_only_begun_is_not_trusted(tmp_path):
    manifest = CheckpointManifest(tmp_path / "checkpoints.json")
    manifest.complete(Checkpoint(step=5, state="s5", sampler="w5", metrics={}))
    manifest.begin(10)
    read = CheckpointManifest.load(manifest.path)
    assert [(c.step, c.complete) for c in read.checkpoints] == [(5, True), (10, False)]
    assert read.last_complete().step == 5


def test_beginning_a_step_again_takes_the_trust_away(tmp_path):
    manifest = CheckpointManifest(tmp_path / "checkpoints.json")
    manifest.complete(Checkpoint(step=5, state="s5", sampler="w5", metrics={}))
    manifest.begin(5)
    assert CheckpointManifest.load(manifest.path).last_complete() is None


def test_a_run_directory_can_be_moved(tmp_path):
    for path in ("a/checkpoints.json", "a/stages/one/checkpoints.json"):
        weights = tmp_path / "a/weights/w"
        weights.mkdir(parents=True, exist_ok=True)
        CheckpointManifest(tmp_path / path).complete(
            Checkpoint(step=1, state=str(weights), sampler="tinker://x", progress={"paths": [str(weights)]})
        )
    (tmp_path / "a").rename(tmp_path / "b")
    home = str(tmp_path / "b/weights/w")
    for path in ("b/checkpoints.json", "b/stages/one/checkpoints.json"):
        last = CheckpointManifest.load(tmp_path / path).last_complete()
        assert (last.state, last.sampler, last.progress) == (home, "tinker://x", {"paths": [home]})


def test_a_checkpoint_without_its_sampler_is_not_whole(tmp_path):
    (tmp_path / "state").mkdir()
    manifest = CheckpointManifest(tmp_path / "checkpoints.json")
    manifest.complete(Checkpoint(step=1, state="s", sampler="w"))
    manifest.complete(Checkpoint(step=2, state=str(tmp_path / "state"), sampler=str(tmp_path / "gone")))
    assert [found.step for found in CheckpointManifest.load(manifest.path).whole()] == [1]


def test_no_manifest_means_no_checkpoints(tmp_path):
    assert CheckpointManifest.load(tmp_path / "checkpoints.json").last_complete() is None


def test_a_file_that_is_no_manifest_is_refused(tmp_path):
    path = tmp_path / "checkpoints.json"
    path.write_text(json.dumps({"checkpoints": [{"stp": 1}]}))
    with pytest.raises(BackendError, match=r"checkpoints\.json is not a checkpoint manifest"):
        CheckpointManifest.load(path)


def test_a_checkpoint_whose_algorithm_wants_files_that_are_gone_cannot_be_trusted(tmp_path):
    manifest, files = (
        CheckpointManifest(tmp_path / "checkpoints.json"),
        [tmp_path / name for name in ("state", "rolling")],
    )
    for file in files:
        file.write_text("weights")
    progress = {"rollout_weights": {"7": [6, str(files[1])]}, "note": "/not/of/this/run"}
    manifest.complete(Checkpoint(step=5, state=str(files[0]), progress=progress))
    assert [found.step for found in CheckpointManifest.load(manifest.path).whole()] == [5]
    files[1].unlink()
    assert CheckpointManifest.load(manifest.path).whole() == []
