"""Real servers for tests: the dashboard as a process on loopback, and PostgreSQL."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

WAIT_SECONDS = 90.0
PORTS_TRIED = 5
SCRIPT = Path(__file__).with_name("server_process.py")


@dataclass
class ServerProcess:
    """A dashboard server that can be killed, frozen and started again on its database and port."""

    database_url: str
    projects: list[str] = field(default_factory=lambda: ["p1"])
    keys: dict[str, str] | None = None
    port: int = 0
    process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def key(self) -> str:
        assert self.keys
        return self.keys[self.projects[0]]

    def start(self) -> ServerProcess:
        given: dict[str, Any] = {"database_url": self.database_url, "projects": self.projects, "port": self.port}
        if self.keys is not None:
            given["keys"] = self.keys
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(given)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()  # ends too when the process dies
        assert line, "the server did not start; its stderr says why"
        said = json.loads(line)
        self.port, self.keys = said["port"], said["keys"]
        return self

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, in the middle of whatever it does."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(WAIT_SECONDS)

    def stop(self) -> int:
        """As Ctrl-C does; returns the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
                self.signal(signal.SIGINT)
        try:
            code = self.process.wait(WAIT_SECONDS)
        finally:
            if self.process.poll() is None:
                self.process.kill()
            if self.process.stdout is not None:
                self.process.stdout.close()
        return code

    def post(self, path: str, body: object = None, *, method: str = "POST", **how: Any) -> requests.Response:
        headers = {"Authorization": f"Bearer {self.key}", "X-Evsys-Project": self.projects[0]} | how.pop("headers", {})
        if body is not None:
            how["data"] = json.dumps(body)
        return requests.request(
            method, f"{self.url}/api/dashboard/api/sdk/{path}", headers=headers, timeout=WAIT_SECONDS, **how
        )

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Ask the database behind the server."""
        if self.database_url.startswith("sqlite"):
            with closing(sqlite3.connect(self.database_url.removeprefix("sqlite://"), timeout=WAIT_SECONDS)) as db:
                return db.execute(query).fetchall()
        import psycopg

        with closing(psycopg.connect(self.database_url)) as db:
            return db.execute(query).fetchall()

    def write(self, statement: str) -> None:
        """Change the database behind the server's back."""
        if self.database_url.startswith("sqlite"):
            with closing(sqlite3.connect(self.database_url.removeprefix("sqlite://"), timeout=WAIT_SECONDS)) as db, db:
                db.execute(statement)
            return
        import psycopg

        with psycopg.connect(self.database_url) as db:
            db.execute(statement)

    def make_run(self, generation_id: str = "g1") -> None:
        """An experiment `e1` with a run to send steps to."""
        now = time.time()
        experiment = {"id": "e1", "name": "e", "status": "running", "ts": now}
        assert self.post("experiments/", experiment).status_code == 200
        run = {"id": generation_id, "experiment_id": "e1", "name": "r", "status": "running", "ts": now}
        assert self.post("generations/", run).status_code == 200


def find_postgresql() -> Path | None:
    """The folder with `initdb` and `postgres`; None where PostgreSQL is not installed."""
    found = [Path(path) for path in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    on_path = shutil.which("initdb")
    found += [Path(on_path).resolve().parent] if on_path else []
    for folder in found:
        if (folder / "initdb").is_file() and (folder / "postgres").is_file():
            return folder
    return None


def _answers(server: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until PostgreSQL answers; False where it ended instead."""
    import psycopg

    until = time.monotonic() + WAIT_SECONDS
    while server.poll() is None:
        try:
            psycopg.connect(url, connect_timeout=10).close()
            return True
        except psycopg.OperationalError:
            assert time.monotonic() < until, "PostgreSQL does not answer"
            time.sleep(0.1)  # there is no event to wait for: it answers when it is ready
    return False


@contextmanager
def postgresql_server(folder: Path) -> Iterator[str]:
    """A PostgreSQL server with fsync on, on a free port; yields a URL without the database's name."""
    binaries = find_postgresql()
    assert binaries is not None
    # PostgreSQL refuses to run as root, so it runs as its own user, in a folder of that user.
    as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    if as_user:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.chown(folder, "postgres", "postgres")
        for parent in folder.parents:
            if parent.stat().st_uid == 0 and len(parent.parts) > 2:  # pytest's own folders are closed to others
                parent.chmod(parent.stat().st_mode | 0o011)
    data = folder / "data"
    user = "postgres" if as_user else os.environ.get("USER", "postgres")
    subprocess.run(
        [*as_user, str(binaries / "initdb"), "-D", str(data), "-A", "trust", "-U", user, "-E", "UTF8", "--locale=C"],
        check=True, stdout=subprocess.DEVNULL, cwd="/",
    )  # fmt: skip
    log = open(folder / "log", "w")  # noqa: SIM115  (it lives as long as the server)
    server, url = None, ""
    try:
        # Between the moment a port is found free and the one it is bound, another process may take it.
        for _ in range(PORTS_TRIED):
            with closing(socket.socket()) as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            options = [f"port={port}", "listen_addresses=127.0.0.1", f"unix_socket_directories={folder}", "fsync=on"]
            settings = [word for option in options for word in ("-c", option)]
            server = subprocess.Popen(
                [*as_user, str(binaries / "postgres"), "-D", str(data), *settings], stdout=log, stderr=log, cwd="/"
            )
            url = f"postgresql://{user}@127.0.0.1:{port}"
            if _answers(server, f"{url}/postgres"):
                break
        else:
            raise AssertionError(f"PostgreSQL does not start: {(folder / 'log').read_text()[-2000:]}")
        yield url
    finally:
        # The process we started may be `runuser`; the server's own number is in its file, and SIGINT ends it at once.
        with suppress(OSError, ValueError):
            os.kill(int((data / "postmaster.pid").read_text().split()[0]), signal.SIGINT)
        if server is not None:
            server.wait(WAIT_SECONDS)
        log.close()
