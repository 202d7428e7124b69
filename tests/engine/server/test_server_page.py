"""What docs/engine.md shows is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evsys_engine.engine import Engine
from evsys_engine.server import background_server

PAGE = Path(__file__).parents[3] / "docs/engine.md"

pytest.importorskip("tinker")


def test_the_pages_loop_trains(model_dirs, tmp_path, capsys):
    [block] = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    engine = Engine.load(model_dirs["llama"], device="cpu", dtype="float32")
    with background_server(engine, tmp_path) as server:
        assert "http://127.0.0.1:8999" in block
        names = {}
        exec(compile(block.replace("http://127.0.0.1:8999", server.url), str(PAGE), "exec"), names)
        names["client"].close("success").result()
    losses = [float(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 3 and losses[-1] < losses[0]
