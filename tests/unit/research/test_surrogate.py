"""What is learnt from few trials: the worth of an item of a list, on whatever scale scores are."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np

from evsys_sdk.data_types import JsonObject
from evsys_sdk.research.proposers.surrogate import Columns, Surrogate
from evsys_sdk.research.settings import KindBlock, Setting
from evsys_sdk.research.space import Space

ITEMS = ("balance", "dedupe", "filter", "sample")
NUMBERS = tuple(Setting(path=f"x{number}", low=0.0, high=1.0, default=0.5) for number in range(5))
SPACE = Space(
    base={"algorithm": {"kind": "sft", "params": {}}, "data": {"transforms": []}},
    kinds={"algorithm": {kind: KindBlock(kind=kind, settings=NUMBERS) for kind in ("dpo", "sft")}},
    lists={"data.transforms": {kind: KindBlock(kind=kind) for kind in ITEMS}},
)
WORTH = dict(zip(ITEMS, (0.3, -0.2, 0.2, -0.1), strict=True))


def with_list(recipe: JsonObject, names: tuple[str, ...]) -> JsonObject:
    return {**recipe, "data": {"transforms": [{"kind": name, "params": {}} for name in names]}}


def lack(recipe: JsonObject) -> float:
    """What a recipe lacks: each item and each number has its own part in it."""
    point = SPACE.point(recipe)
    items = recipe["data"]["transforms"]
    lacking = 1.0 - sum(WORTH[item["kind"]] for item in items)
    return lacking + sum((float(point[f"algorithm.params.x{number}"]) - 0.3) ** 2 for number in range(5))


def fitted(count: int) -> tuple[Columns, Surrogate, list[JsonObject]]:
    rng = random.Random(3)
    recipes = [SPACE.sample(rng) for _ in range(count)]
    whole = with_list(SPACE.base, ITEMS)
    columns = Columns.of([SPACE.point(one) for one in (*recipes, whole)])
    rows = columns.rows([SPACE.point(one) for one in recipes])
    scores = [math.exp(-lack(one)) for one in recipes]
    return columns, Surrogate.fit(columns, rows, scores, are_scores=True), recipes


def test_lists_that_were_never_tried_are_ranked_by_the_worth_of_their_items():
    columns, surrogate, _ = fitted(24)
    lists = [names for length in range(5) for names in itertools.combinations(ITEMS, length)]
    for seed in range(6):
        base = SPACE.sample(random.Random(seed))
        candidates = [with_list(base, names) for names in lists]
        mean, _ = surrogate.predict(columns.rows([SPACE.point(one) for one in candidates]))
        truth = [-lack(one) for one in candidates]
        assert np.corrcoef(mean, truth)[0, 1] > 0.95
        assert lists[int(np.argmax(mean))] == ("balance", "filter")


def test_an_order_that_is_not_there_lies_between_the_two_that_could_be():
    columns, _, _ = fitted(10)
    lists = (("dedupe",), ("dedupe", "sample"), ("sample", "dedupe"))
    rows = columns.rows([SPACE.point(with_list(SPACE.base, names)) for names in lists])
    rows = rows[:, [columns.names[owner].endswith(":order") for owner in columns.owners]]
    one, other, between = (float(((rows[a] - rows[b]) ** 2).sum()) for a, b in ((0, 1), (0, 2), (1, 2)))
    assert one == other < between


def test_what_was_measured_is_predicted_with_little_doubt():
    columns, surrogate, recipes = fitted(40)
    rows = columns.rows([SPACE.point(one) for one in recipes])
    far = columns.rows([SPACE.point(SPACE.sample(random.Random(100 + n))) for n in range(20)])
    assert surrogate.predict(rows)[1].mean() < 0.5 * surrogate.predict(far)[1].mean()


def test_after_few_trials_the_middle_of_a_range_promises_more_than_its_bounds():
    ends = [{**SPACE.point(SPACE.base), **{f"algorithm.params.x{n}": end for n in range(5)}} for end in (0.0, 0.5, 1.0)]
    wins = 0
    for seed in range(20):
        rng = random.Random(seed)
        points = [SPACE.point(SPACE.sample(rng)) for _ in range(5)]
        columns = Columns.of([*points, *ends])
        scores = [rng.gauss(0.3, 0.05) for _ in points]  # which say nothing
        surrogate = Surrogate.fit(columns, columns.rows(points), scores, are_scores=True)
        low, middle, high = surrogate.predict(columns.rows(ends))[0]
        wins += middle > (low + high) / 2
    assert wins >= 15


def test_each_kind_may_have_its_best_numbers_elsewhere():
    space = Space(base=SPACE.base, kinds=SPACE.kinds)
    best = {"dpo": 0.2, "sft": 0.8}

    def lacking(recipe: JsonObject) -> float:
        point, kind = space.point(recipe), recipe["algorithm"]["kind"]
        return sum((float(point[f"algorithm.params.x{n}"]) - best[kind]) ** 2 for n in range(5))

    rng = random.Random(1)
    tried, others = ([space.sample(rng) for _ in range(count)] for count in (14, 200))
    columns = Columns.of([space.point(one) for one in tried])
    scores = [math.exp(-2 * lacking(one)) for one in tried]
    surrogate = Surrogate.fit(columns, columns.rows([space.point(one) for one in tried]), scores, are_scores=True)
    mean, _ = surrogate.predict(columns.rows([space.point(one) for one in others]))
    assert np.corrcoef(mean, [-lacking(one) for one in others])[0, 1] > 0.6
