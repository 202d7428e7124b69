"""Completions that have to follow a grammar, beside others that need not."""

from __future__ import annotations

import json

import pytest
from tiny_models import tiny_tokenizer

from evsys_engine import grammar
from evsys_engine.sample_queue import SampleQueue
from evsys_engine.types import BadRequest, EngineError, SampleRequest

llguidance = pytest.importorskip("llguidance", reason="needs the extra serve")

LONG = 60.0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["person", "place"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
GRAMMAR = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def one(sampler, tokenizer):
    return sampler(tokenizer=tokenizer)


def request(**options):
    return SampleRequest(**{"tokens": [5, 6, 7], "max_tokens": 100, "seed": 3, "grammar": GRAMMAR, **options})


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 4}, {"top_p": 0.5}, {"temperature": 1e-320}]
)
def test_every_completion_follows_the_grammar_and_ends(one, tokenizer, options):
    for row in one.sample([request(num_samples=4, **options)])[0].sequences:
        assert row.stop_reason == "stop" and row.tokens[-1] == tokenizer.eos_token_id
        said = json.loads(tokenizer.decode(row.tokens[:-1]))
        assert said.keys() == SCHEMA["properties"].keys() and len(said["name"]) <= 6
        assert 0 <= said["age"] <= 99 and said["kind"] in ("person", "place")


def test_log_probabilities_are_the_models_own(one):
    row = one.sample([request()])[0].sequences[0]
    whole = SampleRequest(tokens=[5, 6, 7, *row.tokens], max_tokens=1, prompt_logprobs=True)
    scored = one.sample([whole])[0].prompt_logprobs
    assert row.logprobs == pytest.approx(scored[3:], abs=1e-5)


def test_neither_side_of_a_shared_batch_changes_a_bit_of_the_other(one):
    free = [
        SampleRequest(tokens=[9, 8], max_tokens=40, seed=1, num_samples=2, end_of_text=False),
        SampleRequest(tokens=[9, 8, 7], max_tokens=40, seed=2, temperature=0.6, top_k=30, end_of_text=False),
        SampleRequest(tokens=[4], max_tokens=40, temperature=0.0, end_of_text=False),
    ]
    bound = [request(), request(seed=4, temperature=0.0), request(seed=5, top_p=0.8)]
    alone = [one.sample([asked])[0].sequences for asked in free + bound]
    together = [result.sequences for result in one.sample(free + bound)]
    assert together == alone


def test_without_a_grammar_the_library_is_not_touched(one, monkeypatch):
    def fail():
        raise AssertionError("llguidance was asked for")

    monkeypatch.setattr(grammar, "_llguidance", fail)
    assert one.sample([request(grammar=None)])[0].sequences


def test_a_grammar_that_makes_no_sense_is_refused_and_concerns_nobody_else(one):
    queue = SampleQueue(one, window_seconds=0.05)
    bad, good = queue.submit(request(grammar="start: nowhere")), queue.submit(request())
    with pytest.raises(BadRequest, match="grammar"):
        bad.result(LONG)
    assert good.result(LONG).sequences == one.sample([request()])[0].sequences
    queue.close()


def test_a_grammar_that_becomes_too_much_for_its_parser_fails_alone(one, monkeypatch):
    alone = one.sample([request()])[0].sequences
    allowed = grammar.Matcher.allowed
    steps = {}

    def limited(matcher):
        steps[matcher] = steps.get(matcher, 0) + 1
        if next(iter(steps)) is matcher and steps[matcher] > 3:
            raise EngineError("too complex")
        return allowed(matcher)

    monkeypatch.setattr(grammar.Matcher, "allowed", limited)
    queue = SampleQueue(one, window_seconds=0.05)
    bad, good = queue.submit(request(seed=9)), queue.submit(request())
    with pytest.raises(EngineError, match="too complex"):
        bad.result(LONG)
    assert good.result(LONG).sequences == alone
    queue.close()


def test_a_vocabulary_is_made_once_for_a_tokenizer(tokenizer):
    made = [grammar.model_vocabulary(tokenizer, 300, {0}) for _ in range(2)]
    assert made[0] is made[1] and grammar.model_vocabulary(tokenizer, 301, {0}) is not made[0]


@pytest.mark.parametrize(("ends", "said"), [(set(), "end-of-text")])
def test_a_model_without_an_end_cannot_follow_a_grammar(tokenizer, ends, said):
    with pytest.raises(BadRequest, match=said):
        grammar.model_vocabulary(tokenizer, 300, ends)


def test_a_stop_string_still_stops(one, tokenizer):
    row = one.sample([request(stop=("age",))])[0].sequences[0]
    assert row.stop_reason == "stop" and "age" not in tokenizer.decode(row.tokens)
