"""How fast and how large is the loading of rows, next to the loop one would write by hand?

In: nothing; a file of `--rows` rows of about 200 bytes is made for the occasion. Out: a table (or `--json`) and
`perf/results/load_rows.json`; exit code 1 when a goal is missed. Each way runs in a separate process, so that
one's memory is not counted as the other's; of `--repeats` runs the fastest counts.

    python perf/load_rows.py            # 1,000,000 rows, about a minute
    python perf/load_rows.py --rows 100000 --json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from evsys_sdk.files import write_json

RESULTS = Path(__file__).parent / "results" / "load_rows.json"
USER, ASSISTANT = "Query: {query}", "<answer>{tool_slug}</answer>"
MAX_RATIO, MAX_RSS_MB = 2.0, 2000


def bare_loop(path: str) -> list[Any]:
    """What a careful person writes by hand."""
    rows = []
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            user, assistant = USER.format(**row), ASSISTANT.format(**row)
            rows.append({"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]})
    return rows


def through_the_sdk(path: str) -> list[Any]:
    """The same through store, source and transform; keeps the rows' own columns too."""
    from evsys_sdk.config.schema import DataConfig
    from evsys_sdk.data.rows import load_rows
    from evsys_sdk.data.stores import LocalDataStore
    from evsys_sdk.data.transforms import JsonlToChat

    chat = JsonlToChat(user_template=USER, assistant_template=ASSISTANT)
    config = DataConfig(path=path)
    return load_rows(config, store=LocalDataStore(), transforms=[("jsonl_to_chat", chat)]).rows


WAYS = {"bare": bare_loop, "load_rows": through_the_sdk}


def measure_here(way: str, path: str) -> dict[str, Any]:
    """One way, in this process."""
    if way == "load_rows":
        import evsys_sdk.data.rows  # noqa: F401  # imports are not what is measured
    start = time.perf_counter()
    rows = WAYS[way](path)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"seconds": round(seconds, 3), "peak_rss_mb": round(peak / 1e6), "rows": len(rows)}


def measure(way: str, path: str, repeats: int) -> dict[str, Any]:
    """One way, in fresh processes; the fastest of them."""
    command = [sys.executable, __file__, "--child", way, "--file", path]
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(repeats)
    ]
    return min(runs, key=lambda run: run["seconds"])


def write_rows(path: str, count: int) -> float:
    """A file of `count` rows; returns bytes per row."""
    with open(path, "w", encoding="utf-8") as out:
        for i in range(count):
            query = f"Find the cheapest flight from city {i % 977} to city {i % 769} on day {i % 31}, booking {i:09d}"
            row = {
                "id": f"row-{i:08d}",
                "query": query,
                "tool_slug": f"FLIGHTS_SEARCH_{i % 211:04d}",
                "toolkit": f"flights_{i % 17:03d}",
                "split": "train",
            }
            out.write(json.dumps(row) + "\n")
    return os.path.getsize(path) / max(count, 1)


def compare(count: int, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.jsonl")
        row_bytes = write_rows(path, count)
        measured = {way: measure(way, path, repeats) for way in WAYS}
    ratio = measured["load_rows"]["seconds"] / measured["bare"]["seconds"]
    met = ratio <= MAX_RATIO and measured["load_rows"]["peak_rss_mb"] <= MAX_RSS_MB
    return {
        "rows": count,
        "bytes_per_row": round(row_bytes),
        **measured,
        "ratio": round(ratio, 2),
        "goal": {"ratio": MAX_RATIO, "peak_rss_mb": MAX_RSS_MB, "met": met},
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['rows']:,} rows of {result['bytes_per_row']} bytes", f"{'':<12}{'seconds':>9}{'peak MB':>9}"]
    lines += [f"{way:<12}{result[way]['seconds']:>9.2f}{result[way]['peak_rss_mb']:>9}" for way in WAYS]
    verdict = "met" if result["goal"]["met"] else "MISSED"
    lines.append(f"ratio {result['ratio']:.2f}; goal: at most {MAX_RATIO:g} and {MAX_RSS_MB} MB: {verdict}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure_here(options.child, options.file)))
        return 0
    result = compare(options.rows, options.repeats)
    write_json(RESULTS, result)
    print(json.dumps(result) if options.json else table(result))
    return 0 if result["goal"]["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
