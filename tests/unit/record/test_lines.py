from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from evsys_sdk.errors import EvsysError
from evsys_sdk.record.lines import LineFile


def test_lines_of_many_threads_do_not_mix(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "deep" / "a.jsonl")
    texts = [json.dumps({"thread": number, "text": "x" * 5000}) for number in range(8)]
    threads = [threading.Thread(target=lambda t=t: [file.append(t) for _ in range(50)]) for t in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = file.path.read_text().splitlines()
    assert sorted(lines) == sorted(texts * 50)


def test_append_returns_the_offset_behind_the_line(tmp_path: Path) -> None:
    first, second = LineFile(tmp_path / "a"), LineFile(tmp_path / "a")
    assert [first.append("ä"), second.append("bc"), first.append("")] == [3, 6, 7]


def test_a_torn_tail_is_closed_off_before_the_next_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"ok":1}\n{"tor')
    LineFile(tmp_path / "a").append('{"ok":2}')
    assert (tmp_path / "a").read_text().splitlines() == ['{"ok":1}', '{"tor', '{"ok":2}']


def test_a_lone_surrogate_survives_as_its_json_escape(tmp_path: Path) -> None:
    LineFile(tmp_path / "a").append(json.dumps({"text": "\ud800"}, ensure_ascii=False))
    assert json.loads((tmp_path / "a").read_bytes()) == {"text": "\ud800"}


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("/dev/full")
    with pytest.raises(EvsysError, match=r"cannot write to .*/a: No space left"):
        LineFile(tmp_path / "a").append("x")


def test_a_folder_that_cannot_be_made_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EvsysError, match=r"cannot write to .*/file/a"):
        LineFile(tmp_path / "file" / "a")


def test_a_closed_file_takes_no_more(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "a")
    file.close()
    file.close()
    with pytest.raises(EvsysError, match="is closed"):
        file.append("x")


def test_whole_lines_are_read_up_to_a_size_and_one_that_is_longer_is_not_left_behind(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "a.jsonl")
    for line in ("one", "two", "x" * 100):
        file.append(line)
    assert file.read_lines(0, 8) == b"one\ntwo\n"
    assert file.read_lines(0, 7) == b"one\n"
    assert file.read_lines(8, 10) == b"x" * 100 + b"\n"
    with open(file.path, "ab") as handle:
        handle.write(b"being writ")
    assert file.read_lines(8, 1000) == b"x" * 100 + b"\n"
    assert file.read_lines(109, 5) == b""
    file.close()
