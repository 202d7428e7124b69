"""The next experiment begins with what the last ones left: history, show, compare, context, invalidate, conclude."""

from __future__ import annotations

import json
import signal
import time

import pytest


@pytest.fixture
def two(project):
    """A project in which two experiments were run, a weak one and a better one."""
    project.write_tasks()
    bench = {"name": "colours", "path": "bench", "split": "val"}
    for name, rate, tags in (("weak", 1e-6, ["first"]), ("strong", 1e-2, ["second"])):
        metadata = {
            "hypothesis": f"{name} learns.", "tags": tags, "success_metric": "pass@1", "benchmark": bench,
        }  # fmt: skip
        path = project.config(name=f"{name}.yaml", metadata=metadata)
        overrides = ["--set", f"name={name}", "--set", f"run.algorithm.params.learning_rate={rate}"]
        project.evsys("run", path, *overrides, "--set", f"run.name={name}_run", check=True)
    return project


def told(project, *arguments):
    return json.loads(project.evsys(*arguments, "--json", check=True).stdout)


def test_what_was_run_is_told_from_any_folder_of_the_project(two):
    found = told(two, "history")["experiments"]
    assert [entry["name"] for entry in found] == ["strong", "weak"], "the newest first"
    assert found[0]["status"] == "completed" and found[0]["measured"] == ["val/colours/pass@1"]
    assert told(two, "history", "--tag", "first")["experiments"][0]["name"] == "weak"
    assert told(two, "history", "--metric", "pass@1>=0.9")["experiments"] == found[:1]
    assert "strong" in two.evsys("history", "--limit", "1", check=True).stdout
    shown = told(two, "show", "str")
    assert shown["hypothesis"] == "strong learns." and shown["record_data"]["config"]["name"] == "strong"
    (two.root / "deep").mkdir()
    two.root = two.root / "deep"
    assert [entry["name"] for entry in told(two, "history")["experiments"]] == ["strong", "weak"]


def test_two_experiments_are_compared_on_their_tasks(two):
    found = told(two, "compare", "weak", "strong")
    assert found["settings"]["algorithm.params.learning_rate"] == [1e-6, 1e-2]
    [verdict] = found["verdicts"]
    assert (verdict["split"], verdict["benchmark"], verdict["baseline_arm"]) == ("val", "colours", "weak")
    assert verdict["arms"][1]["vs_baseline"]["n_tasks"] == 4
    printed = two.evsys("compare", "weak", "strong", check=True).stdout
    assert "algorithm.params.learning_rate  1e-06" in printed and "val/colours/pass@1 on shared tasks" in printed


def test_what_people_say_steers_the_context_and_leaves_the_record_alone(two):
    record = two.root / "outputs" / "strong.experiment_result.json"
    before = record.read_bytes()
    assert "strong" in _best(told(two, "context"))
    two.evsys("conclude", "strong", "--text", "0.01 is enough", check=True)
    assert any("0.01 is enough" in line for line in _lines(told(two, "context"), "Tried"))
    two.evsys("invalidate", "strong", "--why", "the tasks were in the rows", check=True)
    context = told(two, "context")
    assert "strong" not in _best(context) and "weak" in _best(context)
    assert told(two, "history", "--status", "invalid")["experiments"][0]["name"] == "strong"
    two.evsys("invalidate", "strong", "--undo", check=True)
    assert "strong" in _best(told(two, "context"))
    assert record.read_bytes() == before


def _lines(context, title):
    return next(section["lines"] for section in context["sections"] if section["title"].startswith(title))


def _best(context):
    return _lines(context, "Best so far")[0]


def test_a_killed_experiment_is_running_and_then_interrupted(project):
    path = project.config()
    process = project.start(
        "run", path, "--set", "run.algorithm.params.num_epochs=100000", "--set", "metadata.tags=[killed]"
    )
    try:
        entry = _wait_for(project)
        assert entry["status"] == "running" and entry["tags"] == ["killed"]
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    shown = told(project, "show", "hello_sft")
    assert shown["status"] == "interrupted" and shown["progress"][0]["run"] == "r0"
    assert any("was interrupted" in line for line in _lines(told(project, "context"), "Open questions"))


def _wait_for(project):
    for _ in range(1200):
        if told(project, "history")["experiments"] and told(project, "show", "hello_sft")["progress"]:
            return told(project, "history")["experiments"][0]
        time.sleep(0.1)
    raise AssertionError("the experiment was never listed")


def test_a_rehearsal_is_no_history(project):
    project.evsys("run", project.config(), "--dry", check=True)
    assert told(project, "history")["experiments"] == []
    assert "no experiment is known here" in project.evsys("history", check=True).stdout


def test_a_workspace_that_cannot_be_written_fails_no_run(project):
    (project.root / ".evsys").write_text("a file, and no folder")
    assert project.evsys("run", project.config()).returncode == 0
    assert told(project, "history")["experiments"][0]["name"] == "hello_sft", "found in ./outputs all the same"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "nope"], "none is known here"),
        (["compare", "only_one"], "none is known here"),
        (["history", "--status", "done"], "'done' is not a status"),
        (["history", "--dir", "nowhere"], "--dir nowhere is not a folder"),
        (["context", "--tokens", "50"], "--tokens must be at least 400"),
        (["invalidate", "x"], "one of --why TEXT and --undo is needed"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_code_1(project, arguments, message):
    done = project.evsys(*arguments)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
