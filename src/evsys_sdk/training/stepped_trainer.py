"""A Hugging Face trainer that takes one step when it is asked to.

In: a trainer with its callbacks open. Out: per step what it logged. It runs on a thread of its own and waits there
between steps, so that our loop (logs, hooks, evaluations, checkpoints, stopping) drives it like anything else. Its
printing and its schedule are ours: the rate of each step is handed in.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from evsys_sdk.errors import BackendError, need


class SteppedTrainer:
    """Runs `make(callback).train()`, a step at a time. `make` must put the callback into the trainer."""

    def __init__(self, make: Callable[[Any], Any], what: str):
        self.make, self.what = make, what
        self._go = threading.Semaphore(0)
        self._stopping = False
        self._rate = 0.0
        self._thread: threading.Thread | None = None
        self._answer: asyncio.Future[dict[str, float]] | None = None

    async def step(self, rate: float) -> dict[str, float]:
        """Take one optimiser step at this learning rate; what the trainer logged about it."""
        self._loop = asyncio.get_running_loop()
        self._answer = self._loop.create_future()
        self._rate = rate
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="evsys-trainer", daemon=True)
            self._thread.start()
        else:
            self._go.release()
        return await self._answer

    async def close(self) -> None:
        """Let it end after the step it is in."""
        self.abandon()
        while self._thread is not None and self._thread.is_alive():
            await asyncio.sleep(0.01)

    def abandon(self) -> None:
        """The same without waiting."""
        self._stopping = True
        self._go.release()

    def _run(self) -> None:
        try:
            self.make(self._callback()).train()
            self._tell(None, BackendError(f"{self.what} ended before its last step"))
        except BaseException as exc:
            self._tell(None, exc)

    def _tell(self, logs: dict[str, float] | None, failure: BaseException | None = None) -> None:
        """Answer the one who asked for a step, if anybody still listens."""
        answer = self._answer

        def hand_over() -> None:
            if answer is None or answer.done():
                return
            if logs is not None:
                answer.set_result(logs)
            elif isinstance(failure, Exception):
                answer.set_exception(failure)
            else:
                answer.set_exception(BackendError(f"{self.what} was ended by {failure!r}"))

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(hand_over)

    def _callback(self) -> Any:
        stepped = self

        class Pause(need("transformers", extra="local").TrainerCallback):  # type: ignore[misc]
            """Sets the rate before a step, hands over the numbers and waits after it."""

            def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **rest: Any) -> None:
                for group in optimizer.param_groups:
                    group["lr"] = stepped._rate

            def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **rest: Any) -> Any:
                if "loss" not in logs:  # the summary at the end
                    return control
                stepped._tell({key: float(value) for key, value in logs.items() if isinstance(value, int | float)})
                stepped._go.acquire()
                control.should_training_stop = control.should_training_stop or stepped._stopping
                return control

        return Pause()
