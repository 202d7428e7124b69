"""YAML files in and out.

In: a path, and overrides from the command line. Out: an `ExperimentConfig` whose sweep is expanded and whose every
mistake, if it has any, was reported at once with its line.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from evsys_sdk.config import key_places  # noqa: F401  (makes the places of keys known)
from evsys_sdk.config.base import JsonDict
from evsys_sdk.config.schema import ExperimentConfig
from evsys_sdk.config.sweep import expand_sweep, name_problems, set_dotted
from evsys_sdk.config.yaml_io import (
    FROM_COMMAND_LINE,
    ConfigSource,
    Document,
    Dumper,
    Origin,
    parse_value,
    read_document,
    remember,
    source_of,
)
from evsys_sdk.errors import ConfigError, EvsysError, Problem
from evsys_sdk.explain import KeyPath, problems_of, show_path, split_path
from evsys_sdk.files import write_text
from evsys_sdk.redaction import learn_from_settings


def load_yaml(path: str | Path, *, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Read and check a config; `overrides` are `a.b.c=value` strings applied before checking."""
    document = read_document(path)
    return parse_config(override(document, overrides), folder=Path(path).resolve().parent)


def parse_config(document: Document, *, folder: Path) -> ExperimentConfig:
    """A parsed document as a config, the sweep expanded."""
    if not isinstance(document.data, dict):
        kind = type(document.data).__name__
        raise ConfigError(
            document.label, [Problem(path="", message=f"must be a mapping of settings, not a {kind}", line=1)]
        )
    # Before validation, whose messages quote values: a secret among them must be known to be redacted.
    learn_from_settings(document.data)
    source = ConfigSource(label=document.label, folder=folder, lines=document.lines)
    try:
        config = ExperimentConfig.model_validate(document.data)
    except ValidationError as exc:
        found = [replace(p, next_command="evsys schema config") for p in problems_of(exc, ExperimentConfig)]
        raise ConfigError(document.label, [source.located(p) for p in found]) from None
    remember(config, source)
    config = expand_sweep(config)
    if not source_of(config).origins:
        single = [Origin(prefix=("run",))] if config.run is not None else None
        several = [Origin(prefix=("runs", index)) for index in range(len(config.runs or []))]
        remember(config, replace(source, origins=tuple(single or several)))
    refuse_shared_names(config)
    return config


def refuse_shared_names(config: ExperimentConfig) -> None:
    """Raise when two runs of the experiment would share a name or a folder."""
    source = source_of(config)
    runs = config.all_runs()
    problems = name_problems(runs, [source.in_run(index, "name") for index in range(len(runs))])
    if problems:
        raise ConfigError(source.label, [source.located(p) for p in problems])


def override(document: Document, assignments: Sequence[str]) -> Document:
    """`document` with `a.b.c=value` settings applied; values are YAML."""
    if not assignments:
        return document
    data, lines = copy.deepcopy(document.data), dict(document.lines)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise EvsysError(f"--set takes key=value, e.g. --set run.seed=7; got {assignment!r}")
        path = _existing_path(data, split_path(key.strip()))
        try:
            set_dotted(data, path, parse_value(text))
        except (IndexError, ValueError, TypeError, AttributeError):
            raise EvsysError(f"--set {assignment}: there is nothing at {show_path(path[:-1])} to set it in") from None
        # Lines inside the value that was replaced are no longer true; parents that were made on the way have none
        # either.
        lines = {known: line for known, line in lines.items() if known[: len(path)] != path}
        for end in range(1, len(path)):
            lines.setdefault(path[:end], FROM_COMMAND_LINE)
        lines[path] = FROM_COMMAND_LINE
    return Document(label=document.label, data=data, lines=lines)


def _existing_path(data: Any, path: KeyPath) -> KeyPath:
    """`path` with parts rejoined where the data has a key with dots in it (a sweep's axes), or is to get one."""
    # The longest first: an axis such as `algorithm.params.lr` is one key, dots and all.
    for end in range(len(path), 1, -1):
        joined = ".".join(map(str, path[:end]))
        if isinstance(data, dict) and joined in data:
            return (joined, *path[end:])
    if not path:
        return path
    try:
        inner = data[path[0]]
    except (KeyError, IndexError, TypeError):
        return path
    rest = _existing_path(inner, path[1:])
    if path[0] == "axes" and rest and rest[0] not in inner:
        rest = (".".join(map(str, rest)),)  # a new axis
    return (path[0], *rest)


def plain(config: BaseModel) -> JsonDict:
    """The settings as plain data, only those that were given."""
    return config.model_dump(exclude_unset=True)


def to_yaml(config: BaseModel) -> str:
    text: str = yaml.dump(plain(config), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text


def dump_yaml(config: ExperimentConfig, path: str | Path | None = None) -> str:
    """`config` as YAML text, written to `path` when one is given; `load_yaml` reads it back to an equal config."""
    text = to_yaml(config)
    if path is not None:
        write_text(path, text)
    return text
