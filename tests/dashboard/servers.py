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
import tempfile
import time
from contextlib import closing, suppress
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
    link: str = ""
    """Lets one browser in, once."""

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
        self.port, self.keys, self.link = said["port"], said["keys"], said["link"]
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


@dataclass
class PostgresqlProcess:
    """A PostgreSQL server with fsync on, on a free port, that can be killed and started again on its data."""

    password: str = ""
    """Of its superuser; with one, every connection needs a password (scram-sha-256)."""
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        binaries = find_postgresql()
        assert binaries is not None
        # Not in pytest's folder: each pytest that starts closes that of all sessions to other users.
        place = os.environ.get("PYTEST_DEBUG_TEMPROOT")
        self.folder = Path(tempfile.mkdtemp(prefix="evsys-postgresql-", dir=place))
        self.binaries, self.data = binaries, self.folder / "data"
        # PostgreSQL refuses to run as root, so it runs as its own user, in a folder of that user.
        self.as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        self.user = "postgres" if self.as_user else os.environ.get("USER", "postgres")
        if self.as_user:
            shutil.chown(self.folder, "postgres", "postgres")
        secret = self.folder / "password"
        secret.write_text(self.password)
        if self.as_user:
            shutil.chown(secret, "postgres", "postgres")
        how = ["-A", "scram-sha-256", f"--pwfile={secret}"] if self.password else ["-A", "trust"]
        make = [str(self.binaries / "initdb"), "-D", str(self.data), *how, "-U", self.user, "-E", "UTF8", "--locale=C"]
        subprocess.run([*self.as_user, *make], check=True, stdout=subprocess.DEVNULL, cwd="/")

    @property
    def url(self) -> str:
        """Without the database's name."""
        return self.url_of(self.user, self.password)

    def url_of(self, user: str, password: str = "") -> str:
        return f"postgresql://{user}{':' + password if password else ''}@127.0.0.1:{self.port}"

    def start(self) -> PostgresqlProcess:
        # Between the moment a port is found free and the one it is bound, another process may take it. After a kill the
        # port is the one that the dashboard knows.
        known, until = self.port, time.monotonic() + WAIT_SECONDS
        for _ in range(PORTS_TRIED) if not known else iter(lambda: time.monotonic() > until, True):
            with closing(socket.socket()) as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = known or probe.getsockname()[1]
            options = [f"port={self.port}", "listen_addresses=127.0.0.1", f"unix_socket_directories={self.folder}"]
            settings = [word for option in [*options, "fsync=on"] for word in ("-c", option)]
            with open(self.folder / "log", "a") as log:
                self.process = subprocess.Popen(
                    [*self.as_user, str(self.binaries / "postgres"), "-D", str(self.data), *settings],
                    stdout=log, stderr=log, cwd="/",
                )  # fmt: skip
            if _answers(self.process, f"{self.url}/postgres"):
                return self
            time.sleep(0.1)  # children of one that was killed hold its memory until they have ended
        raise AssertionError(f"PostgreSQL does not start: {(self.folder / 'log').read_text()[-2000:]}")

    def _signal(self, number: int) -> None:
        # The process we started may be `runuser`; the server's own number is in its file.
        with suppress(OSError, ValueError):
            os.kill(int((self.data / "postmaster.pid").read_text().split()[0]), number)

    def kill(self) -> None:
        """SIGKILL, in the middle of whatever it does. Its children see that and end by themselves."""
        self._signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(WAIT_SECONDS)

    def stop(self) -> None:
        """End it, and take its data away."""
        self._signal(signal.SIGINT)  # ends it at once, whoever is connected
        if self.process is not None:
            self.process.wait(WAIT_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)
