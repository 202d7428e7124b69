"""What goes wrong is wrapped between words on a terminal, and left as it is in a pipe."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from evsys_sdk.cli.main import main

CONFIG = """\
version: 1
name: wrapped
run:
  name: r0
  data: { path: data/train.jsonl }
  model: { name: any }
  algorithm: { kind: sft, params: { learning_rate: 1e-3, max_stepss: 4 } }
  backend: { kind: mokc }
metadata:
  benchmark:
    - { name: val, path: data/val, agent: chat }
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [80, 50])
def test_config_problems_break_between_words_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    assert main(["validate", "config.yaml"]) == 1
    plain = capsys.readouterr().err
    assert max(map(len, plain.splitlines())) > 80, "in a pipe a problem is a line"
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert main(["validate", "config.yaml"]) == 1
    wrapped = terminal.getvalue().splitlines()
    assert all(len(line) <= columns for line in wrapped)
    assert " ".join(" ".join(wrapped).split()) == " ".join(plain.split()), "no word is broken, none is lost"
