"""The default agent, on harbor's `BaseAgent`: the model in a chat, with tools if it is given any.

In: a task's messages and the live policy. Out: an `AgentContext` with every turn's exact tokens and logprobs.
`PolicyAgent` is what an agent of one's own may start from: it has all but `run`.
"""

from __future__ import annotations

from typing import Any

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

import evsys_sdk
from evsys_sdk.data_types import task_messages
from evsys_sdk.rollout.chat import Chat, Tool, answer_calls, begin_chat, calls_in, tool_at, tool_of
from evsys_sdk.rollout.policy import Policy, live_policy
from evsys_sdk.training_api import Messages

BASH = "bash"
ANSWER_FILE = "answer.txt"


class PolicyAgent(BaseAgent):
    """An agent whose model is the one under training."""

    def __init__(self, *args: Any, policy: str, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.policy: Policy = live_policy(policy)

    @staticmethod
    def name() -> str:
        return "evsys-policy"

    def version(self) -> str:
        return evsys_sdk.__version__

    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing to install."""

    def populate_context_post_run(self, context: AgentContext) -> None:
        fill_context(self.policy, context)


class ChatAgent(PolicyAgent):
    """Asks the model, runs the tools it calls, and asks again; its last word is the answer."""

    options_model = Chat.Config

    @staticmethod
    def name() -> str:
        return "evsys-chat"

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        shown = self.options.bash_output_chars
        tools = {tool.name: tool for tool in (_tool(name, environment, shown) for name in self.options.tools)}
        history = begin_chat(self.policy.renderer, self._messages(instruction), list(tools.values()))
        observation = ""
        try:
            for number in range(1, self.options.max_turns + 1):
                turn = await self.policy.complete_tokens(history.prompt, observation=observation)
                calls = calls_in(turn.text) if tools else []
                # Calls of the last turn are not run: the model would not read what they return.
                if not calls or number == self.options.max_turns:
                    break
                with self.policy.waiting_for(f"a tool: {', '.join(name for name, _ in calls if name)}"):
                    answers = await answer_calls(calls, tools)
                history.add(turn, *answers)
                observation = "\n".join(str(answer["content"]) for answer in answers)
        finally:
            fill_context(self.policy, context)
        await self._leave_answer(environment)

    def _messages(self, instruction: str) -> Messages:
        task = self.policy.task
        messages = task_messages(task)
        # harbor may have added to the instruction (a step's own, extra instructions); images it does not know.
        if isinstance(task.instruction, str) and instruction != task.instruction:
            messages = [*messages[:-1], {"role": "user", "content": instruction}]
        return messages

    async def _leave_answer(self, environment: BaseEnvironment) -> None:
        """Where the task has an environment its tests find the answer in a file."""
        if environment.type() == "none":
            return
        file = self.logs_dir / ANSWER_FILE
        file.write_text(self.policy.final_answer, encoding="utf-8")
        await environment.upload_file(file, str(self.environment_logs_dir / ANSWER_FILE))


def fill_context(policy: Policy, context: AgentContext) -> None:
    """Put what the policy wrote down where harbor looks for it."""
    turns = policy.turns
    if not turns:
        return
    context.rollout_details = [
        {
            "prompt_token_ids": [turn.prompt_tokens for turn in turns],
            "completion_token_ids": [turn.completion_tokens for turn in turns],
            "logprobs": [turn.logprobs for turn in turns],
        }
    ]
    context.n_input_tokens = sum(len(turn.prompt_tokens) for turn in turns)
    context.n_output_tokens = sum(len(turn.completion_tokens) for turn in turns)


def _tool(name: str, environment: BaseEnvironment, shown_chars: int) -> Tool:
    if name != BASH:
        return tool_at(name)

    async def bash(command: str) -> str:
        """Run a shell command and see what it prints."""
        done = await environment.exec(command, timeout_sec=60)
        shown = "\n".join(part for part in (done.stdout, done.stderr) if part)
        left_out = len(shown) - shown_chars
        if left_out > 0:
            head = shown_chars // 2
            tail = shown[-(shown_chars - head) :]
            shown = f"{shown[:head]}\n[... {left_out} characters are left out here ...]\n{tail}"
        return f"{shown}\n[exit code {done.return_code}]" if done.return_code else shown

    return tool_of(bash)
