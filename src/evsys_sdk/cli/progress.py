"""Progress of a running experiment: a live table on a terminal, plain lines in a pipe.

In: callback events from the runs' threads. Out: text on stderr; stdout stays the result's. The live table fits a
terminal of 80 columns and 12 lines: running rows first, names without what they share, finished runs as a count.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TextIO

from evsys_sdk.format import harmless, score_text
from evsys_sdk.score_names import readings_of, score_key, suite_label

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

    from evsys_sdk.experiment.experiment import Experiment
    from evsys_sdk.protocols import EvalResult, RunContext, RunResult

PLAIN_INTERVAL_SECONDS = 2.0
ENDED = ("completed", "failed", "cancelled", "paused")
SAID = 2
"""Lines of the experiment's own, such as what a search decided, that stay below the table."""
LONGEST_NAME = 28
SHORTEST_NAME = 9
"""Columns that a name keeps on the narrowest terminal: four letters of both ends."""
_BETWEEN = "_/=,:@ "
"""What separates the words of a name."""


@dataclass(slots=True)
class RunLine:
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
    """Benchmark, metric, value and step of the last score, of the success metric where there is one."""
    value: str = ""
    """Value and step of that score alone."""
    metric: str = ""
    split: str = ""
    is_success: bool = False
    """Whether that score is the success metric's."""
    status: str = "preparing"
    """What the run is doing, or how it ended."""
    started: float = field(default_factory=time.monotonic)
    printed: float = 0.0

    @property
    def learning(self) -> str:
        """How it goes: the reward, where there is one; the loss otherwise."""
        if self.reward is not None:
            return f"reward {self.reward:.3f}"
        return "" if self.loss is None else f"loss {self.loss:.4f}"

    @property
    def is_running(self) -> bool:
        return self.status not in ENDED

    @property
    def share(self) -> float:
        """How much of the run is done, from 0 to 1."""
        return 1.0 if not self.is_running else self.step / self.total if self.total else 0.0

    def seconds_left(self, now: float) -> float | None:
        """Of the training; None before its first step."""
        if self.status != "training" or not self.total or not self.first < self.step < self.total:
            return None
        return (now - self.started) / (self.step - self.first) * (self.total - self.step)

    def left(self, now: float) -> str:
        seconds = self.seconds_left(now)
        return "" if seconds is None else f"{duration(seconds)} left"

    def begin(self, now: float) -> None:
        """What comes after the step that the run is at takes time from now on."""
        self.first, self.started = self.step, now


def clock(seconds: float) -> str:
    """`75` -> `1:15`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `2 h 5 min`."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, rest = divmod(minutes, 60)
    return f"{minutes} min" if not hours else f"{hours} h {rest} min" if rest else f"{hours} h"


def short_names(names: Sequence[str], width: int = LONGEST_NAME) -> list[str]:
    """The names without the beginning and the end that all of them share, cut to `width` where they still differ.

    `lr_sweep__lr1e-4`, `lr_sweep__lr3e-4` become `…1e-4`, `…3e-4`."""
    if len(set(names)) < 2:
        return [_cut(name, width) for name in names]
    head = _shared_start(names)
    tail = _shared_start([name[len(head) :][::-1] for name in names])[::-1]
    # Words and numbers are not torn apart: `alpha`, `alpine` and `1e-05`, `2e-05` stay whole.
    after = [name[len(head) :][:1] for name in names]
    if not (head[-1:].isalpha() and all(letter.isdigit() for letter in after)):
        head = head[: max(head.rfind(mark) for mark in _BETWEEN) + 1]
    cuts = [place for mark in _BETWEEN if (place := tail.find(mark)) >= 0]
    tail = tail[min(cuts) :] if cuts else ""
    head, tail = (part if len(part) > 2 else "" for part in (head, tail))
    inner = [name[len(head) : len(name) - len(tail)] for name in names]
    return [_cut(f"{'…' if head else ''}{text}{'…' if tail else ''}", width) for text in inner]


def fitting_names(names: Sequence[str], room: int) -> list[str]:
    """The names as they are where the longest fits into `room` columns; else their short forms, cut to the room."""
    return list(names) if max(map(len, names), default=0) <= room else short_names(names, max(room, SHORTEST_NAME))


def _shared_start(names: Sequence[str]) -> str:
    first, last = min(names), max(names)  # in between the others lie
    same = next((place for place, letter in enumerate(first) if letter != last[place]), len(first))
    return first[:same]


def _cut(name: str, width: int) -> str:
    """`name` in `width` columns; the middle goes, since both ends tell runs apart."""
    if len(name) <= width:
        return name
    left = (width - 1) // 2
    return f"{name[:left]}…{name[-(width - 1 - left) :]}"


class ProgressCallback:
    """A callback that keeps one `RunLine` per run; subclasses show them."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.lines: dict[str, RunLine] = {}
        self.lock = threading.Lock()
        self.n_runs: int | None = None
        """All that there will be; None where a search decides."""
        self.planned: list[str] = []
        """Names of the arms, so that a name is short in the same way from the first row on."""
        self.name = ""
        self.began = time.monotonic()
        self.done_before = 0.0
        """What earlier processes did, in runs."""

    def _line(self, ctx: RunContext) -> RunLine:
        with self.lock:
            return self.lines.setdefault(ctx.run_id, RunLine(name=ctx.extras.get("run_name", ctx.run_id)))

    def on_experiment_start(self, experiment: Experiment) -> None:
        config = experiment.config
        self.name, self.began = config.name, time.monotonic()
        if not config.search:
            self.planned = [run.name for run in config.all_runs()] if config.n_repeats == 1 else []
            self.n_runs = len(config.all_runs()) * config.n_repeats

    def doing(self, ctx: RunContext, what: str) -> None:
        """The run has begun with something: loading its model, scoring."""
        line = self._line(ctx)
        line.status = what
        self._changed(ctx, line, always=True)

    def on_run_start(self, ctx: RunContext) -> None:
        line = self._line(ctx)
        line.status = "preparing"
        self.changed(line, always=True)

    def on_train_start(self, ctx: RunContext, total_steps: int | None) -> None:
        line = self._line(ctx)
        line.total, line.status = total_steps, "training"
        line.begin(time.monotonic())
        self._changed(ctx, line)

    def on_step(self, ctx: RunContext, step: int, metrics: dict[str, float]) -> None:
        line = self._line(ctx)
        before = line.share
        line.step, line.loss = step, metrics.get("loss", line.loss)
        line.first_loss = line.loss if line.first_loss is None else line.first_loss
        line.reward = metrics.get("reward/mean", line.reward)
        if ctx.replaying:
            line.begin(time.monotonic())
            with self.lock:
                self.done_before += line.share - before
        else:
            line.status = "training"
        self._changed(ctx, line)

    def on_train_end(self, ctx: RunContext, metrics: dict[str, float]) -> None:
        self._line(ctx).status = "scoring"

    def on_eval(self, ctx: RunContext, result: EvalResult) -> None:
        line = self._line(ctx)
        self._show_score(ctx, line, result)
        self._changed(ctx, line, always=True)

    def _show_score(self, ctx: RunContext, line: RunLine, result: EvalResult) -> None:
        """Put the evaluation's score into the line, unless another benchmark's counts more."""
        metadata = getattr(getattr(ctx, "config", None), "metadata", None)
        success_metric = getattr(metadata, "success_metric", None)
        success = None if success_metric is None else str(success_metric.name)
        scores = [score for score in result.scores if score.value is not None]
        own = [score for score in scores if is_named(success, result, score.metric)]
        for score in (own or scores)[:1]:
            if line.is_success and (not own or (result.split == "test" and line.split != "test")):
                break  # another benchmark's score does not take the place of the one that counts
            before = " before training" if getattr(result, "start", "") else " untrained"
            at = "" if result.step is None else before if result.step == 0 else f" at step {result.step}"
            label = suite_label(result.split, result.name)
            errors = getattr(score, "n_errors", 0)
            marks = [f"{errors:,} error{'' if errors == 1 else 's'}"] if errors else []
            marks += [result.training_mark] if getattr(result, "training_mark", "") else []
            rows = f" ({'; '.join(marks)})" if marks else ""
            line.is_success, line.metric, line.split = bool(own), score.metric, result.split
            value = score_text(score.value, unit=getattr(score, "unit", ""))
            line.score = f"{label} {score.metric} {value}{at}{rows}"
            line.value = f"{value}{at.replace(' at step ', ' @')}"

    def on_run_end(self, ctx: RunContext, result: RunResult) -> None:
        line = self._line(ctx)
        # The search has yet to decide whether it resumes.
        line.status = "paused" if result.status == "pruned" else result.status
        for found in (
            result.final_evals if getattr(result, "chosen_steps", None) else ()
        ):  # the last of the loop may not be the run's
            self._show_score(ctx, line, found)
        self.changed(line, always=True)

    def headline(self, now: float) -> str:
        """`lr_sweep: 7 of 24 runs done, 2 running, 12 min left`."""
        with self.lock:
            lines = list(self.lines.values())
        if not lines:
            return f"{self.name}: preparing" if self.name else "preparing"
        done = sum(not line.is_running for line in lines)
        total = self.n_runs if self.n_runs is not None and self.n_runs >= len(lines) else None
        of = f" of {total}" if total else ""
        parts = [f"{done}{of} runs done"]
        failed = sum(line.status == "failed" for line in lines)
        parts += [f"{failed} failed"] if failed else []
        parts.append(f"{len(lines) - done} running")
        finished = sum(line.share for line in lines)
        # What earlier processes did took none of the time since `began`, and would make the rest look short.
        gained = finished - self.done_before
        if total and gained > 0 and finished < total:
            parts.append(f"{duration((now - self.began) / gained * (total - finished))} left")
        return f"{self.name}: {', '.join(parts)}" if self.name else ", ".join(parts)

    def say(self, text: str) -> None:
        """A line of the experiment's own, such as what a search decided."""
        self.stream.write(f"{harmless(text)}\n")  # in one piece: runs speak at the same time
        self.stream.flush()

    def _changed(self, ctx: RunContext, line: RunLine, *, always: bool = False) -> None:
        if not ctx.replaying:  # what an earlier attempt did is no news
            self.changed(line, always=always)

    def changed(self, line: RunLine, *, always: bool = False) -> None:
        raise NotImplementedError


def is_named(success: str | None, result: EvalResult, metric: str) -> bool:
    """Whether the success metric (`pass@1`, `val.pass@1`, `val/tools/pass@1`) means this metric of this evaluation."""
    return success is not None and bool(readings_of(success, score_key(result.split, result.name, metric)))


class PlainProgress(ProgressCallback):
    """A line per run every few seconds, and at every event that matters."""

    def changed(self, line: RunLine, *, always: bool = False) -> None:
        now = time.monotonic()
        if not always and now - line.printed < PLAIN_INTERVAL_SECONDS and line.step != line.total:
            return
        line.printed = now
        total = f" of {line.total}" if line.total else ""
        parts = [f"step {line.step}{total}" if line.step else "", line.status]
        parts += [line.learning, line.score, line.left(now)]
        self.say(f"{line.name}: " + "  ".join(part for part in parts if part))


class StampedProgress(PlainProgress):
    """Progress lines with the time of day before each, for a file that is read later."""

    def say(self, text: str) -> None:
        super().say(f"{time.strftime('%H:%M:%S')} {text}")


class LiveProgress(ProgressCallback):
    """A table that rich redraws a few times a second; changes need no work of ours."""

    def __init__(self, stream: TextIO):
        super().__init__(stream)
        self.said: list[str] = []

    def changed(self, line: RunLine, *, always: bool = False) -> None: ...

    def say(self, text: str) -> None:
        self.said.append(harmless(text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.table import Table
        from rich.text import Text

        now, width = time.monotonic(), console.width
        said = self.said[-SAID:]
        yield Text(self.headline(now), overflow="ellipsis", no_wrap=True, style="bold")
        with self.lock:
            lines = list(self.lines.values())
        if not lines:
            return
        running = [line for line in lines if line.is_running]
        failed = [line for line in lines if line.status == "failed"]
        others = [line for line in lines if not line.is_running and line.status != "failed"]
        ranked = [*running, *failed, *reversed(others)]  # of those that ended the last one first
        room = max(3, console.height - 4 - len(said))
        shown = ranked[:room]
        every = list(dict.fromkeys([*self.planned, *(line.name for line in lines)]))
        metrics = {line.metric for line in shown if line.metric}
        table = Table(box=None, pad_edge=False, padding=(0, 1), expand=False)
        titles = ("run", "doing", "step", "learning", metrics.pop() if len(metrics) == 1 else "score", "left")
        for title in titles:
            side: Literal["left", "right"] = "right" if title in ("step", "left") else "left"
            table.add_column(Text(harmless(title)), justify=side, no_wrap=True, overflow="ellipsis")
        alone = len({line.metric for line in shown if line.metric}) < 2
        rows = []
        for line in shown:
            step = f"{line.step} of {line.total}" if line.total else str(line.step or "")
            score = line.value if alone else f"{line.metric} {line.value}"
            seconds = line.seconds_left(now)
            rows.append([line.status, step, line.learning, score, "" if seconds is None else duration(seconds)])
        # 2: the padding of a column, one on each side.
        taken = sum(2 + max(map(len, column)) for column in zip(titles[1:], *rows, strict=True))
        names = dict(zip(every, fitting_names(every, width - taken), strict=True))
        for line, row in zip(shown, rows, strict=True):
            cells = [names[line.name], *row]
            table.add_row(*(Text(harmless(cell), overflow="ellipsis", no_wrap=True) for cell in cells))
        yield table
        rest = Counter(line.status for line in ranked[room:])
        if rest:
            counted = ", ".join(f"{n} {status}" for status, n in rest.items())
            yield Text(f"… and {sum(rest.values())} more: {counted}", overflow="ellipsis", no_wrap=True)
        for text in said:
            yield Text(text[: width * 2], overflow="ellipsis", no_wrap=True)


@contextmanager
def progress_display(stream: TextIO, *, live: bool) -> Iterator[ProgressCallback]:
    """The display that fits `stream`; a live one is cleared at the end, since the summary says it all."""
    if not (live and stream.isatty()):
        yield PlainProgress(stream)
        return
    from rich.live import Live

    from evsys_sdk.format import console_for, guarded_streams

    progress = LiveProgress(stream)
    live_table = Live(progress, console=console_for(stream), refresh_per_second=8, transient=True)
    # `Live` takes over what is printed meanwhile and follows its escape sequences: colours, hidden text, links, `\r`.
    # The guards stand before it, so that it gets them as text.
    with live_table, guarded_streams():
        yield progress
