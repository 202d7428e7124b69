"""A mock service over a fresh folder, and small data for it."""

from __future__ import annotations

import pytest

from evsys_sdk.backends.mock import MockBackend
from evsys_sdk.config.schema import ModelConfig
from evsys_sdk.training_api import AdamParams, Datum, ModelInput, TensorData


@pytest.fixture
def make_service(tmp_path):
    def make(model="mock-model", **params):
        return MockBackend(**params).prepare(model=ModelConfig(name=model), run_dir=tmp_path)["service"]

    return make


@pytest.fixture
def service(make_service):
    return make_service()


@pytest.fixture
def imitate(service):
    """A datum that asks for `answer` after `question`."""

    def make(question, answer):
        tokenizer = service.get_tokenizer()
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        tokens = [*prompt, *tokenizer.encode(answer), tokenizer.eos_token_id]
        weights = [0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt))
        inputs = {"target_tokens": TensorData(tokens[1:], "int64"), "weights": TensorData(weights)}
        return Datum(ModelInput.from_ints(tokens[:-1]), inputs)

    return make


@pytest.fixture
def learn():
    """Train a client for some steps on the same data; the losses come back."""

    async def train(client, data, steps=1, rate=1e-3, loss_fn="cross_entropy", **config):
        losses = []
        for _ in range(steps):
            output = client.forward_backward(data, loss_fn, config or None)
            optim = client.optim_step(AdamParams(learning_rate=rate))
            losses.append((await output).metrics["loss:sum"])
            await optim
        return losses

    return train
