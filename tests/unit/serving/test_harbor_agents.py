"""harbor's own LiteLLM and its Terminus 2 agent against the endpoint: the tokens they report are those we captured."""

from __future__ import annotations

import json

import pytest

from evsys_sdk.serving import Capture, Endpoint, ServedModel, running

pytest.importorskip("harbor", reason="needs the extra harbor")


@pytest.fixture
def endpoint(renderer):
    def make(sampler, context_length=None):
        served = ServedModel(sampler=sampler, renderer=renderer, context_length=context_length)
        return Endpoint({"policy": served}, capture=Capture())

    return make


def same_turns(details, turns):
    """Whether harbor's rollout details are the captured turns, token by token."""
    return (
        details["prompt_token_ids"] == [turn.prompt_tokens for turn in turns]
        and details["completion_token_ids"] == [turn.completion_tokens for turn in turns]
        and details["logprobs"] == [turn.logprobs for turn in turns]
    )


async def test_a_chat_of_harbors_litellm_has_the_captured_tokens(endpoint, model):
    from harbor.llms.chat import Chat
    from harbor.llms.lite_llm import LiteLLM

    made = endpoint(model(lambda asked: f"you said {asked}"))
    async with running(made) as found:
        llm = LiteLLM(
            "openai/policy",
            api_base=found.base_url(),
            session_id="trial-7",
            collect_rollout_details=True,
            api_key="unused",
        )
        chat = Chat(llm)
        assert (await chat.chat("one")).content == "you said one"
        assert (await chat.chat("two")).content == "you said two"
    turns = made.capture.take("trial-7")
    assert len(turns) == 2 and same_turns(chat.rollout_details[0], turns)
    assert chat.total_output_tokens == sum(len(turn.completion_tokens) for turn in turns)


async def test_a_long_prompt_is_the_error_that_harbor_knows(endpoint, model):
    from harbor.llms.base import ContextLengthExceededError, OutputLengthExceededError
    from harbor.llms.lite_llm import LiteLLM

    made = endpoint(model(default="y" * 300), context_length=100)
    async with running(made) as found:
        llm = LiteLLM("openai/policy", api_base=found.base_url(), api_key="unused")
        with pytest.raises(ContextLengthExceededError):
            await llm.call("x" * 200)
        with pytest.raises(OutputLengthExceededError):
            await llm.call("x")


async def test_a_real_model_has_the_tokens_that_harbor_saw_cut_off(endpoint, tmp_path, tiny_engine):
    from harbor.llms.base import OutputLengthExceededError
    from harbor.llms.lite_llm import LiteLLM

    from evsys_sdk.backends.local import LocalService
    from evsys_sdk.training.rendering import ChatRenderer

    service = LocalService(tiny_engine, tmp_path)
    try:
        served = ServedModel(
            sampler=await service.create_sampling_client(),
            renderer=ChatRenderer(service.get_tokenizer()),
            context_length=tiny_engine.info.max_length,
        )
        made = Endpoint({"tiny": served}, capture=Capture())
        async with running(made) as found:
            url = found.base_url("s")
            # Greedy: drawn at random, one answer in a few hundred ends by itself.
            llm = LiteLLM("openai/tiny", temperature=0, api_base=url, api_key="unused", collect_rollout_details=True)
            with pytest.raises(OutputLengthExceededError) as caught:
                await llm.call("hi", max_tokens=5)
        turn = made.capture.take("s")[0]
        assert caught.value.truncated_response == turn.text and len(turn.completion_tokens) == 5
    finally:
        service.close()


class Terminal:
    """An environment whose shell answers every command with nothing; what was typed is kept."""

    default_user = None

    def __init__(self):
        self.commands = []

    async def exec(self, command, **options):
        from harbor.environments.base import ExecResult

        self.commands.append(command)
        return ExecResult(stdout="", stderr="", return_code=0)


async def test_terminus_2_works_on_a_task_through_the_endpoint(endpoint, model, tmp_path):
    from harbor.agents.terminus_2.terminus_2 import Terminus2
    from harbor.models.agent.context import AgentContext

    step = {"analysis": "a", "plan": "p", "commands": [{"keystrokes": "echo hi\n", "duration": 0.1}]}
    done = {"analysis": "a", "plan": "p", "commands": [], "task_complete": True}
    replies = iter([step, done, done])
    made, terminal, context = endpoint(model(lambda asked: json.dumps(next(replies)))), Terminal(), AgentContext()
    async with running(made) as found:
        agent = Terminus2(
            logs_dir=tmp_path,
            model_name="openai/policy",
            api_base=found.base_url("rollout-1"),
            collect_rollout_details=True,
            record_terminal_session=False,
            enable_summarize=False,
            llm_kwargs={"api_key": "unused"},
        )
        await agent.setup(terminal)
        await agent.run("say hi", terminal, context)
    turns = made.capture.take("rollout-1")
    assert len(turns) == 3 and same_turns(context.rollout_details[0], turns)
    assert json.loads(turns[0].text) == step and any("echo hi" in command for command in terminal.commands)
    assert context.n_output_tokens == sum(len(turn.completion_tokens) for turn in turns)
