"""Contestants take turns: A B C, A B C.

In: commands that start contestants. Out: `Turn`s, as each process reports them. A contestant is a separate process, so
that its peak memory is its own; while one works the others wait on a pipe, so that a noisy machine is noisy
for all of them. Both ends of the pipe are here: `Contestant` for the one who asks, `Turns` for the one who works.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

MAX_OTHERS = 0.15
"""Cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One measured piece of work."""

    tokens: int
    seconds: float
    cpu_seconds: float
    """Of all its threads."""
    peak_mb: float
    """Of the process, since it began: loading is part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The result of a contestant's turns."""

    tokens_per_second: float
    """The median over turns."""
    spread: float
    """The slowest turn's time over the fastest's."""
    peak_mb: float


class Contestant:
    """The asking end: a process that works when told to."""

    def __init__(self, command: Sequence[str], threads: int):
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        self._command = list(command)
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=Path(__file__).parents[1],
        )
        self._read()  # it is ready

    def begin(self, work: Any) -> None:
        """Tell it to go; `end` waits for it."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()

    def end(self) -> Turn:
        return Turn(**self._read())

    def turn(self, work: Any) -> tuple[Turn, float]:
        """The turn, and how many cores others kept busy meanwhile."""
        before = busy_seconds()
        self.begin(work)
        turn = self.end()
        return turn, max(0.0, busy_seconds() - before - turn.cpu_seconds) / turn.seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()  # it ends when no request can come
        if exc[0] is not None:
            self._process.terminate()
        self._process.wait()
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self._command)} ended with code {self._process.wait()}; its words are above")
        found: dict[str, Any] = json.loads(line)
        return found


def take_turns(
    contestants: Mapping[str, Contestant], works: Sequence[Any], *, disturbed: Callable[[str, float], None]
) -> dict[str, list[Turn]]:
    """Every contestant does each piece of work; the order changes from round to round.

    A turn during which others kept more than `MAX_OTHERS` cores busy says little. `disturbed` hears of it.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in contestants}
    names = list(contestants)
    for number, work in enumerate(works):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            turn, others = contestants[name].turn(work)
            turns[name].append(turn)
            if others > MAX_OTHERS:
                disturbed(name, others)
    return turns


def score(turns: Sequence[Turn], *, by_cpu: bool) -> Score:
    """By the clock, or by what the processor did for it: with one thread that is the same on an idle machine."""
    speeds = [turn.tokens / (turn.cpu_seconds if by_cpu else turn.seconds) for turn in turns]
    return Score(
        tokens_per_second=statistics.median(speeds),
        spread=max(speeds) / min(speeds),
        peak_mb=max(turn.peak_mb for turn in turns),
    )


def busy_seconds() -> float:
    """What all cores of this machine have worked since it started."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Turns:
    """The working end. Whatever a library prints goes to stderr; only reports go into the pipe."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._began = self._cpu_began = 0.0

    def wait(self) -> Any:
        """What to do next; None when it is over."""
        line = sys.stdin.readline()
        self._began, self._cpu_began = time.perf_counter(), time.process_time()
        return json.loads(line) if line else None

    def ready(self) -> None:
        self._say({})

    def report(self, tokens: int) -> None:
        seconds, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu_began
        self._say(asdict(Turn(tokens=tokens, seconds=seconds, cpu_seconds=cpu, peak_mb=peak_mb())))

    def serve(self, act: Callable[[Any], int]) -> None:
        """Answer requests until the input ends; `act` returns the number of tokens."""
        self.ready()
        while (work := self.wait()) is not None:
            self.report(act(work))

    def _say(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


def peak_mb() -> float:
    """The most memory this process ever had (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM"))
