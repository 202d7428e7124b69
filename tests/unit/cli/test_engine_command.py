"""`evsys engine serve`: what it refuses before it loads anything, and what it says when it listens."""

from __future__ import annotations

import json

import pytest

from evsys_sdk.cli.main import main


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    monkeypatch.delenv("EVSYS_ENGINE_KEY", raising=False)


def serve(*options):
    return main(["engine", "serve", "--model", "tiny-random", *options])


def test_a_model_must_be_named(capsys):
    assert main(["engine", "serve"]) == 1
    assert "--model" in capsys.readouterr().err


def test_an_address_beyond_this_machine_needs_a_key(capsys):
    pytest.importorskip("torch")
    assert serve("--host", "0.0.0.0") == 1
    assert "give a key" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["option", "environment"])
def test_a_key_the_client_would_refuse_is_refused_at_once(capsys, monkeypatch, where):
    pytest.importorskip("torch")
    if where == "environment":
        monkeypatch.setenv("EVSYS_ENGINE_KEY", "secret")
    assert serve(*(["--key", "secret"] if where == "option" else [])) == 1
    assert "tml-" in capsys.readouterr().err


def test_a_model_that_is_not_there_says_what_would_do(capsys):
    pytest.importorskip("torch")
    assert main(["engine", "serve", "--model", "/no/such/folder"]) == 1
    assert "is not a model" in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [True, False])
def test_it_says_in_one_line_where_it_listens(capsys, monkeypatch, tmp_path, as_json):
    pytest.importorskip("torch")
    from evsys_engine import server

    told = {}

    def stand_in(engine, checkpoints, address, *, on_ready):
        told.update(engine=engine, checkpoints=checkpoints, address=address)
        on_ready("http://127.0.0.1:1234")
        return True

    monkeypatch.setattr(server, "serve", stand_in)
    monkeypatch.setenv("EVSYS_CACHE", str(tmp_path))
    monkeypatch.setenv("EVSYS_ENGINE_KEY", "tml-from-the-environment")
    options = ["--port", "1234", "--checkpoints", str(tmp_path / "kept"), "--dtype", "float32"]
    assert serve(*options, *(["--json"] if as_json else [])) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    if as_json:
        said = json.loads(lines[0])
        assert (said["url"], said["model"], said["key"]) == ("http://127.0.0.1:1234", "tiny-random", True)
    else:
        assert "http://127.0.0.1:1234" in lines[0] and "key needed" in lines[0]
    assert told["address"].key == "tml-from-the-environment" and told["address"].port == 1234
    assert told["checkpoints"] == tmp_path / "kept"
    assert told["engine"].info.name == "tiny-random" and told["engine"].info.dtype == "float32"
