"""`evsys status`, `logs` and `stop` on what lies on disk: whose process it is, and what is not done to others."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from evsys_sdk.cli.main import main
from evsys_sdk.cli.run_log import RunLog
from evsys_sdk.config.load import parse_config
from evsys_sdk.config.yaml_io import Document
from evsys_sdk.experiment import process as stopping
from evsys_sdk.experiment.registration import note_launch
from evsys_sdk.record.journal import EXPERIMENT, Journal
from evsys_sdk.record.layout import hold
from evsys_sdk.record.processes import (
    ExperimentProcess,
    beside,
    lock_of,
    process_start,
    read_launch,
    this_process,
    write_launch,
)
from evsys_sdk.run.stop import StopFlag, stop_on_signals


@pytest.fixture
def sleeper():
    """A process that has nothing to do with us."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """The journal of an experiment `x` with one run at step 3, and where its record would be."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stopping, "STARTING_SECONDS", 0.3)
    outputs = tmp_path / "outputs"
    (outputs / "a" / "logs").mkdir(parents=True)
    with closing(Journal(outputs / "x.journal.sqlite")) as journal:
        journal.begin(EXPERIMENT, "plan").add("plan", {}, at=0)
        run = journal.begin("x/a", "f")
        run.add("run", {"run_dir": str(outputs / "a")}, at=0)
        run.add("train_start", {"total_steps": 8}, at=0)
        run.add("step", {"metrics": {"loss": 0.5, "tokens": 10}}, at=3)
    return outputs / "x.experiment_result.json"


def launch_of(record, pid, **facts):
    process = replace(this_process(), pid=pid, born=process_start(pid))
    launch = ExperimentProcess(
        experiment="x",
        pid=pid,
        host=facts.pop("host", process.host),
        born=facts.pop("born", process.born),
        command=["evsys", "run", "x.yaml", "--fresh"],
        cwd=os.getcwd(),
        config="x.yaml",
        output_dir=str(record.parent),
        record=str(record),
        log=facts.pop("log", None),
        started="2026-01-02T03:04:05.000+00:00",
        n_runs=2,
        **facts,
    )
    write_launch(launch)
    return launch


@contextmanager
def held_in_the_name_of(launch, record):
    """The lock as that process would hold it."""
    with open(lock_of(record), "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        handle.write(f"process {launch.pid} on {launch.host}\n")
        handle.flush()
        yield


def told(capsys, *words):
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_dead_launch_is_interrupted_and_the_next_command_resumes_it(begun, sleeper, capsys):
    launch_of(begun, sleeper.pid)
    code, status = told(capsys, "status", "x")
    assert code == 0 and status["state"] == "interrupted" and status["holder"] is None
    [run] = status["runs"]
    assert (run["status"], run["step"], run["total_steps"], run["loss"]) == ("interrupted", 3, 8, 0.5)
    assert status["next"] == ["evsys run x.yaml"], "without --fresh, which would begin anew"


def test_a_result_of_before_the_launch_is_not_that_of_the_launch(begun, sleeper, capsys):
    begun.write_text(json.dumps({"experiment": "x", "arms": [{"arm": "a", "statuses": ["completed"]}]}))
    launch_of(begun, sleeper.pid)
    assert told(capsys, "status", "x")[1]["state"] == "completed"
    os.utime(begun, (1000, 1000))
    assert told(capsys, "status", "x")[1]["state"] == "interrupted"


def test_runs_stand_in_the_order_of_the_plan(begun, capsys):
    with closing(Journal(begun.parent / "x.journal.sqlite")) as journal:
        journal.begin("x/b", "f")
        journal.begin("x/odd", "f")  # of an earlier plan
        line = journal.latest(EXPERIMENT)
        line.add("arm", {"runs": ["b", "not_begun"]}, at=0, key="b")
        line.add("arm", {"runs": ["a"]}, at=0, key="a")
    assert [run["run"] for run in told(capsys, "status", "x")[1]["runs"]] == ["b", "a", "odd"]


def test_a_run_that_could_leave_no_record_says_why(begun, capsys):
    launch_of(begun, os.getpid())
    ends = [("a", "failed", "a file in its way"), ("b", "failed", "so it is here"), ("c", "cancelled", "not started")]
    runs = [{"run_id": f"x/{name}", "status": status, "error": error} for name, status, error in ends]
    begun.write_text(json.dumps({"experiment": "x", "arms": [{"arm": "a", "statuses": ["failed"]}], "runs": runs}))
    status = told(capsys, "status", "x")[1]
    assert status["state"] == "failed"
    assert [(run["run"], run["status"], run["step"], run["error"]) for run in status["runs"]] == [
        ("a", "failed", 3, "a file in its way"),
        ("b", "failed", 0, "so it is here"),
    ]
    os.utime(begun, (1000, 1000))  # the result of an earlier launch
    assert [run["status"] for run in told(capsys, "status", "x")[1]["runs"]] == ["interrupted"]


def test_a_log_is_followed_until_the_last_words_of_the_process(begun, sleeper, capsys):
    """The summary is written after the experiment was let go of."""
    log = begun.parent / "x.log"
    log.write_text("step 8\n")
    launch_of(begun, sleeper.pid, log=str(log))

    def end():
        with open(log, "a") as handle:
            handle.write("record: outputs\n")
        sleeper.kill()
        sleeper.wait()

    timer = threading.Timer(0.5, end)
    timer.start()
    assert main(["logs", "x", "-f"]) == 0
    timer.join()
    assert capsys.readouterr().out == "step 8\nrecord: outputs\n"


def test_a_launch_whose_number_another_process_has_now_signals_nobody(begun, sleeper, capsys):
    launch = launch_of(begun, sleeper.pid)  # the very process, but it does not hold the lock
    code, found = told(capsys, "stop", "x")
    assert (code, found["asked"], found["stopped"], found["state"]) == (0, False, True, "interrupted")
    launch = launch_of(begun, sleeper.pid, born="an earlier boot/17")
    with held_in_the_name_of(launch, begun):
        assert main(["stop", "x"]) == 1
        said = capsys.readouterr().err
        assert f"process {sleeper.pid} on {launch.host} has ended" in said and "fuser" in said
        code, status = told(capsys, "status", "x")
        assert status["state"] == "running" and "has ended" in status["problem"]
    assert sleeper.poll() is None


def test_the_launch_of_an_earlier_process_is_not_that_of_the_holder(begun, sleeper, capsys):
    launch = launch_of(begun, sleeper.pid)
    with hold(lock_of(begun), "x"):  # this process has it, and has not said so
        assert main(["stop", "x"]) == 1
        assert f"process {os.getpid()} on {launch.host} has" in capsys.readouterr().err
        _, status = told(capsys, "status", "x")
        assert status["state"] == "running" and status["launch"] is None
    assert sleeper.poll() is None


@pytest.mark.parametrize(
    ("facts", "message"),
    [({"host": "far-away"}, "far-away, on another machine"), ({"stoppable": False}, "on a thread")],
)
def test_what_cannot_be_stopped_from_here_is_refused(begun, sleeper, capsys, facts, message):
    launch = launch_of(begun, sleeper.pid, **facts)
    with held_in_the_name_of(launch, begun):
        assert main(["stop", "x"]) == 1
        assert message in capsys.readouterr().err
        assert main(["status", "x"]) == 0
        assert "running for" in capsys.readouterr().out
    assert sleeper.poll() is None


STUBBORN = """
import signal, sys, time
def heard(number, frame): print(number, flush=True)
signal.signal(signal.SIGTERM, heard); signal.signal(signal.SIGINT, heard)
print("ready", flush=True)
while True: time.sleep(0.05)
"""


def test_asking_again_does_not_press_harder_unless_that_is_asked_for(begun, capsys):
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        launch = launch_of(begun, process.pid)
        with held_in_the_name_of(launch, begun):
            for _ in range(2):
                code, found = told(capsys, "stop", "x", "--timeout", "0")
                assert (code, found["asked"], found["stopped"]) == (2, True, False) and found["asked_to_stop"]
            assert main(["stop", "x", "--timeout", "0"]) == 2
            assert "evsys stop x --now" in capsys.readouterr().out
            assert main(["status", "x"]) == 0
            assert "asked to stop" in capsys.readouterr().out
            assert main(["stop", "x", "--now", "--timeout", "0.1"]) == 2
            assert f"kill -9 {process.pid}" in capsys.readouterr().out
        heard = [int(process.stdout.readline()) for _ in range(2)]
        assert heard == [signal.SIGTERM, signal.SIGINT]
    finally:
        process.kill()
        rest = process.communicate()[0]
    assert rest == "", "one signal of each kind, however often it was asked for"


def test_runs_that_wait_for_their_turn_are_told_from_those_that_run(begun, capsys):
    launch = launch_of(begun, os.getpid())
    with held_in_the_name_of(launch, begun):
        assert told(capsys, "status", "x")[1]["runs"][0]["status"] == "waiting"
        with hold(begun.parent / "a" / ".lock", "a"):
            assert told(capsys, "status", "x")[1]["runs"][0]["status"] == "running"
        (begun.parent / "a" / "run_result.json").write_text('{"status": "cancelled", "error": "stopped"}')
        assert told(capsys, "status", "x")[1]["runs"][0]["status"] == "cancelled"
        os.utime(begun.parent / "a" / "run_result.json", (1000, 1000))  # how it ended before this launch
        assert told(capsys, "status", "x")[1]["runs"][0]["status"] == "waiting"
        [running] = told(capsys, "status")[1]["running"]
        assert running["experiment"] == "x"
    assert told(capsys, "status", "x")[1]["runs"][0] | {"last_written": None} == {
        "run": "a", "status": "cancelled", "step": 3, "total_steps": 8, "loss": 0.5, "reward": None, "score": None,
        "error": "stopped", "last_written": None, "run_dir": str(begun.parent / "a"), "stopped": None,
    }  # fmt: skip
    assert told(capsys, "status")[1] == {"running": []}


def test_what_is_spent_is_told_beside_the_limits(begun, capsys):
    launch_of(begun, os.getpid(), budget={"steps": 100, "tokens": 5000})
    _, status = told(capsys, "status", "x")
    assert status["budget"]["limits"] == {"steps": 100, "tokens": 5000}
    assert (status["budget"]["spent"]["steps"], status["budget"]["spent"]["tokens"]) == (1, 10)
    main(["status", "x"])
    assert "budget: 1 of 100 steps, 10 of 5,000 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"experiment": "x"}', "not json"])
def test_a_launch_record_that_is_none_counts_as_none(begun, capsys, content):
    beside(begun, "launch.json").write_text(content)
    assert read_launch(begun) is None
    assert told(capsys, "status", "x")[1]["launch"] is None


def test_a_log_is_asked_for_by_the_line(begun, capsys):
    assert main(["logs", "x"]) == 1
    assert "there is no log at" in capsys.readouterr().err
    (begun.parent / "x.log").write_text("".join(f"line {n}\n" for n in range(100)))
    assert main(["logs", "x", "-n", "2", "-f"]) == 0, "nothing runs, so there is nothing to wait for"
    assert capsys.readouterr().out == "line 98\nline 99\n"
    assert told(capsys, "logs", "x", "-n", "1")[1]["lines"] == ["line 99"]
    assert main(["logs", "x", "-f", "--json"]) == 1
    assert "choose one" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["status", "logs", "stop"])
def test_an_experiment_that_is_not_known_is_an_error_with_the_next_command(begun, capsys, verb):
    assert main([verb, "nope"]) == 1
    assert "there is no experiment 'nope'" in capsys.readouterr().err


def _config(folder):
    run = {"name": "a", "data": {"path": "x"}, "model": {"name": "m"}, "algorithm": {"kind": "sft"}}
    data = {"name": "x", "n_repeats": 3, "run": {**run, "backend": {"kind": "mock"}}}
    return parse_config(Document(label="c", data=data), folder=folder)


def test_a_launch_from_a_thread_says_that_it_heeds_no_signal(begun, tmp_path):
    config = _config(tmp_path)
    assert note_launch(config, begun).stoppable and read_launch(begun).n_runs == 3
    thread = threading.Thread(target=note_launch, args=(config, begun))
    thread.start()
    thread.join()
    assert not read_launch(begun).stoppable


def test_a_launch_that_cannot_be_noted_is_a_warning(begun, tmp_path, capsys):
    beside(begun, "launch.json").mkdir()
    assert note_launch(_config(tmp_path), begun).experiment == "x"
    assert "will not know x" in capsys.readouterr().err


def test_a_log_that_cannot_be_written_troubles_nobody(tmp_path):
    log = RunLog(["evsys", "run"], starter=None)
    log.stream.write("before it is open\n")
    assert log.file.open("/dev/full")
    log.stream.write("to a full disk\n")
    other = RunLog(["evsys", "run"], starter=None)
    assert not other.file.open(tmp_path)
    other.stream.write("to a folder\n")


def test_a_hangup_that_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals(StopFlag()) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)
            assert not stop.event.is_set()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.event.wait(300)
    finally:
        signal.signal(signal.SIGHUP, before)
