"""Plain verifier functions of a user: beside the event loop, one after the other, and given up without harm."""

from __future__ import annotations

import asyncio
import contextvars
import re
import threading
import time

import pytest

from evsys_sdk.backends.mock_tokenizer import ByteTokenizer
from evsys_sdk.concurrency import clock_stopped, within
from evsys_sdk.data_types import HarborTask, InProcessVerifier
from evsys_sdk.errors import Cancelled, VerifierFailed
from evsys_sdk.protocols import AgentSpec
from evsys_sdk.registry import verifiers
from evsys_sdk.rollout.engine import HarborRolloutEngine
from evsys_sdk.rollout.trial import TrialSettings, TrialTimeouts
from evsys_sdk.testing import ScriptedModel
from evsys_sdk.training.rendering import ChatRenderer
from evsys_sdk.training_api import SamplingParams
from evsys_sdk.verifiers import aside, grade
from evsys_sdk.verifiers.adapt import as_verifier

LONG = 60.0
"""Seconds until a test that went wrong ends all the same."""


@pytest.fixture
def registered(monkeypatch):
    """Verifiers of a test, gone afterwards."""
    verifiers.names()  # the built-in ones are there before the copy is made
    monkeypatch.setattr(verifiers, "entries", dict(verifiers.entries))
    return lambda name, target: verifiers.register(name)(target)


@pytest.fixture
def gate():
    """Keeps functions hanging until the test is over."""
    opened = threading.Event()
    yield opened
    opened.set()


def task(fn_name: str, task_id: str = "t") -> HarborTask:
    return HarborTask(task_id=task_id, instruction="Say x", verifier=InProcessVerifier(fn_name=fn_name, expected="x"))


async def roll(tasks: list[HarborTask], *, seconds: float, agent: AgentSpec | None = None, n: int = 1):
    engine = HarborRolloutEngine(settings=TrialSettings(limits=TrialTimeouts(verifier_seconds=seconds)))
    return await engine.roll_out(
        tasks,
        sampler=ScriptedModel(lambda _: "x"),
        renderer=ChatRenderer(ByteTokenizer()),
        sampling=SamplingParams(max_tokens=8),
        num_samples=n,
        agent=agent,
    )


async def until(happened):
    async with asyncio.timeout(LONG):
        while not happened():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("agent", [None, AgentSpec(kind="chat")], ids=["single answer", "agent"])
async def test_a_function_that_hangs_is_a_status_and_the_others_go_on(registered, gate, agent):
    if agent is not None:
        pytest.importorskip("harbor", reason="needs the extra harbor")
    registered("hangs", lambda output, expected, params: gate.wait(LONG) and 1.0)
    registered("answers", lambda output, expected, params: 1.0)
    [[stuck], [fine], [built_in]] = await roll(
        [task("hangs", "a"), task("answers", "b"), task("exact_match", "c")], seconds=2.0, agent=agent
    )
    assert (stuck.status, stuck.reward) == ("infra_error", None)
    assert re.search(r"2(\.0)? seconds", stuck.error) and stuck.turns[0].text == "x"
    assert fine.reward == built_in.reward == 1.0


async def test_the_loop_turns_while_a_function_is_at_work(registered):
    asked, answered = threading.Event(), threading.Event()

    def waits(output, expected, params):
        asked.set()
        return float(answered.wait(LONG))

    registered("waits", waits)
    graded = asyncio.ensure_future(grade(task("waits"), "x"))
    await until(asked.is_set)
    answered.set()  # only a loop that was not kept gets here
    assert (await graded).reward == 1.0


async def test_a_function_that_burns_time_in_python_is_ended_when_nobody_waits(registered):
    began, ended = threading.Event(), threading.Event()

    def burns(output, expected, params):
        try:
            began.set()
            while True:
                pass
        finally:
            ended.set()

    registered("burns", burns)
    graded = asyncio.ensure_future(grade(task("burns"), "x"))
    await until(began.is_set)
    graded.cancel()
    await until(ended.is_set)


async def test_calls_of_one_function_come_one_after_the_other_on_one_thread(registered):
    threads, inside, most = set(), [], []

    def notes(output, expected, params):
        inside.append(output)
        most.append(len(inside))
        threads.add(threading.get_ident())
        time.sleep(0.001)
        inside.remove(output)
        return 1.0

    registered("notes", notes)
    await asyncio.gather(*(grade(task("notes"), str(n)) for n in range(20)))
    assert len(most) == 20 and max(most) == 1 and len(threads) == 1
    assert threads != {threading.get_ident()}


async def test_a_call_that_takes_too_long_lets_the_next_begin_beside_it(registered, gate, monkeypatch):
    monkeypatch.setattr(aside, "SLOW_SECONDS", 0.02)
    registered("mixed", lambda output, expected, params: float(output != "slow" or gate.wait(LONG)))
    slow = asyncio.ensure_future(grade(task("mixed"), "slow"))
    await asyncio.sleep(0)
    assert (await grade(task("mixed"), "quick")).reward == 1.0
    assert not slow.done()
    gate.set()
    assert (await slow).reward == 1.0


async def test_time_in_the_line_is_not_counted(registered, gate):
    registered("hangs", lambda output, expected, params: float(gate.wait(LONG)))
    first = asyncio.ensure_future(grade(task("hangs"), "first"))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(within(grade(task("hangs"), "second"), 0.05))
    await asyncio.sleep(0.2)
    assert not second.done(), "the limit ran while it waited for its turn"
    second.cancel()
    gate.set()
    assert (await first).reward == 1.0


async def test_the_limit_begins_anew_after_the_line():
    async def work():
        with clock_stopped():
            await asyncio.sleep(0.1)
        waited.append(True)
        await asyncio.sleep(LONG)

    waited: list[bool] = []
    with pytest.raises(TimeoutError):
        await within(work(), 0.05)
    assert waited


async def test_what_a_function_raises_is_its_own_failure(registered):
    def breaks(output, expected, params):
        raise {"exit": SystemExit, "stop": StopIteration, "user": Cancelled}.get(output, ValueError)(output)

    registered("breaks", breaks)
    for said, words in {"odd": "ValueError: odd", "exit": "SystemExit: exit", "stop": "StopIteration"}.items():
        with pytest.raises(VerifierFailed, match=f"'breaks' on task 't' failed.*{words}"):
            await grade(task("breaks"), said)
    with pytest.raises(Cancelled):
        await grade(task("breaks"), "user")


async def test_a_call_within_a_time_has_failed_after_it(registered, gate):
    registered("hangs", lambda output, expected, params: gate.wait(LONG) and 1.0)
    with pytest.raises(VerifierFailed, match=r"took longer than 0\.05 seconds"):
        await grade(task("hangs"), "x", seconds=0.05)


async def test_a_function_that_needs_the_main_thread_says_what_to_do(registered):
    import signal

    registered("alarms", lambda output, expected, params: signal.signal(signal.SIGALRM, signal.SIG_DFL) and 1.0)
    with pytest.raises(VerifierFailed, match="async def"):
        await grade(task("alarms"), "x")


async def test_context_variables_reach_the_function(registered):
    found = contextvars.ContextVar("found", default=0.0)
    registered("reads", lambda output, expected, params: found.get())
    found.set(0.5)
    assert (await grade(task("reads"), "x")).reward == 0.5


def test_built_in_and_async_verifiers_stay_on_the_loop():
    async def asks(output, expected, params):
        return 1.0

    class Class:
        async def verify(self, *, prompt, completion, target):
            return 1.0

    class Plain:
        def verify(self, *, prompt, completion, target):
            return 1.0

    assert not any(as_verifier(one).is_aside for one in (verifiers.get("exact_match"), asks, Class, Class()))
    assert as_verifier(Plain).is_aside and as_verifier(Plain()).is_aside and as_verifier(lambda o, e, p: 1.0).is_aside


def test_threads_without_work_end_and_new_loops_use_those_there_are(registered, monkeypatch):
    monkeypatch.setattr(aside, "IDLE_SECONDS", 0.05)
    seen = []
    registered("who", lambda output, expected, params: float(bool(seen.append(threading.current_thread()) or True)))
    asyncio.run(grade(task("who"), "x"))
    seen[0].join(LONG)
    assert not seen[0].is_alive()
    monkeypatch.setattr(aside, "IDLE_SECONDS", LONG)
    asyncio.run(grade(task("who"), "x"))
    asyncio.run(grade(task("who"), "x"))
    assert seen[1] is seen[2] and seen[1] is not seen[0]
