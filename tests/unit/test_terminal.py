"""What others wrote reaches a terminal as text."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import struct
import sys
import termios

import pytest

from evsys_sdk.cli.output import print_table, print_text
from evsys_sdk.files import to_json, write_text
from evsys_sdk.format import console_for, guarded_streams, inline_markdown, markdown_text, visible
from evsys_sdk.report.figures import labels

ATTACK = "a\x1b[2J\x1b]0;owned\x07b\x9b31mc\rd\x08\u202ee\u2066f\udc1b\x7f"


def test_control_characters_are_shown_as_text():
    shown = visible(ATTACK)
    assert shown.isprintable() and "\\u001b[2J\\u001b]0;owned\\u0007b\\u009b31mc\\u000dd" in shown
    assert visible("tab\there\nline\r\nend, Zürich 北京 🙂 \u200d") == "tab\there\nline\nend, Zürich 北京 🙂 \u200d"


def test_json_that_passes_a_guarded_stream_is_still_json(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with guarded_streams():
        print(json.dumps({"text": ATTACK}, ensure_ascii=False, indent=2))
    assert json.loads(out.getvalue()) == {"text": ATTACK} and "\x9b" not in out.getvalue()


def test_a_rich_console_keeps_its_own_colours_and_shows_those_of_texts(monkeypatch):
    from rich.text import Text

    out = io.StringIO()
    console = console_for(out, force_terminal=True, color_system="standard", width=200)
    console.print(Text(ATTACK, style="bold"))
    assert "\x1b[1m" in out.getvalue() and "\x1b[2J" not in out.getvalue() and "\\u001b[2J" in out.getvalue()
    assert "\x9b" not in out.getvalue() and "\x1b]0" not in out.getvalue()


def test_streams_are_what_they_were_after_the_block(monkeypatch):
    before = sys.stdout, sys.stderr
    with guarded_streams(), guarded_streams():
        assert sys.stdout.raw is before[0]  # one guard, however often it is asked for
    assert (sys.stdout, sys.stderr) == before


def test_files_and_lines_of_records_hold_control_characters_as_text_that_json_reads_back(tmp_path):
    line = to_json({"text": ATTACK})
    assert line.isprintable() and json.loads(line) == {"text": ATTACK}
    assert write_text(tmp_path / "page.md", ATTACK).read_text().isprintable()
    assert labels([ATTACK, "$x$"])[0].isprintable()


def test_markup_in_a_header_is_text(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", out := Terminal())
    print_table(["[red]a[/red]", "[/]"], [["[bold]x", "y"]])
    assert "[red]a[/red]" in out.getvalue() and "[/]" in out.getvalue() and "[bold]x" in out.getvalue()


def test_text_of_others_makes_no_markdown_and_no_html_in_a_page():
    text = "# Head\n- > quote\n```\n| a | b |\n|---|---|\n===\n[x]: http://e\n<b>bold</b> ![i](u) [l](u) \\<img src=x>"
    shown = markdown_text(text)
    assert "<" not in shown and "![" not in shown and "](" not in shown
    for line in shown.splitlines()[:-1]:
        assert line.removeprefix("- ").startswith("\\"), line
    assert inline_markdown(shown) == shown
    usual = "lr=1e-5 < 2e-5, a_b*c, 5 > 4, [0.1, 0.2] (n=3)\n- a list\n1. of things, #3"
    assert markdown_text(usual) == usual


@pytest.mark.parametrize("columns", [0, 1])
def test_a_terminal_of_no_width_gets_the_text_all_the_same(columns, monkeypatch):
    """That of `script` in a job without a terminal has 0 columns: no size was ever set."""
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 0, columns, 0, 0))
        print_text("no such file or directory", "  ", stream=terminal)
        terminal.flush()
        assert os.read(ours, 100).split() == [b"no", b"such", b"file", b"or", b"directory"]
    os.close(ours)
