"""Samplers over tiny models; `tiny_models` beside this file makes them."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tiny_models

from tiny_models import new_sampler, tiny


@pytest.fixture(scope="session")
def models():
    """Models by name, made once; nobody changes their weights."""
    return functools.cache(tiny)


@pytest.fixture
def sampler(models):
    """`sampler(kind)`: a sampler over a tiny model, closed with the test."""
    opened = []

    def make(kind="llama", *, tokenizer=None, lora=None, full=None, lock=None, end_ids=None):
        model = models(kind)
        model.generation_config.eos_token_id = end_ids
        new = new_sampler(model, tokenizer=tokenizer, lora=lora, full=full, lock=lock)
        opened.append(new)
        return new

    yield make
    for one in opened:
        one.close()
