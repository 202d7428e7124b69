"""The stand-ins that tests are written with, ours and other people's."""

from __future__ import annotations

import pytest

from evsys_sdk.config.schema import ModelConfig
from evsys_sdk.errors import BackendError
from evsys_sdk.testing import MemoryLog, RecordingBackend, ScriptedModel
from evsys_sdk.training_api import AdamParams, ModelInput, SamplingClient, SamplingParams, text_of


def _prompt(model, *questions):
    messages = [{"role": "user", "content": question} for question in questions]
    return ModelInput.from_ints(model.tokenizer.apply_chat_template(messages, add_generation_prompt=True))


async def _say(model, question, count=1, **params):
    output = await model.sample(_prompt(model, question), count, SamplingParams(**params))
    return [text_of(sequence.tokens, model.tokenizer) for sequence in output.sequences]


async def test_a_scripted_model_answers_the_last_user_message():
    model = ScriptedModel({"2+2?": "4", "3+3?": "6"})
    output = await model.sample(_prompt(model, "2+2?", "3+3?"), 2, SamplingParams())
    assert [text_of(s.tokens, model.tokenizer) for s in output.sequences] == ["6", "6"]
    assert output.sequences[0].tokens == [ord("6"), model.tokenizer.eos_token_id]
    assert isinstance(model, SamplingClient)


async def test_a_function_can_write_the_script():
    assert await _say(ScriptedModel(lambda question: question.upper()), "shout") == ["SHOUT"]


async def test_a_list_of_answers_is_gone_through_sample_by_sample():
    assert await _say(ScriptedModel({"q": ["a", "b"]}), "q", count=3) == ["a", "b", "a"]


async def test_a_question_that_is_not_in_the_script_is_an_error_or_the_default():
    with pytest.raises(BackendError, match="the script has no answer to 'what"):
        await _say(ScriptedModel({}), "what?")
    assert await _say(ScriptedModel({}, default="dunno"), "what?") == ["dunno"]


async def test_an_exception_in_the_script_is_raised_when_awaited():
    model = ScriptedModel({"q": TimeoutError("slow")})
    call = model.sample(_prompt(model, "q"), 1, SamplingParams())
    with pytest.raises(TimeoutError, match="slow"):
        await call


async def test_lengths_and_stop_strings_are_kept():
    model = ScriptedModel({"q": "abcdef"})
    assert await _say(model, "q", max_tokens=3) == ["abc"]
    assert await _say(model, "q", stop=("d",)) == ["abc"]
    output = await model.sample(_prompt(model, "q"), 1, SamplingParams(max_tokens=3))
    assert output.sequences[0].stop_reason == "length"


async def test_a_scripted_model_keeps_the_prompts():
    model = ScriptedModel({}, default="x")
    await _say(model, "hello")
    assert model.prompts == ["<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"]
    assert await model.compute_logprobs(ModelInput.from_ints([1, 2, 3])) == [None, 0.0, 0.0]


async def test_a_recording_backend_writes_down_what_happens_to_each_call(tmp_path):
    backend = RecordingBackend()
    service = backend.prepare(model=ModelConfig(name="m"), run_dir=tmp_path)["service"]
    client = await service.create_training_client(rank=1, seed=1)
    call = client.optim_step(AdamParams(learning_rate=0.5))
    assert backend.order("optim_step") == ["submitted optim_step"]
    await call
    assert backend.order("optim_step") == ["submitted optim_step", "awaited optim_step", "answered optim_step"]
    assert backend.events[-3].args == (AdamParams(learning_rate=0.5),)
    assert len({event.number for event in backend.events[-3:]}) == 1
    assert backend.name == "mock" and backend.seconds_inside > 0


async def test_a_recording_backend_writes_down_failures(tmp_path):
    backend = RecordingBackend()
    service = backend.prepare(model=ModelConfig(name="m"), run_dir=tmp_path)["service"]
    with pytest.raises(BackendError):
        await service.create_sampling_client("nowhere")
    assert backend.order()[-1] == "failed create_sampling_client"


def test_a_memory_log_keeps_curves():
    log = MemoryLog()
    log.log_metrics({"loss": 2.0}, 1)
    log.log_scalar("loss", 1.0, 2)
    assert log.curve("loss") == [2.0, 1.0]
