"""Arms on a real Ray: two nodes on this machine, one of them killed; and what reaches the experiment's own process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs the extra ray")

WAIT_SECONDS = 300
OWN_RAY = {"kind": "ray", "params": {"address": "local"}}
"""Without an address it would join a cluster that another test has on this machine."""


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch):
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray's word for: bind to 127.0.0.1
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")


CLUSTER = """
import sys
from ray.cluster_utils import Cluster
here = {"node_ip_address": "127.0.0.1"}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **here})
nodes = [cluster.add_node(num_cpus=2, resources={"place": 1}, **here) for _ in range(2)]
print(cluster.address, flush=True)
for line in sys.stdin:
    cluster.remove_node(nodes.pop(), allow_graceful=False)
    print("removed", flush=True)
cluster.shutdown()
"""


@pytest.fixture
def cluster(tmp_path):
    """A head and two nodes with a place for one run each; a line to its stdin kills one of them."""
    with open(tmp_path / "cluster.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            process.address = process.stdout.readline().strip()
            yield process
        finally:
            process.stdin.close()
            process.wait(timeout=300)


def _progress(folder: Path) -> dict[str, int]:
    """Steps of the runs that have begun and not ended, as the journal has them."""
    [journal] = folder.glob("*.journal.sqlite")
    with sqlite3.connect(f"file:{journal}?mode=ro", uri=True) as db:
        steps = dict(db.execute("SELECT run, max(at) FROM events WHERE kind = 'step' GROUP BY run"))
        ended = {run for (run,) in db.execute("SELECT run FROM events WHERE kind = 'end'")}
    return {run: step for run, step in steps.items() if run not in ended}


def _wait_until(what, process):
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            if what():
                return
        except (ValueError, sqlite3.Error):
            pass  # there is no journal yet
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"it did not come to that: {process.communicate()[1]}")


def _sweep(project, minimal_run, folder, **top):
    runs = [
        minimal_run(
            name=f"rate{rate}",
            algorithm__params={"max_steps": 16, "batch_size": 4, "learning_rate": rate, "save_every": 3},
            backend__params={"latency_ms": 60},
        )
        for rate in (1e-3, 1e-2)
    ]
    benchmark = {"name": "colours", "path": "bench", "split": "val", "run_every": 4, "temperature": 0.5}
    return project.config(
        name=f"{folder}.yaml",
        run=None,
        runs=runs,
        n_repeats=2,
        max_concurrent_arms=2,
        output_dir=f"./{folder}/out",
        callbacks=[{"kind": "local_logger"}, {"kind": "csv_metrics"}],
        metadata={"benchmark": [benchmark | {"baseline": True}], "success_metric": "val.pass@1"},
        **top,
    )


def test_a_killed_node_costs_nothing_but_time(project, minimal_run, record_tree, cluster):
    project.write_tasks()
    project.evsys("run", _sweep(project, minimal_run, "here"), check=True)
    launcher = {"kind": "ray", "params": {"address": cluster.address, "resources": {"place": 1}}}
    process = project.start("run", _sweep(project, minimal_run, "there", launcher=launcher))
    out = project.root / "there/out"
    _wait_until(lambda: [step >= 4 for step in _progress(out).values()] == [True, True], process)
    cluster.stdin.write("\n")
    cluster.stdin.flush()
    assert cluster.stdout.readline() == "removed\n"
    _, told = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, told
    assert "lost its Ray worker and resumes elsewhere" in told
    assert "Resuming hello_sft" in told, "from its checkpoint, not from the beginning"

    here, there = record_tree(project.root / "here/out"), record_tree(out)
    assert here.keys() == there.keys()
    del there["hello_sft.experiment_result.json"]["config"]["launcher"]
    for name, records in here.items():
        assert there[name] == records, name


EXTENSIONS = """
import os
from evsys_sdk.registry import register_callback, register_transform

@register_transform("louder")
class Louder:
    def __call__(self, rows):
        return [{**row, "prompt": row["prompt"].upper()} for row in rows]

@register_callback("notes")
class Notes:
    def __init__(self):
        self.seen = []

    def on_step(self, ctx, step, metrics):
        self.seen.append((os.getpid(), ctx.run_id, step))
        ctx.log_store.log_scalar("noted", float(step), step)
        if step == 2:
            ctx.backend.prepare

    def on_experiment_end(self, results):
        with open("seen.txt", "w") as file:
            print(os.getpid(), *sorted({pid for pid, _, _ in self.seen}), len(self.seen), file=file)
"""


def test_callbacks_budget_and_failures_with_a_ray_of_its_own(project, minimal_run):
    package = project.root / "src"
    package.mkdir()
    (package / "__init__.py").write_text(EXTENSIONS)
    params = {"max_steps": 30, "batch_size": 4}
    louder = [{"kind": "louder", "params": {}}, {"kind": "jsonl_to_chat", "params": {}}]
    watch = {"kind": "early_stopping", "params": {"metric": "loss", "patience": 2, "min_delta": 100}}
    config = project.config(
        run=None,
        runs=[
            minimal_run(name="stops", algorithm__params=params, data__transforms=louder),
            minimal_run(name="breaks", algorithm__params=params, backend__params={"fail_at_step": 2}),
            minimal_run(name="spends", algorithm__params=params),
        ],
        callbacks=[{"kind": "notes"}, watch],
        budget={"steps": 6},
        launcher=OWN_RAY,
    )
    done = project.evsys("run", config, "--json")
    summary = json.loads(done.stdout)
    ends = {run["run_id"].split("/")[1]: run for run in summary["runs"]}
    assert [run["status"] for run in ends.values()] == ["completed", "failed", "cancelled"], done.stderr
    assert "did not improve" in project.record("stops")["stopped_early"]
    assert ends["breaks"]["error"] == "the mock backend fails at step 2 as configured (fail_at_step)"
    assert ends["spends"]["error"] == "the budget is spent: 6 of 6 steps" and summary["budget"]["spent"]["steps"] == 6
    assert summary["unread_settings"] == ["runs[0].model.renderer_name"], "as without Ray"

    own, *callers, times = (project.root / "seen.txt").read_text().split()
    assert callers == [own], "callbacks stay in the experiment's process"
    assert int(times) == 6
    noted = [row["noted"] for row in project.metrics("stops") if "noted" in row]
    assert noted == [1.0, 2.0, 3.0], "what they log goes to the run's own log"
    [warning] = [text for text in project.record("stops")["warnings"] if "notes" in text]
    assert "ctx.backend is with the worker" in warning


def test_stopping_reaches_the_workers_and_another_launcher_resumes(project, minimal_run):
    params = {"max_steps": 60, "batch_size": 4, "save_every": 2}
    run = minimal_run(algorithm__params=params, backend__params={"latency_ms": 50})
    process = project.start("run", project.config(run=run, launcher=OWN_RAY), "--json")
    _wait_until(lambda: _progress(project.root / "outputs").get("hello_sft/r0", 0) >= 3, process)
    process.send_signal(signal.SIGTERM)
    told, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 2 and json.loads(told)["runs"][0]["status"] == "cancelled"
    assert project.record()["status"] == "cancelled"
    reached = project.metrics()[-1]["step"]
    assert 3 <= reached < 60
    again = project.evsys("run", project.config(run=run))
    assert again.returncode == 0 and "Resuming hello_sft" in again.stderr
    assert [row["step"] for row in project.metrics() if "loss" in row] == list(range(1, 61))


def test_a_run_that_is_stopped_while_it_waits_for_another_worker_has_a_record(project, minimal_run, cluster):
    params = {"max_steps": 2000, "batch_size": 4, "save_every": 2}
    run = minimal_run(algorithm__params=params, backend__params={"latency_ms": 50})
    launcher = {"kind": "ray", "params": {"address": cluster.address, "resources": {"place": 1}}}
    config = project.config(run=run, n_repeats=2, max_concurrent_arms=2, launcher=launcher)
    process = project.start("run", config)
    out = project.root / "outputs"
    _wait_until(lambda: [step >= 3 for step in _progress(out).values()] == [True, True], process)
    cluster.stdin.write("\n")
    cluster.stdin.flush()
    _wait_until(lambda: "resumes elsewhere" in (out / "hello_sft.log").read_text(), process)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 2, told
    records = [project.record(f"r0__s{seed}") for seed in (42, 43)]
    assert {record["status"] for record in records} == {"cancelled"}
    errors = sorted(record["error"] for record in records)
    assert errors == ["stopped by the user", "stopped while waiting for a worker"]


def _raylet_below(process) -> int:
    """The raylet of a Ray that the process started."""
    below = {process.pid}
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, _, rest = stat.read_text().partition(" (")
            name, _, rest = rest.rpartition(") ")
            parents[int(pid)] = (name, int(rest.split()[1]))
    while more := {pid for pid, (_, parent) in parents.items() if parent in below} - below:
        below |= more
    [raylet] = [pid for pid in below if pid in parents and parents[pid][0] == "raylet"]
    return raylet


def test_a_ray_of_its_own_without_its_only_node_ends_the_run_and_the_same_command_resumes(project, minimal_run):
    params = {"max_steps": 60, "batch_size": 4, "save_every": 2}
    run = minimal_run(algorithm__params=params, backend__params={"latency_ms": 100})
    config = project.config(run=run, launcher=OWN_RAY)
    process = project.start("run", config)
    _wait_until(lambda: _progress(project.root / "outputs").get("hello_sft/r0", 0) >= 3, process)
    os.kill(_raylet_below(process), signal.SIGKILL)
    try:
        _, told = process.communicate(timeout=WAIT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 2, told
    record = project.record()
    assert record["status"] == "failed" and record["error"].startswith("the Ray cluster has lost its last node")
    again = project.evsys("run", config)
    assert again.returncode == 0 and "Resuming hello_sft" in again.stderr, again.stderr
    assert [row["step"] for row in project.metrics() if "loss" in row] == list(range(1, 61))


def test_what_cannot_work_is_said_at_once(project):
    nobody = {"kind": "ray", "params": {"address": "127.0.0.1:9"}}
    refused = project.evsys("run", project.config(launcher=nobody))
    assert refused.returncode == 2 and "there is no Ray cluster at 127.0.0.1:9" in refused.stdout + refused.stderr
    misspelt = {"kind": "ray", "params": {"num_cpu": 2}}
    refused = project.evsys("run", project.config(launcher=misspelt))
    assert refused.returncode == 1 and "closest: num_cpus" in refused.stderr
    refused = project.evsys("run", project.config(launcher={"kind": "slurm"}))
    assert refused.returncode == 1 and "launcher.kind" in refused.stderr and "'slurm'" in refused.stderr
