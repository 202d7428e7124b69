"""Agents that inherit nothing, as harbor agents.

In: a class with `run(instruction, environment, context)` and, if it needs one, `setup(environment)`; both may be async.
Out: a harbor `BaseAgent` around it. Its constructor gets the agent's params and, of `policy`, `logs_dir` and
`model_name`, those that it names.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

from evsys_sdk.rollout.chat_agent import PolicyAgent

_HARBORS_OWN = frozenset(inspect.signature(BaseAgent.__init__).parameters) - {"self", "kwargs"}


@lru_cache(maxsize=256)
def as_harbor_agent(cls: Any) -> type[PolicyAgent]:
    """A harbor agent that makes one `cls` per rollout and hands it the work."""
    parameters = inspect.signature(cls).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {parameter.name for parameter in parameters}

    class Wrapped(PolicyAgent):
        def __init__(self, *args: Any, policy: str, **params: Any):
            own = {name: value for name, value in params.items() if name not in _HARBORS_OWN or name in named}
            super().__init__(*args, policy=policy, **{n: v for n, v in params.items() if n in _HARBORS_OWN})
            offered = {"policy": policy, "logs_dir": self.logs_dir, "model_name": self.model_name}
            self.agent = cls(**{n: v for n, v in offered.items() if takes_all or n in named} | own)

        @staticmethod
        def name() -> str:
            return cls.__name__

        async def setup(self, environment: BaseEnvironment) -> None:
            if callable(getattr(self.agent, "setup", None)):
                await _ignore_answer(self.agent.setup(environment))

        async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
            await _ignore_answer(self.agent.run(instruction, environment, context))

    Wrapped.__name__ = Wrapped.__qualname__ = cls.__name__
    return Wrapped


async def _ignore_answer(answer: Any) -> None:
    if inspect.isawaitable(answer):
        await answer
