"""Live policies by name: how an agent reaches the model under training.

In: a sampler, a renderer and sampling params, for one rollout. Out: completions, and a record of every exchange with
the exact tokens read and written. Agents are described by plain JSON, so they are handed a name and look the policy up
here.

A prompt that does not fit into the model's context is the agent's doing, and `ContextTooLong` tells it so. What the
sampler does wrong is not the agent's doing: time-outs and lost connections are tried again, and in the end
raised as `BackendUnavailable`, which no time limit can be mistaken for. An agent that swallows it changes nothing: the
policy remembers that its last word failed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal, Protocol
from weakref import WeakKeyDictionary

from evsys_sdk.concurrency import apause_before_retry
from evsys_sdk.data_types import HarborTask
from evsys_sdk.errors import READABLE, BackendError, BackendUnavailable, Cancelled, EvsysError
from evsys_sdk.protocols import Renderer, Turn
from evsys_sdk.training_api import (
    Messages,
    ModelInput,
    SampledSequence,
    SampleOutput,
    SamplingClient,
    SamplingParams,
    derive_seed,
    text_of,
)

# Fair shares of the event loop.
#
# In: nothing. Out: a pause where one is due. Answers to hundreds of rollouts arrive together, and asyncio would go
# through all that follows from them before it looks at anything else; what else is on the loop (training, other
# rollouts' sockets) gets its turn every few milliseconds instead.


SHARE_SECONDS = 0.001
"""What rollouts may take of one pass of the loop. A pass itself costs some 15 us, and twice the share where the next
rollouts take longer than the last ones did."""


class _Share:
    """The rollouts' part of the loop's passes; those that do not fit into one wait in line for the next."""

    def __init__(self) -> None:
        self.line: deque[asyncio.Future[None]] = deque()
        self.began = 0.0
        self.turns = 0
        """Taken in this pass."""
        self.planned = False

    def place_in_line(self) -> asyncio.Future[None] | None:
        """What to wait for; None for one that need not wait."""
        if not self.planned:
            self._plan(turns=0)
        if not self.line and time.perf_counter() - self.began < SHARE_SECONDS:
            self.turns += 1
            return None
        self.line.append(asyncio.get_running_loop().create_future())
        return self.line[-1]

    def _plan(self, turns: int) -> None:
        self.planned, self.began, self.turns = True, time.perf_counter(), turns
        asyncio.get_running_loop().call_soon(self._next_pass)

    def _next_pass(self) -> None:
        """Let in as many as fit, going by what those of the pass before took."""
        self.planned = False
        if not self.line:
            return
        # At least one enters, or the line would never move; 1e-6 is for a clock that has not moved.
        each = (time.perf_counter() - self.began) / max(1, self.turns)
        room = min(len(self.line), max(1, int(SHARE_SECONDS / max(each, 1e-6))))
        for waiting in [self.line.popleft() for _ in range(room)]:
            if not waiting.done():
                waiting.set_result(None)
        self._plan(turns=room)  # behind those that were let in, so that it sees what they took


_shares: WeakKeyDictionary[asyncio.AbstractEventLoop, _Share] = WeakKeyDictionary()


async def take_turn() -> None:
    """Continue in this pass of the loop, or in a later one when this one has done enough for rollouts."""
    loop = asyncio.get_running_loop()
    share = _shares.get(loop)
    if share is None:
        share = _shares[loop] = _Share()
    wait = share.place_in_line()
    if wait is not None:
        await wait


# Timeouts and lost connections of a sampler are OSErrors: infrastructure, worth another try, never a grade.
RETRIED = (BackendError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRetryPolicy:
    """How often, and after how long, a lost call is made again."""

    retries: int = 2
    backoff_seconds: float = 0.2
    sleep: Callable[[float], Awaitable[None]] = apause_before_retry

    def wait_before(self, attempt: int) -> Awaitable[None]:
        """Before try number `attempt`, counted from 0, is made again."""
        return self.sleep(self.backoff_seconds * 2**attempt)


async def sample(
    sampler: SamplingClient, prompt: list[int], n: int, sampling: SamplingParams, retry_policy: SampleRetryPolicy
) -> SampleOutput:
    """The sampler's answer; lost calls are repeated by the retry policy."""
    asked = ModelInput.from_ints(prompt)
    attempt = 0
    while True:
        try:
            output = await sampler.sample(asked, n, sampling)
        except BackendUnavailable:  # the backend has tried for as long as it makes sense
            raise
        except RETRIED:
            if attempt == retry_policy.retries:
                raise
            await retry_policy.wait_before(attempt)
            attempt += 1
        else:
            await take_turn()
            return output


def check_logprobs(sequence: SampledSequence) -> SampledSequence:
    """The sequence, if every token has its logprob; anything else would shift what is learnt."""
    if len(sequence.tokens) != len(sequence.logprobs):
        raise BackendError(f"the sampler gave {len(sequence.tokens)} tokens with {len(sequence.logprobs)} logprobs")
    return sequence


def say(exc: BaseException) -> str:
    """An exception in a sentence; ours explain themselves."""
    return str(exc) if isinstance(exc, READABLE) else f"{type(exc).__name__}: {exc}"


class ContextTooLong(EvsysError):
    """An agent asked the model with more than it can read."""


@dataclass(slots=True, kw_only=True)
class Policy:
    """The model under training, for one rollout; it writes down what is said."""

    task: HarborTask
    sampler: SamplingClient
    renderer: Renderer
    sampling: SamplingParams
    """With the rollout's own seed; each turn draws with one derived from it."""
    retry_policy: SampleRetryPolicy = field(default_factory=SampleRetryPolicy)
    name: str = ""
    """What it is looked up by while it is live."""
    turns: list[Turn] = field(default_factory=list)
    """Every exchange so far."""
    stop_reason: str | None = None
    """Of the last turn."""
    failure: str | None = None
    """Why the sampler's last call failed for good; None after one that worked."""
    waiting: str = ""
    """Whom the agent is waiting for, or was when the rollout was stopped."""
    context_length: int | None = None
    """Tokens that prompt and completion may have together, where that is known."""
    answer: str | None = None
    """What the agent gives as its answer, where that is not simply what the model said last."""
    calls: int = 0
    """To the sampler, in this try."""

    def begin_again(self) -> None:
        """Forget what was said: another try at the task begins, and draws what the first would have drawn."""
        self.turns, self.calls, self.waiting = [], 0, ""
        self.stop_reason = self.failure = self.answer = None

    async def complete(self, messages: Messages, **changes: object) -> Turn:
        """What the model says next in this chat; `changes` are sampling params, such as `max_tokens=32`."""
        return await self.complete_tokens(self.renderer.prompt(messages), **changes)  # type: ignore[arg-type]

    async def complete_tokens(self, prompt: list[int], *, observation: str | None = None, **changes: object) -> Turn:
        """What the model writes after exactly these tokens. `observation`: the text of what is new in them; without it,
        the tokens behind the turn before, where the prompt continues from it."""
        if observation is None:
            observation = self._observation_in(prompt)
        sequence = await self._sequence(prompt, changes)
        turn = Turn(
            prompt_tokens=prompt,
            completion_tokens=sequence.tokens,
            logprobs=sequence.logprobs,
            text=text_of(sequence.tokens, self.renderer.tokenizer),
            observation=observation,
        )
        self.turns.append(turn)
        self.stop_reason = sequence.stop_reason
        return turn

    def _observation_in(self, prompt: list[int]) -> str:
        if not self.turns:
            return ""
        known = [*self.turns[-1].prompt_tokens, *self.turns[-1].completion_tokens]
        goes_on = prompt[: len(known)] == known
        return self.renderer.tokenizer.decode(prompt[len(known) :]).strip() if goes_on else ""

    async def _sequence(self, prompt: list[int], changes: dict[str, object]) -> SampledSequence:
        # By calls and not by turns: an agent that asks again after a failed call gets another draw, and a new try
        # (`begin_again`) counts from 0 and repeats the first one's draws.
        seed = derive_seed(self.sampling.seed, "turn", self.calls)
        params = self._fitting(prompt, replace(self.sampling, seed=seed, **changes))  # type: ignore[arg-type]
        self.calls += 1
        try:
            with self.waiting_for("the model"):
                output = await sample(self.sampler, prompt, 1, params, self.retry_policy)
            if not output.sequences:
                raise BackendError("the sampler returned no completion")
            sequence = check_logprobs(output.sequences[0])
        except Cancelled:
            raise
        except Exception as exc:
            self.failure = say(exc)
            raise BackendUnavailable(self.failure) from exc
        self.failure = None
        return sequence

    def _fitting(self, prompt: list[int], params: SamplingParams) -> SamplingParams:
        """The params, with no more tokens to write than there is room for."""
        if self.context_length is None:
            return params
        room = self.context_length - len(prompt)
        if room < 1:
            raise ContextTooLong(
                f"the prompt has {len(prompt)} tokens, and the model's context length is {self.context_length}: "
                "shorten what the model is shown, or let it take fewer turns"
            )
        return replace(params, max_tokens=min(params.max_tokens, room))

    @contextmanager
    def waiting_for(self, whom: str) -> Iterator[None]:
        """Note whom the agent waits for; the note stays when the rollout is stopped meanwhile."""
        self.waiting = whom
        try:
            yield
        except asyncio.CancelledError:
            raise
        except BaseException:
            self.waiting = ""
            raise
        self.waiting = ""

    @property
    def final_answer(self) -> str:
        """What a verifier looks at."""
        return self.answer if self.answer is not None else self.turns[-1].text if self.turns else ""


@dataclass(frozen=True, slots=True)
class PolicySampler:
    """A policy as a sampling client, for an endpoint to serve: what is asked of it is written down like any other turn.

    How to draw is the policy's business and not the caller's: only how much to write, and where to stop, is asked for.
    """

    policy: Policy

    async def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams, **_: object
    ) -> SampleOutput:
        limit = min(sampling_params.max_tokens, self.policy.sampling.max_tokens)
        return SampleOutput(
            sequences=[await self._one(prompt, limit, sampling_params.stop) for _ in range(num_samples)]
        )

    async def _one(self, prompt: ModelInput, limit: int, stop: tuple[str | int, ...]) -> SampledSequence:
        turn = await self.policy.complete_tokens(prompt.to_ints(), max_tokens=limit, stop=stop)
        reason: Literal["stop", "length"] = "length" if self.policy.stop_reason == "length" else "stop"
        return SampledSequence(tokens=turn.completion_tokens, logprobs=turn.logprobs, stop_reason=reason)

    def compute_logprobs(self, prompt: ModelInput) -> Awaitable[list[float | None]]:
        return self.policy.sampler.compute_logprobs(prompt)


class HttpFront(Protocol):
    """Where can an agent that only speaks HTTP reach this policy?"""

    def open(self, policy: Policy) -> str:
        """A base URL at which the model called `policy.name` answers as OpenAI's would."""
        ...

    def close(self, policy: Policy) -> None: ...


_live: dict[str, Policy] = {}
_numbers = count(1)


@contextmanager
def live(policy: Policy) -> Iterator[Policy]:
    """The policy under a new name, by which agents can look it up until the rollout is over."""
    policy.name = f"rollout-{next(_numbers)}-{secrets.token_hex(4)}"  # trials of other processes may lie beside ours
    _live[policy.name] = policy
    try:
        yield policy
    finally:
        del _live[policy.name]


def live_policy(name: str) -> Policy:
    """The live policy of this name, which an agent gets as `policy`."""
    try:
        return _live[name]
    except KeyError:
        raise EvsysError(f"there is no live policy {name!r}: a policy lives as long as its rollout") from None
