"""The real SmolLM2-135M-Instruct, from its package: it reads and speaks as it should."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evsys_engine.models import find_model

LLAMA_CPP = {
    "hello world": [28120, 905],
    " hello  world   ": [33662, 216, 905, 333],
    "\n\n\n": [16506],
    "a\nb\r\nc\td": [81, 198, 82, 201, 198, 83, 197, 84],
    "1234567890": [33, 34, 35, 36, 37, 38, 39, 40, 41, 32],
    "x=12+34;": [104, 45, 33, 34, 27, 35, 36, 43],
    "Café naïve résumé": [51, 1939, 2756, 15486, 46494, 412, 2756, 5422, 2756],
    "日本語のテキスト": [23274, 115, 40993, 179, 120, 248, 26453, 11100, 224, 10391, 251, 10391, 134, 11100, 226],
    "Привет, мир!": [155, 249, 46879, 16464, 32547, 28, 41337, 7872, 9175, 17],
    "😀😃": [10813, 242, 218, 10813, 242, 221],
    "def f(x):\n    return x**2  # square\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 5222, 198],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "a<|endoftext|>b": [81, 0, 82],
    "e\u0301 vs é": [85, 151, 219, 6375, 26411],
    "    indented\n        more": [333, 641, 6574, 448, 540],
}
"""What llama.cpp makes of these texts with the same GGUF file."""


@pytest.fixture(scope="module")
def folder():
    return find_model("smollm2-135m-instruct").path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_texts_become_the_tokens_that_llama_cpp_makes_of_them(tokenizer):
    assert {text: tokenizer.encode(text) for text in LLAMA_CPP} == LLAMA_CPP
    assert all(tokenizer.decode(tokens) == text for text, tokens in LLAMA_CPP.items())


def test_the_special_tokens_are_where_the_model_learnt_them(tokenizer):
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.eos_token, len(tokenizer)) == ("<|im_end|>", 49152)


def test_it_knows_the_capital_of_france_and_then_stops(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32 and model.num_parameters() == 134_515_008
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=30, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id
