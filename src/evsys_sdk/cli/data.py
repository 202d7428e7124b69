"""`evsys data`: register, list and look at the datasets and benchmarks of the workspace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from evsys_sdk.constants import EXIT_OK

if TYPE_CHECKING:
    from evsys_sdk.data.manifest import Kind, Manifest
    from evsys_sdk.data.workspace import Workspace


def add_parser(verbs: Any) -> None:
    about = "Datasets and benchmarks of the workspace (.evsys/): versioned, immutable, found by id or name."
    data = verbs.add_parser("data", help="datasets and benchmarks by id and name", description=about)
    inner = data.add_subparsers(dest="data_verb", metavar="<data verb>", required=True)
    _add_adding(inner)
    listing = _verb(inner, "list", list_entries, "all versions in the workspace")
    listing.add_argument("--benchmark", action="store_true", help="benchmarks only")
    for name, act, text in (
        ("show", show_entry, "one version: manifest, formats, fields, first row"),
        ("pull", pull_entry, "check one version and print the path of its file"),
    ):
        parser = _verb(inner, name, act, text)
        parser.add_argument("ref", help="an id, or a name for its newest version")
        parser.add_argument("--benchmark", action="store_true", help="look among the benchmarks only")
    _add_preview(inner)
    _add_leakage(inner)


def _add_leakage(inner: Any) -> None:
    leakage = _verb(inner, "leakage", audit_leakage, "whether rows hold tasks of a benchmark, word for word or nearly")
    leakage.epilog = "Exit codes: 0 nothing found, 1 rows hold tasks of the benchmark (or something is wrong)."
    leakage.add_argument("rows", help="a JSONL, .json, .csv or .parquet file, or a dataset by id or name")
    leakage.add_argument("suite", metavar="benchmark", help="tasks.jsonl or its folder, or a benchmark by id or name")


def _add_adding(inner: Any) -> None:
    adding = _verb(inner, "add", add_file, "register a file as the next version of a name")
    adding.add_argument("path", help="a JSONL, .json, .csv or .parquet file, or a folder with tasks.jsonl")
    adding.add_argument("--name", required=True, help="the name to find it by")
    adding.add_argument("--benchmark", action="store_true", help="the rows are tasks of a benchmark")
    adding.add_argument("--parent", action="append", default=[], metavar="REF", help="made from this one; repeatable")
    adding.add_argument("--note", default="", help="a line about it for the manifest")


def _add_preview(inner: Any) -> None:
    preview = _verb(inner, "preview", preview_rows, "rows as a run will see them, after its transforms")
    preview.add_argument("target", help="a config (.yaml), a JSONL, .json, .csv or .parquet file, an id or a name")
    preview.add_argument("-n", dest="count", type=_positive, default=5, metavar="N", help="how many rows (default 5)")
    preview.add_argument("--run", dest="run_name", metavar="NAME", help="which run of the config (default: the first)")
    preview.add_argument("--raw", action="store_true", help="before the transforms")
    preview.add_argument("--benchmark", action="store_true", help="look for an id or name among the benchmarks only")


def _verb(inner: Any, name: str, act: Any, text: str) -> Any:
    parser = inner.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.add_argument("--workspace", metavar="DIR", help="the workspace folder (default: the project's .evsys)")
    parser.set_defaults(run=act)
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return int(text)


def open_workspace(args: argparse.Namespace, near: str | None = None) -> Workspace:
    """The workspace that was named, else that of the project around `near` (default: the current folder)."""
    from pathlib import Path

    from evsys_sdk.data.workspace import Workspace

    return Workspace(Path(args.workspace)) if args.workspace else Workspace.find(near)


def find_entry(workspace: Workspace, ref: str, *, benchmark: bool) -> Manifest:
    """The entry `ref` names: a dataset, or a benchmark when asked for or when no dataset is called so."""
    kind: Kind = "benchmark" if benchmark else "dataset"
    if not benchmark and workspace.shelf("dataset").look_up(ref) == (None, []):
        if workspace.shelf("benchmark").look_up(ref) != (None, []):
            kind = "benchmark"
    return workspace.pull(ref, kind)


def add_file(args: argparse.Namespace) -> int:
    workspace = open_workspace(args)
    kind: Kind = "benchmark" if args.benchmark else "dataset"
    before = {entry.id for entry in workspace.list(kind)}
    entry = workspace.add(args.path, name=args.name, kind=kind, parents=args.parent, note=args.note)
    new = entry.id not in before
    if args.json:
        print_json({**_plain(workspace, entry), "new": new})
        return EXIT_OK
    print(f"{'added' if new else 'already there'}: {kind} {entry.name} v{entry.version}, {count_rows(entry.n_rows)}")
    print(f"id: {entry.id}")
    newest = workspace.get(entry.name, kind)
    if newest.version > entry.version:
        print(f"note: the name {entry.name} means its newest version, v{newest.version}; use the id for this one")
    return EXIT_OK


def list_entries(args: argparse.Namespace) -> int:
    workspace = open_workspace(args)
    kind: Kind | None = "benchmark" if args.benchmark else None
    entries, faults = workspace.list(kind), workspace.unusable(kind)
    if args.json:
        sound = [{**_plain(workspace, entry), "problem": None} for entry in entries]
        print_json(sound + [{"id": f.id, "kind": f.kind, "problem": f.reason} for f in faults])
        return EXIT_OK
    if not entries and not faults:
        print(f"nothing in {workspace.root}; next: evsys data add PATH --name NAME")
        return EXIT_OK
    if entries:
        print_table(["name", "version", "kind", "rows", "size", "added", "id"], [_cells(entry) for entry in entries])
    for fault in faults:
        print(f"not to be trusted: {fault.kind} {fault.id}: {fault.reason}")
    return EXIT_OK


def show_entry(args: argparse.Namespace) -> int:
    from evsys_sdk.cli.preview import print_row, read_file, summarise

    workspace = open_workspace(args)
    entry = find_entry(workspace, args.ref, benchmark=args.benchmark)
    seen = summarise(read_file(workspace.path(entry)), keep=1)
    plain = _plain(workspace, entry)
    if args.json:
        print_json({**plain, "formats": seen.formats, "fields": seen.fields, "first_row": next(iter(seen.rows), None)})
        return EXIT_OK
    lineage = plain.pop("lineage")
    shown = {**plain, "bytes": f"{entry.bytes} ({format_size(entry.bytes)})", **lineage}
    shown |= {"formats": seen.formats, "fields": seen.fields}
    print_table([], [[key, _text(value)] for key, value in shown.items() if value not in ("", (), {})])
    for row in seen.rows:
        print("first row")
        print_row(row)
    return EXIT_OK


def pull_entry(args: argparse.Namespace) -> int:
    workspace = open_workspace(args)
    entry = find_entry(workspace, args.ref, benchmark=args.benchmark)
    if args.json:
        print_json(_plain(workspace, entry))
    else:
        print(workspace.path(entry))
    return EXIT_OK


def preview_rows(args: argparse.Namespace) -> int:
    from evsys_sdk.cli.preview import preview

    return preview(args)


def audit_leakage(args: argparse.Namespace) -> int:
    from evsys_sdk.cli.leakage import audit

    return audit(args)


def count_rows(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"


def print_json(value: Any) -> None:
    from evsys_sdk.atomic import to_json

    print(to_json(value, indent=2))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns: coloured on a terminal, plain aligned lines elsewhere."""
    if sys.stdout.isatty():
        from rich.table import Table
        from rich.text import Text

        from evsys_sdk.terminal import console_for

        table = Table(*header, box=None, show_header=bool(header), pad_edge=False)
        for row in rows:
            table.add_row(*(Text(cell, overflow="fold") for cell in row))
        console_for().print(table)
        return
    lines = [list(header), *rows] if header else list(rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cells(entry: Manifest) -> list[str]:
    size, added = format_size(entry.bytes), entry.lineage.created_at
    return [entry.name, f"v{entry.version}", entry.kind, str(entry.n_rows), size, added, entry.id]


def _plain(workspace: Workspace, entry: Manifest) -> dict[str, Any]:
    from evsys_sdk.data.manifest import manifest_data

    return {**manifest_data(entry), "path": str(workspace.path(entry))}


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {count}" for key, count in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def format_size(size: float) -> str:
    """Bytes for people: `93.4 MB`."""
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
