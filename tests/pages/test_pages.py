"""Every YAML and Python block of README, docs, examples, skills and agents is true: it validates, or it runs.

A YAML block that is a whole config is checked as it is; a fragment is set into a small config first. Python blocks of a
page run one after another in a folder with that small project; a block that begins `# file: name.py` is written
there instead. Lines that begin with `evsys` must be command lines that the parser takes.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from evsys_sdk.checks.preflight import validate_yaml
from evsys_sdk.cli.main import parse
from evsys_sdk.config.schema import DataConfig, EvalConfig, ExperimentConfig, RunConfig
from evsys_sdk.config.yaml_io import parse_document
from evsys_sdk.registry import REGISTRIES
from evsys_sdk.scaffold.project import init_project

ROOT = Path(__file__).parents[2]
PLUGIN_PAGES = sorted([*ROOT.glob("skills/**/*.md"), *ROOT.glob("agents/*.md")])
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), *PLUGIN_PAGES])
CONFIGS = sorted(ROOT.glob("examples/**/config.yaml"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
BASE: dict[str, Any] = {
    "name": "page",
    "run": {
        "name": "r0",
        "data": {"path": "data/train.jsonl", "transforms": [{"kind": "jsonl_to_chat"}]},
        "model": {"name": "table-model"},
        "algorithm": {"kind": "sft", "params": {"max_steps": 2}},
        "backend": {"kind": "mock"},
    },
}


def blocks(language: str) -> list[Any]:
    return [
        pytest.param(page, text, id=f"{page.relative_to(ROOT)}:{page.read_text()[: match.start()].count(chr(10)) + 1}")
        for page in dict.fromkeys(PAGES)
        for match in BLOCK.finditer(page.read_text())
        if match.group(1) == language
        for text in [match.group(2)]
    ]


@pytest.fixture
def registries(tmp_path, monkeypatch):
    """What a test registers goes with it, as do modules that it imports from its folder or from the examples."""
    for one in REGISTRIES.values():
        one.names()  # everything is loaded before the copies are made
        monkeypatch.setattr(one, "entries", dict(one.entries))
    yield
    # The next page may have modules of the same names. Only the page's own: numpy cannot be loaded a second time.
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith((f"{tmp_path}/", f"{ROOT}/examples/")):
            del sys.modules[name]


@pytest.fixture
def world(tmp_path, monkeypatch, registries):
    """A folder with a config, rows, tasks and the modules that pages speak of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVSYS_OFFLINE", "1")
    for variable in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "TINKER_API_KEY"):
        monkeypatch.setenv(variable, "a page's key: it opens nothing")
    monkeypatch.syspath_prepend(tmp_path)
    rows = [
        {"prompt": f"say {w}", "completion": w, "query": w, "tool_slug": w.upper(), "chosen": w, "rejected": "no"}
        for w in ("red", "green", "blue")
    ]
    for name in ("train", "val", "more"):
        _write(tmp_path / f"data/{name}.jsonl", rows)
    (tmp_path / "data/train.csv").write_text("instruction,input,output\nsay it,red,red\nsay blue,,blue\n")
    for folder, verb in (("data/val", "say"), ("data/test", "spell"), ("data/benchmark/colours", "say")):
        tasks = [
            {
                "task_id": w,
                "instruction": f"{verb} {w}",
                "verifier": {"fn_name": "exact_match", "expected": w},
                "metadata": {"toolkit": w},
            }
            for w in ("red", "green")
        ]
        _write(tmp_path / folder / "tasks.jsonl", tasks)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(BASE))
    return tmp_path


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _grafted(fragment: dict[str, Any]) -> dict[str, Any]:
    """The small config with the fragment set in where its keys belong."""
    config: dict[str, Any] = json.loads(json.dumps(BASE))
    keys = set(fragment)
    if keys <= set(ExperimentConfig.model_fields):
        if keys & {"matrix", "runs", "base_run"}:
            del config["run"]
        return {**config, **fragment}
    for model, path in ((RunConfig, ["run"]), (DataConfig, ["run", "data"]), (EvalConfig, ["run", "eval"])):
        if keys <= set(model.model_fields):
            target = config
            for part in path:
                target = target.setdefault(part, {})
            target.update(fragment)
            return config
    raise AssertionError(f"keys {sorted(keys)} belong to no part of a config")


def _prepare(page: Path, folder: Path) -> None:
    """Write the modules that the page names, and run the shell blocks that make its files."""
    for match in BLOCK.finditer(page.read_text()):
        if match.group(1) == "bash" and match.group(2).startswith("printf"):
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            subprocess.run(["bash", "-ec", match.group(2)], cwd=folder, env={**os.environ, "PATH": path}, check=True)
        named = re.match(r"# file: (\S+)\n", match.group(2))
        if match.group(1) == "python" and named:
            path = folder / named.group(1)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(match.group(2))


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_a_yaml_block_validates(page, text, world):
    _prepare(page, world)
    document = parse_document(text, page.name)
    config = document.data if "name" in document.data and "run" in document.data else _grafted(document.data)
    (world / "page.yaml").write_text(yaml.safe_dump(config))
    validate_yaml(world / "page.yaml", deep=True)


@pytest.mark.parametrize("page", dict.fromkeys(p.values[0] for p in blocks("python")), ids=lambda p: p.name)
def test_python_blocks_of_a_page_run(page, world):
    _prepare(page, world)
    names: dict[str, Any] = {"__name__": "page"}
    for match in BLOCK.finditer(page.read_text()):
        if match.group(1) == "python" and not match.group(2).startswith("# file:"):
            line = page.read_text()[: match.start()].count("\n") + 1
            exec(compile("\n" * line + match.group(2), str(page), "exec"), names)
        elif match.group(1) == "python":
            exec(
                compile(match.group(2), str(page), "exec"), {"__name__": match.group(2).split()[2].removesuffix(".py")}
            )


@pytest.mark.parametrize(("page", "text"), blocks("bash") + blocks("console"))
def test_command_lines_parse(page, text):
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True) if re.match(r"(\$ )?evsys ", line) else []
        if words:
            parse(words[1:])


@pytest.mark.parametrize(
    "page", [*PLUGIN_PAGES, ROOT / "docs/projects.md", ROOT / "docs/agents.md"], ids=lambda p: p.stem
)
def test_commands_in_the_text_for_agents_exist(page):
    """Also those between backticks, which may lack arguments but have no unknown verb or option."""
    text = BLOCK.sub("", page.read_text())
    for command in re.findall(r"`(evsys [^`]+)`", text):
        words = shlex.split(command)
        if words[1] != "...":
            with suppress(click.MissingParameter):
                parse(words[1:])


@pytest.mark.parametrize("page", PLUGIN_PAGES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_names_in_the_text_for_agents_exist(page, tmp_path, world):
    """A file is one that `evsys init-project` makes; a key, a field or a function stands in the code."""
    root = init_project(tmp_path / "lab", date=datetime.date(2026, 11, 18)).root
    text = BLOCK.sub("", page.read_text()).partition("---\n")[2]
    code = {word for path in (ROOT / "src").rglob("*.py") for word in re.findall(r"\w+", path.read_text())}
    for span in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"(src|data|experiments)/[\w./-]*", span):
            assert (root / span).exists() or (world / span).exists(), f"{page.name}: {span}"
        elif re.fullmatch(r"@?[a-z]+(_[a-z]+)+", span):
            assert span.lstrip("@") in code, f"{page.name}: {span}"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: str(p.relative_to(ROOT)))
def test_an_example_config_validates_deeply_and_strictly(path, monkeypatch, registries):
    monkeypatch.chdir(ROOT)
    validate_yaml(path, deep=True, strict=True)


def test_links_between_pages_lead_somewhere():
    for page in dict.fromkeys(PAGES):
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


@pytest.mark.parametrize("script", sorted(ROOT.glob("examples/[0-9]*/make_data.py")), ids=lambda p: p.parent.name)
def test_an_examples_data_is_what_its_script_makes(script, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("make_data", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HERE", tmp_path)
    module.main()
    committed = script.parent / "data"
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.jsonl")}
    assert made == {path.relative_to(committed): path.read_bytes() for path in committed.rglob("*.jsonl")}


@pytest.mark.parametrize("tasks", sorted(ROOT.glob("examples/**/tasks.jsonl")), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_evaluation_question_of_an_example_is_asked_in_training(tasks):
    asked = [json.loads(line)["instruction"] for line in tasks.read_text().splitlines()]
    train = _questions(tasks.parents[1] / "train.jsonl")
    assert len(set(asked)) == len(asked) >= 24 and not set(asked) & set(train)
    if "02_quickstart" in tasks.parts:  # its question is the same throughout, the request before it never
        overlaps = [_overlap(a.split("\n")[0], b.split("\n")[0]) for a in asked for b in train]
        assert max(overlaps) < 0.5


def _questions(path: Path) -> list[str]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row.get("query") or row.get("prompt") or row["instruction"] for row in rows]


def _overlap(one: str, other: str) -> float:
    """Words that both have, of all words that either has."""
    words = [set(re.findall(r"\w+", text.lower())) for text in (one, other)]
    return len(words[0] & words[1]) / len(words[0] | words[1])
