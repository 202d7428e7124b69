"""Codex and Gemini CLI, from their npm packages, read the plugin's manifests. No model is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGES = ("@openai/codex@0.169.0", "@google/gemini-cli@0.61.0")
SKILLS = {path.parent.name for path in ROOT.glob("skills/*/SKILL.md")}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Runs a client with a home of its own, in a copy of the plugin's files: what a clone holds."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("clients")
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--prefix", folder, *PACKAGES], check=True)
    plugin, home = folder / "evsys-sdk", folder / "home"
    home.mkdir()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (plugin / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, plugin / name)

    def run(*words: str) -> str:
        done = subprocess.run(
            [folder / "node_modules/.bin" / words[0], *words[1:]],
            cwd=plugin, env={**os.environ, "HOME": str(home)}, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=900, check=True,
        )  # fmt: skip
        return done.stdout + done.stderr

    return run


def test_codex_installs_the_plugin_from_its_marketplace(client):
    assert "Added marketplace `evsys`" in client("codex", "plugin", "marketplace", "add", ".")
    assert "Added plugin `evsys`" in client("codex", "plugin", "add", "evsys@evsys")
    assert "installed, enabled" in client("codex", "plugin", "list")


def test_gemini_links_the_extension_with_its_skills_and_its_server(client):
    assert "successfully validated" in client("gemini", "extensions", "validate", ".")
    client("gemini", "extensions", "link", ".", "--consent")
    listed = client("gemini", "extensions", "list")
    assert all(f"{name}: " in listed for name in SKILLS)
    assert "MCP servers:\n  evsys" in listed
