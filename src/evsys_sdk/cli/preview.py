"""`evsys data preview`: the rows themselves, readable.

In: a config, a file, or a reference into the workspace. Out: how many rows there are before and after the
transforms, their formats, and the first few as a person would read them.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evsys_sdk.cli.data import count_rows, find_entry, open_workspace, print_json
from evsys_sdk.constants import EXIT_OK
from evsys_sdk.data.intake import data_file
from evsys_sdk.data.tables import kind_of_file
from evsys_sdk.data_types import TargetFormat, block_to_image_src, content_text, detect_format
from evsys_sdk.errors import EvsysError, not_known
from evsys_sdk.protocols import Row

LONGEST_TEXT = 2000
"""Characters of one text that are shown; `--json` gives all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a look at all rows shows."""

    count: int
    formats: dict[str, int]
    fields: dict[str, int]
    """Field -> in how many rows."""
    rows: list[Row]
    """The first few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One block of data of what is previewed."""

    name: str
    """`data`, `eval.eval_data`, ... of a config; the file's or entry's own name otherwise."""
    source: str
    rows_before: int
    rows_after: int
    formats: dict[str, int]
    rows: list[Row]


def preview(args: argparse.Namespace) -> int:
    target = Path(args.target)
    run_name = None
    if target.suffix in (".yaml", ".yml"):
        run_name, parts = _of_config(args)
    else:
        parts = [_of_file(args, target)]
    if args.json:
        print_json({"target": args.target, "run": run_name, "parts": [asdict(part) for part in parts]})
        return EXIT_OK
    if run_name:
        print(f"run: {run_name}")
    for part in parts:
        _print_part(part)
    return EXIT_OK


def _of_config(args: argparse.Namespace) -> tuple[str, list[Part]]:
    from evsys_sdk import registry
    from evsys_sdk.config.files import load_yaml
    from evsys_sdk.config.project import import_extensions, search_folders
    from evsys_sdk.config.source import source_of
    from evsys_sdk.data.rows import load_rows
    from evsys_sdk.preflight import data_blocks

    config = load_yaml(args.target)
    import_extensions(config)
    run = _chosen(config.all_runs(), args.run_name)
    store = registry.data_stores.build(config.data_store.kind, dict(config.data_store.params))
    parts = []
    for place, data in data_blocks(run):
        loaded = load_rows(
            data,
            store=store,
            folders=search_folders(source_of(config)),
            workspace=open_workspace(args, near=args.target),
            transforms=[] if args.raw else None,
        )
        seen = summarise(loaded.rows, keep=args.count)
        parts.append(_part(place, loaded.source, seen, rows_before=loaded.n_raw))
    return run.name, parts


def _chosen(runs: list[Any], name: str | None) -> Any:
    if name is None:
        return runs[0]
    for run in runs:
        if run.name == name:
            return run
    raise EvsysError(not_known(name, "run of this config", [run.name for run in runs]))


def _of_file(args: argparse.Namespace, target: Path) -> Part:
    if args.run_name:
        raise EvsysError("--run names a run of a config, and the target is no .yaml file")
    path = data_file(target)
    if not path.is_file():
        if any(mark in args.target for mark in ("/", ".json")):
            raise EvsysError(f"no such file: {path.absolute()}")
        workspace = open_workspace(args)
        entry = find_entry(workspace, args.target, benchmark=args.benchmark)
        path = workspace.path(entry)
    seen = summarise(read_file(path), keep=args.count)
    return _part(args.target, str(path), seen, rows_before=seen.count)


def _part(name: str, source: str, seen: Summary, *, rows_before: int) -> Part:
    return Part(
        name=name, source=source, rows_before=rows_before, rows_after=seen.count, formats=seen.formats, rows=seen.rows
    )


def read_file(path: Path) -> Iterable[Row]:
    """The rows of a JSONL, `.json`, CSV or Parquet file, streamed where the format allows."""
    from evsys_sdk.config.models import DataConfig
    from evsys_sdk.data.sources import as_rows, open_source
    from evsys_sdk.data.stores import LocalDataStore

    config = DataConfig(source_kind=kind_of_file(path), path=str(path))
    return as_rows(open_source(config, store=LocalDataStore()).rows(), str(path))


def summarise(rows: Iterable[Row], *, keep: int) -> Summary:
    """Count all rows and keep the first few."""
    formats: Counter[str] = Counter()
    fields: Counter[str] = Counter()
    kept: list[Row] = []
    for row in rows:
        formats[detect_format(row)] += 1
        fields.update(map(str, row))
        if len(kept) < keep:
            kept.append(row)
    return Summary(count=formats.total(), formats=dict(formats), fields=dict(fields), rows=kept)


def _print_part(part: Part) -> None:
    print(part.name if part.name == part.source else f"{part.name}: {part.source}")
    counts = " and ".join(f"{n} {name}" for name, n in part.formats.items()) or "none"
    lost = part.rows_before != part.rows_after
    print(count_rows(part.rows_before) + (f" -> {part.rows_after} after transforms" if lost else ""))
    print(f"format: {counts}")
    for number, row in enumerate(part.rows):
        print(f"\n[{number}]")
        print_row(row)
    hidden = part.rows_after - len(part.rows)
    print(f"\n... and {hidden} more\n" if hidden else "")


def print_row(row: Row) -> None:
    """One row as labelled lines; labels stand out on a terminal."""
    if sys.stdout.isatty():
        from rich.text import Text

        from evsys_sdk.terminal import console_for

        console = console_for(highlight=False)
        for label, text in readable(row):
            console.print(Text.assemble("  ", (f"{label}: ", "bold cyan"), _indented(text)), soft_wrap=True)
        return
    for label, text in readable(row):
        print(f"  {label}: {_indented(text)}")


def _indented(text: str) -> str:
    # Rows come from anywhere: an escape sequence in one must not drive the reader's terminal.
    safe = "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)
    if len(safe) > LONGEST_TEXT:
        safe = f"{safe[:LONGEST_TEXT]} ... (+{len(safe) - LONGEST_TEXT} characters)"
    return safe.replace("\n", "\n    ")


def readable(row: Row) -> Iterator[tuple[str, str]]:
    """Label and text of each part of a row: the turns of a chat, the fields of anything else."""
    shape = detect_format(row)
    for key, value in row.items():
        if shape == TargetFormat.CHAT_MESSAGES and key == "messages":
            yield from (_turn(message) for message in value)
        elif shape == TargetFormat.CHAT_MESSAGES and key == "target_assistant":
            yield "assistant (target)", _value_text(value)
        elif shape == TargetFormat.HARBOR_TASK and key == "instruction":
            yield key, _content(value)
        elif shape == TargetFormat.PROMPT_DATASET and key == "inputs":
            yield from ((f"inputs.{name}", _value_text(item)) for name, item in value.items())
        else:
            yield str(key), _value_text(value)


def _turn(message: Any) -> tuple[str, str]:
    if not isinstance(message, dict):
        return "?", _value_text(message)
    calls = message.get("tool_calls")
    text = _content(message.get("content")) + (f" [calls {_value_text(calls)}]" if calls else "")
    role = str(message.get("role", "?"))
    return f"{role} (weight 0: not learnt)" if message.get("weight") == 0 else role, text.strip()


def _content(content: Any) -> str:
    if not isinstance(content, str | list | None):
        return _value_text(content)
    blocks = content if isinstance(content, list) else []
    images = sum(isinstance(block, dict) and block_to_image_src(block) is not None for block in blocks)
    return content_text(content) + (f" [{images} image{'s' if images > 1 else ''}]" if images else "")


def _value_text(value: Any) -> str:
    from evsys_sdk.atomic import to_json

    return value if isinstance(value, str) else to_json(value)
