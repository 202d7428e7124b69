"""How much sooner do 8 arms end when they train at the same time over one slow backend?

In: nothing; the backend is the mock with `--latency` milliseconds per answer. Out: a table (or `--json`) and
`perf/results/arms.json`; exit code 1 when the goal is missed. The same sweep runs with `max_concurrent_arms` 1 and 8,
each in a new folder, journal, records and scoring of the finished arms included. The first run, which imports, does not
count; of `--repeats` the fastest does.

    python perf/arms.py               # 8 arms x 40 steps at 50 ms, about two minutes
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from evsys_sdk.config.load import parse_config
from evsys_sdk.config.yaml_io import Document
from evsys_sdk.experiment.experiment import Experiment
from evsys_sdk.files import write_json

RESULTS = Path(__file__).parent / "results" / "arms.json"
ARMS = 8
MAX_SHARE = 1 / 5
ROWS = [{"prompt": f"say {number}", "completion": f"{number}"} for number in range(32)]


def sweep(folder: Path, *, at_once: int, steps: int, latency: float) -> Experiment:
    base = {
        "model": {"name": "mock"},
        "data": {"source_kind": "in_memory", "rows": ROWS, "transforms": [{"kind": "jsonl_to_chat"}]},
        "algorithm": {"kind": "sft", "params": {"max_steps": steps, "batch_size": 4}},
        "backend": {"kind": "mock", "params": {"latency_ms": latency}},
        "eval": {"metrics": [{"kind": "exact_match"}], "n_samples": 8},
    }
    data = {
        "name": "arms",
        "output_dir": str(folder),
        "max_concurrent_arms": at_once,
        "runs": [{**base, "name": f"arm{number}", "seed": number} for number in range(ARMS)],
    }
    return Experiment(parse_config(Document(label="perf/arms.py", data=data), folder=folder))


def seconds(**settings: Any) -> float:
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        result = sweep(Path(folder), **settings).run()
        taken = time.perf_counter() - started
        assert result.completed and len(result.runs) == ARMS
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--latency", type=float, default=50.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    seconds(at_once=ARMS, steps=1, latency=0.0)
    found = {
        f"{at_once}_at_once": min(
            seconds(at_once=at_once, steps=args.steps, latency=args.latency) for _ in range(args.repeats)
        )
        for at_once in (1, ARMS)
    }
    share = found[f"{ARMS}_at_once"] / found["1_at_once"]
    met = share <= MAX_SHARE
    settings = {"arms": ARMS, "steps": args.steps, "latency_ms": args.latency}
    machine = {"cores": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
    record = {"settings": settings, "seconds": found, "share": share, "goal": MAX_SHARE, "met": met, "machine": machine}
    write_json(RESULTS, record)
    if args.json:
        print(json.dumps(record, indent=2))
    else:
        print(f"{ARMS} arms of {args.steps} steps, {args.latency:g} ms per answer")
        for name, taken in found.items():
            print(f"{name.replace('_', ' '):<14}{taken:8.2f} s")
        print(f"share {share:.3f} (1/{1 / share:.1f}); goal: at most 1/5: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
