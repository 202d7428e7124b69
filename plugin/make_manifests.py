"""Write the manifests of the coding-agent plugin, all from one source: `python plugin/make_manifests.py`

In: pyproject.toml (version, description, licence, keywords, authors) and the constants below. Out: the manifest of each
client at the repository's root, which is the plugin's root. `--check` writes nothing and fails if one is out of date
(tests/unit/plugin).
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NAME = "evsys"
AGENT_PLUGINS = "https://agent-plugins.org/schemas/1.0.0"
DESCRIPTION = (
    "Turn a coding agent into a model lab: read what was tried, launch training experiments, judge them honestly."
)
SERVER = {"command": "evsys", "args": ["mcp"]}
"""A command of the user's environment: plugins install no Python packages."""


def hook(script: str, *, seconds: int) -> dict[str, Any]:
    """A command that does nothing where the script or Python is missing: `python3 <missing file>` would exit with 2,
    which blocks the tool call."""
    path = f'"${{CLAUDE_PLUGIN_ROOT}}/hooks/{script}"'
    command = f"[ ! -f {path} ] || ! command -v python3 >/dev/null 2>&1 || python3 -I -S {path}"
    return {"type": "command", "command": command, "timeout": seconds}


def hooks() -> dict[str, Any]:
    guard, finished = hook("guard.py", seconds=20), hook("finished.py", seconds=10)
    tools = (
        "Read|Edit|MultiEdit|Write|NotebookEdit|Bash|PowerShell|Grep|Monitor|ReadMcpResourceTool|shell|local_shell|"
        "exec_command|mcp__.*"
    )
    return {
        "description": "Keeps test-split files and keys unread; tells of finished runs.",
        "hooks": {
            "PreToolUse": [{"matcher": tools, "hooks": [guard]}],
            "PostToolUse": [{"matcher": "Bash", "hooks": [finished]}],
            "UserPromptSubmit": [{"hooks": [finished]}],
            "SessionStart": [{"hooks": [finished]}],
        },
    }


def cursor_hooks() -> dict[str, Any]:
    """Cursor's own form. It has no hook before an edit or a search. Nothing of the folder that is worked in is run."""
    found = 'for d in "$CURSOR_PLUGIN_ROOT" "$CLAUDE_PLUGIN_ROOT"; do [ -f "$d/.cursor-plugin/plugin.json" ]'
    command = f'{found} && [ -f "$d/hooks/guard.py" ] && exec python3 -I -S "$d/hooks/guard.py"; done; exit 0'
    events = ("beforeShellExecution", "beforeReadFile", "beforeMCPExecution")
    return {"version": 1, "hooks": {event: [{"command": f"sh -c '{command}'"}] for event in events}}


def manifests() -> dict[str, dict[str, Any]]:
    """Path below the root -> content."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    about = {
        "name": NAME,
        "version": project["version"],
        "description": DESCRIPTION,
        "author": {"name": project["authors"][0]["name"]},
        "license": project["license"],
        "keywords": project["keywords"],
    }
    entry = {"name": NAME, "source": "./", "description": DESCRIPTION}
    return {
        "plugin.json": {"$schema": f"{AGENT_PLUGINS}/plugin.schema.json", **about},
        "mcp.json": {
            "$schema": f"{AGENT_PLUGINS}/mcp.schema.json",
            "mcpServers": {NAME: {"type": "stdio", **SERVER}},
        },
        ".claude-plugin/plugin.json": about,
        ".claude-plugin/marketplace.json": {
            "name": NAME,
            "owner": about["author"],
            "metadata": {"description": DESCRIPTION},
            "plugins": [entry],
        },
        ".mcp.json": {"mcpServers": {NAME: {"type": "stdio", **SERVER}}},
        ".codex-plugin/plugin.json": {**about, "hooks": "./hooks/hooks.json"},
        ".agents/plugins/marketplace.json": {
            "name": NAME,
            "interface": {"displayName": "evsys"},
            "plugins": [
                {
                    "name": NAME,
                    "source": {"source": "local", "path": "./"},
                    "policy": {"installation": "AVAILABLE", "authentication": "ON_INSTALL"},
                    "category": "Developer Tools",
                }
            ],
        },
        # Cursor would read hooks/hooks.json, whose form it does not know: it gets its own file.
        ".cursor-plugin/plugin.json": {
            **about,
            "skills": "./skills/",
            "agents": "./agents/",
            "hooks": "./hooks/hooks-cursor.json",
            "mcpServers": "./mcp.json",
        },
        "gemini-extension.json": {
            "name": NAME,
            "version": about["version"],
            "description": DESCRIPTION,
            "mcpServers": {NAME: SERVER},
        },
        "hooks/hooks.json": hooks(),
        "hooks/hooks-cursor.json": cursor_hooks(),
    }


def main(arguments: list[str]) -> int:
    stale = []
    for path, content in manifests().items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        file = ROOT / path
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            stale.append(path)
            if "--check" not in arguments:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
    print(
        "\n".join(f"{'out of date' if '--check' in arguments else 'wrote'}: {path}" for path in stale) or "up to date"
    )
    return int("--check" in arguments and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
