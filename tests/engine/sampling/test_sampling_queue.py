"""Many callers of one sampler."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tiny_models import tiny_tokenizer

from evsys_engine import sampling
from evsys_engine.sample_queue import SampleQueue
from evsys_engine.types import BadRequest, EngineError, SampleRequest


@pytest.fixture
def queue(sampler):
    opened = []

    def make(one=None, window_seconds=0.05):
        opened.append(SampleQueue(one or sampler(), window_seconds=window_seconds))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


@pytest.fixture
def steps(monkeypatch):
    """How many rows each decoding step had."""
    counts = []
    step = sampling.Run._step

    def counted(run):
        counts.append(len(run._live))
        step(run)

    monkeypatch.setattr(sampling.Run, "_step", counted)
    return counts


def request(i, **settings):
    return SampleRequest(**{"tokens": [i + 1, 2 * i + 1], "max_tokens": 6, "seed": i, **settings})


def test_requests_of_many_threads_become_one_batch(sampler, queue, steps):
    one = sampler()
    alone = [one.sample([request(i)])[0].rows[0].tokens for i in range(12)]
    steps.clear()
    line = queue(one)
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda i: line.submit(request(i)).result(30).rows[0].tokens, range(12)))
    assert found == alone
    assert steps[0] == 12 and len(steps) == 5


async def test_tasks_can_wait_for_their_answers(queue):
    line = queue()
    answers = await asyncio.gather(*(asyncio.wrap_future(line.submit(request(i))) for i in range(5)))
    assert [len(answer.rows[0].tokens) for answer in answers] == [6] * 5


def test_a_late_request_joins_the_running_batch(queue, steps, monkeypatch):
    line = queue(window_seconds=0.0)
    first = line.submit(request(0, max_tokens=100))
    while not steps:
        time.sleep(0.001)
    second = line.submit(request(1, max_tokens=2)).result(30)
    assert len(second.rows[0].tokens) == 2 and not first.done()
    assert len(first.result(30).rows[0].tokens) == 100 and max(steps) == 2


def test_a_bad_request_fails_alone(queue):
    line = queue()
    good = [line.submit(request(i)) for i in range(3)]
    bad = line.submit(SampleRequest(tokens=[]))
    with pytest.raises(BadRequest, match="empty"):
        bad.result(5)
    assert all(len(answer.result(30).rows[0].tokens) == 6 for answer in good)


def test_a_tokenizer_that_breaks_fails_only_the_request_that_needs_it(sampler, queue):
    class Broken:
        eos_token_id = None

        def decode(self, *args, **kwargs):
            raise ValueError("cannot decode this")

    line = queue(sampler(tokenizer=Broken()))
    good, bad = line.submit(request(0)), line.submit(request(1, stop=("x",), num_samples=3))
    with pytest.raises(ValueError, match="cannot decode"):
        bad.result(30)
    assert len(good.result(30).rows[0].tokens) == 6


def test_an_error_of_a_whole_batch_is_told_to_all_in_it_and_the_next_batch_works(sampler, queue, monkeypatch):
    one = sampler()
    one.sample([request(0)])
    decoder = one._decoder()
    with monkeypatch.context() as patch:
        patch.setattr(type(decoder), "step", lambda *args: (_ for _ in ()).throw(MemoryError("too large")))
        line = queue(one)
        answers = [line.submit(request(i)) for i in range(2)]
        for answer in answers:
            with pytest.raises(MemoryError):
                answer.result(30)
    assert len(line.submit(request(0)).result(30).rows[0].tokens) == 6


def test_nobody_waits_for_weights_that_cannot_be_had(sampler, queue):
    one = sampler()
    line = queue(one)
    one.close()
    with pytest.raises(EngineError, match="closed"):
        line.submit(request(0)).result(30)


def test_first_come_first_served(sampler, queue):
    one = sampler()
    one.max_rows = 2
    line, order = queue(one), []
    answers = [line.submit(request(i, num_samples=2, max_tokens=2)) for i in range(5)]
    for i, answer in enumerate(answers):
        answer.add_done_callback(lambda _, i=i: order.append(i))
    [answer.result(30) for answer in answers]
    assert order == [0, 1, 2, 3, 4]


def test_a_cancelled_request_is_not_sampled(queue, steps):
    line = queue(window_seconds=0.3)
    cancelled, kept = line.submit(request(0)), line.submit(request(1))
    assert cancelled.cancel()
    assert len(kept.result(30).rows[0].tokens) == 6 and max(steps) == 1


def test_closing_breaks_off_what_runs_and_what_waits_and_leaves_no_thread(sampler, queue, steps):
    one = sampler(tokenizer=tiny_tokenizer())
    one.max_rows = 1
    line = queue(one, window_seconds=0.0)
    answers = [line.submit(request(i, max_tokens=120)) for i in range(3)]
    while not steps:
        time.sleep(0.001)
    line.close()
    for answer in answers:
        with pytest.raises(EngineError, match="closed"):
            answer.result(5)
    assert not any(thread.name == "evsys-sample-queue" for thread in threading.enumerate())
    with pytest.raises(EngineError, match="closed"):
        line.submit(request(0)).result(5)
