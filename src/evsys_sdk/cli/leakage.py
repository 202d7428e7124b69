"""`evsys data leakage`: do these rows hold tasks of that benchmark?"""

from __future__ import annotations

import argparse
from codecs import BOM_UTF8
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from evsys_sdk.cli.data import find_entry, open_workspace, print_json, print_table
from evsys_sdk.constants import EXIT_BAD_INPUT, EXIT_OK

if TYPE_CHECKING:
    from evsys_sdk.data.leakage import Audit
    from evsys_sdk.eval.benchmark import Benchmark
    from evsys_sdk.protocols import Row


def audit(args: argparse.Namespace) -> int:
    from evsys_sdk.cli.preview import read_file
    from evsys_sdk.data.leakage import Suite, audit_suites, plain

    path, suite = _rows_file(args), _suite(args)
    # Read twice, so that of a large file only a sample is held in memory.
    known = Suite(name=suite.name, tasks=suite.tasks, places=suite.places)
    [found] = audit_suites(read_file(path), [known], sample=sample_of(path))
    if args.json:
        print_json({"rows_file": str(path), "ok": found.clean, **plain(found)})
    else:
        _print(found)
    return EXIT_OK if found.clean else EXIT_BAD_INPUT


def sample_of(path: Path) -> list[Row]:
    """Rows from the beginning of a file to its end; of a JSONL file no others are parsed."""
    from evsys_sdk.cli.preview import read_file
    from evsys_sdk.data.leakage import SAMPLE_ROWS, spread
    from evsys_sdk.data.tables import kind_of_file
    from evsys_sdk.errors import DataError
    from evsys_sdk.jsonl import open_bytes, parse_object

    if kind_of_file(path) != "jsonl":
        return spread(read_file(path), SAMPLE_ROWS)
    with open_bytes(path) as lines:
        kept = spread((line for line in lines if not line.isspace()), SAMPLE_ROWS)
    rows = []
    for line in kept:
        with suppress(DataError):  # told with its number when all are read
            rows.append(parse_object(line.removeprefix(BOM_UTF8)))
    return rows


def _rows_file(args: argparse.Namespace) -> Path:
    from evsys_sdk.data.intake import data_file
    from evsys_sdk.errors import DataError

    path = data_file(Path(args.rows))
    if path.is_file():
        return path
    if any(mark in args.rows for mark in ("/", ".json")):
        raise DataError(f"no such file: {path.absolute()}")
    workspace = open_workspace(args)
    return workspace.path(find_entry(workspace, args.rows, benchmark=False))


def _suite(args: argparse.Namespace) -> Benchmark:
    from evsys_sdk.eval.benchmark import Benchmark

    if Path(args.suite).exists() or "/" in args.suite:
        return Benchmark.load(args.suite)
    return Benchmark.load(open_workspace(args).pull_benchmark(args.suite), name=args.suite)


def _print(audit: Audit) -> None:
    from evsys_sdk.data.leakage import WORDS

    if audit.leaks:
        rows = [
            [leak.task_id, str(leak.row), WORDS[leak.kind], f"{leak.overlap:.0%}", leak.part] for leak in audit.leaks
        ]
        print_table(["task", "row", "found", "overlap", "part"], rows)
        if audit.tasks > len(audit.leaks):
            print(f"... and {audit.tasks - len(audit.leaks)} more tasks")
    print(audit.text)
    if audit.note:
        print(audit.note)
