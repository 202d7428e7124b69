"""Data stores: the same questions, answered by the disk and by memory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from evsys_sdk.data.stores import InMemoryDataStore, LocalDataStore
from evsys_sdk.errors import DataError
from evsys_sdk.protocols import DataStore

ROWS = [{"a": 1, "nested": {"b": [1]}}, {"a": 2}]


@pytest.fixture(params=["local", "in_memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return LocalDataStore(root=str(tmp_path)) if request.param == "local" else InMemoryDataStore()


def test_a_store_meets_the_protocol(store: Any) -> None:
    assert isinstance(store, DataStore)


def test_rows_come_back_as_they_were_written(store: Any) -> None:
    store.write_jsonl("deep/rows.jsonl", iter(ROWS))
    assert list(store.read_jsonl("deep/rows.jsonl")) == ROWS


def test_a_value_comes_back_as_it_was_written(store: Any) -> None:
    store.write_json("value.json", {"a": [1, "é"]})
    assert store.read_json("value.json") == {"a": [1, "é"]}


def test_changing_what_was_written_or_read_does_not_change_the_store(store: Any) -> None:
    given = [{"b": [1]}]
    store.write_jsonl("rows.jsonl", given)
    given[0]["b"].append(2)
    next(iter(store.read_jsonl("rows.jsonl")))["b"].append(3)
    assert list(store.read_jsonl("rows.jsonl")) == [{"b": [1]}]


def test_a_store_lists_what_it_has(store: Any) -> None:
    for path in ("b.jsonl", "a/z.jsonl", "a/b/c.jsonl", "ab.jsonl"):
        store.write_jsonl(path, ROWS)
    assert store.list() == ["a/b/c.jsonl", "a/z.jsonl", "ab.jsonl", "b.jsonl"]
    assert store.list("a/") == ["a/b/c.jsonl", "a/z.jsonl"]
    assert store.list("a") == ["a/b/c.jsonl", "a/z.jsonl", "ab.jsonl"]
    assert store.list("nowhere/") == []
    assert store.exists("a/z.jsonl") and not store.exists("a/y.jsonl")


def test_the_hash_follows_the_content(store: Any) -> None:
    store.write_jsonl("a.jsonl", ROWS)
    store.write_jsonl("b.jsonl", ROWS)
    store.write_jsonl("c.jsonl", ROWS[:1])
    assert store.sha256("a.jsonl") == store.sha256("b.jsonl") != store.sha256("c.jsonl")


def test_a_row_that_is_no_mapping_is_not_written(store: Any) -> None:
    with pytest.raises(DataError, match="row 1 is not a mapping"):
        store.write_jsonl("a.jsonl", [{}, 7])
    assert not store.exists("a.jsonl")


def test_a_missing_file_is_a_data_error(store: Any) -> None:
    for read in (lambda: list(store.read_jsonl("no.jsonl")), lambda: store.read_json("no.json")):
        with pytest.raises(DataError, match=r"no\.json"):
            read()
    with pytest.raises(DataError, match=r"no\.jsonl"):
        store.sha256("no.jsonl")


def test_local_paths_are_relative_to_the_root_or_absolute(tmp_path: Path) -> None:
    store = LocalDataStore(root=str(tmp_path / "root"))
    store.write_jsonl("rows.jsonl", ROWS)
    assert (tmp_path / "root" / "rows.jsonl").is_file()
    assert list(LocalDataStore().read_jsonl(str(tmp_path / "root" / "rows.jsonl"))) == ROWS


def test_the_local_hash_is_that_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"a":1}\n')
    assert LocalDataStore(root=str(tmp_path)).sha256("rows.jsonl") == hashlib.sha256(b'{"a":1}\n').hexdigest()


def test_local_lists_leave_out_hidden_and_half_written_files(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "x.py").touch()
    (tmp_path / ".rows.jsonl.1.part").touch()
    assert LocalDataStore(root=str(tmp_path)).list() == []


@pytest.mark.parametrize(
    ("content", "words"),
    [(b'{\n"a": }', ":2: not valid JSON"), (b'"\xff"', "not UTF-8"), (b"[" * 100_000, "nested too deeply")],
)
def test_a_broken_json_file_names_the_place(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "value.json").write_bytes(content)
    with pytest.raises(DataError) as caught:
        LocalDataStore(root=str(tmp_path)).read_json("value.json")
    assert f"{tmp_path / 'value.json'}" in str(caught.value) and words in str(caught.value)


def test_memory_begins_with_the_files_it_is_given() -> None:
    store = InMemoryDataStore(files={"rows.jsonl": ROWS, "value.json": 3})
    assert list(store.read_jsonl("rows.jsonl")) == ROWS
    assert store.read_json("value.json") == 3
    with pytest.raises(DataError, match="not a list of rows"):
        list(store.read_jsonl("value.json"))
    with pytest.raises(DataError, match=r"closest: rows\.jsonl"):
        list(store.read_jsonl("row.jsonl"))
