"""tiny-random: quick, small, the same everywhere, and a whole model."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evsys_engine.models import find_model


def _digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_it_takes_a_few_megabytes(tmp_path):
    folder = find_model("tiny-random", cache=tmp_path, fetch=False).path
    assert sum(path.stat().st_size for path in folder.iterdir()) < 5_000_000


def test_another_process_makes_the_very_same_files(tiny, tmp_path):
    code = (
        "import sys; from evsys_engine.models import find_model as f; f('tiny-random'); print('torch' in sys.modules)"
    )
    environ = {**os.environ, "EVSYS_CACHE": str(tmp_path), "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, check=True, capture_output=True, text=True)
    assert done.stdout == "False\n", "it needs no torch"
    assert _digests(tmp_path / "tiny-random") == _digests(tiny)


def test_transformers_loads_all_of_it_and_it_can_speak(tiny):
    model, report = AutoModelForCausalLM.from_pretrained(tiny, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert len(tokenizer) == model.config.vocab_size
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "say red"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert tokenizer.decode(prompt["input_ids"][0]) == "<|im_start|>user\nsay red<|im_end|>\n<|im_start|>assistant\n"
    torch.manual_seed(0)
    answer = model.generate(**prompt, max_new_tokens=5, do_sample=True, min_new_tokens=5)
    assert answer.shape[1] == prompt["input_ids"].shape[1] + 5
