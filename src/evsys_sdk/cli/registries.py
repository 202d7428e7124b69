"""`evsys list` and `evsys schema`: what there is, and what it takes."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from evsys_sdk.constants import EXIT_OK


def add_parser(verbs: Any) -> None:
    listing = verbs.add_parser("list", help="what can be named in a config", description="List the registries.")
    listing.add_argument("--kind", help="only this registry, e.g. algorithms")
    listing.add_argument("--config", metavar="FILE", help="import this config's own extensions first")
    listing.add_argument("--json", action="store_true", help="print as JSON")
    listing.set_defaults(run=list_kinds)
    schema = verbs.add_parser(
        "schema",
        help="JSON schema of one extension's params",
        description="Print the JSON schema of an extension's params; `evsys schema config` prints the whole YAML's.",
    )
    schema.add_argument("kind", help="a registry (algorithm, backend, ...), or `config`")
    schema.add_argument("name", nargs="?", help="the extension; without it all of the registry")
    schema.add_argument("--config", metavar="FILE", help="import this config's own extensions first")
    schema.set_defaults(run=print_schema)


def list_kinds(args: argparse.Namespace) -> int:
    from evsys_sdk.registry import REGISTRIES, load_all, registry_for

    _import_from(args.config)
    load_all()
    chosen = [registry_for(args.kind)] if args.kind else list(REGISTRIES.values())
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
    if args.kind == "config":
        from evsys_sdk.config.models import ExperimentConfig
        from evsys_sdk.config.schema import described_schema

        print(json.dumps(described_schema(ExperimentConfig), indent=2))
        return EXIT_OK
    found = registry_for(args.kind)
    if args.name:
        print(json.dumps(found.schema(args.name), indent=2))
    else:
        print(json.dumps({name: found.schema(name) for name in found.names()}, indent=2))
    return EXIT_OK


def _import_from(config: str | None) -> None:
    if config is not None:
        from evsys_sdk.cli.streams import prints_to_stderr
        from evsys_sdk.config.files import load_yaml
        from evsys_sdk.config.project import import_extensions

        with prints_to_stderr():
            import_extensions(load_yaml(config))
