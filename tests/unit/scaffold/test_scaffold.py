"""`evsys init-project` and `evsys new-experiment`: what they write, what they leave alone."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from evsys_sdk.cli.main import main
from evsys_sdk.config.load import load_yaml
from evsys_sdk.errors import EvsysError
from evsys_sdk.scaffold.experiment import ConfigOrigin, derive_config, new_experiment, quote, set_key
from evsys_sdk.scaffold.project import init_project, package_name

ROOT = Path(__file__).parents[3]
DAY = datetime.date(2026, 1, 2)
FIRST = "20260102_first_sft"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def project(tmp_path, monkeypatch):
    init_project(tmp_path / "lab", date=DAY)
    monkeypatch.chdir(tmp_path / "lab")
    return tmp_path / "lab"


def test_a_new_project_has_the_documented_tree(project):
    expected = """
        .gitignore AGENTS.md CLAUDE.md README.md pyproject.toml
        data/raw/.gitkeep data/fetch/requests.py data/process/requests.py
        data/datasets/requests/v1/train.jsonl data/datasets/requests/v1/test.jsonl
        data/datasets/requests/v1/metadata.yaml
        data/benchmark/requests_test/tasks.jsonl data/benchmark/requests_test/metadata.yaml
        data/validation/requests_val/tasks.jsonl data/validation/requests_val/metadata.yaml
        src/__init__.py src/verifiers.py src/metrics.py src/transforms.py
        experiments/20260102_first_sft/config.yaml experiments/20260102_first_sft/run.py
    """
    assert set(contents(project)) == set(expected.split())
    assert not any(b"{{" in text for text in contents(project).values())
    assert 'name = "lab"' in (project / "pyproject.toml").read_text()


def test_a_second_init_changes_nothing_and_says_what_it_kept(project, capsys):
    (project / "README.md").write_text("mine")
    before = contents(project)
    assert main(["init-project", ".", "--json", "--date", "20300101"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert contents(project) == before
    assert said["written"] == [] and set(said["kept"]) == set(before) and said["experiment"] == FIRST


def test_an_existing_repository_is_adopted_around_its_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src/__init__.py").write_text("VERSION = 1\n")
    (tmp_path / "README.md").symlink_to("nowhere.md")
    (tmp_path / "AGENTS.md").write_text("Use tabs.\n")
    assert main(["init-project", ".", "--date", "20260102"]) == 0
    said = capsys.readouterr().out
    assert "note: AGENTS.md was kept and does not name evsys" in said and "do not open data/benchmark/" in said
    assert (tmp_path / "src/__init__.py").read_text() == "VERSION = 1\n"
    assert (tmp_path / "README.md").is_symlink() and not (tmp_path / "nowhere.md").exists()
    assert "kept README.md" in said and "kept src/__init__.py" in said
    assert "from src import metrics, transforms, verifiers" in said
    assert f"next: evsys run experiments/{FIRST}/config.yaml" in said


def test_nothing_is_written_where_a_folder_is_a_file(tmp_path):
    (tmp_path / "data").write_text("")
    with pytest.raises(EvsysError, match=r"data in .* must be folders"):
        init_project(tmp_path, date=DAY)
    assert set(contents(tmp_path)) == {"data"}
    with pytest.raises(EvsysError, match="is a file; name a folder"):
        init_project(tmp_path / "data", date=DAY)


@pytest.mark.parametrize("name", ["taken/lab", "x" * 300, "loop", "loop/lab", ""])
def test_a_folder_that_cannot_be_made_is_a_message_and_no_traceback(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("")
    Path("loop").symlink_to("loop")
    assert main(["init-project", name, "--json"]) == 1
    said = capsys.readouterr()
    assert "Traceback" not in said.err and json.loads(said.out)["error"] in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loop", "taken"]


def test_without_torch_the_command_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("evsys_sdk.cli.scaffold.find_spec", lambda name: None)
    assert main(["init-project", "lab"]) == 0
    said = capsys.readouterr().out
    assert "pip install 'evsys-sdk[local]'" in said and "--set run.backend.kind=mock" in said


def test_the_data_is_what_the_scripts_of_the_project_make(project):
    before = contents(project / "data")
    for path in (project / "data").rglob("*.jsonl"):
        path.unlink()
    for script in ("fetch", "process"):
        subprocess.run([sys.executable, f"data/{script}/requests.py"], cwd=project, check=True, capture_output=True)
    after = contents(project / "data")
    del after["raw/requests.jsonl"]
    assert after == before


def test_metadata_counts_the_rows_that_are_there(project):
    data = project / "data"
    for card in data.rglob("metadata.yaml"):
        said = yaml.safe_load(card.read_text())
        counted = said.get("rows") or {"tasks": said["tasks"]}
        assert {name: len((card.parent / f"{name}.jsonl").read_text().splitlines()) for name in counted} == counted
        assert all((project / script).is_file() for script in said["made_by"])


def test_the_question_of_the_transform_is_that_of_the_tasks(project):
    question = (
        (project / "src/transforms.py").read_text().partition('question: str = (\n            "')[2].partition('"')[0]
    )
    tasks = [
        json.loads(line) for line in (project / "data/validation/requests_val/tasks.jsonl").read_text().splitlines()
    ]
    assert question and all(task["instruction"].endswith(f"\n{question}") for task in tasks)


def test_scaffolded_code_passes_the_linter(project):
    ruff = Path(sys.executable).with_name("ruff")
    options = ["--isolated", "--no-cache", "--line-length", "120"]
    for act in (["check", "--select", "E,F,W,B,UP,SIM"], ["format", "--check"]):
        done = subprocess.run([ruff, *act, *options, "."], cwd=project, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("by", ["cli", "script"])
def test_a_scaffolded_project_validates_and_runs(project, by):
    """On the mock backend, by both ways; tests/slow runs it unchanged on real weights."""
    config = project / "experiments" / FIRST / "config.yaml"
    evsys = [sys.executable, "-m", "evsys_sdk.cli.main"]
    checked = subprocess.run(
        [*evsys, "validate", config, "--deep", "--strict", "--json"], cwd=project, capture_output=True
    )
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["warnings"] == []
    if by == "cli":
        command, folder = [*evsys, "run", config, "--set", "run.backend.kind=mock"], project
    else:  # a script has no --set, and is run from its own folder
        config.write_text(config.read_text().replace("backend: { kind: local }", "backend: { kind: mock }"))
        command, folder = [sys.executable, "run.py"], config.parent
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads((project / f".evsys/outputs/{FIRST}/{FIRST}.experiment_result.json").read_text())
    assert record["status"] == "completed" and record["conclusion"] in done.stdout
    metrics = record["runs"][0]["metrics"]
    assert {"val/requests/pass@1", "val/requests/mean_credit", "test/requests/pass@1"} <= set(metrics)
    assert not (config.parent / ".evsys").exists()


def test_the_wheel_holds_every_template(tmp_path):
    from hatchling.builders.wheel import WheelBuilder

    (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(built).namelist())
    templates = [p for p in (ROOT / "src/evsys_sdk/scaffold/template").rglob("*") if p.is_file()]
    assert len(templates) > 20 and {str(p.relative_to(ROOT / "src")) for p in templates} <= names


def test_a_copy_differs_in_name_output_folder_and_parent_only(project, capsys):
    config = project / "experiments" / FIRST / "config.yaml"
    config.write_text(config.read_text().replace("version: 1\n", "version: 1 # kept\n"))
    assert main(["new-experiment", "higher_rank", "--from", "first_sft", "--date", "20260103"]) == 0
    said = capsys.readouterr().out
    made = project / "experiments/20260103_higher_rank"
    before, after = config.read_text().splitlines(), (made / "config.yaml").read_text().splitlines()
    assert [line for line in after if line not in before] == [
        "name: 20260103_higher_rank",
        f"parent_experiment_id: {FIRST}",
        "output_dir: .evsys/outputs/20260103_higher_rank",
    ]
    assert [line for line in before if line not in after] == [f"name: {FIRST}", f"output_dir: .evsys/outputs/{FIRST}"]
    assert (made / "run.py").read_bytes() == (config.parent / "run.py").read_bytes()
    assert "still that of" in said and "next: evsys validate experiments/20260103_higher_rank/config.yaml" in said
    assert load_yaml(made / "config.yaml").parent_experiment_id == FIRST


def test_a_copy_of_a_copy_names_its_own_parent(project):
    main(["new-experiment", "b", "--from", "first_sft", "--date", "20260103"])
    main(["new-experiment", "c", "--from", "20260103", "--date", "20260104", "--hypothesis", 'x: "y" # z'])
    config = load_yaml(project / "experiments/20260104_c/config.yaml")
    assert config.parent_experiment_id == "20260103_b"
    assert config.metadata.hypothesis.claim == 'x: "y" # z'
    assert (project / "experiments/20260104_c/config.yaml").read_text().count("parent_experiment_id") == 1


def test_an_experiment_that_was_run_is_found_by_its_record(project, capsys, monkeypatch):
    """Its file is taken, with its comments; where that is gone, the settings in the record."""
    own = project / "elsewhere.yaml"
    rows = project / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    own.write_text(
        "name: tiny # a comment\noutput_dir: .evsys/outputs\nimports: []\nrun:\n  name: r0\n  data: {path: rows.jsonl, "
        "transforms: [{kind: jsonl_to_chat}]}\n  model: {name: table-model}\n"
        "  algorithm: {kind: sft, params: {max_steps: 1}}\n  backend: {kind: mock}\n"
    )
    assert main(["run", "elsewhere.yaml", "--quiet"]) == 0
    assert main(["new-experiment", "again", "--from", "tiny", "--date", "20260105"]) == 0
    assert "name: 20260105_again # a comment" in (project / "experiments/20260105_again/config.yaml").read_text()
    own.unlink()
    capsys.readouterr()
    assert main(["new-experiment", "gone", "--from", "tiny", "--date", "20260105"]) == 0
    assert "taken from the record, without comments" in capsys.readouterr().out
    config = load_yaml(project / "experiments/20260105_gone/config.yaml")
    assert (config.name, config.parent_experiment_id) == ("20260105_gone", "tiny")
    assert config.run.algorithm.params["max_steps"] == 1


def test_an_experiment_is_never_overwritten(project, capsys):
    assert main(["new-experiment", "one", "--date", "20260103"]) == 0
    before = contents(project)
    assert main(["new-experiment", "one", "--date", "20260103", "--from", "first_sft"]) == 1
    assert "exists; choose another slug" in capsys.readouterr().err
    assert contents(project) == before
    assert main(["validate", "experiments/20260103_one/config.yaml", "--shallow"]) == 0


@pytest.mark.parametrize("slug", ["", "../up", "a b", "Upper", "-x", "x" * 61])
def test_a_slug_is_part_of_a_path_and_stays_one(project, slug):
    with pytest.raises(EvsysError, match="a slug has"):
        new_experiment(project, slug, date=DAY)


def test_an_unknown_source_is_answered_with_what_exists(project, capsys):
    assert main(["new-experiment", "x", "--from", "frist_sft"]) == 1
    assert f"in experiments/: {FIRST}" in capsys.readouterr().err
    assert main(["new-experiment", "x", "--date", "tomorrow"]) == 1
    assert "YYYYMMDD" in capsys.readouterr().err


def test_outside_of_a_project_the_next_command_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new-experiment", "x"]) == 1
    assert "next: evsys init-project ." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("name: a\nrun: 1\n", "name: n\nparent_experiment_id: a\nrun: 1\n"),
        ("name: 'a' # why\n", "name: n # why\nparent_experiment_id: a\n"),
        ("run: 1\nname: a", "run: 1\nname: n\nparent_experiment_id: a\n"),
        ("{name: a, run: 1}\n", "{ parent_experiment_id: a,name: n, run: 1}\n"),
        ("name: a\nparent_experiment_id: old # p\n", "name: n\nparent_experiment_id: a # p\n"),
        ("name: a\noutput_dir: out/a\n", "name: n\nparent_experiment_id: a\noutput_dir: out/n\n"),
        ("name: a\noutput_dir: ./shared_b\n", "name: n\nparent_experiment_id: a\noutput_dir: ./shared_b\n"),
        ("# top\nname: >\n  a\nrun: 1\n", "# top\nname: n\nparent_experiment_id: a\nrun: 1\n"),
    ],
)
def test_only_the_three_settings_of_a_config_change(before, after):
    if "output_dir: ./shared_b" in before:
        before, after = before.replace("name: a", "name: z"), after.replace("_id: a", "_id: z")
    if before.startswith("# top"):  # a folded text ends with a line break, which is part of the name
        before = before.replace(">", ">-")
    assert derive_config(ConfigOrigin(name="a", text=before), "n") == after


@pytest.mark.parametrize("text", ["metadata:\n  tags: [x]\n", "name: a\n", "metadata: {tags: [x]}\n", "metadata: {}\n"])
def test_a_missing_key_is_added_where_it_belongs(text):
    changed = yaml.safe_load(set_key(text, ("metadata", "hypothesis"), "a: b"))
    assert changed["metadata"].pop("hypothesis") == "a: b"
    assert {**changed, "metadata": changed["metadata"] or {}} == {"metadata": {}, **yaml.safe_load(text)}


@pytest.mark.parametrize(
    "value", ["plain", "20260103_one", "20260103", "1e3", "no", "a: b", "x # y", '"', "é\n", "~", ""]
)
def test_a_value_is_read_back_as_the_text_it_was(value):
    assert yaml.safe_load(f"key: {quote(value)}") == {"key": value}


@pytest.mark.parametrize(
    ("folder", "name"),
    [("My project", "my-project"), ("mein Läb", "mein-lab"), ("a_b.c", "a-b-c"), ("日本", "research")],
)
def test_a_folders_name_becomes_a_package_name(folder, name):
    assert package_name(folder) == name
