"""Pairs, and the loss that learns from them, against numbers worked out by hand."""

from __future__ import annotations

import importlib.util
import math

import pytest

from evsys_sdk.algorithms.dpo import (
    dpo_loss,
    pair_of,
    read_preferences,
    whole_sequence,
    with_reference,
)
from evsys_sdk.backends.mock_tokenizer import ByteTokenizer
from evsys_sdk.errors import DataError
from evsys_sdk.training.rendering import ChatRenderer
from evsys_sdk.training_api import Datum, ModelInput, TensorData

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="losses are written in torch")
ASKED = [{"role": "user", "content": "2+2?"}]
ANSWER = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        {"prompt": ASKED, "chosen": "4", "rejected": "5"},
        {"messages": ASKED, "chosen": ANSWER, "rejected": {"role": "assistant", "content": "5"}},
        {"prompt": ASKED, "chosen": [ANSWER], "rejected": "5"},
        {"prompt": ASKED, "chosen": [*ASKED, ANSWER], "rejected": "5"},
        {"messages": ASKED, "metadata": {"chosen": "4", "rejected": "5"}},
    ],
)
def test_a_preference_may_be_written_in_several_ways(row):
    (read,) = read_preferences([row])
    assert (read.prompt, read.chosen, read.rejected) == (ASKED, "4", "5")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": None}, "neither `prompt` nor `messages`"),
        ({"chosen": None}, "`chosen` must be the assistant's answer"),
        ({"rejected": ""}, "`rejected` must be the assistant's answer"),
        ({"rejected": "4"}, "chosen and rejected are the same"),
        ({"chosen": {"role": "user", "content": "4"}}, "`chosen` must be the assistant's answer"),
        ({"chosen": [{"role": "user", "content": "3+3?"}, ANSWER]}, "does not begin with the prompt"),
        ({"prompt": [*ASKED, ANSWER]}, "its prompt ends with the assistant"),
        ({"prompt": [{"content": "no role"}]}, r"messages\[0\] must be a mapping with `role`"),
    ],
)
def test_a_row_that_is_no_preference_is_named(change, said):
    row = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
    with pytest.raises(DataError, match=rf"row 1: (.|\n)*{said}(.|\n)*dpo needs rows with"):
        read_preferences([row, {**row, **change}])


def test_a_pair_is_the_two_answers_to_one_prompt_and_only_answers_count():
    (read,) = read_preferences([{"prompt": "2+2?", "chosen": "four", "rejected": "5"}])
    pair = pair_of(read, ChatRenderer(ByteTokenizer()), max_length=200)
    learnt = []
    for datum in pair:
        targets, weights = (datum.loss_fn_inputs[key].tolist() for key in ("target_tokens", "weights"))
        learnt.append(bytes(t for t, w in zip(targets, weights, strict=True) if w and t < 256))
        assert whole_sequence(datum)[1:] == targets
    assert learnt == [b"four", b"5"]


def test_a_pair_that_is_too_long_is_left_out_whole():
    (read,) = read_preferences([{"prompt": "2+2?", "chosen": "4" * 100, "rejected": "5"}])
    assert pair_of(read, ChatRenderer(ByteTokenizer()), max_length=100) is None


def _datum(weights, reference):
    n = len(weights)
    inputs = {"target_tokens": TensorData([1] * n, "int64"), "weights": TensorData(weights)}
    return with_reference(Datum(ModelInput((1,) * n), inputs), reference)


@needs_torch
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_a_pair_is_that_of_its_margin(smoothing):
    import torch

    data = [_datum([0.0, 1.0, 1.0], [-9.0, -2.0, -3.0]), _datum([0.0, 1.0], [-9.0, -1.0])]
    logprobs = [torch.tensor([-5.0, -1.5, -2.0], requires_grad=True), torch.tensor([-5.0, -1.25], requires_grad=True)]
    loss, metrics = dpo_loss(beta=0.5, label_smoothing=smoothing, pairs=1)(data, logprobs)
    margin = 0.5 * (1.5 - (-0.25))  # gained: chosen 0.5 + 1.0, rejected -0.25; the prompt's 4.0 do not count
    sigmoid = 1 / (1 + math.exp(-margin))
    assert loss.item() == pytest.approx(-(1 - smoothing) * math.log(sigmoid) - smoothing * math.log(1 - sigmoid))
    assert metrics == pytest.approx(
        {"margin": margin, "accuracy": 1.0, "reward/chosen": 0.75, "reward/rejected": -0.125}
    )
    loss.backward()
    slope = 0.5 * (sigmoid - (1 - smoothing))
    assert logprobs[0].grad.tolist() == pytest.approx([0.0, slope, slope])
    assert logprobs[1].grad.tolist() == pytest.approx([0.0, -slope])


@needs_torch
def test_the_losses_of_the_calls_of_a_step_add_up_to_the_mean_over_its_pairs():
    import torch

    data = [_datum([1.0], [-1.0]), _datum([1.0], [-2.0])]
    logprobs = [torch.tensor([-1.0], requires_grad=True), torch.tensor([-2.0], requires_grad=True)]
    loss, _ = dpo_loss(beta=0.1, label_smoothing=0.0, pairs=4)(data, logprobs)
    assert loss.item() == pytest.approx(math.log(2) / 4)
