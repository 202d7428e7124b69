"""Sources: every kind gives rows, and a source that cannot says what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from evsys_sdk.config.schema import DataConfig
from evsys_sdk.data.sources import as_rows, find_path, open_source
from evsys_sdk.data.stores import InMemoryDataStore, LocalDataStore
from evsys_sdk.errors import DataError, MissingDependency

ROWS = [{"a": 1}, {"a": 2}]


def read(config: dict[str, Any], root: Path, **options: Any) -> list[Any]:
    source = open_source(DataConfig(**config), store=LocalDataStore(root=str(root)), **options)
    return list(as_rows(source.rows(), source.name))


def write_lines(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_jsonl_is_the_source_by_default(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl")
    assert read({"path": "train.jsonl"}, tmp_path) == ROWS


@pytest.mark.parametrize("value", [ROWS, {"rows": ROWS, "version": 1}, {"data": ROWS}])
def test_a_json_file_is_a_list_or_holds_one(tmp_path: Path, value: Any) -> None:
    (tmp_path / "train.json").write_text(json.dumps(value))
    assert read({"source_kind": "json", "path": "train.json"}, tmp_path) == ROWS


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"items": []}, "mapping with items"),
        ("text", "str"),
        ({"rows": {}}, "rows"),
        ({"rows": [], "data": []}, "data"),
    ],
)
def test_a_json_file_without_rows_says_what_it_holds(tmp_path: Path, value: Any, found: str) -> None:
    (tmp_path / "train.json").write_text(json.dumps(value))
    with pytest.raises(DataError, match=f"train.json: expected a list of rows.*found .*{found}"):
        read({"source_kind": "json", "path": "train.json"}, tmp_path)


def test_a_row_that_is_no_mapping_is_named_by_its_index(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text('[{"a": 1}, ["b"]]')
    with pytest.raises(DataError, match=r"row 1 \(counting from 0\) is not a mapping but \['b'\]"):
        read({"source_kind": "json", "path": "train.json"}, tmp_path)


def test_rows_in_the_config_stay_as_they_are(tmp_path: Path) -> None:
    config = DataConfig(source_kind="in_memory", rows=[{"a": {"b": [1]}}])
    source = open_source(config, store=InMemoryDataStore())
    next(iter(source.rows()))["a"]["b"].append(2)
    assert list(source.rows()) == [{"a": {"b": [1]}}]


def test_a_file_is_looked_for_in_the_store_first_and_then_in_the_folders(tmp_path: Path) -> None:
    root, beside, project = tmp_path / "root", tmp_path / "beside", tmp_path / "project"
    store = LocalDataStore(root=str(root))

    def found() -> Path:
        return store.locate(find_path("data/x.jsonl", store=store, folders=[beside, project]))

    for folder in (project, beside, root):  # each one found hides the ones after it
        write_lines(folder / "data" / "x.jsonl")
        assert found() == folder / "data" / "x.jsonl"


def test_a_missing_file_lists_all_places_and_the_closest_name(tmp_path: Path) -> None:
    write_lines(tmp_path / "beside" / "data" / "train.jsonl")
    store = LocalDataStore(root=str(tmp_path / "root"))
    with pytest.raises(DataError) as caught:
        find_path("data/trian.jsonl", store=store, folders=[tmp_path / "beside"])
    message = str(caught.value)
    assert f"{tmp_path}/root/data/trian.jsonl and {tmp_path}/beside/data/trian.jsonl" in message
    assert f"closest: {tmp_path}/beside/data/train.jsonl" in message


def test_a_misspelt_folder_is_put_right(tmp_path: Path) -> None:
    write_lines(tmp_path / "data" / "train.jsonl")
    with pytest.raises(DataError, match=f"closest: {tmp_path}/data$"):
        find_path("dta/train.jsonl", store=LocalDataStore(root=str(tmp_path)))


def test_an_absolute_path_is_looked_for_only_there(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        find_path(f"{tmp_path}/no.jsonl", store=LocalDataStore(), folders=[tmp_path / "other"])
    assert str(caught.value).endswith(f"looked for {tmp_path}/no.jsonl")


def test_a_store_that_is_not_the_disk_is_asked_too() -> None:
    store = InMemoryDataStore(files={"data/train.jsonl": ROWS})
    assert list(open_source(DataConfig(path="data/train.jsonl"), store=store).rows()) == ROWS
    with pytest.raises(DataError, match=r"closest: data/train\.jsonl"):
        find_path("data/trian.jsonl", store=store)


class OneFile:
    """A workspace with one dataset."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pull_dataset(self, ref: str) -> Path:
        assert ref == "sft_overdose"
        return self.path


def test_a_dataset_is_pulled_from_the_workspace_whatever_the_store(tmp_path: Path) -> None:
    workspace = OneFile(write_lines(tmp_path / "ds.jsonl"))
    config = DataConfig(dataset_name="sft_overdose")
    source = open_source(config, store=InMemoryDataStore(), workspace=workspace)
    assert list(source.rows()) == ROWS
    assert source.name == str(tmp_path / "ds.jsonl")


def test_a_dataset_without_workspace_says_what_to_do() -> None:
    with pytest.raises(DataError, match=r"'sft_overdose'.*give `path`"):
        open_source(DataConfig(dataset_id="sft_overdose"), store=InMemoryDataStore())


@pytest.fixture
def offline_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return datasets


def test_a_saved_dataset_is_read_from_disk(tmp_path: Path, offline_datasets: Any) -> None:
    table = offline_datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "one"))
    offline_datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(str(tmp_path / "two"))
    assert read({"source_kind": "hf_dataset", "hf_dataset": str(tmp_path / "one")}, tmp_path) == ROWS
    config = {"source_kind": "hf_dataset", "hf_dataset": "two", "hf_split": "test"}
    assert read(config, tmp_path, folders=[tmp_path]) == ROWS[:1]
    with pytest.raises(DataError, match="'tset' is not a split; closest: test"):
        read({**config, "hf_split": "tset"}, tmp_path, folders=[tmp_path])


def test_a_folder_and_a_file_are_loaded_without_network(tmp_path: Path, offline_datasets: Any) -> None:
    write_lines(tmp_path / "folder" / "train.jsonl")
    assert read({"source_kind": "hf_dataset", "hf_dataset": str(tmp_path / "folder")}, tmp_path) == ROWS
    (tmp_path / "rows.csv").write_text("a\n1\n2\n")
    assert read({"source_kind": "hf_dataset", "hf_dataset": str(tmp_path / "rows.csv")}, tmp_path) == ROWS


def test_a_dataset_that_cannot_be_loaded_is_named(tmp_path: Path, offline_datasets: Any) -> None:
    with pytest.raises(DataError, match="'no/such', split 'train', failed: "):
        read({"source_kind": "hf_dataset", "hf_dataset": "no/such"}, tmp_path)


def test_the_bars_of_the_library_come_back(tmp_path: Path, offline_datasets: Any) -> None:
    write_lines(tmp_path / "folder" / "train.jsonl")
    offline_datasets.enable_progress_bars()
    read({"source_kind": "hf_dataset", "hf_dataset": str(tmp_path / "folder")}, tmp_path)
    assert not offline_datasets.are_progress_bars_disabled()


def test_without_the_library_it_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependency, match=r"pip install 'evsys-sdk\[local\]'"):
        read({"source_kind": "hf_dataset", "hf_dataset": "x"}, tmp_path)
