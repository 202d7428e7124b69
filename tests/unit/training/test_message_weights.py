"""`weight` on a message, as in OpenAI's fine-tuning files."""

from __future__ import annotations

import pytest

from evsys_sdk.data_types import from_dict
from evsys_sdk.errors import DataError
from evsys_sdk.testing import training_context
from evsys_sdk.training.chat_data import check_chats
from evsys_sdk.training.prompts import read_prompts


def chat(*messages, **row):
    return {"messages": [{"role": "user", "content": "2+2?"}, *messages], **row}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize("weight", [0.5, 2, -1, "0", True, [0], float("nan")])
def test_a_weight_other_than_0_and_1_is_refused_with_its_place(weight):
    with pytest.raises(DataError, match=r"row 1: messages\[1\]\.weight must be 0 .* or 1"):
        check_chats([chat(said("4")), chat(said("4", weight=weight))], "sft")


@pytest.mark.parametrize("weight", [0, 1, 0.0, 1.0, None])
def test_0_and_1_and_no_weight_are_allowed(weight):
    from_dict(chat(said("4", weight=weight)))


def test_a_user_message_cannot_be_given_weight():
    with pytest.raises(DataError, match=r"messages\[0\]\.weight is 1 on a message of role 'user'"):
        from_dict({"messages": [{"role": "user", "content": "hi", "weight": 1}]})
    from_dict({"messages": [{"role": "user", "content": "hi", "weight": 0}, said("x")]})


def test_a_row_in_which_nothing_has_weight_is_refused():
    with pytest.raises(DataError, match="row 0 has nothing to learn from: every assistant message has weight 0"):
        check_chats([chat(said("4", weight=0))], "sft")


def test_an_answer_of_weight_0_is_no_demonstration():
    learnt, left = read_prompts([chat(said("4")), chat(said("4", weight=0))], "sdft")
    assert (learnt.answer, left.answer) == ("4", None)


def test_training_does_not_move_what_a_message_of_weight_0_says(tmp_path):
    """The same chat with two different messages of weight 0 at its end teaches the same."""
    from evsys_sdk.registry import algorithms

    def loss(last, where):
        rows = [chat(said("4"), {"role": "user", "content": "sure?"}, said(last, weight=0))]
        ctx = training_context(tmp_path / where, rows)
        return algorithms.build("sft", {"max_steps": 3}).train(ctx).metrics["final_loss"]

    assert loss("yes", "a") == loss("zzzzzz", "b")


def test_text_beside_other_messages_is_refused():
    with pytest.raises(DataError, match="must be the only one"):
        from_dict({"messages": [{"role": "text", "content": "a"}, said("b")]})


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"conversations": []}, "sharegpt_to_chat"),
        ({"instruction": "a", "output": "b"}, "alpaca_to_chat"),
        ({"text": "a"}, "to_plain_text"),
        ({"chosen": "a", "rejected": "b"}, "dpo"),
        ({"question": "a"}, "jsonl_to_chat"),
    ],
)
def test_rows_that_are_no_chats_are_answered_with_the_transform_that_makes_some(row, kind):
    with pytest.raises(DataError, match=f"sft needs chats: .*{kind}"):
        check_chats([row], "sft")


def test_a_mistake_in_a_chat_is_not_answered_with_a_transform():
    with pytest.raises(DataError) as caught:
        check_chats([chat(said("4", weight=0.5))], "sft")
    assert "weight must be 0" in str(caught.value) and "transform" not in str(caught.value)
