"""How fast is the dashboard, next to trackio's self-hosted server in the same run?

In: nothing; the workload is made up: per client 4,000 steps of 5 metrics and 500 transcripts of 6 turns. Out: a table
(or `--json`) and `perf/results/dashboard.json`; exit code 1 when a goal is missed. "Durable" is the time from the first
call until the server's database holds everything, read from the database file. Client and server are processes of
their own, on loopback.

    python perf/dashboard.py                                   # ours alone
    python perf/dashboard.py --trackio /path/to/bin/python     # beside trackio, installed in an environment of its own
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "dashboard.json"
STEPS, METRICS, TRANSCRIPTS = 4000, ("loss", "reward", "lr", "grad_norm", "entropy"), 500
TURN = "The model writes a line of about eighty characters, again and again, and again. " * 4
PROJECT = "perf"
GOALS = {
    "log_step mean us": 20,
    "log_step p99 us": 50,
    "first 500 of 1,000 runs ms": 30,
    "curve of 4,000 steps ms": 30,
    "server RSS MB": 120,
}
RATIO_GOAL = 1 / 3
"""Of trackio's time until everything is durable, with one client and with four."""

SERVER = """
import json, sys, time
from evsys_dashboard.server import listen, prepare, serve
from evsys_dashboard.settings import ServerOptions
sock = listen("127.0.0.1", 0)
prepare(ServerOptions(database_url=sys.argv[1], secret_key="x" * 40, hosts=("127.0.0.1",)))
from evsys_dashboard.auth import make_key
from evsys_dashboard.models import Project
project = Project.objects.create(pk="perf", name="perf", created=time.time())
ready = json.dumps({"port": sock.getsockname()[1], "key": make_key(project, "perf", "write")[1]})
serve(sock, on_ready=lambda: print(ready, flush=True))
"""

OUR_CLIENT = """
import json, os, sys, time
from evsys_sdk import DashboardClient, ExperimentRun
steps, metrics, transcripts, turn = json.loads(sys.argv[1])
client = DashboardClient()
run = ExperimentRun(client, experiment_name=f"perf-{os.getpid()}", recipe_kind="sft").__enter__()
values = {name: 0.5 for name in metrics}
started, times = time.time(), []
for step in range(steps):
    begin = time.perf_counter()
    run.log_step(step, values)
    times.append(time.perf_counter() - begin)
rows = [{"task_id": f"t{n}", "completion": turn, "turns": [turn] * 6, "reward": 1.0, "status": "ok"}
        for n in range(transcripts)]
run.log_predictions(rows)
client.finish(120)
print(json.dumps({"started": started, "times": times}))
"""

THEIR_CLIENT = """
import json, os, sys, time
import trackio
steps, metrics, transcripts, turn = json.loads(sys.argv[1])
run = trackio.init(project="perf", name=f"perf-{os.getpid()}", server_url=os.environ["TRACKIO_SERVER_URL"])
values = {name: 0.5 for name in metrics}
started, times = time.time(), []
for step in range(steps):
    begin = time.perf_counter()
    trackio.log(values, step=step)
    times.append(time.perf_counter() - begin)
messages = [{"role": "assistant" if n % 2 else "user", "content": turn} for n in range(6)]
for n in range(transcripts):
    trackio.log({"transcript": trackio.Trace(messages=messages)}, step=steps + n)
trackio.finish()
print(json.dumps({"started": started, "times": times}), flush=True)
"""


@contextmanager
def our_server(folder: Path) -> Iterator[tuple[str, str, int]]:
    """URL, key and pid of a fresh dashboard on SQLite."""
    command = [sys.executable, "-c", SERVER, f"sqlite://{folder}/dashboard.sqlite"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            yield f"http://127.0.0.1:{ready['port']}", ready["key"], process.pid
        finally:
            process.terminate()


@contextmanager
def trackio_server(python: str, folder: Path) -> Iterator[tuple[str, int]]:
    """URL with its token, and pid, of a fresh trackio server."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    environ = {**os.environ, "TRACKIO_DIR": str(folder), "TRACKIO_WRITE_TOKEN": "perf", "GRADIO_SERVER_PORT": str(port)}
    command = [str(Path(python).with_name("trackio")), "show", "--host", "127.0.0.1"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: answers(f"http://127.0.0.1:{port}/"), seconds=60)
            yield f"http://127.0.0.1:{port}?write_token=perf", process.pid
        finally:
            process.terminate()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def wait_until(is_done: Callable[[], bool], *, seconds: float = 300) -> float:
    """Poll until it holds; the time when it did."""
    deadline = time.time() + seconds
    while not is_done():
        if time.time() > deadline:
            raise TimeoutError
        time.sleep(0.005)
    return time.time()


def rows_in(database: Path, statement: str) -> int:
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=10) as db:
            return int(db.execute(statement).fetchone()[0])
    except sqlite3.Error:
        return 0


def measure_ingest(command: list[str], environ: dict[str, str], clients: int, is_durable: Callable[[], bool]) -> Any:
    """Start the clients together; the slowest of (last row in the database - first call), and the call times."""
    workload = json.dumps([STEPS, METRICS, TRANSCRIPTS, TURN])
    processes = [
        subprocess.Popen(
            [*command, workload], env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for _ in range(clients)
    ]
    durable = wait_until(is_durable)
    outputs = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    times = sorted(one * 1e6 for output in outputs for one in output["times"])
    started = min(output["started"] for output in outputs)
    return {
        "durable s": round(durable - started, 3),
        "mean us": round(statistics.fmean(times), 1),
        "p99 us": round(times[int(len(times) * 0.99)], 1),
    }


def measure_ours(folder: Path, clients: int) -> dict[str, Any]:
    with our_server(folder) as (url, key, pid):
        environ = {
            **os.environ,
            "EVSYS_API_URL": url,
            "EVSYS_API_KEY": key,
            "EVSYS_PROJECT_ID": PROJECT,
            "EVSYS_LOG_DIR": str(folder / "mirror"),
        }
        database = folder / "dashboard.sqlite"

        def is_durable() -> bool:
            # The summary rows first: counting hundreds of thousands of points at each look would slow the server.
            return (
                rows_in(database, "SELECT COALESCE(SUM(n), 0) FROM dashboard_metrickey")
                >= clients * STEPS * len(METRICS)
                and rows_in(database, "SELECT COUNT(*) FROM dashboard_prediction") >= clients * TRANSCRIPTS
            )

        found: dict[str, Any] = measure_ingest([sys.executable, "-c", OUR_CLIENT], environ, clients, is_durable)
        found["RSS MB"] = round(memory_of(pid))
        if clients == 1:
            found |= measure_reads(url, key, database)
        return found


def measure_trackio(python: str, folder: Path, clients: int) -> dict[str, Any]:
    with trackio_server(python, folder) as (url, pid):
        # The clients keep their own files elsewhere, as they would on another machine.
        environ = {**os.environ, "TRACKIO_SERVER_URL": url, "TRACKIO_DIR": str(folder / "clients")}
        database = folder / "perf.db"

        def is_durable() -> bool:
            return rows_in(database, "SELECT COUNT(*) FROM metrics") >= clients * (STEPS + TRANSCRIPTS)

        found: dict[str, Any] = measure_ingest([python, "-c", THEIR_CLIENT], environ, clients, is_durable)
        return found | {"RSS MB": round(memory_of(pid))}


def memory_of(pid: int) -> float:
    """Resident memory of a process, in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure_reads(url: str, key: str, database: Path) -> dict[str, Any]:
    """A page of the list of 1,000 runs (made here, straight in the database; the API gives 500 at a time), and the
    curve that was just sent."""
    with sqlite3.connect(database, timeout=30) as db:
        columns = [row[1] for row in db.execute("PRAGMA table_info(dashboard_generation)")]
        row = dict(zip(columns, db.execute("SELECT * FROM dashboard_generation LIMIT 1").fetchone(), strict=True))
        first, experiment = row["id"], row["experiment_id"]
        marks = ", ".join("?" * len(columns))
        copies = [list({**row, "id": f"copy-{n}", "created": row["created"] - n}.values()) for n in range(999)]
        db.executemany(f"INSERT INTO dashboard_generation VALUES ({marks})", copies)
    base = f"{url}/api/v1/projects/{PROJECT}"
    routes = {
        "first 500 of 1,000 runs ms": f"{base}/runs?experiment={experiment}&limit=500",
        "curve of 4,000 steps ms": f"{base}/runs/{first}/curves?metric=loss&width=4000",
    }
    return {name: round(1000 * seconds_for(route, key), 1) for name, route in routes.items()}


def seconds_for(url: str, key: str, repeats: int = 20) -> float:
    """The median time of a request."""
    times = []
    for _ in range(repeats):
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}", "X-Evsys-Project": PROJECT})
        begin = time.perf_counter()
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trackio", metavar="PYTHON", help="an interpreter that has trackio")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for clients in (1, 4):
        with tempfile.TemporaryDirectory() as folder:
            found[f"ours, {clients} clients"] = measure_ours(Path(folder), clients)
        if args.trackio:
            with tempfile.TemporaryDirectory() as folder:
                found[f"trackio, {clients} clients"] = measure_trackio(args.trackio, Path(folder), clients)
    one = found["ours, 1 clients"]
    figures = {
        "log_step mean us": one["mean us"],
        "log_step p99 us": one["p99 us"],
        "first 500 of 1,000 runs ms": one["first 500 of 1,000 runs ms"],
        "curve of 4,000 steps ms": one["curve of 4,000 steps ms"],
        "server RSS MB": max(found[f"ours, {clients} clients"]["RSS MB"] for clients in (1, 4)),
    }
    missed = [name for name, goal in GOALS.items() if figures[name] > goal]
    for clients in (1, 4) if args.trackio else ():
        ratio = found[f"ours, {clients} clients"]["durable s"] / found[f"trackio, {clients} clients"]["durable s"]
        figures[f"durable, {clients} clients, ours / trackio"] = round(ratio, 3)
        missed += [f"durable, {clients} clients"] if ratio > RATIO_GOAL else []
    report = {"figures": figures, "goals": GOALS, "missed": missed, "measured": found, "machine": platform.platform()}
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        for name, value in found.items():
            print(f"{name:20} " + "  ".join(f"{key} {number}" for key, number in value.items()))
        for name, number in figures.items():
            print(f"{name:40} {number:10}  {'goal ' + str(GOALS[name]) if name in GOALS else ''}")
        print("missed: " + (", ".join(missed) or "none"))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
