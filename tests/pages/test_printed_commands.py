"""Every `evsys` command that README, docs, skills, agents or examples print ends with exit code 0, as printed.

The commands of a page run one after another in a copy of one small project, which has what the pages speak of: the
sweep `lr_sweep` with two arms, `baseline`, a run in `outputs/r0`, tasks in `data/val` and `data/test`. The walks
(test_walks.py) and the examples' own `evsys run` (tests/e2e/test_examples.py) run whole; `NOT_HERE` has the rest.
"""

from __future__ import annotations

import datetime
import glob
import json
import re
import shlex
import shutil
import sys
from contextlib import chdir
from pathlib import Path

import pytest
import yaml

from evsys_sdk.cli.main import main
from evsys_sdk.registry import REGISTRIES
from evsys_sdk.scaffold.project import init_project

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for pattern in ("*.md", "docs/*.md", "examples/*/README.md", "skills/**/*.md", "agents/*.md")
    for page in sorted(ROOT.glob(pattern))
    if page.stem not in ("tutorial", "walkthrough", "CLAUDE")
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
NOT_HERE = {
    "it serves until it is stopped": ("evsys serve ", "evsys mcp ", "evsys dashboard", "evsys engine serve "),
    "it needs a team's server": ("evsys query ",),
    "the hash in its name is that of a run": ("evsys regrade outputs/benchmarks/test/r0-1f2e3d ",),
    "it needs a hosted model or a Tinker server": (
        "evsys backend check tinker ",
        "evsys benchmark run --path data/test --model weights/moved ",
        "evsys benchmark run --path data/test --inference openai ",
        "evsys regrade outputs/r0 --verifier llm_judge ",
        "evsys eval model --dataset data/val.jsonl --aliases aliases.json --output-dir outputs/eval --inference-kind",
        "evsys eval model --dataset data/val.jsonl --aliases aliases.json --secondary-aliases loose.json ",
    ),
    "a target of its own; tests/unit/deployers and the tutorial run it": (
        "evsys deploy ship-it",
        "evsys export ship-it ",
    ),
    "real weights; the slow job": ("evsys model export outputs/first ", "evsys backend check local"),
    "research; tests/e2e/test_research.py": ("evsys research config.yaml ", "evsys ablate find_the_recipe-r007"),
    "an example as a whole; tests/e2e/test_examples.py": ("evsys run examples/", "evsys research examples/"),
    "a mistake, or an interruption, that the page shows": ("$ evsys run ",),
}
STAND_INS = {"--model smollm2-135m-instruct": "--model outputs/r0"}
"""What of a command is changed: real weights take minutes."""


def printed(page: Path) -> list[str]:
    """The command lines of a page that are `evsys`, `cd`, or make files, without comments."""
    lines = []
    for language, block in BLOCK.findall(page.read_text()):
        if language in ("bash", "console"):
            every = re.sub(r"\s*\\\n\s*", " ", block).splitlines()
            lines += [one for one in every if re.match(r"(\$ )?(\w+=\S+ )*evsys |cd |printf .*> \S+\.jsonl$", one)]
    return lines


def why_not_here(line: str) -> str | None:
    command = re.sub(r"^(\w+=\S+ )+", "", line)
    return next((why for why, starts in NOT_HERE.items() if f"{command} ".startswith(starts)), None)


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="session")
def finished_project(tmp_path_factory):
    """A project in which the experiments have ended that the pages speak of."""
    root = tmp_path_factory.mktemp("printed")
    init_project(root, date=datetime.date(2026, 11, 18))
    use_mock(root)
    words = ["red", "green", "blue", "black", "white", "grey"]
    write_rows(root / "data/train.jsonl", [{"prompt": f"say {word}", "completion": word} for word in words] * 4)
    for folder, verb in (("data/val", "tell me"), ("data/test", "spell"), ("data/test_v2", "spell")):
        tasks = [
            {"task_id": word, "instruction": f"{verb} {word}", "metadata": {"toolkit": word},
             "verifier": {"fn_name": "exact_match", "expected": word}}
            for word in words[:4]
        ]  # fmt: skip
        write_rows(root / folder / "tasks.jsonl", tasks)
    sweep = BLOCK.search((ROOT / "skills/using-the-sdk/references/config.md").read_text())
    assert sweep is not None
    config = yaml.safe_load(sweep[2])
    baseline = {**config, "name": "baseline", "output_dir": ".evsys/outputs/baseline", "n_repeats": 1}
    baseline["matrix"] = {"axes": {"algorithm.params.max_steps": [2]}}
    baseline["metadata"] = {**config["metadata"], "hypothesis": "Two steps are enough."}
    run = {**config["base_run"], "name": "r0", "algorithm": {"kind": "sft", "params": {"max_steps": 4}}}
    single = {"name": "hello", "output_dir": "outputs", "metadata": {"benchmark": config["metadata"]["benchmark"]}}
    rl = {"kind": "rl", "params": {"max_steps": 1, "num_samples": 2}}
    trained = {**run, "data": {"path": "data/val/tasks.jsonl"}, "algorithm": rl}
    with chdir(root):
        (root / "rl.yaml").write_text(
            yaml.safe_dump({"name": "rl_run", "output_dir": ".evsys/outputs/rl_run", "run": trained})
        )
        (root / "config.yaml").write_text(sweep[2])
        (root / "baseline.yaml").write_text(yaml.safe_dump(baseline))
        (root / "single.yaml").write_text(yaml.safe_dump({**single, "run": run}))
        for name in ("rl.yaml", "baseline.yaml", "single.yaml", "config.yaml"):
            assert main(["run", name, "--quiet"]) == 0
        for name, path in (("my-benchmark", "data/val"), ("bench", "data/val")):
            assert main(["data", "add", path, "--name", name, "--benchmark"]) == 0
    return root


def use_mock(folder: Path) -> None:
    """What `evsys init-project` writes trains real weights: minutes."""
    for config in folder.rglob("*_first_sft/config.yaml"):
        config.write_text(config.read_text().replace("backend: { kind: local }", "backend: { kind: mock }"))


@pytest.fixture
def project(finished_project, tmp_path, monkeypatch):
    """A copy of it, and what a page registers is forgotten afterwards."""
    for registry in REGISTRIES.values():
        registry.names()
        monkeypatch.setattr(registry, "entries", dict(registry.entries))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("EVSYS_OFFLINE", "1")
    root = tmp_path / "lab"
    shutil.copytree(finished_project, root)
    (root / "examples").symlink_to(ROOT / "examples")
    before = set(sys.modules)
    monkeypatch.chdir(root)
    yield root
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith((f"{tmp_path}/", f"{ROOT}/examples")):
            del sys.modules[name]


@pytest.mark.parametrize("page", [p for p in PAGES if printed(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_commands_of_a_page_run_as_printed(page, project, monkeypatch, capsys):
    for line in printed(page):
        if why_not_here(line):
            continue
        for real, stand_in in STAND_INS.items():
            line = line.replace(real, stand_in)
        for setting, config in (("--set run.", "single.yaml"), ('--set "matrix.', "baseline.yaml")):
            if setting in line:  # of a new experiment: what has results is not run with other settings
                text = Path(config).read_text()
                Path("config.yaml").write_text(
                    re.sub(r"(?m)^(name|output_dir): .*", rf"\1: {Path(config).stem}_2", text)
                )
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words[0] == "printf":
            Path(words[-1]).write_text(words[1].replace("\\n", "\n"))
            continue
        if words[0] == "cd":
            monkeypatch.chdir(words[1])
            continue
        for word in words[1:]:  # as the shell would
            if glob.has_magic(word) and glob.glob(word):
                words[words.index(word)] = glob.glob(word)[0]
        capsys.readouterr()
        code = main([word for word in words[1:] if word != "--detach"])
        assert code == 0, f"{page.name}: {line}\n{capsys.readouterr().err}"
        if words[1] == "init-project":
            use_mock(project)


def test_every_exception_is_printed_somewhere():
    lines = [f"{re.sub(r'^([A-Z_]+=\S+ )+', '', line)} " for page in PAGES for line in printed(page)]
    for starts in NOT_HERE.values():
        for start in starts:
            assert any(line.startswith(start) for line in lines), start
