"""What the process of `evsys run` writes, in `<output_dir>/<name>.log`, for `evsys logs`.

In: the launch of an experiment. Out: a header per launch, stamped progress, the SDK's log lines and the summary. A
detached process writes only there: at its launch stdout and stderr become the log, and its starter gets the launch
record. What it writes before that belongs to a command that was refused, and appears where the command was typed.
"""

from __future__ import annotations

import io
import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evsys_sdk.cli.output import prints_to_stderr
from evsys_sdk.cli.progress import StampedProgress, progress_display
from evsys_sdk.experiment.registration import note_launch
from evsys_sdk.files import to_json
from evsys_sdk.format import GuardedStream
from evsys_sdk.logs import ROOT, line_format
from evsys_sdk.record.processes import ExperimentProcess, log_of

if TYPE_CHECKING:
    from evsys_sdk.config.schema import ExperimentConfig


class _LogFile(io.RawIOBase):
    """A file that nothing depends on: before it is open, and when the disk is full, what is written is lost."""

    def __init__(self) -> None:
        self.descriptor: int | None = None

    def open(self, path: Path) -> bool:
        with suppress(OSError):
            self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        return self.descriptor is not None

    def close(self) -> None:
        super().close()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.descriptor is not None:
            with suppress(OSError):
                os.write(self.descriptor, data)
        return len(data)


class RunLog:
    """The log of one launch."""

    def __init__(self, command: Sequence[str], *, starter: int | None):
        self.command = list(command)
        self.starter = starter
        """Of a detached process: the descriptor on which its starter waits for news."""
        self.file = _LogFile()
        text = io.TextIOWrapper(self.file, "utf-8", errors="backslashreplace", write_through=True)  # type: ignore[type-var]
        self.stream: Any = GuardedStream(text)
        self.outputs = [1, 2]
        self.handler = logging.StreamHandler(self.stream)
        self.handler.setFormatter(line_format())

    @contextmanager
    def display(self, *, live: bool, quiet: bool = False) -> Iterator[list[Any]]:
        """Watchers that report the runs: to the log, and to the terminal unless there is none."""
        to_log = StampedProgress(self.stream)
        with prints_to_stderr() as stdout:
            self.outputs.append(stdout)
            if self.starter is not None:
                yield [to_log]
                return
            if quiet:
                with self._speaking():
                    yield [to_log]
                return
            with progress_display(sys.stderr, live=live) as watcher, self._speaking():
                yield [watcher, to_log]

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        """The SDK's log lines go to the log too, and what ends the run."""
        logging.getLogger(ROOT).addHandler(self.handler)
        try:
            yield
        except BaseException as exc:
            self.stream.write(f"{str(exc) or 'interrupted'}\n")
            raise
        finally:
            logging.getLogger(ROOT).removeHandler(self.handler)

    def launched(self, config: ExperimentConfig, record: Path) -> None:
        """The experiment is this process's own: the log is opened, and the launch noted and told."""
        log = log_of(record) if self.file.open(log_of(record)) else None
        detached = self.starter is not None
        launch = note_launch(config, record, command=self.command, log=log, detached=detached)
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        self.stream.write(f"=== {when} {shlex.join(self.command)} ({launch.process}) ===\n")
        if self.starter is not None:
            self._leave(self.starter, launch)

    def _leave(self, starter: int, launch: ExperimentProcess) -> None:
        """Close what stdout and stderr were, so that no process waits for their end; then send the launch record."""
        target = os.open(os.devnull, os.O_WRONLY) if self.file.descriptor is None else self.file.descriptor
        sys.stderr.flush()
        # `prints_to_stderr` keeps stdout under a third number: with that copy open, a reader of stdout would wait on.
        for output in self.outputs:
            os.dup2(target, output)
        with suppress(OSError), os.fdopen(starter, "w") as told:  # it may have gone; the run continues
            told.write(to_json(asdict(launch)))

    def summary(self, result: Any) -> None:
        from evsys_sdk.cli.summary import print_summary

        with redirect_stdout(self.stream):
            print_summary(result)
