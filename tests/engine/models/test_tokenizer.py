"""The tokenizer made from a GGUF's tokens and merges is the model's own, not an approximation."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from evsys_engine.models import ModelError, find_model
from evsys_engine.models.tokenizer import choose_specials

TEXTS = [
    "hello world", " two  spaces and three   ", "\n\n\ta\r\nb\n", "in 2024: 3.14159, 1,000,000", "Café naïve résumé",
    "日本語のテキスト Привет مرحبا हिन्दी", "😀👨‍👩‍👧‍👦🏳️‍🌈 𝔘𝔫𝔦",
    "def f(x):\n    return x**2  # square\n\tpass", "\x00\x01\x7f\u200b\ufeff",
    "I'm you're DON'T", "<|im_start|>user\nhi<|im_end|>\n", "e\u0301", "",
]  # fmt: skip


@pytest.fixture
def tokenizer_of(write_gguf, tmp_path):
    """The tokenizer that transformers loads from the converted folder."""

    def load(**changes):
        return AutoTokenizer.from_pretrained(find_model(str(write_gguf(**changes)), cache=tmp_path / "cache").path)

    return load


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_the_round_trip(text, tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tokens_are_those_of_the_tokenizer_that_went_in(tiny, tokenizer_of):
    before, after = AutoTokenizer.from_pretrained(tiny), tokenizer_of()
    assert [after.encode(text) for text in TEXTS] == [before.encode(text) for text in TEXTS]
    assert after.get_vocab() == before.get_vocab()
    assert after.chat_template == before.chat_template


def test_digits_stand_alone(tokenizer_of):
    assert [token for token in tokenizer_of().tokenize("a1234") if token.isdigit()] == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["I", "'m", "Ġ", "1", "2", "3", "4", "Ġnow", "!!", "Ċ"]),
        ("gpt-2", ["I", "'m", "Ġ1234", "Ġnow", "!!", "Ċ"]),
        ("qwen2", ["I", "'m", "Ġ", "1", "2", "3", "4", "Ġnow", "!!Ċ"]),
        ("llama-bpe", ["I", "'m", "Ġ", "123", "4", "Ġnow", "!!Ċ"]),
    ],
)
def test_text_is_cut_as_the_file_names_it(pre, pieces, tokenizer_of):
    splitter = tokenizer_of(pre=pre).backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in splitter.pre_tokenize_str("I'm 1234 now!!\n")] == pieces


def test_a_chat_ends_at_the_end_of_a_turn_whatever_the_file_calls_eos(tokenizer_of, tmp_path):
    tokenizer = tokenizer_of(eos=0)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    config = next((tmp_path / "cache").glob("gguf-*/generation_config.json"))
    assert json.loads(config.read_text())["eos_token_id"] == 2


def test_a_template_of_another_kind_keeps_the_files_own_end(tokenizer_of):
    template = "{{ messages[0]['content'] }}"
    assert tokenizer_of(eos=0, template=template).eos_token == "<|endoftext|>"
    assert tokenizer_of(eos=0, template=template, tokenizer__ggml__eot_token_id=1).eos_token == "<|im_start|>"


def test_a_file_without_an_end_is_refused():
    with pytest.raises(ModelError, match="no end-of-text token"):
        choose_specials({"tokenizer.ggml.tokens": ["a"]})


def test_control_tokens_vanish_from_an_answer_and_added_words_stay(tokenizer_of):
    tokenizer = tokenizer_of(types={"<|endoftext|>": 4})
    tokens = tokenizer.encode("a<|endoftext|>b<|im_end|>")
    assert tokens.count(0) == 1 and tokens[-1] == 2
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "a<|endoftext|>b"


def test_a_beginning_is_put_before_plain_text_only_where_the_file_asks(tokenizer_of):
    assert tokenizer_of().encode("a")[0] != 1
    asking = tokenizer_of(pre="llama-bpe")
    assert asking.encode("a")[0] == 1
    chat = asking.apply_chat_template([{"role": "user", "content": "a"}], return_dict=False)
    assert chat.count(1) == 1, "the template writes its own"
