"""The order in which rows come up."""

from __future__ import annotations

from evsys_sdk.training.batch import RowOrder, epoch_order


def test_an_epoch_has_every_row_once():
    assert sorted(epoch_order(100, 3, seed=1)) == list(range(100))


def test_seed_and_epoch_each_change_the_order():
    orders = {tuple(epoch_order(50, epoch, seed)) for epoch in (0, 1) for seed in (1, 2)}
    assert len(orders) == 4


def test_the_order_is_pinned_so_that_old_records_can_be_repeated():
    assert epoch_order(10, 0, seed=42) == [0, 9, 6, 1, 8, 5, 3, 7, 2, 4]


def test_steps_walk_through_the_epochs_and_use_the_last_partial_batch():
    order = RowOrder(5, batch_size=2, seed=0)
    steps = [order.indices(step) for step in range(1, 7)]
    assert [len(step) for step in steps] == [2, 2, 1, 2, 2, 1]
    assert [*steps[0], *steps[1], *steps[2]] == epoch_order(5, 0, 0)
    assert [*steps[3], *steps[4], *steps[5]] == epoch_order(5, 1, 0)


def test_a_step_can_be_rebuilt_without_the_ones_before_it():
    walked = RowOrder(7, batch_size=3, seed=5)
    for step in range(1, 6):
        seen = walked.indices(step)
    assert RowOrder(7, batch_size=3, seed=5).indices(5) == seen
