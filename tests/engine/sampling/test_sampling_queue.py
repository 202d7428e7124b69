"""Many callers of one sampler."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from tiny_models import tiny_tokenizer

from evsys_engine import scheduler
from evsys_engine.sample_queue import SampleQueue
from evsys_engine.types import BadRequest, EngineError, SampleRequest

LONG = 60.0
"""Seconds until a test that went wrong ends all the same."""


@pytest.fixture
def queue(sampler):
    opened = []

    def make(one=None, window_seconds=0.05):
        opened.append(SampleQueue(one or sampler(), window_seconds=window_seconds))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


class Steps(list):
    """How many rows each decoding step had. While the gate is shut, no step ends."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()


@pytest.fixture
def steps(monkeypatch):
    counts = Steps()
    step = scheduler.Run._step

    def counted(run):
        counts.append(len(run._live))
        counts.gate.wait(LONG)
        step(run)

    monkeypatch.setattr(scheduler.Run, "_step", counted)
    yield counts
    counts.gate.set()


def until(happened):
    deadline = time.monotonic() + LONG
    while not happened():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.001)


class Window(threading.Event):
    """A queue's wait for company that ends when `happened`, and not by the clock."""

    def __init__(self, happened):
        super().__init__()
        self.happened = happened

    def wait(self, timeout=None):
        until(self.happened)
        return False


def request(i, **settings):
    return SampleRequest(**{"tokens": [i + 1, 2 * i + 1], "max_tokens": 6, "seed": i, **settings})


def test_requests_of_many_threads_become_one_batch(sampler, queue, steps):
    one = sampler()
    alone = [one.sample([request(i)])[0].sequences[0].tokens for i in range(12)]
    steps.clear()
    line = queue(one)
    line._closing = Window(lambda: len(line._waiting) == 12)
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda i: line.submit(request(i)).result(LONG).sequences[0].tokens, range(12)))
    assert found == alone
    assert steps[0] == 12 and len(steps) == 5


async def test_tasks_can_wait_for_their_answers(queue):
    line = queue()
    answers = await asyncio.gather(*(asyncio.wrap_future(line.submit(request(i))) for i in range(5)))
    assert [len(answer.sequences[0].tokens) for answer in answers] == [6] * 5


def test_a_late_request_joins_the_running_batch(queue, steps):
    line, order = queue(window_seconds=0.0), []
    steps.gate.clear()
    first = line.submit(request(0, max_tokens=100))
    until(lambda: steps)
    second = line.submit(request(1, max_tokens=2))
    for name, answer in (("first", first), ("second", second)):
        answer.add_done_callback(lambda _, name=name: order.append(name))
    steps.gate.set()
    assert len(second.result(LONG).sequences[0].tokens) == 2 and len(first.result(LONG).sequences[0].tokens) == 100
    until(lambda: len(order) == 2)
    assert order == ["second", "first"] and max(steps) == 2


def test_a_bad_request_fails_alone(queue):
    line = queue()
    good = [line.submit(request(i)) for i in range(3)]
    bad = line.submit(SampleRequest(tokens=[]))
    with pytest.raises(BadRequest, match="empty"):
        bad.result(LONG)
    assert all(len(answer.result(LONG).sequences[0].tokens) == 6 for answer in good)


def test_a_tokenizer_that_breaks_fails_only_the_request_that_needs_it(sampler, queue):
    class Broken:
        eos_token_id = None

        def decode(self, *args, **kwargs):
            raise ValueError("cannot decode this")

    line = queue(sampler(tokenizer=Broken()))
    good, bad = line.submit(request(0)), line.submit(request(1, stop=("x",), num_samples=3))
    with pytest.raises(ValueError, match="cannot decode"):
        bad.result(LONG)
    assert len(good.result(LONG).sequences[0].tokens) == 6


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
                answer.result(LONG)
    assert len(line.submit(request(0)).result(LONG).sequences[0].tokens) == 6


@pytest.mark.parametrize("where", ["prefill", "step"])
@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_request_that_breaks_its_batch_fails_alone(sampler, queue, monkeypatch, where, place):
    one = sampler()
    requests = [request(i, num_samples=2, prompt_logprobs=True) for i in range(7)]
    alone = [one.sample([each])[0] for each in requests]
    poison = requests[place].tokens if where == "prefill" else alone[place].sequences[0].tokens[2]
    decoder = one._decoder()
    whole = getattr(type(decoder), where)

    def broken(self, first, second, *arguments, **options):
        held = [list(prompt) for prompt in first] if where == "prefill" else second
        if poison in held:
            raise RuntimeError("shapes cannot be multiplied")
        return whole(self, first, second, *arguments, **options)

    spoiled = {place}
    if where == "step":  # others may write the same token; they break their batches too
        spoiled = {i for i, found in enumerate(alone) if any(poison in row.tokens[:-1] for row in found.sequences)}
        assert place in spoiled and len(spoiled) < 7
    monkeypatch.setattr(type(decoder), where, broken)
    line = queue(one)
    line._closing = Window(lambda: len(line._waiting) == 7)
    answers = [line.submit(each) for each in requests]
    for i, answer in enumerate(answers):
        if i in spoiled:
            with pytest.raises(RuntimeError, match="shapes"):
                answer.result(LONG)
        else:
            assert answer.result(LONG) == alone[i]
    line._closing = threading.Event()
    good = min({*range(7)} - spoiled)
    assert line.submit(requests[good]).result(LONG) == alone[good]


def test_a_list_of_requests_is_refused_for_the_one_that_breaks_it(sampler, monkeypatch):
    one = sampler()
    decoder = one._decoder()
    prefill = type(decoder).prefill

    def broken(self, prompts, *arguments, **options):
        if any(list(prompt) == [3, 5] for prompt in prompts):
            raise RuntimeError("shapes cannot be multiplied")
        return prefill(self, prompts, *arguments, **options)

    monkeypatch.setattr(type(decoder), "prefill", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        one.sample([request(i) for i in range(4)])


def test_closing_ends_jobs_that_are_decoded_again(sampler, queue, monkeypatch):
    one = sampler()
    decoder = one._decoder()
    line = queue(one)
    line._closing = Window(lambda: len(line._waiting) == 4)
    began, closing = [], threading.Event()

    def broken(*arguments):
        began.append(1)
        if len(began) > 1:
            line._closing = closing  # as `close` does it, while a half is being decoded
            closing.set()
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr(type(decoder), "step", broken)
    answers = [line.submit(request(i)) for i in range(4)]
    for answer in answers:
        with pytest.raises(EngineError, match="closed"):
            answer.result(LONG)


def test_nobody_waits_for_weights_that_cannot_be_had(sampler, queue):
    one = sampler()
    line = queue(one)
    one.close()
    with pytest.raises(EngineError, match="closed"):
        line.submit(request(0)).result(LONG)


def test_first_come_first_served(sampler, queue):
    one = sampler()
    one.max_rows = 2
    line, order = queue(one), []
    answers = [line.submit(request(i, num_samples=2, max_tokens=2)) for i in range(5)]
    for i, answer in enumerate(answers):
        answer.add_done_callback(lambda _, i=i: order.append(i))
    [answer.result(LONG) for answer in answers]
    assert order == [0, 1, 2, 3, 4]


def test_a_cancelled_request_is_not_sampled(queue, steps):
    line = queue()
    line._closing = Window(lambda: cancelled.cancelled())
    cancelled = Future()
    cancelled, kept = line.submit(request(0)), line.submit(request(1))
    assert cancelled.cancel()
    assert len(kept.result(LONG).sequences[0].tokens) == 6 and max(steps) == 1


def test_closing_breaks_off_what_runs_and_what_waits_and_leaves_no_thread(sampler, queue, steps):
    one = sampler(tokenizer=tiny_tokenizer())
    one.max_rows = 1
    line = queue(one, window_seconds=0.0)
    steps.gate.clear()
    answers = [line.submit(request(i, max_tokens=120)) for i in range(3)]
    until(lambda: steps)
    closing = threading.Thread(target=line.close)
    closing.start()
    until(line._closing.is_set)
    steps.gate.set()
    closing.join()
    for answer in answers:
        with pytest.raises(EngineError, match="closed"):
            answer.result(LONG)
    assert not any(thread.name == "evsys-sample-queue" for thread in threading.enumerate())
    with pytest.raises(EngineError, match="closed"):
        line.submit(request(0)).result(LONG)


def test_a_row_whose_logits_are_not_finite_fails_alone(queue, sampler, monkeypatch):
    one = sampler()
    decoder = one._decoder()
    prefill = type(decoder).prefill

    def poisoned(self, prompts, *arguments, **options):
        read = prefill(self, prompts, *arguments, **options)
        for row, tokens in enumerate(prompts):
            if tokens[0] == 7:
                with torch.inference_mode():
                    read.logits[row] = float("nan")
        return read

    good = SampleRequest(tokens=[5, 6], max_tokens=6, seed=1, end_of_text=False)
    alone = one.sample([good])[0]
    monkeypatch.setattr(type(decoder), "prefill", poisoned)
    ours = queue(one)
    bad = ours.submit(SampleRequest(tokens=[7, 8], max_tokens=6, seed=1))
    beside = ours.submit(good)
    assert beside.result(LONG).sequences == alone.sequences
    with pytest.raises(EngineError, match="not finite"):
        bad.result(LONG)


def test_a_temperature_near_zero_fails_no_neighbour(queue):
    ours = queue()
    good = SampleRequest(tokens=[5, 6], max_tokens=6, seed=1, end_of_text=False)
    alone = ours.submit(good).result(LONG)
    answers = [ours.submit(SampleRequest(tokens=[5], max_tokens=6, temperature=1e-320)), ours.submit(good)]
    cold, beside = (answer.result(LONG) for answer in answers)
    likeliest = ours.submit(SampleRequest(tokens=[5], max_tokens=6, temperature=0.0)).result(LONG)
    assert beside.sequences == alone.sequences and cold.sequences == likeliest.sequences


def test_half_a_character_as_a_stop_string_stops_nothing(queue, sampler):
    ours = queue(sampler(tokenizer=tiny_tokenizer()))
    plain = SampleRequest(tokens=[5, 6], max_tokens=6, seed=1)
    odd = SampleRequest(tokens=[5, 6], max_tokens=6, seed=1, stop=("\ud83d",))
    assert ours.submit(odd).result(LONG).sequences == ours.submit(plain).result(LONG).sequences
