"""One launch of bubblewrap: under limits and a uid of its own, watched, read, and ended whatever happens.

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
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Literal

from evsys_sdk.errors import EvsysError
from evsys_sdk.sandbox_filter import seccomp_filter

ARGS, STATUS, FILTER = 3, 4, 5
"""Which open files bubblewrap finds them in."""
STATUS_BYTES = 65536
LAST_WORDS_SECONDS = 5.0
"""How long the output may take to come when the command is gone."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class SandboxError(EvsysError):
    """The sandbox itself failed: the command did not run, or a file cannot be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
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
    """Kept of stdout and of stderr, each: the beginning. A command that writes 16 times as much meets a closed pipe."""


class Launch:
    """One command inside; made anew for every try."""

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.started = False
        """bubblewrap had everything in place and handed over to the command."""
        self.timed_out = False
        self.killed: Literal["memory", "disk"] | None = None
        """Which limit of all processes together it was killed for."""
        self.exit_code = 128 + signal.SIGKILL
        """128 + n when signal n ended it, as the shell counts."""
        self.stdout = ""
        self.stderr = ""
        self._channel: socket.socket | None = None
        self._over = asyncio.Event()

    async def run(
        self,
        inside: Sequence[str],
        command: Sequence[str],
        *,
        limits: Limits,
        seconds: float,
    ) -> None:
        """Come back when the command has ended, or has been ended after `seconds`; nothing of it is left then."""
        with ExitStack() as opened:
            pipes = [_pipe(opened) for _ in range(3)]
            sizes = (limits.output_bytes, limits.output_bytes, STATUS_BYTES)
            readers = [asyncio.ensure_future(_head(read, size)) for (read, _), size in zip(pipes, sizes, strict=True)]
            try:
                await self._start(opened, [write for _, write in pipes], inside, command, limits, seconds)
                await self._watch(seconds)
                await asyncio.wait(readers, timeout=LAST_WORDS_SECONDS)
                self.stdout, self.stderr, status = [_said(reader) for reader in readers]
            finally:
                self._over.set()
                for reader in readers:
                    reader.cancel()
            self.started = '"exit-code"' in status or self.timed_out or self.killed is not None

    async def _start(
        self,
        opened: ExitStack,
        outputs: Sequence[int],
        inside: Sequence[str],
        command: Sequence[str],
        limits: Limits,
        seconds: float,
    ) -> None:
        stdout, stderr, status = outputs
        words = [*inside, "--json-status-fd", str(STATUS), "--seccomp", str(FILTER)]
        request = {
            "argv": [*outer_command(self.uid), "--args", str(ARGS), "--", *command],
            "limits": resource_limits(limits, self.uid, math.ceil(seconds) + 1),
            "total_memory_bytes": limits.total_memory_bytes,
            "files": [1, 2, ARGS, STATUS, FILTER],
        }
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        opened.callback(self._channel.close)  # and that alone would end the command
        self._channel.setblocking(False)
        with ExitStack() as sent:
            sent.callback(theirs.close)
            for output in outputs:
                sent.callback(os.close, output)
            files = [
                sent.enter_context(memory_file(content))
                for content in (json.dumps(request).encode(), _arguments(words), seccomp_filter())
            ]
            handles = [theirs.fileno(), files[0], stdout, stderr, files[1], status, files[2]]
            await supervisor().launch(handles)

    async def _watch(self, seconds: float) -> None:
        ending = asyncio.ensure_future(self._hear())
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

    async def _hear(self) -> None:
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
        told = json.loads(said)
        code = told["exit_code"]
        self.exit_code, self.killed = code if code >= 0 else 128 - code, self.killed or told["killed"]

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


def _pipe(opened: ExitStack) -> tuple[IO[bytes], int]:
    """A reading end, closed with the stack at the latest, and a writing end, closed by the function that sends it."""
    read, write = os.pipe2(os.O_CLOEXEC)
    return opened.enter_context(os.fdopen(read, "rb", buffering=0)), write


def _said(reader: asyncio.Future[str]) -> str:
    return reader.result() if reader.done() else ""  # held open by a process that could not be found


class _Supervisor:
    """Our end of `sandbox_supervisor`: one process for all sandboxes of this process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        gone, self.held = _gone_with_us()
        environment = {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
        script = str(Path(__file__).with_name("sandbox_supervisor.py"))
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


def _gone_with_us() -> tuple[int, int | None]:
    """A file that becomes readable when this process is gone, and what must stay open here until then."""
    try:
        return os.pidfd_open(os.getpid()), None
    except OSError:  # an old kernel: a pipe whose other end only this process has, as long as it does not fork
        read, write = os.pipe2(os.O_CLOEXEC)
        return read, write


def kill_orphans(uid: int) -> None:
    """End processes of the sandbox's own uid whose launcher is gone; a healthy one has bubblewrap as its parent."""
    if uid == os.getuid():
        return
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if _uid_and_parent(place) == (uid, 1):
                os.kill(int(place.name), signal.SIGKILL)


def _uid_and_parent(place: Path) -> tuple[int, int]:
    # Not the owner of the folder in /proc: that is root while a process has privileges in a namespace of its own.
    facts = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
    return int(facts["Uid"].split()[0]), int(facts["PPid"])


def outer_command(uid: int) -> list[str]:
    """What stands before bubblewrap's arguments: another uid, without privileges."""
    drop = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--bounding-set=-all"] if os.geteuid() == 0 else []
    return [_tool("setpriv"), *drop, "--no-new-privs", "--pdeathsig=KILL", _tool("bwrap")]


def resource_limits(limits: Limits, uid: int, cpu_seconds: int) -> dict[str, int]:
    """By the kernel's names; each holds for a single process, but for `nproc`, which is counted per uid."""
    return {
        "as": limits.memory_bytes, "nproc": limits.processes + _threads_of(uid), "fsize": limits.file_bytes,
        "nofile": limits.open_files, "cpu": cpu_seconds, "core": 0,
    }  # fmt: skip


def _threads_of(uid: int) -> int:
    """How many the uid has already: none for a uid of its own, all of the user's where we are not root."""
    if uid != os.getuid():
        return 0
    count = 0
    for tasks in Path("/proc").glob("[0-9]*/task"):
        with contextlib.suppress(OSError):
            count += len(os.listdir(tasks)) if tasks.stat().st_uid == uid else 0
    return count


@cache
def _tool(name: str) -> str:
    return shutil.which(name, path=PATH) or name


async def _head(pipe: IO[bytes], limit: int) -> str:
    """The first `limit` bytes; what follows is thrown away, and a flood is cut off."""
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
                break  # the other side meets a closed pipe, as with `| head`
    finally:
        transport.close()
    return kept.decode(errors="replace")


def _arguments(words: Sequence[str]) -> bytes:
    """Words for `--args`: on the command line every process on the machine could read them."""
    return b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)


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
