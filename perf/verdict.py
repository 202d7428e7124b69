"""How long does the verdict take, next to the t-tests one would write by hand?

In: nothing; scores of `--arms` x `--seeds` x `--tasks` are made up. Out: a table (or `--json`) and
`perf/results/verdict.json`; exit code 1 when the goal is missed. The hand-written way makes arrays of the same dicts
and calls `scipy.stats.ttest_rel` per arm on the means over seeds: no variance of seeds, no equivalence, no correction
for the pick. Of `--repeats` runs in one process the fastest counts; the first, which also imports, is shown beside.

    python perf/verdict.py            # 1,000 tasks x 12 arms x 5 seeds, some seconds
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evsys_sdk.files import write_json
from evsys_sdk.stats.arm_scores import ArmScores
from evsys_sdk.stats.judge import judge_arms

RESULTS = Path(__file__).parent / "results" / "verdict.json"
MAX_SECONDS = 2.0


def made_up(arms: int, seeds: int, tasks: int) -> list[ArmScores]:
    chance = random.Random(0)
    names = [f"task-{task:05d}" for task in range(tasks)]
    hard = [chance.random() for _ in names]
    return [
        ArmScores(
            arm=f"arm{arm}",
            seeds={
                seed: {name: float(chance.random() > share) for name, share in zip(names, hard, strict=True)}
                for seed in range(seeds)
            },
        )
        for arm in range(arms)
    ]


def by_hand(arms: list[ArmScores]) -> list[float]:
    import numpy as np
    from scipy.stats import ttest_rel

    tasks = sorted(set.intersection(*(set(values) for arm in arms for values in arm.seeds.values())))
    means = [np.mean([[values[t] for t in tasks] for values in arm.seeds.values()], axis=0) for arm in arms]
    return [float(ttest_rel(mean, means[0]).pvalue) for mean in means[1:]]


def through_the_sdk(arms: list[ArmScores]) -> dict[str, Any]:
    fresh = [ArmScores(arm=arm.arm, seeds=arm.seeds) for arm in arms]  # nothing remembered from the last time
    return judge_arms(fresh, metric="pass@1").as_dict()


def timed(act: Callable[[list[ArmScores]], Any], arms: list[ArmScores], repeats: int) -> dict[str, float]:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        act(arms)
        seconds.append(time.perf_counter() - start)
    return {"first": round(seconds[0], 4), "seconds": round(min(seconds), 4)}


def compare(arms: int, seeds: int, tasks: int, repeats: int) -> dict[str, Any]:
    scores = made_up(arms, seeds, tasks)
    verdict, hand = timed(through_the_sdk, scores, repeats), timed(by_hand, scores, repeats)
    return {
        "arms": arms,
        "seeds": seeds,
        "tasks": tasks,
        "by_hand": hand,
        "verdict": verdict,
        "ratio": round(verdict["seconds"] / hand["seconds"], 2),
        "goal": {"seconds": MAX_SECONDS, "met": verdict["seconds"] <= MAX_SECONDS},
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['tasks']:,} tasks x {result['arms']} arms x {result['seeds']} seeds"]
    lines.append(f"{'':<12}{'seconds':>9}{'first':>9}")
    lines += [f"{way:<12}{result[way]['seconds']:>9.3f}{result[way]['first']:>9.3f}" for way in ("by_hand", "verdict")]
    met = "met" if result["goal"]["met"] else "MISSED"
    lines.append(f"ratio {result['ratio']:.2f}; goal: at most {MAX_SECONDS:g} s: {met}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arms", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = compare(options.arms, options.seeds, options.tasks, options.repeats)
    write_json(RESULTS, result)
    print(json.dumps(result) if options.json else table(result))
    return 0 if result["goal"]["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
