"""Text on its way to a terminal, and numbers as people read them in conclusions and tables.

In: text that others wrote: model output, task ids, hypotheses, error messages. Out: the same text with control
characters shown as text (`\u001b`), so that no escape sequence reaches the terminal, and without known secrets.
`guarded_streams` is where the command line's text leaves the process; `console_for` is the way for rich. Files that
people print are written with `visible` text too (`files`), Markdown with `markdown_text`.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from evsys_sdk.constants import MANY_ERRORS
from evsys_sdk.errors import EvsysError, shorten
from evsys_sdk.redaction import redact, redact_values, unfinished_from

if TYPE_CHECKING:
    from rich.console import Console

    from evsys_sdk.protocols import Score


def refuse_non_numbers(metrics: Mapping[str, object], step: int) -> None:
    """Refuse what cannot be logged as a metric: text, None, `...`. NaN and infinities are numbers, and are logged."""
    for name, value in metrics.items():
        # The usual number without a call: `log_step` of the dashboard's client has 20 us.
        if type(value) is not float and as_number(value) is None:
            raise EvsysError(
                f"metric {name!r} of step {step} is {shorten(repr(value))}, not a number; log an int or a float"
            )


def as_number(value: Any) -> float | None:
    """`value` as a float (whole numbers stay whole); None for what is no number."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if isinstance(value, str | bytes) else value if isinstance(value, int) else number


TOKENS, USD = "tokens", "USD"
"""Units whose numbers are not written with three decimals."""


def number_text(value: float, *, unit: str = "", signed: bool = False) -> str:
    """A number as its unit is read, without the unit: `0.938`, `6.5e-06`; `1,204` tokens, `0.0031` USD."""
    sign = "+" if signed else ""
    if unit == TOKENS:
        return f"{value:{sign},.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:{sign}.1f}"
    if unit == USD and (value == 0 or abs(value) >= 1e-6):  # cents and their parts, not powers of ten
        return f"{value:{sign}.{4 if value == 0 or abs(value) >= 0.001 else 7}f}"
    return f"{value:{sign}.3f}" if value == 0 or abs(value) >= 0.001 else f"{value:{sign}.2g}"


def shown(value: float, *, unit: str = "", signed: bool = False) -> str:
    """A number with its unit: `0.938`, `+0.050`, `1.250 s`, `1,204 tokens`."""
    return f"{number_text(value, unit=unit, signed=signed)}{f' {unit}' if unit else ''}"


def span(low: float | None, high: float | None, *, unit: str = "", signed: bool = False) -> str:
    """` [0.832, 0.979]`, or nothing where there is no interval."""
    if low is None or high is None:
        return ""
    low_text, high_text = (number_text(end, unit=unit, signed=signed) for end in (low, high))
    return f" [{low_text}, {high_text}]"


def interval_text(value: float, low: float | None, high: float | None, *, unit: str = "") -> str:
    """`0.900 [0.802, 0.951]`; `1.250 [1.100, 1.400] s`."""
    return f"{number_text(value, unit=unit)}{span(low, high, unit=unit)}{f' {unit}' if unit else ''}"


def has_many_errors(n_errors: int, n_rollouts: int) -> bool:
    """True where so many rollouts errored that a score says more about the errors than about the model."""
    return n_errors >= MANY_ERRORS * n_rollouts > 0


def errors_text(n_errors: int, n_rollouts: int) -> str:
    """`20 of 60 rollouts errored`; empty where none did."""
    return f"{n_errors:,} of {max(n_errors, n_rollouts):,} rollouts errored" if n_errors else ""


def score_text(
    value: float | None,
    low: float | None = None,
    high: float | None = None,
    *,
    unit: str = "",
    counts: Sequence[str] = (),
    marks: Sequence[str] = (),
    n_errors: int = 0,
    n_rollouts: int = 0,
    errors_first: bool = True,
) -> str:
    """A score as every line, table and page writes it: `0.900 [0.802, 0.951], 60 tasks, 1 seed, 2 of 60 rollouts
    errored`. `counts`: what it is over. `marks`: what else a reader must know, such as `on training rows`. Many errors
    stand before the number, unless `errors_first` is False."""
    errors = errors_text(n_errors, n_rollouts)
    if value is None:
        return f"no score: {errors}" if errors else "not valid"
    text = ", ".join([interval_text(value, low, high, unit=unit), *counts, *(mark for mark in marks if mark)])
    if errors and errors_first and has_many_errors(n_errors, n_rollouts):
        return f"{errors}; {text}"
    return f"{text}, {errors}" if errors else text


def benchmark_score_text(score: Score, *marks: str, with_counts: bool = True) -> str:
    """The score of one model on one benchmark, over its tasks: `0.938 [0.832, 0.979], 48 tasks, 192 rollouts`."""
    counts = [count(score.n_tasks, "task")] if with_counts else []
    if with_counts and score.n_rollouts > score.n_tasks and not score.n_errors:  # the errors name the rollouts too
        counts.append(count(score.n_rollouts, "rollout"))
    return score_text(
        score.value,
        score.low,
        score.high,
        unit=score.unit,
        counts=counts,
        marks=marks,
        n_errors=score.n_errors,
        n_rollouts=score.n_rollouts,
        errors_first=False,
    )


def amount(value: float, *, share: bool, unit: str = "", signed: bool = False) -> str:
    """A difference without its unit: `13.3` of a share, which is given in points; else in the metric's own size."""
    if not share:
        return number_text(value, unit=unit, signed=signed)
    points = round(100 * value, 1) + 0.0  # no -0.0
    return f"{points:+.1f}" if signed else f"{points:.1f}"


def amount_unit(*, share: bool, unit: str = "") -> str:
    """The unit of a difference, to stand behind its `amount`: ` points`, ` s`; nothing for a number without a unit."""
    return " points" if share else f" {unit}" if unit else ""


def count(n: int, what: str) -> str:
    """`1 task`, `1,200 tasks`."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


MOST_NAMED = 3
"""Arms that a sentence names; the record has all."""


def name_list(names: Sequence[str]) -> str:
    """`a, b, c and 4 more`."""
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def plan_text(tasks: int | None, seeds: int | None, both: Sequence[int] | None, templates: int | None = None) -> str:
    """`about 120 more tasks or 3 more seeds per arm`; `about 4 more tasks from 1 new template` where tasks come from
    templates; empty where no number helps."""
    new = f" from {count(templates, 'new template')}" if templates else ""
    ways = [f"{count(tasks, 'more task')}{new}"] if tasks is not None else []
    ways += [f"{count(seeds, 'more seed')} per arm"] if seeds is not None else []
    if both is not None:
        ways = [f"{count(both[0], 'more task')}{new} together with {count(both[1], 'more seed')} per arm"]
    return f"about {' or '.join(ways)}" if ways else ""


# C0 without tab and newline, DEL, C1, line separators, embeddings and overrides of writing direction, lone surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """`text` with every control character but tab and newline as its JSON escape, which a terminal only prints."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text.replace("\r\n", "\n"))


# Marks of direction and joiners that change how a line looks, and tag characters, which spell text that no one sees.
_UNSEEN = re.compile("[\u061c\u200b\u200e\u200f\u2060-\u2064\ufeff\U000e0000-\U000e007f]")


def without_control(text: str) -> str:
    """`text` without control characters but tab and newline, and without characters that are not seen."""
    if text.isascii() and text.isprintable():
        return text
    return _UNSEEN.sub("", _CONTROL.sub("", text))


_TAG = re.compile(r"<(?=[A-Za-z/!?])")
_BLOCK = re.compile(r"^(\s*(?:[-*+]\s+)*)(#{1,6}(?=\s|$)|>|```|~~~|\||=+\s*$|(?:-\s*){3,}$|\[[^\]]*\]:)", re.MULTILINE)


def inline_markdown(text: str) -> str:
    """Markdown in which no HTML tag, image or link of others is left: they are shown as text."""
    text = _TAG.sub("&lt;", visible(text))
    return text.replace("![", "!\\[").replace("](", "]\\(")


def markdown_text(text: str) -> str:
    """Text of others for a Markdown page, in which it makes no heading, quote, code block, table or link either."""
    return _BLOCK.sub(r"\1\\\2", inline_markdown(text))


def harmless(text: str) -> str:
    """`text` without secrets, its control characters shown as text."""
    return visible(redact(text))


LONGEST_WAIT = 8192
"""Characters that a `GuardedStream` holds back at most."""
REMEMBERED = 128
"""Characters that a `GuardedStream` has let out and still reads: more than the longest mark of a secret, such as
`Authorization: Basic` or the first line of a private key."""


class GuardedStream:
    """A text stream through which only harmless text passes; `raw` is the stream itself.

    A secret may be written in pieces. So the word at the end of what was written waits for the rest of it, until white
    space or a flush; the beginning of a secret waits beyond a flush, until it is whole or something else. Half a mark
    (`s` of `sk-`) is no such beginning and is let out by a flush; so what was let out last is read again with what
    follows, and the rest of the key is known for one."""

    def __init__(self, raw: TextIO):
        self.raw = raw
        self.waiting = ""
        self.passed = ""
        """The end of what was let out."""
        self.lock = threading.RLock()  # a signal handler may print while its thread does

    def write(self, text: str) -> int:
        with self.lock:
            self.waiting += redact_values(text)  # whole: in JSON a number becomes a text, so that it stays JSON
            self._pass(max(self.waiting.rfind(space) for space in " \n\t\r") + 1)
        return len(text)

    def flush(self) -> None:
        with self.lock:
            self._pass(len(self.waiting))
        self.raw.flush()

    def finish(self) -> None:
        """Let out what waits; nothing comes that would complete it."""
        with self.lock:
            self._let_out(len(self.waiting))

    def _pass(self, end: int) -> None:
        """Let out what waits up to `end`, but not the beginning of a secret."""
        cut = min(end, max(0, unfinished_from(self.passed + self.waiting) - len(self.passed)))
        if len(self.waiting) - cut > LONGEST_WAIT:
            cut = len(self.waiting)
        if cut:
            self._let_out(cut)

    def _let_out(self, end: int) -> None:
        passed = redact(self.passed)  # it may hold a value that is known for a secret only since
        text, self.waiting = redact(passed + self.waiting[:end]), self.waiting[end:]
        # Where a secret begins in what has passed, the texts differ from there on, and its rest is replaced.
        pairs = zip(passed, text, strict=False)
        new = text[next((place for place, (one, other) in enumerate(pairs) if one != other), len(passed)) :]
        self.passed = (passed + new)[-REMEMBERED:]
        self.raw.write(visible(new))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self.raw, name)


def raw_stream(stream: Any) -> TextIO:
    """The stream below the guards."""
    while isinstance(stream, GuardedStream):
        stream = stream.raw
    found: TextIO = stream
    return found


@contextmanager
def guarded_streams() -> Iterator[None]:
    """While the block runs, what is printed passes a `GuardedStream`."""
    before = sys.stdout, sys.stderr
    guards = GuardedStream(raw_stream(sys.stdout)), GuardedStream(raw_stream(sys.stderr))
    sys.stdout, sys.stderr = guards
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for guard in guards:
            with suppress(OSError, ValueError):  # the reader may have gone
                guard.finish()


def console_for(stream: Any = None, **options: Any) -> Console:
    """A rich console on `stream` (default: stdout): its own colours and cursor moves pass, those in texts do not."""
    from rich.console import Console
    from rich.segment import Segment

    class GuardedConsole(Console):
        def _render_buffer(self, buffer: Iterable[Segment]) -> str:
            cleaned = [part if part.control else Segment(harmless(part.text), part.style, None) for part in buffer]
            return super()._render_buffer(cleaned)

    return GuardedConsole(file=raw_stream(sys.stdout if stream is None else stream), **options)
