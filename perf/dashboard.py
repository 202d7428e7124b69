"""How fast is the dashboard, next to trackio's self-hosted server in the same run?

In: nothing; the workload is made up: per client 4,000 steps of 5 metrics and 500 transcripts of 6 turns. Out: a table
(or `--json`) and `perf/results/dashboard.json`; exit code 1 when a goal is missed. "Durable" is the time from the first
call until the server's database holds everything, read from the database file; "CPU" is what client and server used
for it, which a busy machine changes little. Client and server are separate processes, on loopback.

Also: pages and API with 10,000 experiments, as many runs and 20 million points; the first chart in Chromium, where
there is one; and `evsys dashboard` in a folder of 500 experiments. Of several turns the median counts.

    python perf/dashboard.py                                   # ours alone
    python perf/dashboard.py --trackio /path/to/bin/python     # beside trackio, installed in its own environment
    python perf/dashboard.py --only ingest --turns 5           # one part: ingest, scale, chart or folder
    chrt -f 1 python perf/dashboard.py --only ingest           # as root, where other programs keep the machine busy
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
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
from dataclasses import dataclass
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
    "Lab of 10,000 experiments ms": 200,
    "Lab, filtered ms": 200,
    "Lab, grouped by tag ms": 200,
    "500 of 10,000 runs ms": 200,
    "experiment page ms": 200,
    "run page ms": 200,
    "curve among 20 million points ms": 200,
    "first chart kB": 150,
    "folder of 500, first answer s": 2,
}
RATIO_GOAL = 1 / 3
"""Of trackio's time until everything is durable, with one client and with four, and until the first chart."""
N_EXPERIMENTS, STEPS_PER_RUN, METRICS_PER_RUN = 10_000, 200, 10
FOLDER_EXPERIMENTS = 500
CHARTS = {"ours": ".u-over", "trackio": "canvas, svg.marks, .vega-embed"}
"""What is on the page when its first chart is drawn."""

SERVER = """
import json, sys, time
from evsys_dashboard.server import listen, prepare, serve
from evsys_dashboard.settings import ServerOptions
sock = listen("127.0.0.1", 0)
prepare(ServerOptions(database_url=sys.argv[1], secret_key="x" * 40, hosts=("127.0.0.1",)))
from evsys_dashboard.auth import local_user, make_key, make_login_link
from evsys_dashboard.models import Project
project, _ = Project.objects.get_or_create(pk="perf", defaults={"name": "perf", "created": time.time()})
link = make_login_link(local_user())
ready = json.dumps({"port": sock.getsockname()[1], "key": make_key(project, "perf", "write")[1], "link": link})
serve(sock, on_ready=lambda: print(ready, flush=True))
"""

OUR_CLIENT = """
import json, os, sys, time
from evsys_sdk import DashboardClient, ExperimentRun
steps, metrics, transcripts, turn = json.loads(sys.argv[1])
client = DashboardClient()
run = ExperimentRun(client, experiment_name=f"perf-{os.getpid()}", recipe_kind="sft").__enter__()
values = {name: 0.5 for name in metrics}
started, times, before = time.time(), [], time.process_time()
for step in range(steps):
    begin = time.perf_counter()
    run.log_step(step, values)
    times.append(time.perf_counter() - begin)
rows = [{"task_id": f"t{n}", "completion": turn, "turns": [turn] * 6, "reward": 1.0, "status": "ok"}
        for n in range(transcripts)]
run.log_predictions(rows)
client.finish(120)
print(json.dumps({"started": started, "times": times, "cpu": time.process_time() - before}))
"""

THEIR_CLIENT = """
import json, os, sys, time
import trackio
steps, metrics, transcripts, turn = json.loads(sys.argv[1])
run = trackio.init(project="perf", name=f"perf-{os.getpid()}", server_url=os.environ["TRACKIO_SERVER_URL"])
values = {name: 0.5 for name in metrics}
started, times, before = time.time(), [], time.process_time()
for step in range(steps):
    begin = time.perf_counter()
    trackio.log(values, step=step)
    times.append(time.perf_counter() - begin)
messages = [{"role": "assistant" if n % 2 else "user", "content": turn} for n in range(6)]
for n in range(transcripts):
    trackio.log({"transcript": trackio.Trace(messages=messages)}, step=steps + n)
trackio.finish()
print(json.dumps({"started": started, "times": times, "cpu": time.process_time() - before}), flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OurServer:
    """A running dashboard."""

    url: str
    key: str
    link: str
    """Lets one browser in, once."""
    pid: int


@contextmanager
def our_server(folder: Path) -> Iterator[OurServer]:
    """A dashboard on the SQLite database of `folder`."""
    command = [sys.executable, "-c", SERVER, f"sqlite://{folder}/dashboard.sqlite"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            url = f"http://127.0.0.1:{ready['port']}"
            yield OurServer(url=url, key=ready["key"], link=url + ready["link"], pid=process.pid)
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


def wait_until(is_done: Callable[[], bool], *, seconds: float = 120) -> float:
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


def measure_ingest(
    command: list[str], environ: dict[str, str], clients: int, is_durable: Callable[[], bool], server: int
) -> Any:
    """Start the clients together; the slowest of (last row in the database - first call), and the call times."""
    before = cpu_of(server)
    workload = json.dumps([STEPS, METRICS, TRANSCRIPTS, TURN])
    processes = [
        subprocess.Popen(
            [*command, workload], env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for _ in range(clients)
    ]
    durable = wait_until(is_durable)
    server_cpu = cpu_of(server) - before
    outputs = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    times = sorted(one * 1e6 for output in outputs for one in output["times"])
    started = min(output["started"] for output in outputs)
    return {
        "durable s": round(durable - started, 3),
        "mean us": round(statistics.fmean(times), 1),
        "p99 us": round(times[int(len(times) * 0.99)], 1),
        "client CPU s": round(sum(output["cpu"] for output in outputs), 3),
        "server CPU s": round(server_cpu, 3),
    }


def measure_ours(folder: Path, clients: int) -> dict[str, Any]:
    with our_server(folder) as server:
        environ = {
            **os.environ,
            "EVSYS_API_URL": server.url,
            "EVSYS_API_KEY": server.key,
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

        command = [sys.executable, "-c", OUR_CLIENT]
        found: dict[str, Any] = measure_ingest(command, environ, clients, is_durable, server.pid)
        found["RSS MB"] = round(memory_of(server.pid))
        if clients == 1:
            found |= measure_reads(server.url, server.key, database)
        return found


def measure_trackio(python: str, folder: Path, clients: int) -> dict[str, Any]:
    with trackio_server(python, folder) as (url, pid):
        # The clients keep their own files elsewhere, as they would on another machine.
        environ = {**os.environ, "TRACKIO_SERVER_URL": url, "TRACKIO_DIR": str(folder / "clients")}
        database = folder / "perf.db"

        def is_durable() -> bool:
            return rows_in(database, "SELECT COUNT(*) FROM metrics") >= clients * (STEPS + TRANSCRIPTS)

        found: dict[str, Any] = measure_ingest([python, "-c", THEIR_CLIENT], environ, clients, is_durable, pid)
        return found | {"RSS MB": round(memory_of(pid))}


def memory_of(pid: int) -> float:
    """Resident memory of a process, in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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


def fill_database(database: Path) -> None:
    """10,000 experiments with a run each, and 20 million points, made of the one that a client has sent."""
    with sqlite3.connect(database, timeout=60) as db:
        db.execute("PRAGMA synchronous = OFF")

        def copy(table: str, changes: str) -> None:
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            given = dict(part.split(" = ", 1) for part in changes.split("; "))
            chosen = ", ".join(given.get(name, f"one.{name}") for name in columns)
            numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {N_EXPERIMENTS})"
            one = f"(SELECT * FROM {table} ORDER BY created LIMIT 1) one"
            db.execute(f"{numbers} INSERT INTO {table} ({', '.join(columns)}) SELECT {chosen} FROM n, {one}")

        tags = """json_array('tag ' || (i % 40), 'sweep')"""
        spark = json.dumps([round(0.1 + 0.02 * n, 3) for n in range(24)])
        copy(
            "dashboard_experiment",
            f"id = 'e' || i; name = 'experiment ' || i; created = one.created - i * 60.0; tags = {tags}; "
            "hypothesis = 'A larger learning rate of ' || i || ' solves more tasks'; status = 'completed'; "
            f"best_value = (i % 97) / 97.0; metric = 'val/tools.pass@1'; spark = '{spark}'; n_runs = 1; n_arms = 1",
        )
        copy("dashboard_generation", "id = 'g' || i; experiment_id = 'e' || i; created = one.created - i * 60.0")
        db.execute(f"""
            WITH RECURSIVE g(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM g WHERE i < {N_EXPERIMENTS}),
                           m(j) AS (SELECT 0 UNION ALL SELECT j + 1 FROM m WHERE j < {METRICS_PER_RUN - 1})
            INSERT INTO dashboard_metrickey (id, generation_id, name, n, last_step, last, last_kind, low, high)
            SELECT 1000000 + i * {METRICS_PER_RUN} + j, 'g' || i, 'metric ' || j, {STEPS_PER_RUN}, {STEPS_PER_RUN - 1},
                   0.5, 0, 0.1, 0.9 FROM g, m""")
        db.execute(f"""
            WITH RECURSIVE s(k) AS (SELECT 0 UNION ALL SELECT k + 1 FROM s WHERE k < {STEPS_PER_RUN - 1})
            INSERT INTO dashboard_point (key_id, step, kind, value, ts)
            SELECT id, k, 0, 0.1 + (k % 80) / 100.0, 1700000000000 + k
            FROM dashboard_metrickey, s WHERE id > 1000000""")
        db.execute("ANALYZE")


def visit(link: str) -> urllib.request.OpenerDirector:
    """A browser that a link has let in, and that has read the first page."""
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with browser.open(link, timeout=60) as answer:
        answer.read()
    return browser


def measure_scale(folder: Path) -> dict[str, Any]:
    """Lists, filters, pages and curves with 10,000 runs and 20 million points, as a browser asks for them."""
    with our_server(folder) as server:
        send_one_run(server, folder)
        fill_database(folder / "dashboard.sqlite")
        browser = visit(f"{server.link}?next=/p/{PROJECT}/")
        base, api = f"{server.url}/p/{PROJECT}", f"{server.url}/api/v1/projects/{PROJECT}"
        routes = {
            "Lab of 10,000 experiments ms": f"{base}/",
            "Lab, filtered ms": f"{base}/?q=rate+tag:%22tag+7%22+score%3E0.5",
            "Lab, grouped by tag ms": f"{base}/?group=tag",
            "500 of 10,000 runs ms": f"{api}/runs?limit=500",
            "experiment page ms": f"{base}/experiments/e5000",
            "run page ms": f"{base}/runs/g5000",
            "curve among 20 million points ms": f"{api}/runs/g5000/curves?metric=metric+3&width=1000",
        }
        found: dict[str, Any] = {}
        for name, route in routes.items():
            times = []
            for _ in range(9):
                begin = time.perf_counter()
                with browser.open(route, timeout=60) as answer:
                    answer.read()
                times.append(time.perf_counter() - begin)
            found[name] = round(1000 * statistics.median(times[1:]), 1)
        return found | {"points": rows_in(folder / "dashboard.sqlite", "SELECT SUM(n) FROM dashboard_metrickey")}


def send_one_run(server: OurServer, folder: Path) -> None:
    environ = {
        **os.environ,
        "EVSYS_API_URL": server.url,
        "EVSYS_API_KEY": server.key,
        "EVSYS_PROJECT_ID": PROJECT,
        "EVSYS_LOG_DIR": str(folder / "mirror"),
    }
    workload = json.dumps([STEPS, METRICS, 0, TURN])
    subprocess.run([sys.executable, "-c", OUR_CLIENT, workload], env=environ, check=True, stdout=subprocess.DEVNULL)


def measure_charts(trackio: str | None, turns: int) -> dict[str, Any]:
    """The page with the curves of one run, in Chromium with an empty cache: time from the request to the first chart,
    and bytes transferred until then."""
    from playwright.sync_api import sync_playwright

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        folder = Path(place)
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        with our_server(folder) as server:
            send_one_run(server, folder)
            with sqlite3.connect(folder / "dashboard.sqlite") as db:
                (run,) = db.execute("SELECT id FROM dashboard_generation").fetchone()
            context = chromium.new_context()
            page = context.new_page()
            page.goto(f"{server.link}?next=/p/{PROJECT}/")
            page.wait_for_url(f"**/p/{PROJECT}/")
            page.close()
            found["ours"] = see_chart(context, f"{server.url}/p/{PROJECT}/runs/{run}", CHARTS["ours"], turns)
        if trackio:
            with trackio_server(trackio, folder / "trackio") as (url, _):
                environ = {**os.environ, "TRACKIO_SERVER_URL": url, "TRACKIO_DIR": str(folder / "clients")}
                workload = json.dumps([STEPS, METRICS, 0, TURN])
                subprocess.run(
                    [trackio, "-c", THEIR_CLIENT, workload], env=environ, check=True, stdout=subprocess.DEVNULL
                )
                address = url.partition("?")[0] + f"?project={PROJECT}"
                found["trackio"] = see_chart(chromium.new_context(), address, CHARTS["trackio"], turns)
        chromium.close()
    return found


def see_chart(context: Any, url: str, selector: str, turns: int) -> dict[str, Any]:
    times, sizes = [], []
    for _ in range(turns):
        page = context.new_page()
        session = context.new_cdp_session(page)
        session.send("Network.enable")
        session.send("Network.setCacheDisabled", {"cacheDisabled": True})
        received: list[float] = []
        session.on("Network.loadingFinished", lambda event, kept=received: kept.append(event["encodedDataLength"]))
        begin = time.perf_counter()
        page.goto(url, wait_until="commit")
        page.locator(selector).first.wait_for(state="attached", timeout=120_000)
        times.append(time.perf_counter() - begin)
        sizes.append(sum(received))
        page.close()
    return {"s": round(statistics.median(times), 3), "kB": round(statistics.median(sizes) / 1000, 1)}


def measure_folder() -> dict[str, Any]:
    """`evsys dashboard` in a folder of 500 experiments, none of which it has read: from the command to the first page,
    and until every experiment is listed."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        config = json.loads(FOLDER_CONFIG.replace("EXAMPLE", str(Path(__file__).parents[1] / "examples" / "10_sweep")))
        (root / "first.json").write_text(json.dumps({**config, "output_dir": str(root / "first")}))
        command = [sys.executable, "-m", "evsys_sdk.cli.main"]
        subprocess.run([*command, "run", "first.json"], cwd=root, check=True, stdout=subprocess.DEVNULL)
        for number in range(FOLDER_EXPERIMENTS):
            shutil.copytree(root / "first", root / "all" / f"e{number}")
        begin = time.time()
        with subprocess.Popen(
            [*command, "dashboard", "--dir", "all", "--no-browser", "--json"],
            cwd=root, stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            try:
                assert process.stdout is not None
                ready = json.loads(process.stdout.readline())
                visit(ready["link"])
                first = time.time()
                database = next((root / ".evsys").glob("dashboard.sqlite"))
                counted = "SELECT COUNT(*) FROM dashboard_experiment"
                listed = wait_until(lambda: rows_in(database, counted) >= FOLDER_EXPERIMENTS)
                cpu = cpu_of(process.pid)
            finally:
                process.terminate()
    return {"first answer s": round(first - begin, 2), "all listed s": round(listed - begin, 2), "CPU s": round(cpu, 2)}


FOLDER_CONFIG = """{
  "version": 1, "name": "small", "n_repeats": 2,
  "metadata": {"hypothesis": "1e-3 learns more than 1e-5", "tags": ["lr"], "success_metric": "val.pass@1",
    "benchmark": [{"name": "tools", "path": "EXAMPLE/data/val", "split": "val", "run_every": 2, "limit": 8,
                   "metrics": ["pass@1"], "temperature": 0}]},
  "matrix": {"axes": {"algorithm.params.learning_rate": [1e-5, 1e-3]},
             "name_template": "lr{algorithm.params.learning_rate}"},
  "base_run": {"data": {"path": "EXAMPLE/data/train.jsonl", "transforms": [{"kind": "jsonl_to_chat",
      "params": {"user_template": "{query}", "assistant_template": "<answer>{tool_slug}</answer>"}}]},
    "model": {"name": "table-model"}, "algorithm": {"kind": "sft", "params": {"max_steps": 4, "batch_size": 16}},
    "backend": {"kind": "mock"}}
}"""


def median_of(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure."""
    return {key: round(statistics.median(turn[key] for turn in turns), 3) for key in turns[0]}


def measure_all_ingest(trackio: str | None, turns: int) -> dict[str, Any]:
    """Ours and trackio in turn, so that both meet the machine's moods."""
    found: dict[str, Any] = {}
    for clients in (1, 4):
        ours, theirs = [], []
        for _ in range(turns):
            with tempfile.TemporaryDirectory() as folder:
                ours.append(measure_ours(Path(folder), clients))
            if trackio:
                with tempfile.TemporaryDirectory() as folder:
                    theirs.append(measure_trackio(trackio, Path(folder), clients))
        found[f"ours, {clients} clients"] = median_of(ours)
        if theirs:
            found[f"trackio, {clients} clients"] = median_of(theirs)
    return found


def judge(found: dict[str, Any]) -> tuple[dict[str, float], list[str]]:
    """The figures that have goals, and the names of those that miss them."""
    figures: dict[str, float] = {}
    one = found.get("ours, 1 clients")
    if one:
        figures |= {"log_step mean us": one["mean us"], "log_step p99 us": one["p99 us"]}
        figures |= {key: one[key] for key in ("first 500 of 1,000 runs ms", "curve of 4,000 steps ms")}
        figures["server RSS MB"] = max(found[f"ours, {clients} clients"]["RSS MB"] for clients in (1, 4))
    figures |= {key: value for key, value in found.get("10,000 runs", {}).items() if key in GOALS}
    charts = found.get("first chart", {})
    if charts:
        figures["first chart kB"] = charts["ours"]["kB"]
    if "folder of 500" in found:
        figures["folder of 500, first answer s"] = found["folder of 500"]["first answer s"]
    missed = [name for name, goal in GOALS.items() if figures.get(name, 0) > goal]
    ratios = {
        f"durable, {clients} clients, ours / trackio": (
            found[f"ours, {clients} clients"]["durable s"] / found[f"trackio, {clients} clients"]["durable s"]
        )
        for clients in (1, 4)
        if f"trackio, {clients} clients" in found
    }
    if "trackio" in charts:
        ratios["first chart, ours / trackio"] = charts["ours"]["s"] / charts["trackio"]["s"]
    missed += [name for name, ratio in ratios.items() if ratio > RATIO_GOAL]
    return figures | {name: round(ratio, 3) for name, ratio in ratios.items()}, missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trackio", metavar="PYTHON", help="an interpreter that has trackio")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", choices=PARTS, action="append", help="measure this part; the other figures are kept")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    parts = args.only or PARTS
    found: dict[str, Any] = json.loads(RESULTS.read_text())["measured"] if args.only and RESULTS.exists() else {}
    if "ingest" in parts:
        found |= measure_all_ingest(args.trackio, args.turns)
    if "scale" in parts:
        with tempfile.TemporaryDirectory() as folder:
            found["10,000 runs"] = measure_scale(Path(folder))
    if "chart" in parts and shutil.which("chromium"):
        found["first chart"] = measure_charts(args.trackio, args.turns)
    if "folder" in parts:
        found["folder of 500"] = measure_folder()
    figures, missed = judge(found)
    report = {"figures": figures, "goals": GOALS, "missed": missed, "measured": found, "machine": platform.platform()}
    report["load average of the last minute"] = round(os.getloadavg()[0], 1)
    report["scheduling"] = "normal" if os.sched_getscheduler(0) == os.SCHED_OTHER else "real-time"
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


PARTS = ("ingest", "scale", "chart", "folder")

if __name__ == "__main__":
    sys.exit(main())
