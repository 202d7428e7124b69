"""How fast is the leakage audit, next to only reading the rows?

In: nothing; rows and tasks are made for the occasion. Out: a table (or `--json`) and `perf/results/leakage.json`; exit
code 1 when a goal is missed. 1,000,000 rows, half prose, half from a template, in a file, against 10,000 tasks, on one
core; beside it `json.loads` and a hash of every line. Each way runs in a separate process. What the audit finds, and
what it suspects wrongly, is measured by `perf/leakage_rates.py`.

    python perf/leakage.py                  # some two minutes
    python perf/leakage.py --rows 100000 --json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leakage_rates import flight, plain_row, prose, task, words

from evsys_sdk.cli.data import sample_of
from evsys_sdk.contamination.audit import audit_rows
from evsys_sdk.data_types import HarborTask
from evsys_sdk.files import read_rows, write_json

RESULTS = Path(__file__).parent / "results" / "leakage.json"
TASKS, MAX_SECONDS, MAX_RSS_MB = 10_000, 90.0, 2000


def texts_for_speed(seed: int) -> Iterator[str]:
    rng, vocabulary = random.Random(seed), words(1)
    while True:
        yield prose(rng, vocabulary)
        yield flight(rng)


def tasks_for_speed() -> list[HarborTask]:
    return [task(number, text) for number, text in zip(range(TASKS), texts_for_speed(1), strict=False)]


def write_file(path: str, count: int) -> int:
    """`count` rows, every 10,000th a copy of a task; returns how many copies."""
    tasks, copies = tasks_for_speed(), 0
    with open(path, "w", encoding="utf-8") as out:
        for number, text in zip(range(count), texts_for_speed(2), strict=False):
            if number % 10_000 == 0:
                text, copies = str(tasks[copies].instruction).upper(), copies + 1
            out.write(json.dumps(plain_row(text)) + "\n")
    return copies


def bare(path: str) -> int:
    """Only reading: the least that any audit does."""
    with open(path, encoding="utf-8") as lines:
        return sum(1 for line in lines if json.loads(line) and hash(line))


def audited(path: str) -> int:
    """As `evsys data leakage` does it: a pass for the sample, a pass for the audit. Returns the tasks found."""
    tasks = tasks_for_speed()
    return audit_rows(read_rows(path), tasks, benchmark="speed", sample=sample_of(Path(path))).tasks


WAYS = {"bare": bare, "audit": audited}


def measure_here(way: str, path: str) -> dict[str, Any]:
    start, cpu = time.perf_counter(), time.process_time()
    outcome = WAYS[way](path)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "seconds": round(seconds, 1), "cpu_seconds": round(cpu_seconds, 1), "peak_rss_mb": round(peak / 1e6),
        "outcome": outcome,
    }  # fmt: skip


def measure(way: str, path: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", way, "--file", path]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def compare(count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.jsonl")
        copies = write_file(path, count)
        row_bytes = os.path.getsize(path) / count
        measured = {way: measure(way, path) for way in WAYS}
    audit = measured["audit"]
    # On a machine that others use too, the processor's own time is what one idle core would take.
    met = audit["cpu_seconds"] <= MAX_SECONDS and audit["peak_rss_mb"] <= MAX_RSS_MB and audit["outcome"] >= copies
    return {
        "rows": count,
        "tasks": TASKS,
        "bytes_per_row": round(row_bytes),
        "planted": copies,
        **measured,
        "ratio": round(audit["cpu_seconds"] / measured["bare"]["cpu_seconds"], 1),
        "goal": {"cpu_seconds": MAX_SECONDS, "peak_rss_mb": MAX_RSS_MB, "met": met},
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['rows']:,} rows of {result['bytes_per_row']} bytes against {result['tasks']:,} tasks"]
    lines.append(f"{'':<9}{'seconds':>9}{'cpu s':>9}{'peak MB':>9}")
    for way in WAYS:
        one = result[way]
        lines.append(f"{way:<9}{one['seconds']:>9}{one['cpu_seconds']:>9}{one['peak_rss_mb']:>9}")
    verdict = "met" if result["goal"]["met"] else "MISSED"
    lines.append(f"ratio {result['ratio']}; goal: at most {MAX_SECONDS:g} s and {MAX_RSS_MB} MB: {verdict}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure_here(options.child, options.file)))
        return 0
    result = {
        **compare(options.rows),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }
    write_json(RESULTS, result)
    print(json.dumps(result) if options.json else table(result))
    return 0 if result["goal"]["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
