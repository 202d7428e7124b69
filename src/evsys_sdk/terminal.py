"""Text on its way to a terminal.

In: text that others wrote: model output, task ids, hypotheses, error messages. Out: the same text with control
characters shown as text (`\\u001b`), so that no escape sequence reaches the terminal, and without known secrets.
`guarded_streams` is where the command line's text leaves the process; `console_for` is the way for rich.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from evsys_sdk.redaction import redact

if TYPE_CHECKING:
    from rich.console import Console

# C0 without tab and newline, DEL, C1, line separators, embeddings and overrides of writing direction, lone surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """`text` with every control character but tab and newline as its JSON escape, which a terminal only prints."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text.replace("\r\n", "\n"))


class GuardedStream:
    """A text stream through which only harmless text passes; `raw` is the stream itself."""

    def __init__(self, raw: TextIO):
        self.raw = raw

    def write(self, text: str) -> int:
        self.raw.write(visible(redact(text)))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
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
    sys.stdout = GuardedStream(raw_stream(sys.stdout))
    sys.stderr = GuardedStream(raw_stream(sys.stderr))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def console_for(stream: Any = None, **options: Any) -> Console:
    """A rich console on `stream` (default: stdout): its own colours and cursor moves pass, those in texts do not."""
    from rich.console import Console
    from rich.segment import Segment

    class GuardedConsole(Console):
        def _render_buffer(self, buffer: Iterable[Segment]) -> str:
            cleaned = [
                part if part.control else Segment(visible(redact(part.text)), part.style, None) for part in buffer
            ]
            return super()._render_buffer(cleaned)

    return GuardedConsole(file=raw_stream(sys.stdout if stream is None else stream), **options)
