"""A YAML file as data plus the line of every key.

In: YAML text. Out: a `Document`. Scalars follow YAML 1.2, which is what people mean: `1e-5` is a number, `off`
and `no` are words, `010` is ten. A key given twice is an error, because one of the two would be lost.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from evsys_sdk.errors import ConfigError, Problem, shorten

KeyPath = tuple[str | int, ...]
FROM_COMMAND_LINE = 0
"""The "line" of a value that `--set` gave."""
MAX_NODES = 1_000_000


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


def show_path(path: KeyPath) -> str:
    """`("runs", 0, "data")` -> `runs[0].data`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def split_path(text: str) -> KeyPath:
    """`runs[0].data` or `runs.0.data` -> `("runs", 0, "data")`."""
    parts = [part for part in re.split(r"\.|\[([0-9]+)\]", text) if part]
    return tuple(int(part) if re.fullmatch(r"[0-9]{1,9}", part) else part for part in parts)


_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_NULL = re.compile(r"~|null|Null|NULL|")
_PLACEHOLDER = re.compile(r"\{\w+\}")


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2."""


_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in (
    ("bool", _BOOL, "tTfF"),
    ("null", _NULL, ["~", "n", "N", ""]),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern.pattern})$"), list(_first))
_Loader.add_implicit_resolver(_TAG + "merge", re.compile("^<<$"), ["<"])


class _FastLoader(yaml.composer.Composer, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """`_Loader` with libyaml's scanner, where PyYAML was built with it: a comment of 50 MB costs half a second instead
    of half a minute. Nodes are composed in Python, because libyaml's composer ends the process on deep nesting."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def __init__(self, text: str):
        super(yaml.composer.Composer, self).__init__(text)
        yaml.composer.Composer.__init__(self)


_HALF_OF_A_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
"""How JSON escapes a character beyond the first 65,536, such as an emoji; libyaml refuses it."""
SMALL = 1_000_000
"""Characters of a text that is parsed a second time in pure Python, for its better messages."""


def _compose(text: str) -> tuple[yaml.SafeLoader, yaml.Node | None]:
    """The text as a tree of nodes, and the loader that made it."""
    if not _HALF_OF_A_PAIR.search(text):
        try:
            fast = _FastLoader(text)
            return fast, fast.get_single_node()
        except (yaml.YAMLError, UnicodeEncodeError):
            if len(text) > SMALL:
                raise
    loader = _Loader(text)
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


_SCALARS: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": lambda text: int(text, 0) if text[:2] in ("0o", "0x") else int(text),
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
        raise ConfigError(label, [_syntax_problem(exc)]) from None
    except yaml.YAMLError as exc:
        raise ConfigError(label, [Problem(path="", message=f"is not YAML: {shorten(str(exc), 200)}")]) from None
    except UnicodeEncodeError as exc:
        raise ConfigError(label, [Problem(path="", message=f"is not Unicode text (character {exc.start})")]) from None
    except RecursionError:
        raise ConfigError(label, [Problem(path="", message="is nested too deeply")]) from None
    if builder.problems:
        raise ConfigError(label, builder.problems)
    return Document(label=label, data=data, lines=builder.lines)


def parse_value(text: str) -> Any:
    """One YAML value, as after `--set key=`; but a placeholder such as `{base_url}` is text, and no mapping."""
    if _PLACEHOLDER.match(text):
        return text
    return parse_document(text, "--set").data if text.strip() else ""


def _syntax_problem(exc: yaml.MarkedYAMLError) -> Problem:
    mark = exc.problem_mark or exc.context_mark
    what = " ".join(str(part) for part in (exc.context, exc.problem) if part)
    return Problem(path="", message=f"is not YAML: {what}", line=mark.line + 1 if mark else None)


_HALVES = re.compile("[\ud800-\udfff]")


def _joined_pairs(text: str) -> str:
    """The text with the two halves that JSON escapes a character by as that character; a UnicodeDecodeError for a half
    that is alone."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16") if _HALVES.search(text) else text


class _Builder:
    """Walks the node tree once, building data and noting lines."""

    def __init__(self, loader: yaml.SafeLoader, label: str):
        self.loader = loader
        self.label = label
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []
        self.count = 0

    def build(self, node: yaml.Node, path: KeyPath, above: frozenset[int]) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        self.count += 1
        if self.count > MAX_NODES:  # aliases of aliases can unfold without end
            raise ConfigError(self.label, [Problem(path="", message=f"unfolds into more than {MAX_NODES:,} values")])
        if id(node) in above:
            self._complain(path, "refers to itself", line)
            return None
        inside = above | {id(node)}
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, inside)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, index), inside) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, inside: frozenset[int]) -> dict[str, Any]:
        self._refuse_repeats(node, path)
        self.loader.flatten_mapping(node)
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._complain(path, "a key must be plain text", key_node.start_mark.line + 1)
                continue
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

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        make = _SCALARS.get(node.tag.removeprefix(_TAG))
        if make is None:
            self._complain(path, f"YAML tag {node.tag!r} is not supported", node.start_mark.line + 1)
            return None
        try:
            return make(_joined_pairs(node.value))
        except UnicodeDecodeError:
            message = "holds half of a surrogate pair: write both halves, or the character itself"
            self._complain(path, message, node.start_mark.line + 1)
            return None
        except ValueError:
            self._complain(
                path, f"{node.value!r} cannot be read as {node.tag.rsplit(':', 1)[-1]}", node.start_mark.line + 1
            )
            return None

    def _complain(self, path: KeyPath, message: str, line: int) -> None:
        self.problems.append(Problem(path=show_path(path), message=message, line=line))
