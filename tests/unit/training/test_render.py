"""Chat to tokens, and rows to training data."""

from __future__ import annotations

import pytest

from evsys_sdk.backends.mock_tokenizer import ByteTokenizer
from evsys_sdk.data_types import ChatMessagesRow
from evsys_sdk.errors import DataError
from evsys_sdk.training.render import ChatRenderer, row_to_datum

TOKENIZER = ByteTokenizer()
RENDERER = ChatRenderer(TOKENIZER)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "six"},
]


def _learnt(datum):
    """The target tokens that carry weight, as text."""
    pairs = zip(datum.loss_fn_inputs["target_tokens"].tolist(), datum.loss_fn_inputs["weights"].tolist(), strict=True)
    return TOKENIZER.decode([token for token, weight in pairs if weight])


def test_a_prompt_ends_where_the_assistant_is_to_speak():
    text = TOKENIZER.decode(RENDERER.prompt(CHAT[:2]))
    assert text.endswith("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")


def test_the_mask_covers_what_the_assistant_wrote_and_the_end_of_its_turns():
    tokens, mask = RENDERER.conversation(CHAT)
    assert tokens == TOKENIZER.apply_chat_template(CHAT)
    written = TOKENIZER.decode([token for token, mine in zip(tokens, mask, strict=True) if mine])
    assert written == "4<|im_end|>six<|im_end|>"


def test_training_sees_exactly_the_prompt_that_sampling_sees():
    tokens, mask = RENDERER.conversation(CHAT[:3])
    assert tokens[: mask.index(1)] == RENDERER.prompt(CHAT[:2])


def test_targets_are_the_inputs_shifted_by_one():
    datum, _ = row_to_datum(ChatMessagesRow(messages=CHAT), RENDERER, train_on="all", max_length=999)
    inputs, targets = datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()
    assert inputs[1:] == targets[:-1] and len(inputs) == len(targets)
    assert inputs + targets[-1:] == TOKENIZER.apply_chat_template(CHAT)


@pytest.mark.parametrize(("train_on", "learnt"), [("all", "4<|im_end|>six<|im_end|>"), ("last", "six<|im_end|>")])
def test_all_assistant_turns_or_the_last_one_are_learnt(train_on, learnt):
    datum, _ = row_to_datum(ChatMessagesRow(messages=CHAT), RENDERER, train_on=train_on, max_length=999)
    assert _learnt(datum) == learnt


def test_a_target_assistant_is_the_last_turn():
    row = ChatMessagesRow(messages=CHAT[:2], target_assistant="four")
    assert _learnt(row_to_datum(row, RENDERER, train_on="all", max_length=999)[0]) == "four<|im_end|>"


def test_a_target_that_is_already_the_last_message_is_not_said_twice():
    row = ChatMessagesRow(messages=CHAT[:3], target_assistant="4")
    assert _learnt(row_to_datum(row, RENDERER, train_on="all", max_length=999)[0]) == "4<|im_end|>"


def test_a_long_row_is_cut_and_said_to_be():
    row = ChatMessagesRow(messages=CHAT)
    whole = len(TOKENIZER.apply_chat_template(CHAT))
    datum, truncated = row_to_datum(row, RENDERER, train_on="all", max_length=whole - 3)
    assert truncated and datum.model_input.length == whole - 4 and _learnt(datum) == "4<|im_end|>si"
    assert row_to_datum(row, RENDERER, train_on="all", max_length=whole)[1] is False


def test_a_row_cut_before_the_assistant_speaks_leaves_nothing():
    assert row_to_datum(ChatMessagesRow(messages=CHAT), RENDERER, train_on="all", max_length=10) == (None, True)


def test_a_row_without_an_assistant_leaves_nothing():
    assert row_to_datum(ChatMessagesRow(messages=CHAT[:2]), RENDERER, train_on="all", max_length=99) == (None, False)


class ForgetfulTokenizer(ByteTokenizer):
    """A template that, as some thinking models' do, drops part of earlier assistant turns."""

    def apply_chat_template(self, messages, *, add_generation_prompt=False):
        shown = [
            {**m, "content": "..."} if m["role"] == "assistant" and i < len(messages) - 1 else m
            for i, m in enumerate(messages)
        ]
        return super().apply_chat_template(shown, add_generation_prompt=add_generation_prompt)


def test_a_template_that_rewrites_earlier_turns_is_refused_not_mistrained():
    with pytest.raises(DataError, match=r"messages\[2\]: this model's chat template renders earlier turns differently"):
        ChatRenderer(ForgetfulTokenizer()).conversation(CHAT)


def test_what_a_template_raises_is_blamed_on_it():
    with pytest.raises(DataError, match="the chat template failed: KeyError"):
        RENDERER.prompt([{"content": "no role"}])
