"""CSV and Parquet files as sources of rows."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from evsys_sdk.config.schema import DataConfig
from evsys_sdk.data.rows import load_rows
from evsys_sdk.data.stores import InMemoryDataStore, LocalDataStore
from evsys_sdk.errors import DataError, MissingDependency


def rows_of(path: Path, kind: str) -> list[dict[str, Any]]:
    config = DataConfig.model_validate({"source_kind": kind, "path": str(path)})
    return load_rows(config, store=LocalDataStore()).rows


def test_a_csv_file_is_rows_of_text_with_null_for_empty_cells(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes('\ufeffquestion,answer,n\r\n"a, ""b""\nc",007,\r\n\r\nd,é,2\r\n'.encode())
    assert rows_of(path, "csv") == [
        {"question": 'a, "b"\nc', "answer": "007", "n": None},
        {"question": "d", "answer": "é", "n": "2"},
    ]


def test_tabs_and_packed_files_are_read_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text("a\tb\n1,5\t2\n")
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(b"a\n" + b"x" * 200_000 + b"\n"))
    assert rows_of(tmp_path / "rows.tsv", "csv") == [{"a": "1,5", "b": "2"}]
    assert len(rows_of(tmp_path / "rows.csv.gz", "csv")[0]["a"]) == 200_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"a,b\n1,2\n3\n", [":3: 1 cells", "2 columns"]),
        (b"a,b\n1,2,3\n", [":2: 3 cells"]),
        (b"a,a\n1,2\n", [":1:", "two columns of one name: a"]),
        (b"a,\n1,2\n", [":1:", "without a name"]),
        (b"a;b\n1;2\n", [":1:", "one column", "commas"]),
        (b"", ["is empty"]),
        (b'a\n"x\n', ["rows.csv:2: not valid CSV"]),
        (b'a\nx\n"y"z\nx\n', ["rows.csv:3: not valid CSV"]),
        (b"a\n\xff\n", ["rows.csv:2: not valid CSV in UTF-8"]),
        (b"a\r\n" + b"row\r\n" * 9000 + b"caf\xe9\r\n", ["rows.csv:9002: not valid CSV in UTF-8"]),
    ],
)
def test_a_csv_file_that_cannot_be_read_is_named_with_its_line(tmp_path: Path, text: bytes, words: list[str]) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(text)
    with pytest.raises(DataError) as caught:
        rows_of(path, "csv")
    assert all(word in str(caught.value) for word in [str(path), *words]), caught.value


def test_a_parquet_file_keeps_its_types_and_its_nested_values(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    given = [
        {"n": 1, "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a", "weight": 0}]},
        {"n": None, "messages": [{"role": "assistant", "content": "b"}]},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(given), tmp_path / "rows.parquet")
    found = rows_of(tmp_path / "rows.parquet", "parquet")
    assert [row["n"] for row in found] == [1, None]
    assert found[0]["messages"][1] == {"role": "assistant", "content": "a", "weight": 0}
    assert found[0]["messages"][0]["weight"] is None


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "rows.parquet").write_text("a,b\n")
    with pytest.raises(DataError, match=r"rows\.parquet: cannot be read as Parquet"):
        rows_of(tmp_path / "rows.parquet", "parquet")


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingDependency, match=r"pip install 'evsys-sdk\[parquet\]'"):
        rows_of(tmp_path / "rows.parquet", "parquet")


def test_a_csv_path_with_the_default_kind_says_what_to_set() -> None:
    with pytest.raises(ValidationError, match="set source_kind: csv"):
        DataConfig(path="data/train.csv")
    with pytest.raises(ValidationError, match="set source_kind: parquet"):
        DataConfig(path="data/train.parquet")


def test_a_table_in_a_store_without_files_is_refused() -> None:
    store = InMemoryDataStore(files={"rows.csv": []})
    with pytest.raises(DataError, match="files on this machine"):
        load_rows(DataConfig(source_kind="csv", path="rows.csv"), store=store)


def test_a_csv_file_can_be_added_to_the_workspace(tmp_path: Path) -> None:
    from evsys_sdk.data.workspace import Workspace

    (tmp_path / "rows.csv").write_text("question,answer\n1+1?,2\n")
    workspace = Workspace(tmp_path / ".evsys")
    entry = workspace.add(tmp_path / "rows.csv", name="sums")
    assert entry.n_rows == 1
    assert workspace.path(entry).read_text() == '{"question": "1+1?", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("transform", "row", "column", "what"),
    [
        ({"kind": "jsonl_to_chat"}, "say b,", "completion", "no answer"),
        ({"kind": "jsonl_to_chat"}, ",no", "prompt", "nothing to ask"),
        ({"kind": "to_harbor_task"}, "say b,", "completion", "no right answer"),
        ({"kind": "to_harbor_task"}, ",no", "prompt", "nothing to do"),
    ],
)
def test_an_empty_cell_is_named_by_row_and_column_with_what_to_do(tmp_path, transform, row, column, what):
    path = tmp_path / "rows.csv"
    path.write_text(f"prompt,completion\nsay a,yes\n{row}\n")

    def load(*transforms: Any) -> list[dict[str, Any]]:
        config = DataConfig.model_validate({"source_kind": "csv", "path": str(path), "transforms": transforms})
        return load_rows(config, store=LocalDataStore()).rows

    with pytest.raises(DataError) as caught:
        load(transform)
    drop = f"fill it, or drop such rows first with {{kind: filter, params: {{key: {column}, exists: true}}}}"
    assert f"row 1 (counting from 0) has {what}: its column {column!r} is empty (null); {drop}" in str(caught.value)
    keep = {"kind": "filter", "params": {"key": column, "exists": True}}
    assert len(load(keep, transform)) == 1
