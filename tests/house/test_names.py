"""Names that people and agents search for: one class per name, and no metaphors (STYLE.md, "Words")."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

SRC, TESTS = Path(__file__).parents[2] / "src", Path(__file__).parents[1]
BANNED = re.compile(
    r"(^|_)(errands?|distant|desk|door|shelf|shelved|wish\w*|hindsight|came_to_nothing|workbench|take_up|goes_on|nobody"
    r"|retold|retelling|blame\w*|ladders?|admissions?|luck|in_company|picking|somebody|whoever)(_|$)"
    r"|^told$",
    re.IGNORECASE,
)
"""Metaphors that were replaced by the field's own words."""
RIDDLES = re.compile(
    r"\b(nobody|somebody|whoever|errands?|hindsight|workbench|ladders?|admissions?|of (its|their) own|(comes?|came) to"
    r"|(goes|go|went|gone|going) on(?! (the|a|an|its|top|disk)\b)|(is|are|be|was|were|been) told(?! apart))\b",
    re.IGNORECASE,
)
"""Phrases that STYLE.md, "Voice", replaces: they do not name their subject."""
ALLOWED = {
    "examples/06_proof_rl/make_data.py": ["ladder"],  # a thing to carry
    "src/evsys_sdk/algorithms/sdft.py": ["somebody"],  # of a default prompt: other words would be another experiment
}


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


def texts() -> list[Path]:
    """Code with its messages, docs, and what coding agents read; not measured results."""
    root = SRC.parent
    folders = ["src", "docs", "examples", "skills", "agents", "hooks", "plugin", "perf"]
    kinds = {".py", ".md", ".html", ".yaml", ".template"}
    found = {path for folder in folders for path in (root / folder).rglob("*") if path.suffix in kinds}
    ignored = (root / "perf" / "results", *(root / "examples").rglob(".evsys"))  # results, and what a run left
    return sorted(path for path in {*found, *root.glob("*.md")} if not any(map(path.is_relative_to, ignored)))


def test_a_text_names_its_subject():
    found = []
    for path in texts():
        where = str(path.relative_to(SRC.parent))
        text = re.sub(r"\s*\n[\s#>]*", " ", path.read_text(encoding="utf-8"))
        phrases = [match.group() for match in RIDDLES.finditer(text)]
        found += [f"{where}: {phrase}" for phrase in phrases if phrase not in ALLOWED.get(where, [])]
    assert found == []


def test_names_are_the_fields_own_words():
    words = [(name, where) for name, where, _ in definitions()]
    words += [(path.stem, str(path)) for folder in (SRC, TESTS) for path in folder.rglob("*.py")]
    assert [f"{where} {name}" for name, where in words if BANNED.search(re.sub("(?<=[a-z])(?=[A-Z])", "_", name))] == []
