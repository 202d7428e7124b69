"""What others wrote reaches a terminal as text."""

from __future__ import annotations

import io
import json
import sys

from evsys_sdk.terminal import console_for, guarded_streams, visible

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
