"""Datasets and benchmarks by id and name from another machine: uploaded once, pulled once, read from `.evsys/`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from evsys_sdk.cli.main import main
from evsys_sdk.data import remote
from evsys_sdk.data.remote import DashboardSource
from evsys_sdk.data.workspace import Workspace
from evsys_sdk.errors import EvsysAuthError, EvsysError, WorkspaceError

ROWS = [{"q": f"{n}+1?", "a": f"{n + 1}"} for n in range(50)]
TASK = {"instruction": "1+1?", "verifier": {"kind": "in_process", "fn_name": "exact_match", "expected": "2"}}


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def source(server: Any) -> DashboardSource:
    return DashboardSource(server.url, server.key, "p1")


@pytest.fixture
def machine(tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder of another machine, with the dashboard in its environment."""

    def change_to(name: str) -> Path:
        folder = tmp_path / name
        (folder / ".evsys").mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(folder)
        return folder

    monkeypatch.setenv("EVSYS_API_URL", server.url)
    monkeypatch.setenv("EVSYS_API_KEY", server.key)
    monkeypatch.setenv("EVSYS_PROJECT_ID", "p1")
    monkeypatch.delenv("EVSYS_OFFLINE", raising=False)
    return change_to


def test_a_dataset_goes_from_one_machine_to_another_by_name_and_id(machine, capsys, server):
    first = machine("one")
    write(first / "sums.jsonl", ROWS)
    assert main(["data", "add", "sums.jsonl", "--name", "sums"]) == 0
    capsys.readouterr()
    assert main(["data", "upload", "sums", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["status"], said["ref"]) == ("created", said["id"])
    assert main(["data", "upload", "sums"]) == 0
    assert capsys.readouterr().out.startswith(f"unchanged: dataset {said['ref']} (50 rows)")
    second = machine("two")
    path = Workspace.find(second).pull_dataset("sums")
    assert path.read_bytes() == (first / "sums.jsonl").read_bytes()
    assert path.is_relative_to(second / ".evsys" / "datasets")
    # From here on the file on disk is read: no server is needed.
    server.kill()
    assert Workspace.find(second).pull_dataset(said["ref"]) == path
    assert Workspace.find(second).pull_dataset("sums") == path


def test_a_config_on_another_machine_names_what_was_uploaded(machine, capsys):
    first = machine("one")
    write(first / "sums.jsonl", ROWS)
    write(first / "tools" / "tasks.jsonl", [TASK])
    assert main(["data", "add", "sums.jsonl", "--name", "sums"]) == 0
    assert main(["data", "upload", "sums"]) == 0
    assert main(["benchmark", "upload", "./tools", "--split", "val"]) == 0
    assert "created: benchmark tools-v1-" in capsys.readouterr().out
    second = machine("two")
    (second / "config.yaml").write_text(
        """name: sums
metadata: {benchmark: [{name: tools, split: val, run_every: 10}]}
run:
  name: sft
  model: {name: mock-tiny}
  backend: {kind: mock}
  algorithm: {kind: sft, params: {max_steps: 1}}
  data:
    dataset_name: sums
    transforms: [{kind: jsonl_to_chat, params: {user_template: "{q}", assistant_template: "{a}"}}]
"""
    )
    assert main(["validate", "config.yaml", "--deep"]) == 0, capsys.readouterr()
    assert len(list((second / ".evsys" / "datasets").glob("sums-v1-*.jsonl"))) == 1
    assert len(list((second / ".evsys" / "benchmarks").glob("tools-v1-*.jsonl"))) == 1


def test_what_no_one_has_is_named_with_what_there_is(machine):
    folder = machine("one")
    with pytest.raises(WorkspaceError, match=r"no dataset 'nothing' in(.|\n)*at http://127.0.0.1"):
        Workspace.find(folder).pull_dataset("nothing")


def test_an_upload_that_was_cut_short_is_taken_up(source, tmp_path, monkeypatch, server):
    monkeypatch.setattr(remote, "CHUNK_BYTES", 300)
    workspace = Workspace(tmp_path / ".evsys")
    entry = workspace.add(write(tmp_path / "sums.jsonl", ROWS), name="sums")
    calls: list[str] = []
    call = DashboardSource._call

    def cut(self: DashboardSource, method: str, path: str, **how: Any) -> Any:
        calls.append(f"{method} {path.rpartition('suites/')[2]}")
        if len(calls) == 4:
            raise WorkspaceError("cut")
        return call(self, method, path, **how)

    monkeypatch.setattr(DashboardSource, "_call", cut)
    with pytest.raises(WorkspaceError, match="cut"):
        source.upload(entry, workspace.path(entry))
    other = Workspace(tmp_path / "other", source=source)
    with pytest.raises(WorkspaceError, match="no dataset"):
        other.pull_dataset("sums")
    calls[:] = ["again"] * 10
    assert source.upload(entry, workspace.path(entry)).status == "created"
    starts = [int(one.rpartition("=")[2]) for one in calls if one.startswith("PUT")]
    assert starts[0] > 0  # what had arrived is not sent again
    assert other.pull_dataset("sums").read_bytes() == workspace.path(entry).read_bytes()


def test_a_pull_that_is_cut_short_leaves_nothing(source, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "PAGE_ROWS", 10)
    workspace = Workspace(tmp_path / ".evsys")
    entry = workspace.add(write(tmp_path / "sums.jsonl", ROWS), name="sums")
    source.upload(entry, workspace.path(entry))
    call = DashboardSource._call

    def cut(self: DashboardSource, method: str, path: str, **how: Any) -> Any:
        if "from=20" in path:
            raise WorkspaceError("cut")
        return call(self, method, path, **how)

    other = Workspace(tmp_path / "other", source=source)
    with monkeypatch.context() as patch:
        patch.setattr(DashboardSource, "_call", cut)
        with pytest.raises(WorkspaceError, match="cut"):
            other.pull_dataset("sums")
    assert [path.name for path in (tmp_path / "other" / "datasets").iterdir()] == [".lock"]
    assert other.pull_dataset("sums").read_bytes() == workspace.path(entry).read_bytes()


def test_rows_that_changed_on_their_way_are_not_kept(source, tmp_path, monkeypatch):
    workspace = Workspace(tmp_path / ".evsys")
    entry = workspace.add(write(tmp_path / "sums.jsonl", ROWS), name="sums")
    source.upload(entry, workspace.path(entry))
    call = DashboardSource._call

    def changed(self: DashboardSource, method: str, path: str, **how: Any) -> Any:
        answer = call(self, method, path, **how)
        if "/rows?" in path:
            answer["rows"][3] = json.dumps({"q": "other", "a": "x"})
        return answer

    monkeypatch.setattr(DashboardSource, "_call", changed)
    with pytest.raises(WorkspaceError, match="sha256 differs"):
        Workspace(tmp_path / "other", source=source).pull_dataset("sums")


def test_hostile_rows_go_there_and_back_byte_for_byte(source, tmp_path):
    """Written by hand: the workspace would tidy them."""
    import hashlib

    data = b'{"a": "x"}\r\n{"nul": "\\u0000", "half": "\\ud800"}\n' + '{"é": "日本\u2028"}\n'.encode()
    about = {"kind": "dataset", "name": "odd", "sha256": hashlib.sha256(data).hexdigest(), "n_rows": 3}
    begun = source._call("POST", remote.SUITES_PATH, json=about)
    place = f"{remote.SUITES_PATH}{begun['suite']['id']}"
    source._call("PUT", f"{place}/rows/?from=0", data=gzip.compress(data))
    source._call("POST", f"{place}/complete/")
    assert Workspace(tmp_path / ".evsys", source=source).pull_dataset("odd").read_bytes() == data


def test_a_server_that_is_away_is_an_error_in_words(tmp_path):
    away = DashboardSource("http://127.0.0.1:9", "evk_x", "p1")
    with pytest.raises(WorkspaceError, match="did not answer"):
        Workspace(tmp_path / ".evsys", source=away).pull_dataset("sums")


def test_a_wrong_key_is_refused_with_the_reason(server, tmp_path):
    with pytest.raises(EvsysAuthError, match="not known here"):
        DashboardSource(server.url, "evk_wrong", "p1").describe("dataset", "sums")
    with pytest.raises(EvsysError, match=r"no project 'p2'|no dataset"):
        DashboardSource(server.url, server.key, "p2").describe("dataset", "sums")


@pytest.mark.parametrize("missing", ["EVSYS_API_URL", "EVSYS_API_KEY", "EVSYS_PROJECT_ID"])
def test_an_upload_without_a_dashboard_says_what_to_set(missing):
    environ = {"EVSYS_API_URL": "http://x", "EVSYS_API_KEY": "k", "EVSYS_PROJECT_ID": "p"} | {missing: ""}
    assert DashboardSource.from_environment(environ) is None
    with pytest.raises(EvsysAuthError, match=f"set {missing}"):
        DashboardSource.required(environ)
    assert DashboardSource.from_environment({**environ, missing: "http://y", "EVSYS_OFFLINE": "1"}) is None
