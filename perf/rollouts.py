"""What a rollout costs: our in-process lane beside harbor's own Trial, in one run.

In: nothing; the model is a stand-in that answers at once, or after a second. Out: a table (or `--json`) and
`perf/results/rollouts.json`; exit code 1 when a goal is missed. Measured are CPU milliseconds per rollout on both
lanes with the same agent and task, 512 rollouts of 3 turns with a second of latency per turn, how long the event loop
stands still meanwhile, and the memory of `--many` rollouts.

    python perf/rollouts.py             # about two minutes
    python perf/rollouts.py --many 10000 --json
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

from evsys_sdk.backends.mock_tokenizer import ByteTokenizer
from evsys_sdk.data_types import HarborTask, InProcessVerifier
from evsys_sdk.files import write_json
from evsys_sdk.protocols import AgentSpec
from evsys_sdk.rollout.engine import HarborRolloutEngine
from evsys_sdk.rollout.trial import EnvironmentSpec, TrialSettings
from evsys_sdk.training.rendering import ChatRenderer
from evsys_sdk.training_api import ModelInput, SampledSequence, SampleOutput, SamplingParams

RESULTS = Path(__file__).parent / "results" / "rollouts.json"
MAX_CPU_MS, MIN_RATIO, MAX_SECONDS, MAX_STALL_MS, MAX_GROWTH_MB = 0.6, 15.0, 3.6, 20.0, 20.0
TASK = HarborTask(task_id="t", instruction="Say yes", verifier=InProcessVerifier(fn_name="exact_match", expected="yes"))
TURNS = 3
RENDERER = ChatRenderer(ByteTokenizer())


class Echo:
    """A sampler that costs next to nothing: it calls a tool until the last turn, then says yes."""

    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds
        call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
        self.replies = [self._sequence(call), self._sequence("yes")]

    def _sequence(self, text: str) -> SampledSequence:
        tokens = [*text.encode(), ByteTokenizer.eos_token_id]
        return SampledSequence(tokens=tokens, logprobs=[-0.1] * len(tokens))

    async def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams, **_: Any
    ) -> SampleOutput:
        if self.seconds:
            await asyncio.sleep(self.seconds)
        # The mark of a message's beginning is counted: user, then assistant and tool for every call.
        asked = prompt.tokens.count(257)
        return SampleOutput(sequences=[self.replies[asked >= 2 * TURNS]] * num_samples)

    async def compute_logprobs(self, prompt: ModelInput) -> list[float | None]:
        return [None, *[-0.1] * (prompt.length - 1)]


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


class Nothing(BaseEnvironment):
    """The cheapest environment there can be, so that Trial is measured and not a sandbox."""

    @staticmethod
    def type() -> str:
        return "nothing"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(mounted=True)

    def _validate_definition(self) -> None: ...

    async def start(self, force_build: bool) -> None: ...

    async def stop(self, delete: bool) -> None: ...

    async def exec(self, *args: Any, **kwargs: Any) -> ExecResult:
        return ExecResult(return_code=0)

    upload_file = upload_dir = download_file = download_dir = exec


SINGLE = AgentSpec(kind="chat")
TOOLS = AgentSpec(kind="chat", params={"max_turns": TURNS, "tools": [f"{__name__}:add"]})


def engine(concurrency: int = 512) -> HarborRolloutEngine:
    settings = TrialSettings(environment=EnvironmentSpec(kind=f"{__name__}:Nothing"))
    return HarborRolloutEngine(concurrency=concurrency, settings=settings)


async def roll(task: HarborTask, n: int, agent: AgentSpec | None, seconds: float = 0.0) -> int:
    """Roll out `n` times and return how many were right."""
    sampling = SamplingParams(seed=1, max_tokens=16)
    [group] = await engine().roll_out(
        [task], sampler=Echo(seconds), renderer=RENDERER, sampling=sampling, num_samples=n, agent=agent
    )
    assert all(rollout.status == "ok" for rollout in group), next(r.error for r in group if r.error)
    return sum(rollout.reward == 1.0 for rollout in group)


def cpu_ms(task: HarborTask, n: int, agent: AgentSpec | None) -> float:
    """CPU milliseconds per rollout; the fastest of three."""
    asyncio.run(roll(task, min(n, 8), agent))
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        asyncio.run(roll(task, n, agent))
        best = min(best, time.process_time() - began)
    return best / n * 1000


async def _stalls(every: float, found: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(every)
        found.append((time.perf_counter() - began - every) * 1000)


async def with_latency(n: int) -> dict[str, float]:
    """`n` rollouts of three turns, each turn a second away; and how late the loop was to answer a clock."""
    late: list[float] = []
    watch = asyncio.create_task(_stalls(0.005, late))
    began = time.perf_counter()
    right = await roll(TASK, n, TOOLS, seconds=1.0)
    seconds = time.perf_counter() - began
    watch.cancel()
    assert right == n
    late.sort()
    return {
        "seconds": round(seconds, 2),
        "stall_p99_ms": round(late[int(len(late) * 0.99)], 1),
        "stall_max_ms": round(late[-1], 1),
    }


def memory(many: int) -> dict[str, float]:
    """How much larger the process is after `many` rollouts than after the first tenth of them."""
    sizes = []
    for part in range(10):
        for _ in range(max(1, many // 10 // 500)):
            asyncio.run(roll(TASK, 500, SINGLE))
        gc.collect()
        sizes.append(_rss_mb())
        print(f"  {500 * max(1, many // 10 // 500) * (part + 1):>8,} rollouts: {sizes[-1]:.0f} MB", file=sys.stderr)
    return {"first_mb": round(sizes[0], 1), "last_mb": round(sizes[-1], 1), "growth_mb": round(sizes[-1] - sizes[0], 1)}


def _rss_mb() -> float:
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def measure(many: int) -> dict[str, Any]:
    elsewhere = replace(TASK, metadata={"environment": True})
    ours, trial = cpu_ms(TASK, 512, SINGLE), cpu_ms(elsewhere, 64, SINGLE)
    result = {
        "in_process_cpu_ms": round(ours, 3),
        "trial_cpu_ms": round(trial, 2),
        "ratio": round(trial / ours, 1),
        "no_agent_cpu_ms": round(cpu_ms(TASK, 512, None), 3),
        "three_turns_cpu_ms": round(cpu_ms(TASK, 512, TOOLS), 3),
        "latency": asyncio.run(with_latency(512)),
        "memory": memory(many),
        "many": many,
    }
    return result | {"goal": _goal(result), "python": platform.python_version(), "machine": _machine()}


def _goal(result: dict[str, Any]) -> dict[str, bool]:
    return {
        f"at most {MAX_CPU_MS} CPU ms in process": result["in_process_cpu_ms"] <= MAX_CPU_MS,
        f"at least {MIN_RATIO:g} times less than a Trial": result["ratio"] >= MIN_RATIO,
        f"512 x 3 turns x 1 s in at most {MAX_SECONDS} s": result["latency"]["seconds"] <= MAX_SECONDS,
        f"the loop stands still at most {MAX_STALL_MS:g} ms (p99)": result["latency"]["stall_p99_ms"] <= MAX_STALL_MS,
        f"memory grows at most {MAX_GROWTH_MB:g} MB": result["memory"]["growth_mb"] <= MAX_GROWTH_MB,
    }


def _machine() -> str:
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"


def table(result: dict[str, Any]) -> str:
    late = result["latency"]
    lines = [
        f"CPU per rollout   in process {result['in_process_cpu_ms']:.3f} ms, harbor's Trial "
        f"{result['trial_cpu_ms']:.1f} ms ({result['ratio']:.0f} times); without an agent "
        f"{result['no_agent_cpu_ms']:.3f} ms, three turns with a tool {result['three_turns_cpu_ms']:.3f} ms",
        f"512 x 3 x 1 s     {late['seconds']:.2f} s; stalls p99 {late['stall_p99_ms']:.1f} ms, "
        f"max {late['stall_max_ms']:.1f} ms",
        f"{result['many']:,} rollouts   {result['memory']['growth_mb']:+.1f} MB",
    ]
    return "\n".join(lines + [f"{'met   ' if met else 'MISSED'} {goal}" for goal, met in result["goal"].items()])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--many", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.many)
    write_json(RESULTS, result)
    print(json.dumps(result) if options.json else table(result))
    return 0 if all(result["goal"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
