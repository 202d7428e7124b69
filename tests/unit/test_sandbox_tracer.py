"""Moments that the tracer meets once in many thousand forks, made to happen every time."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from evsys_sandbox.errors import SandboxError
from evsys_sandbox.launch import PATH, Tracing, supervisor, why_not_traced
from evsys_sandbox.sandbox import Sandbox, View, why_unavailable
from evsys_sandbox.supervisor import parents

pytestmark = [
    pytest.mark.skipif(why_unavailable() is not None, reason=why_unavailable() or ""),
    pytest.mark.skipif(why_not_traced() is not None, reason=why_not_traced() or ""),
]
TRACED = """
import os, signal, sys, time
from evsys_sandbox import tracer

FORKS = (tracer.EVENT_FORK, tracer.EVENT_VFORK, tracer.EVENT_CLONE)
handle_stop = tracer.Tracer._handle_stop

def is_victim(tid):
    with open(f"/proc/{tid}/cmdline", "rb") as file:
        return file.read().startswith(b"victim")

def wait_for(tid, what):
    return os.waitid(os.P_PID, tid, what | tracer.WALL)

def stop_first(self, child):
    "Have the child's first stop handled before its birth is; it may have been already."
    if child not in self.waiting:
        handle_stop(self, child, wait_for(child, os.WSTOPPED).si_status)

def start():
    jail = ["--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    os.execv(sys.argv[1], ["bwrap", *jail, "/bin/bash", "-c", sys.argv[2]])

def follow():
    return tracer.Tracer(kills_strays=True, landlock_version=tracer.landlock_version()).run(start)

"""
"""`victim` is a shell whose forks the tests interfere with."""
VICTIM = "(exec -a victim bash -c '/bin/true; echo forked; exit 7')"


def trace(change: str, command: str) -> subprocess.CompletedProcess[str]:
    """Follow a command inside of bubblewrap, with a tracer that was changed; one that hangs is a failed test."""
    bwrap = shutil.which("bwrap", path=PATH)
    assert bwrap is not None
    script = TRACED + textwrap.dedent(change) + "\nprint('exit code', follow())\n"
    return subprocess.run(
        [sys.executable, "-c", script, bwrap, command], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_child_whose_parent_was_killed_before_it_reported_the_birth_does_not_hold_up_the_end():
    """The sandbox's first process ends only when the tracer has reaped that child."""
    killed_in_the_middle_of_a_fork = """
        def killed(self, tid, status):
            if status >> 8 in FORKS and is_victim(tid):
                print("killed", flush=True)
                os.kill(tid, signal.SIGKILL)
            else:
                handle_stop(self, tid, status)
        tracer.Tracer._handle_stop = killed
        tracer.UNCLAIMED_SECONDS = 1000.0  # the end comes first
    """
    done = trace(killed_in_the_middle_of_a_fork, f"{VICTIM}; exit 5")
    assert done.stdout == "killed\nexit code 5\n", done.stderr


def test_a_child_whose_parent_was_killed_before_it_reported_the_birth_is_killed_while_the_tests_run():
    """It would hold open the pipe that the tests read to its end."""
    killed_in_the_middle_of_a_fork = """
        def killed(self, tid, status):
            if status >> 8 in FORKS and is_victim(tid):
                os.kill(tid, signal.SIGKILL)
            else:
                handle_stop(self, tid, status)
        tracer.Tracer._handle_stop = killed
    """
    done = trace(killed_in_the_middle_of_a_fork, f"read -r line < <({VICTIM}); echo ended; exit 5")
    assert done.stdout == "ended\nexit code 5\n", done.stderr


def test_a_parent_runs_on_whose_child_was_killed_before_its_birth_was_reported():
    child_killed = """
        def killed(self, tid, status):
            if status >> 8 in FORKS and is_victim(tid):
                child = tracer.event_message(tid)
                stop_first(self, child)
                os.kill(child, signal.SIGKILL)
                wait_for(child, os.WEXITED | os.WNOWAIT)
            handle_stop(self, tid, status)
        tracer.Tracer._handle_stop = killed
    """
    done = trace(child_killed, VICTIM)
    assert done.stdout == "forked\nexit code 7\n", done.stderr


def test_a_child_lives_however_long_its_parent_takes_to_report_the_birth():
    """As on a machine with much else to do."""
    late = """
        tracer.UNCLAIMED_SECONDS = 0.05
        late = []
        def put_off(self, tid, status):
            if status >> 8 in FORKS and is_victim(tid) and not late:
                child = tracer.event_message(tid)
                stop_first(self, child)
                late.append((tid, status, time.monotonic() + 1))
            else:
                handle_stop(self, tid, status)
            if late and late[0] and time.monotonic() > late[0][2]:
                waiting, late[0] = late[0], None
                handle_stop(self, *waiting[:2])
        tracer.Tracer._handle_stop = put_off
    """
    parent = "(exec -a victim bash -c '/bin/echo born; echo $?')"
    # Other programs start meanwhile: the late report comes with an event of theirs.
    done = trace(late, f"(while :; do /bin/true; done) & {parent}; kill $!; exit 5")
    assert done.stdout == "born\n0\nexit code 5\n", done.stderr


def test_the_number_of_a_child_that_is_gone_is_not_taken_up():
    """It may belong to a stranger by now, who must not be killed with the program."""
    gone = """
        stranger = os.posix_spawn("/bin/sleep", ["sleep", "1000"], {})
        event_message = tracer.event_message
        def reaped(self, tid, status):
            if status >> 8 in FORKS and is_victim(tid):
                child = event_message(tid)
                os.kill(child, signal.SIGKILL)
                wait_for(child, os.WEXITED)
                self._forget(child)
                tracer.event_message = lambda tid: stranger
            handle_stop(self, tid, status)
            tracer.event_message = event_message
        tracer.Tracer._handle_stop = reaped
    """
    kept = "print('stranger', os.waitpid(stranger, os.WNOHANG)); os.kill(stranger, 9)"
    done = trace(f"{gone}\n        import atexit; atexit.register(lambda: exec({kept!r}))", f"{VICTIM}; exit 5")
    assert done.stdout == "forked\nexit code 5\nstranger (0, 0)\n", done.stdout + done.stderr


@pytest.mark.parametrize(
    "change",
    [
        "tracer.Tracer._is_reaped = lambda self, process: False",
        "tracer.ptrace = lambda request, *rest: 0 if request == tracer.SYSCALL else ptrace(request, *rest)",
    ],
    ids=["a killed process that does not end", "a program that does not run"],
)
def test_a_wait_without_progress_ends_the_tracer_which_says_why(change):
    done = trace(f"ptrace, tracer.STUCK_SECONDS = tracer.ptrace, 0.5\n{change}", "(sleep 1000 &); exit 5")
    assert done.returncode == 1 and "TracerStuck: no progress for 0.5 s" in done.stderr, done.stderr


async def test_a_tracer_that_fails_gives_no_result():
    async with Sandbox() as box:
        running = asyncio.ensure_future(
            box.run("echo x > /app/begun; sleep 1000", timeout_seconds=600, view=View(tracing=Tracing()))
        )
        while not running.done():
            try:
                box.read("/app/begun")
                break
            except FileNotFoundError:
                await asyncio.sleep(0.01)
        children = [pid for pid, parent in parents().items() if parent == supervisor().process.pid]
        # A tracer is a fork of the supervisor, so it has its command line.
        [tracer] = [pid for pid in children if b"supervisor.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(tracer, signal.SIGTERM)
        with pytest.raises(SandboxError, match="the sandbox was ended, because its tracer failed"):
            await running


def test_the_supervisor_does_not_wait_for_ever_for_a_process_that_does_not_end():
    """Nothing else happens meanwhile: no sandbox runs, no launcher speaks, no child ends."""
    script = """
import os, select, socket
from evsys_sandbox import supervisor

supervisor.STUCK_SECONDS = 0.5
supervisor.children = lambda: {1}
supervisor.os.kill = lambda pid, number: None
control, launcher = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
gone, _ = os.pipe()
ours, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
watch = supervisor.Supervisor(control, gone)
watch.ended.append(supervisor.RunningSandbox(2, channel, {"total_memory_bytes": 1}))
wake, _ = os.pipe()
for file in (control, gone, wake):
    watch.selector.register(file, supervisor.selectors.EVENT_READ)
while not select.select([ours], [], [], 0)[0]:
    watch._turn(wake)
print(ours.recv(1000).decode())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert "1 of its processes were killed and did not end in 0.5 s" in done.stdout, done.stderr


async def test_tests_that_follow_a_link_to_their_reward_are_ended_with_a_message_that_names_it():
    async with Sandbox(folders=("/app", "/logs", "/logs/verifier")) as box:
        box.write("lays.sh", "ln -s /logs/verifier/reward.txt /app/out.txt")
        view = View(tracing=Tracing(guarded="/logs/verifier"))
        done = await box.run(["/bin/bash", "-c", "bash /app/lays.sh; cd /app; echo 1 > out.txt; echo on"], view=view)
    assert (done.killed, done.stdout) == ("forgery", "")
    assert done.stderr.strip() == "a link led what the tests do with /app/out.txt to /logs/verifier"


def test_a_sandbox_whose_tracer_failed_does_not_make_those_reported_after_it_fail():
    script = """
import os, signal, socket
from evsys_sandbox import supervisor

watch = supervisor.Supervisor(None, 0)
ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
for (_, theirs), status in zip(ends, (0, int(supervisor.TRACER_FAILED), 0)):
    running = supervisor.RunningSandbox(1, theirs, {"total_memory_bytes": 1})
    running.status = status
    watch.ended.append(running)
watch._report()
print([supervisor.json.loads(ours.recv(1000))["failure"] for ours, _ in ends])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[None, 'its tracer failed', None]", done.stderr
