"""`evsys verifier test`: exit code 1 exactly when something is found, and all of it in the JSON."""

from __future__ import annotations

import json

import pytest

from evsys_sandbox.sandbox import why_unavailable
from evsys_sdk.cli.main import main
from evsys_sdk.registry import verifiers

SOUND = [
    {"task_id": "a", "instruction": "2 + 3?", "verifier": {"fn_name": "exact_match", "expected": "5"}},
    {"task_id": "b", "instruction": "3 + 3?", "verifier": {"fn_name": "exact_match", "expected": "6"}},
]
WEAK = {"task_id": "w", "instruction": "Say red.", "verifier": {"fn_name": "contains", "expected": "red"}}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    verifiers.names()
    monkeypatch.setattr(verifiers, "entries", dict(verifiers.entries))


def write(folder, rows):
    folder.mkdir(parents=True)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_a_sound_benchmark_ends_with_0(tmp_path, capsys):
    assert main(["verifier", "test", write(tmp_path / "suite", SOUND)]) == 0
    out = capsys.readouterr().out
    assert "suite: nothing found" in out and "oracle       2 of 2" in out


def test_a_weak_one_ends_with_1_and_names_task_and_agent(tmp_path, capsys):
    assert main(["verifier", "test", write(tmp_path / "suite", [*SOUND, WEAK])]) == 1
    out = capsys.readouterr().out
    assert "w: echo_prompt passes without solving it: reward 1 for 'Say red.'" in out
    assert "1 of 3 tasks have a weak verifier" in out


def test_json_holds_every_agent_and_every_finding(tmp_path, capsys):
    assert main(["verifier", "test", write(tmp_path / "suite", [*SOUND, WEAK]), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["benchmark"] == "suite" and told["n_tasks"] == 3 and told["ok"] is False
    assert {agent["agent"] for agent in told["agents"]} == {
        "null", "empty", "oracle", "echo_prompt", "long_repeat", "answer_list",
    }  # fmt: skip
    assert {(each["task_id"], each["agent"]) for each in told["findings"]} == {
        ("w", "echo_prompt"), ("w", "long_repeat"), ("w", "answer_list"),
    }  # fmt: skip


def test_a_benchmark_of_the_workspace_goes_by_its_name(tmp_path, capsys):
    target = write(tmp_path / "suite", [*SOUND, WEAK])
    assert main(["data", "add", target, "--benchmark", "--name", "colours"]) == 0
    capsys.readouterr()
    assert main(["verifier", "test", "colours", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["benchmark"] == "colours"


def test_a_limit_looks_at_the_first_tasks_only(tmp_path):
    assert main(["verifier", "test", write(tmp_path / "suite", [*SOUND, WEAK]), "--limit", "2"]) == 0


def test_a_projects_own_verifiers_are_imported(tmp_path, capsys):
    (tmp_path / "my_checks.py").write_text(
        "from evsys_sdk import register_verifier\n"
        "print('noise on stdout')\n"
        "@register_verifier('says_please')\n"
        "def says_please(model_output, expected, params):\n"
        "    return float('please' in model_output)\n"
    )
    row = {"task_id": "p", "instruction": "Ask, and say please.", "verifier": {"fn_name": "says_please"}}
    target = write(tmp_path / "suite", [row])
    assert main(["verifier", "test", target, "--import", "my_checks", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [each["agent"] for each in told["findings"]] == ["echo_prompt", "long_repeat"]


def task_directory(root, name, tests, solution=None):
    texts = {"task.toml": "", "instruction.md": f"Make /app/{name}.\n", "tests/test.sh": tests}
    texts["environment/Dockerfile"] = "FROM debian\nWORKDIR /app\n"
    for path, text in {**texts, **({"solution/solve.sh": solution} if solution else {})}.items():
        (root / name / path).parent.mkdir(parents=True, exist_ok=True)
        (root / name / path).write_text(text)
    return str(root)


LOOKS = "if [ -e /app/{} ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"


def test_tests_in_an_environment_are_tried_by_doing_nothing_and_by_the_tasks_own_solution(tmp_path, capsys):
    pytest.importorskip("harbor", reason="needs the extra harbor")
    if why_unavailable():
        pytest.skip(why_unavailable())
    target = task_directory(tmp_path / "suite", "sound", LOOKS.format("sound"), "touch /app/sound\n")
    assert main(["verifier", "test", target]) == 0
    assert "suite: nothing found" in capsys.readouterr().out
    assert main(["verifier", "test", f"{target}/sound"]) == 0
    capsys.readouterr()
    task_directory(tmp_path / "suite", "always", "echo 1 > /logs/verifier/reward.txt\n")
    task_directory(tmp_path / "suite", "wrong", LOOKS.format("right"), "touch /app/wrong\n")
    task_directory(tmp_path / "suite", "broken", "exit 3\n")
    assert main(["verifier", "test", target, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert {(each["task_id"], each["agent"], each["what"]) for each in told["findings"]} == {
        ("always", "null", "passes"), ("wrong", "oracle", "fails"), ("broken", "null", "breaks"),
    }  # fmt: skip
    assert told["without_solution"] == ["always", "broken"]
    assert main(["verifier", "test", target]) == 1
    said = "suite: 2 of 4 tasks have a weak verifier, 1 of 4 tasks have a verifier that could not run"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("script", ["if true; then\n", "nonesuch-command\n", "exit 3\n"])
def test_tests_that_cannot_run_are_no_weak_verifier(tmp_path, capsys, script):
    pytest.importorskip("harbor", reason="needs the extra harbor")
    if why_unavailable():
        pytest.skip(why_unavailable())
    target = task_directory(tmp_path / "suite", "broken", script, "touch /app/broken\n")
    assert main(["verifier", "test", target]) == 1
    out = capsys.readouterr().out
    assert "suite: 1 of 1 tasks have a verifier that could not run" in out and "weak" not in out


@pytest.mark.parametrize("script", ["if true; then\n", "nonesuch-command\n"])
def test_tests_of_a_row_that_cannot_run_are_no_weak_verifier(tmp_path, capsys, script):
    if why_unavailable():
        pytest.skip(why_unavailable())
    row = {"task_id": "r", "instruction": "?", "metadata": {"solution": "x"}}
    row["verifier"] = {"kind": "e2b", "dockerfile": "FROM debian\n", "test_sh": script}
    assert main(["verifier", "test", write(tmp_path / "suite", [row])]) == 1
    out = capsys.readouterr().out
    assert "suite: 1 of 1 tasks have a verifier that could not run" in out and "weak" not in out


def test_a_task_that_cannot_run_here_is_named_and_the_others_are_tried(tmp_path, capsys):
    pytest.importorskip("harbor", reason="needs the extra harbor")
    if why_unavailable():
        pytest.skip(why_unavailable())
    suite = tmp_path / "suite"
    task_directory(suite, "a-installs", LOOKS.format("x"))
    (suite / "a-installs/environment/Dockerfile").write_text("FROM debian\nRUN apt-get install -y no-such-package\n")
    task_directory(suite, "b-fails", LOOKS.format("x"))
    (suite / "b-fails/environment/Dockerfile").write_text("FROM debian\nRUN exit 7\n")
    task_directory(suite, "c-misnamed", LOOKS.format("x"))
    (suite / "c-misnamed/task.toml").write_text('[task]\nname = "no organisation"\n')
    target = task_directory(suite, "d-sound", LOOKS.format("d"), "touch /app/d\n")
    assert main(["verifier", "test", target]) == 0
    out = capsys.readouterr().out
    assert "a-installs: not run here: the dockerfile installs no-such-package" in out
    assert "b-fails: not run here: the environment: SandboxBuildFailedError" in out and "exit code 7" in out
    assert "c-misnamed: not run here:" in out and "must be <organisation>/<name>" in out
    assert "suite: 1 of 4 tasks tried: nothing found" in out
    assert main(["verifier", "test", target, "--json", "--limit", "3"]) == 1
    told = json.loads(capsys.readouterr().out)
    # Those that were not even started come first.
    assert [each["task_id"] for each in told["not_run"]] == ["a-installs", "c-misnamed", "b-fails"]
    assert told["ok"] is False and told["findings"] == []


@pytest.mark.parametrize(
    "broken",
    ["[task\n", "schema_version = 7\n", "steps = 3\n", "\udcff"],
    ids=["no TOML", "an unknown version", "steps of the wrong kind", "no UTF-8"],
)
def test_a_task_that_cannot_be_read_does_not_keep_the_others_from_being_tried(broken, tmp_path, capsys):
    if why_unavailable() is not None:
        pytest.skip(why_unavailable())
    suite = tmp_path / "suite"
    task_directory(suite, "a-broken", LOOKS.format("x"))
    (suite / "a-broken/task.toml").write_bytes(broken.encode(errors="surrogateescape"))
    target = task_directory(suite, "b-sound", LOOKS.format("b"), "touch /app/b\n")
    assert main(["verifier", "test", target]) == 1
    out = capsys.readouterr().out
    assert f"a-broken: cannot be read: {suite}/a-broken/task.toml: " in out
    assert "suite: 1 of 2 tasks tried: nothing found, 1 cannot be read" in out
    assert main(["verifier", "test", target, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [each["place"] for each in told["unreadable"]] == ["a-broken"] and told["n_tasks"] == 2
    assert told["ok"] is False and told["findings"] == told["not_run"] == []


def test_a_row_that_cannot_be_read_does_not_keep_the_others_from_being_tried(tmp_path, capsys):
    target = write(tmp_path / "suite", SOUND)
    with (tmp_path / "suite/tasks.jsonl").open("a") as file:
        file.write("{broken\n")
    assert main(["verifier", "test", target]) == 1
    out = capsys.readouterr().out
    assert "tasks.jsonl:3: cannot be read:" in out
    assert "suite: 2 of 3 tasks tried: nothing found, 1 cannot be read" in out


def test_a_suite_of_which_nothing_can_be_read_is_refused(tmp_path, capsys):
    (tmp_path / "suite/a").mkdir(parents=True)
    (tmp_path / "suite/a/task.toml").write_text("[task\n")
    assert main(["verifier", "test", str(tmp_path / "suite")]) == 1
    assert "a/task.toml: " in capsys.readouterr().err


def test_another_environment_is_named_on_the_command_line(tmp_path, capsys, monkeypatch):
    pytest.importorskip("harbor", reason="needs the extra harbor")
    target = task_directory(tmp_path / "suite", "a", LOOKS.format("x"))
    assert main(["verifier", "test", target, "--environment", "dokcer"]) != 0
    assert "closest: docker" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["no/such/place"], "is not a benchmark"),
        (["no-such-name"], "no-such-name"),
        (["suite", "--import", "no_such_module"], "import of no_such_module failed"),
        (["suite", "--limit", "0"], "--limit is 0; give a whole number of at least 1"),
    ],
)
def test_a_mistake_is_a_message_and_exit_code_1(tmp_path, capsys, args, words):
    write(tmp_path / "suite", SOUND)
    assert main(["verifier", "test", *args]) == 1
    assert words in capsys.readouterr().err
