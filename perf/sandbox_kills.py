"""Kill launchers of sandboxes at random moments, beside a busy machine: nothing they launched may be left alive.

In: nothing. Out: a line per hundred kills, `perf/results/sandbox_kills.json`, and exit code 1 if anything survived. A
launcher says when its imports are done and then opens sandboxes one after the other, several at once, so that a kill at
a random moment of its first second meets every stage of bubblewrap's start. Survivors are looked for by a mark that
stands on the command line of everything that is started for a sandbox.

    python perf/sandbox_kills.py                # 300 kills, a few minutes
    python perf/sandbox_kills.py --kills 50 --busy 4
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from evsys_sdk.files import write_json

RESULTS = Path(__file__).parent / "results" / "sandbox_kills.json"
LAUNCHER = """
import asyncio, sys
from evsys_sandbox.sandbox import Sandbox, View, why_unavailable
from evsys_sandbox.launch import Tracing, why_not_traced

async def work():
    await asyncio.to_thread(why_unavailable)
    await asyncio.to_thread(why_not_traced)
    print("ready", flush=True)
    async def again(number):
        # As tests run a program of the agent, and as an agent's commands run.
        view = View(tracing=Tracing(guarded="/logs/verifier") if number % 2 else None)
        command = f"sleep {sys.argv[1]} & setsid sleep {sys.argv[1]} & sleep {sys.argv[1]}"
        while True:  # ended soon, so that most of the time some sandbox is just starting
            async with Sandbox(folders=("/app", "/logs", "/logs/verifier")) as box:
                box.write("program", command)
                await box.run("sh /app/program", timeout_seconds=0.02 + 0.02 * number, view=view)
    await asyncio.gather(*map(again, range(4)))

asyncio.run(work())
"""
PATIENCE_SECONDS = 20.0
"""For the kernel to carry out what was begun; what is alive after that stays alive."""


def alive(mark: str, launcher: int) -> dict[int, str]:
    """Processes that bear the mark, and the launcher's supervisor; zombies are dead."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_text(errors="replace").split("\0")
        except OSError:
            continue
        if any(mark in word for word in words) or f"--launcher={launcher}" in words:
            found[int(place.name)] = " ".join(words)[:120]
    return found


def kill_once(moment: float) -> tuple[dict[int, str], float]:
    """What is left after a launcher was killed `moment` seconds after its start, and how long the last of it lived."""
    mark = f"9{uuid.uuid4().int % 10**9}"
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, mark], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "ready\n", "the launcher did not start"
    time.sleep(moment)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    launcher.stdout.close()
    begin = time.monotonic()
    while (left := alive(mark, launcher.pid)) and time.monotonic() < begin + PATIENCE_SECONDS:
        time.sleep(0.05)
    return left, time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--busy", type=int, default=2 * (os.cpu_count() or 1), help="processes that only burn CPU")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)]
    survivors: list[dict[int, str]] = []
    longest = 0.0
    try:
        for number in range(1, args.kills + 1):
            # Half of the kills in the first tenth, where everything is being started.
            moment = chance.uniform(0, 0.1 if number % 2 else 1.0)
            left, seconds = kill_once(moment)
            longest = max(longest, seconds if not left else 0.0)
            if left:
                survivors.append(left)
                print(f"kill {number} after {moment * 1000:.0f} ms left {left}", flush=True)
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            if number % 100 == 0 or number == args.kills:
                print(f"{number} kills, {len(survivors)} with survivors, all gone after {longest:.2f} s", flush=True)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    write_json(
        RESULTS,
        {
            "kills": args.kills,
            "busy_processes": args.busy,
            "with_survivors": len(survivors),
            "longest_seconds_until_all_gone": round(longest, 2),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        },
    )
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
