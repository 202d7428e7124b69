"""One launch of bubblewrap: under limits and a uid of its own, watched, read, and ended whatever happens.

In: bubblewrap's arguments and a command. Out: exit code, output, and whether the command was started at all. Only here
a process is started for a sandbox, and only here it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from evsys_sdk.sandbox_filter import keyring_filter

LAST_WORDS_SECONDS = 5.0
"""How long the output may take to come when the command is gone."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a command may use."""

    memory_bytes: int = 2 << 30
    """Address space of each process."""
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
        self.stdout = ""
        self.stderr = ""
        self._process: asyncio.subprocess.Process | None = None
        self._status_pipe = -1
        self._status = b""

    @property
    def exit_code(self) -> int:
        """128 + n when signal n ended it, as the shell counts."""
        code = self._process.returncode if self._process else None
        if code is None:
            return 128 + signal.SIGKILL
        return code if code >= 0 else 128 - code

    async def run(
        self, outside: Sequence[str], inside: Sequence[str], command: Sequence[str], seconds: float, output_bytes: int
    ) -> None:
        """Come back when the command has ended, or has been ended after `seconds`; nothing of it is left then."""
        with ExitStack() as opened:
            self._status_pipe, status = os.pipe2(os.O_CLOEXEC)
            opened.callback(os.close, self._status_pipe)
            os.set_blocking(self._status_pipe, False)
            refused = opened.enter_context(memory_file(keyring_filter()))
            words = [*inside, "--json-status-fd", str(status), "--seccomp", str(refused)]
            args = opened.enter_context(memory_file(_arguments(words)))
            try:
                process = self._process = await asyncio.create_subprocess_exec(
                    *outside, "--args", str(args), "--", *command,
                    stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                    env={}, cwd="/", pass_fds=(args, status, refused),
                )  # fmt: skip
            finally:
                os.close(status)
            await self._watch(process, seconds, output_bytes)
            self._read_status()
            self.started = b'"exit-code"' in self._status or self.timed_out

    async def _watch(self, process: asyncio.subprocess.Process, seconds: float, output_bytes: int) -> None:
        assert process.stdout is not None and process.stderr is not None
        readers = [asyncio.ensure_future(_head(pipe, output_bytes)) for pipe in (process.stdout, process.stderr)]
        try:
            async with asyncio.timeout(seconds):
                await process.wait()
        except TimeoutError:
            self.timed_out = True
        except BaseException:
            for reader in readers:
                reader.cancel()
            raise
        finally:
            await self.end()
            kill_orphans(self.uid)  # killed while it was starting, bubblewrap leaves its half-made inside behind
        await asyncio.wait(readers, timeout=LAST_WORDS_SECONDS)
        self.stdout, self.stderr = [_said(reader) for reader in readers]

    async def end(self) -> None:
        """Kill everything inside, and come back when it is gone."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._read_status()
        # The first process inside: with it the kernel ends all others, and only then bubblewrap itself returns.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(_inner_pid(self._status) or process.pid, signal.SIGKILL)
        # Not process.wait(): it also waits for the pipes, which a half-made inside would hold open for ever.
        pause, waited = 0.001, 0.0
        while process.returncode is None:
            await asyncio.sleep(pause)
            waited, pause = waited + pause, min(pause * 2, 0.05)
            if waited > 5:
                kill_orphans(self.uid)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    def _read_status(self) -> None:
        with contextlib.suppress(OSError):
            while part := os.read(self._status_pipe, 4096):
                self._status += part


def _said(reader: asyncio.Future[str]) -> str:
    if reader.done():
        return reader.result()
    reader.cancel()  # somebody holds the pipe open whom nobody can find
    return ""


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


def outer_command(limits: Limits, uid: int, cpu_seconds: int) -> list[str]:
    """What stands before bubblewrap's arguments: limits, then another uid without privileges."""
    rules = {
        "as": limits.memory_bytes, "nproc": limits.processes + _threads_of(uid), "fsize": limits.file_bytes,
        "nofile": limits.open_files, "cpu": cpu_seconds, "core": 0,
    }  # fmt: skip
    drop = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--bounding-set=-all"] if os.geteuid() == 0 else []
    # Limits hold for each process; when all together use up the machine's memory, the kernel is to take these first.
    limited = [
        _tool("choom"),
        "-n",
        "1000",
        "--",
        _tool("prlimit"),
        *(f"--{key}={value}" for key, value in rules.items()),
    ]
    # bubblewrap asks to die with its parent too, but not before it has begun.
    return [*limited, _tool("setpriv"), *drop, "--no-new-privs", "--pdeathsig=KILL", _tool("bwrap")]


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


def _inner_pid(status: bytes) -> int | None:
    for line in status.splitlines():
        with contextlib.suppress(ValueError):
            pid = json.loads(line).get("child-pid")
            if isinstance(pid, int):
                return pid
    return None


async def _head(pipe: asyncio.StreamReader, limit: int) -> str:
    """The first `limit` bytes; what follows is thrown away, and a flood is cut off."""
    kept, seen = bytearray(), 0
    while part := await pipe.read(65536):
        kept += part[: limit - len(kept)]
        seen += len(part)
        if seen > 16 * limit:
            pipe._transport.close()  # type: ignore[attr-defined]  # as `| head` does it
            break
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
