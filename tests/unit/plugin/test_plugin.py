"""The coding-agent plugin at the repository's root: manifests, skills, hooks."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
import yaml

from evsys_sdk.cli.main import main
from evsys_sdk.history.context import count_tokens

ROOT = Path(__file__).parents[3]
SKILLS = ["design-a-benchmark", "diagnose-experiment", "read-the-record", "set-up-research-project", "using-the-sdk"]
PORTABLE = {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
ABOUT = {"name", "version", "description", "author", "homepage", "repository", "license", "keywords"}
KEYS = {
    ".claude-plugin/plugin.json": ABOUT | {"displayName", "skills", "agents", "hooks", "mcpServers", "commands"},
    ".claude-plugin/marketplace.json": {"name", "owner", "plugins", "strict", "renames", "metadata"},
    ".codex-plugin/plugin.json": ABOUT | {"skills", "hooks", "apps", "interface", "mcpServers"},
    ".cursor-plugin/plugin.json": ABOUT | {"rules", "agents", "commands", "skills", "hooks", "mcpServers"},
    "gemini-extension.json": {
        "name",
        "version",
        "description",
        "mcpServers",
        "contextFileName",
        "excludeTools",
        "settings",
    },
    ".mcp.json": {"mcpServers"},
    "hooks/hooks.json": {"description", "hooks"},
}
"""The keys that each client documents."""


def frontmatter(page: Path) -> dict[str, object]:
    return yaml.safe_load(page.read_text().split("---\n")[1])


def load(path: str) -> dict:
    return json.loads((ROOT / path).read_text())


def test_the_manifests_are_what_the_script_makes():
    done = subprocess.run(
        [sys.executable, ROOT / "plugin/make_manifests.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["plugin", "mcp"])
def test_the_portable_manifests_meet_the_published_schemas(name):
    schema = json.loads((files("skillsaw") / f"schemas/agent_plugins/v1_0_0/{name}.schema.json").read_text())
    jsonschema.validate(load(f"{name}.json"), schema)


@pytest.mark.parametrize("path", KEYS)
def test_a_manifest_has_only_keys_that_its_client_knows(path):
    assert set(load(path)) <= KEYS[path]


def test_every_client_starts_the_same_server_and_version():
    versions = {load(path)["version"] for path in (*list(KEYS)[:1], *list(KEYS)[2:5], "plugin.json")}
    assert len(versions) == 1
    for path in ("mcp.json", ".mcp.json", "gemini-extension.json"):
        server = load(path)["mcpServers"]["evsys"]
        assert (server["command"], server["args"]) == ("evsys", ["mcp"])


def test_the_linter_of_skills_finds_no_error():
    skillsaw = Path(sys.executable).with_name("skillsaw")
    done = subprocess.run([skillsaw, "lint", ROOT], capture_output=True, text=True)
    assert done.returncode == 0 and "Errors:   0" in done.stdout, done.stdout


@pytest.mark.parametrize("name", SKILLS)
def test_a_skill_has_portable_frontmatter_and_references_that_it_names(name):
    page = ROOT / "skills" / name / "SKILL.md"
    about = frontmatter(page)
    assert about["name"] == name and set(about) <= PORTABLE and len(about["description"]) <= 1024
    references = {path.name for path in (page.parent / "references").iterdir()}
    assert references and references == set(re.findall(r"\(references/([\w.-]+)\)", page.read_text()))
    assert len(page.read_text().splitlines()) <= 60  # thin: the knowledge sits in the verbs


def test_there_are_no_other_skills_and_agents():
    assert sorted(path.parent.name for path in ROOT.glob("skills/*/SKILL.md")) == SKILLS
    assert [path.name for path in ROOT.glob("agents/*.md")] == ["training-decider.md"]
    assert set(frontmatter(ROOT / "agents/training-decider.md")) <= {"name", "description"}


def test_what_every_session_pays_is_at_most_250_tokens():
    abouts = [frontmatter(page) for page in [*ROOT.glob("skills/*/SKILL.md"), *ROOT.glob("agents/*.md")]]
    text = "".join(f"- evsys:{about['name']}: {about['description']}\n" for about in abouts)
    assert len(text) / 4 <= 250 and count_tokens(text) <= 250


def test_lines_of_the_text_for_agents_fit_120_columns():
    pages = [*ROOT.glob("skills/**/*.md"), *ROOT.glob("agents/*.md")]
    assert [p.name for p in pages for line in p.read_text().splitlines() if len(line) > 120] == []


def test_a_hook_without_its_script_blocks_nothing(tmp_path):
    """`python3 <missing file>` would exit with 2, which means: block."""
    for groups in load("hooks/hooks.json")["hooks"].values():
        command = groups[0]["hooks"][0]["command"]
        done = subprocess.run(["sh", "-c", command], env={"PATH": "/usr/bin:/bin", "CLAUDE_PLUGIN_ROOT": str(tmp_path)})
        assert done.returncode == 0


spec = importlib.util.spec_from_file_location("finished", ROOT / "hooks/finished.py")
finished = importlib.util.module_from_spec(spec)
spec.loader.exec_module(finished)


def tell(folder: Path, event: str = "PostToolUse", session: str = "s1") -> str:
    given = json.dumps({"hook_event_name": event, "session_id": session, "cwd": str(folder)})
    command = [sys.executable, "-I", "-S", ROOT / "hooks/finished.py"]
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    if not done.stdout:
        return ""
    said = json.loads(done.stdout)["hookSpecificOutput"]
    assert said["hookEventName"] == event
    return said["additionalContext"]


def test_a_session_is_told_of_each_finished_run_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert tell(tmp_path) == "" and not (tmp_path / ".evsys").exists()  # no project, no files
    rows = "".join(json.dumps({"prompt": f"say {w}", "completion": w}) + "\n" for w in ("red", "blue"))
    Path("train.jsonl").write_text(rows)
    for split in ("val", "test"):
        Path(split).mkdir()
        task = {"instruction": f"{split} red", "verifier": {"fn_name": "exact_match", "expected": "red"}}
        Path(split, "tasks.jsonl").write_text(json.dumps(task) + "\n")
    Path("pyproject.toml").write_text("")

    def run(name):
        benchmarks = "[{name: b, path: val, split: val}, {name: b, path: test, split: test}]"
        Path(f"{name}.yaml").write_text(
            f"name: {name}\noutput_dir: .evsys/outputs/{name}\nimports: []\nmetadata: {{benchmark: {benchmarks}}}\n"
            "run: {name: r0, data: {path: train.jsonl, transforms: [{kind: jsonl_to_chat}]}, "
            "model: {name: table-model}, algorithm: {kind: sft, params: {max_steps: 1}}, backend: {kind: mock}}\n"
        )
        assert main(["run", f"{name}.yaml", "--quiet"]) == 0

    run("one")
    assert "1 finished experiments" in tell(tmp_path, "SessionStart")
    assert tell(tmp_path) == ""
    run("two")
    said = tell(tmp_path)
    assert "Run two/r0 ended: completed, val/b/pass@1" in said and "Experiment two ended: completed" in said
    assert "test/" not in said and "one" not in said
    assert tell(tmp_path) == ""
    assert "2 finished experiments" in tell(tmp_path / "val", "SessionStart", session="s2")


def test_text_of_a_record_cannot_steer_the_reader():
    assert finished.plain("a\x1b[31m\nb" + "x" * 500, limit=20) == "a [31m bxxxxxxxxxxxx"
