"""An endpoint over a model that says what it is told, and clients to ask it with."""

from __future__ import annotations

import importlib.util
import os

import pytest

from evsys_sdk.backends.mock_tokenizer import ByteTokenizer
from evsys_sdk.serving import Capture, Endpoint, ListenAddress, ServedModel, in_background
from evsys_sdk.testing import ScriptedModel
from evsys_sdk.training.rendering import ChatRenderer
from evsys_sdk.training_api import SampledSequence, SampleOutput

# Before the first import of harbor or litellm: no telemetry, no download of a price list.
os.environ.setdefault("HARBOR_TELEMETRY", "0")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

OVER_HTTP = [
    "test_capture.py",
    "test_endpoint.py",
    "test_harbor_agents.py",
    "test_openai_client.py",
    "test_training_*.py",
]
collect_ignore_glob = [] if importlib.util.find_spec("uvicorn") else OVER_HTTP


class Model(ScriptedModel):
    """Answers from a script, with a logprob for each token, and notes how it was asked."""

    def __init__(self, script=None, *, default="hello there"):
        super().__init__(script or {}, default=default)
        self.asked = []

    async def _sample(self, prompt, count, params, include_prompt_logprobs):
        self.asked.append((self.tokenizer.decode(prompt.tokens), count, params))
        output = await super()._sample(prompt, count, params, include_prompt_logprobs)
        return SampleOutput(
            sequences=[
                SampledSequence(
                    tokens=sequence.tokens,
                    logprobs=[-0.5 - place / 100 for place in range(len(sequence.tokens))],
                    stop_reason=sequence.stop_reason,
                )
                for sequence in output.sequences
            ]
        )


@pytest.fixture
def renderer():
    return ChatRenderer(ByteTokenizer())


@pytest.fixture
def start(renderer):
    """`start(model)` puts an endpoint beside the test; returns what is running."""
    opened = []

    def begin(sampler=None, *, context_length=None, key=None, **options):
        served = ServedModel(sampler=sampler or Model(), renderer=renderer, context_length=context_length)
        endpoint = Endpoint({"policy": served}, capture=Capture(), **options)
        context = in_background(endpoint, ListenAddress(key=key))
        opened.append(context)
        return context.__enter__()

    yield begin
    for context in opened:
        context.__exit__(None, None, None)


@pytest.fixture
def model():
    return Model


@pytest.fixture
def client():
    """`client(running, session)`: the real OpenAI client."""
    openai = pytest.importorskip("openai", reason="needs the extra openai")
    made = []

    def make(running, session=None, key="unused"):
        made.append(openai.OpenAI(base_url=running.base_url(session), api_key=key, max_retries=0, timeout=20))
        return made[-1]

    yield make
    for one in made:
        one.close()
