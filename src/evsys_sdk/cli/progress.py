"""Progress of a running experiment: a live table on a terminal, plain lines in a pipe.

In: callback events from the runs' threads. Out: text on stderr; stdout stays the result's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

from evsys_sdk.score_names import suite_label

PLAIN_INTERVAL_SECONDS = 2.0


@dataclass(slots=True)
class Line:
    """What is known of one run."""

    name: str
    total: int | None = None
    step: int = 0
    first: int = 0
    """The step from which the training that is under way began: after a resume, or in a later stage of a chain."""
    loss: float | None = None
    first_loss: float | None = None
    reward: float | None = None
    score: str = ""
    status: str = "preparing"
    started: float = field(default_factory=time.monotonic)
    printed: float = 0.0

    @property
    def learning(self) -> str:
        """How it goes: the reward, where there is one; the loss otherwise."""
        if self.reward is not None:
            return f"reward {self.reward:.3f}"
        return "" if self.loss is None else f"loss {self.loss:.4f}"

    def eta(self, now: float) -> str:
        if self.status != "training" or not self.total or not self.first < self.step < self.total:
            return ""
        return clock((now - self.started) / (self.step - self.first) * (self.total - self.step))

    def begin(self, now: float) -> None:
        """What comes after the step that the run is at takes time from now on."""
        self.first, self.started = self.step, now


def clock(seconds: float) -> str:
    """`75` -> `1:15`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """A callback that keeps one `Line` per run; how they are shown is the subclass's."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.lines: dict[str, Line] = {}
        self.lock = threading.Lock()

    def _line(self, ctx: Any) -> Line:
        with self.lock:
            return self.lines.setdefault(ctx.run_id, Line(name=ctx.extras.get("run_name", ctx.run_id)))

    def on_run_start(self, ctx: Any) -> None:
        line = self._line(ctx)
        line.status = "preparing"
        self.changed(line, always=True)

    def on_train_start(self, ctx: Any, total_steps: int | None) -> None:
        line = self._line(ctx)
        line.total, line.status = total_steps, "training"
        line.begin(time.monotonic())
        self._changed(ctx, line)

    def on_step(self, ctx: Any, step: int, metrics: dict[str, float]) -> None:
        line = self._line(ctx)
        line.step, line.loss = step, metrics.get("loss", line.loss)
        line.first_loss = line.loss if line.first_loss is None else line.first_loss
        line.reward = metrics.get("reward/mean", line.reward)
        if ctx.retelling:
            line.begin(time.monotonic())
        self._changed(ctx, line)

    def on_train_end(self, ctx: Any, metrics: dict[str, float]) -> None:
        self._line(ctx).status = "scoring"

    def on_eval(self, ctx: Any, result: Any) -> None:
        line = self._line(ctx)
        for score in result.scores:
            if score.value is not None:
                which = "untrained " if result.step == 0 else ""
                rows = " (training rows)" if result.on_training_rows else ""
                suite = suite_label(result.split, result.name)
                line.score = f"{which}{suite} {score.metric} {score.value:.3f}{rows}"
        self._changed(ctx, line, always=True)

    def on_run_end(self, ctx: Any, result: Any) -> None:
        line = self._line(ctx)
        # Whether it goes on, the search has yet to decide.
        line.status = "paused" if result.status == "pruned" else result.status
        self.changed(line, always=True)

    def say(self, text: str) -> None:
        """A line of the experiment's own, such as what a search decided."""
        self.stream.write(f"{text}\n")  # in one piece: runs speak at the same time
        self.stream.flush()

    def _changed(self, ctx: Any, line: Line, *, always: bool = False) -> None:
        if not ctx.retelling:  # what an earlier attempt did is no news
            self.changed(line, always=always)

    def changed(self, line: Line, *, always: bool = False) -> None:
        raise NotImplementedError


class PlainProgress(Progress):
    """A line per run every few seconds, and at every event that matters."""

    def changed(self, line: Line, *, always: bool = False) -> None:
        now = time.monotonic()
        if not always and now - line.printed < PLAIN_INTERVAL_SECONDS and line.step != line.total:
            return
        line.printed = now
        total = f"/{line.total}" if line.total else ""
        parts = [f"step {line.step}{total}" if line.step else "", line.status]
        parts += [line.learning, line.score]
        eta = line.eta(now)
        parts.append(f"eta {eta}" if eta else "")
        self.say(f"{line.name}: " + "  ".join(part for part in parts if part))


class StampedProgress(PlainProgress):
    """The same with the time of day before each line: for a file that is read later."""

    def say(self, text: str) -> None:
        super().say(f"{time.strftime('%H:%M:%S')} {text}")


class LiveProgress(Progress):
    """A table that rich redraws a few times a second; changes need no work of ours."""

    def __init__(self, stream: TextIO):
        super().__init__(stream)
        self.said: list[str] = []

    def changed(self, line: Line, *, always: bool = False) -> None: ...

    def say(self, text: str) -> None:
        self.said.append(text)

    def __rich__(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table(box=None, pad_edge=False, caption="\n".join(self.said[-8:]) or None, caption_justify="left")
        for title in ("run", "", "step", "learning", "score", "eta"):
            table.add_column(title, justify="right" if title in ("step", "eta") else "left")
        now = time.monotonic()
        with self.lock:
            lines = list(self.lines.values())
        for line in lines[-30:]:
            bar = ProgressBar(total=line.total or 1, completed=line.step, width=20) if line.total else line.status
            step = f"{line.step}/{line.total}" if line.total else str(line.step or "")
            table.add_row(line.name, bar, step, line.learning, line.score, line.eta(now) or line.status)
        return table


@contextmanager
def progress_display(stream: TextIO, *, live: bool) -> Iterator[Progress]:
    """The display that fits `stream`; a live one is cleared at the end, since the summary says it all."""
    if not (live and stream.isatty()):
        yield PlainProgress(stream)
        return
    from rich.console import Console
    from rich.live import Live

    progress = LiveProgress(stream)
    with Live(progress, console=Console(file=stream), refresh_per_second=8, transient=False):
        yield progress
