"""How long until `evsys mcp` answers its first request, next to importing the package `mcp`?

In: nothing; an empty project is made for the occasion. Out: a table (or `--json`) and `perf/results/mcp_start.json`;
exit code 1 when a goal is missed. Measured from the start of the process to its answer to `initialize`, to `tools/list`
and to the first `history`; beside it a bare interpreter that imports `mcp`. Of `--repeats` the fastest. CPU seconds are
the process's own, which on idle cores is what a clock shows; `clock` is what it showed, with whatever else ran.

    python perf/mcp_start.py
    python perf/mcp_start.py --repeats 20 --json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from evsys_sdk.files import write_json

RESULTS = Path(__file__).parent / "results" / "mcp_start.json"
MAX_SECONDS, MAX_RATIO = 0.6, 1.2
REQUESTS: dict[str, dict[str, Any]] = {
    "initialize": {
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": {"name": "perf", "version": "1"},
        },
    },
    "tools/list": {"method": "tools/list"},
    "history": {"method": "tools/call", "params": {"name": "history", "arguments": {}}},
}


def cpu_seconds(pid: int) -> float:
    """What a process of this machine (Linux) has computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_server(project: str) -> dict[str, tuple[float, float]]:
    """CPU and clock seconds from the start until each answer."""
    started = time.perf_counter()
    command = [sys.executable, "-P", "-m", "evsys_sdk.cli.main", "mcp", "--project", project]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    found = {}
    for number, (name, request) in enumerate(REQUESTS.items()):
        server.stdin.write(json.dumps({"jsonrpc": "2.0", "id": number, **request}) + "\n")
        server.stdin.flush()
        assert "result" in json.loads(server.stdout.readline())
        found[name] = cpu_seconds(server.pid), time.perf_counter() - started
        if name == "initialize":
            server.stdin.write('{"jsonrpc": "2.0", "method": "notifications/initialized"}\n')
    server.stdin.close()
    server.wait()
    return found


def measure_import() -> tuple[float, float]:
    """CPU and clock seconds of an interpreter that imports the package."""
    started = time.perf_counter()
    code = "import mcp, sys; print(flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    found = cpu_seconds(process.pid), time.perf_counter() - started
    process.stdin.close()
    process.wait()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as project:
        # In turns, so that a busy moment of the machine slows both.
        pairs = [(measure_server(project), measure_import()) for _ in range(options.repeats)]
    rows = {
        **{name: [min(run[name][at] for run, _ in pairs) for at in (0, 1)] for name in REQUESTS},
        "import mcp": [min(one[at] for _, one in pairs) for at in (0, 1)],
    }
    ready, alone = rows["initialize"][0], rows["import mcp"][0]
    result = {
        "machine": {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "python": platform.python_version()},
        "cpu_and_clock_seconds": {name: [round(value, 3) for value in row] for name, row in rows.items()},
        "ratio_to_import": round(ready / alone, 3),
        "goals": {"seconds": MAX_SECONDS, "ratio_to_import": MAX_RATIO},
        "met": ready <= MAX_SECONDS and ready / alone <= MAX_RATIO,
    }
    write_json(RESULTS, result)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print("until the answer to   CPU s   clock s")
        for name, (cpu, clock) in rows.items():
            print(f"{name:<20} {cpu:6.2f} {clock:9.2f}")
        print(f"ready: {ready:.2f} s (goal {MAX_SECONDS}), {ready / alone:.2f} of importing mcp (goal {MAX_RATIO})")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
