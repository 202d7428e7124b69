"""Names that people and agents search for: one class per name, and no metaphors (STYLE.md, "Words")."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

SRC, TESTS = Path(__file__).parents[2] / "src", Path(__file__).parents[1]
BANNED = re.compile(
    r"(^|_)(errands?|distant|desk|shelf|shelved|wish|hindsight|came_to_nothing|workbench|take_up|goes_on|retold|blamed)(_|$)"
    r"|^told$",
    re.IGNORECASE,
)
"""Metaphors that were replaced by the field's own words."""


def definitions() -> list[tuple[str, str, ast.AST]]:
    found = []
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.append((node.name, f"{path.relative_to(SRC)}:{node.lineno}", node))
            elif isinstance(node, ast.arg):
                found.append((node.arg, f"{path.relative_to(SRC)}:{node.lineno}", node))
    return found


def test_a_class_name_is_unique():
    places = defaultdict(list)
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            # Django asks for the name `Migration` in each file of `migrations/`.
            if isinstance(node, ast.ClassDef) and path.parent.name != "migrations":
                places[node.name].append(str(path.relative_to(SRC)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_names_are_the_fields_own_words():
    words = [(name, where) for name, where, _ in definitions()]
    words += [(path.stem, str(path)) for folder in (SRC, TESTS) for path in folder.rglob("*.py")]
    assert [f"{where} {name}" for name, where in words if BANNED.search(re.sub("(?<=[a-z])(?=[A-Z])", "_", name))] == []
