"""One launch of bubblewrap: under limits and its own uid, watched, read, and ended whatever happens.

In: bubblewrap's arguments and a command. Out: exit code, output, and whether the command was started at all. Only here
a process is started for a sandbox, and only here it is killed.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO, Literal

from evsys_sandbox.errors import SandboxError
from evsys_sandbox.seccomp import seccomp_filter

ARGS, STATUS, FILTER = 3, 4, 5
"""Which open files bubblewrap finds them in."""
STATUS_BYTES = 65536
FLOOD_SECONDS = 0.01
"""Between two readings, of 64 KB each, from a command that has written too much and is not to meet a closed pipe."""
LAST_WORDS_SECONDS = 5.0
"""How long the output may take to come when the command is gone."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What a command may use."""

    memory_bytes: int = 2 << 30
    """Address space of each process."""
    total_memory_bytes: int = 4 << 30
    """Memory of all processes together; beyond it all are killed."""
    disk_bytes: int = 4 << 30
    """Of all folders together; beyond it all processes are killed."""
    processes: int = 64
    file_bytes: int = 256 << 20
    """Size of each file written."""
    open_files: int = 512
    tmp_bytes: int = 128 << 20
    """All of /tmp and, again, all of /dev/shm."""
    output_bytes: int = 1 << 20
    """Kept of stdout and of stderr, each: the beginning. A command that writes 16 times as much meets a closed pipe;
    tests are slowed down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracing:
    """How the programs that a command starts are kept apart (`tracer`)."""

    kills_strays: bool = True
    """What a program leaves running is killed when it ends."""
    guarded: str | None = None
    """A folder, mounted by itself, in which programs that run code of the agent (`code_origin`) cannot write."""


class SandboxLaunch:
    """One command inside; made anew for every try."""

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.started = False
        """bubblewrap had everything in place and handed over to the command."""
        self.timed_out = False
        self.killed: Literal["memory", "disk", "forgery"] | None = None
        """Which limit of all processes together it was killed for, or that it was about to forge the tests' reward."""
        self.exit_code = 128 + signal.SIGKILL
        """128 + n when signal n ended it, as the shell counts."""
        self.stdout = ""
        self.stderr = ""
        self.failure: str | None = None
        """Why the result cannot be relied on: not everything was ended, or not everything was watched."""
        self._channel: socket.socket | None = None
        self._over = asyncio.Event()

    async def run(
        self,
        inside: Sequence[str],
        command: Sequence[str],
        *,
        limits: SandboxLimits,
        seconds: float,
        tracing: Tracing | None = None,
    ) -> None:
        """Come back when the command has ended, or has been ended after `seconds`; nothing of it is left then."""
        with ExitStack() as opened:
            readers: list[asyncio.Future[str]] = []
            outputs: list[int] = []  # closed by `_start`, which sends them
            for size in (limits.output_bytes, limits.output_bytes, STATUS_BYTES):
                read, write = os.pipe2(os.O_CLOEXEC)
                pipe = opened.enter_context(os.fdopen(read, "rb", buffering=0))
                readers.append(asyncio.ensure_future(_read_head(pipe, size, is_cut=tracing is None)))
                outputs.append(write)
            try:
                await self._start(opened, outputs, inside, command, limits, seconds, tracing)
                await self._watch(seconds)
                await asyncio.wait(readers, timeout=LAST_WORDS_SECONDS)
                # A pipe may be held open by a process that could not be found.
                self.stdout, self.stderr, status = [each.result() if each.done() else "" for each in readers]
            finally:
                self._over.set()
                for reader in readers:
                    reader.cancel()
            if self.failure is not None and not self.timed_out:
                last = self.stderr.strip().rpartition("\n")[2]
                raise SandboxError(f"the sandbox was ended, because {self.failure}: {last}")
            self.started = '"exit-code"' in status or self.timed_out or self.killed is not None

    async def _start(
        self,
        opened: ExitStack,
        outputs: Sequence[int],
        inside: Sequence[str],
        command: Sequence[str],
        limits: SandboxLimits,
        seconds: float,
        tracing: Tracing | None,
    ) -> None:
        stdout, stderr, status = outputs
        words = [*inside, "--json-status-fd", str(STATUS), "--seccomp", str(FILTER)]
        # A process's CPU time is that of all its threads together: it may use every processor until its time is up.
        cpu_seconds = (math.ceil(seconds) + 1) * len(os.sched_getaffinity(0))
        request = {
            "argv": [*outer_command(self.uid), "--args", str(ARGS), "--", *command],
            "limits": resource_limits(limits, self.uid, cpu_seconds),
            "total_memory_bytes": limits.total_memory_bytes,
            "files": [1, 2, ARGS, STATUS, FILTER],
            "tracing": tracing and asdict(tracing),
        }
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        opened.callback(self._channel.close)  # and that alone would end the command
        self._channel.setblocking(False)
        with ExitStack() as sent:
            sent.callback(theirs.close)
            for output in outputs:
                sent.callback(os.close, output)
            refused = seccomp_filter(
                traces_executions=tracing is not None,
                traces_opens=tracing is not None and tracing.guarded is not None,
            )
            # bubblewrap's own words go by `--args`: on the command line every process on the machine could read them.
            arguments = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)
            contents = (json.dumps(request).encode(), arguments, refused)
            files = [sent.enter_context(memory_file(content)) for content in contents]
            handles = [theirs.fileno(), files[0], stdout, stderr, files[1], status, files[2]]
            await supervisor().launch(handles)

    async def _watch(self, seconds: float) -> None:
        ending = asyncio.ensure_future(self._receive())
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(ending)
        except TimeoutError:
            if not ending.done():
                self.timed_out = True
        finally:
            # A second cancellation may cut this short: then the channel is closed, and that ends the command as well.
            self.end_soon()
            await ending

    async def _receive(self) -> None:
        """What the supervisor has to say when nothing of the command is left."""
        assert self._channel is not None
        try:
            said = await asyncio.get_running_loop().sock_recv(self._channel, 4096)
        except OSError:
            said = b""
        finally:
            self._over.set()
        if not said:
            kill_orphans(self.uid)
            raise SandboxError("the process that watches over sandboxes was ended, and the command with it")
        report = json.loads(said)
        code = report["exit_code"]
        self.failure = report["failure"]
        self.exit_code, self.killed = code if code >= 0 else 128 - code, self.killed or report["killed"]

    def end_soon(self, *, because: Literal["disk"] | None = None) -> None:
        """Ask for the end of everything inside."""
        if self._channel is not None and not self._over.is_set():
            self.killed = self.killed or because
            with contextlib.suppress(OSError):
                self._channel.send(b"end")

    async def end(self) -> None:
        """Kill everything inside, and come back when it is gone."""
        self.end_soon()
        if self._channel is not None:
            await self._over.wait()


class _Supervisor:
    """Our end of `supervisor`: one process for all sandboxes of this process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        # `gone` becomes readable when this process is gone; `held` must stay open here until then.
        self.held: int | None = None
        try:
            gone = os.pidfd_open(os.getpid())
        except OSError:  # an old kernel: a pipe whose other end only this process has, as long as it does not fork
            gone, self.held = os.pipe2(os.O_CLOEXEC)
        environment = {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
        script = str(Path(__file__).with_name("supervisor.py"))
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", script, str(theirs.fileno()), str(gone), f"--launcher={self.owner}"],
                pass_fds=(theirs.fileno(), gone), stdin=subprocess.DEVNULL, start_new_session=True,
                env=environment, cwd="/",
            )  # fmt: skip
        finally:
            theirs.close()
            os.close(gone)

    async def launch(self, handles: Sequence[int]) -> None:
        """Send a launch with its files; the supervisor has its own copies of them afterwards."""
        for _ in range(2000):
            try:
                socket.send_fds(self.control, [b"launch"], list(handles))
            except BlockingIOError:  # it has much to do
                await asyncio.sleep(0.005)
            except OSError as exc:
                if exc.errno != errno.ETOOMANYREFS:
                    raise SandboxError(f"the process that starts sandboxes cannot be reached: {exc}") from exc
                await asyncio.sleep(0.005)
            else:
                return
        raise SandboxError("the process that starts sandboxes does not answer")

    def close(self) -> None:
        self.control.close()
        if self.held is not None:
            os.close(self.held)
        if self.owner == os.getpid():
            self.process.wait()


_current: _Supervisor | None = None
_current_lock = threading.Lock()


def supervisor() -> _Supervisor:
    """This process's supervisor, started at the first use; again after a fork, or when it was killed."""
    global _current
    with _current_lock:
        if _current is not None and (_current.owner != os.getpid() or _current.process.poll() is not None):
            _current.close()
            _current = None
        if _current is None:
            _current = _Supervisor()
        return _current


@atexit.register
def _close_supervisor() -> None:
    if _current is not None and _current.owner == os.getpid():
        _current.close()


def kill_orphans(uid: int) -> None:
    """End processes of the sandbox's own uid whose launcher is gone; a healthy one has bubblewrap as its parent."""
    if uid == os.getuid():
        return
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # Not the owner of the folder in /proc: that is root while a process has privileges in its own namespace.
            facts = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
            if int(facts["Uid"].split()[0]) == uid and int(facts["PPid"]) == 1:
                os.kill(int(place.name), signal.SIGKILL)


def outer_command(uid: int) -> list[str]:
    """What stands before bubblewrap's arguments: another uid, without privileges."""
    drop = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--bounding-set=-all"] if os.geteuid() == 0 else []
    return [_tool("setpriv"), *drop, "--no-new-privs", "--pdeathsig=KILL", _tool("bwrap")]


def resource_limits(limits: SandboxLimits, uid: int, cpu_seconds: int) -> dict[str, int]:
    """By the kernel's names; each holds for a single process, but for `nproc`, which is counted per uid."""
    threads = (
        0  # that the uid has already: none for a uid of the sandbox alone, all of the user's where we are not root
    )
    for tasks in Path("/proc").glob("[0-9]*/task") if uid == os.getuid() else ():
        with contextlib.suppress(OSError):
            threads += len(os.listdir(tasks)) if tasks.stat().st_uid == uid else 0
    return {
        "as": limits.memory_bytes, "nproc": limits.processes + threads, "fsize": limits.file_bytes,
        "nofile": limits.open_files, "cpu": cpu_seconds, "core": 0,
    }  # fmt: skip


@cache
def why_not_traced() -> str | None:
    """Why the programs that tests start cannot be kept apart on this machine; None where they can. Found out once."""
    script = str(Path(__file__).with_name("supervisor.py"))
    environment = {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
    try:
        tried = subprocess.run(
            [sys.executable, "-I", "-S", script, "--try-tracing"],
            capture_output=True, text=True, env=environment, cwd="/", timeout=60, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "a trial did not end"
    if tried.returncode != 0:
        return (tried.stderr.strip() or f"exit code {tried.returncode}").splitlines()[-1]
    return tried.stdout.strip() or None


@cache
def _tool(name: str) -> str:
    return shutil.which(name, path=PATH) or name


async def _read_head(pipe: IO[bytes], limit: int, *, is_cut: bool) -> str:
    """The first `limit` bytes; what follows is thrown away, and a flood is cut off, or read slowly."""
    kept, seen = bytearray(), 0
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        while part := await reader.read(65536):
            kept += part[: limit - len(kept)]
            seen += len(part)
            if seen > 16 * limit:
                if is_cut:
                    break  # the other side meets a closed pipe, as with `| head`
                # Tests write there too: a `grep` that meets a closed pipe seems to have found nothing.
                await asyncio.sleep(FLOOD_SECONDS)
    finally:
        transport.close()
    return kept.decode(errors="replace")


@contextmanager
def memory_file(content: bytes) -> Iterator[int]:
    """An open handle on the content, for bubblewrap to read."""
    handle = os.memfd_create("evsys-sandbox")
    try:
        with os.fdopen(os.dup(handle), "wb") as file:
            file.write(content)
        os.lseek(handle, 0, os.SEEK_SET)
        yield handle
    finally:
        os.close(handle)
