"""Which room may import which (DESIGN.md, "The house"; ARCHITECTURE.md): read from the code, late imports included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"

SHARED = {
    "errors", "constants", "protocols", "data_types", "registry", "_entry_points", "training_api", "files", "explain",
    "concurrency", "retry", "format", "logs", "redaction", "score_names", "answers", "patterns", "pattern_worker",
}  # fmt: skip
"""Floor 0: modules beside the rooms. They import each other and no room."""

ROOMS = [
    "config",
    "data", "inference", "verifiers",
    "rollout", "training", "backends", "algorithms",
    "stats", "eval", "contamination",
    "record",
    "report", "history", "checks", "serving",
    "run",
    "experiment",
    "deployers", "operations",
    "research",
    "scaffold", "mcp_server", "cli", "testing",
]  # fmt: skip
"""From the ground up, a floor of DESIGN.md each line. A room imports itself, shared modules and rooms before it."""

FACADES = {"runner", "dashboard_client"}
"""Import paths that the published documents name; each re-exports from one room and nothing of ours imports it."""

SIBLINGS: dict[str, set[str]] = {"evsys_engine": set(), "evsys_sandbox": set()}
"""Packages beside ours, each with what it may import of the others."""

DASHBOARD = "evsys_dashboard"
"""Knows records, and nothing of training: it imports rooms up to `serving`, and only its verb imports it."""
BELOW_DASHBOARD = ROOMS[: ROOMS.index("run")]


@cache
def imports_of(path: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module == "evsys_sdk":
                found.discard("evsys_sdk")
                found |= {f"evsys_sdk.{alias.name}" for alias in node.names if alias.name != "__version__"}
    return frozenset(found)


def modules(package: str) -> list[Path]:
    return sorted((SRC / package).rglob("*.py"))


def room_of(path: Path) -> str:
    relative = path.relative_to(SRC / "evsys_sdk")
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def rooms_imported(path: Path) -> Iterator[tuple[str, str]]:
    for module in sorted(imports_of(path)):
        parts = module.split(".")
        if parts[0] == "evsys_sdk" and len(parts) > 1:
            yield parts[1], module


@pytest.mark.parametrize("path", modules("evsys_sdk"), ids=lambda p: str(p.relative_to(SRC / "evsys_sdk")))
def test_a_module_imports_only_rooms_below_its_own(path):
    here = room_of(path)
    if here in FACADES or here == "__init__":
        return
    for there, module in rooms_imported(path):
        assert there not in FACADES, f"{path} imports {module}: import the room behind it"
        if there == here or there in SHARED:
            continue
        assert here not in SHARED, f"{path} is a shared module and must not import {module}"
        assert ROOMS.index(there) < ROOMS.index(here), f"{path} ({here}) must not import {module}: {there} is above it"


def test_every_module_has_a_room():
    package = SRC / "evsys_sdk"
    rooms = {path.name for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= set(ROOMS), f"new rooms need a floor: {rooms - set(ROOMS)}"
    files = {path.stem for path in package.glob("*.py")} - {"__init__"}
    assert files <= SHARED | FACADES | set(ROOMS), f"new modules need a room: {files - SHARED - FACADES - set(ROOMS)}"


@pytest.mark.parametrize("package", SIBLINGS)
def test_a_sibling_package_imports_nothing_of_ours(package):
    for path in modules(package):
        ours = {m.split(".")[0] for m in imports_of(path) if m.startswith("evsys_")} - {package}
        assert ours <= SIBLINGS[package], f"{path} imports {ours}"


@pytest.mark.parametrize("path", modules(DASHBOARD), ids=lambda p: str(p.relative_to(SRC / DASHBOARD)))
def test_the_dashboard_imports_records_and_nothing_of_training(path):
    for there, module in rooms_imported(path):
        assert there in SHARED or there in BELOW_DASHBOARD, f"{path} imports {module}: {there} is above the dashboard"
    others = {module.split(".")[0] for module in imports_of(path)} & set(SIBLINGS)
    assert not others, f"{path} imports {others}"


def test_only_its_verb_imports_the_dashboard():
    found = [path for path in modules("evsys_sdk") if any(m.split(".")[0] == DASHBOARD for m in imports_of(path))]
    assert found == [SRC / "evsys_sdk" / "cli" / "dashboard.py"]


def test_no_module_imports_itself_in_a_circle():
    """Also not through late imports; imports for type checkers do not count, they are never carried out."""
    graph = {name: runtime_imports(path) for name, path in named_modules().items()}
    assert not (found := cycle_in(graph)), " -> ".join(found)


@cache
def named_modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): path
        for package in ("evsys_sdk", DASHBOARD, *SIBLINGS)
        for path in modules(package)
    }


def runtime_imports(path: Path) -> set[str]:
    known, found = named_modules(), set()
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in known else node.module
                      for alias in node.names}  # fmt: skip
        waiting += ast.iter_child_nodes(node)
    return {name for name in found if name in known and name != "evsys_sdk"}


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    done: set[str] = set()
    for start in graph:
        path: list[str] = []
        stack: list[tuple[str, Iterator[str]]] = [(start, iter(sorted(graph[start])))] if start not in done else []
        path += [start] if stack else []
        while stack:
            name, rest = stack[-1]
            for nxt in rest:
                if nxt in path:
                    return [*path[path.index(nxt) :], nxt]
                if nxt not in done:
                    stack.append((nxt, iter(sorted(graph[nxt]))))
                    path.append(nxt)
                    break
            else:
                stack.pop()
                path.pop()
                done.add(name)
    return []


def test_no_module_is_called_utils():
    names = {path.stem for package in ("evsys_sdk", *SIBLINGS) for path in modules(package)}
    assert not names & {"utils", "util", "helpers", "common", "misc"}


def test_a_room_names_every_module_of_it_that_registers_an_extension():
    """Else `evsys list` would not know the extension. The room's own `__init__.py` names it, so that a new backend or
    launcher touches one room."""
    from evsys_sdk._entry_points import built_in_modules

    registering = set()
    for path in modules("evsys_sdk"):
        decorators = [
            each.func if isinstance(each, ast.Call) else each
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            for each in node.decorator_list
        ]
        if any(isinstance(each, ast.Name) and each.id.startswith("register_") for each in decorators):
            registering.add(".".join(path.relative_to(SRC).with_suffix("").parts))
    named = built_in_modules()
    left_out = {module for module in registering if not any(f"{module}.".startswith(f"{one}.") for one in named)}
    assert len(registering) > 20 and not left_out
