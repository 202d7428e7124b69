"""Extensions that misbehave: the run says so, the record stays valid, stdout stays clean, nothing trained is lost."""

from __future__ import annotations

import json
from textwrap import dedent

import pytest

HOSTILE = """
import sys
from evsys_sdk import RunResult, register_algorithm, register_backend, register_callback, register_log_store
from evsys_sdk import register_metric, register_transform
from evsys_sdk.algorithms.sft import SFT
from evsys_sdk.backends.mock import MockBackend
from evsys_sdk.record.log_stores import JsonlLogStore

print("hello from an import")

@register_algorithm("exits")
class Exits:
    def train(self, ctx):
        sys.exit(0)

@register_algorithm("odd_metrics")
class OddMetrics:
    def train(self, ctx):
        print("hello from training")
        cycle = []
        cycle.append(cycle)
        return RunResult(run_id=ctx.run_id, status="completed",
                         metrics={"acc": "high", "none": None, "cycle": cycle, "big": 10**5000, "good": 0.5})

@register_algorithm("odd_status")
class OddStatus:
    def train(self, ctx):
        return RunResult(run_id=ctx.run_id, status="banana")

@register_backend("bad_teardown")
class BadTeardown(MockBackend):
    def teardown(self, handles):
        raise RuntimeError("no way back")

@register_log_store("bad_close")
class BadClose(JsonlLogStore):
    def close(self):
        super().close()
        raise OSError("disk gone")

@register_callback("exits_too")
class ExitsToo:
    def on_step(self, ctx, step, metrics):
        sys.exit(0)
    def on_experiment_start(self, experiment):
        raise ValueError("not today")

@register_metric("exits_metric")
class ExitsMetric:
    def compute(self, task_rewards):
        sys.exit(0)

@register_transform("exits_transform")
class ExitsTransform:
    def __call__(self, rows):
        sys.exit(0)
"""


@pytest.fixture
def hostile(project):
    (project.root / "hostile.py").write_text(dedent(HOSTILE))
    project.write_tasks()
    return project


def _run(project, minimal_run, *arguments, top=None, **changes):
    run = minimal_run(**changes)
    del run["eval"], run["model"]["renderer_name"]
    return project.evsys("run", project.config(run=run, imports=["hostile"], **(top or {})), *arguments)


def test_an_algorithm_that_exits_is_a_failed_run_with_a_record(hostile, minimal_run):
    done = _run(hostile, minimal_run, algorithm={"kind": "exits"})
    assert done.returncode == 2
    assert hostile.record()["status"] == "failed" and "SystemExit" in hostile.record()["error"]


def test_a_transform_that_exits_is_blamed_by_name(hostile, minimal_run):
    done = _run(hostile, minimal_run, data__transforms=[{"kind": "exits_transform"}])
    assert done.returncode == 2 and "exits_transform" in hostile.record()["error"]


def test_an_import_that_exits_is_a_located_problem(hostile, minimal_run):
    (hostile.root / "leaves.py").write_text("import sys; sys.exit(0)")
    done = hostile.evsys("validate", "--deep", hostile.config(run=minimal_run(), imports=["leaves"]))
    assert done.returncode == 1 and "imports[0]" in done.stderr and "SystemExit" in done.stderr


def test_a_callback_and_a_metric_that_exit_change_nothing_else(hostile, minimal_run):
    entry = {"name": "c", "path": "bench", "metrics": ["exits_metric", "pass@1"]}
    top = {"callbacks": [{"kind": "exits_too"}], "metadata": {"benchmark": entry}}
    done = _run(hostile, minimal_run, "--json", top=top)
    assert done.returncode == 0, done.stderr
    record = hostile.record()
    assert record["status"] == "completed" and any("exits_too.on_step" in warning for warning in record["warnings"])
    assert "test/c/pass@1" in record["metrics"] or record["evals"][0]["error"]
    assert any("not today" in warning for warning in json.loads(done.stdout)["warnings"])


def test_trouble_while_tidying_up_is_a_warning_not_a_lost_run(hostile, minimal_run):
    done = _run(
        hostile,
        minimal_run,
        top={"log_store": {"kind": "bad_close", "params": {"log_dir": "logs"}}},
        backend={"kind": "bad_teardown"},
    )
    assert done.returncode == 0, done.stderr
    record = hostile.record()
    assert record["status"] == "completed" and record["metrics"]["steps"] == 12 and record["artifacts"]
    assert any("no way back" in warning for warning in record["warnings"])


def test_metrics_that_are_no_numbers_are_left_out_aloud(hostile, minimal_run):
    top = {"metadata": {"success_metric": "acc"}}
    done = _run(hostile, minimal_run, "--json", algorithm={"kind": "odd_metrics"}, top=top)
    assert done.returncode == 0, done.stderr
    assert hostile.record()["metrics"] == {"good": 0.5}
    assert sum("not a number" in warning for warning in hostile.record()["warnings"]) == 4


def test_a_status_that_does_not_exist_fails_the_run(hostile, minimal_run):
    assert _run(hostile, minimal_run, algorithm={"kind": "odd_status"}).returncode == 2
    assert "'banana' is not a status" in hostile.record()["error"]


def test_what_extensions_print_does_not_reach_stdout(hostile, minimal_run):
    done = _run(hostile, minimal_run, "--json", algorithm={"kind": "odd_metrics"})
    assert json.loads(done.stdout)["runs"][0]["status"] == "completed"
    assert "hello from an import" in done.stderr and "hello from training" in done.stderr
    listed = hostile.evsys("list", "--json", "--config", "config.yaml", check=True)
    assert "exits" in json.loads(listed.stdout)["algorithms"]


def test_a_failed_run_lists_no_unread_settings_and_exits_2_under_strict(hostile, minimal_run):
    done = _run(hostile, minimal_run, "--strict", backend__params={"fail_at_step": 1})
    assert done.returncode == 2 and "unread" not in done.stdout + done.stderr
    assert hostile.record()["unread_settings"] == []


@pytest.mark.parametrize("target", ["folder", "file/below.json"])
def test_a_result_file_that_cannot_be_written_is_refused_before_the_run(hostile, minimal_run, target):
    (hostile.root / "folder").mkdir()
    (hostile.root / "file").write_text("")
    done = _run(hostile, minimal_run, "-o", target)
    assert done.returncode == 1 and f"--output {target}" in done.stderr and "Traceback" not in done.stderr
    assert not (hostile.root / "outputs").exists()


def test_a_link_as_result_file_is_followed(hostile, minimal_run):
    (hostile.root / "real.json").write_text("")
    (hostile.root / "link.json").symlink_to("real.json")
    assert _run(hostile, minimal_run, "-o", "link.json").returncode == 0
    assert (hostile.root / "link.json").is_symlink() and json.loads((hostile.root / "real.json").read_text())["runs"]


def test_the_record_names_benchmarks_options_and_notes(hostile, minimal_run):
    stopper = {"kind": "early_stopping", "params": {"metric": "loss", "mode": "max", "patience": 2}}
    top = {"metadata": {"benchmark": {"name": "c", "path": "bench"}}, "callbacks": [stopper]}
    assert _run(hostile, minimal_run, "--steps", "9", top=top).returncode == 0
    record = hostile.record()
    assert (
        record["environment"]["benchmarks"][0]["tasks"] == 4
        and len(record["environment"]["benchmarks"][0]["sha256"]) == 64
    )
    assert record["options"]["max_steps"] == 9 and "early_stopping" in record["stopped_early"]


def test_the_whole_experiment_belongs_to_one_process(hostile, minimal_run):
    """A second process must not set a finished arm of a live experiment aside."""
    fast = {**minimal_run(algorithm__params={"max_steps": 1}), "name": "fast"}
    slow = {**minimal_run(backend__params={"latency_ms": 50}, algorithm__params={"max_steps": 500}), "name": "slow"}
    path = hostile.config(run=None, runs=[fast, slow])
    first = hostile.start("run", path)
    try:
        import time

        end = time.monotonic() + 300
        while not (hostile.root / "outputs/slow/logs/metrics.jsonl").exists() and time.monotonic() < end:
            time.sleep(0.1)
        second = hostile.evsys("run", path)
        assert second.returncode == 1 and "is in use by process" in second.stderr
        assert not (hostile.root / "outputs/fast/attempts").exists()
    finally:
        first.kill()
        first.communicate(timeout=300)


def test_an_evaluation_in_which_every_rollout_errored_is_a_warning_and_no_failed_run(project, minimal_run):
    (project.root / "down.py").write_text(
        dedent("""
        from evsys_sdk import register_verifier

        @register_verifier("down")
        def down(completion, expected, params=None):
            raise RuntimeError("the service is down")
        """)
    )
    project.write_tasks(fn_name="down")
    entry = {"name": "colours", "path": "bench", "split": "val"}
    path = project.config(imports=["down"], run=minimal_run(eval={"enabled": False}), metadata={"benchmark": [entry]})
    found = project.evsys("run", path)
    assert found.returncode == 0 and project.record()["status"] == "completed"
    [line] = [line for line in found.stderr.splitlines() if line.startswith("Warning: every rollout")]
    assert line.startswith("Warning: every rollout on val/colours errored in r0, so there is no score. First error: ")
    assert "the service is down" in line and line.endswith("Fix the cause and run again with --fresh.")
