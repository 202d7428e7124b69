"""Points of curves: nothing is lost, nothing is doubled, the newest value counts, spikes survive downsampling."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest


@pytest.fixture
def generation(project: Any) -> Any:
    from evsys_dashboard.models import ExperimentRow, GenerationRow

    experiment = ExperimentRow.objects.create(id=f"{project.pk}-e", project=project, name="e", created=1, updated=1)
    return GenerationRow.objects.create(
        id=f"{project.pk}-g", project=project, experiment=experiment, name="g", created=1, updated=1
    )


def write(generation: Any, values: dict[int, float], *, ts: int = 1000, name: str = "loss") -> set[str]:
    from django.db import transaction

    from evsys_dashboard.points import write_points

    with transaction.atomic():
        return write_points({(generation.pk, name): {step: (value, ts) for step, value in values.items()}})


def key_of(generation: Any, name: str = "loss") -> Any:
    return generation.metric_keys.get(name=name)


def read(generation: Any, **how: int) -> Any:
    from evsys_dashboard.points import curve

    return curve(key_of(generation).pk, **how)


def test_points_come_back_in_order_with_their_summary(generation):
    write(generation, {1: 5.0, 2: 3.0})
    write(generation, {4: 4.0, 3: 9.0})
    found, key = read(generation), key_of(generation)
    assert (found.n, found.step, found.value) == (4, [1, 2, 3, 4], [5.0, 3.0, 9.0, 4.0])
    assert (key.n, key.last_step, key.last, key.low, key.high) == (4, 4, 4.0, 3.0, 9.0)


def test_a_replay_changes_nothing_and_says_so(generation):
    write(generation, {1: 5.0, 2: 3.0, 3: 1.0})
    before = key_of(generation).__dict__ | {"_state": None}
    assert write(generation, {1: 5.0, 2: 3.0, 3: 1.0}) == set()
    assert key_of(generation).__dict__ | {"_state": None} == before
    assert read(generation).n == 3


def test_the_newest_value_of_a_step_counts_in_whichever_order_it_arrives(generation):
    write(generation, {1: 1.0, 2: 9.0}, ts=2000)
    write(generation, {2: 5.0}, ts=1000)  # older: a mirror of an earlier process, sent late
    assert read(generation).value == [1.0, 9.0]
    write(generation, {2: 2.0}, ts=3000)
    assert read(generation).value == [1.0, 2.0]
    key = key_of(generation)
    assert (key.n, key.last, key.low, key.high) == (2, 2.0, 1.0, 2.0)


def test_nan_and_infinities_come_back_as_they_were(generation):
    write(generation, {1: math.nan, 2: math.inf, 3: -math.inf, 4: 0.5})
    found = read(generation)
    assert found.to_json() == {"n": 4, "step": [1, 2, 3, 4], "value": ["NaN", "Infinity", "-Infinity", 0.5]}
    assert math.isnan(found.value[0])
    key = key_of(generation)
    assert (key.low, key.high, key.last, key.last_kind) == (0.5, 0.5, 0.5, 0)
    write(generation, {5: math.nan})
    key = key_of(generation)
    assert (key.last, key.last_kind, key.n) == (None, 1, 5)


def test_downsampling_keeps_every_spike_and_the_first_and_last_point(generation):
    chance = random.Random(0)
    values = {step: chance.random() for step in range(1, 10_001)}
    values |= {1: 0.5, 1234: 50.0, 5678: -50.0, 7000: math.nan, 7001: math.inf, 10_000: 0.25}
    write(generation, values)
    found = read(generation, width=100)
    points = dict(zip(found.step, found.value, strict=True))
    assert found.n == 10_000
    assert len(found.step) <= 2 * 100 + 2 + 2
    assert found.step == sorted(set(found.step))
    assert (points[1], points[1234], points[5678], points[10_000]) == (0.5, 50.0, -50.0, 0.25)
    assert math.isnan(points[7000]) and points[7001] == math.inf
    assert all(values[step] == value or math.isnan(value) for step, value in points.items())


def test_each_pixel_has_its_lowest_and_highest_value(generation):
    chance = random.Random(1)
    values = {step: chance.random() for step in range(1000)}
    write(generation, values)
    found = set(read(generation, width=10).step)
    for pixel in range(10):
        steps = range(pixel * 100, pixel * 100 + 100)
        assert {min(steps, key=values.__getitem__), max(steps, key=values.__getitem__)} <= found


def test_a_range_is_applied_before_points_are_put_together(generation):
    write(generation, {step: float(step) for step in range(10_000)})
    found = read(generation, first=5000, last=5099, width=100)
    assert (found.n, found.step) == (100, list(range(5000, 5100)))
    assert read(generation, first=20_000, last=30_000).n == 0


def test_points_go_with_their_run(generation):
    from django.db import connection

    write(generation, {1: 1.0})
    pk = key_of(generation).pk
    generation.delete()
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM dashboard_point WHERE key_id = %s", [pk])
        assert cursor.fetchone() == (0,)
