"""`evsys mcp`, driven by the official client: in memory, and as a process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
import pytest
import yaml
from anyio.from_thread import start_blocking_portal
from mcp import Client, StdioServerParameters

from evsys_sdk.cli.main import main
from evsys_sdk.mcp_server.budget import LaunchBudget
from evsys_sdk.mcp_server.project import ProjectFolder, find_project
from evsys_sdk.mcp_server.server import EvsysServer
from evsys_sdk.mcp_server.tools import TOOLS
from evsys_sdk.record.processes import lock_of

SECONDS = 300.0
"""How long a test waits for another process at most."""
CANARY = "canary7351"
"""In every row of the test benchmark, and nowhere else."""
READ_ONLY = {"history", "context", "show", "compare", "list", "schema", "validate", "rollouts", "follow"}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tasks(words: list[str], mark: str = "") -> list[dict[str, Any]]:
    return [
        {
            "task_id": f"{word}{mark}",
            "instruction": f"say {word}{mark}",
            "verifier": {"kind": "in_process", "fn_name": "exact_match", "expected": f"{word}{mark}"},
        }
        for word in words
    ]


def make_project(root: Path) -> Path:
    """A research project with training rows, a validation and a test benchmark, and a config."""
    words = ["red", "green", "blue", "black", "white", "grey"]
    write_rows(root / "data/train.jsonl", [{"prompt": f"say {word}", "completion": word} for word in words] * 4)
    write_rows(root / "bench/val/tasks.jsonl", tasks(words[:4]))
    write_rows(root / "bench/test/tasks.jsonl", tasks(words[4:], mark=CANARY))
    (root / "pyproject.toml").touch()
    write_config(root, "first")
    return root


def write_config(root: Path, name: str, *, rate: float = 1e-3, file: str = "config.yaml", **top: Any) -> Path:
    entry = {"path": "bench/val/tasks.jsonl", "metrics": ["pass@1"], "baseline": True}
    config = {
        "version": 1,
        "name": name,
        "output_dir": "./outputs",
        "metadata": {
            "hypothesis": f"a rate of {rate} learns the words",
            "success_metric": "val/words/pass@1",
            "benchmark": [
                {**entry, "name": "words", "split": "val"},
                {**entry, "name": "words", "split": "test", "path": "bench/test/tasks.jsonl"},
            ],
        },
        "run": {
            "name": "r0",
            "data": {"path": "data/train.jsonl", "transforms": [{"kind": "jsonl_to_chat"}]},
            "model": {"name": "Qwen/Qwen3-4B"},
            "algorithm": {"kind": "sft", "params": {"learning_rate": rate, "num_epochs": 2}},
            "backend": {"kind": "mock"},
        },
        **top,
    }
    (root / file).write_text(yaml.safe_dump(config))
    return root / file


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A project in which two experiments have ended; tests read it and add nothing but notes."""
    root = make_project(tmp_path_factory.mktemp("finished"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert main(["run", "config.yaml", "--quiet"]) == 0
        write_config(root, "second", rate=1e-2)
        assert main(["run", "config.yaml", "--quiet"]) == 0
    return root


@pytest.fixture
def store(finished, monkeypatch) -> Path:
    monkeypatch.chdir(finished)
    return finished


@pytest.fixture
def new_project(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_project(tmp_path)


def server_of(root: Path, *, allow_launch: bool = False, **limits: Any) -> EvsysServer:
    folder = ProjectFolder(folder=root, named_by="--project")
    return EvsysServer(folder, allow_launch=allow_launch, budget=LaunchBudget(**limits))


def ask(server: EvsysServer, *calls: tuple[str, dict[str, Any]]) -> list[Any]:
    """The results of some calls, in memory."""

    async def run() -> list[Any]:
        async with Client(server.protocol_server()) as client:
            return [await client.call_tool(name, arguments) for name, arguments in calls]

    return anyio.run(run)


def ask_one(server: EvsysServer, name: str, /, **arguments: Any) -> Any:
    return ask(server, (name, arguments))[0]


def process_of(root: Path, *words: str, **environ: str) -> StdioServerParameters:
    command = ["-P", "-m", "evsys_sdk.cli.main", "mcp", "--project", str(root), *words]
    return StdioServerParameters(command=sys.executable, args=command, env={**os.environ, **environ}, cwd="/")


def wait_until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.05)


def words_of(name: str, arguments: dict[str, Any]) -> list[str]:
    spec = next(spec for spec in TOOLS if spec.name == name)
    return spec.arguments(**arguments).words()


SAME = [
    ("history", {}),
    ("history", {"limit": 1, "statuses": ["completed"], "metrics": ["pass@1>=0"], "tags": []}),
    ("context", {}),
    ("context", {"tokens": 500}),
    ("show", {}),
    ("show", {"experiment": "first"}),
    ("show", {"experiment": "outputs/first.experiment_result.json"}),
    ("compare", {"experiments": ["first", "second"]}),
    ("compare", {"experiments": ["first:r0", "second"], "metric": "val/words/pass@1"}),
    ("list", {}),
    ("list", {"registry": "algorithms"}),
    ("schema", {}),
    ("schema", {"kind": "config"}),
    ("schema", {"kind": "algorithm"}),
    ("schema", {"kind": "algorithm", "name": "sft"}),
    ("validate", {"path": "config.yaml"}),
    ("validate", {"path": "config.yaml", "overrides": ["run.algorithm.params.learning_rate=0.1"]}),
    ("rollouts", {"experiment": "first"}),
    ("rollouts", {"experiment": "second/r0", "step": "0", "arms": ["r0"], "tasks": ["red"], "benchmark": "words"}),
    ("follow", {"experiment": "first"}),
    ("follow", {"experiment": "second", "since": 3, "limit": 2}),
    ("stop", {"experiment": "first"}),
]
"""Calls whose answers do not depend on when they are made."""


@pytest.mark.parametrize(("name", "arguments"), SAME, ids=lambda value: value if isinstance(value, str) else "")
def test_a_tool_answers_what_its_verb_prints_byte_for_byte(store, capsys, name, arguments):
    result = ask_one(server_of(store, allow_launch=True), name, **arguments)
    assert not result.is_error, result.content[0].text
    capsys.readouterr()
    assert main(words_of(name, arguments)) == 0
    printed = capsys.readouterr().out
    assert result.content[0].text + "\n" == printed
    assert CANARY not in printed  # a row of the test benchmark
    assert result.structured_content == json.loads(printed)


def test_the_calls_above_and_those_that_write_are_all_tools():
    assert {name for name, _ in SAME} | {"launch", "conclude"} == {spec.name for spec in TOOLS}


ODD = ("failed", "unscored", "hidden", "broken", "cut", "empty")


@pytest.fixture(scope="module")
def odd_records(tmp_path_factory) -> Path:
    """A project whose records are no ordinary ones: see `ODD`."""
    root = make_project(tmp_path_factory.mktemp("odd"))
    (root / "boom.py").write_text(
        "from evsys_sdk import register_transform\n\n\n"
        "@register_transform('boom')\nclass Boom:\n"
        "    def __call__(self, rows):\n        raise OSError('no \\x1b[31mrows')\n"
    )
    data = {"path": "data/train.jsonl", "transforms": [{"kind": "boom"}]}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        write_config(root, "unscored", metadata={"tags": ["\u202eodd"]})
        assert main(["run", "config.yaml", "--quiet"]) == 0
        config = yaml.safe_load((root / "config.yaml").read_text())
        config["run"]["data"] = data
        write_config(root, "failed", run=config["run"], imports=["boom"])
        assert main(["run", "config.yaml", "--quiet"]) == 2
        write_config(root, "hidden", metadata={"hypothesis": "\x1b]8;;x\x07link \u202e\u200b\U000e0041 a\ttab\u0085"})
        assert main(["run", "config.yaml", "--quiet"]) == 0
    whole = (root / "outputs/unscored.experiment_result.json").read_text()
    for name, text in (("broken", '{"name": [1, 2'), ("cut", whole[: len(whole) // 2]), ("empty", "")):
        (root / f"outputs/{name}.experiment_result.json").write_text(text)
    return root


ODD_CALLS = [
    *((tool, {"experiment": name}) for tool in ("show", "follow", "rollouts") for name in ODD),
    *[
        ("history", {}),
        ("history", {"statuses": ["failed", "unreadable"]}),
        ("context", {}),
        ("context", {"tokens": 60}),
    ],
    *[("compare", {"experiments": ["failed", "unscored"]}), ("compare", {"experiments": ["hidden", "unscored"]})],
    *[("compare", {"experiments": ["hidden", "broken"]}), ("show", {}), ("validate", {"path": "config.yaml"})],
]


@pytest.mark.parametrize(("name", "arguments"), ODD_CALLS, ids=str)
def test_odd_records_are_answered_as_the_verb_answers_them(odd_records, monkeypatch, capsys, name, arguments):
    monkeypatch.chdir(odd_records)
    result = ask_one(server_of(odd_records), name, **arguments)
    capsys.readouterr()
    code = main(words_of(name, arguments))
    said = capsys.readouterr()
    printed = json.loads(said.out)
    assert result.is_error == (code == 1)
    assert result.structured_content == cleaned(printed)
    if code:
        assert result.content[0].text == cleaned(printed["error"])
    elif cleaned(printed) == printed:  # else the answer has less: control characters are taken out
        assert result.content[0].text + "\n" == said.out


def test_a_project_without_experiments_is_answered_as_the_verb_answers_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, arguments in (("history", {}), ("context", {}), ("show", {}), ("rollouts", {}), ("list", {})):
        result = ask_one(server_of(tmp_path), name, **arguments)
        capsys.readouterr()
        assert result.is_error == (main(words_of(name, arguments)) == 1), name
        assert result.structured_content == json.loads(capsys.readouterr().out), name


HIDDEN = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u200b\\u202e\\U000e0041]")


def cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return HIDDEN.sub("", value)
    if isinstance(value, dict):
        return {key: cleaned(item) for key, item in value.items()}
    return [cleaned(item) for item in value] if isinstance(value, list) else value


REFUSED = [
    ("show", {"experiment": "frist"}),
    ("compare", {"experiments": ["first", "nothing"]}),
    ("list", {"registry": "algoritm"}),
    ("schema", {"kind": "algorithm", "name": "sftt"}),
    ("validate", {"path": "nothing.yaml"}),
    ("validate", {"path": "config.yaml", "overrides": ["run.algorithm.kind=sftt"]}),
    ("rollouts", {"experiment": "first", "tasks": ["reed"]}),
    ("show", {"experiment": "x" * 300}),
    ("follow", {"experiment": "first", "since": 10**9}),
    ("launch", {"path": "config.yaml", "overrides": ["run.algorithm.kind=sftt"]}),
]


@pytest.mark.parametrize(("name", "arguments"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_refusal_is_an_error_with_the_message_of_the_verb(store, capsys, name, arguments):
    result = ask_one(server_of(store, allow_launch=True), name, **arguments)
    words = [word for word in words_of(name, arguments) if word != "--detach"]
    capsys.readouterr()
    assert main(words) == 1
    said = capsys.readouterr()
    assert result.is_error
    assert result.structured_content == json.loads(said.out)
    assert result.content[0].text == json.loads(said.out)["error"]
    assert result.content[0].text in said.err


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("context", {"tokns": 5}, "context: 'tokns' is not an argument; closest: tokens; known: tags, tokens"),
        ("context", {"tokens": 0}, "context: tokens: Input should be greater than or equal to 1"),
        ("validate", {}, "validate: path: Field required"),
        ("launch", {"path": "config.yaml"}, "launch changes the project and this server is read-only; start it as"),
        ("histroy", {}, "'histroy' is not a tool; closest: history"),
    ],
)
def test_wrong_arguments_are_answered_with_the_right_words(store, name, arguments, message):
    result = ask_one(server_of(store), name, **arguments)
    assert result.is_error
    assert result.content[0].text.startswith(message)


def test_every_tool_and_argument_is_described_and_annotated(store):
    async def run() -> list[types.Tool]:
        async with Client(server_of(store, allow_launch=True).protocol_server()) as client:
            return list((await client.list_tools()).tools)

    found = anyio.run(run)
    assert [tool.name for tool in found] == [spec.name for spec in TOOLS]
    for tool in found:
        assert tool.description and tool.title and tool.annotations
        assert tool.annotations.read_only_hint is (tool.name in READ_ONLY)
        assert tool.annotations.destructive_hint is (tool.name == "stop")
        assert all(field.get("description") for field in tool.input_schema["properties"].values()), tool.name
        assert tool.input_schema["additionalProperties"] is False


def test_without_allow_launch_only_reading_tools_are_there(store):
    async def run() -> set[str]:
        async with Client(server_of(store).protocol_server()) as client:
            assert "Read-only" in (client.session.instructions or "")
            return {tool.name for tool in (await client.list_tools()).tools}

    assert anyio.run(run) == READ_ONLY


def test_resources_are_the_project_and_its_experiments(store, capsys):
    async def run() -> tuple[list[str], str, str, list[str]]:
        async with Client(server_of(store, max_runs=3).protocol_server()) as client:
            listed = [str(one.uri) for one in (await client.list_resources()).resources]
            project = (await client.read_resource("evsys://project")).contents[0].text
            experiment = (await client.read_resource("evsys://experiment/first")).contents[0].text
            templates = (await client.list_resource_templates()).resource_templates
            with pytest.raises(Exception, match="there is no experiment 'third'"):
                await client.read_resource("evsys://experiment/third")
            with pytest.raises(Exception, match="lies outside the project"):
                await client.read_resource("evsys://experiment/..%2F..%2Fetc")
            return listed, project, experiment, [one.uri_template for one in templates]

    listed, project, experiment, templates = anyio.run(run)
    assert listed == ["evsys://project", "evsys://experiment/second", "evsys://experiment/first"]
    assert templates == ["evsys://experiment/{name}"]
    assert json.loads(project) == {
        "project": str(store),
        "project_from": "--project",
        "root": str(store),
        "allow_launch": False,
        "budget": {"max_runs": 3, "runs_left": 3, "max_seconds": None, "seconds_left": None},
    }
    capsys.readouterr()
    assert main(["show", "first", "--json"]) == 0
    assert experiment + "\n" == capsys.readouterr().out


def test_no_row_of_a_test_benchmark_leaves(store):
    assert CANARY in (store / "bench/test/tasks.jsonl").read_text()
    for arguments in ({"experiment": "first", "step": "all", "limit": 200}, {}):
        result = ask_one(server_of(store), "rollouts", **arguments)
        assert "say red" in result.model_dump_json()
        assert CANARY not in result.model_dump_json()
    for arguments in (
        {"experiment": "first", "benchmark": "test/words"},
        {"experiment": "outputs/r0"},
        {"experiment": "bench/test/tasks.jsonl"},
        {"experiment": "first", "tasks": [f"white{CANARY}"]},
    ):
        result = ask_one(server_of(store), "rollouts", **arguments)
        assert result.is_error
        assert "say white" not in result.content[0].text


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "interrupted"])
def test_what_one_experiment_tests_on_does_not_leave_as_validation_rows_of_another(new_project, capsys, ended):
    assert main(["run", "config.yaml", "--quiet"]) == 0
    entry = {"path": "bench/test/tasks.jsonl", "split": "val", "name": "mine", "baseline": True}
    renamed = write_config(new_project, "second", metadata={"benchmark": [entry]})
    assert main(["run", str(renamed), "--quiet"]) == 0
    if not ended:
        (new_project / "outputs/second.experiment_result.json").unlink()
    for arguments in ({}, {"benchmark": "val/mine"}, {"step": "all"}):
        result = ask_one(server_of(new_project), "rollouts", experiment="second", **arguments)
        assert result.is_error and CANARY not in result.model_dump_json()
    capsys.readouterr()
    assert main(["rollouts", "second", "--no-test", "--diff", "untrained", "r0"]) == 0
    assert "0 of 0 tasks" in capsys.readouterr().out
    assert main(["rollouts", "second"]) == 0, "a person may still read them"
    assert CANARY in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("validate", {"path": "/etc/passwd"}),
        ("validate", {"path": "../config.yaml"}),
        ("validate", {"path": "link.yaml"}),
        ("validate", {"path": "config.yaml", "overrides": ["run.data.path=/etc/passwd"]}),
        ("validate", {"path": "config.yaml", "overrides": ["run.data.path='../../etc/passwd'"]}),
        ("validate", {"path": "config.yaml", "overrides": ["run.data={path: /etc/passwd}"]}),
        ("launch", {"path": "config.yaml", "overrides": ["deploy={kind: folder, params: {path: ../releases}}"]}),
        ("launch", {"path": "/tmp/config.yaml"}),
        ("launch", {"path": "outside.yaml"}),
        ("show", {"experiment": "../x.experiment_result.json"}),
        ("show", {"experiment": "/etc"}),
        ("compare", {"experiments": ["/etc/x:a"]}),
        ("follow", {"experiment": "/etc/passwd"}),
        ("conclude", {"experiment": "../x", "text": "t"}),
        ("validate", {"path": "a\x00b"}),
    ],
)
def test_paths_outside_the_project_are_refused(new_project, tmp_path_factory, name, arguments):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "config.yaml"
    elsewhere.write_text("secret: 1")
    (new_project / "link.yaml").symlink_to(elsewhere)
    write_config(new_project, "outside", file="outside.yaml", output_dir=str(elsewhere.parent / "outputs"))
    result = ask_one(server_of(new_project, allow_launch=True), name, **arguments)
    assert result.is_error
    assert f"lies outside the project {new_project}" in result.content[0].text
    assert not (elsewhere.parent / "outputs").exists()


HOSTILE = "\x1b[2J\x9b31m\u202egnp.exe\u2066\u200b\U000e0041\x07 after"


def test_control_characters_and_secrets_are_taken_out(new_project, capsys, monkeypatch):
    monkeypatch.setenv("MYSVC_API_KEY", "tomato-harvest-4711")
    config = write_config(new_project, "hostile")
    data = yaml.safe_load(config.read_text())
    data["metadata"]["hypothesis"] = f"{HOSTILE} tomato-harvest-4711 sk-abcdefghijklmnopqrstuvwxyz012345"
    config.write_text(yaml.safe_dump(data))
    assert main(["run", "config.yaml", "--quiet", "--steps", "1"]) == 0
    # A line of another program: `evsys conclude` itself would have redacted it.
    notes = new_project / "outputs/hostile.notes.jsonl"
    assert main(["conclude", "hostile", "--text", HOSTILE]) == 0
    notes.write_text(notes.read_text().replace(" after", " after tomato-harvest-4711"))
    calls = [("history", {}), ("show", {}), ("context", {}), ("show", {"experiment": HOSTILE})]
    for result in ask(server_of(new_project), *calls):
        sent = json.dumps(result.model_dump(mode="json"), ensure_ascii=False)
        values = json.dumps(result.structured_content, ensure_ascii=False) + result.content[0].text
        for text in (sent, values):
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2066-\u2069\U000e0041]", text)
            assert "tomato" not in text
            assert "sk-abc" not in text
        assert "\\u001b" not in values
    shown = ask_one(server_of(new_project), "show")
    assert shown.structured_content["conclusions"][0]["text"] == "[2J31mgnp.exeA after [redacted]".replace("A ", " ")
    assert json.loads(shown.content[0].text) == shown.structured_content


def test_follow_gives_each_event_once(store):
    server = server_of(store)
    whole = ask_one(server, "follow", experiment="first").structured_content
    kinds = [event["kind"] for event in whole["events"]]
    assert kinds[0] == "begun" and kinds[-1] == "ended" and "score" in kinds and "step" in kinds
    assert (whole["state"], whole["has_more"]) == ("completed", False)
    events, cursor = [], 0
    while True:
        page = ask_one(server, "follow", experiment="first", since=cursor, limit=1).structured_content
        events += page["events"]
        cursor = page["cursor"]
        if not page["has_more"]:
            break
    assert events == whole["events"]
    assert cursor == whole["cursor"]
    assert ask_one(server, "follow", experiment="first", since=cursor).structured_content["events"] == []


def test_conclude_writes_what_the_verb_writes(new_project, capsys):
    assert main(["run", "config.yaml", "--quiet", "--steps", "1"]) == 0
    arguments = {"experiment": "first", "text": "0.1 is too high; try 0.03"}
    result = ask_one(server_of(new_project, allow_launch=True), "conclude", **arguments)
    capsys.readouterr()
    assert main(words_of("conclude", arguments)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert result.structured_content | {"ts": ""} == printed | {"ts": ""}
    lines = [json.loads(line) for line in Path(printed["file"]).read_text().splitlines()]
    assert [line["text"] for line in lines] == [arguments["text"]] * 2


def test_launch_is_within_the_budget_and_equals_the_verb(new_project):
    server = server_of(new_project, allow_launch=True, max_runs=2, max_seconds=100)
    write_config(new_project, "wide", file="wide.yaml", n_repeats=3)
    refused = ask_one(server, "launch", path="wide.yaml")
    assert refused.is_error
    assert "wide needs 3 runs and 2 of the 2 runs of this server are left" in refused.content[0].text
    launched = ask_one(server, "launch", path="config.yaml").structured_content
    assert launched["command"] == ["evsys", "run", "--detach", "--set=budget.seconds=100", "--json", "config.yaml"]
    assert launched["budget"] == {"seconds": 100.0}
    record = Path(launched["record"])
    wait_until(lambda: record.is_file() and not lock_is_held(record), "the end of the experiment")
    assert server.session.budget.runs_left() == 1
    left = server.session.budget.seconds_left()
    assert left is not None and 0 < left < 100
    # The same experiment again takes no more runs; its earlier seconds are not counted twice.
    again = ask_one(server, "launch", path="config.yaml").structured_content
    assert again["budget"] == {"seconds": 100.0}
    wait_until(lambda: not lock_is_held(record), "the end of the experiment")
    assert server.session.budget.runs_left() == 1
    write_config(new_project, "two", file="two.yaml", n_repeats=2)
    assert "two needs 2 runs and 1 of the 2" in ask_one(server, "launch", path="two.yaml").content[0].text
    printed = subprocess.run(
        [sys.executable, "-m", "evsys_sdk.cli.main", *words_of("launch", {"path": "config.yaml"})],
        capture_output=True,
        check=True,
        timeout=SECONDS,
    )
    assert json.loads(printed.stdout).keys() == launched.keys()
    wait_until(lambda: not lock_is_held(record), "the end of the experiment")


def lock_is_held(record: Path) -> bool:
    from evsys_sdk.record.layout import is_held

    return is_held(lock_of(record))


def test_spent_seconds_refuse_a_launch(new_project):
    server = server_of(new_project, allow_launch=True, max_seconds=0.5)
    refused = ask_one(server, "launch", path="config.yaml")
    assert refused.is_error
    assert "the 0.5 seconds of this server are spent" in refused.content[0].text
    assert not (new_project / "outputs").exists()


def test_two_clients_of_one_server_and_two_servers_of_one_project(new_project):
    assert main(["run", "config.yaml", "--quiet", "--steps", "1"]) == 0
    server = server_of(new_project, allow_launch=True)
    said: list[str] = []

    async def conclude(target: Any, text: str) -> None:
        async with Client(target) as client:
            for number in range(3):
                arguments = {"experiment": "first", "text": f"{text} {number}"}
                result = await client.call_tool("conclude", arguments)
                assert not result.is_error, result.content[0].text
                assert (await client.call_tool("show", {})).structured_content["name"] == "first"
                said.append(arguments["text"])

    async def run() -> None:
        async with anyio.create_task_group() as group:
            for number in range(2):
                group.start_soon(conclude, server.protocol_server(), f"memory {number}")
                group.start_soon(conclude, process_of(new_project, "--allow-launch"), f"process {number}")

    anyio.run(run)
    shown = ask_one(server, "show").structured_content
    assert sorted(note["text"] for note in shown["conclusions"]) == sorted(said)
    assert len(said) == 12


NOISY = "import os, sys\nprint('not the protocol')\nos.write(1, b'nor this\\n')\nos.system('echo nor that')\n"


def test_nothing_but_the_protocol_is_on_stdout(new_project):
    """Project code prints when `validate` imports it; an installed plugin prints inside the server itself."""
    (new_project / "src").mkdir()
    (new_project / "src/__init__.py").write_text(NOISY)
    plugin = new_project / "plugins"
    (plugin / "noisy-1.dist-info").mkdir(parents=True)
    (plugin / "noisy.py").write_text(NOISY + "class Noisy:\n    def compute(self, task_rewards): return 0.0\n")
    (plugin / "noisy-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: noisy\nVersion: 1\n")
    (plugin / "noisy-1.dist-info/entry_points.txt").write_text("[evsys_sdk.metrics]\nnoisy = noisy:Noisy\n")
    requests = [
        {"method": "initialize", "params": {"protocolVersion": "2025-11-25", "capabilities": {},
                                            "clientInfo": {"name": "test", "version": "1"}}},
        {"method": "tools/call", "params": {"name": "validate", "arguments": {"path": "config.yaml"}}},
        {"method": "tools/call", "params": {"name": "list", "arguments": {"registry": "metrics"}}},
    ]  # fmt: skip
    lines = [{"jsonrpc": "2.0", "id": number, **request} for number, request in enumerate(requests)]
    lines.insert(1, {"jsonrpc": "2.0", "method": "notifications/initialized"})
    environ = {**os.environ, "PYTHONPATH": str(plugin)}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "evsys_sdk.cli.main", "mcp", "--project", str(new_project)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ,
    )  # fmt: skip
    try:
        assert process.stdin is not None and process.stdout is not None
        answers = {}
        for line in lines:
            process.stdin.write(json.dumps(line) + "\n")
            process.stdin.flush()
            if "id" in line:
                answer = json.loads(process.stdout.readline())
                answers[answer["id"]] = answer["result"]
        rest, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0
    assert rest == ""
    assert answers[1]["structuredContent"]["ok"] is True
    assert "noisy" in answers[2]["structuredContent"]["metrics"]
    assert "not the protocol" in errors and "nor this" in errors and "nor that" in errors


def test_a_server_killed_during_a_launch_leaves_the_experiment_running(new_project):
    (new_project / "src").mkdir()
    (new_project / "src/__init__.py").write_text(
        "import time\nfrom pathlib import Path\nPath('importing').touch()\n"
        "while not Path('continue').exists(): time.sleep(0.02)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "evsys_sdk.cli.main", "mcp", "--project", str(new_project), "--allow-launch"],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdin is not None
        for line in (
            {"id": 0, "method": "initialize", "params": {"protocolVersion": "2025-11-25", "capabilities": {},
                                                         "clientInfo": {"name": "test", "version": "1"}}},
            {"method": "notifications/initialized"},
            {"id": 1, "method": "tools/call", "params": {"name": "launch", "arguments": {"path": "config.yaml"}}},
        ):  # fmt: skip
            process.stdin.write(json.dumps({"jsonrpc": "2.0", **line}) + "\n")
            process.stdin.flush()
        marker = new_project / "importing"
        wait_until(lambda: marker.exists() or process.poll() is not None, "the launch to import the project's code")
        assert marker.exists()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(SECONDS)
    finally:
        (new_project / "continue").touch()
        process.kill()
    record = new_project / "outputs/first.experiment_result.json"
    wait_until(lambda: record.is_file() and not lock_is_held(record), "the experiment's record")
    assert json.loads(record.read_text())["runs"][0]["status"] == "completed"


def test_the_project_is_the_first_root_of_a_client_that_has_roots(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def roots(context: Any) -> types.ListRootsResult:
        uris = [f"file://{tmp_path}/nothing", finished.as_uri()]
        return types.ListRootsResult.model_validate({"roots": [{"uri": uri} for uri in uris]})

    async def run() -> Any:
        server = EvsysServer(find_project(None, environ={})).protocol_server()
        async with Client(server, mode="legacy", list_roots_callback=roots) as client:
            return await client.call_tool("history", {})

    result = anyio.run(run)
    assert result.meta["evsys/project"] == str(finished)
    assert result.meta["evsys/project_from"] == "roots of the client"
    assert len(result.structured_content["experiments"]) == 2


def test_a_process_without_roots_takes_the_environment(finished):
    async def run(*words: str, **environ: str) -> Any:
        command = ["-P", "-m", "evsys_sdk.cli.main", "mcp", *words]
        target = StdioServerParameters(command=sys.executable, args=command, env={**os.environ, **environ}, cwd="/")
        async with Client(target) as client:
            return await client.call_tool("history", {"limit": 1})

    result = anyio.run(lambda: run(CLAUDE_PROJECT_DIR=str(finished)))
    assert result.meta["evsys/project_from"] == "CLAUDE_PROJECT_DIR"
    assert result.structured_content["experiments"][0]["name"] == "second"


def test_without_the_extra_the_verb_says_how_to_install_it():
    code = "import sys; sys.modules['mcp'] = None\nfrom evsys_sdk.cli.main import main\nsys.exit(main(['mcp']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "This needs mcp: pip install 'evsys-sdk[mcp]'" in done.stderr


def test_the_fast_start_leaves_the_package_whole():
    code = (
        "import sys\nfrom evsys_sdk.cli.mcp import fast_imports\n"
        "with fast_imports():\n    import evsys_sdk.mcp_server.server as ours\n"
        "assert 'mcp.client' not in sys.modules and 'evsys_sdk.config.schema' not in sys.modules\n"
        "import mcp, mcp.server\nassert mcp.Client and mcp.server.MCPServer and mcp.server.Server is ours.Server"
    )
    subprocess.run([sys.executable, "-c", code], timeout=SECONDS, check=True)


Act = Callable[..., dict[str, Any]]
"""One step of an agent: a verb or a tool by name, its arguments, its JSON."""


def research(act: Act, root: Path) -> dict[str, Any]:
    """A scripted agent: once around the loop, from what was tried to a conclusion. It writes files itself, as coding
    agents do."""
    best = act("history")["experiments"][0]
    known = json.dumps(act("context", tokens=2000))
    assert best["name"] in known
    config = act("show", experiment=best["name"])["record_data"]["config"]
    rate = config["run"]["algorithm"]["params"]["learning_rate"] * 10
    assert rate < act("schema", kind="algorithm", name="sft")["properties"]["learning_rate"].get("maximum", 1)
    write_config(root, "next", rate=rate, file="next.yaml")
    assert act("validate", path="next.yaml")["runs"] == ["r0"]
    launched = act("launch", path="next.yaml")
    scores, cursor, end = [], 0, time.monotonic() + SECONDS
    while True:
        news = act("follow", experiment=launched["experiment"], since=cursor)
        scores += [event["detail"]["benchmark"] for event in news["events"] if event["kind"] == "score"]
        cursor = news["cursor"]
        if news["state"] != "running" and not news["has_more"]:
            break
        assert time.monotonic() < end
    assert news["state"] == "completed"
    assert sorted(scores) == ["test/words", "test/words", "val/words", "val/words"]
    wrong = act("rollouts", experiment="next", failed=True)["n_rollouts"]
    compared = act("compare", experiments=[best["name"], "next"])
    before, after = compared["scores"]["val/words/pass@1"]
    text = f"learning rate {rate:g}: pass@1 {before:.3f} to {after:.3f}, {wrong} rollouts failed"
    written = act("conclude", experiment="next", text=text)
    assert [note["text"] for note in act("show", experiment="next")["conclusions"]] == [text]
    return {key: written[key] for key in ("experiment", "kind", "text", "about")}


def shell_words(verb: str, arguments: dict[str, Any]) -> list[str]:
    """As an agent types it."""
    named = {"launch": ["run", "--detach"], "rollouts": ["rollouts", "--no-test"]}.get(verb, [verb])
    plain = [arguments.pop(key) for key in ("experiment", "path", "kind", "name") if key in arguments]
    plain += arguments.pop("experiments", [])
    options = [f"--{key}" if value is True else f"--{key}={value}" for key, value in arguments.items()]
    return [*named, *plain, *options, "--json"]


def test_an_agent_comes_to_the_same_record_by_tools_and_by_shell(tmp_path, monkeypatch, record_tree):
    monkeypatch.chdir(tmp_path)
    said = {}
    for way in ("tools", "shell"):
        root = make_project(tmp_path / way)
        write_config(root, "first", rate=1e-3)
        command = [sys.executable, "-P", "-m", "evsys_sdk.cli.main", "run", "config.yaml", "--quiet"]
        subprocess.run(command, cwd=root, capture_output=True, timeout=SECONDS, check=True)

    root = tmp_path / "tools"
    with start_blocking_portal() as portal:
        client = Client(process_of(root, "--allow-launch", "--max-runs", "1"))
        with portal.wrap_async_context_manager(client) as connected:

            def call(tool: str, /, **arguments: Any) -> dict[str, Any]:
                result = portal.call(connected.call_tool, tool, arguments)
                assert not result.is_error, result.content[0].text
                return dict(result.structured_content)

            said["tools"] = research(call, root)

    root = tmp_path / "shell"

    def type_in(verb: str, /, **arguments: Any) -> dict[str, Any]:
        command = [sys.executable, "-P", "-m", "evsys_sdk.cli.main", *shell_words(verb, arguments)]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    said["shell"] = research(type_in, root)
    assert said["tools"] == said["shell"]
    trees = {way: record_tree(tmp_path / way) for way in said}
    assert {"outputs/next.notes.jsonl", "outputs/next.experiment_result.json"} <= trees["tools"].keys()
    assert trees["tools"] == trees["shell"]


def test_the_docs_list_the_tools_and_their_verbs():
    page = (Path(__file__).parents[2] / "docs/mcp.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `evsys ([\w -]+)` \| (.*) \|$", page, re.MULTILINE)
    needed: dict[str, dict[str, Any]] = {
        "compare": {"experiments": ["a"]},
        "validate": {"path": "a"},
        "follow": {"experiment": "a"},
        "launch": {"path": "a"},
        "stop": {"experiment": "a"},
        "conclude": {"experiment": "a", "text": "b"},
    }
    assert [name for name, _, _ in rows] == [spec.name for spec in TOOLS]
    for name, verb, about in rows:
        words = verb.split()
        assert words_of(name, needed.get(name, {}))[: len(words)] == words
        assert ("with `--allow-launch`" in about) is (name not in READ_ONLY)
