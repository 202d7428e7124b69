"""The data store contract, over every built-in and over a plain class that inherits nothing."""

from __future__ import annotations

import pytest

from evsys_sdk.errors import EvsysError
from evsys_sdk.protocols import DataStore
from evsys_sdk.registry import data_stores, list_data_stores, register_data_store

BUILT_INS = [name for name in list_data_stores() if data_stores.entries[name].origin.startswith("evsys_sdk.")]
ROWS = [{"q": "ä\n", "n": 1, "x": None}, {"q": "", "deep": {"list": [1.5, True]}}]


class Dictionary:
    """The least that is a data store."""

    def __init__(self):
        self.files = {}

    def read_jsonl(self, path):
        return iter(self.read_json(path))

    def write_jsonl(self, path, rows):
        self.files[path] = list(rows)

    def read_json(self, path):
        if path not in self.files:
            raise EvsysError(f"no {path}")
        return self.files[path]

    def write_json(self, path, value):
        self.files[path] = value

    def exists(self, path):
        return path in self.files

    def list(self, prefix=""):
        return sorted(path for path in self.files if path.startswith(prefix))


@pytest.fixture(autouse=True)
def registry_as_before(monkeypatch):
    monkeypatch.setattr(data_stores, "entries", dict(data_stores.entries))
    register_data_store("plain_dictionary")(Dictionary)


@pytest.fixture(params=[*BUILT_INS, "plain_dictionary"])
def store(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the local store's default root
    return data_stores.build(request.param, {})


def test_rows_come_back_as_they_went_in(store):
    assert isinstance(store, DataStore)
    store.write_jsonl("a/rows.jsonl", iter(ROWS))
    assert list(store.read_jsonl("a/rows.jsonl")) == ROWS
    store.write_jsonl("a/rows.jsonl", [])
    assert list(store.read_jsonl("a/rows.jsonl")) == []


def test_values_come_back_as_they_went_in(store):
    store.write_json("value.json", {"a": [1, None, "ß"]})
    assert store.read_json("value.json") == {"a": [1, None, "ß"]}


def test_a_store_knows_what_it_has(store):
    store.write_json("b.json", 1)
    store.write_jsonl("a/rows.jsonl", ROWS)
    assert store.exists("b.json") and not store.exists("c.json")
    assert store.list() == ["a/rows.jsonl", "b.json"]
    assert store.list("a/") == ["a/rows.jsonl"]


@pytest.mark.parametrize("read", ["read_jsonl", "read_json"])
def test_what_is_not_there_is_named(store, read):
    with pytest.raises(EvsysError, match="nothing"):
        list(getattr(store, read)("nothing.json"))
