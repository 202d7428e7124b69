"""Sets of tasks are told by what the tasks ask."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from evsys_sdk.data_types import HarborTask, InProcessVerifier
from evsys_sdk.stats.task_sketch import sketch_from, sketch_of


def tasks(first, last, *, prefix="t", said="add {n} to {n}", expected="{n}"):
    return [
        HarborTask(
            task_id=f"{prefix}{n}",
            instruction=said.format(n=n),
            verifier=InProcessVerifier(fn_name="exact_match", expected=expected.format(n=n)),
            metadata={"from": prefix},
        )
        for n in range(first, last)
    ]


@pytest.mark.parametrize("count", [5, 64, 1000])
def test_ids_metadata_order_and_white_space_play_no_part(count):
    mine = sketch_of(tasks(0, count))
    theirs = sketch_of(tasks(0, count, prefix="other", said="add {n}  to\n{n}")[::-1])
    assert mine == theirs and mine.count == count and len(mine.hashes) == min(count, 64)
    assert sketch_from(json.loads(json.dumps(mine.as_dict()))) == mine


@pytest.mark.parametrize(("size", "more"), [(10, 12), (40, 60), (100, 400), (1000, 3000)])
def test_more_tasks_and_a_part_of_them_are_the_same_set(size, more):
    small, large = sketch_of(tasks(0, size)), sketch_of(tasks(0, more))
    assert small.is_like(large) and large.is_like(small)


@pytest.mark.parametrize("count", [10, 300])
def test_other_questions_other_answers_and_a_small_overlap_are_other_sets(count):
    mine = sketch_of(tasks(0, count))
    assert not mine.is_like(sketch_of(tasks(0, count, said="take {n} from {n}")))
    assert not mine.is_like(sketch_of(tasks(0, count, expected="no {n}")))
    assert not mine.is_like(sketch_of(tasks(count * 4 // 5, count * 9 // 5)))


@pytest.mark.parametrize("size", [20, 64, 65, 1000])
def test_tasks_that_were_left_out_or_changed_are_counted_and_new_ones_are_not(size):
    before = sketch_of(tasks(0, size))
    assert before.left_out_of([sketch_of(tasks(0, size * 3))]) == 0, "more tasks"
    assert before.left_out_of([sketch_of(tasks(0, size // 2)), sketch_of(tasks(size // 2, size))]) == 0, "split in two"
    assert before.left_out_of([sketch_of(tasks(0, size, prefix="x", said="Add {n}  to {n}.")[::-1])]) == 0
    fewer = before.left_out_of([sketch_of(tasks(0, size * 3 // 4))])
    replaced = before.left_out_of([sketch_of(tasks(size // 4, size * 2))])
    for found in (fewer, replaced):
        assert found == size // 4 if size < 64 else size / 8 < found < size / 2
    assert before.left_out_of([sketch_of(tasks(0, size, said="sum {n} and {n}"))]) == size


def test_a_record_from_before_whole_tasks_were_hashed_says_nothing_of_those_left_out():
    old = sketch_from({"count": 3, "hashes": ["a", "b", "c"]})
    assert old.left_out_of([sketch_of(tasks(0, 2))]) == sketch_of(tasks(0, 2)).left_out_of([old]) == 0


def test_a_record_without_a_sketch_has_none():
    assert sketch_from(None) is None and sketch_from({"count": 3}) is None


LONG = "Read the letter of customer {n} and say in one word what the customer of shop {n} wants to have done"


@pytest.mark.parametrize("count", [10, 64, 300])
@pytest.mark.parametrize(
    "edited",
    [LONG + " ", " " + LONG, LONG + ".", LONG.replace("Read the", "READ THE"), LONG + " please", "Please. " + LONG,
     LONG.replace("say in", "tell me in"), LONG.replace("Read", "Look at"), LONG + "\n\nAnswer briefly."],
)  # fmt: skip
def test_a_small_edit_of_every_text_does_not_make_another_set(count, edited):
    mine, theirs = sketch_of(tasks(0, count, said=LONG)), sketch_of(tasks(0, count, said=edited))
    assert mine.is_like(theirs) and theirs.is_like(mine)


def test_new_tasks_from_the_same_template_are_another_set_also_with_the_same_answers():
    mine = sketch_of(tasks(0, 60, said=LONG, expected="yes"))
    assert mine.count == 60 and not mine.is_like(sketch_of(tasks(1000, 1060, said=LONG, expected="yes")))
    shifted = [
        replace(new, verifier=old.verifier) for new, old in zip(tasks(500, 560, said=LONG), tasks(0, 60), strict=True)
    ]
    assert not sketch_of(tasks(0, 60, said=LONG)).is_like(sketch_of(shifted))
