"""Code that a config names by a dotted path: found beside the config, checked before the run, not run by --no-code."""

from __future__ import annotations

import os

import pytest

AGENTS = """
from pathlib import Path
Path(__file__).with_suffix(".ran").write_text("x")


class Plain:
    def __init__(self, policy, hint="", depth=1):
        if depth < 1:
            raise ValueError("depth must be 1 or more")

    async def run(self, instruction, environment, context): ...


class Inherits(Plain):
    def __init__(self, extra=1, **rest):
        super().__init__(**rest)


class Bare:
    def run(self, instruction, environment, context): ...


class Needs:
    def __init__(self, size):
        self.size = size

    def run(self, instruction, environment, context): ...


class LooksItself:
    def __init__(self, **settings):
        self.settings = settings

    def run(self, instruction, environment, context): ...


def search(query: str) -> str:
    "Look something up."
    return query
"""


def entry(agent, **params):
    found = {"name": "b", "path": "bench", "agent_import_path": agent}
    return {"benchmark": {**found, "agent_params": params} if params else found}


@pytest.fixture
def folder(project):
    """A config in a folder of its own with modules beside it; the command runs in the folder above."""
    project.write_tasks()
    (project.root / "exp").mkdir()
    (project.root / "exp/mine.py").write_text(AGENTS)
    return project


def check(project, verb="validate", *flags, **top):
    done = project.evsys(verb, project.config(name="exp/config.yaml", **top), *flags)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("agent", "params", "told"),
    [
        ("Plain", {"hnt": "x"}, "hnt = 'x'   unknown key; closest: hint"),
        ("Inherits", {"dpth": 2}, "dpth = 2   unknown key; closest: depth"),
        ("Bare", {"depth": 2}, "depth = 2   unknown key"),
        ("Needs", {"siez": 2}, "size   missing; it has no default"),
    ],
)
def test_misspelt_params_of_an_agent_without_a_base_class_are_found(folder, agent, params, told):
    code, text = check(folder, metadata=entry(f"mine.{agent}", **params))
    assert code == 1 and told in text and "metadata.benchmark" in text


@pytest.mark.parametrize(
    ("agent", "params"),
    [("Plain", {"hint": "x", "model_name": "m"}), ("Inherits", {"extra": 1, "depth": 2}), ("Bare", {}),
     ("Needs", {"size": 1}), ("LooksItself", {"anything": 1})],
)  # fmt: skip
def test_params_that_fit_are_taken(folder, agent, params):
    code, text = check(folder, metadata=entry(f"mine.{agent}", **params))
    assert code == 0, text


def test_an_agent_that_cannot_be_made_is_blamed_and_not_the_environment(folder):
    _, text = check(folder, "run", metadata=entry("mine.Plain", depth=0))
    assert "the agent's constructor: ValueError: depth must be 1 or more" in text and "the environment" not in text


def test_agents_tools_and_environments_beside_the_config_need_no_imports(folder, minimal_run):
    assert check(folder, metadata=entry("mine:Bare"))[0] == 0
    assert check(folder, metadata=entry("chat", tools=["mine.search"]))[0] == 0
    (folder.root / "exp/places.py").write_text(
        "from evsys_sdk.rollout.sandbox import SandboxEnvironment\nclass Room(SandboxEnvironment): ...\n"
    )
    code, text = check(folder, metadata={"benchmark": {"path": "bench", "environment": "places.Room"}})
    assert code == 0, text
    phases = [{"algorithm": {"kind": "rl", "params": {"agent_import_path": "mine.Plain", "agent_params": {"hnt": 1}}}}]
    run = minimal_run(algorithm={"kind": "combo", "params": {"phases": phases}}, data={"path": "bench/tasks.jsonl"})
    code, text = check(folder, run=run)
    assert code == 1 and "phases[0].algorithm.params.agent_params.hnt" in text and "closest: hint" in text


def test_a_module_at_the_root_of_the_project_is_found_too_and_one_beside_the_config_comes_first(folder):
    (folder.root / "pyproject.toml").write_text("")
    (folder.root / "rooted.py").write_text("class A:\n    def run(self, instruction, environment, context): ...\n")
    (folder.root / "mine.py").write_text("")
    assert check(folder, metadata=entry("rooted.A"))[0] == 0
    assert check(folder, metadata=entry("mine.Bare"))[0] == 0


WRITES = "from pathlib import Path\nPath(__file__).with_suffix('.ran').write_text('x')\n"


def test_without_code_nothing_of_the_project_is_imported(folder, minimal_run):
    """Every setting that can name code names a module that leaves a file when it is imported."""
    root = folder.root / "exp"
    modules = [f"own_{n}" for n in ("import", "agent", "tool", "env", "rl_agent", "rl_env", "phase", "phase_env")]
    for name in modules:
        (root / f"{name}.py").write_text(WRITES)
    for package in ("src", "own_package"):
        (root / package).mkdir()
        (root / package / "__init__.py").write_text(WRITES)
    (root / "own_package/part.py").write_text(WRITES)
    site = folder.root / "site"
    (site / "own_plugin-1.0.dist-info").mkdir(parents=True)
    (site / "own_plugin.py").write_text(WRITES)
    (site / "own_plugin-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: own-plugin\nVersion: 1.0\n")
    groups = ("algorithms", "metrics", "transforms", "verifiers", "backends", "agents", "callbacks", "launchers",
              "data_sources")  # fmt: skip
    points = "".join(f"[evsys_sdk.{group}]\nown_{group} = own_plugin:Thing\n" for group in groups)
    (site / "own_plugin-1.0.dist-info/entry_points.txt").write_text(points)
    folder.write_tasks("bench/tasks.jsonl", fn_name="own_verifiers")
    benchmark = [
        {"name": "a", "path": "bench", "agent_import_path": "own_agent.Agent", "metrics": ["own_metrics"]},
        {"name": "b", "path": "bench", "agent_import_path": "chat", "agent_params": {"tools": ["own_tool.search"]}},
        {"name": "c", "path": "bench", "environment": "own_env.Room"},
        {"name": "d", "path": "bench", "environment": {"kind": "own_package.part:Room"}},
    ]
    rl = {"agent_import_path": "own_rl_agent:Agent", "environment": "own_rl_env.Room"}
    phase = {"agent_import_path": "own_phase:Agent", "environment": "own_phase_env.Room"}
    phases = [{"algorithm": {"kind": "rl", "params": {"max_steps": 1, **phase}}}]
    rows = {"path": "bench/tasks.jsonl", "transforms": [{"kind": "own_transforms"}]}
    model = {"name": "Qwen/Qwen3-4B"}
    runs = [
        minimal_run(name="x", model=model, algorithm={"kind": "rl", "params": {"max_steps": 1, **rl}}, data=rows),
        minimal_run(name="y", model=model, algorithm={"kind": "combo", "params": {"phases": phases}}, data=rows),
        minimal_run(name="z", model=model, algorithm={"kind": "own_algorithms"}, data=rows),
    ]
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    for imports in (None, ["own_import", "own_package.part"]):
        top = {"run": None, "runs": runs, "imports": imports, "metadata": {"benchmark": benchmark}}
        config = folder.config(name="exp/config.yaml", callbacks=[{"kind": "own_callbacks"}], **top)
        for flags in (["--no-code"], ["--no-code", "--strict"], ["--no-code", "--json"], ["--no-code", "--shallow"]):
            done = folder.evsys("validate", config, *flags, PYTHONPATH=path)
            assert sorted(file.name for file in folder.root.rglob("*.ran")) == [], flags
            assert done.returncode == 0, done.stdout + done.stderr
    done = folder.evsys("validate", config, "--no-code", PYTHONPATH=path)
    assert "own_import, own_package.part, own_algorithms = own_plugin:Thing" in done.stderr
    assert "own_agent.Agent" in done.stderr and "was not run" in done.stderr
    folder.evsys("validate", config, PYTHONPATH=path)
    ran = {file.stem for file in folder.root.rglob("*.ran")}
    assert {"own_import", "part", "own_plugin"} <= ran, "the same files are written when code may run"
