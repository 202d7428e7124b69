"""Analytic stand-ins for training: recipes in, scores out, with a known best.

In: a family and a seed. Out: a `Surface`: a `Space`, the recipe to start from, the true score of any recipe, a noisy
measurement of it, and which recipes fail. Everything that could be learnt by heart (where the optimum is, which
settings matter and which interact, which kind and which list is best, where runs fail) is drawn anew for each seed.

A recipe's true score is `peak * exp(-deficit)`; the deficit is a quadratic form around the optimum of its kind (so that
settings interact), beside what its list of transforms lacks. About 30 % of the volume of each kind fails, behind a
cliff at the side of high learning rates. Noise is larger at one side of the space than at the other.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from evsys_sdk.data_types import JsonObject
from evsys_sdk.research.recipes import list_of
from evsys_sdk.research.settings import KindBlock, Setting
from evsys_sdk.research.space import Space

CONDITIONAL = ("kinds", "lists", "nested", "forest")
NUMERIC = ("ridge", "wide", "ripples", "plateau")
HELD_OUT = ("nested", "forest", "ripples", "plateau")
"""Families that `evolve` was not developed on."""
FAILING = 0.3
"""Of the volume."""

RATES = Setting(path="learning_rate", low=1e-6, high=1e-1, log=True, default=1e-4)
SHARED = (
    RATES,
    Setting(path="lora_rank", low=1, high=128, log=True, whole=True, default=8),
    Setting(path="batch_size", low=1, high=128, log=True, whole=True, default=8),
    Setting(path="weight_decay", low=0.0, high=0.3, default=0.0),
)
OWN: Mapping[str, tuple[Setting, ...]] = {
    "sft": (
        Setting(path="num_epochs", low=1, high=8, whole=True, default=1),
        Setting(path="train_on", values=("all", "last"), default="all"),
        Setting(path="lr_schedule", values=("constant", "linear", "cosine"), default="constant"),
    ),
    "dpo": (
        Setting(path="beta", low=0.01, high=1.0, log=True, default=0.1),
        Setting(path="label_smoothing", low=0.0, high=0.45, default=0.0),
    ),
    "rl": (
        Setting(path="num_samples", low=2, high=32, log=True, whole=True, default=8),
        Setting(path="temperature", low=0.5, high=1.5, default=1.0),
        Setting(path="kl_coef", low=1e-4, high=1.0, log=True, default=0.0),
        Setting(path="advantage", values=("centred", "grpo", "rloo"), default="centred"),
    ),
    "sdft": (
        Setting(path="top_k", low=1, high=100, log=True, whole=True, default=20),
        Setting(path="teacher", values=("start", "base", "ema"), default="start"),
        Setting(path="ema_decay", low=0.5, high=0.999, default=0.99, when={"teacher": ("ema", "start")}),
    ),
}
TRANSFORMS = {
    "dedupe": KindBlock(kind="dedupe"),
    "filter_length": KindBlock(
        kind="filter_length", settings=(Setting(path="max", low=10, high=10_000, log=True, default=1000),)
    ),
    "balance": KindBlock(kind="balance"),
    "sample": KindBlock(kind="sample", settings=(Setting(path="fraction", low=0.1, high=1.0, default=1.0),)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bowl:
    """A quadratic deficit around one place: the settings of one kind."""

    centre: Mapping[str, float | str]
    """Setting -> its best place on the scale, or its best value's name."""
    weights: Mapping[str, float]
    links: Mapping[tuple[str, str], float]
    """Two numbers -> how far they pull at each other, from -0.9 to 0.9: a ridge."""
    ripple: float = 0.0
    """How deep the dents are that lie around the optimum."""
    flat: float = 0.0
    """A deficit below which all is as good as the optimum: a plateau."""
    cliff: Mapping[str, float] = field(default_factory=dict)
    edge: float = math.inf
    """A run fails where the sum of `cliff` times the places is above it."""

    def gaps(self, places: Mapping[str, float | str]) -> dict[str, float]:
        gaps = {}
        for name, best in self.centre.items():
            place = places.get(name)
            if isinstance(best, str):
                gaps[name] = 0.0 if place is None or place == best else 0.35
            else:
                gaps[name] = float(place) - best if place is not None and not isinstance(place, str) else 0.0
        return gaps

    def deficit(self, places: Mapping[str, float | str]) -> float:
        gaps = self.gaps(places)
        total = sum(self.weights[name] * gap * gap for name, gap in gaps.items())
        for (one, two), link in self.links.items():
            total += 2 * link * math.sqrt(self.weights[one] * self.weights[two]) * gaps[one] * gaps[two]
        numbers = [gap for name, gap in gaps.items() if not isinstance(self.centre[name], str)]
        total += self.ripple * sum(1 - math.cos(6 * math.pi * gap) for gap in numbers) / max(len(numbers), 1)
        return max(total - self.flat, 0.0)

    def fails(self, places: Mapping[str, float | str]) -> bool:
        return self.height(places) > self.edge

    def height(self, places: Mapping[str, float | str]) -> float:
        return sum(slope * float(places.get(name, 0.0)) for name, slope in self.cliff.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """One made-up training task."""

    family: str
    seed: int
    space: Space
    peaks: Mapping[str, float]
    """Kind -> the best score it can have."""
    bowls: Mapping[str, Bowl]
    list_loss: Callable[[str, JsonObject], float]
    """Kind and recipe -> what the list of transforms lacks."""
    best: float
    """The highest true score."""
    noise: float
    """Standard deviation of one measurement, in the middle of the space."""

    @property
    def start(self) -> JsonObject:
        return self.space.base

    def places(self, recipe: JsonObject) -> dict[str, float | str]:
        return _places(self.space, recipe)

    def true_score(self, recipe: JsonObject) -> float:
        """Without noise; of a recipe that fails, what it would have been."""
        kind = kind_of(recipe)
        deficit = self.bowls[kind].deficit(self.places(recipe)) + self.list_loss(kind, recipe)
        return self.peaks[kind] * math.exp(-deficit)

    def fails(self, recipe: JsonObject) -> bool:
        return self.bowls[kind_of(recipe)].fails(self.places(recipe))

    def noise_at(self, recipe: JsonObject) -> float:
        """From half of the noise at low learning rates to one and a half times at high ones."""
        return self.noise * (0.5 + float(self.places(recipe)["learning_rate"]))

    def measure(self, recipe: JsonObject, seed: int) -> float | None:
        """A noisy score, the same for the same recipe and seed; None where the run fails."""
        if self.fails(recipe):
            return None
        chance = random.Random(f"{self.family}/{self.seed}/{seed}/{sorted(self.space.point(recipe).items())}")
        return self.true_score(recipe) + chance.gauss(0.0, self.noise_at(recipe))

    def steps(self, recipe: JsonObject) -> int:
        """What a run costs."""
        return {"sft": 100, "dpo": 150, "sdft": 200, "rl": 400}[kind_of(recipe)]


def _places(space: Space, recipe: JsonObject) -> dict[str, float | str]:
    """The algorithm's settings, each on its scale."""
    prefix = "algorithm.params."
    found = space.point(recipe).items()
    return {name.removeprefix(prefix): place for name, place in found if name.startswith(prefix)}


def kind_of(recipe: JsonObject) -> str:
    block = recipe["algorithm"]
    assert isinstance(block, dict)
    return str(block["kind"])


def make_surface(family: str, seed: int) -> Surface:
    """The surface of a family that belongs to a seed."""
    rng = random.Random(f"surface/{family}/{seed}")
    chosen = {"kinds": ["sft", "dpo", "rl"], "lists": ["sft", "dpo"], "nested": ["sft", "dpo", "sdft"],
              "forest": ["sft", "dpo", "rl", "sdft"]}.get(family, ["sft"])  # fmt: skip
    blocks = {kind: KindBlock(kind=kind, settings=_settings(family, kind)) for kind in chosen}
    lists = {"data.transforms": TRANSFORMS} if family in ("lists", "nested") else {}
    space = Space(
        base={
            "data": {"path": "rows.jsonl", "transforms": []},
            "model": {"name": "made-up"},
            "algorithm": {"kind": chosen[0], "params": {}},
            "seed": 42,
        },
        kinds={"algorithm": blocks},
        lists=lists,
        fixed=frozenset(["seed", "data.path", "model"]),
    )
    peaks = {kind: rng.uniform(0.55, 0.85) for kind in chosen}
    peaks[rng.choice(chosen)] = 0.95
    bowls = {kind: _bowl(family, kind, space, rng) for kind in chosen}
    while bowls[chosen[0]].fails(_places(space, space.base)):  # the config's own run works
        bowls[chosen[0]] = _bowl(family, chosen[0], space, rng)
    list_loss = _list_loss(rng, chosen) if lists else _no_loss
    return Surface(
        family=family, seed=seed, space=space, peaks=peaks, bowls=bowls, list_loss=list_loss, best=max(peaks.values()),
        noise=rng.uniform(0.005, 0.02),
    )  # fmt: skip


def _settings(family: str, kind: str) -> tuple[Setting, ...]:
    if family == "wide":  # as many as the schema of a real algorithm has, most of which hardly matter
        more = tuple(Setting(path=f"x{number}", low=0.0, high=1.0, default=0.5) for number in range(6))
        return (*SHARED, *more)
    if family in ("ridge", "ripples", "plateau"):
        extra = {"ridge": 2, "ripples": 0, "plateau": 3}[family]
        return (*SHARED, *(Setting(path=f"x{number}", low=0.0, high=1.0, default=0.5) for number in range(extra)))
    return (*SHARED, *OWN[kind])


def _bowl(family: str, kind: str, space: Space, rng: random.Random) -> Bowl:
    settings = _settings(family, kind)
    numbers = [one.path for one in settings if not one.values]
    cliff = {name: rng.uniform(-0.4, 0.6) for name in numbers[1:4]} | {"learning_rate": 1.0}
    # The edge by its quantile: so much of the volume fails.
    recipe = space.swap_kind(space.base, "algorithm", kind)
    heights = []
    for _ in range(400):
        places = _places(space, space.draw_settings(rng, recipe))
        heights.append(sum(slope * float(places[name]) for name, slope in cliff.items()))
    edge = sorted(heights)[int((1 - FAILING) * len(heights))]
    while True:  # the optimum does not fail
        centre: dict[str, float | str] = {}
        for one in settings:
            centre[one.path] = one.scaled(rng.choice(one.values)) if one.values else rng.uniform(0.1, 0.9)
        if sum(slope * float(centre[name]) for name, slope in cliff.items()) < edge - 0.02:
            break
    weights = {one.path: math.exp(rng.uniform(math.log(0.1), math.log(3.0))) for one in settings}
    weights["learning_rate"] = rng.uniform(3.0, 8.0)
    if family == "wide":
        weights |= {name: weights[name] * 0.05 for name in rng.sample(numbers[1:], 6)}
    links = {("learning_rate", "lora_rank"): rng.uniform(-0.9, 0.9)}
    if family in ("ridge", "plateau"):
        links[("batch_size", "weight_decay")] = rng.uniform(-0.9, 0.9)
    return Bowl(
        centre=centre, weights=weights, links=links, cliff=cliff, edge=edge,
        ripple=rng.uniform(0.05, 0.15) if family in ("ripples", "forest") else 0.0,
        flat=0.05 if family == "plateau" else 0.0,
    )  # fmt: skip


def _no_loss(kind: str, recipe: JsonObject) -> float:
    return 0.0


def _list_loss(rng: random.Random, kinds: list[str]) -> Callable[[str, JsonObject], float]:
    """What a list lacks: each transform is worth something, or costs something; some pairs want one order."""
    worth = {name: rng.uniform(-0.2, 0.3) for name in TRANSFORMS}
    worth[rng.choice(sorted(TRANSFORMS))] = 0.3
    by_kind = {(kind, name): rng.uniform(-0.1, 0.1) for kind in kinds for name in TRANSFORMS}
    pairs = {pair: rng.uniform(-0.15, 0.15) for pair in itertools.permutations(sorted(TRANSFORMS), 2)}
    best_at = {("filter_length", "max"): rng.random(), ("sample", "fraction"): rng.random()}

    def loss(kind: str, recipe: JsonObject) -> float:
        items = list_of(recipe, "data.transforms")
        names = [str(item["kind"]) for item in items]
        gain = sum(worth[name] + by_kind[kind, name] for name in set(names))
        gain += sum(pairs[pair] for pair in itertools.combinations(names, 2) if pair[0] != pair[1])
        for item in items:
            for setting in TRANSFORMS[str(item["kind"])].settings:
                params = item.get("params") or {}
                assert isinstance(params, dict)
                place = setting.scaled(params.get(setting.path, setting.default))
                gain -= 0.3 * (float(place) - best_at[str(item["kind"]), setting.path]) ** 2
        return 1.0 - gain

    # Measured from the best list of the kind, so that no loss is negative.
    least = {kind: _lists_at_their_best(loss, kind, best_at) for kind in kinds}
    return lambda kind, recipe: loss(kind, recipe) - least[kind]


def _lists_at_their_best(
    loss: Callable[[str, JsonObject], float], kind: str, best_at: Mapping[tuple[str, str], float]
) -> float:
    """The least loss over all lists, each with its settings at their best."""
    losses = []
    for length in range(len(TRANSFORMS) + 1):
        for names in itertools.permutations(sorted(TRANSFORMS), length):
            items: list[JsonObject] = []
            for name in names:
                settings = TRANSFORMS[name].settings
                params = {one.path: _exactly(one, best_at[name, one.path]) for one in settings}
                items.append({"kind": name, "params": params})
            losses.append(loss(kind, {"data": {"transforms": items}}))
    return min(losses)


def _exactly(setting: Setting, place: float) -> float:
    if setting.log:
        return setting.low * (setting.high / setting.low) ** place
    return setting.low + place * (setting.high - setting.low)
