"""A new experiment in `experiments/<yyyymmdd>_<slug>/`, from the template or as a copy of another one.

In: the project's root, a slug, the date, and where to copy from. Out: `config.yaml` and `run.py`. A copy keeps every
byte of the other config except its name, its output folder and `parent_experiment_id`, so that a diff of the two
shows the change that is being tried.
"""

from __future__ import annotations

import datetime
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from evsys_sdk.config.load import load_yaml
from evsys_sdk.config.yaml_io import Dumper, parse_document
from evsys_sdk.errors import EvsysError
from evsys_sdk.files import write_text
from evsys_sdk.history.history import ExperimentEntry, load_record
from evsys_sdk.record.processes import read_launch
from evsys_sdk.scaffold.project import experiment_name, template_texts

SLUG = re.compile(r"[a-z0-9][a-z0-9_-]{0,59}")
CONFIG, SCRIPT = "config.yaml", "run.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigOrigin:
    """The config that a new experiment starts as."""

    name: str
    text: str
    folder: Path | None = None
    """Where its config lies; None where only the record has the settings, without their comments."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewExperiment:
    name: str
    config: Path
    script: Path
    parent: str | None
    notes: list[str]


def new_experiment(
    root: Path, slug: str, *, date: datetime.date, origin: ConfigOrigin | None = None, hypothesis: str | None = None
) -> NewExperiment:
    """Write the experiment's folder; one that exists is refused."""
    if not SLUG.fullmatch(slug):
        raise EvsysError(f"a slug has up to 60 of a-z, 0-9, _ and -, and begins with a letter or digit; got {slug!r}")
    experiments = root / "experiments"
    if not experiments.is_dir():
        raise EvsysError(f"{root} has no folder experiments/, so it is no research project\nnext: evsys init-project .")
    name = experiment_name(slug, date)
    folder = experiments / name
    if folder.exists() or folder.is_symlink():
        raise EvsysError(f"{folder} exists; choose another slug than {slug!r}")
    texts = dict(template_texts("experiment", {"experiment": name}))
    notes: list[str] = []
    if origin is not None:
        texts[CONFIG] = derive_config(origin, name)
        notes += origin.notes
        if origin.folder is not None:
            script = origin.folder / SCRIPT
            texts[SCRIPT] = script.read_text(encoding="utf-8") if script.is_file() else texts[SCRIPT]
            if others := sorted(p.name for p in origin.folder.iterdir() if is_own_file(p)):
                notes.append(f"not copied from {origin.folder}: {', '.join(others)}")
    if hypothesis is not None:
        metadata = parse_document(texts[CONFIG]).data.get("metadata") or {}
        is_judged = isinstance(metadata.get("hypothesis"), dict)
        place = ("metadata", "hypothesis", "claim") if is_judged else ("metadata", "hypothesis")
        texts[CONFIG] = set_key(texts[CONFIG], place, hypothesis)
        if is_judged:
            notes.append("metadata.hypothesis.prediction was kept: make it say what the new claim predicts")
    elif origin is not None:
        notes.append(f"metadata.hypothesis is still that of {origin.name}: write your own, then change one setting")
    for path, text in texts.items():
        write_text(folder / path, text)
    parent = origin.name if origin else None
    return NewExperiment(name=name, config=folder / CONFIG, script=folder / SCRIPT, parent=parent, notes=notes)


def is_own_file(path: Path) -> bool:
    """Whether an experiment's folder has this beside what every such folder has."""
    return path.name not in (CONFIG, SCRIPT, "__pycache__", "outputs") and not path.name.startswith(".")


def origin_at(path: Path) -> ConfigOrigin:
    """The config at `path`, a YAML file or a folder with `config.yaml`."""
    file = path / CONFIG if path.is_dir() else path
    name = load_yaml(file).name
    # utf-8-sig: a byte order mark would become part of the first key.
    return ConfigOrigin(name=name, text=file.read_text(encoding="utf-8-sig"), folder=file.resolve().parent)


def origin_of(entry: ExperimentEntry) -> ConfigOrigin:
    """The config of an experiment that was run: its file if that still has the settings of the record, else the
    settings in the record."""
    recorded = load_record(entry).config
    launch = read_launch(entry.record)
    file = Path(launch.cwd, launch.config) if launch is not None else None
    why = "it was started from Python"
    if file is not None and file.is_file() and file.suffix in (".yaml", ".yml"):
        text = file.read_text(encoding="utf-8-sig")
        data = parse_document(text, str(file)).data
        if isinstance(data, dict) and data.get("name") == entry.name:
            changed = not recorded or not _same_settings(data, recorded)
            notes = [f"{file} may have changed since {entry.name} was run"] if changed else []
            return ConfigOrigin(name=entry.name, text=text, folder=file.resolve().parent, notes=notes)
        why = f"{file} is now another experiment"
    elif file is not None:
        why = f"{file} is gone"
    if not recorded:
        raise EvsysError(f"{entry.name} has no config on disk ({why}) and none in its record; name its config file")
    text = yaml.dump(recorded, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)
    return ConfigOrigin(name=entry.name, text=text, notes=[f"taken from the record, without comments: {why}"])


def _same_settings(data: dict[str, object], recorded: dict[str, object]) -> bool:
    # A record has the sweep's arms instead of the sweep, so only what both have can be compared.
    shared = (data.keys() & recorded.keys()) - {"output_dir", "parent_experiment_id"}
    return all(json.dumps(data[key], sort_keys=True) == json.dumps(recorded[key], sort_keys=True) for key in shared)


def derive_config(origin: ConfigOrigin, name: str) -> str:
    """The config's text as that of a child called `name`."""
    data = parse_document(origin.text, origin.name).data
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise EvsysError(f"the config of {origin.name} has no name, so it cannot be copied")
    text = set_key(origin.text, ("name",), name)
    folder = data.get("output_dir")
    # An output folder that does not name the experiment is shared on purpose, and stays.
    if isinstance(folder, str) and data["name"] in folder:
        text = set_key(text, ("output_dir",), folder.replace(data["name"], name))
    return set_key(text, ("parent_experiment_id",), data["name"])


def set_key(text: str, path: tuple[str, ...], value: str) -> str:
    """YAML text in which the key at `path` has `value`: replaced in place, or added; everything else stays as written.

    A new top-level key comes after the line of `name`, one in a mapping becomes its first key.
    """
    quoted = quote(value)
    node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    for depth, key in enumerate(path):
        if not isinstance(node, yaml.MappingNode):
            raise EvsysError(f"{'.'.join(path[:depth])} of the config is no mapping, so {'.'.join(path)} cannot be set")
        found = next((inner for name, inner in node.value if name.value == key), None)
        if found is not None:
            node = found
        elif depth < len(path) - 1:
            nested = "".join(f"{'  ' * level}{word}:\n" for level, word in enumerate(path[depth:-1]))
            return _add(text, node, f"{nested}{'  ' * (len(path) - 1 - depth)}{path[-1]}: {quoted}")
        else:
            return _add(text, node, f"{key}: {quoted}")
    assert node is not None
    start, end = node.start_mark.index, node.end_mark.index
    # The span of a block text (`>`, `|`) ends behind its last line break.
    tail = "\n" if text[start:end].endswith("\n") else ""
    return f"{text[:start]}{quoted}{tail}{text[end:]}"


def _add(text: str, mapping: yaml.MappingNode, lines: str) -> str:
    """`text` with `lines` as a new entry of `mapping`."""
    if mapping.flow_style:
        start = mapping.start_mark.index + 1
        if "\n" in lines:
            raise EvsysError("the config is written on one line in braces; add the key by hand")
        return f"{text[:start]} {lines}{',' if mapping.value else ' '}{text[start:]}"
    first, after = mapping.value[0][0], next((inner for name, inner in mapping.value if name.value == "name"), None)
    indent = " " * first.start_mark.column
    block = "".join(f"{indent}{line}\n" for line in lines.splitlines())
    if first.start_mark.column == 0 and after is not None:
        end = text.find("\n", after.end_mark.index - 1)  # behind the comment on that line
        return f"{text}\n{block}" if end < 0 else f"{text[: end + 1]}{block}{text[end + 1 :]}"
    start = text.rfind("\n", 0, first.start_mark.index) + 1
    return f"{text[:start]}{block}{text[start:]}"


def quote(value: str) -> str:
    """A YAML scalar on one line; as it is where that is plain text in any YAML."""
    if re.fullmatch(r"[A-Za-z_./][\w./-]*|\d{8}_[\w-]*[A-Za-z][\w-]*", value) and yaml.safe_load(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)
