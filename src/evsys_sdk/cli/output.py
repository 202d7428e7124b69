"""stdout belongs to results: what foreign code prints goes to stderr; results are printed or written here.

In: a block that runs other people's code; rows, sizes, paths. Out: a clean stdout; a table; a file.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TextIO

LONGEST_TEXT = 2000
"""Characters of one text of a row or a rollout that are printed; `--json` gives all."""


@contextmanager
def prints_to_stderr() -> Iterator[int]:
    """While the block runs, everything written to stdout, also by C code and child processes, goes to stderr; stdout
    itself is kept in the descriptor that the block is given."""
    # What was printed before belongs to stdout, and must leave the buffer before the descriptor changes.
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        # `sys.stdout` may be another object than descriptor 1 (a guarded stream), which `dup2` does not reach.
        with redirect_stdout(sys.stderr):
            yield saved
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def check_result_path(path: str) -> None:
    """Refuse, before anything is spent, a file that a result could not be written to."""
    from evsys_sdk.errors import EvsysError

    target = Path(path)
    try:
        if target.is_dir():
            raise EvsysError(f"--output {path} is a directory; name a file in it")
        target.resolve().parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as exc:
        raise EvsysError(f"--output {path} cannot be written: {exc}") from exc


def write_result(path: str, text: str) -> None:
    """Whole, as every file of ours; a device or a pipe is written to instead of being replaced."""
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.files import write_text
    from evsys_sdk.format import visible
    from evsys_sdk.redaction import redact

    target = Path(path).resolve()
    try:
        if target.exists() and not target.is_file():
            with open(target, "w") as device:
                device.write(visible(redact(text)))
        else:
            write_text(target, text)
    except OSError as exc:
        raise EvsysError(f"--output {path} cannot be written: {exc.strerror}") from exc


def print_json(value: object) -> None:
    from evsys_sdk.files import to_json

    print(to_json(value, indent=2))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns: coloured on a terminal, plain aligned lines elsewhere."""
    if sys.stdout.isatty():
        from rich.table import Table
        from rich.text import Text

        from evsys_sdk.format import console_for, harmless

        table = Table(box=None, show_header=bool(header), pad_edge=False)
        for title in header:
            table.add_column(Text(title))
        for row in rows:  # made harmless before a cell is wrapped: half a secret would not be known for one
            table.add_row(*(Text(harmless(cell), overflow="fold") for cell in row))
        console_for().print(table)
        return
    lines = [list(header), *rows] if header else list(rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def print_text(text: str, indent: str = "", *, stream: TextIO | None = None) -> None:
    """Print lines of prose, on stdout by default. On a terminal they are wrapped between words, which the terminal
    itself would not do."""
    stream = sys.stdout if stream is None else stream
    for line in text.splitlines() or [""]:
        line = f"{indent}{line}"
        if stream.isatty():
            inner = " " * (len(line) - len(line.lstrip()) + 2)  # what belongs to a line stands below its beginning
            line = textwrap.fill(
                line, _width_of(stream), subsequent_indent=inner, break_long_words=False, break_on_hyphens=False,
                drop_whitespace=True, replace_whitespace=False, expand_tabs=False,
            )  # fmt: skip
        print(line, file=stream)


def _width_of(stream: TextIO) -> int:
    """Columns of the terminal behind the stream; stdout's may be a pipe while stderr's is not."""
    columns = os.environ.get("COLUMNS", "")
    if stream is not sys.stdout and not columns.isdecimal():
        with suppress(OSError, ValueError):  # ValueError: a stream without a file
            return os.get_terminal_size(stream.fileno()).columns or 80  # 0 where no size was ever set
    return shutil.get_terminal_size().columns


def format_size(size: float) -> str:
    """Bytes for people: `93.4 MB`."""
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def short_path(path: Path) -> str:
    """Relative to the current folder where it lies in it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
