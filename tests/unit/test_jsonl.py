"""JSONL files: streamed, forgiving about white space, exact about everything else."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evsys_sdk import files
from evsys_sdk.errors import DataError


def read(path: Path) -> list[Any]:
    return list(files.read_rows(path))


def error_of(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(path)
    return str(caught.value)


def many(count: int) -> bytes:
    return b"".join(b'{"n": %d, "text": "%s"}\n' % (n, b"x" * 50) for n in range(count))


def test_blank_lines_a_mark_and_windows_ends_are_tolerated(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n   \n\t{"a": "\xc3\xa9\xe2\x80\xa8"} \n{"a": 3}')
    assert read(path) == [{"a": 1}, {"a": "é\u2028"}, {"a": 3}]


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"")
    assert read(tmp_path / "empty.jsonl") == []


def test_a_file_of_many_batches_comes_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(many(3000))
    assert [row["n"] for row in files.read_rows(path)] == list(range(3000))


def test_rows_come_before_the_file_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(many(3000) + b"{broken")
    assert next(iter(files.read_rows(path)))["n"] == 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"a": 1', "not valid JSON"),
        (b"{'a': 1}", "column 2"),
        (b'{"a": 1} {"a": 2}', "Extra data"),
        (b'{"a": 1},{"a": 2}', "Extra data"),
        (b"[1, 2]", "expected an object in braces, found [1, 2]"),
        (b'"text"', "found 'text'"),
        (b"null", "found None"),
        (b'{"a": "\xff"}', "not UTF-8 (byte 0xff at position 7)"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "4300"),
    ],
)
def test_a_malformed_line_names_file_and_number(tmp_path: Path, line: bytes, words: str) -> None:
    message = error_of(tmp_path / "rows.jsonl", many(1000) + line + b"\n" + many(10))
    assert message.startswith(f"{tmp_path / 'rows.jsonl'}:1001: ")
    assert words in message
    assert words in error_of(tmp_path / "alone.jsonl", line)


@pytest.mark.parametrize("third", [b"", b'{"d": 3},{"e": 4}', b'{"d": 3},5,{"e": 4}', b"{},{},{}"])
def test_two_broken_lines_that_make_one_whole_are_both_refused(tmp_path: Path, third: bytes) -> None:
    halves = b'{"a": [{"b": 1}\n{"c": 2}]}\n'
    assert ":1: not valid JSON" in error_of(tmp_path / "rows.jsonl", halves + third)


def test_a_packed_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(many(2000)))
    assert len(read(path)) == 2000


def test_a_cut_or_false_packed_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    assert "rows.jsonl.gz: cannot be read" in error_of(path, gzip.compress(many(2000))[:-20])
    assert "rows.jsonl.gz: cannot be read after line 0" in error_of(path, b'{"a": 1}\n')


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"no such file: {tmp_path}/rows.jsonl"):
        read(Path("rows.jsonl"))


def test_a_folder_tells_which_files_it_holds(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"is a folder, not a file; it holds: train\.jsonl"):
        read(tmp_path)


def test_rows_of_one_batch_share_their_keys(tmp_path: Path) -> None:
    # A quarter of a gigabyte per million rows hangs on this.
    path = tmp_path / "rows.jsonl"
    path.write_bytes(many(2))
    first, second = read(path)
    assert all(a is b for a, b in zip(first, second, strict=True))


def test_what_is_converted_is_named_by_line_too(tmp_path: Path) -> None:
    def convert(row: dict[str, Any]) -> int:
        if row["n"] == 2:
            raise DataError("two is not wanted")
        return int(row["n"])

    path = tmp_path / "rows.jsonl"
    path.write_bytes(many(3))
    rows = files.read_rows(path, convert)
    assert [next(rows), next(rows)] == [0, 1]
    with pytest.raises(DataError, match=r"rows\.jsonl:3: two is not wanted"):
        next(rows)


@settings(max_examples=50)
@given(
    rows=st.lists(
        st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text())),
        max_size=5,
    ),
    name=st.sampled_from(["rows.jsonl", "rows.jsonl.gz"]),
)
def test_what_is_written_is_read_back(tmp_path_factory: Any, rows: list[dict[str, Any]], name: str) -> None:
    path = tmp_path_factory.mktemp("rows") / name
    assert files.write_rows(path, rows) == len(rows)
    assert read(path) == rows


def test_half_a_surrogate_pair_is_written_and_read_back(tmp_path: Path) -> None:
    row = json.loads(r'{"a": "\ud800", "b": "é"}')
    files.write_rows(tmp_path / "rows.jsonl", [row])
    assert read(tmp_path / "rows.jsonl") == [row]


def test_the_same_rows_packed_twice_are_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        files.write_rows(tmp_path / name, [{"a": 1}])
    content = (tmp_path / "a.jsonl.gz").read_bytes()
    assert content == (tmp_path / "b.jsonl.gz").read_bytes()
    assert content[4:8] == b"\0\0\0\0", "the time of writing is in the file"


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    files.write_rows(path, [{"old": 1}])
    with pytest.raises(DataError, match="row 1 is not a mapping"):
        files.write_rows(path, [{"new": 1}, "text"])  # type: ignore[list-item]
    assert read(path) == [{"old": 1}]
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]
