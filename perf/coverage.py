"""How often do the verdict's 95 % intervals hold the truth, and how often does it name a winner among equals?

In: nothing; scores are made up. Out: a table, or `--json`; exit code 1 when a goal is missed. Everything goes through
`judge_arms`, as an experiment's scores do. The maximum, which most reports go by, stands beside.

A world has tasks of mixed difficulty (Beta), arms that find different tasks hard, and seeds that move an arm by 0 to 15
points or so. `passes` are 0 or 1, `alike` are 0 or 1 on tasks that are all equally hard, `parts` are shares of four
tries, `seconds` are long-tailed numbers on an open scale. One seed speaks of its weights, several of the recipe.
Null worlds have equal arms under conditions that break the usual assumptions: seeds of one arm that scatter ten times
as much, arms with different numbers of seeds, twenty arms whose seeds scatter, tasks made from templates, and seeds
added until something is significant. Template sizes and looks in turn each have a world. `power` is how often a
true gain of one arm of four is found.

    python perf/coverage.py            # a minute or two
    python perf/coverage.py --full     # all worlds, some hours of CPU, into perf/results/coverage.json
    python perf/coverage.py --full --only null_worlds power --repeats 100     # these parts; the others stay
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evsys_sdk.files import read_object, write_json
from evsys_sdk.stats.arm_scores import ArmScores
from evsys_sdk.stats.clusters import by_cluster
from evsys_sdk.stats.comparison import difference
from evsys_sdk.stats.judge import judge_arms
from evsys_sdk.stats.selection import holm, penalty_of_look
from evsys_sdk.stats.verdict import Verdict

RESULTS = Path(__file__).parent / "results" / "coverage.json"
TRIES = 4
SCATTERS = {"passes": (0.0, 0.1, 0.35, 1.0), "seconds": (0.0, 5.0, 15.0, 50.0)}
"""Standard deviation of a seed's effect: on the logit, or in seconds of about 100."""
DIFFICULTY = {"passes": (0.6, 2.0), "alike": (0.7, 1e6), "parts": (0.6, 2.0)}
"""Mean and concentration of the tasks' Beta distribution."""
FALSE_WINNERS, BIAS, COVERED, NULL, TINY_P = 0.05, 0.005, (0.93, 0.99), 0.06, 0.002
"""Goals: false winners among equals; bias of the winner's score; coverage, at the least and on average (two or three
seeds make intervals that are wider than need be where seeds do not matter); false verdicts in the null worlds, and
p-values below 0.001 there."""
CALM = 0.02
"""In null worlds with unequal seeds: how much the seeds of the calm arm scatter, beside a noise of 0.3 per value."""

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
        "repeats": repeats,
        "false_winners": named / repeats,
        "false_winners_of_maximum": highest / repeats,
        "bias": round(float(np.mean(bias)), 4),
        "bias_of_maximum": round(float(np.mean(raw)), 4),
    }


UNEQUAL = (0.3, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.03, 0.02)
"""Shares of the tasks that ten templates have."""


def null_worlds(repeats: int) -> list[dict[str, Any]]:
    """False verdicts among equal arms: how often any arm is distinguished from the first, and p-values below 0.001."""
    worlds: list[tuple[str, dict[str, Any]]] = [
        ("2 arms, 2 seeds, one scatters 10 times as much", {"seeds": (2, 2), "scatters": (0.02, 0.2)}),
        ("2 arms, 3 seeds, the baseline scatters 10 times as much", {"seeds": (3, 3), "scatters": (0.2, 0.02)}),
        ("20 arms, 3 seeds that scatter", {"seeds": (3,) * 20, "scatters": (0.1,) * 20}),
        ("2 arms, 10 templates x 20 tasks, 1 seed", {"seeds": (1, 1), "scatters": (0.0, 0.0), "templates": 10}),
        ("2 arms, 10 templates x 20 tasks, 3 seeds", {"seeds": (3, 3), "scatters": (0.05, 0.05), "templates": 10}),
        ("2 arms, 10 templates of unequal size, 1 seed", {"seeds": (1, 1), "scatters": (0.0, 0.0), "shares": UNEQUAL}),
        (
            "2 arms, 10 templates of unequal size, 3 seeds",
            {"seeds": (3, 3), "scatters": (0.05, 0.05), "shares": UNEQUAL},
        ),
        ("2 arms, seeds added one by one from 3 to 10", {"seeds": (10, 10), "scatters": (0.1, 0.1), "first_look": 3}),
    ]
    found = []
    for number, (name, world) in enumerate(worlds):
        chance = np.random.default_rng(number)
        some = max(1, repeats // 4) if len(world["scatters"]) > 2 else repeats
        smallest = np.array([smallest_p(chance, **world) for _ in range(some)])
        tiny = None if "first_look" in world else round(float((smallest < 0.001).mean()), 4)
        wrong = round(float((smallest < 0.05).mean()), 4)
        found.append({"world": name, "repeats": some, "false_verdicts": wrong, "p_below_0.001": tiny})
    return found


def smallest_p(
    chance: np.random.Generator,
    *,
    seeds: tuple[int, ...],
    scatters: tuple[float, ...],
    tasks: int = 200,
    templates: int | None = None,
    shares: tuple[float, ...] | None = None,
    first_look: int | None = None,
) -> float:
    """Holm's smallest p-value of equal arms against the first, at any look where there are several; 1 where there is
    none. An arm is distinguished where it is below 0.05."""
    arms, most = len(scatters), max(seeds)
    values = chance.normal(0, 0.2, (1, 1, tasks)) + chance.normal(0, 0.15, (arms, 1, tasks))
    values = values + chance.normal(0, 0.3, (arms, most, tasks))
    values = values + np.array(scatters)[:, None, None] * chance.standard_normal((arms, most, 1))
    if templates:
        shares = (1 / templates,) * templates
    of_task = None
    if shares:
        of_task = np.repeat(np.arange(len(shares)), [round(share * tasks) for share in shares])
        values = values + chance.normal(0, 0.15, (arms, 1, len(shares)))[:, :, of_task]
    names, smallest = [f"t{task:03d}" for task in range(tasks)], 1.0
    for look, upto in enumerate(range(first_look or most, most + 1), start=1):
        scores = [
            ArmScores(arm=f"a{i}", seeds={s: dict(zip(names, row.tolist(), strict=True)) for s, row in enumerate(arm)})
            for i, arm in enumerate(arm[: min(upto, n)] for arm, n in zip(values, seeds, strict=True))
        ]
        clusters = None if of_task is None else {name: f"c{of_task[i]}" for i, name in enumerate(names)}
        verdict = judge_arms(scores, metric="reward", share=False, looks=look, clusters=clusters)
        found = [arm.vs_baseline.p_holm for arm in verdict.arms if arm.vs_baseline]
        smallest = min([smallest, *(p for p in found if p is not None)])
        told_apart = any(arm.verdict in ("better", "worse") for arm in verdict.arms)
        assert told_apart == any(p is not None and p < 0.05 for p in found)
    return smallest


def unequal_seeds(repeats: int, *, full: bool) -> list[dict[str, Any]]:
    """False verdicts of two equal arms with different numbers of seeds, of which the one with fewer scatters more; by
    the p-value of their difference, as a plan for each undecided one would take most of the time."""
    counts = ((2, 2), (2, 3), (2, 5), (3, 5), (2, 10), (1, 3)) if full else ((2, 5), (1, 3))
    found = []
    for (few, many), times, tasks in product(counts, (1, 3, 10, 20) if full else (10,), (20, 300) if full else (100,)):
        chance = np.random.default_rng([few, many, times, tasks])
        small = np.ones(repeats)
        for i in range(repeats):
            hard = chance.normal(0, 0.2, tasks)
            pair = [
                hard
                + chance.normal(0, 0.15, tasks)
                + chance.normal(0, 0.3, (seeds, tasks))
                + scatter * chance.standard_normal((seeds, 1))
                for seeds, scatter in ((few, times * CALM), (many, CALM))
            ]
            p = difference(*pair, unit=False).p_value()
            small[i] = 1.0 if p is None else p
        name = f"2 arms, {few} and {many} seeds, {tasks} tasks, the {few} scatter {times} times as much"
        rates = {"false_verdicts": (small < 0.05).mean(), "p_below_0.001": (small < 0.001).mean()}
        found.append({"world": name, "repeats": repeats} | {key: round(float(x), 4) for key, x in rates.items()})
    return found


SIZES = {
    "Zipf, 20": [max(2, 60 // (i + 1)) for i in range(20)],
    "geometric, 10": [int(100 * 0.75**i) for i in range(10)],
    "one half and 11 others": [110] + [10] * 11,
    "3 of 40 and 30 of 3 tasks": [40] * 3 + [3] * 30,
    "lognormal, 15": [4, 5, 6, 8, 9, 10, 12, 14, 16, 20, 24, 30, 38, 50, 70],
    "even, 5": [20] * 5,
    "4 of 25 beside 60 single tasks": [25] * 4 + [1] * 60,
    "10 tasks of 10 copies beside 50 single tasks": [10] * 10 + [1] * 50,
}
"""Tasks per template."""


def template_sizes(repeats: int) -> list[dict[str, Any]]:
    """False verdicts of two equal arms with one seed, on passes and failures of tasks from templates of these sizes, by
    the p-value of their difference; and how often a gain of about 40 points is found."""
    found = []
    for number, (name, sizes) in enumerate(SIZES.items()):
        chance, of_task = np.random.default_rng(number), np.repeat(np.arange(len(sizes)), sizes)
        clusters, tasks = [str(one) for one in of_task], int(sum(sizes))
        told = {0.0: 0, 2.0: 0}
        for gain, _ in product(told, range(repeats)):
            logits = _logits("passes", tasks, chance) - gain / 2 + 0.4 * chance.standard_normal((2, tasks))
            logits = logits + chance.standard_normal((2, len(sizes)))[:, of_task] + np.array([[0.0], [gain]])
            arms = by_cluster(chance.binomial(1, logistic(logits)).astype(float), clusters)
            p = difference(arms[1:], arms[:1], unit=True).p_value()
            told[gain] += p is not None and p < 0.05
        rates = {"false_verdicts": told[0.0] / repeats, "found": told[2.0] / repeats}
        found.append({"world": name, "repeats": repeats} | {key: round(x, 4) for key, x in rates.items()})
    return found


def looks_in_turn(repeats: int) -> list[dict[str, Any]]:
    """How often two equal arms are distinguished at any of several looks, with the correction for looks and without."""

    def values(chance: np.random.Generator, seeds: int, tasks: int, scatter: float) -> Array:
        hard = chance.normal(0, 0.2, tasks) + chance.normal(0, 0.15, (2, 1, tasks))
        return hard + chance.normal(0, 0.3, (2, seeds, tasks)) + scatter * chance.standard_normal((2, seeds, 1))

    def tasks_doubled(chance: np.random.Generator) -> Iterator[Array]:
        grown = values(chance, 1, 1600, 0.0)
        return (grown[:, :, :count] for count in (50, 100, 200, 400, 800, 1600))

    def seeds_added(chance: np.random.Generator) -> Iterator[Array]:
        grown = values(chance, 20, 200, 0.2)
        return (grown[:, :count] for count in range(5, 21))

    def attempts(seeds: int, scatter: float, count: int) -> Callable[[np.random.Generator], Iterator[Array]]:
        return lambda chance: (values(chance, seeds, 200, scatter) for _ in range(count))

    worlds = {
        "1 seed, tasks doubled from 50 to 1,600": tasks_doubled,
        "seeds added one by one from 5 to 20": seeds_added,
        "10 attempts with one new seed": attempts(1, 0.0, 10),
        "30 attempts with one new seed": attempts(1, 0.0, 30),
        "10 attempts with 5 new seeds": attempts(5, 0.1, 10),
    }
    found = []
    for number, (name, world) in enumerate(worlds.items()):
        chance, wrong, naive = np.random.default_rng(number), 0, 0
        for _ in range(repeats):
            p = [difference(arms[1], arms[0], unit=False).p_value() or 1.0 for arms in world(chance)]
            naive += min(p) < 0.05
            wrong += min(one * penalty_of_look(look) for look, one in enumerate(p, start=1)) < 0.05
        rates = {"false_verdicts": wrong / repeats, "uncorrected": naive / repeats}
        found.append({"world": name, "repeats": repeats} | {key: round(x, 4) for key, x in rates.items()})
    return found


def power_table(repeats: int) -> list[dict[str, Any]]:
    """How often the better one of four arms is distinguished from the first: pass or fail, mixed difficulty."""
    found = []
    for (seeds, points), tasks in product(((1, 0), (3, 2), (3, 6), (5, 2), (5, 6)), (100, 300, 1000)):
        row: dict[str, Any] = {"seeds": seeds, "seed_points": points, "tasks": tasks, "repeats": repeats}
        # A point of pass@1 is about 0.06 on the logit at this difficulty.
        cell = Cell(kind="passes", arms=4, seeds=seeds, tasks=tasks, scatter=0.06 * points, gain=0.0)
        for gain in (5, 10, 15):
            chance = np.random.default_rng([seeds, points, tasks, gain])
            better = replace(cell, gain=logit_of(cell, gain / 100))
            hits = 0
            for _ in range(repeats):
                values, _ = draw(better, chance)
                # As `judge_arms` does, without the plans and the winner's score, which take most of the time.
                p = [difference(arm, values[0], unit=True).p_value() for arm in values[1:]]
                corrected = holm(p)[0]
                hits += corrected is not None and corrected < 0.05 and values[1].mean() > values[0].mean()
            row[f"+{gain}"] = round(hits / repeats, 3)
        found.append(row)
    return found


def logit_of(cell: Cell, gain: float) -> float:
    """By how much an arm has to move on the logit to be so much better."""
    low, high = 0.0, 5.0
    start = _truth(cell, np.zeros(1))[0]
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _truth(cell, np.array([middle]))[0] - start < gain else (low, middle)
    return low


PARTS = ("equal_arms", "null_worlds", "template_sizes", "looks", "power", "coverage")


def measure(repeats: int, *, full: bool, only: Sequence[str] = PARTS) -> dict[str, Any]:
    """The parts that are asked for."""
    found: dict[str, Any] = {}
    if "equal_arms" in only:
        some = min(1000, 10 * repeats) if full else 300
        found["equal_arms"] = [equal_arms(some, seeds=s, scatter=x) for s, x in ((1, 0.0), (2, 0.1), (3, 0.35))]
    if "null_worlds" in only:
        some = min(2000, 4 * repeats) if full else 200
        found["null_worlds"] = null_worlds(some) + unequal_seeds(2000 if full else 400, full=full)
    if "template_sizes" in only:
        found["template_sizes"] = template_sizes(6000 if full else 300)
    if "looks" in only:
        found["looks"] = looks_in_turn(4000 if full else 200)
    if "power" in only:
        found["power"] = power_table(max(100, repeats // 3)) if full else []
    if "coverage" in only:
        rows = [measured(cell, repeats, seed) for seed, cell in enumerate(cells(full=full))]
        several = [row for row in rows if row["arms"] > 1]
        held_in = [row[name] for row in several for name in ("arm", "difference") if row[name] is not None]
        found |= {"repeats": repeats, "lowest": round(min(held_in), 4), "mean": round(float(np.mean(held_in)), 4)}
        found["coverage"] = ranges(rows)
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return found | {"date": date.today().isoformat(), "python": platform.python_version(), "machine": machine}


def goals(result: dict[str, Any]) -> dict[str, bool]:
    """Which goals are met, with room for what chance does in so many repeats."""
    equals, nulls = result["equal_arms"], result["null_worlds"]
    chance = 3 * (0.93 * 0.07 / result["repeats"]) ** 0.5  # of the lowest of many
    tiny = [one for one in nulls if one["p_below_0.001"] is not None]
    more = [*result["template_sizes"], *result["looks"]]
    met = {
        "false_winners": max(one["false_winners"] for one in equals) <= FALSE_WINNERS,
        "bias": max(abs(one["bias"]) for one in equals) <= BIAS,
        "covered": bool(COVERED[0] <= result["mean"] <= COVERED[1] and result["lowest"] >= COVERED[0] - chance),
        "null_worlds": all(
            one["false_verdicts"] <= NULL + 2 * (NULL * (1 - NULL) / one["repeats"]) ** 0.5 for one in [*nulls, *more]
        ),
        "tiny_p_values": all(one["p_below_0.001"] <= TINY_P + 2 * (TINY_P / one["repeats"]) ** 0.5 for one in tiny),
    }
    return met | {"met": all(met.values())}


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
    for one in result["null_worlds"]:
        tiny = "" if one["p_below_0.001"] is None else f", p < 0.001 in {one['p_below_0.001']:.2%}"
        lines.append(f"{one['world']}: false verdicts {one['false_verdicts']:.1%}{tiny}")
    for one in result["template_sizes"]:
        told = f"false verdicts {one['false_verdicts']:.1%}, a gain of 40 points found in {one['found']:.0%}"
        lines.append(f"2 arms, 1 seed, templates of sizes {one['world']}: {told}")
    for one in result["looks"]:
        told = f"false verdicts {one['false_verdicts']:.1%} (uncorrected {one['uncorrected']:.0%})"
        lines.append(f"2 arms, {one['world']}: {told}")
    for one in result["power"]:
        gains = ", ".join(f"{gain} points {one[gain]:.0%}" for gain in ("+5", "+10", "+15"))
        size = f"{one['seeds']} seeds that scatter by {one['seed_points']} points, {one['tasks']} tasks"
        lines.append(f"found of four arms, {size}: {gains}")
    met = "met" if result["goal"]["met"] else f"MISSED {result['goal']}"
    summary = f"of several arms: lowest {result['lowest']:.1%}, mean {result['mean']:.1%}; goals: {met}"
    return "\n".join([*lines, summary])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts; with --full the others stay as they are")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    known = (read_object(RESULTS) or {}) if options.only else {}
    repeats = options.repeats or (600 if options.full else 150)
    result = known | measure(repeats, full=options.full, only=options.only or PARTS)
    result["goal"] = goals(result)
    if options.full:
        write_json(RESULTS, result)
    print(json.dumps(result) if options.json else table(result))
    return 0 if result["goal"]["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
