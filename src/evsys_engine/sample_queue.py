"""Many callers, one batch.

In: single requests from any number of threads or tasks, at any time. Out: a future for each. A worker thread, there
only while there is work, keeps one batch running on the sampler and lets requests join it between two tokens, first
come, first served.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from evsys_engine.scheduler import BatchSampler, SampleJob, SamplerClosed
from evsys_engine.types import EngineError, SampleOutput, SampleRequest

WINDOW_SECONDS = 0.003
"""How long the first request waits for company."""


class SampleQueue:
    """The callers of one sampler."""

    def __init__(self, sampler: BatchSampler, *, window_seconds: float = WINDOW_SECONDS):
        self._sampler, self._window_seconds = sampler, window_seconds
        self._waiting: deque[tuple[SampleJob, Future[SampleOutput]]] = deque()
        self._guard = threading.Lock()
        self._closing = threading.Event()
        self._worker: threading.Thread | None = None

    def submit(self, request: SampleRequest) -> Future[SampleOutput]:
        """The result to come. A bad request fails alone; requests beside it are not affected."""
        answer: Future[SampleOutput] = Future()
        try:
            job = self._sampler.job(
                request,
                lambda result: _settle(answer.set_result, result),
                lambda exc: _settle(answer.set_exception, exc),
            )
        except EngineError as exc:
            answer.set_exception(exc)
            return answer
        with self._guard:
            if self._closing.is_set():
                answer.set_exception(_closed_error())
                return answer
            self._waiting.append((job, answer))
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="evsys-sample-queue", daemon=True)
                self._worker.start()
        return answer

    def close(self) -> None:
        """Break off: those that wait and those being sampled get an `EngineError`. Returns when the worker is gone."""
        with self._guard:
            self._closing.set()
            worker, waiting = self._worker, list(self._waiting)
            self._waiting.clear()
        # Outside the guard: a callback of the future may call `submit`, which takes it.
        for job, _ in waiting:
            job.fail(_closed_error())
        if worker is not None and worker is not threading.current_thread():
            worker.join()

    def _work(self) -> None:
        self._closing.wait(self._window_seconds)
        while self._has_work():
            with suppress(Exception):  # every job it concerned has it; the next ones get a new batch
                self._sampler.serve(self._next_jobs)

    def _has_work(self) -> bool:
        with self._guard:
            # Decided under the guard: a request that comes later finds no worker and starts the next one.
            if not self._waiting:
                self._worker = None
            return bool(self._waiting)

    def _next_jobs(self, room: int) -> Iterable[SampleJob]:
        """As many as there is room for; the last one may need more."""
        if self._closing.is_set():
            raise _closed_error()
        jobs: list[SampleJob] = []
        with self._guard:
            while self._waiting and room > 0:
                job, answer = self._waiting.popleft()
                if answer.set_running_or_notify_cancel():
                    jobs.append(job)
                    room -= job.request.num_samples
        return jobs


def _settle[T](setter: Callable[[T], None], value: T) -> None:
    with suppress(InvalidStateError):  # the caller has cancelled
        setter(value)


def _closed_error() -> SamplerClosed:
    return SamplerClosed("sampling was broken off: the sampler was closed")
