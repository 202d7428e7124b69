"""Experiments in processes of their own, watched and stopped from others."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import pytest

from evsys_sdk.history.progress import progress_in
from evsys_sdk.record.processes import ExperimentProcess, read_launch

CLOCKS = {"ts", "step_seconds", "tokens_per_second", "seconds", "started", "latency", "last_written"}


@pytest.fixture
def slow(project, minimal_run):
    """How to write an experiment that lasts; whatever it started is gone at the end."""
    project.write_tasks()
    entry = {"name": "colours", "path": "bench", "split": "val", "run_every": 10, "temperature": 0, "baseline": True}

    def config(steps=2000, latency=20, **top):
        params = {"max_steps": steps, "batch_size": 4, "learning_rate": 1e-3, "save_every": 5}
        run = minimal_run(algorithm__params=params, backend__params={"latency_ms": latency})
        return project.config(run=run, metadata={"benchmark": [entry], "success_metric": "pass@1"}, **top)

    yield config
    for file in project.root.rglob(".*.launch.json"):
        launch = read_launch(file.with_name(file.name[1:].replace("launch.json", "experiment_result.json")))
        if launch and launch.pid != os.getpid():
            launch.process.send(signal.SIGKILL)


def told(project, *words, code=0):
    done = project.evsys(*words, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("it never came true")


def at_step(project, step):
    """The status once the run has come so far."""
    journal = project.root / "outputs/hello_sft.journal.sqlite"
    wait_for(lambda: any(run.step >= step for run in progress_in(journal)))
    return told(project, "status", "hello_sft")


def killed(project, path):
    """The status of an experiment that was launched and killed in the midst of it."""
    launch = told(project, "run", path, "--detach")
    at_step(project, 7)
    os.kill(launch["pid"], signal.SIGKILL)
    return wait_for(lambda: (found := told(project, "status", "hello_sft"))["holder"] is None and found)


DAWDLE = """
import time
from pathlib import Path
from evsys_sdk.registry import register_callback

@register_callback("dawdle")
class Dawdle:
    def on_step(self, ctx, step, metrics):
        if step > 11 and Path("dawdle").exists():
            time.sleep(1)
"""


def test_a_detached_run_is_launched_watched_stopped_and_resumes(project, slow):
    (project.root / "src").mkdir()
    (project.root / "src/__init__.py").write_text(DAWDLE)
    (project.root / "dawdle").touch()
    path = slow(steps=60, latency=1, callbacks=[{"kind": "dawdle"}])
    launch = told(project, "run", path, "--detach")
    assert launch["experiment"] == "hello_sft" and launch["detached"] and launch["n_runs"] == 1
    assert read_launch(project.root / "outputs/hello_sft.experiment_result.json") == ExperimentProcess(**launch)
    assert os.getsid(launch["pid"]) == launch["pid"], "a session of its own: no terminal's end reaches it"
    status = at_step(project, 11)
    assert status["state"] == "running" and status["holder"] == f"process {launch['pid']} on {launch['host']}"
    [run] = status["runs"]
    assert run["status"] == "running" and run["loss"] > 0
    assert (run["score"]["benchmark"], run["score"]["metric"], run["score"]["n_tasks"]) == ("val/colours", "pass@1", 4)
    assert [one["experiment"] for one in told(project, "status")["running"]] == ["hello_sft"]

    stopped = told(project, "stop", "hello")
    assert stopped["asked"] and stopped["stopped"] and stopped["state"] == "cancelled"
    assert project.record()["status"] == "cancelled" and project.record()["error"] == "stopped by the user"
    assert 11 <= told(project, "status", "hello_sft")["runs"][0]["step"] < 60
    again = project.evsys("stop", "hello_sft")
    assert again.returncode == 0 and "is not running: cancelled" in again.stdout

    (project.root / "dawdle").unlink()
    done = project.evsys("run", path)
    assert done.returncode == 0 and "Resuming hello_sft" in done.stderr, done.stderr
    status = told(project, "status", "hello_sft")
    assert (status["state"], status["runs"][0]["status"]) == ("completed", "completed")
    taken_up = _records(project, "outputs")
    project.evsys("run", slow(steps=60, latency=0, output_dir="./whole"), check=True)
    assert taken_up == {**_records(project, "whole"), "settings": taken_up["settings"]}


def _records(project, folder):
    """What was found, without clocks and places; `latency_ms`, which differs, is in the settings."""
    record = json.loads((project.root / folder / "r0" / "run_result.json").read_text())
    lines = (project.root / folder / "r0/logs/metrics.jsonl").read_text().splitlines()
    kept = {key: record[key] for key in ("status", "error", "warnings", "unread_settings", "leakage")}
    metrics = {key: value for key, value in record["metrics"].items() if key not in CLOCKS}
    evals = [(one["name"], one["step"], [score["value"] for score in one["scores"]]) for one in record["evals"]]
    rows = [{key: value for key, value in json.loads(line).items() if key not in CLOCKS} for line in lines]
    ordered = sorted(json.dumps(row, sort_keys=True) for row in rows)
    return {**kept, "metrics": metrics, "evals": evals, "rows": ordered, "settings": None}


def test_the_launch_record_comes_before_the_training_is_over(project, slow):
    path = slow()
    done = project.evsys("run", path, "--detach")
    assert done.returncode == 0 and "hello_sft: launched as process" in done.stdout, done.stderr
    assert "evsys logs hello_sft -f" in done.stdout and done.stderr == ""
    assert told(project, "status", "hello_sft")["state"] == "running"
    second = project.evsys("run", path, "--detach")
    assert second.returncode == 1 and second.stdout == ""
    assert "is in use by process" in second.stderr and "next: evsys status hello_sft" in second.stderr
    assert told(project, "stop", "hello_sft", "--now")["state"] == "cancelled"
    assert project.record()["status"] == "cancelled"


def test_a_killed_one_is_interrupted_and_resumes(project, slow):
    path = slow(steps=60, latency=30)
    status = killed(project, path)
    assert status["state"] == "interrupted" and status["runs"][0]["status"] == "interrupted"
    assert status["next"] == [f"evsys run {path} --detach --json"]
    stopped = project.evsys("stop", "hello_sft")
    assert stopped.returncode == 0 and "is not running: interrupted" in stopped.stdout
    told(project, "run", path, "--detach")
    follower = project.start("logs", "hello_sft", "-f", "-n", "1000")
    out, err = follower.communicate(timeout=300)
    assert follower.returncode == 0, err
    headers = [line for line in out.splitlines() if line.startswith("=== ")]
    assert len(headers) == 2 and "Resuming hello_sft" in out and "record: outputs (" in out.splitlines()[-1]
    assert told(project, "status", "hello_sft")["state"] == "completed"


def test_where_the_journal_is_torn_only_a_fresh_start_is_advised(project, slow):
    path = slow(steps=60, latency=30)
    killed(project, path)
    journal = project.root / "outputs/hello_sft.journal.sqlite"
    with closing(sqlite3.connect(journal)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    os.truncate(journal, journal.stat().st_size // 2)
    status = told(project, "status", "hello_sft")
    assert str(journal.name) in status["problem"] and status["next"] == [f"evsys run {path} --detach --json --fresh"]
    assert project.evsys("run", path, "--detach", "--json").returncode == 1
    told(project, "run", path, "--detach", "--fresh")


def test_what_is_refused_before_the_launch_is_said_where_it_was_typed(project, minimal_run):
    path = project.config(run=minimal_run(algorithm__kind="stf"))
    done = project.evsys("run", path, "--detach")
    plain = project.evsys("run", path)
    assert (done.returncode, done.stdout, done.stderr) == (1, plain.stdout, plain.stderr)
    assert "run.algorithm.kind = 'stf'" in done.stderr and "closest: sft" in done.stderr
    assert told(project, "run", path, "--detach", code=1)["problems"]
    assert not (project.root / "outputs").exists()


def test_a_quick_one_that_has_ended_was_launched(project):
    project.evsys("run", project.config(), "--detach", "-o", "summary.json", check=True)
    summary = wait_for((project.root / "summary.json").exists)
    assert summary and json.loads((project.root / "summary.json").read_text())["runs"][0]["status"] == "completed"
    status = wait_for(lambda: (found := told(project, "status", "hello_sft"))["state"] == "completed" and found)
    assert status["next"] == ["evsys show hello_sft"]


def test_its_starter_may_be_killed_and_whoever_reads_its_output_is_not_kept_waiting(project, slow):
    path = slow()
    script = f'out=$("{sys.executable}" -m evsys_sdk.cli.main run "{path}" --detach 2>&1); echo "[$out]"; kill -9 $$'
    done = subprocess.run(["bash", "-c", script], cwd=project.root, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL and done.stdout.startswith("[hello_sft: launched")
    step = at_step(project, 1)["runs"][0]["step"]
    assert at_step(project, step + 2)["state"] == "running"


def test_a_run_in_the_foreground_has_a_log_too_and_is_stopped_from_elsewhere(project, slow):
    process = project.start("run", slow())
    wait_for((project.root / "outputs/r0/logs/metrics.jsonl").exists)
    at_step(project, 2)
    assert told(project, "stop", "hello_sft")["state"] == "cancelled"
    out, err = process.communicate(timeout=300)
    assert process.returncode == 2 and "r0: cancelled" in out and "Stopping after the current step." in err
    lines = told(project, "logs", "hello_sft")["lines"]
    assert lines[0].startswith("=== ") and lines[0].endswith(" ===") and f"process {process.pid} on" in lines[0]
    assert any(line.endswith(" r0: preparing") for line in lines) and "r0: cancelled" in "\n".join(lines)
    assert any("WARNING evsys_sdk.contamination.audit" in line for line in lines)


def test_an_experiment_from_python_is_known_as_well(project, slow):
    path = slow()
    code = f"from evsys_sdk import Experiment; Experiment.from_yaml({str(path)!r}).run()"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=project.root, stderr=subprocess.PIPE, text=True)
    try:
        wait_for((project.root / "outputs/.hello_sft.launch.json").exists)
        status = at_step(project, 1)
        assert status["launch"]["pid"] == process.pid and status["launch"]["log"] is None
        assert told(project, "stop", "hello_sft")["state"] == "cancelled"
        assert process.wait(timeout=300) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_stop_during_the_launch_leaves_a_record_too(project, slow):
    (project.root / "slow_start.py").write_text(
        "import os, time\nfrom evsys_sdk import register_callback\n"
        "@register_callback('slow_start')\nclass SlowStart:\n"
        "    def __init__(self, **params): ...\n"
        "    def on_experiment_start(self, experiment):\n"
        "        while not os.path.exists('go'): time.sleep(0.01)\n"
    )
    path = slow(imports=["slow_start"], callbacks=[{"kind": "slow_start"}])
    told(project, "run", path, "--detach")
    stop = project.start("stop", "hello_sft", "--json")
    wait_for(lambda: "Stopping after" in (project.root / "outputs/hello_sft.log").read_text())
    (project.root / "go").touch()
    out, err = stop.communicate(timeout=300)
    assert stop.returncode == 0, out + err
    stopped = json.loads(out)
    assert stopped["stopped"] and stopped["state"] == "cancelled"
    assert not (project.root / "outputs/r0/run_result.json").exists()


def test_a_rehearsal_is_named_by_its_place(project, slow):
    launch = told(project, "run", slow(), "--detach", "--dry")
    assert launch["record"].endswith("outputs/dry/hello_sft.experiment_result.json")
    wait_for(lambda: told(project, "status", "outputs/dry")["state"] == "completed")
