"""`evsys data`: register, list and look at the datasets and benchmarks of the workspace.

In: a config, a file, or a reference into the workspace. Out: manifests; rows as a person reads them; whether rows hold
tasks of a benchmark.
"""

from __future__ import annotations

import sys
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evsys_sdk.cli.options import POSITIVE, F, group, json_option, workspace_option
from evsys_sdk.cli.output import LONGEST_TEXT, format_size, print_json, print_table
from evsys_sdk.constants import EXIT_BAD_INPUT, EXIT_OK

if TYPE_CHECKING:
    from evsys_sdk.data.manifest import DatasetManifest, Kind
    from evsys_sdk.data.workspace import Workspace
    from evsys_sdk.operations.token_view import TokenSequence
    from evsys_sdk.protocols import Row

FILES = "a JSONL, .json, .csv or .parquet file"


@group("data")
def data() -> None:
    """Datasets and benchmarks of the workspace (.evsys/): versioned, immutable, found by id or name."""


def workspace_options(function: F) -> F:
    return json_option(workspace_option(function))


def ref_options(function: F) -> F:
    function = click.option("--benchmark", is_flag=True, help="look among the benchmarks only")(function)
    return click.argument("ref", help="an id, or a name for its newest version")(function)


@data.command("add")
@click.argument("path", help=f"{FILES}, or a folder with tasks.jsonl")
@click.option("--name", required=True, help="the name to find it by")
@click.option("--benchmark", is_flag=True, help="the rows are tasks of a benchmark")
@click.option("--parent", "parents", multiple=True, metavar="REF", help="made from this one; repeatable")
@click.option("--note", default="", help="a line about it for the manifest")
@workspace_options
def add(
    path: str, name: str, benchmark: bool, parents: tuple[str, ...], note: str, workspace: str | None, as_json: bool
) -> int:
    """Register a file as the next version of a name."""
    place = open_workspace(workspace)
    kind: Kind = "benchmark" if benchmark else "dataset"
    before = {entry.id for entry in place.list(kind)}
    entry = place.add(path, name=name, kind=kind, parents=list(parents), note=note)
    is_new = entry.id not in before
    if as_json:
        print_json({**_plain(place, entry), "new": is_new})
        return EXIT_OK
    print(f"{'added' if is_new else 'already there'}: {kind} {entry.name} v{entry.version}, {_rows(entry.n_rows)}")
    print(f"id: {entry.id}")
    # Content that was added before, and then other content under the name: adding it again makes no version.
    newest = place.get(entry.name, kind)
    if newest.version > entry.version:
        print(f"note: the name {entry.name} means its newest version, v{newest.version}; use the id for this one")
    return EXIT_OK


@data.command("list")
@click.option("--benchmark", is_flag=True, help="benchmarks only")
@workspace_options
def list_entries(benchmark: bool, workspace: str | None, as_json: bool) -> int:
    """All versions in the workspace."""
    place = open_workspace(workspace)
    kind: Kind | None = "benchmark" if benchmark else None
    entries, faults = place.list(kind), place.unusable(kind)
    if as_json:
        sound = [{**_plain(place, entry), "problem": None} for entry in entries]
        print_json(sound + [{"id": f.id, "kind": f.kind, "problem": f.reason} for f in faults])
        return EXIT_OK
    if not entries and not faults:
        print(f"nothing in {place.root}; next: evsys data add PATH --name NAME")
    if entries:
        rows = [
            [e.name, f"v{e.version}", e.kind, str(e.n_rows), format_size(e.bytes), e.lineage.created_at, e.id]
            for e in entries
        ]
        print_table(["name", "version", "kind", "rows", "size", "added", "id"], rows)
    for fault in faults:
        print(f"not to be trusted: {fault.kind} {fault.id}: {fault.reason}")
    return EXIT_OK


@data.command("show")
@ref_options
@workspace_options
def show(ref: str, benchmark: bool, workspace: str | None, as_json: bool) -> int:
    """One version: manifest, formats, fields, first row."""
    place = open_workspace(workspace)
    entry = find_entry(place, ref, benchmark=benchmark)
    seen = summarise(read_file(place.path(entry)), keep=1)
    plain = _plain(place, entry)
    if as_json:
        print_json({**plain, "formats": seen.formats, "fields": seen.fields, "first_row": next(iter(seen.rows), None)})
        return EXIT_OK
    lineage = plain.pop("lineage")
    shown = {**plain, "bytes": f"{entry.bytes} ({format_size(entry.bytes)})", **lineage}
    rows = []
    for key, value in (shown | {"formats": seen.formats, "fields": seen.fields}).items():
        if isinstance(value, dict):
            rows.append([key, ", ".join(f"{name} {count}" for name, count in value.items())])
        else:
            rows.append([key, ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)])
    print_table([], [row for row in rows if row[1]])
    for row in seen.rows:
        print("first row")
        print_row(row)
    return EXIT_OK


@data.command("pull")
@ref_options
@workspace_options
def pull(ref: str, benchmark: bool, workspace: str | None, as_json: bool) -> int:
    """Check one version and print the path of its file."""
    place = open_workspace(workspace)
    entry = find_entry(place, ref, benchmark=benchmark)
    if as_json:
        print_json(_plain(place, entry))
    else:
        print(place.path(entry))
    return EXIT_OK


@data.command("upload")
@ref_options
@click.option("--split", default="", metavar="SPLIT", help="train, val or test; rows of a test split are for people")
@workspace_options
def upload(ref: str, benchmark: bool, split: str, workspace: str | None, as_json: bool) -> int:
    """Send one version to the dashboard (EVSYS_API_URL, EVSYS_API_KEY, EVSYS_PROJECT_ID), so that configs on other
    machines can name it. The dashboard has it whole afterwards, or not at all."""
    from evsys_sdk.data.workspace import Workspace

    place = Workspace(open_workspace(workspace).root)  # without a source: what is sent is what is here
    return upload_entry(place, find_entry(place, ref, benchmark=benchmark), split=split, as_json=as_json)


def upload_entry(workspace: Workspace, entry: DatasetManifest, *, split: str, as_json: bool) -> int:
    """Upload a stored version and say what became of it."""
    from evsys_sdk.data.remote import DashboardSource

    source = DashboardSource.required()
    done = source.upload(entry, workspace.path(entry), split=split)
    if as_json:
        print_json({**asdict(done), "id": entry.id, "api_url": source.api_url, "project": source.project_id})
        return EXIT_OK
    marked = f", split {done.split}" if done.split else ""
    print(f"{done.status}: {entry.kind} {done.ref} ({_rows(done.n_rows)}{marked}) at {source.api_url}")
    if done.ref != entry.id:
        print(f"note: version {entry.version} is other content there, so it is {done.ref} there and {entry.id} here")
    return EXIT_OK


@data.command(
    "leakage", epilog="Exit codes: 0 nothing found, 1 rows hold tasks of the benchmark (or something is wrong)."
)
@click.argument("rows", help=f"{FILES}, or a dataset by id or name")
@click.argument("suite", metavar="BENCHMARK", help="tasks.jsonl or its folder, or a benchmark by id or name")
@workspace_options
def leakage(rows: str, suite: str, workspace: str | None, as_json: bool) -> int:
    """Whether rows hold tasks of a benchmark, word for word or nearly."""
    from evsys_sdk.contamination.audit import WORDS, Suite, audit_suites, plain
    from evsys_sdk.eval.benchmark import Benchmark

    path = find_rows(rows, workspace)
    if Path(suite).exists() or "/" in suite:
        tasks = Benchmark.load(suite)
    else:
        tasks = Benchmark.load(open_workspace(workspace).pull_benchmark(suite), name=suite)
    # The file is read twice, so that only a sample of a large one is held in memory.
    known = Suite(name=tasks.name, tasks=tasks.tasks, places=tasks.places)
    [audit] = audit_suites(read_file(path), [known], sample=sample_of(path))
    if as_json:
        print_json({"rows_file": str(path), "ok": audit.clean, **plain(audit)})
        return EXIT_OK if audit.clean else EXIT_BAD_INPUT
    if audit.leaks:
        cells = [
            [leak.task_id, str(leak.row), WORDS[leak.kind], f"{leak.overlap:.0%}", leak.part] for leak in audit.leaks
        ]
        print_table(["task", "row", "found", "overlap", "part"], cells)
        if audit.tasks > len(audit.leaks):
            print(f"... and {audit.tasks - len(audit.leaks)} more tasks")
    print(audit.text)
    if audit.note:
        print(audit.note)
    return EXIT_OK if audit.clean else EXIT_BAD_INPUT


def sample_of(path: Path) -> list[Row]:
    """Rows from the beginning of a file to its end; of a JSONL file no others are parsed."""
    from evsys_sdk.contamination.audit import SAMPLE_ROWS, sample_evenly
    from evsys_sdk.data.sources import kind_of_file
    from evsys_sdk.errors import DataError
    from evsys_sdk.files import open_bytes, parse_object

    if kind_of_file(path) != "jsonl":
        return sample_evenly(read_file(path), SAMPLE_ROWS)
    with open_bytes(path) as lines:
        kept = sample_evenly((line for line in lines if not line.isspace()), SAMPLE_ROWS)
    rows = []
    for line in kept:
        with suppress(DataError):  # reported with its number when all are read
            rows.append(parse_object(line.removeprefix(BOM_UTF8)))
    return rows


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
class PreviewBlock:
    """One block of data of what is previewed."""

    name: str
    """`data`, `eval.eval_data`, ... of a config; the file's or entry's own name otherwise."""
    source: str
    rows_before: int
    rows_after: int
    formats: dict[str, int]
    rows: list[Row]
    tokens: list[list[TokenSequence]] = field(default_factory=list)
    """Of each row, where they were asked for."""


@data.command("preview")
@click.argument("target", help=f"a config (.yaml), {FILES}, an id or a name")
@click.option("-n", "count", type=POSITIVE, default=5, metavar="N", help="how many rows (default 5)")
@click.option("--run", "run_name", metavar="NAME", help="which run of the config (default: the first)")
@click.option("--raw", is_flag=True, help="before the transforms")
@click.option("--tokens", is_flag=True, help="as the model sees them, [[learnt]] tokens marked; opens the model")
@click.option("--benchmark", is_flag=True, help="look for an id or name among the benchmarks only")
@workspace_options
def preview(
    target: str,
    count: int,
    run_name: str | None,
    raw: bool,
    tokens: bool,
    benchmark: bool,
    workspace: str | None,
    as_json: bool,
) -> int:
    """Rows as a run will see them, after its transforms."""
    from evsys_sdk.errors import EvsysError

    if raw and tokens:
        raise EvsysError("--raw shows rows before the transforms, and the model sees them after: leave out --raw")
    if Path(target).suffix in (".yaml", ".yml"):
        run_name, parts = preview_config(target, run_name, count, raw=raw, tokens=tokens, workspace=workspace)
    elif run_name:
        raise EvsysError("--run names a run of a config, and the target is no .yaml file")
    elif tokens:
        raise EvsysError("--tokens needs a config (.yaml), which names the model and the algorithm")
    else:
        path = find_rows(target, workspace, benchmark=benchmark)
        parts = [_block(target, str(path), summarise(read_file(path), keep=count))]
    if as_json:
        print_json({"target": target, "run": run_name, "parts": [asdict(part) for part in parts]})
        return EXIT_OK
    if run_name:
        print(f"run: {run_name}")
    for part in parts:
        print(part.name if part.name == part.source else f"{part.name}: {part.source}")
        lost = part.rows_before != part.rows_after
        print(_rows(part.rows_before) + (f" -> {part.rows_after} after transforms" if lost else ""))
        print(f"format: {' and '.join(f'{n} {name}' for name, n in part.formats.items()) or 'none'}")
        for number, row in enumerate(part.rows):
            print(f"\n[{number}]")
            if tokens:
                print_tokens(part.tokens[number])
            else:
                print_row(row)
        hidden = part.rows_after - len(part.rows)
        print(f"\n... and {hidden} more\n" if hidden else "")
    return EXIT_OK


def preview_config(
    target: str, run_name: str | None, count: int, *, raw: bool, tokens: bool, workspace: str | None
) -> tuple[str, list[PreviewBlock]]:
    """The name of the run and its data blocks, loaded as the run loads them."""
    from evsys_sdk import registry
    from evsys_sdk.checks.blocks import data_blocks
    from evsys_sdk.config.load import load_yaml
    from evsys_sdk.config.project import import_extensions, search_folders
    from evsys_sdk.config.yaml_io import source_of
    from evsys_sdk.data.rows import load_rows
    from evsys_sdk.errors import EvsysError, not_known

    config = load_yaml(target)
    import_extensions(config)
    # Reversed: of runs that share a name, the first is meant.
    runs = {run.name: run for run in reversed(config.all_runs())}
    run = config.all_runs()[0] if run_name is None else runs.get(run_name)
    if run is None:
        raise EvsysError(not_known(str(run_name), "run of this config", runs))
    store = registry.data_stores.build(config.data_store.kind, dict(config.data_store.params))
    parts = []
    for place, block in data_blocks(run):
        loaded = load_rows(
            block,
            store=store,
            folders=search_folders(source_of(config)),
            workspace=open_workspace(workspace, near=target),
            transforms=[] if raw else None,
        )
        parts.append(_block(place, loaded.source, summarise(loaded.rows, keep=count), rows_before=loaded.n_raw))
    if tokens:
        from evsys_sdk.operations.token_view import view_tokens

        # One call for all blocks: it opens the model.
        found = iter(view_tokens(run, [row for part in parts for row in part.rows]))
        parts = [replace(part, tokens=[next(found) for _ in part.rows]) for part in parts]
    return run.name, parts


def _block(name: str, source: str, seen: Summary, *, rows_before: int | None = None) -> PreviewBlock:
    before = seen.count if rows_before is None else rows_before
    return PreviewBlock(
        name=name, source=source, rows_before=before, rows_after=seen.count, formats=seen.formats, rows=seen.rows
    )


def open_workspace(folder: str | None, near: str | None = None) -> Workspace:
    """The workspace that was named, else that of the project around `near` (default: the current folder)."""
    from evsys_sdk.data.workspace import Workspace

    return Workspace(Path(folder)) if folder else Workspace.find(near)


def find_entry(workspace: Workspace, ref: str, *, benchmark: bool) -> DatasetManifest:
    """The entry `ref` names: a dataset, or a benchmark when asked for or when no dataset is called so."""
    kind: Kind = "benchmark" if benchmark else "dataset"
    if not benchmark and workspace.versions("dataset").look_up(ref) == (None, []):
        if workspace.versions("benchmark").look_up(ref) != (None, []):
            kind = "benchmark"
    return workspace.pull(ref, kind)


def find_rows(text: str, folder: str | None, *, benchmark: bool = False) -> Path:
    """The file that `text` names: a path, or an id or name in the workspace."""
    from evsys_sdk.data.manifest import data_file
    from evsys_sdk.errors import DataError

    path = data_file(Path(text))
    if path.is_file():
        return path
    if any(mark in text for mark in ("/", ".json")):
        raise DataError(f"no such file: {path.absolute()}")
    workspace = open_workspace(folder)
    return workspace.path(find_entry(workspace, text, benchmark=benchmark))


def _plain(workspace: Workspace, entry: DatasetManifest) -> dict[str, Any]:
    from evsys_sdk.data.manifest import manifest_data

    return {**manifest_data(entry), "path": str(workspace.path(entry))}


def _rows(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"


def read_file(path: Path) -> Iterable[Row]:
    """The rows of a JSONL, `.json`, CSV or Parquet file, streamed where the format allows."""
    from evsys_sdk.config.schema import DataConfig
    from evsys_sdk.data.sources import as_rows, kind_of_file, open_source
    from evsys_sdk.data.stores import LocalDataStore

    config = DataConfig(source_kind=kind_of_file(path), path=str(path))
    return as_rows(open_source(config, store=LocalDataStore()).rows(), str(path))


def summarise(rows: Iterable[Row], *, keep: int) -> Summary:
    """Count all rows and keep the first few."""
    from evsys_sdk.data_types import detect_format

    formats: Counter[str] = Counter()
    fields: Counter[str] = Counter()
    kept: list[Row] = []
    for row in rows:
        formats[detect_format(row)] += 1
        fields.update(map(str, row))
        if len(kept) < keep:
            kept.append(row)
    return Summary(count=formats.total(), formats=dict(formats), fields=dict(fields), rows=kept)


def print_tokens(sequences: list[TokenSequence]) -> None:
    """The sequences of one row, what is learnt between [[ and ]], which is green on a terminal."""
    if not sequences:
        print("  neither a chat nor a task: no chat template applies")
    on_terminal = sys.stdout.isatty()
    for sequence in sequences:
        print(f"  {sequence.summary}")
        shown = [(_safe(span.text).replace("\n", "\n    "), span.is_learnt) for span in sequence.spans]
        if on_terminal:
            from rich.text import Text

            from evsys_sdk.format import console_for

            marked = [(f"[[{text}]]", "green") if is_learnt else text for text, is_learnt in shown]
            console_for(highlight=False).print(Text.assemble("    ", *marked), soft_wrap=True)
        else:
            print("    " + "".join(f"[[{text}]]" if is_learnt else text for text, is_learnt in shown))


def _safe(text: str) -> str:
    """Rows come from anywhere: an escape sequence in one must not drive the reader's terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


def print_row(row: Row) -> None:
    """One row as labelled lines; labels stand out on a terminal."""
    on_terminal = sys.stdout.isatty()
    for label, text in readable(row):
        safe = _safe(text)
        if len(safe) > LONGEST_TEXT:
            safe = f"{safe[:LONGEST_TEXT]} ... (+{len(safe) - LONGEST_TEXT} characters)"
        safe = safe.replace("\n", "\n    ")
        if on_terminal:
            from rich.text import Text

            from evsys_sdk.format import console_for

            console_for(highlight=False).print(Text.assemble("  ", (f"{label}: ", "bold cyan"), safe), soft_wrap=True)
        else:
            print(f"  {label}: {safe}")


def readable(row: Row) -> Iterator[tuple[str, str]]:
    """Label and text of each part of a row: the turns of a chat, the fields of anything else."""
    from evsys_sdk.data_types import TargetFormat, detect_format

    shape = detect_format(row)
    for key, value in row.items():
        if shape == TargetFormat.CHAT_MESSAGES and key == "messages":
            for message in value:
                if not isinstance(message, dict):
                    yield "?", _value_text(message)
                    continue
                calls = message.get("tool_calls")
                text = _content(message.get("content")) + (f" [calls {_value_text(calls)}]" if calls else "")
                weight = " (weight 0: not learnt)" if message.get("weight") == 0 else ""
                yield f"{message.get('role', '?')}{weight}", text.strip()
        elif shape == TargetFormat.CHAT_MESSAGES and key == "target_assistant":
            yield "assistant (target)", _value_text(value)
        elif shape == TargetFormat.HARBOR_TASK and key == "instruction":
            yield key, _content(value)
        elif shape == TargetFormat.PROMPT_DATASET and key == "inputs":
            yield from ((f"inputs.{name}", _value_text(item)) for name, item in value.items())
        else:
            yield str(key), _value_text(value)


def _content(content: object) -> str:
    from evsys_sdk.data_types import block_to_image_src, content_text

    if not isinstance(content, str | list | None):
        return _value_text(content)
    blocks = content if isinstance(content, list) else []
    images = sum(isinstance(block, dict) and block_to_image_src(block) is not None for block in blocks)
    return content_text(content) + (f" [{images} image{'s' if images > 1 else ''}]" if images else "")


def _value_text(value: object) -> str:
    from evsys_sdk.files import to_json

    return value if isinstance(value, str) else to_json(value)
