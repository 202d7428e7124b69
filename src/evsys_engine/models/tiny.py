"""`tiny-random`: a whole model that is made in a blink, for tests and first tries.

In: nothing. Out: a folder with a 2-layer Llama of random weights and a small byte-level BPE that speaks ChatML. It has
learnt nothing, and it is the same everywhere and every time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from evsys_engine.models.errors import need
from evsys_engine.models.gguf import CLASSES, LAYER, TOP, write_configs, write_weights
from evsys_engine.models.tokenizer import Specials, save_tokenizer
from evsys_engine.types import Array

RECIPE = "tiny-random-1"
VOCABULARY, HIDDEN, WIDE, LAYERS, HEADS, KV_HEADS, CONTEXT = 384, 64, 128, 2, 4, 2, 2048
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEXT = """system user assistant You are a helpful assistant. What is the answer to this question? The answer is yes, the
answer is no. one two three four five six seven eight nine ten red green blue black white grey say name sum word number
please read the text and write the result as a number or as a word: hello world, what colour is the sky? The sky is
blue. Which tool should be used for this task? Use the tool that sends a message, lists files, or creates an event."""


def write_tiny(folder: Path) -> None:
    """Write the whole model into `folder`."""
    tokenizer = make_tokenizer()
    specials = Specials(bos="<|im_start|>", eos="<|im_end|>", pad="<|endoftext|>")
    save_tokenizer(tokenizer, folder, specials, template=TEMPLATE, context=CONTEXT)
    write_configs(folder, make_config(tokenizer))
    shapes = make_shapes()
    sizes = {name: 4 * int(np.prod(shape)) for name, shape in shapes.items()}
    random = np.random.default_rng(0)
    write_weights(folder, {name: name for name in shapes}, sizes, lambda name: _draw(random, shapes[name]))


def make_tokenizer() -> Any:
    """A BPE over bytes, with merges of its own little text; it can write anything."""
    tokenizers = need("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    return tokenizer


def make_config(tokenizer: Any) -> dict[str, Any]:
    return {
        "architectures": [CLASSES["llama"]],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.token_to_id("<|im_start|>"),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "dtype": "float32",
    }


def make_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor by transformers' name."""
    keys = KV_HEADS * HIDDEN // HEADS
    layer = {
        "attn_q": (HIDDEN, HIDDEN), "attn_k": (keys, HIDDEN), "attn_v": (keys, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (WIDE, HIDDEN), "ffn_up": (WIDE, HIDDEN), "ffn_down": (HIDDEN, WIDE),
        "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        TOP["token_embd.weight"]: (VOCABULARY, HIDDEN),
        TOP["output_norm.weight"]: (HIDDEN,),
    }
    for index in range(LAYERS):
        shapes |= {f"model.layers.{index}.{LAYER[f'{key}.weight']}": shape for key, shape in layer.items()}
    return shapes


def _draw(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    if len(shape) == 1:  # a norm
        return np.ones(shape, dtype=np.float32)
    return (0.02 * random.standard_normal(shape)).astype(np.float32)
