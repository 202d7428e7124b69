"""How often does the loop keep what is no better, and what does an agent at the table gain or cost?

In: nothing; tasks are made up or redrawn from the committed table (`worlds.py`), agents are scripted (`agents.py`), the
driver is the real one over a laboratory that draws scores and has them judged (`simulation.py`). Out:
`perf/results/autoresearch_keeps.json` and a table. Scenarios of one world share seeds, tasks and answers, so that they
are paired. Outcomes are kept in `--work`, and what is there is not simulated again.

    python perf/autoresearch/keeps.py --work /tmp/keeps --seeds 50        # about ten minutes on an idle core
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from scipy.stats import beta

from autoresearch.agents import CheatingAgent, ScriptedAgent
from autoresearch.simulation import Outcome, drive, keep_maximum
from autoresearch.worlds import WORLDS, World
from evsys_sdk import registry
from evsys_sdk.files import write_json
from evsys_sdk.research.shares import Seat
from evsys_sdk.research.state import Proposer

RESULTS = Path(__file__).parents[1] / "results" / "autoresearch_keeps.json"
TRIALS, RESAMPLES = 60, 2000
SHARE = 0.3
Run = Callable[[World, int, int], Outcome]


def alone(make: Callable[[World], Proposer]) -> Run:
    return lambda world, seed, trials: drive(world, [Seat(name="agent", proposer=make(world))], seed, trials=trials)


def bare(make: Callable[[World], Proposer]) -> Run:
    return lambda world, seed, trials: keep_maximum(world, make(world), seed, trials=trials)


def beside_evolve(make: Callable[[World], Proposer] | None) -> Run:
    def run(world: World, seed: int, trials: int) -> Outcome:
        seats = [Seat(name="evolve", proposer=registry.proposers.build("evolve", {}))]
        if make is not None:
            seats.append(Seat(name="agent", proposer=make(world), cap=SHARE))
        return drive(world, seats, seed, trials=trials)

    return run


def honest(world: World) -> Proposer:
    return ScriptedAgent(world=world, skill=0.5, duplicates=0.1, invalid=0.05)


def cheating(world: World) -> Proposer:
    return CheatingAgent(world=world, skill=0.3, share=0.5)


def boasting(world: World) -> Proposer:
    return CheatingAgent(world=world, skill=0.3, share=0.7, cheats=("victory",))


def useful(world: World) -> Proposer:
    return ScriptedAgent(world=world, skill=0.5)


def useless(world: World) -> Proposer:
    return ScriptedAgent(world=world, skill=0.0)


def misspelling(world: World) -> Proposer:
    return ScriptedAgent(world=world, invalid=1.0)


SCENARIOS: dict[str, Run] = {
    "honest": alone(honest),
    "cheating": alone(cheating),
    "boasting": alone(boasting),
    "honest, bare maximum": bare(honest),
    "cheating, bare maximum": bare(cheating),
    "boasting, bare maximum": bare(boasting),
    "evolve": beside_evolve(None),
    "evolve + useful": beside_evolve(useful),
    "evolve + useless": beside_evolve(useless),
    "evolve + invalid": beside_evolve(misspelling),
}


def share_of(count: int, n: int) -> dict[str, Any]:
    """A share with its exact 95 % interval (Clopper and Pearson 1934)."""
    if n == 0:
        return {"share": None, "count": 0, "n": 0}
    low = 0.0 if count == 0 else float(beta.ppf(0.025, count, n - count + 1))
    high = 1.0 if count == n else float(beta.ppf(0.975, count + 1, n - count))
    return {"share": round(count / n, 4), "count": count, "n": n, "low": round(low, 4), "high": round(high, 4)}


def resampled(seeds: Sequence[int], value: Callable[[Sequence[int]], float]) -> dict[str, Any]:
    """A figure over paired seeds with its percentile bootstrap interval."""
    chance = random.Random(0)
    drawn = sorted(value(chance.choices(seeds, k=len(seeds))) for _ in range(RESAMPLES))
    ends = drawn[int(0.025 * RESAMPLES)], drawn[int(0.975 * RESAMPLES)]
    return {"value": round(value(seeds), 4), "low": round(ends[0], 4), "high": round(ends[1], 4), "n": len(seeds)}


def false_keeps(found: Sequence[Outcome]) -> dict[str, Any]:
    keeps, wrong = sum(one.keeps for one in found), sum(one.false_keeps for one in found)
    return {
        "of_keeps": share_of(wrong, keeps),
        "of_launched": share_of(wrong, sum(one.launched for one in found)),
        "test_reads": sum(one.test_reads for one in found),
        "test_reads_refused": sum(one.refused_reads for one in found),
    }


def about(found: Sequence[Outcome]) -> dict[str, Any]:
    """One scenario in numbers."""
    n = len(found)
    gained = [(one.truth - one.start) / (one.best - one.start) for one in found]
    numbers = {
        "seeds": n,
        "false_keeps": false_keeps(found),
        "keeps_per_research": round(sum(one.keeps for one in found) / n, 2),
        "share_of_possible_gain": round(statistics.median(gained), 3),
        "median_regret": round(statistics.median(one.regret for one in found), 4),
        "mean_regret": round(statistics.fmean(one.regret for one in found), 4),
        "runs_per_research": round(sum(one.runs for one in found) / n, 1),
        "invalid_per_research": round(sum(one.invalid for one in found) / n, 2),
        "agent_trials": sum(one.agent_launched for one in found),
        "failed_after_20": share_of(sum(o.failed_late for o in found), sum(o.launched_late for o in found)),
    }
    return numbers | honesty(found)


def honesty(found: Sequence[Outcome]) -> dict[str, Any]:
    """Reported less true score of the winner, on the tasks of the search and on tasks that took no part."""
    numbers: dict[str, Any] = {}
    for name, cases in (
        ("search_tasks", [(o.reported, o.low, o.high, o.truth) for o in found]),
        ("test_tasks", [(*(o.on_test or (None, None, None)), o.truth) for o in found]),
    ):
        gaps = [reported - truth for reported, _, _, truth in cases if reported is not None]
        inside = [low <= truth <= high for _, low, high, truth in cases if low is not None and high is not None]
        if gaps:
            numbers[f"reported_minus_true_on_{name}"] = resampled(
                range(len(gaps)), lambda drawn, gaps=gaps: statistics.fmean(gaps[i] for i in drawn)
            )
        if inside:
            numbers[f"covered_on_{name}"] = share_of(sum(inside), len(inside))
    return numbers


def against(one: Sequence[Outcome], other: Sequence[Outcome]) -> dict[str, Any]:
    """The change of the regret, as a share of the other's: negative is better."""
    return {
        name: resampled(
            range(len(one)),
            lambda drawn, fold=fold: fold(one[i].regret for i in drawn) / fold(other[i].regret for i in drawn) - 1,
        )
        for name, fold in (("mean", statistics.fmean), ("median", statistics.median))
    }


def summarise(outcomes: dict[tuple[str, str], dict[int, Outcome]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for (world, name), by_seed in outcomes.items():
        found.setdefault(world, {})[name] = about(list(by_seed.values()))
    for world, scenarios in found.items():
        alone_there = outcomes.get((world, "evolve"), {})
        for name in ("evolve + useful", "evolve + useless", "evolve + invalid"):
            own = outcomes.get((world, name), {})
            shared = sorted(set(alone_there) & set(own))
            if shared:
                pair = [own[s] for s in shared], [alone_there[s] for s in shared]
                scenarios[name]["regret_against_evolve"] = against(*pair)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--work", type=Path, required=True, help="folder of the outcomes so far")
    parser.add_argument("--worlds", nargs="*", default=list(WORLDS), choices=list(WORLDS))
    parser.add_argument("--scenarios", nargs="*", default=list(SCENARIOS), choices=list(SCENARIOS))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    path, end = args.work / "outcomes.jsonl", time.monotonic() + 60 * args.minutes
    outcomes: dict[tuple[str, str], dict[int, Outcome]] = {}
    for text in path.read_text().splitlines() if path.exists() else []:
        line = json.loads(text)
        outcomes.setdefault((line["world"], line["scenario"]), {})[line["seed"]] = Outcome(**line["outcome"])
    with path.open("a") as file:
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            for kind in args.worlds:
                for name in args.scenarios:
                    if seed in outcomes.get((kind, name), {}) or time.monotonic() > end:
                        continue
                    outcome = SCENARIOS[name](WORLDS[kind](seed), seed, args.trials)
                    outcomes.setdefault((kind, name), {})[seed] = outcome
                    line = {"world": kind, "scenario": name, "seed": seed, "outcome": asdict(outcome)}
                    file.write(json.dumps(line) + "\n")
                    file.flush()
    figures = summarise(outcomes)
    machine = {"platform": platform.platform(), "python": platform.python_version()}
    settings = {"trials": args.trials, "share": SHARE, "first_look_seeds": 1, "max_repeats": 4, "final_repeats": 3}
    write_json(RESULTS, {"settings": settings, "worlds": figures, "machine": machine})
    for world, scenarios in figures.items():
        print(f"\n{world:<26}{'n':>4}{'keeps':>7}{'false':>8}{'/trial':>8}{'gained':>8}{'regret':>8}{'runs':>7}")
        for name, one in scenarios.items():
            wrong = one["false_keeps"]
            share, each = wrong["of_keeps"]["share"], wrong["of_launched"]["share"]
            print(
                f"{name:<26}{one['seeds']:>4}{one['keeps_per_research']:>7.1f}"
                f"{'-' if share is None else f'{share:.3f}':>8}{each if each is not None else 0:>8.4f}"
                f"{one['share_of_possible_gain']:>8.2f}{one['median_regret']:>8.3f}{one['runs_per_research']:>7.0f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
