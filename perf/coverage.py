"""How often do the verdict's 95 % intervals hold the truth, and how often does it name a winner among equals?

In: nothing; scores are made up. Out: a table, or `--json`; exit code 1 when a goal is missed. Everything goes through
`judge_arms`, as an experiment's scores do. The maximum, which most reports go by, stands beside.

A world has tasks of mixed difficulty (Beta), arms that find different tasks hard, and seeds that move an arm by 0 to 15
points or so. `passes` are 0 or 1, `alike` are 0 or 1 on tasks that are all equally hard, `parts` are shares of four
tries, `seconds` are long-tailed numbers on an open scale. One seed speaks of its weights, several of the recipe.
Null worlds have equal arms under conditions that break the usual assumptions: seeds of one arm that scatter ten times
as much, twenty arms whose seeds scatter, tasks made from templates, and seeds added until something is significant.

    python perf/coverage.py            # a minute or two
    python perf/coverage.py --full     # all worlds, some 30 minutes, into perf/results/coverage.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evsys_sdk.atomic import write_json
from evsys_sdk.eval.arm_scores import ArmScores
from evsys_sdk.eval.judging import judge_arms
from evsys_sdk.eval.verdict import Verdict

RESULTS = Path(__file__).parent / "results" / "coverage.json"
TRIES = 4
SCATTERS = {"passes": (0.0, 0.1, 0.35, 1.0), "seconds": (0.0, 5.0, 15.0, 50.0)}
"""Standard deviation of a seed's effect: on the logit, or in seconds of about 100."""
DIFFICULTY = {"passes": (0.6, 2.0), "alike": (0.7, 1e6), "parts": (0.6, 2.0)}
"""Mean and concentration of the tasks' Beta distribution."""
FALSE_WINNERS, BIAS, COVERED, NULL = 0.05, 0.005, (0.93, 0.99), 0.06
"""Goals: false winners among equals; bias of the winner's score; coverage, at the least and on average (two or three
seeds make intervals that are wider than need be where seeds do not matter); false verdicts in the null worlds."""

type Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One kind of world."""

    kind: str
    arms: int
    seeds: int
    tasks: int
    scatter: float
    gain: float
    """Of the second arm over the others, on the logit or in tenths of a second."""


def cells(*, full: bool) -> Iterator[Cell]:
    """Worlds to look at; with one arm, or one seed, much falls away."""
    kinds = ("passes", "alike", "parts", "seconds") if full else ("passes", "alike")
    for kind, arms, seeds, tasks in product(kinds, (1, 2, 6), (1, 2, 3, 5), (20, 50, 100, 300)):
        if (kind in ("parts", "seconds") and (arms != 2 or tasks == 300)) or (not full and (arms == 1 or tasks != 100)):
            continue
        for scatter in SCATTERS["seconds" if kind == "seconds" else "passes"][: 1 if seeds == 1 else 4]:
            yield Cell(kind=kind, arms=arms, seeds=seeds, tasks=tasks, scatter=scatter, gain=0.5)


def draw(cell: Cell, chance: np.random.Generator) -> tuple[Array, Array]:
    """Values, arms x seeds x tasks, and how good each arm (of one seed: these weights) really is."""
    shift = np.where(np.arange(cell.arms) == 1, cell.gain, 0.0)[:, None, None]
    luck = cell.scatter * chance.standard_normal((cell.arms, cell.seeds, 1))
    if cell.kind == "seconds":
        tasks = chance.gamma(2.0, 40.0, cell.tasks)
        own = chance.normal(0, 10, (cell.arms, 1, cell.tasks))
        values = tasks + own + 10 * shift + luck + chance.gamma(1.0, 20.0, (cell.arms, cell.seeds, cell.tasks))
        return values, 100 + 10 * shift[:, 0, 0] + (luck[:, 0, 0] if cell.seeds == 1 else 0.0)
    own = (0.0 if cell.kind == "alike" else 0.4) * chance.standard_normal((cell.arms, 1, cell.tasks))
    chances = logistic(_logits(cell.kind, cell.tasks, chance) + own + shift + luck)
    tries = TRIES if cell.kind == "parts" else 1
    values = chance.binomial(tries, chances) / tries
    at = shift[:, 0, 0] + (luck[:, 0, 0] if cell.seeds == 1 else 0.0)
    return values, _truth(cell, at)


def logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _logits(kind: str, tasks: int, chance: np.random.Generator) -> Array:
    mean, concentration = DIFFICULTY[kind]
    share = np.clip(chance.beta(mean * concentration, (1 - mean) * concentration, tasks), 1e-6, 1 - 1e-6)
    return np.log(share / (1 - share))


_CURVES: dict[tuple[str, float], tuple[Array, Array]] = {}


def _truth(cell: Cell, at: Array) -> Array:
    """The mean over all tasks there could be, of arms moved by so much; over all seeds too where there are several."""
    scatter = cell.scatter if cell.seeds > 1 else 0.0
    if (cell.kind, scatter) not in _CURVES:
        chance = np.random.default_rng(1)
        logits = _logits(cell.kind, 200_000, chance)
        logits = logits + (0.0 if cell.kind == "alike" else 0.4) * chance.standard_normal(logits.size)
        logits = logits + scatter * chance.standard_normal(logits.size)
        grid = np.linspace(-6, 6, 121)
        _CURVES[cell.kind, scatter] = grid, np.array([logistic(logits + x).mean() for x in grid])
    return np.interp(at, *_CURVES[cell.kind, scatter])


def judged(values: Array) -> Verdict:
    names = [f"t{task:03d}" for task in range(values.shape[2])]
    arms = [
        ArmScores(arm=f"a{i}", seeds={s: dict(zip(names, row.tolist(), strict=True)) for s, row in enumerate(arm)})
        for i, arm in enumerate(values)
    ]
    return judge_arms(arms, metric="pass@1", share=bool(values.max() <= 1.0))


def held(low: float | None, high: float | None, truth: float) -> float:
    return float("nan") if low is None or high is None else float(low - 1e-12 <= truth <= high + 1e-12)


def measured(cell: Cell, repeats: int, seed: int) -> dict[str, Any]:
    """Coverage of the first two arms' intervals, of their difference, and of the winner's."""
    chance = np.random.default_rng(seed)
    arms, pairs, winners = [], [], []
    for _ in range(repeats):
        values, truth = draw(cell, chance)
        found = judged(values)
        arms += [held(arm.low, arm.high, truth[i]) for i, arm in enumerate(found.arms[:2])]
        assert found.winner is not None
        winners.append(held(found.winner.low, found.winner.high, truth[int(found.winner.arm[1:])]))
        for arm in found.arms[1:2]:
            assert arm.vs_baseline is not None
            pairs.append(held(arm.vs_baseline.low, arm.vs_baseline.high, truth[1] - truth[0]))
    result = {name: getattr(cell, name) for name in Cell.__slots__}
    rows = {"arm": arms, "difference": pairs, "winner": winners if cell.arms > 1 else []}
    return result | {name: round(float(np.nanmean(row)), 4) if row else None for name, row in rows.items()}


def equal_arms(repeats: int, *, seeds: int, scatter: float) -> dict[str, Any]:
    """Six equal arms on 100 tasks: how often one is named best, and how far the winner's score is from the truth."""
    cell = Cell(kind="passes", arms=6, seeds=seeds, tasks=100, scatter=scatter, gain=0.0)
    chance = np.random.default_rng(2026)
    named, highest, bias, raw = 0, 0, [], []
    for _ in range(repeats):
        values, truth = draw(cell, chance)
        found = judged(values)
        assert found.winner is not None and found.winner.expected is not None
        named += found.best_arm is not None
        highest += found.winner.arm != "a0"
        real = truth[int(found.winner.arm[1:])]
        bias.append(found.winner.expected - real)
        raw.append(found.winner.observed - real)
    return {
        "seeds": seeds,
        "scatter": scatter,
        "false_winners": named / repeats,
        "false_winners_of_maximum": highest / repeats,
        "bias": round(float(np.mean(bias)), 4),
        "bias_of_maximum": round(float(np.mean(raw)), 4),
    }


def null_worlds(repeats: int) -> list[dict[str, Any]]:
    """False verdicts among equal arms: how often any arm is told from the first, by judged worlds of numbers."""
    worlds = [
        ("2 arms, 2 seeds, one scatters 10 times as much", {"seeds": 2, "scatters": (0.02, 0.2)}),
        ("2 arms, 3 seeds, the baseline scatters 10 times as much", {"seeds": 3, "scatters": (0.2, 0.02)}),
        ("20 arms, 3 seeds that scatter", {"seeds": 3, "scatters": (0.1,) * 20}),
        ("2 arms, 10 templates x 20 tasks, 1 seed", {"seeds": 1, "scatters": (0.0, 0.0), "templates": 10}),
        ("2 arms, 10 templates x 20 tasks, 3 seeds", {"seeds": 3, "scatters": (0.05, 0.05), "templates": 10}),
        ("2 arms, seeds added one by one from 3 to 10", {"seeds": 10, "scatters": (0.1, 0.1), "first_look": 3}),
    ]
    found = []
    for number, (name, world) in enumerate(worlds):
        chance = np.random.default_rng(number)
        some = max(1, repeats // 4) if len(world["scatters"]) > 2 else repeats
        wrong = sum(_is_told_apart(chance, **world) for _ in range(some))
        found.append({"world": name, "repeats": some, "false_verdicts": round(wrong / some, 4)})
    return found


def _is_told_apart(
    chance: np.random.Generator,
    *,
    seeds: int,
    scatters: tuple[float, ...],
    templates: int | None = None,
    first_look: int | None = None,
) -> bool:
    """Whether equal arms on 200 tasks are told apart, at any look where there are several."""
    arms, tasks = len(scatters), 200
    values = chance.normal(0, 0.2, (1, 1, tasks)) + chance.normal(0, 0.15, (arms, 1, tasks))
    values = values + chance.normal(0, 0.3, (arms, seeds, tasks))
    values = values + np.array(scatters)[:, None, None] * chance.standard_normal((arms, seeds, 1))
    if templates:
        values = values + np.repeat(chance.normal(0, 0.15, (arms, 1, templates)), tasks // templates, axis=2)
    for look, upto in enumerate(range(first_look or seeds, seeds + 1), start=1):
        names = [f"t{task:03d}" for task in range(tasks)]
        scores = [
            ArmScores(arm=f"a{i}", seeds={s: dict(zip(names, row.tolist(), strict=True)) for s, row in enumerate(arm)})
            for i, arm in enumerate(values[:, :upto])
        ]
        clusters = {name: f"c{i * templates // tasks}" for i, name in enumerate(names)} if templates else None
        verdict = judge_arms(scores, metric="reward", share=False, looks=look, clusters=clusters)
        if any(arm.verdict in ("better", "worse") for arm in verdict.arms):
            return True
    return False


def measure(repeats: int, *, full: bool) -> dict[str, Any]:
    rows = [measured(cell, repeats, seed) for seed, cell in enumerate(cells(full=full))]
    equals = [equal_arms(1000 if full else 300, seeds=s, scatter=x) for s, x in ((1, 0.0), (2, 0.1), (3, 0.35))]
    found = [row[name] for row in rows for name in ("arm", "difference") if row[name] is not None and row["arms"] > 1]
    nulls = null_worlds(2000 if full else 200)
    chance = 3 * (0.93 * 0.07 / repeats) ** 0.5  # of the lowest of many
    spread = [2 * (NULL * (1 - NULL) / one["repeats"]) ** 0.5 for one in nulls]
    goal = {
        "false_winners": max(one["false_winners"] for one in equals) <= FALSE_WINNERS,
        "bias": max(abs(one["bias"]) for one in equals) <= BIAS,
        "covered": bool(COVERED[0] <= np.mean(found) <= COVERED[1] and min(found) >= COVERED[0] - chance),
    }
    goal["null_worlds"] = all(one["false_verdicts"] <= NULL + s for one, s in zip(nulls, spread, strict=True))
    return {
        "repeats": repeats,
        "equal_arms": equals,
        "null_worlds": nulls,
        "lowest": round(min(found), 4),
        "mean": round(float(np.mean(found)), 4),
        "goal": goal | {"met": all(goal.values())},
        "coverage": ranges(rows),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def ranges(rows: list[dict[str, Any]]) -> dict[str, str]:
    """What is covered by which interval -> lowest, mean and highest over kinds of values and scatters of seeds."""
    told = {}
    for what in ("arm", "difference", "winner"):
        for key in sorted({(row["arms"], row["seeds"], row["tasks"]) for row in rows if row[what] is not None}):
            some = [100 * row[what] for row in rows if (row["arms"], row["seeds"], row["tasks"]) == key]
            name = f"{what:<11}{key[0]:>2} arms{key[1]:>3} seeds{key[2]:>5} tasks"
            told[name] = f"{min(some):5.1f} .. {np.mean(some):5.1f} .. {max(some):5.1f} %"
    return told


def table(result: dict[str, Any]) -> str:
    lines = [f"{'':<31}   lowest .. mean .. highest over kinds and scatters"]
    lines += [f"{name:<31}   {told}" for name, told in result["coverage"].items()]
    for one in result["equal_arms"]:
        lines.append(
            f"six equal arms, {one['seeds']} seeds, scatter {one['scatter']:g}: a winner in "
            f"{one['false_winners']:.1%} (maximum {one['false_winners_of_maximum']:.0%}), its score off by "
            f"{100 * one['bias']:+.2f} points (maximum {100 * one['bias_of_maximum']:+.1f})"
        )
    lines += [f"{one['world']}: false verdicts {one['false_verdicts']:.1%}" for one in result["null_worlds"]]
    met = "met" if result["goal"]["met"] else f"MISSED {result['goal']}"
    summary = f"of several arms: lowest {result['lowest']:.1%}, mean {result['mean']:.1%}; goals: {met}"
    return "\n".join([*lines, summary])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.repeats or (600 if options.full else 150), full=options.full)
    if options.full:
        write_json(RESULTS, result)
    print(json.dumps(result) if options.json else table(result))
    return 0 if result["goal"]["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
