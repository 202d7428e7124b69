"""Tiny random models with a tiny tokenizer, and small data for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from evsys_engine.engine import Engine
from evsys_engine.types import LoraSettings, TrainingDatum

VOCAB = 320
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # far from zero, so that every part of the model shows in a gradient
    "bos_token_id": 256,
    "eos_token_id": 257,
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def tiny_tokenizer():
    """Bytes, and the chat marks <s>, <|im_end|>, <|im_start|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<|im_end|>", "<|im_start|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>")
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return fast


@pytest.fixture(scope="session")
def save_model(tmp_path_factory):
    """A folder with a random model of our shape and the tokenizer."""

    def save(model_class, config_class, **extra):
        folder = tmp_path_factory.mktemp("model")
        torch.manual_seed(7)
        model_class(config_class(**{**SHAPE, **extra})).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def model_dirs(save_model):
    """`llama` has its head tied to the embedding, `qwen3` has not."""
    return {
        "llama": save_model(LlamaForCausalLM, LlamaConfig, tie_word_embeddings=True),
        "qwen3": save_model(Qwen3ForCausalLM, Qwen3Config, tie_word_embeddings=False),
    }


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def model_dir(request, model_dirs):
    return model_dirs[request.param]


@pytest.fixture
def engine(model_dir):
    return Engine.load(model_dir, device="cpu", dtype="float32")


@pytest.fixture
def llama(model_dirs):
    return Engine.load(model_dirs["llama"], device="cpu", dtype="float32")


@pytest.fixture
def adapter(llama):
    return llama.create_adapter(LoraSettings(rank=4, seed=1))


def make_datum(chance, length, loss_fn="cross_entropy", width=None, source=None):
    """Random tokens; a third of the positions do not pull. `logprobs` are near what a random model says."""
    shape = (length,) if width is None else (length, width)
    active = chance.random(length) > 0.3
    active[-1] = True
    inputs = {"target_tokens": chance.integers(0, VOCAB, shape)}
    if loss_fn == "cross_entropy":
        weights = chance.normal(size=shape) * (active if width is None else active[:, None])
        inputs["weights"] = weights.astype(np.float32)
    else:
        inputs["logprobs"] = (-np.log(VOCAB) + chance.normal(0, 0.5, length)).astype(np.float32)
        inputs["advantages"] = (chance.normal(size=length) * active).astype(np.float32)
    return TrainingDatum(tokens=chance.integers(0, VOCAB, length).tolist(), inputs=inputs, source=source)


@pytest.fixture
def make_data():
    """Data of mixed lengths, the same for the same seed."""

    def make(lengths=(5, 17, 9, 17, 30, 1), loss_fn="cross_entropy", seed=0, width=None):
        chance = np.random.default_rng(seed)
        return [make_datum(chance, length, loss_fn, width) for length in lengths]

    return make
