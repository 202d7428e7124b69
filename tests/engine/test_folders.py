"""A folder that is replaced is the old one or the new one, whatever happens in between."""

from __future__ import annotations

import os

import pytest

from evsys_engine import folders
from evsys_engine.folders import read_manifest, write_folder


def write(folder, text):
    write_folder(folder, {"kind": "text"}, lambda part: (part / "file.txt").write_text(text) and None)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "f", "old")
    return tmp_path / "f"


@pytest.fixture
def no_exchange(monkeypatch):
    """A file system that cannot swap two names."""
    monkeypatch.setattr(folders, "_exchange", lambda *paths: False)


def test_while_a_folder_is_replaced_its_name_is_never_without_one(folder, monkeypatch):
    (folder.parent / "a").mkdir()
    (folder.parent / "b").mkdir()
    if not folders._exchange(folder.parent / "a", folder.parent / "b"):
        pytest.skip("this file system cannot swap two names")
    there, replace = [], os.replace

    def watched(*paths):
        replace(*paths)
        there.append(folder.exists())

    monkeypatch.setattr(os, "replace", watched)
    write(folder, "new")
    assert all(there) and (folder / "file.txt").read_text() == "new"
    assert sorted(path.name for path in folder.parent.iterdir()) == ["a", "b", "f"], "the old one is gone"


def test_a_folder_is_replaced_where_names_cannot_be_swapped(folder, no_exchange):
    write(folder, "new")
    assert (folder / "file.txt").read_text() == "new" and os.listdir(folder.parent) == ["f"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_rename_that_fails_leaves_the_old_folder_in_its_place(folder, no_exchange, monkeypatch, number):
    calls, replace = [], os.replace

    def failing(*paths):
        calls.append(paths)
        if len(calls) == number:
            raise OSError("the disk says no")
        replace(*paths)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="the disk says no"):
        write(folder, "new")
    assert read_manifest(folder, "text") and (folder / "file.txt").read_text() == "old"
    assert os.listdir(folder.parent) == ["f"]


def test_reading_a_folder_writes_nothing_to_the_disk(folder, monkeypatch):
    def refuse(descriptor):
        raise AssertionError("fsync of a file that was only read")

    monkeypatch.setattr(os, "fsync", refuse)
    assert read_manifest(folder, "text")["kind"] == "text"


def test_weights_are_read_by_those_who_read_other_files(tmp_path):
    def fill(part):
        (part / "weights.safetensors").touch(mode=0o600)

    (tmp_path / "any").touch()
    write_folder(tmp_path / "f", {"kind": "weights"}, fill)
    assert (tmp_path / "f" / "weights.safetensors").stat().st_mode == (tmp_path / "any").stat().st_mode
