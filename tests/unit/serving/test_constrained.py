"""Forced tools and forms of answers, on a model that would say anything: the mock's, untrained."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from evsys_sdk.backends.mock import MockBackend
from evsys_sdk.config.schema import ModelConfig
from evsys_sdk.errors import EvsysError
from evsys_sdk.serving import Capture, Endpoint, ServedModel, in_background
from evsys_sdk.serving.request import ApiError, ChatRequest, grammar_of
from evsys_sdk.training.rendering import ChatRenderer
from evsys_sdk.training_api import SamplingParams

openai = pytest.importorskip("openai", reason="needs the extra openai")
pytest.importorskip("llguidance", reason="needs the extra serve")

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"$ref": "#/$defs/Kind"},
    },
    "required": ["name", "age", "kind"],
    "$defs": {"Kind": {"enum": ["person", "place"]}},
}
PERSON = {"type": "function", "function": {"name": "save_person", "description": "Saves.", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}


@pytest.fixture
def found(tmp_path):
    service = MockBackend().prepare(model=ModelConfig(name="m"), run_dir=tmp_path)["service"]

    async def make():
        return await service.create_sampling_client()

    served = ServedModel(sampler=asyncio.run(make()), renderer=ChatRenderer(service.get_tokenizer()))
    with in_background(Endpoint({"m": served}, capture=Capture())) as found:
        yield found


@pytest.fixture
def ask(found, client):
    def create(**options):
        defaults = {"model": "m", "messages": HI, "max_tokens": 300, "seed": 1}
        return client(found).chat.completions.create(**{**defaults, **options}).choices

    return create


def check_person(said):
    assert said.keys() == {"name", "age", "kind"} and len(said["name"]) <= 8
    assert 0 <= said["age"] <= 150 and said["kind"] in ("person", "place")


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_an_answer_has_the_form_of_its_schema(ask, temperature):
    for choice in ask(response_format=FORM, temperature=temperature, n=3):
        check_person(json.loads(choice.message.content))
        assert choice.finish_reason == "stop" and choice.message.tool_calls is None


def test_an_answer_that_is_to_be_an_object_is_one(ask):
    for choice in ask(response_format={"type": "json_object"}, n=4):
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
        assert choice.message.content.startswith("{")


def test_a_named_function_is_called_once(ask):
    choice = {"type": "function", "function": {"name": "save_person"}}
    for found in ask(tools=[NOW, PERSON], tool_choice=choice, n=3):
        assert found.finish_reason == "tool_calls" and found.message.content is None
        [call] = found.message.tool_calls
        assert call.function.name == "save_person"
        check_person(json.loads(call.function.arguments))


def test_a_required_call_is_made_and_no_more_than_one_where_one_is_wanted(ask):
    counts = set()
    for found in ask(tools=[NOW, PERSON], tool_choice="required", n=8):
        assert found.finish_reason == "tool_calls"
        counts.add(len(found.message.tool_calls))
        for call in found.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            assert arguments == {} if call.function.name == "now" else check_person(arguments) is None
    assert max(counts) > 1
    alone = ask(tools=[NOW, PERSON], tool_choice="required", parallel_tool_calls=False, n=8)
    assert {len(found.message.tool_calls) for found in alone} == {1}


def test_with_tools_at_hand_an_answer_has_its_form_or_is_a_call(ask):
    kinds = set()
    for found in ask(tools=[NOW], response_format=FORM, n=16):
        kinds.add(found.finish_reason)
        if found.message.tool_calls:
            assert found.message.tool_calls[0].function.name == "now"
        else:
            check_person(json.loads(found.message.content))
    assert kinds == {"stop", "tool_calls"}


def test_an_answer_that_looks_like_a_call_is_an_answer(ask):
    fields = {"name": {"const": "now"}, "arguments": {"type": "object", "properties": {}}}
    schema = {"type": "object", "properties": fields, "required": ["name", "arguments"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answers = [found for found in ask(tools=[NOW], response_format=form, n=16) if not found.message.tool_calls]
    assert answers and all(found.message.content == '{"name": "now", "arguments": {}}' for found in answers)


def test_no_tool_is_called_where_none_may_be(ask):
    [found] = ask(tools=[PERSON], tool_choice="none", response_format=FORM)
    check_person(json.loads(found.message.content))
    assert found.message.tool_calls is None


def test_a_stream_has_the_form_too(found, client):
    stream = client(found).chat.completions.create(
        model="m", messages=HI, max_tokens=300, seed=1, stream=True, response_format=FORM
    )
    check_person(json.loads("".join(chunk.choices[0].delta.content or "" for chunk in stream)))


def test_the_clients_own_parsing_of_models_works(found, client):
    from pydantic import BaseModel

    class Place(BaseModel):
        floor: int
        lit: bool

    answer = client(found).chat.completions.parse(model="m", messages=HI, max_tokens=300, seed=1, response_format=Place)
    assert isinstance(answer.choices[0].message.parsed, Place)


def test_what_was_captured_has_the_models_own_log_probabilities(found, client):
    client(found, "s").chat.completions.create(model="m", messages=HI, max_tokens=300, seed=1, response_format=FORM)
    turn = found.endpoint.capture.take("s")[0]
    sampler = found.endpoint.models["m"].sampler
    check_person(json.loads(turn.text))

    async def score():
        from evsys_sdk.training_api import ModelInput

        return await sampler.compute_logprobs(ModelInput.from_ints(turn.prompt_tokens + turn.completion_tokens))

    assert asyncio.run(score())[len(turn.prompt_tokens) :] == pytest.approx(turn.logprobs, abs=1e-6)


def nested(depth, schema, wrap):
    for _ in range(depth):
        schema = wrap(schema)
    return schema


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$ref": "#"}, "no text has this form"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "no text has this form"),
        ({"$ref": "file:///etc/passwd"}, "cannot be followed"),
        (nested(300, {}, lambda inner: {"type": "object", "properties": {"a": inner}}), "recursion limit"),
        (nested(2000, {}, lambda inner: {"items": inner}), "nested too deeply"),
        ({"type": "string", "pattern": "(" * 300 + ")" * 300}, "regex"),
    ],
)
def test_a_schema_that_leads_nowhere_is_refused_at_once(schema, said):
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    request = ChatRequest.model_construct(model="m", messages=HI, response_format=form)
    with pytest.raises(ApiError, match=said) as caught:
        grammar_of(request)
    assert caught.value.status == 400 and "\n" not in caught.value.message


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "minItems": 10**9, "items": {"type": "null"}},
        {"oneOf": [{"properties": {"k": {"const": i}}, "required": ["k"], "type": "object"} for i in range(3000)]},
    ],
)
def test_a_schema_that_is_too_much_for_the_sampler_is_a_400(found, client, schema):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = {"model": "m", "messages": HI, "max_tokens": 300, "seed": 1}
    create = client(found, session="s").chat.completions.create
    with pytest.raises(openai.BadRequestError, match="grammar"):
        create(**asked, response_format=form)
    assert found.endpoint.capture.errors("s") == []
    assert create(**asked).choices[0].message.content is not None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 999_983},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}},
    ],
)
def test_a_schema_that_takes_long_to_compile_is_a_400(ask, schema):
    with pytest.raises(openai.BadRequestError, match="takes too long to compile") as caught:
        ask(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert caught.value.param == "response_format"


def test_other_requests_are_answered_while_grammars_are_compiled(found, client, monkeypatch):
    count, go_on, waiting = 8, threading.Event(), threading.Semaphore(0)

    def compile_for_ever(request):
        waiting.release()
        go_on.wait()
        raise ApiError(400, "it took for ever")

    monkeypatch.setattr("evsys_sdk.serving.endpoint.grammar_of", compile_for_ever)
    create = client(found).chat.completions.create
    with ThreadPoolExecutor(count) as callers:
        slow = [callers.submit(create, model="m", messages=HI, response_format=FORM) for _ in range(count)]
        try:
            assert all(waiting.acquire(timeout=15) for _ in slow)
            assert create(model="m", messages=HI, max_tokens=3).choices
            assert not any(one.done() for one in slow)
        finally:
            go_on.set()
        assert all(isinstance(one.exception(), openai.BadRequestError) for one in slow)


BAD = [
    ({"response_format": {"type": "xml"}}, "response_format", "text, json_object or json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "a JSON schema is needed"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}}, "response_format",
     "cannot be followed: Invalid type: nope"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format",
     "Unimplemented keys"),
    ({"tool_choice": "required"}, "tool_choice", "fill tools"),
    ({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
     "tools.0.function.parameters", "a JSON schema is needed"),
    ({"tool_choice": "always", "tools": [NOW]}, "tool_choice", "none, auto, required"),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": [NOW]}, "tool_choice", "none, auto, required"),
    ({"tool_choice": {"type": "function", "function": {"name": "nov"}}, "tools": [NOW]}, "tool_choice", "closest: now"),
    ({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}]},
     "tools", "cannot be followed"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param", "said"), BAD)
def test_a_form_that_cannot_be_had_is_a_400(ask, change, param, said):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(**change)
    assert caught.value.param == param and said in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("change", [{"response_format": FORM}, {"tools": [PERSON], "tool_choice": "required"}])
def test_a_sampler_that_cannot_be_held_to_a_form_says_so(start, client, change):
    with pytest.raises(openai.BadRequestError, match="use the backend local") as caught:
        client(start()).chat.completions.create(model="policy", messages=HI, **change)
    assert caught.value.code == "unsupported_value" and caught.value.param in ("response_format", "tool_choice")


def test_a_missing_library_is_named(ask, monkeypatch):
    def missing(module, *, extra):
        raise EvsysError(f"This needs {module}: pip install 'evsys-sdk[{extra}]'")

    monkeypatch.setattr("evsys_sdk.serving.request.need", missing)
    with pytest.raises(openai.BadRequestError, match=r"evsys-sdk\[serve\]"):
        ask(response_format=FORM)


def test_a_tinker_server_is_not_asked_for_a_grammar():
    from evsys_sdk.backends.tinker_clients import TinkerSamplingClient
    from evsys_sdk.errors import BackendError

    pytest.importorskip("tinker")
    assert not hasattr(TinkerSamplingClient, "takes_grammar")
    with pytest.raises(BackendError, match="grammar"):
        TinkerSamplingClient(None, None).sample(None, 1, SamplingParams(grammar="start: x"))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", "properties": {"a": {"type": "boolean"}}}, ['{"a": true}', "{}"], ['{"b": 1}']),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, ['{"b": 1}'], ["[]"]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, ['{"b": 1}'], ['{"b": "x"}']),
        ({"type": "object", "properties": {"properties": {"type": "null"}}}, ['{"properties": null}'], ['{"x": 1}']),
        ({"type": "object", "allOf": [{"properties": {name: {"type": "null"}}} for name in "ab"]},
         ['{"a": null, "b": null}'], ['{"a": 1}']),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, ["12", "null"], ['"x"']),
        ({"type": "array", "items": {"enum": ["x", 1]}, "maxItems": 2}, ['["x", 1]', "[]"], ['["y"]', "[1, 1, 1]"]),
    ],
)  # fmt: skip
def test_a_grammar_takes_what_the_schema_means(schema, good, bad):
    from evsys_engine.grammar import byte_vocabulary
    from evsys_sdk.backends.mock_tokenizer import BYTES_OF, END_OF_TEXT, IM_END, IM_START

    request = ChatRequest(
        model="m", messages=HI, response_format={"type": "json_schema", "json_schema": {"schema": schema}}
    )
    vocabulary = byte_vocabulary(BYTES_OF, (END_OF_TEXT, IM_START, IM_END), (IM_END,))
    import llguidance

    for text, wanted in [(text, True) for text in good] + [(text, False) for text in bad]:
        matcher = llguidance.LLMatcher(vocabulary, grammar_of(request), log_level=0)
        taken = matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()
        assert taken == wanted, text
