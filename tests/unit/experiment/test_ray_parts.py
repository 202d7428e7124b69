"""The Ray launcher's parts without a Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from evsys_sdk.errors import Cancelled
from evsys_sdk.experiment import remote as distant
from evsys_sdk.experiment.ray import ClusterLost, RayLauncher
from evsys_sdk.experiment.remote import RpcReply
from evsys_sdk.run.stop import StopFlag

BOUND_SECONDS = 300


class Cluster:
    """A Ray on which no worker ever comes up."""

    def __init__(self, *alive):
        self.alive = alive

    def wait(self, refs, timeout):
        return [], refs

    def nodes(self):
        return [{"Alive": alive} for alive in self.alive]


def waiting_at(cluster, *, is_stopped):
    launcher = RayLauncher(address="local")
    launcher._ray = cluster
    return launcher._wait_for("ready", "e/r", is_stopped)


@pytest.mark.parametrize("nodes", [(), (False,), (False, False)])
def test_nobody_waits_at_a_cluster_that_has_lost_its_last_node(nodes):
    with pytest.raises(ClusterLost, match="the same command resumes from the last checkpoint"):
        waiting_at(Cluster(*nodes), is_stopped=lambda: False)


def test_while_there_is_a_node_a_worker_is_waited_for_until_somebody_stops_that():
    looks = iter([False, False, True])
    with pytest.raises(Cancelled, match="stopped while waiting for a worker"):
        waiting_at(Cluster(False, True), is_stopped=lambda: next(looks))


class Worker:
    """Notes what it is told, and is done when it was told to interrupt its run; then it says how that came out."""

    def __init__(self, stop):
        self.told, self.stop_flag, self.calls_left = [], stop, 100

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *args: self.hear(name))

    def hear(self, name):
        self.calls_left -= 1
        assert self.calls_left, "nobody tells it"
        if name != "calls":
            self.told.append(name)
        elif len(self.told) == 2:
            self.stop_flag.interrupt()
        elif self.told == ["run"]:
            self.stop_flag.set()
        return name


class Told:
    """As much of a Ray as it takes to talk to that worker."""

    def __init__(self, worker):
        self.worker = worker

    def wait(self, refs, timeout):
        return (refs if "interrupt" in self.worker.told else []), []

    def get(self, ref):
        return [] if ref == "calls" else RpcReply(error=Cancelled("stopped by the user"))


def test_a_worker_is_told_once_to_stop_and_once_to_stop_at_once(monkeypatch):
    monkeypatch.setattr(distant.RemoteRunSpec, "of", lambda plan, fresh: "order")
    stop = StopFlag()
    worker, launcher = Worker(stop), RayLauncher(address="local")
    launcher._ray = Told(worker)
    desk = SimpleNamespace(
        over=False, broken=None, begun=True, plan=SimpleNamespace(stop=stop, fresh=False, run_id="e/r")
    )
    with pytest.raises(Cancelled):
        launcher._serve(worker, desk)
    assert worker.told == ["run", "stop", "interrupt"]


STARTER = """
import subprocess, sys, time
load = "import time; from evsys_sdk.experiment.ray import RayWorker; "
worker = load + "RayWorker({}); print('ready', flush=True); time.sleep(600)"
process = subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE, text=True)
process.stdout.readline()
print(process.pid, flush=True)
time.sleep(600)
"""


def test_a_worker_ends_with_the_process_that_started_it():
    """Ray takes a raylet that is dead and not buried, as one of our own is, for a living one."""
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True)
    worker = int(starter.stdout.readline())
    try:
        starter.send_signal(signal.SIGKILL)  # and not waited for yet
        end = time.monotonic() + BOUND_SECONDS
        while _is_there(worker) and time.monotonic() < end:
            time.sleep(0.05)
        assert not _is_there(worker)
    finally:
        if _is_there(worker):
            os.kill(worker, signal.SIGKILL)
        starter.communicate()


def _is_there(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False
