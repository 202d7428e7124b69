"""A directory belongs to one run, for good."""

from __future__ import annotations

import pytest

from evsys_sdk.files import write_json
from evsys_sdk.record.layout import RunFolders


def names(folder, experiment, *runs):
    places = RunFolders(folder, experiment)
    return [places.of(run).name for run in runs]


def test_runs_are_called_what_they_are_called_unless_somebody_has_that_place(tmp_path):
    assert names(tmp_path, "a", "x", "y") == ["x", "y"]
    assert names(tmp_path, "b", "x", "z") == ["x@b", "z"]
    assert names(tmp_path, "a", "x", "y", "z") == ["x", "y", "z@a"], "and keep it"
    assert names(tmp_path, "b", "x", "z") == ["x@b", "z"]


def test_the_other_name_may_be_taken_too(tmp_path):
    assert names(tmp_path, "a", "x", "x@b") == ["x", "x@b"]
    assert names(tmp_path, "b", "x", "x@b") == ["x@b-2", "x@b@b"]
    assert names(tmp_path, "b", "x") == ["x@b-2"]


def test_a_record_without_an_owners_note_counts_and_a_claim_that_was_cut_short_does_not(tmp_path):
    write_json(tmp_path / "old/run_result.json", {"run_id": "before/old"})
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/.owner").touch()
    assert names(tmp_path, "a", "old", "cut") == ["old@a", "cut"]
    assert (tmp_path / "cut/.owner").read_text() == "a/cut\n"


def test_what_cannot_be_claimed_is_for_the_run_to_complain_of(tmp_path):
    (tmp_path / "x").write_text("a file")
    assert names(tmp_path, "a", "x") == ["x"]


@pytest.mark.parametrize("name", ["長" * 80 + ".json", "e\u0301" * 84, "a" * 255])
def test_a_file_may_have_any_name_that_the_disk_takes(tmp_path, name):
    """The temporary file beside it is named after it, and names are counted in bytes."""
    write_json(tmp_path / name, {"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == [name]
