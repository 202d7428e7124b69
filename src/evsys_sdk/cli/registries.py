"""`evsys list` and `evsys schema`: what there is, and what it takes."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from evsys_sdk.constants import EXIT_OK


def add_parser(verbs: Any) -> None:
    listing = verbs.add_parser(
        "list",
        help="what can be named in a config",
        description="List the registries, or one of them: evsys list algorithms.",
    )
    listing.add_argument("registry", nargs="?", help="only this registry, e.g. algorithms (or algorithm)")
    listing.add_argument("--kind", help="only this registry; the same as the argument")
    listing.add_argument("--config", metavar="FILE", help="import this config's own extensions first")
    listing.add_argument("--json", action="store_true", help="print as JSON")
    listing.set_defaults(run=list_kinds)
    schema = verbs.add_parser(
        "schema",
        help="what an extension's params, or the whole YAML, may hold",
        description="Show the params of an extension with type, default and description; `evsys schema config` shows "
        "the whole YAML. Without arguments: what can be shown. A table on a terminal, JSON schema elsewhere.",
    )
    schema.add_argument("kind", nargs="?", help="a registry (algorithm, backend, ...), or `config`")
    schema.add_argument("name", nargs="?", help="the extension; without it all of the registry")
    schema.add_argument("--config", metavar="FILE", help="import this config's own extensions first")
    form = schema.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON schema, on a terminal too")
    form.add_argument("--table", action="store_true", help="print a table, in a pipe too")
    schema.set_defaults(run=print_schema)


def list_kinds(args: argparse.Namespace) -> int:
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.registry import REGISTRIES, load_all, registry_for

    if args.registry and args.kind and registry_for(args.registry) is not registry_for(args.kind):
        raise EvsysError(f"evsys list {args.registry} --kind {args.kind} names two registries; name one")
    _import_from(args.config)
    load_all()
    named = args.registry or args.kind
    chosen = [registry_for(named)] if named else list(REGISTRIES.values())
    if args.json:
        print(json.dumps({found.plural: found.names() for found in chosen}, indent=2))
        return EXIT_OK
    for found in chosen:
        print(f"{found.plural}")
        for name in found.names():
            target = found.entries[name].target
            about = (target.__doc__ or "").strip().split("\n")[0]
            origin = found.entries[name].origin
            foreign = "" if origin.startswith("evsys_sdk.") else f"  [{origin}]"
            print(f"  {name:<20} {about}{foreign}".rstrip())
        for name, reason in found.broken.items():
            print(f"  {name:<20} broken entry point: {reason}", file=sys.stderr)
    return EXIT_OK


def print_schema(args: argparse.Namespace) -> int:
    from evsys_sdk.registry import registry_for

    _import_from(args.config)
    as_table = args.table or (sys.stdout.isatty() and not args.json)
    if args.kind is None:
        return _print_what_there_is(as_table=as_table)
    if args.kind == "config":
        from evsys_sdk.config.models import ExperimentConfig
        from evsys_sdk.config.schema import described_schema

        schemas, about = {"config": described_schema(ExperimentConfig)}, {"config": ""}
    else:
        found = registry_for(args.kind)
        schemas = {name: found.schema(name) for name in ([args.name] if args.name else found.names())}
        about = {name: (found.get(name).__doc__ or "").strip() for name in schemas}
    if not as_table:
        print(json.dumps(next(iter(schemas.values())) if args.name or args.kind == "config" else schemas, indent=2))
        return EXIT_OK
    for name, schema in schemas.items():
        _print_table(name, schema, about=" ".join(about[name].split("\n\n")[0].split()), titled=len(schemas) > 1)
    return EXIT_OK


def _print_what_there_is(*, as_table: bool) -> int:
    from evsys_sdk.cli.data import print_table
    from evsys_sdk.registry import REGISTRIES, load_all

    load_all()
    names = {found.kind: found.names() for found in REGISTRIES.values()}
    if not as_table:
        print(json.dumps({"config": [], **names}, indent=2))
        return EXIT_OK
    rows = [["config", "the whole YAML"], *([kind, ", ".join(found)] for kind, found in names.items())]
    print_table(["kind", "names"], rows)
    print("next: evsys schema config, evsys schema <kind>, evsys schema <kind> <name>")
    return EXIT_OK


def _print_table(name: str, schema: dict[str, Any], *, about: str, titled: bool) -> None:
    from evsys_sdk.cli.data import print_table
    from evsys_sdk.cli.schema_table import HEADER, schema_rows

    if titled or about:
        print(f"{name}: {about}" if about else name)
    rows = schema_rows(schema)
    if rows:
        print_table(HEADER, rows)
    else:
        print("  takes no params")
    if titled:
        print()


def _import_from(config: str | None) -> None:
    if config is not None:
        from evsys_sdk.cli.streams import prints_to_stderr
        from evsys_sdk.config.files import load_yaml
        from evsys_sdk.config.project import import_extensions

        with prints_to_stderr():
            import_extensions(load_yaml(config))
