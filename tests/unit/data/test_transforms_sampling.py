"""shuffle, sample and split: chance that repeats."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from evsys_sdk.data.transforms import Sample, Shuffle, Split
from evsys_sdk.errors import DataError

ROWS = [{"i": i, "group": f"g{i % 20}"} for i in range(200)]
THREE = {"train": 0.8, "val": 0.1, "test": 0.1}


def test_a_shuffle_keeps_every_row_and_repeats_with_its_seed() -> None:
    once = Shuffle(seed=1)(ROWS)
    assert once != ROWS and sorted(once, key=lambda row: row["i"]) == ROWS
    assert once == Shuffle(seed=1)(ROWS) != Shuffle(seed=2)(ROWS)


def test_a_shuffle_leaves_the_given_list_alone() -> None:
    given_rows = list(ROWS)
    Shuffle()(given_rows)
    assert given_rows == ROWS


def test_a_sample_keeps_order_and_repeats_with_its_seed() -> None:
    once = [row["i"] for row in Sample(n=20, seed=1)(ROWS)]
    assert once == sorted(set(once)) and len(once) == 20
    assert once == [row["i"] for row in Sample(n=20, seed=1)(ROWS)]
    assert once != [row["i"] for row in Sample(n=20, seed=2)(ROWS)]


def test_a_larger_sample_holds_the_smaller() -> None:
    small, large = Sample(n=20)(ROWS), Sample(n=50)(ROWS)
    assert all(row in large for row in small)


def test_a_fraction_of_the_rows_is_rounded() -> None:
    assert len(Sample(fraction=0.25)(ROWS)) == 50
    assert Sample(fraction=1.0)(ROWS) == ROWS


def test_more_rows_than_there_are_cannot_be_sampled() -> None:
    with pytest.raises(DataError, match="sample: asks for 201 rows, and there are 200"):
        Sample(n=201)(ROWS)


@pytest.mark.parametrize("params", [{}, {"n": 1, "fraction": 0.5}, {"n": 0}, {"fraction": 1.5}, {"fraction": 0}])
def test_a_sample_needs_one_size(params: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Sample(**params)


def parts(rows: list[dict[str, Any]], **params: Any) -> dict[str, list[dict[str, Any]]]:
    return {part: Split(part=part, fractions=THREE, **params)(rows) for part in THREE}


@given(st.lists(st.dictionaries(st.text(), st.integers() | st.text()), max_size=30), st.integers())
def test_the_parts_are_disjoint_and_hold_every_row(rows: list[dict[str, Any]], seed: int) -> None:
    numbered = [{"row": row, "#": index} for index, row in enumerate(rows)]
    found = [row["#"] for part in parts(numbered, seed=seed).values() for row in part]
    assert sorted(found) == list(range(len(rows)))


def test_the_parts_have_about_their_share() -> None:
    sizes = {part: len(rows) for part, rows in parts([{"i": i} for i in range(4000)]).items()}
    assert 3100 < sizes["train"] < 3300 and 330 < sizes["val"] < 470 and 330 < sizes["test"] < 470


def test_new_rows_and_another_order_do_not_move_old_ones() -> None:
    more = [{"i": i} for i in range(1000, 1100)]
    mixed = random.Random(0).sample(ROWS + more, 300)
    before, after = parts(ROWS), parts(mixed)
    assert all(row in after[part] for part in THREE for row in before[part])


def test_the_order_in_which_fractions_are_written_does_not_matter() -> None:
    backwards = dict(reversed(THREE.items()))
    assert Split(part="val", fractions=backwards)(ROWS) == Split(part="val", fractions=THREE)(ROWS)


def test_rows_of_a_group_stay_together() -> None:
    found = parts(ROWS, key="group")
    groups = [{row["group"] for row in rows} for rows in found.values()]
    assert sum(len(group) for group in groups) == len(set.union(*groups)) == 20
    assert all(
        rows == [row for row in ROWS if row["group"] in group]
        for rows, group in zip(found.values(), groups, strict=True)
    )


def test_another_seed_is_another_split() -> None:
    assert parts(ROWS, seed=0) != parts(ROWS, seed=1)


def test_a_row_without_its_group_is_named() -> None:
    with pytest.raises(DataError, match=r"split: row 1 .* has no 'group'"):
        Split(part="train", key="group")([{"group": 1}, {}])


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"part": "tran"}, "'tran' is not a part; closest: train"),
        ({"part": "a", "fractions": {"a": 0.5, "b": 0.4}}, "add up to 0.9"),
        ({"part": "a", "fractions": {"a": 1.5, "b": -0.5}}, "greater than 0"),
        ({}, "part"),
    ],
)
def test_a_split_that_does_not_add_up_is_refused(params: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Split(**params)
