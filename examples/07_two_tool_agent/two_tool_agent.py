"""A harness with two tools for a model to be trained in: which one to ask, and what to say then.

In: a question about a stone ("Is the red stone heavy?", "Is it long?") and the live policy. Out: a short chat. The
model's first words choose the tool: a digit asks the scale, a letter the ruler. It then hears what the tool says and
answers: a capital letter means yes, a small one no. Replies are read this generously so that even a model that babbles
gets it right now and then; that is all reinforcement learning needs.

A harness of your own looks the same: any harbor BaseAgent that takes `policy`, the name of the model under training.
"""

from __future__ import annotations

from harbor.agents.base import BaseAgent

from evsys_sdk import register_verifier
from evsys_sdk.rollout.policy import live_policy


def scale(stone: dict) -> str:
    """How much does it weigh?"""
    return f"the scale says {stone['weight']}"


def ruler(stone: dict) -> str:
    """How long is it?"""
    return f"the ruler says {stone['length']}"


class TwoToolAgent(BaseAgent):
    """Lets the model use a scale or a ruler before it answers."""

    def __init__(self, *args, policy: str, max_turns: int = 2, **kwargs):
        super().__init__(*args, **kwargs)
        self.policy = live_policy(policy)
        self.max_turns = max_turns

    @staticmethod
    def name() -> str:
        return "two-tools"

    def version(self) -> str:
        return "1"

    async def setup(self, environment) -> None: ...

    async def run(self, instruction, environment, context) -> None:
        messages = [{"role": "user", "content": instruction}]
        used = []
        for _ in range(self.max_turns - 1):
            turn = await self.policy.complete(messages)
            tool = self.chosen(turn.text)
            if tool is None:
                break
            used.append(tool.__name__)
            said = tool(self.policy.task.metadata)
            messages += [{"role": "assistant", "content": turn.text}, {"role": "tool", "content": said}]
        if used:
            turn = await self.policy.complete(messages)
        # What the verifier looks at; without this it would be the model's last words.
        self.policy.answer = f"{', '.join(used) or 'nothing'}: {self.meaning(turn.text)}"
        context.metadata = {"tools": used}

    def chosen(self, text: str):
        if text[:1].isdigit():
            return scale
        return ruler if text[:1].isalpha() else None

    def meaning(self, text: str) -> str:
        return "yes" if text[:1].isupper() else "no" if text[:1].islower() else "unclear"


@register_verifier("tool_then_answer")
def tool_then_answer(completion: str, expected: str) -> float:
    """Half for the right tool, and the other half for the right answer after it."""
    tool, _, answer = completion.partition(": ")
    right_tool, _, right_answer = expected.partition(": ")
    return 0.5 * (tool == right_tool) + 0.5 * (tool == right_tool and answer == right_answer)
