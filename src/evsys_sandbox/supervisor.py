"""The process that starts sandboxes for a launcher, and outlives it for as long as it takes to kill them all.

In: launches over a socket, each with its open files and a channel. Out: on that channel, how the command
ended, once nothing of it is left. Run as a script, by the launcher's Python, without evsys_sdk and without
site-packages: it must be small and start fast.

Why there is such a process: bubblewrap's own `--die-with-parent`, and the kernel's parent-death signal, hold only from
the moment a process has asked for them. A launcher killed a little earlier would leave a half-made sandbox behind. Here
nothing is asked of the sandbox: this process watches a file descriptor that becomes readable when the launcher is gone
(from whenever that was), and it is the subreaper of all it started, so that whatever loses its parent becomes its
child. A child that it did not start itself is an orphan, and is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
import types
from functools import cache
from typing import TypedDict

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_SECONDS = 0.25
"""Between two looks at how much memory sandboxes use."""
NOT_STARTED = 126
TRACER_FAILED, REWARD_FORGED = signal.SIGTERM, signal.SIGUSR1
"""By which a tracer ends itself. Nothing else sends it these signals, and no exit code of a command is one of them."""
STUCK_SECONDS = 30.0
"""How long killed processes may take to end before the supervisor no longer waits for them."""


class TracingRequest(TypedDict):
    """`launch.Tracing`."""

    kills_strays: bool
    guarded: str | None


class LaunchRequest(TypedDict):
    """What a launcher asks for; made in `launch`."""

    argv: list[str]
    limits: dict[str, int]
    """By the names of the kernel's RLIMIT_*."""
    total_memory_bytes: int
    files: list[int]
    """Which numbers the files that come with the request get."""
    tracing: TracingRequest | None


class RunningSandbox:
    """One sandbox, from its start until nothing of it is left."""

    def __init__(self, pid: int, channel: socket.socket, request: LaunchRequest) -> None:
        self.pid, self.channel = pid, channel
        self.memory_bytes: int = request["total_memory_bytes"]
        self.killed: str | None = None
        """Which limit it was killed for; `forgery` where its tracer saw one."""
        self.status: int | None = None
        """As the kernel gave it, when bubblewrap is gone; others of the sandbox may be dying still."""


class Supervisor:
    """Starts, watches, kills, reports."""

    def __init__(self, control: socket.socket, launcher_gone: int) -> None:
        self.control, self.launcher_gone = control, launcher_gone
        self.running: dict[int, RunningSandbox] = {}
        """By the process id of bubblewrap."""
        self.ended: list[RunningSandbox] = []
        """Not yet reported: orphans are left, of these or of others."""
        self.orphans: dict[int, float] = {}
        """Killed and not yet reaped, and since when."""
        self.selector = selectors.DefaultSelector()
        self.next_look = 0.0

    def serve(self) -> None:
        """Until the launcher is gone; whatever happens, nothing is left behind."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        # Python writes to the wake-up pipe only for signals that have a handler.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for end in (signal.SIGINT, signal.SIGHUP):
            signal.signal(end, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        for file in (self.control, self.launcher_gone, wake_read):
            self.selector.register(file, selectors.EVENT_READ)
        try:
            while self._turn(wake_read):
                pass
        finally:
            self._kill_everything()

    def _turn(self, wake_read: int) -> bool:
        """One round; False when the launcher is gone."""
        # Memory is looked at as long as something runs; without a sandbox the process sleeps until a launch comes.
        ready = self.selector.select(LOOK_SECONDS if self.running or self.ended else None)
        files = [key.fileobj for key, _ in ready]
        if self.launcher_gone in files or (self.control in files and not self._start()):
            return False
        for key, _ in ready:
            if isinstance(key.data, RunningSandbox):
                self._receive(key.data)
        if wake_read in files:
            os.read(wake_read, 4096)
        self._reap()
        if self.running and time.monotonic() >= self.next_look:
            self._look_at_memory()
            self.next_look = time.monotonic() + LOOK_SECONDS
        return True

    def _start(self) -> bool:
        try:
            message, handles, _, _ = socket.recv_fds(self.control, 16, 8)
        except OSError:
            return False
        if not message:
            return False
        channel_handle, request_handle, *files = handles
        channel = socket.socket(fileno=channel_handle)
        with open(request_handle, "rb") as file:
            request: LaunchRequest = json.loads(file.read())
        if request["tracing"] is not None:
            _tracer_module()  # here, once
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(request, files, supervisor)
        for handle in files:
            os.close(handle)
        running = self.running[pid] = RunningSandbox(pid, channel, request)
        self.selector.register(channel, selectors.EVENT_READ, running)
        return True

    def _receive(self, running: RunningSandbox) -> None:
        """A word on a sandbox's channel, or its end: its launcher wants it ended."""
        self.selector.unregister(running.channel)
        with contextlib.suppress(OSError):
            running.channel.recv(16)  # closing a channel with a word unread would throw our own last word away
        if running.status is None:
            os.kill(running.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in self.running:
                running = self.running.pop(pid)
                running.status = status
                self.ended.append(running)
        orphans = children() - self.running.keys()
        now = time.monotonic()
        self.orphans = {pid: self.orphans.get(pid, now) for pid in orphans}
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        # bubblewrap may return before the inside is dead: nothing is reported while anything is dying.
        if not orphans:
            self._report()
        elif all(now > since + STUCK_SECONDS for since in self.orphans.values()):
            self._report(failure=f"{len(orphans)} of its processes were killed and did not end in {STUCK_SECONDS:g} s")

    def _report(self, *, failure: str | None = None) -> None:
        for running in self.ended:
            code = os.waitstatus_to_exitcode(running.status or 0)
            own_failure = failure or ("its tracer failed" if code == -TRACER_FAILED else None)
            if code == -REWARD_FORGED:
                running.killed = "forgery"
            status = {"exit_code": code, "killed": running.killed, "failure": own_failure}
            with contextlib.suppress(OSError):  # where the launcher has gone
                running.channel.send(json.dumps(status).encode())
            if running.channel.fileno() in self.selector.get_map():
                self.selector.unregister(running.channel)
            running.channel.close()
        self.ended.clear()

    def _look_at_memory(self) -> None:
        families = descendants(set(self.running))
        for running in self.running.values():
            family = families[running.pid]
            # Resident memory counts shared pages once for each process: only the exact sum is reason to kill.
            if sum(map(resident_bytes, family)) > running.memory_bytes and (
                sum(map(proportional_bytes, family)) > running.memory_bytes
            ):
                running.killed = "memory"
                os.kill(running.pid, signal.SIGKILL)

    def _kill_everything(self) -> None:
        """Kill children, which makes their children ours, until there are none; or none that the kernel can end."""
        signal.set_wakeup_fd(-1)
        limit = time.monotonic() + STUCK_SECONDS
        while time.monotonic() < limit:
            for pid in children():
                os.kill(pid, signal.SIGKILL)
            try:
                # Each death begins the time anew: many processes may take long, and only a standstill ends the wait.
                while os.waitpid(-1, os.WNOHANG)[0]:
                    limit = time.monotonic() + STUCK_SECONDS
            except ChildProcessError:
                return
            time.sleep(0.002)


def _become(request: LaunchRequest, files: list[int], supervisor: int) -> None:
    """Turn this new process into the command: its files, its limits, and then the program. Where the programs that the
    command starts are to be kept apart, this process traces them, and the command is its child."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        if request["tracing"] is not None:
            # The command dies with this process, and this process with the supervisor.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            # The supervisor may have died before the request above: then the signal never comes.
            if os.getppid() != supervisor:
                return
            # A copy of another sandbox's channel would hide the supervisor's death from that sandbox's launcher.
            for handle in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *files}:
                with contextlib.suppress(OSError):
                    os.close(handle)
            module, stderr = _tracer_module(), os.dup(files[1])
            tracer = module.Tracer(landlock_version=module.landlock_version(), **request["tracing"])
            try:
                os._exit(tracer.run(lambda: _execute(request, files), given_away=files))
            except BaseException as exc:
                is_forged = isinstance(exc, module.RewardForged)
                os.set_blocking(stderr, False)  # a pipe that is full and not read must not hold this process
                with contextlib.suppress(OSError):
                    os.write(stderr, f"\n{exc if is_forged else f'the tracer failed: {exc!r}'}\n".encode())
                os.kill(os.getpid(), REWARD_FORGED if is_forged else TRACER_FAILED)
        _execute(request, files)
    except BaseException as exc:
        os.write(files[1], f"the sandbox could not be started: {exc}\n".encode())
    finally:
        os._exit(NOT_STARTED)


@cache
def _tracer_module() -> types.ModuleType:
    """`tracer`. This script runs without a path to packages: ours is made known by its folder."""
    package = sys.modules["evsys_sandbox"] = types.ModuleType("evsys_sandbox")
    package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    return importlib.import_module("evsys_sandbox.tracer")


def _execute(request: LaunchRequest, files: list[int]) -> None:
    try:
        # Moved out of the way first: a file may have come in under another's number.
        moved = [fcntl.fcntl(handle, fcntl.F_DUPFD, 20) for handle in files]
        for target, handle in zip(request["files"], moved, strict=True):
            os.dup2(handle, target, inheritable=True)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0, inheritable=True)
        os.closerange(max(request["files"]) + 1, 1 << 16)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # when memory runs out, the kernel is to take these first
        for name, limit in request["limits"].items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (limit, limit))
        os.execve(request["argv"][0], request["argv"], {})
    except BaseException as exc:
        os.write(2, f"the sandbox could not be started: {exc}\n".encode())
    finally:
        os._exit(NOT_STARTED)


def children() -> set[int]:
    """This process's children, the dead ones that it has not reaped included."""
    own = os.getpid()
    try:
        # Complete, because a child leaves this list only when it is reaped, and only this thread reaps.
        with open(f"/proc/self/task/{own}/children") as file:
            return {int(pid) for pid in file.read().split()}
    except OSError:  # a kernel without this file
        return {pid for pid, parent in parents().items() if parent == own}


def parents() -> dict[int, int]:
    """Every process, and its parent."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # The name of the program stands in brackets, and may hold anything.
                    found[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue
    return found


def descendants(roots: set[int]) -> dict[int, list[int]]:
    """For each of these processes, itself and all that descend from it."""
    parent_of = parents()
    families: dict[int, list[int]] = {root: [] for root in roots}
    for pid in parent_of:
        above = pid
        while above not in roots and above in parent_of:
            above = parent_of[above]
        if above in roots:
            families[above].append(pid)
    return families


def resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            # The second number is the resident set, in pages.
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def proportional_bytes(pid: int) -> int:
    """Memory with each shared page divided among those that share it."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    except OSError:
        return 0


def main() -> None:
    """`supervisor.py CONTROL LAUNCHER_GONE --launcher=PID`; the last is for people who look at `ps`.

    `supervisor.py --try-tracing` prints why programs cannot be kept apart on this machine, or nothing.
    """
    if sys.argv[1:] == ["--try-tracing"]:
        print(_tracer_module().why_impossible() or "")
        return
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.umask(0o022)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    Supervisor(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])).serve()


if __name__ == "__main__":
    main()
