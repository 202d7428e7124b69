"""Training tasks that are made up or measured before, whose true scores are known.

In: a seed, or the committed table of real runs. Out: a `World`: a recipe to start from, what may be changed, the true
score of any recipe, which recipes fail, and per run one answer per task. A run's answers are drawn: a task has a
difficulty, a recipe its own strengths, a seed its luck, and these are larger for some recipes than for others.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy.special import expit, logit, ndtri

from evsys_sdk.data_types import JsonObject
from evsys_sdk.research.settings import KindBlock, Setting
from evsys_sdk.research.space import Space
from evsys_sdk.research.state import apply_changes

TABLE = Path(__file__).parent / "table.json.gz"
N_VAL, N_TEST = 200, 400
DIFFICULTY, STRENGTHS = 1.2, 0.4
"""Standard deviations, on the scale of log odds: over tasks, and over tasks for one recipe beside the others."""
FAILING = 0.3
"""The share of the made-up space that fails."""
PARAMS = "algorithm.params."
_QUANTILES = ndtri((np.arange(400) + 0.5) / 400)


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisOf:
    """One setting: a number on a scale, or one of several values."""

    path: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    values: tuple[Any, ...] = ()

    def at(self, place: float) -> Any:
        place = min(max(place, 0.0), 1.0)
        if self.values:
            return self.values[min(int(place * len(self.values)), len(self.values) - 1)]
        value = self.low * (self.high / self.low) ** place if self.log else self.low + place * (self.high - self.low)
        return float(f"{value:.3g}")

    def place(self, value: Any) -> float:
        if self.values:
            return (self.values.index(value) + 0.5) / len(self.values)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return float((value - self.low) / (self.high - self.low))


Places = Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One training task."""

    name: str
    seed: int
    axes: Sequence[AxisOf]
    start: JsonObject
    truth: Callable[[Places], float]
    """The mean score over all tasks and seeds that there could be."""
    is_failing: Callable[[Places], bool]
    luck: Callable[[Places], float]
    """The standard deviation of seeds, in log odds."""
    behaviour: Callable[[Places], object]
    """The same for recipes that do the same: what has no effect is not in it."""
    best: float
    steps: int = 100

    @property
    def space(self) -> Space:
        """For proposers that know the space and not the truth."""
        settings = tuple(
            Setting(path=axis.path.removeprefix(PARAMS), low=axis.low, high=axis.high, log=axis.log, values=axis.values)
            for axis in self.axes
        )
        blocks = {"sft": KindBlock(kind="sft", settings=settings)}
        return Space(base=self.start, kinds={"algorithm": blocks}, fixed=frozenset(["data", "seed"]))

    def places(self, recipe: JsonObject) -> list[float]:
        params: Any = recipe["algorithm"]
        found = []
        for axis in self.axes:
            found.append(axis.place(params["params"][axis.path.removeprefix(PARAMS)]))
        return found

    def true_score(self, recipe: JsonObject) -> float:
        return self.truth(self.places(recipe))

    def fails(self, recipe: JsonObject) -> bool:
        return self.is_failing(self.places(recipe))

    def neighbour(self, recipe: JsonObject, rng: random.Random) -> dict[str, Any]:
        """A change of one setting, or of two: numbers by a step, choices by a draw."""
        changes: dict[str, Any] = {}
        places = self.places(recipe)
        for index in rng.sample(range(len(self.axes)), 1 if rng.random() < 0.6 else 2):
            axis = self.axes[index]
            changes[axis.path] = axis.at(rng.random() if axis.values else places[index] + rng.gauss(0.0, 0.15))
        return changes

    def draw(self, rng: random.Random) -> dict[str, Any]:
        """All settings anew."""
        return {axis.path: axis.at(rng.random()) for axis in self.axes}

    def answers(self, recipe: JsonObject, seed: int, *, tasks: str = "val") -> dict[str, float]:
        """Task -> 1 where this run solved it; the same for the same recipe and seed."""
        places = self.places(recipe)
        level, luck = self.truth(places), self.luck(places)
        difficulty = _normals((self.name, self.seed, tasks), N_VAL if tasks == "val" else N_TEST)
        strengths = _normals((self.name, self.seed, tasks, self.behaviour(places)), len(difficulty))
        run = _generator(self.name, self.seed, recipe, seed)
        shift = luck * run.standard_normal()
        odds = centre_of(level, luck) + DIFFICULTY * difficulty + STRENGTHS * strengths + shift
        own = _generator(self.name, self.seed, recipe, seed, tasks)
        solved = own.random(len(odds)) < expit(odds)
        return {f"{tasks}{number:03d}": float(one) for number, one in enumerate(solved)}


def centre_of(level: float, luck: float) -> float:
    """The log odds of a middling task, for the mean over tasks, strengths and seeds to be `level`."""
    return _centre(round(min(max(level, 0.002), 0.998), 4), round(luck, 3))


@cache
def _centre(level: float, luck: float) -> float:
    scatter = math.sqrt(DIFFICULTY**2 + STRENGTHS**2 + luck**2) * _QUANTILES
    low, high = float(logit(level)) - 8.0, float(logit(level)) + 8.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if expit(middle + scatter).mean() < level else (low, middle)
    return (low + high) / 2


def _generator(*key: object) -> np.random.Generator:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def _normals(key: tuple[object, ...], n: int) -> Any:
    return _generator(*key).standard_normal(n)


def make_hill(seed: int) -> World:
    """A made-up task: eight settings of which two do nothing, a ridge, a best place, and a cliff behind which 30 % of
    the volume fails."""
    rng = random.Random(f"hill/{seed}")
    axes = [
        AxisOf(path=f"{PARAMS}learning_rate", low=1e-6, high=1e-1, log=True),
        AxisOf(path=f"{PARAMS}lora_rank", values=(1, 2, 4, 8, 16, 32, 64)),
        AxisOf(path=f"{PARAMS}lr_schedule", values=("constant", "linear", "cosine")),
        *(AxisOf(path=f"{PARAMS}x{number}") for number in range(5)),
    ]
    weights = [rng.uniform(2.5, 5.0), *(rng.uniform(0.2, 1.2) for _ in axes[1:])]
    for idle in rng.sample(range(3, len(axes)), 2):
        weights[idle] = 0.0
    slopes = [1.0, *(rng.uniform(-0.4, 0.6) if weights[i + 1] else 0.0 for i in range(len(axes) - 1))]
    link = rng.uniform(-0.8, 0.8) * math.sqrt(weights[0] * weights[1])
    peak = rng.uniform(0.7, 0.9)

    def height(places: Places) -> float:
        return sum(slope * place for slope, place in zip(slopes, places, strict=True))

    def snapped(places: Places) -> list[float]:
        return [axis.place(axis.at(place)) for axis, place in zip(axes, places, strict=True)]

    edge = sorted(height([rng.random() for _ in axes]) for _ in range(1000))[int(1000 * (1 - FAILING))]
    centre = next(c for c in iter(lambda: snapped([rng.uniform(0.15, 0.85) for _ in axes]), None) if height(c) < edge)

    def truth(places: Places) -> float:
        gaps = [place - best for place, best in zip(places, centre, strict=True)]
        lack = sum(weight * gap * gap for weight, gap in zip(weights, gaps, strict=True)) + 2 * link * gaps[0] * gaps[1]
        return peak * math.exp(-max(lack, 0.0))

    # The config's own run works, and there is something to find.
    begin = next(
        c
        for c in iter(lambda: snapped([rng.random() for _ in axes]), None)
        if height(c) < edge and 0.35 * peak < truth(c) < 0.75 * peak
    )
    return World(
        name="hill",
        seed=seed,
        axes=axes,
        start=recipe_at(axes, begin),
        truth=truth,
        is_failing=lambda places: height(places) > edge,
        luck=lambda places: 0.02 + 0.12 * places[0],
        behaviour=lambda places: [round(p, 6) for p, weight in zip(places, weights, strict=True) if weight],
        best=peak,
    )


def recipe_at(axes: Sequence[AxisOf], places: Places) -> JsonObject:
    empty: JsonObject = {"data": {"path": "rows.jsonl"}, "algorithm": {"kind": "sft", "params": {}}, "seed": 42}
    return apply_changes(empty, {axis.path: axis.at(place) for axis, place in zip(axes, places, strict=True)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A configuration of the table, its seeds together."""

    places: tuple[float, ...]
    failed: int
    score: float
    """Mean over seeds and all tasks."""
    luck: float
    """Between seeds, in log odds, less what the tasks alone scatter."""
    steps: int
    seconds: float


TABLE_AXES = (
    AxisOf(path=f"{PARAMS}kind_of_training", values=("sft", "rl")),
    AxisOf(path=f"{PARAMS}learning_rate", low=1e-4, high=10**0.5, log=True),
    AxisOf(path=f"{PARAMS}lora_rank", values=(0, 2, 8, 32)),
    AxisOf(path=f"{PARAMS}batch_size", values=(2, 4, 8, 16)),
    AxisOf(path=f"{PARAMS}warmup_fraction", high=0.3),
    AxisOf(path=f"{PARAMS}weight_decay", low=1e-3, high=10.0, log=True),
    AxisOf(path=f"{PARAMS}lr_schedule", values=("constant", "linear", "cosine")),
    AxisOf(path=f"{PARAMS}recipe", values=("all", "checked", "checked_few")),
    AxisOf(path=f"{PARAMS}max_grad_norm", values=(0.0, 1.0)),
)
"""As `measure_table.draw_configurations` draws them."""


@cache
def read_table(path: Path = TABLE) -> tuple[Entry, ...]:
    data = json.loads(gzip.decompress(path.read_bytes()))
    return tuple(_entry(run, str(data["rungs"][-1]), data["steps"]) for run in data["runs"])


def _entry(run: Mapping[str, Any], last: str, steps: int) -> Entry:
    settings = {"kind_of_training": run["settings"]["kind"], **run["settings"]}
    places = tuple(axis.place(settings[axis.path.removeprefix(PARAMS)]) for axis in TABLE_AXES)
    bits = ["".join(one["rungs"][last]) for one in run["seeds"] if one["error"] is None]
    failed = len(run["seeds"]) - len(bits)
    seconds = fmean(one["seconds"] for one in run["seeds"])
    if not bits:
        return Entry(places=places, failed=failed, score=0.0, luck=0.0, steps=steps, seconds=seconds)
    n = len(bits[0])
    # With half a task added to either side: no share is 0 or 1.
    shares = [(one.count("1") + 0.5) / (n + 1) for one in bits]
    odds = [math.log(share / (1 - share)) for share in shares]
    within = fmean(1 / (n * share * (1 - share)) for share in shares)
    between = float(np.var(odds, ddof=1)) if len(odds) > 1 else 0.0
    score = fmean(one.count("1") / n for one in bits)
    luck = math.sqrt(max(between - within, 0.0))
    return Entry(places=places, failed=failed, score=score, luck=min(luck, 1.0), steps=steps, seconds=seconds)


def make_table_world(seed: int) -> World:
    """The measured runs: a recipe scores what the nearest measured one did. Answers are drawn anew from a
    configuration's own mean and seed scatter, so that truth is known and seeds do not run out; a configuration fails
    where most of its seeds did. The start is one of the middling ones, drawn by `seed`."""
    entries = read_table()
    grid = np.array([entry.places for entry in entries])
    scale = np.array([1.0, 3.0, 1.0, 1.0, 0.5, 1.0, 0.5, 1.0, 0.5])  # the learning rate matters most

    @cache
    def nearest(places: tuple[float, ...]) -> int:
        return int((((grid - np.array(places)) * scale) ** 2).sum(axis=1).argmin())

    def entry(places: Places) -> Entry:
        return entries[nearest(tuple(round(place, 6) for place in places))]

    works = sorted((one for one in entries if one.failed * 2 < 3), key=lambda one: one.score)
    middle = works[len(works) // 4 : len(works) // 2]
    start = random.Random(f"table/{seed}").choice(middle)
    return World(
        name="table",
        seed=seed,
        axes=TABLE_AXES,
        start=recipe_at(TABLE_AXES, start.places),
        truth=lambda places: entry(places).score,
        is_failing=lambda places: entry(places).failed * 2 > 3,
        luck=lambda places: entry(places).luck,
        behaviour=lambda places: nearest(tuple(round(place, 6) for place in places)),
        best=works[-1].score,
        steps=start.steps,
    )


WORLDS: dict[str, Callable[[int], World]] = {"hill": make_hill, "table": make_table_world}
