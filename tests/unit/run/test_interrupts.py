"""Signals, whichever thread they reach and whatever it is doing; and runs that are interrupted where they stand."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from evsys_sdk.concurrency import Interrupted, run_async
from evsys_sdk.run import stop as interrupts
from evsys_sdk.run.stop import StopFlag, stop_on_signals

BOUND_SECONDS = 300
"""Nothing here takes long; what hangs ends."""


@pytest.fixture(autouse=True)
def _only_what_is_said_here(caplog):
    """Tasks that other tests left are spoken of when they are thrown away."""
    gc.collect()
    caplog.clear()


def test_a_signal_that_another_thread_gets_is_heeded_while_the_main_thread_waits():
    """Of two signals the kernel gives one to whichever thread runs, which then takes both."""
    stop = StopFlag()

    def work():
        time.sleep(0.2)  # the main thread waits by then, mostly; the claim holds if not
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        return stop.event.wait(300)

    with stop_on_signals(stop), ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result()


def in_a_process(code):
    """What a process of its own ends with and says."""
    # Under nohup a process ignores SIGHUP from its start, and so do its children.
    head = "import os, signal, sys, threading, time\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    head += "from evsys_sdk.run.stop import *\nstop = StopFlag()\n"
    command = [sys.executable, "-c", head + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=BOUND_SECONDS)


def test_signals_may_come_in_the_midst_of_anything():
    """As while another one is being heeded."""
    done = in_a_process("""
with stop_on_signals(stop), stop.event._cond:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    sum(range(1_000_000))
assert stop.event.is_set() and stop.interrupted
""")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "Stopping after the current step.\n"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_only_ctrl_c_is_told_of_ctrl_c(name):
    done = in_a_process(f"""
with stop_on_signals(stop):
    os.kill(os.getpid(), signal.{name})
    assert stop.event.wait(300)
""")
    again = " Press Ctrl-C again to stop immediately." if name == "SIGINT" else ""
    assert (done.returncode, done.stderr) == (0, f"Stopping after the current step.{again}\n")


def test_a_forked_child_has_the_handlers_of_before():
    done = in_a_process("""
with stop_on_signals(stop):
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
assert not stop.event.is_set()
""")
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_interrupted_ends_at_the_next_signal_of_that_kind():
    code = """
with stop_on_signals(stop), stop.working():
    print("ready", flush=True)
    while True:
        try: time.sleep(60)
        except BaseException: pass
"""
    head = "import time\nfrom evsys_sdk.run.stop import *\nstop = StopFlag()\n"
    process = subprocess.Popen([sys.executable, "-c", head + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        process.stdout.readline()
        end = time.monotonic() + BOUND_SECONDS
        while process.poll() is None and time.monotonic() < end:
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        assert process.returncode == 128 + signal.SIGINT
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "asleep", ["time.sleep(600)", "run_async(sleeping())", "threading.Lock().acquire() and lock.acquire()"]
)
def test_a_second_signal_ends_a_process_whose_run_is_in_a_call_that_no_exception_reaches(asleep):
    """As a callback that sleeps, on the thread of a run: without an end it would be waited for."""
    done = in_a_process(f"""
from evsys_sdk.concurrency import run_async
lock = threading.Lock()
lock.acquire()
async def sleeping():
    time.sleep(600)
def work():
    with stop.working():
        {asleep}
with stop_on_signals(stop):
    run = threading.Thread(target=work)
    run.start()
    while not stop.threads: time.sleep(0.01)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)
    stop.event.wait()  # the kernel makes one of two that come at once
    os.kill(os.getpid(), signal.SIGINT)
    run.join()
""")
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    assert done.stderr.splitlines()[1:] == [
        "<string>:" + done.stderr.split("<string>:")[1].split(" ")[0]
        + " cannot be interrupted: ending the process. The same command resumes the experiment."
    ]  # fmt: skip


def test_a_second_signal_waits_for_a_run_that_tidies_up():
    """However long that takes: only what does not move at all is given up."""
    done = in_a_process("""
def work():
    with stop.working():
        try:
            while True: sum(range(100))
        finally:
            time.sleep(3)
            print("tidy", flush=True)
with stop_on_signals(stop):
    run = threading.Thread(target=work)
    run.start()
    while not stop.threads: time.sleep(0.01)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)
    stop.event.wait()  # the kernel makes one of two that come at once
    os.kill(os.getpid(), signal.SIGINT)
    run.join()
""")
    assert done.stdout == "tidy\n" and done.returncode == 0, done.stderr


@contextmanager
def at_work(stop, act):
    """A run on a thread; what kind of exception it came to is found after it."""
    begun, came_to = threading.Event(), []

    def run():
        try:
            with stop.working():
                act(begun)
        except BaseException as exc:
            came_to.append(type(exc))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert begun.wait(BOUND_SECONDS)
    yield came_to
    thread.join(BOUND_SECONDS)
    assert not thread.is_alive()


def test_what_waits_in_an_event_loop_is_cancelled_without_a_word(caplog):
    ends = []

    async def score():
        try:
            await asyncio.sleep(600)
        finally:
            ends.append(asyncio.current_task().cancelling())

    async def train(begun):
        beside = asyncio.gather(score(), score())
        await asyncio.sleep(0)
        begun.set()
        await asyncio.gather(beside, asyncio.sleep(600))

    stop = StopFlag()
    with at_work(stop, lambda begun: run_async(train(begun))) as came_to:
        stop.interrupt()
    assert came_to == [Interrupted] and stop.event.is_set()
    assert ends == [1, 1], "what ran beside it was cancelled as asyncio does it"
    assert caplog.text == ""


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_what_does_not_wait_is_interrupted_too(caplog, monkeypatch, in_a_loop):
    monkeypatch.setattr(interrupts, "LOOP_SECONDS", 0.05)

    def spin(begun):
        begun.set()
        while True:
            sum(range(100))

    async def spinning(begun):
        spin(begun)

    async def beside(begun):
        pending = set()  # as with scores in the loop, nobody asks after it
        pending.add(asyncio.create_task(spinning(begun)))
        await asyncio.sleep(600)

    stop = StopFlag()
    with at_work(stop, (lambda begun: run_async(beside(begun))) if in_a_loop else spin) as came_to:
        stop.interrupt()
    assert came_to == [Interrupted]
    gc.collect()  # asyncio speaks of tasks when they are thrown away
    assert caplog.text == ""


def test_after_the_interrupt_no_run_begins():
    stop = StopFlag()
    stop.interrupt()
    with pytest.raises(Interrupted), stop.working():
        raise AssertionError("it began")
    assert stop.threads == set()


def test_a_cancellation_of_ones_own_stays_one():
    async def work():
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    with pytest.raises(asyncio.CancelledError):
        run_async(work())


def test_the_wakeup_pipe_and_the_handlers_are_put_back():
    theirs = os.pipe()
    os.set_blocking(theirs[1], False)
    handler = signal.getsignal(signal.SIGTERM)
    before = signal.set_wakeup_fd(theirs[1])
    try:
        with stop_on_signals(StopFlag()):
            assert signal.getsignal(signal.SIGTERM) is not handler
        assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.set_wakeup_fd(before) == theirs[1]
    finally:
        signal.set_wakeup_fd(before)
        for end in theirs:
            os.close(end)
