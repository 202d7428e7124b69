from __future__ import annotations

import sys

import pytest

from evsys_sdk.config.load import load_yaml
from evsys_sdk.config.project import import_extensions, project_root
from evsys_sdk.errors import ConfigError

TEXT = "name: x\nrun: {name: r, data: {path: p}, model: {name: m}, algorithm: {kind: sft}}\n"


@pytest.fixture(autouse=True)
def _clean_imports(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def _project(folder, value: int):
    (folder / "src").mkdir(parents=True)
    (folder / "src/__init__.py").write_text(f"from src.part import VALUE\nassert VALUE == {value}\n")
    (folder / "src/part.py").write_text(f"VALUE = {value}\n")
    (folder / "config.yaml").write_text(TEXT)
    return load_yaml(folder / "config.yaml")


def test_the_root_is_the_nearest_folder_with_a_workspace_or_a_pyproject(tmp_path):
    (tmp_path / "a/b/c").mkdir(parents=True)
    (tmp_path / "a/pyproject.toml").write_text("")
    assert project_root(tmp_path / "a/b/c") == tmp_path / "a"
    (tmp_path / "a/b/.evsys").mkdir()
    assert project_root(tmp_path / "a/b/c") == tmp_path / "a/b"


def test_every_project_has_its_own_src(tmp_path):
    for value in (1, 2, 1):
        folder = tmp_path / f"p{value}-{len(list(tmp_path.iterdir()))}"
        import_extensions(_project(folder, value))
        assert value == sys.modules["src"].VALUE


def test_src_at_the_root_serves_a_config_further_down(tmp_path):
    _project(tmp_path, 5)
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "experiments/one").mkdir(parents=True)
    (tmp_path / "experiments/one/config.yaml").write_text(TEXT)
    import_extensions(load_yaml(tmp_path / "experiments/one/config.yaml"))
    assert sys.modules["src"].VALUE == 5


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nothing_of_the_kind\n", "No module named 'nothing_of_the_kind'"),
        ("def broken(:\n", r"SyntaxError.*my_parts.py:1"),
        ("x = 1\ny = x / 0\n", r"ZeroDivisionError: division by zero \(.*my_parts.py:2\)"),
    ],
)
def test_a_module_that_does_not_import_is_one_located_problem(tmp_path, code, message):
    (tmp_path / "my_parts.py").write_text(code)
    (tmp_path / "config.yaml").write_text(TEXT + "imports: [my_parts]\n")
    with pytest.raises(ConfigError, match=r"(?s)config.yaml:3: 1 problem.*imports\[0\] = 'my_parts'.*" + message):
        import_extensions(load_yaml(tmp_path / "config.yaml"))
