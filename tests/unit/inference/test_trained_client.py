"""The client over the trained model: asks through the run's own sampler, sync or async."""

from __future__ import annotations

import pytest

from evsys_sdk.backends.mock_tokenizer import ByteTokenizer
from evsys_sdk.errors import ConfigError, EvsysError
from evsys_sdk.registry import inference, schema_for
from evsys_sdk.testing import ScriptedModel
from evsys_sdk.training.rendering import ChatRenderer

RENDERER = ChatRenderer(ByteTokenizer())


class Model(ScriptedModel):
    """Says `hello` and notes how it was asked."""

    def __init__(self):
        super().__init__({}, default="hello")
        self.calls = []

    def sample(self, prompt, num_samples, sampling_params, **options):
        self.calls.append((self.tokenizer.decode(prompt.tokens), sampling_params))
        return super().sample(prompt, num_samples, sampling_params, **options)


@pytest.fixture(params=["mock", "local", "tinker"])
def kind(request):
    return request.param


def attached(kind="mock", **params):
    client, model = inference.build(kind, params), Model()
    client.attach(model, RENDERER, seed=3)
    return client, model


def test_every_kind_asks_the_attached_model(kind):
    client, model = attached(kind)
    assert client.generate(prompt="Hi") == "hello"
    assert model.calls[0][0] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_without_a_model_the_client_says_what_is_missing(kind):
    if kind == "mock":
        assert inference.build(kind, {}).generate(prompt="Hi") == "Hi"  # it needs none
        return
    with pytest.raises(EvsysError, match="call attach"):
        inference.build(kind, {}).generate(prompt="Hi")


async def test_generate_works_inside_a_running_loop():
    client, _ = attached()
    assert client.generate(prompt="Hi") == "hello"
    assert await client.agenerate(prompt="Hi") == "hello"


def test_settings_come_from_the_config_unless_the_call_brings_its_own():
    client, model = attached(max_tokens=9, temperature=0.3, stop=["\n"])
    client.generate(prompt="Hi")
    assert client.generate(prompt="Hi", max_tokens=1, temperature=0.0, stop=[]) == "h"
    first, second = (params for _, params in model.calls)
    assert (first.max_tokens, first.temperature, first.stop) == (9, 0.3, ("\n",))
    assert (second.max_tokens, second.temperature, second.stop) == (1, 0.0, ())


def test_by_default_the_answer_is_greedy_and_short():
    client, model = attached()
    client.generate(prompt="Hi")
    assert (model.calls[0][1].max_tokens, model.calls[0][1].temperature) == (256, 0.0)


def test_a_prompts_draw_depends_on_the_seed_and_the_prompt_alone():
    client, model = attached()
    for prompt in ("a", "b", "a"):
        client.generate(prompt=prompt)
    seeds = [params.seed for _, params in model.calls]
    assert seeds[0] == seeds[2] != seeds[1]
    client.attach(model, RENDERER, seed=4)
    client.generate(prompt="a")
    assert model.calls[-1][1].seed != seeds[0]


def test_the_system_prompt_speaks_first_unless_the_chat_has_one():
    client, model = attached(system_prompt="Be short.")
    client.generate(prompt="Hi")
    client.generate(prompt=[{"role": "system", "content": "Be long."}, {"role": "user", "content": "Hi"}])
    assert model.calls[0][0].startswith("<|im_start|>system\nBe short.")
    assert model.calls[1][0].startswith("<|im_start|>system\nBe long.")


def test_a_misspelt_setting_is_refused():
    with pytest.raises(ConfigError, match="closest: max_tokens"):
        inference.build("mock", {"max_token": 3})
    assert "system_prompt" in schema_for("inference_client", "mock")["properties"]
