"""The inference contract, over the clients of the trained model and over a plain class that inherits nothing.

The clients of hosted models need a provider to answer; tests/unit/inference holds them to the same.
"""

from __future__ import annotations

import pytest

from evsys_sdk.backends.mock_tokenizer import ByteTokenizer
from evsys_sdk.eval.row_eval import score_rows
from evsys_sdk.protocols import InferenceClient
from evsys_sdk.registry import inference, list_inference, metrics, register_inference
from evsys_sdk.testing import ScriptedModel
from evsys_sdk.training.rendering import ChatRenderer

ROWS = [{"prompt": "Say yes", "answer": "yes"}, {"prompt": "Say no", "answer": "no"}]
BUILT_INS = [name for name in list_inference() if inference.entries[name].origin == "evsys_sdk.inference.policy"]


def client_of(name: str) -> InferenceClient:
    client = inference.build(name, {})
    client.attach(ScriptedModel({}, default="yes"), ChatRenderer(ByteTokenizer()), seed=1)
    return client


@pytest.fixture(autouse=True)
def registry_as_before(monkeypatch):
    monkeypatch.setattr(inference, "entries", dict(inference.entries))


@pytest.mark.parametrize("name", BUILT_INS)
def test_a_client_answers_with_text_by_the_published_signature(name):
    client = client_of(name)
    assert isinstance(client, InferenceClient)
    assert client.generate(prompt="Say yes", max_tokens=8, temperature=0.0, stop=None) == "yes"


@pytest.mark.parametrize("name", BUILT_INS)
async def test_a_client_can_be_scored_on_rows(name):
    result = await score_rows(ROWS, metrics=[("exact_match", metrics.build("exact_match", {}))], client=client_of(name))
    assert result.scores[0].value == 0.5


async def test_a_plain_class_without_a_base_is_a_client():
    @register_inference("always_no")
    class AlwaysNo:
        def generate(self, *, prompt, max_tokens, temperature, stop):
            return "no"

    client = inference.build("always_no", {})
    assert isinstance(client, InferenceClient) and AlwaysNo.name == "always_no"
    result = await score_rows(ROWS, metrics=[("exact_match", metrics.build("exact_match", {}))], client=client)
    assert result.scores[0].value == 0.5
