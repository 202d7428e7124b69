"""A request to stop ends every wait for another try; it does not end what only takes long."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from evsys_sdk.backends.tinker_watch import Watch
from evsys_sdk.concurrency import heed_stop, on_thread, pause_before_retry, run_async
from evsys_sdk.errors import BackendError, BackendUnavailable, Cancelled
from evsys_sdk.eval.model_eval import acall_with_retry, call_with_retry
from evsys_sdk.retry import RetryPolicy
from evsys_sdk.rollout.policy import SampleRetryPolicy, sample
from evsys_sdk.training_api import SamplingParams

POLICY = RetryPolicy(max_retries=3, max_wait_seconds=0.5, timeout_seconds=300)


class Failing:
    """A call that is refused, and during which the user asks for a stop."""

    def __init__(self, stop, *, at=1):
        self.stop, self.at, self.calls = stop, at, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls == self.at:
            self.stop.set()
        raise ConnectionRefusedError("refused")

    async def awaited(self, *args):
        self()

    sample = awaited


RETRIES = {
    "hosted model": lambda call: run_async(POLICY.ask("them", call.awaited)),
    "sampler": lambda call: run_async(sample(call, [1], 1, SamplingParams(), SampleRetryPolicy(retries=3))),
    "model evaluation": lambda call: run_async(acall_with_retry(call.awaited, base_delay_seconds=0.2)),
    "plain model evaluation": lambda call: call_with_retry(call, base_delay_seconds=0.2),
}


@pytest.mark.parametrize("retry", RETRIES.values(), ids=RETRIES)
@pytest.mark.parametrize("at", [1, 2])
def test_no_further_try_is_made_after_a_request_to_stop(retry, at):
    call = Failing(stop := threading.Event(), at=at)
    with heed_stop(stop), pytest.raises(Cancelled):
        retry(call)
    assert call.calls == at


def test_a_second_try_under_way_is_ended_too():
    stop, tries = threading.Event(), []

    async def call():
        tries.append(len(tries))
        if len(tries) == 1:
            raise ConnectionRefusedError
        stop.set()
        await asyncio.Event().wait()

    with heed_stop(stop), pytest.raises(Cancelled):
        run_async(POLICY.ask("them", call))
    assert len(tries) == 2


def test_a_first_try_under_way_belongs_to_the_step_and_is_finished():
    stop = threading.Event()

    async def call():
        stop.set()
        await asyncio.sleep(0.3)
        return "answer"

    with heed_stop(stop):
        assert run_async(POLICY.ask("them", call)) == ("answer", 1)


def test_the_request_reaches_threads_and_loops_that_a_run_starts():
    stop = threading.Event()
    stop.set()

    async def waits():
        await on_thread(lambda: pause_before_retry(300))

    async def inside_a_loop():
        return run_async(waits())  # as in a notebook: on a thread with a loop of its own

    with heed_stop(stop), pytest.raises(Cancelled):
        asyncio.run(inside_a_loop())


def test_outside_a_run_nothing_changes():
    stop = threading.Event()
    with heed_stop(stop):
        pass
    stop.set()
    with pytest.raises(BackendUnavailable):
        run_async(RetryPolicy(max_retries=1, max_wait_seconds=0.01, timeout_seconds=1).ask("x", Failing(stop).awaited))


class TestTinkerCalls:
    """Calls that the tinker client itself repeats without an end."""

    @staticmethod
    def answer(watch, call):
        stop = threading.Event()
        stop.set()
        with heed_stop(stop):
            return run_async(watch.answer(call, "sampling"))

    def test_a_call_to_a_server_that_fails_is_ended(self):
        watch = Watch("http://server", 300.0)

        async def repeat():
            while True:
                watch.note("asample", time.monotonic(), "status 503")
                await asyncio.sleep(0.01)

        with pytest.raises(Cancelled):
            self.answer(watch, repeat())

    def test_a_slow_answer_is_waited_for_although_another_call_failed_before(self):
        watch = Watch("http://server", 300.0)
        watch.note("asample", time.monotonic(), "status 503")

        async def slow():
            await asyncio.sleep(1.2)  # longer than one look at the watch
            return "saved"

        assert self.answer(watch, slow()) == "saved"


def test_a_policy_that_is_no_retry_fails_as_before():
    with heed_stop(threading.Event()), pytest.raises(BackendError):
        run_async(
            RetryPolicy(max_retries=0, max_wait_seconds=1, timeout_seconds=1).ask(
                "x", Failing(threading.Event()).awaited
            )
        )
