"""The end of a log is read without the rest of it."""

from __future__ import annotations

import tracemalloc

import pytest

from evsys_sdk.record.lines import BLOCK, follow, last_lines


@pytest.mark.parametrize(
    ("text", "lines", "told"),
    [
        ("", 3, []),
        ("one\n", 3, ["one"]),
        ("one\ntwo\nthree\n", 2, ["two", "three"]),
        ("one\ntwo, not ended", 1, ["two, not ended"]),
        ("one\n\n\n", 2, ["", ""]),
        ("10%\r20%\r30%\ndone\n", 2, ["10%\r20%\r30%", "done"]),
        ("a" * 3 * BLOCK + "\nlast\n", 2, ["a" * 3 * BLOCK, "last"]),
        ("".join(f"line {n}\n" for n in range(50_000)), 3, ["line 49997", "line 49998", "line 49999"]),
    ],
)
def test_the_last_lines(tmp_path, text, lines, told):
    path = tmp_path / "x.log"
    path.write_text(text, newline="")
    assert last_lines(path, lines) == (told, len(text))


def test_of_a_gigabyte_only_the_end_is_read(tmp_path):
    path = tmp_path / "x.log"
    with open(path, "wb") as handle:
        handle.truncate(1 << 30)
        handle.seek(0, 2)
        handle.write("\nfirst ü\nsecond\n".encode())
    tracemalloc.start()
    lines, end = last_lines(path, 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lines == ["first ü", "second"] and end == path.stat().st_size and peak < 10 * BLOCK


def test_what_follows_is_told_until_the_writer_has_gone(tmp_path):
    path = tmp_path / "x.log"
    path.write_bytes(b"old\n")
    writes = [b"new \xc3", b"\xbc\n", b"last words\n"]
    told = ""

    def is_writing():
        return bool(writes)

    def wait():
        with open(path, "ab") as handle:
            handle.write(writes.pop(0))

    for text in follow(path, 4, is_writing=is_writing, wait=wait):
        told += text
    assert told == "new ü\nlast words\n"


def test_a_log_that_was_emptied_is_followed_from_its_beginning(tmp_path):
    path = tmp_path / "x.log"
    path.write_text("a long line\n")
    left = [lambda: path.write_text("new\n")]
    texts = follow(path, 12, is_writing=lambda: bool(left), wait=lambda: left.pop()())
    assert "".join(texts) == "new\n"
