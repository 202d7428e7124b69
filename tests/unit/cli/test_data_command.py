from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evsys_sdk.cli.main import main

SUMS = [{"q": "1+1", "a": "2"}, {"q": "2+2", "a": "4"}, {"q": "2+2", "a": "4"}]
TASK = {"instruction": "1+1?", "verifier": {"kind": "in_process", "fn_name": "exact_match", "expected": "2"}}
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
CONFIG = """
name: demo
runs:
  - name: first
    data: &data
      dataset_name: sums
      transforms:
        - kind: dedupe
        - kind: jsonl_to_chat
          params: {user_template: "{q}", assistant_template: "{a}"}
    model: {name: tiny}
    algorithm: {kind: sft}
    backend: {kind: mock}
  - name: second
    data: {path: more.jsonl}
    model: {name: tiny}
    algorithm: {kind: sft}
    backend: {kind: mock}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder with some files, in which the commands run."""
    (tmp_path / "pyproject.toml").touch()
    files: dict[str, list[Any]] = {"sums": SUMS, "tasks": [TASK], "chat": [CHAT], "more": SUMS * 3}
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def evsys(project: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `evsys data ...` and gives its stdout; a refusal is an assertion error."""

    def run(*words: str, code: int = 0) -> str:
        status = main(["data", *words])
        out, err = capsys.readouterr()
        assert status == code, err
        return out if code == 0 else err

    return run


@pytest.fixture
def evsys_json(evsys: Callable[..., str]) -> Callable[..., Any]:
    return lambda *words: json.loads(evsys(*words, "--json"))


def test_add_prints_the_id_that_pull_answers_to(evsys: Any, evsys_json: Any, project: Path) -> None:
    entry = evsys_json("add", "sums.jsonl", "--name", "sums", "--note", "by hand")
    assert (entry["version"], entry["n_rows"], entry["new"], entry["lineage"]["note"]) == (1, 3, True, "by hand")
    path = evsys("pull", entry["id"]).strip()
    assert path == entry["path"] == str(project / ".evsys" / "datasets" / f"{entry['id']}.jsonl")
    assert Path(path).read_text() == (project / "sums.jsonl").read_text()


def test_adding_known_content_says_so_and_warns_when_the_name_means_another(evsys: Any) -> None:
    evsys("add", "sums.jsonl", "--name", "sums")
    assert "already there: dataset sums v1, 3 rows" in evsys("add", "sums.jsonl", "--name", "sums")
    evsys("add", "more.jsonl", "--name", "sums")
    assert "means its newest version, v2" in evsys("add", "sums.jsonl", "--name", "sums")


def test_a_parent_is_recorded(evsys_json: Any) -> None:
    parent = evsys_json("add", "sums.jsonl", "--name", "sums")
    child = evsys_json("add", "more.jsonl", "--name", "more", "--parent", "sums")
    assert child["lineage"]["parents"] == [parent["id"]]


def test_list_is_aligned_when_piped_and_tells_what_is_broken(evsys: Any, evsys_json: Any) -> None:
    evsys("add", "sums.jsonl", "--name", "a-long-name")
    entry = evsys_json("add", "more.jsonl", "--name", "b")
    evsys("add", "tasks.jsonl", "--name", "tasks", "--benchmark")
    os.truncate(entry["path"], 10)
    header, first, second, fault = evsys("list").splitlines()
    assert [header.index("kind"), header.index("rows")] == [first.index("dataset"), first.index("3 ")]
    assert second.split()[:4] == ["tasks", "v1", "benchmark", "1"]
    assert fault.startswith(f"not to be trusted: dataset {entry['id']}: its data file has 10 bytes")


def test_list_as_json_has_every_entry_with_its_problem(evsys: Any, evsys_json: Any) -> None:
    evsys("add", "sums.jsonl", "--name", "sums")
    broken = evsys_json("add", "more.jsonl", "--name", "more")
    evsys("add", "tasks.jsonl", "--name", "tasks", "--benchmark")
    Path(broken["path"]).unlink()
    found = {entry["id"]: entry["problem"] for entry in evsys_json("list")}
    assert list(found.values()) == [None, None, "its data file is missing"] and list(found)[2] == broken["id"]
    assert [entry["kind"] for entry in evsys_json("list", "--benchmark")] == ["benchmark"]


def test_an_empty_workspace_says_what_to_do_and_is_not_created(evsys: Any, project: Path) -> None:
    assert "next: evsys data add PATH --name NAME" in evsys("list")
    assert not (project / ".evsys").exists()


def test_show_counts_formats_and_fields(evsys: Any, evsys_json: Any, project: Path) -> None:
    with open(project / "sums.jsonl", "a") as handle:
        handle.write(json.dumps(CHAT) + "\n")
    evsys("add", "sums.jsonl", "--name", "mixed")
    shown = evsys_json("show", "mixed")
    assert shown["formats"] == {"unknown": 3, "chat_messages": 1}
    assert shown["fields"] == {"q": 3, "a": 3, "messages": 1}
    assert shown["first_row"] == SUMS[0] and shown["complete"] is True
    text = evsys("show", "mixed")
    assert re.search(r"formats +unknown 3, chat_messages 1\n", text) and text.endswith("first row\n  q: 1+1\n  a: 2\n")


def test_show_and_pull_find_a_benchmark_without_being_told(evsys: Any, evsys_json: Any) -> None:
    added = evsys_json("add", "tasks.jsonl", "--name", "tasks", "--benchmark")
    assert evsys_json("show", "tasks")["kind"] == "benchmark"
    assert evsys("pull", "tasks").strip() == added["path"]


def test_with_both_kinds_the_flag_decides(evsys: Any, evsys_json: Any) -> None:
    evsys("add", "tasks.jsonl", "--name", "tasks", "--benchmark")
    evsys("add", "tasks.jsonl", "--name", "tasks")
    assert evsys_json("pull", "tasks")["kind"] == "dataset"
    assert evsys_json("pull", "tasks", "--benchmark")["kind"] == "benchmark"


@pytest.mark.parametrize("verb", ["show", "pull", "preview"])
def test_a_wrong_name_is_answered_with_the_closest(verb: str, evsys: Any) -> None:
    evsys("add", "sums.jsonl", "--name", "sums")
    assert "no dataset 'sumz'" in (said := evsys(verb, "sumz", code=1)) and "closest: sums" in said


@pytest.mark.parametrize("verb", ["show", "pull", "preview"])
def test_a_changed_file_is_refused_by_every_reader(verb: str, evsys: Any, evsys_json: Any) -> None:
    path = Path(evsys_json("add", "sums.jsonl", "--name", "sums")["path"])
    path.chmod(0o644)
    path.write_text(path.read_text().replace("1+1", "1+2"))
    assert "was changed" in evsys(verb, "sums", code=1)


def test_a_workspace_can_be_named(evsys: Any, evsys_json: Any, project: Path) -> None:
    evsys("add", "sums.jsonl", "--name", "sums", "--workspace", "elsewhere")
    assert (project / "elsewhere" / "datasets").is_dir() and not (project / ".evsys").exists()
    assert len(evsys_json("list", "--workspace", "elsewhere")) == 1


def test_preview_of_a_config_shows_rows_after_its_transforms(evsys: Any, evsys_json: Any) -> None:
    evsys("add", "sums.jsonl", "--name", "sums")
    seen = evsys_json("preview", "config.yaml")
    [part] = seen["parts"]
    assert (seen["run"], part["name"], part["rows_before"], part["rows_after"]) == ("first", "data", 3, 2)
    assert part["formats"] == {"chat_messages": 2}
    text = evsys("preview", "config.yaml", "-n", "1")
    assert "3 rows -> 2 after transforms\nformat: 2 chat_messages\n" in text
    assert "\n  user: 1+1\n  assistant: 2\n" in text and "... and 1 more" in text


def test_preview_raw_shows_rows_before_the_transforms(evsys: Any, evsys_json: Any) -> None:
    evsys("add", "sums.jsonl", "--name", "sums")
    [part] = evsys_json("preview", "config.yaml", "--raw")["parts"]
    assert part["rows"] == SUMS and part["rows_after"] == 3


def test_preview_of_another_run_of_the_config(evsys: Any, evsys_json: Any) -> None:
    seen = evsys_json("preview", "config.yaml", "--run", "second")
    assert seen["run"] == "second" and seen["parts"][0]["rows_after"] == 9
    assert "closest: second" in evsys("preview", "config.yaml", "--run", "secnd", code=1)


CHATS = [
    {
        "messages": [
            {"role": "user", "content": "1+1"},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "2+2"},
            {"role": "assistant", "content": "four"},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "1+1"},
            {"role": "assistant", "content": "three", "weight": 0},
            {"role": "user", "content": "no"},
            {"role": "assistant", "content": "two"},
        ]
    },
]


@pytest.fixture
def chats(project: Path) -> Callable[..., str]:
    """A config over two chats with these settings of the algorithm."""
    (project / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))

    def write(kind: str = "sft", **params: Any) -> str:
        run = {
            "name": "r0",
            "data": {"path": "chats.jsonl"},
            "model": {"name": "tiny"},
            "algorithm": {"kind": kind, "params": params},
            "backend": {"kind": "mock"},
        }
        (project / "chats.yaml").write_text(json.dumps({"name": "chats", "run": run}))
        return "chats.yaml"

    return write


def test_tokens_show_what_is_learnt_of_each_row(evsys: Any, chats: Any) -> None:
    first, second = evsys("preview", chats(), "--tokens").split("\n[1]\n")
    assert re.findall(r"\[\[(.*?)\]\]", first) == ["two<|im_end|>", "four<|im_end|>"]
    assert re.findall(r"\[\[(.*?)\]\]", second) == ["two<|im_end|>"] and "three<|im_end|>" in second
    # The mock has one token for a byte and one for a mark: "two", "four" and the ends of their turns.
    assert re.search(r"\d+ tokens, 9 learnt\n", first)


def test_tokens_follow_the_settings_of_the_algorithm(evsys: Any, evsys_json: Any, chats: Any) -> None:
    shown = evsys("preview", chats(train_on="last"), "--tokens", "-n", "1")
    assert re.findall(r"\[\[(.*?)\]\]", shown) == ["four<|im_end|>"]
    [[[sequence], _]] = [part["tokens"] for part in evsys_json("preview", chats(max_length=12), "--tokens")["parts"]]
    assert sum(span["n_tokens"] for span in sequence["spans"]) == 12 and sequence["n_cut"] > 0
    assert "more are behind max_length" in evsys("preview", "chats.yaml", "--tokens")


def test_an_algorithm_that_does_not_imitate_shows_the_prompt(evsys: Any, chats: Any) -> None:
    shown = evsys("preview", chats("sdft"), "--tokens", "-n", "1")
    assert "[[" not in shown and ", 0 learnt" in shown and "four" not in shown and "2+2" in shown


def test_tokens_need_a_config_and_the_transforms(evsys: Any, chats: Any) -> None:
    assert "needs a config (.yaml)" in evsys("preview", "chats.jsonl", "--tokens", code=1)
    assert "leave out --raw" in evsys("preview", chats(), "--tokens", "--raw", code=1)


def test_preview_of_a_config_looks_in_the_workspace_beside_it(
    evsys: Any, evsys_json: Any, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evsys("add", "sums.jsonl", "--name", "sums")
    monkeypatch.chdir(project.parent)
    assert evsys_json("preview", str(project / "config.yaml"))["parts"][0]["rows_after"] == 2


def test_preview_of_a_file_shows_its_rows_as_they_are(evsys: Any, evsys_json: Any) -> None:
    text = evsys("preview", "chat.jsonl")
    assert text == "chat.jsonl\n1 row\nformat: 1 chat_messages\n\n[0]\n  user: hi\n  assistant: hello\n\n"
    assert evsys_json("preview", "sums.jsonl", "-n", "2")["parts"][0]["rows"] == SUMS[:2]


def test_preview_of_a_file_that_is_not_there_does_not_search_the_workspace(evsys: Any) -> None:
    assert evsys("preview", "data/nope.jsonl", code=1).startswith("no such file: ")


@pytest.mark.parametrize("target", ["sums.jsonl", "sums"])
def test_run_with_a_target_that_has_no_runs_is_refused(target: str, evsys: Any) -> None:
    assert "--run names a run of a config" in evsys("preview", target, "--run", "first", code=1)


def test_preview_shows_images_calls_and_targets(evsys: Any, project: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "look\nhere"}, image]},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "zoom"}]},
    ]
    (project / "rich.jsonl").write_text(json.dumps({"messages": messages, "target_assistant": "a cat"}))
    text = evsys("preview", "rich.jsonl")
    assert "  user: look\n    here [1 image]\n" in text
    assert '  assistant: [calls [{"name": "zoom"}]]\n  assistant (target): a cat\n' in text


def test_a_row_cannot_drive_the_terminal(evsys: Any, project: Path) -> None:
    (project / "evil.jsonl").write_text(json.dumps({"q": "\x1b[2Jgone\u202e"}))
    assert "  q: \\x1b[2Jgone\\u202e\n" in evsys("preview", "evil.jsonl")


def test_a_long_text_is_cut_for_people_and_whole_for_programs(evsys: Any, evsys_json: Any, project: Path) -> None:
    (project / "long.jsonl").write_text(json.dumps({"q": "x" * 5000}))
    assert "x ... (+3000 characters)\n" in evsys("preview", "long.jsonl")
    assert evsys_json("preview", "long.jsonl")["parts"][0]["rows"] == [{"q": "x" * 5000}]


def test_a_malformed_line_is_told_without_a_traceback(evsys: Any, project: Path) -> None:
    (project / "bad.jsonl").write_text('{"a": 1}\n{"a": \n')
    assert evsys("add", "bad.jsonl", "--name", "bad", code=1).startswith("bad.jsonl:2: not valid JSON")
    assert "bad.jsonl:2: not valid JSON" in evsys("preview", "bad.jsonl", code=1)


def test_on_a_terminal_the_output_is_styled(evsys: Any, project: Path) -> None:
    evsys("add", "sums.jsonl", "--name", "sums")
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "evsys_sdk.cli.main", "data", "preview", "sums"]
    environ = {**os.environ, "TERM": "xterm-256color"}
    environ.pop("NO_COLOR", None)
    subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, check=True, cwd=project, env=environ)
    os.close(theirs)
    shown = os.read(ours, 10000).decode()
    os.close(ours)
    assert "\x1b[1;36mq: \x1b[0m1+1" in shown


def test_data_without_a_verb_shows_the_usage(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data"]) == 1
    assert "Usage: evsys data" in capsys.readouterr().err


def test_a_preview_marks_the_messages_that_are_not_learnt(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "bad", "weight": 0}]
    path.write_text(json.dumps({"messages": said}) + "\n")
    assert main(["data", "preview", str(path)]) == 0
    assert "assistant (weight 0: not learnt): bad" in capsys.readouterr().out
