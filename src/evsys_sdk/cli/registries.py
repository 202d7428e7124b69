"""`evsys list` and `evsys schema`: what there is, and what it takes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import click

from evsys_sdk.cli.options import verb
from evsys_sdk.cli.output import print_json, print_table, prints_to_stderr
from evsys_sdk.constants import EXIT_OK

config_option = click.option("--config", metavar="FILE", help="import this config's own extensions first")
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def complete_registries(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from evsys_sdk.registry import REGISTRIES

    return [found.plural for found in REGISTRIES.values() if found.plural.startswith(incomplete)]


def complete_kinds(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from evsys_sdk.registry import REGISTRIES

    return [kind for kind in [*REGISTRIES, "config"] if kind.startswith(incomplete)]


def complete_extensions(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from evsys_sdk.registry import REGISTRIES

    found = REGISTRIES.get(str(ctx.params.get("kind")))
    return [name for name in found.names() if name.startswith(incomplete)] if found else []


@verb("list")
@click.argument(
    "registry", required=False, shell_complete=complete_registries, help="only this one, e.g. algorithms (or algorithm)"
)
@click.option("--kind", shell_complete=complete_registries, help="only this registry; like the argument")
@config_option
@click.option("--json", "as_json", is_flag=True, help="print as JSON")
def list_kinds(registry: str | None, kind: str | None, config: str | None, as_json: bool) -> int:
    """List the registries, or one of them: evsys list algorithms."""
    from evsys_sdk.errors import EvsysError
    from evsys_sdk.operations.configs import list_extensions
    from evsys_sdk.registry import registry_for

    if registry and kind and registry_for(registry) is not registry_for(kind):
        raise EvsysError(f"evsys list {registry} --kind {kind} names two registries; name one")
    _import_from(config)
    names = list_extensions(registry or kind)
    if as_json:
        print_json(names)
        return EXIT_OK
    for found in map(registry_for, names):
        print(found.plural)
        for name in found.names():
            entry = found.entries[name]
            foreign = "" if entry.origin.startswith("evsys_sdk.") else f"  [{entry.origin}]"
            print(f"  {name:<20} {first_sentence(entry.target.__doc__)}{foreign}".rstrip())
        for name, reason in found.broken.items():
            print(f"  {name:<20} broken entry point: {reason}", file=sys.stderr)
    return EXIT_OK


def first_sentence(docstring: str | None) -> str:
    """The first sentence of a docstring, which may run over several lines, on one line."""
    paragraph = " ".join((docstring or "").strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph, maxsplit=1)[0]


@verb("schema")
@click.argument(
    "kind", required=False, shell_complete=complete_kinds, help="a registry (algorithm, backend, ...), or `config`"
)
@click.argument(
    "name", required=False, shell_complete=complete_extensions, help="the extension; without it all of the registry"
)
@config_option
@click.option("--json", "as_json", is_flag=True, help="print JSON schema, on a terminal too")
@click.option("--table", is_flag=True, help="print a table, in a pipe too")
def schema(kind: str | None, name: str | None, config: str | None, as_json: bool, table: bool) -> int:
    """Show the params of an extension with type, default and description; `evsys schema config` shows the whole YAML.
    Without arguments: what can be shown. A table on a terminal, JSON schema elsewhere."""
    from evsys_sdk.operations.configs import extension_schemas, plain_schema, schema_names
    from evsys_sdk.registry import registry_for

    if as_json and table:
        raise click.UsageError("--json and --table exclude each other; keep one")
    _import_from(config)
    as_table = table or (sys.stdout.isatty() and not as_json)
    if not as_table:
        print_json(plain_schema(kind, name))
        return EXIT_OK
    if kind is None:
        rows = [[key, ", ".join(names) or "the whole YAML"] for key, names in schema_names().items()]
        print_table(["kind", "names"], rows)
        print("next: evsys schema config, evsys schema <kind>, evsys schema <kind> <name>")
        return EXIT_OK
    schemas = extension_schemas(kind, name)
    about = {key: "" if kind == "config" else (registry_for(kind).get(key).__doc__ or "").strip() for key in schemas}
    for key, found in schemas.items():
        text = " ".join(about[key].split("\n\n")[0].split())
        if len(schemas) > 1 or text:
            print(f"{key}: {text}" if text else key)
        rows = list(schema_rows(found, found.get("$defs", {})))
        if rows:
            print_table(["key", "type", "default", "description"], rows)
        else:
            print("  takes no params")
        if len(schemas) > 1:
            print()
    return EXIT_OK


def _import_from(config: str | None) -> None:
    if config is not None:
        from evsys_sdk.config.load import load_yaml
        from evsys_sdk.config.project import import_extensions

        with prints_to_stderr():
            import_extensions(load_yaml(config))


# A JSON schema as a table that people read: a row per key with its dotted path, type, default and description.


def schema_rows(
    schema: dict[str, Any], parts: dict[str, Any], prefix: str = "", within: tuple[str, ...] = ()
) -> Iterator[list[str]]:
    """One row per key, nested ones by their dotted path; `parts` are the schema's `$defs`."""
    required = set(schema.get("required", []))
    for name, field in schema.get("properties", {}).items():
        path = f"{prefix}{name}"
        default = "required" if name in required else _short(field["default"]) if "default" in field else ""
        text = " ".join(str(field.get("description") or "").split())
        yield [path, _type(field), default, f"{text} {_tunable(field)}".strip()]
        for suffix, ref in _nested_models(field):
            if ref in parts and ref not in within:  # a model may hold itself
                yield from schema_rows(parts[ref], parts, f"{path}{suffix}.", (*within, ref))


def _nested_models(field: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The models that a field holds: itself, in a list or in a mapping."""
    for option in [field, *field.get("anyOf", []), *field.get("allOf", [])]:
        if "$ref" in option:
            yield "", option["$ref"].rpartition("/")[2]
        for key, suffix in (("items", "[]"), ("additionalProperties", ".<name>")):
            inner = option.get(key)
            if isinstance(inner, dict):
                yield from ((suffix + rest, ref) for rest, ref in _nested_models(inner))


def _type(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " | ".join(dict.fromkeys(_type(option) for option in field["anyOf"]))
    if "$ref" in field or "allOf" in field:
        return "mapping"
    if "enum" in field:
        return " | ".join(map(_short, field["enum"]))
    if "const" in field:
        return _short(field["const"])
    kind = {"object": "mapping", "array": "list"}.get(str(field.get("type")), str(field.get("type") or "any"))
    if kind == "list" and isinstance(field.get("items"), dict):
        kind = f"list of {_type(field['items'])}"
    bounds = " and ".join(f"{sign} {field[key]:g}" for key, sign in BOUNDS.items() if key in field)
    return f"{kind} {bounds}" if bounds else kind


def _tunable(field: dict[str, Any]) -> str:
    """Between which bounds research may change the setting; nothing where it may not."""
    hint = field.get("tunable")
    if hint is None or "low" not in hint:
        return "" if hint is None else "[tunable]"
    return f"[tunable: {hint['low']:g} to {hint['high']:g}{', log' if hint['log'] else ''}]"


def _short(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, default=str)
