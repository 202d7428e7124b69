"""Run `evsys` commands in processes that are forked from one that has imported everything.

In: arguments, a folder, an environment. Out: a `ForkedProcess`, used like `subprocess.Popen`: its own pid, signals,
pipes, exit code. An interpreter that imports the SDK, scipy and matplotlib costs 1.5 s of CPU, as much as the commands
of most tests; a fork costs 20 ms. This file is also the server's script: `python fork_server.py <file descriptor>`.

What a fork does not test: the start of the interpreter and the imports. Tests about those pass `cold=True` to
`project.evsys` or `project.start`. Environment variables that are read at import force a cold start by themselves.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import pkgutil
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

PLOTS = ("scipy.special", "matplotlib.figure", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg")
"""Libraries that a run on the mock backend imports when it needs them."""

READ_AT_IMPORT = ("PYTHON", "LD_", "MALLOC_", "HOME", "XDG_", "MPL", "OMP_", "OPENBLAS_")
"""Variables with these beginnings are read while modules load: a fork would have the server's."""


def variables_read_at_import(environ: Mapping[str, str]) -> dict[str, str]:
    # HASHSEED is the server's own: it decides the order of sets, and no test may depend on that.
    return {key: value for key, value in environ.items() if key.startswith(READ_AT_IMPORT) and key != "PYTHONHASHSEED"}


def send_signal_at(file: str, lines: int, number: int) -> None:
    """Let this process send itself signal `number` as soon as `file` has `lines` lines. A test that looked into the
    file and sent the signal from outside would be late on a busy machine."""
    from evsys_sdk.record.log_stores import JsonlLogStore

    write, is_sent = JsonlLogStore.log_metrics, threading.Event()

    def log_metrics(store: JsonlLogStore, metrics: dict[str, float], step: int) -> None:
        write(store, metrics, step)
        if not is_sent.is_set() and Path(file).read_bytes().count(b"\n") >= lines:
            is_sent.set()
            os.kill(os.getpid(), number)
            for _ in range(0 if number == signal.SIGSTOP else 100):
                time.sleep(0.01)  # another thread handles the signal; the step must not end before that

    JsonlLogStore.log_metrics = log_metrics  # type: ignore[method-assign]


class ForkServer:
    """A process that has imported `modules` and forks once per command."""

    def __init__(self, modules: Sequence[str], *, hash_seed: int):
        self.variables = variables_read_at_import(os.environ)
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            )

    def fork(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        environ: Mapping[str, str],
        signal_at: tuple[Path, int, int] | None = None,
    ) -> ForkedProcess:
        about = {"arguments": list(arguments), "cwd": str(cwd), "environ": dict(environ)}
        request = json.dumps({**about, "signal_at": signal_at}, default=str)
        (out, their_out), (err, their_err), (status, their_status) = (os.pipe() for _ in range(3))
        try:
            with self._lock:
                socket.send_fds(self._channel, [request.encode()], [0, their_out, their_err, their_status])
                answer = self._channel.recv(32)
        finally:
            for descriptor in (their_out, their_err, their_status):
                os.close(descriptor)
        assert answer, f"the fork server ended with {self._process.wait()}"
        return ForkedProcess(int(answer), arguments, out, err, status)

    def close(self) -> None:
        self._channel.close()  # the server ends when nothing can be asked any more
        self._process.wait(timeout=300)


class ForkedProcess:
    """The part of `subprocess.Popen` that tests use, for a process whose parent is the fork server."""

    def __init__(self, pid: int, arguments: Sequence[str], stdout: int, stderr: int, status: int):
        self.pid, self.args = pid, list(arguments)
        self.returncode: int | None = None
        self.stdout: IO[str] = open(stdout)  # noqa: SIM115 (closed by communicate)
        self.stderr: IO[str] = open(stderr)  # noqa: SIM115
        self._status = status
        self._texts: dict[str, str] = {}
        self._readers: list[threading.Thread] = []

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._status, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
            code = os.read(self._status, 32)
            os.close(self._status)
            assert code, "the fork server ended before its process"
            self.returncode = int(code)
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both pipes to their ends, then wait. After a time-out it may be called again and loses nothing."""
        if not self._readers:
            for name, stream in (("out", self.stdout), ("err", self.stderr)):
                self._readers.append(threading.Thread(target=self._read, args=(name, stream), daemon=True))
                self._readers[-1].start()
        for reader in self._readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(timeout)
        return self._texts["out"], self._texts["err"]

    def _read(self, name: str, stream: IO[str]) -> None:
        with stream:
            self._texts[name] = stream.read()


def serve(channel: socket.socket) -> None:
    """Fork for each request. Returns in the forked process, set up as if it had been started for that request."""
    selector = selectors.DefaultSelector()
    selector.register(channel, selectors.EVENT_READ)
    children: dict[int, tuple[int, int]] = {}  # pidfd: pid and where its exit code is wanted
    while True:
        for key, _ in selector.select():
            if key.fd != channel.fileno():
                pid, status = children.pop(key.fd)
                selector.unregister(key.fd)
                _, code = os.waitpid(pid, 0)
                os.write(status, str(os.waitstatus_to_exitcode(code)).encode())
                os.close(status)
                os.close(key.fd)
                continue
            request, given, _, _ = socket.recv_fds(channel, 1 << 20, 4)
            if not request:
                os._exit(0)
            pid = os.fork()
            if pid:
                channel.send(str(pid).encode())
                *streams, status = given
                pidfd = os.pidfd_open(pid)
                children[pidfd] = pid, status
                selector.register(pidfd, selectors.EVENT_READ)
                for descriptor in streams:
                    os.close(descriptor)
                continue
            selector.close()
            channel.close()
            for pidfd, (_, status) in children.items():
                os.close(pidfd)
                os.close(status)
            for number, descriptor in enumerate(given[:3]):
                os.dup2(descriptor, number)
            for descriptor in given:
                os.close(descriptor)
            command = json.loads(request)
            os.chdir(command["cwd"])
            os.environ.clear()
            os.environ.update(command["environ"])
            sys.path[0] = command["cwd"]  # as `python -m` has it
            sys.argv = [sys.modules["evsys_sdk.cli.main"].__file__ or "", *command["arguments"]]
            if command["signal_at"]:
                send_signal_at(*command["signal_at"])
            return


def exit_without_teardown(code: int) -> NoReturn:
    """End as the interpreter does: join threads, run `atexit`, flush. It would then free one by one the modules that
    the server has imported, and copy the memory they share with it: 0.8 s of CPU, more than most commands take."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):  # the reader is gone
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    import evsys_sdk

    for module in pkgutil.walk_packages(evsys_sdk.__path__, "evsys_sdk."):
        with suppress(ImportError):  # of an extra that is not installed
            importlib.import_module(module.name)
    for name in sys.argv[2:]:
        with suppress(ImportError):
            importlib.import_module(name)
    assert threading.active_count() == 1, "a fork takes no other thread along"
    serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        sys.exit(sys.modules["evsys_sdk.cli.main"].main())
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        exit_without_teardown(end.code or 0)
