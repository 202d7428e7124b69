"""YAML in and out, and where a config came from.

In: YAML text, or a loaded config. Out: a `Document`, which has the line of every key, and a config's `ConfigSource`, so
that a late mistake can still be shown with its line.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from evsys_sdk.data_types import Json, JsonObject
from evsys_sdk.errors import ConfigError, Problem, shorten
from evsys_sdk.explain import KeyPath, show_path, split_path

# A YAML file as data plus the line of every key.
#
# In: YAML text. Out: a `Document`. Scalars follow YAML 1.2, which is what people mean: `1e-5` is a number, `off` and
# `no` are words, `010` is ten. A key given twice is an error, because one of the two would be lost.


FROM_COMMAND_LINE = 0
"""The "line" of a value that `--set` gave."""
MAX_NODES = 1_000_000
MAX_INT_BITS = 1023
"""A float has room for integers of so many; Python prints none of more than 4,300 digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Parsed YAML that still knows where everything stood."""

    label: str
    """How the file is called in messages."""
    data: Any
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def line(self, path: KeyPath) -> int | None:
        """Line of the key, or of the nearest enclosing one."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return None


_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_NULL = re.compile(r"~|null|Null|NULL|")
_PLACEHOLDER = re.compile(r"\{\w+\}")


_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_HALVES = re.compile("[\ud800-\udfff]")


class _JsonText:
    """A text in which JSON's escapes of characters beyond the first 65,536 (`\\ud83d\\ude00`, an emoji) are readable.

    libyaml refuses such halves of a pair. Each is replaced by the escape of one private character that the text does
    not hold, which is as long, so that every line and column stays; `restore` puts the halves back into a node."""

    def __init__(self, text: str):
        self.written = self.text = text
        self.at = array("Q")
        """Where the digits of each half stand."""
        self.stand_in = ""
        self.is_readable = True
        """False where the text holds every private character that could stand in: libyaml cannot read it then."""
        if not _ESCAPED_HALF.search(text):
            return
        known = set(re.findall(r"\\(?:u|U0000)[eE]([0-9]{3})", text))
        if not text.isascii():
            known |= {f"{ord(found):X}"[1:] for found in set(re.findall("[\ue000-\ue999]", text))}
        free = next((digits for digits in (f"{n:03}" for n in range(1000)) if digits not in known), None)
        if free is None:
            self.is_readable = False
            return
        self.stand_in = f"E{free}"
        parts, end = [], 0
        for found in _ESCAPED_HALF.finditer(text):
            first = found.start()
            while first and text[first - 1] == "\\":
                first -= 1
            if (found.start() - first) % 2 == 0:  # else the backslash is itself escaped: `\\\\ud83d` are letters
                self.at.append(found.start() + 2)
                parts += [text[end : found.start() + 2], self.stand_in]
                end = found.end()
        self.text = "".join([*parts, text[end:]])

    def restore(self, node: yaml.ScalarNode) -> None:
        """Put the halves back: as characters where the text is quoted, so that escapes count, and else as written."""
        if self.stand_in:
            is_quoted = node.style == '"'
            parts = node.value.split(chr(int(self.stand_in, 16)) if is_quoted else f"\\u{self.stand_in}")
            # Counted from the end: a comment may stand between the start of a block (`|`) and its text.
            last = bisect_left(self.at, node.end_mark.index)
            for index, place in enumerate(self.at[last - len(parts) + 1 : last]):
                digits = self.written[place : place + 4]
                parts[index] += chr(int(digits, 16)) if is_quoted else f"\\u{digits}"
            node.value = "".join(parts)
        if _HALVES.search(node.value):  # two halves become one character; a half that is alone stays
            node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


class _Composer(yaml.composer.Composer):
    """Composes nodes of a `_JsonText`."""

    source: _JsonText

    def compose_scalar_node(self, anchor: dict[Any, yaml.Node]) -> yaml.ScalarNode:
        node: yaml.ScalarNode = super().compose_scalar_node(anchor)
        self.source.restore(node)
        return node


class _Loader(_Composer, yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2."""

    def __init__(self, source: _JsonText):
        yaml.SafeLoader.__init__(self, source.text)
        self.source = source


# A new dict, and empty: with the YAML 1.1 resolvers that SafeLoader has, `off` would still be false. Resolvers
# are looked up by the first letter of a scalar; "" is the empty scalar.
_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in (
    ("bool", _BOOL, "tTfF"),
    ("null", _NULL, ["~", "n", "N", ""]),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern.pattern})$"), list(_first))
_Loader.add_implicit_resolver(_TAG + "merge", re.compile("^<<$"), ["<"])


class _FastLoader(_Composer, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """`_Loader` with libyaml's scanner, where PyYAML was built with it: a comment of 50 MB costs half a second instead
    of half a minute. Nodes are composed in Python, because libyaml's composer ends the process on deep nesting."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def __init__(self, source: _JsonText):
        super(yaml.composer.Composer, self).__init__(source.text)
        yaml.composer.Composer.__init__(self)
        self.source = source


SMALL = 1_000_000
"""Characters of a text that is parsed a second time in pure Python, for its better messages."""


def _compose(text: str) -> tuple[yaml.SafeLoader, yaml.Node | None]:
    """The text as a tree of nodes, and the loader that made it."""
    source = _JsonText(text)
    try:
        fast = _FastLoader(source)
        return fast, fast.get_single_node()
    except (yaml.YAMLError, UnicodeEncodeError):
        if len(text) > SMALL and source.is_readable:
            raise
    loader = _Loader(source)
    return loader, loader.get_single_node()


class Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or 1.2 would read as something else than text."""


Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *_Loader.yaml_implicit_resolvers.get(first, [])]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
}


def _float(text: str) -> float:
    word = text.lower().lstrip("+-")
    if word == ".nan":
        return math.nan
    if word == ".inf":
        return -math.inf if text.startswith("-") else math.inf
    return float(text)


def _int(text: str) -> int:
    value = int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if value.bit_length() > MAX_INT_BITS:
        raise ValueError(text)
    return value


_SCALARS: dict[str, Callable[[str], Json]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": _int,
    "float": _float,
    "str": str,
}


def read_document(path: str | Path) -> Document:
    """Parse a YAML file; what cannot be read is a ConfigError with the line."""
    label = str(path)
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            label, [Problem(path="", message="no such file", next_command="evsys validate <path>")]
        ) from None
    except IsADirectoryError:
        raise ConfigError(label, [Problem(path="", message="is a directory; name the YAML file in it")]) from None
    except UnicodeDecodeError as exc:
        raise ConfigError(label, [Problem(path="", message=f"is not UTF-8 text (byte {exc.start})")]) from None
    except OSError as exc:
        raise ConfigError(label, [Problem(path="", message=f"cannot be read: {exc.strerror}")]) from None
    return parse_document(text, label)


def parse_document(text: str, label: str = "config") -> Document:
    """Parse YAML text into data and lines."""
    try:
        loader, node = _compose(text)
        if node is None:
            raise ConfigError(
                label, [Problem(path="", message="is empty; expected `name:` and `run:`, `runs:` or `matrix:`")]
            )
        builder = _Builder(loader, label)
        data = builder.build(node, (), frozenset())
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        what = " ".join(str(part) for part in (exc.context, exc.problem) if part)
        line = mark.line + 1 if mark else None
        raise ConfigError(label, [Problem(path="", message=f"is not YAML: {what}", line=line)]) from None
    except yaml.YAMLError as exc:
        raise ConfigError(label, [Problem(path="", message=f"is not YAML: {shorten(str(exc), 200)}")]) from None
    except UnicodeEncodeError as exc:
        raise ConfigError(label, [Problem(path="", message=f"is not Unicode text (character {exc.start})")]) from None
    except RecursionError:
        raise ConfigError(label, [Problem(path="", message="is nested too deeply")]) from None
    if builder.problems:
        raise ConfigError(label, builder.problems)
    return Document(label=label, data=data, lines=builder.lines)


def parse_value(text: str) -> Json:
    """One YAML value, as after `--set key=`; but a placeholder such as `{base_url}` is text, and no mapping."""
    if _PLACEHOLDER.match(text):
        return text
    return parse_document(text, "--set").data if text.strip() else ""


class _Builder:
    """Walks the node tree once, building data and noting lines."""

    def __init__(self, loader: yaml.SafeLoader, label: str):
        self.loader = loader
        self.label = label
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []
        self.count = 0

    def build(self, node: yaml.Node, path: KeyPath, above: frozenset[int]) -> Json:
        line = node.start_mark.line + 1
        # A key has its own line already, from `_mapping`: its value may begin further down.
        self.lines.setdefault(path, line)
        self.count += 1
        if self.count > MAX_NODES:  # aliases of aliases can unfold without end
            raise ConfigError(self.label, [Problem(path="", message=f"unfolds into more than {MAX_NODES:,} values")])
        if id(node) in above:
            self._complain(path, "refers to itself", line)
            return None
        inside = above | {id(node)}
        if not isinstance(node, yaml.ScalarNode) and node.tag not in (_TAG + "map", _TAG + "seq"):
            self._complain(path, f"YAML tag {shorten(repr(node.tag))} is not supported", line)
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, inside)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, index), inside) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, inside: frozenset[int]) -> JsonObject:
        # Before merges are flattened: what `<<` brings along may be overridden, what is written twice may not.
        self._refuse_repeats(node, path)
        self.loader.flatten_mapping(node)
        out: JsonObject = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._complain(path, "a key must be plain text", key_node.start_mark.line + 1)
                continue
            # Keys stay as they are written: `1` and `null` are names here, not a number and nothing.
            key = str(self._scalar(key_node, path) if _HALVES.search(key_node.value) else key_node.value)
            self.lines[(*path, key)] = key_node.start_mark.line + 1
            out[key] = self.build(value_node, (*path, key), inside)
        return out

    def _refuse_repeats(self, node: yaml.MappingNode, path: KeyPath) -> None:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in seen and key_node.tag != _TAG + "merge":
                self._complain((*path, key), f"is given twice (first on line {seen[key]})", line)
            seen.setdefault(key, line)

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Json:
        make = _SCALARS.get(node.tag.removeprefix(_TAG))
        if make is None:
            self._complain(path, f"YAML tag {node.tag!r} is not supported", node.start_mark.line + 1)
            return None
        if _HALVES.search(node.value):
            message = "holds half of a surrogate pair: write both halves, or the character itself"
            self._complain(path, message, node.start_mark.line + 1)
            return None
        try:
            return make(node.value)
        except ValueError:
            self._complain(
                path,
                f"{shorten(repr(node.value))} cannot be read as {node.tag.rsplit(':', 1)[-1]}",
                node.start_mark.line + 1,
            )
            return None

    def _complain(self, path: KeyPath, message: str, line: int) -> None:
        self.problems.append(Problem(path=show_path(path), message=message, line=line))


# Where a config came from.
#
# In: a loaded config. Out: its `ConfigSource`. The note lies in the model's `__dict__` under a name that is no field,
# so two equal configs from different files stay equal.


_NOTE = "·source"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the settings of one run stand in the file."""

    prefix: KeyPath
    axes: Mapping[KeyPath, KeyPath] = field(default_factory=dict)
    """Run path -> file path, for the settings that an axis of a sweep provides."""

    def place(self, path: KeyPath) -> KeyPath:
        """File path of a run's setting."""
        if self.axes and path == ("name",):
            return next(iter(self.axes.values()))[:2]  # the names of a sweep's runs come from its axes
        for end in range(len(path), 0, -1):
            if path[:end] in self.axes:
                return (*self.axes[path[:end]], *path[end:])
        return (*self.prefix, *path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSource:
    """The file (or the Python program) a config was made by."""

    label: str = "config"
    folder: Path = field(default_factory=Path.cwd)
    """Folder of the config file; relative paths in it are also looked up from here."""
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    origins: tuple[Origin, ...] = ()
    """One per run, in order."""

    def located(self, problem: Problem) -> Problem:
        """`problem` with the line of its path, where the file has one."""
        if problem.line is not None:
            return problem
        document = Document(label=self.label, data=None, lines=self.lines)
        line = document.line(split_known(problem.path, self.lines))
        if line == FROM_COMMAND_LINE:
            return replace(problem, message=f"{problem.message} (from --set)")
        return replace(problem, line=line)

    def in_run(self, index: int, path: str) -> str:
        """The file's name for setting `path` of run number `index`."""
        origin = self.origins[index] if index < len(self.origins) else Origin(prefix=("runs", index))
        return show_path(origin.place(split_path(path)))


def split_known(text: str, lines: Mapping[KeyPath, int]) -> KeyPath:
    """Split a shown path, keeping dotted keys (sweep axes) whole when the file has such a key."""
    for head in (("matrix", "axes"), ("search", "space")):
        start = f"{show_path(head)}."
        rest = text.removeprefix(start)
        ends = [len(rest), *(index for index, letter in enumerate(rest) if letter in ".[")] if rest != text else []
        # The longest key first. Looked up, not searched for: a large file has many lines and may have many problems.
        for end in sorted(ends, reverse=True):
            if (*head, rest[:end]) in lines:
                return (*head, rest[:end], *split_path(rest[end:]))
    return split_path(text)


def remember(config: object, source: ConfigSource) -> None:
    object.__getattribute__(config, "__dict__")[_NOTE] = source


def source_of(config: object) -> ConfigSource:
    """The source of a config; a fresh one for a config that was made in Python."""
    found = object.__getattribute__(config, "__dict__").get(_NOTE)
    return found if isinstance(found, ConfigSource) else ConfigSource(label="ExperimentConfig")
