"""Which files a config's own code is made of: those it names and those they import, and nobody else's."""

from __future__ import annotations

import sys

import pytest

from evsys_sdk.config.load import parse_config
from evsys_sdk.config.project import import_extensions, project_files
from evsys_sdk.config.yaml_io import Document
from evsys_sdk.errors import ConfigError

RUN = {"name": "r", "data": {"path": "p"}, "model": {"name": "m"}, "algorithm": {"kind": "sft"}}


@pytest.fixture
def project(tmp_path):
    """Writes files, and says which of them a config with these settings is made of."""

    def files_of(sources, *, folder=".", **settings):
        for name, text in sources.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        data = {"name": "x", "run": RUN, **settings}
        return [*project_files(parse_config(Document(label="config", data=data), folder=tmp_path / folder))]

    return files_of


def test_what_a_module_imports_is_followed_as_far_as_it_is_the_projects(project):
    sources = {
        "ext.py": "import json, numpy, evsys_sdk\nfrom helper import FACTOR\nimport none_such\n",
        "helper.py": "def late():\n    import deep.inner.most as most\n",
        "deep/__init__.py": "",
        "deep/inner/most.py": "import ext",  # a circle, by a folder without an __init__.py
        "deep/other.py": "",
        "unused.py": "",
    }
    assert project(sources, imports=["ext"]) == ["deep/__init__.py", "deep/inner/most.py", "ext.py", "helper.py"]


def test_relative_imports_are_followed(project):
    sources = {
        "pack/__init__.py": "",
        "pack/sub/__init__.py": "from . import one",
        "pack/sub/one.py": "from ..two import x\nfrom .. import three, x",
        "pack/two.py": "from .four import *",
        "pack/three.py": "",
        "pack/four.py": "",
        "pack/five.py": "",
    }
    assert project(sources, imports=["pack.sub.one"]) == sorted(name for name in sources if name != "pack/five.py")


def test_of_a_package_that_is_named_every_file_counts(project):
    sources = {"src/__init__.py": "", "src/part.py": "import beside", "beside.py": "", "other.py": ""}
    assert project(sources) == ["beside.py", "src/__init__.py", "src/part.py"]


def test_modules_beside_the_config_come_before_those_at_the_root(project):
    sources = {"pyproject.toml": "", "ext.py": "", "a/ext.py": "import common", "common.py": ""}
    assert project(sources, folder="a", imports=["ext"]) == ["ext.py", "common.py"]


def test_a_module_that_is_named_counts_wherever_it_lies_unless_it_is_installed(project, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path / "lib"), str(tmp_path / "env/site-packages"), *sys.path])
    sources = {
        "lib/ext.py": "import beside, bought",
        "lib/beside.py": "",
        "env/site-packages/bought.py": "",
        "home/config": "",
    }
    assert project(sources, folder="home", imports=["ext", "bought"]) == ["beside.py", "ext.py"]


def test_agents_and_their_tools_count(project):
    sources = {"agents/mine.py": "import kit", "kit.py": "", "tools.py": "", "phase.py": "", "train.py": ""}
    entry = {"name": "b", "path": "p", "agent_import_path": "agents.mine:Mine", "agent_params": {"tools": ["tools.f"]}}
    phases = [{"algorithm": {"kind": "rl", "params": {"agent_import_path": "phase.Agent"}}}]
    algorithm = {"kind": "combo", "params": {"phases": phases, "path": "train.jsonl"}}
    found = project(sources, metadata={"benchmark": [entry]}, run={**RUN, "algorithm": algorithm})
    assert found == ["agents/mine.py", "kit.py", "phase.py", "tools.py"]


def test_a_file_that_cannot_be_read_as_python_still_counts(project):
    assert project({"ext.py": "import late", "late.py": "def broken(:"}, imports=["ext"]) == ["ext.py", "late.py"]


@pytest.mark.parametrize(
    ("written", "said"),
    [("mine.py", "without its ending: mine"), ("lab/parts.py", "without its ending: lab.parts"),
     ("none.py", "no such module")],
)  # fmt: skip
def test_a_module_that_is_named_as_a_file_is_told_its_name(tmp_path, written, said):
    (tmp_path / "lab").mkdir()
    for name in ("mine.py", "lab/parts.py"):
        (tmp_path / name).write_text("")
    data = {"name": "x", "run": RUN, "imports": [written]}
    with pytest.raises(ConfigError, match=said):
        import_extensions(parse_config(Document(label="config", data=data), folder=tmp_path))
