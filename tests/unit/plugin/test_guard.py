"""The plugin's PreToolUse hook: what an agent may read, and what it may not, however it asks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evsys_sdk.cli.main import main
from evsys_sdk.config.load import load_yaml

ROOT = Path(__file__).parents[3]
GUARD = ROOT / "hooks" / "guard.py"
spec = importlib.util.spec_from_file_location("guard", GUARD)
guard = importlib.util.module_from_spec(spec)
spec.loader.exec_module(guard)
guard.SECONDS = 600  # what a test decides does not depend on the machine's load

TEST = "data/benchmark/requests_test/tasks.jsonl"
VAL = "data/validation/requests_val/tasks.jsonl"

MISUSES = {
    "relabelled.yaml": "name: x\nmetadata:\n  benchmark:\n"
    "    - {name: a, path: data/benchmark/requests_test, split: val}\n"
    "    - {name: b, path: data/benchmark/requests_test, split: test}\n",
    "trained.yaml": f"name: x\nrun:\n  data:\n    path: {TEST}\n",
    "anchored.yaml": f"name: x\nrun:\n  data:\n    path: &rows {TEST}\n",
    "folded.yaml": f"name: x\nrun:\n  data:\n    path: >-\n      {TEST}\n",
    "quoted.yaml": f'name: x\nrun: {{"data": {{"path": "{TEST}"}}}}\n',
    "linked.yaml": "name: x\nrun: {data: {path: link.jsonl}}\n",
    "held.yaml": "name: x\nrun: {data: {path: held_out/rows.jsonl}}\n",
}
"""Configs that would have test rows logged as training rows, or as validation rollouts."""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    root = tmp_path_factory.mktemp("guarded") / "lab"
    assert main(["init-project", str(root), "--date", "20260102", "--json"]) == 0
    (root / ".env").write_text("TINKER_API_KEY=secret\n")
    (root / ".env.example").write_text("TINKER_API_KEY=\n")
    (root / "held_out").mkdir()
    (root / "held_out/rows.jsonl").write_text("{}\n")
    (root / "config.yaml").write_text(
        "name: other\nmetadata:\n  benchmark:\n    - {name: h, path: held_out/rows.jsonl}  # no label: a test entry\n"
    )
    for name, text in MISUSES.items():
        (root / name).write_text(text)
    (root / "link.jsonl").symlink_to(TEST)
    os.link(root / TEST, root / "hard.jsonl")
    (root / "shortcut").symlink_to("data/benchmark")
    for place in (
        ".evsys/outputs/x/x.journal.sqlite",
        ".evsys/outputs/x/lora/logs/test/rollouts.jsonl",
        ".evsys/outputs/x/lora/logs/validation/rollouts.jsonl",
        ".evsys/outputs/x/lora/regrades/1/rollouts.jsonl",
        "outputs/benchmarks/requests_test/x/rollouts.jsonl",
        "outputs/benchmarks/requests_test/x/journal.sqlite",
    ):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_text("")
    (root / ".evsys/dashboard.sqlite").write_text("")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost"]
    for act in (["init", "-q"], ["add", "data", "src", "experiments"], ["commit", "-qm", "all of it"]):
        subprocess.run([*git, *act], cwd=root, check=True)
    return root


@pytest.fixture(autouse=True)
def _no_cache():
    """One process of the hook checks one call; here many calls share one."""
    guard.protected_paths.cache_clear()
    guard.find_project.cache_clear()


def ask(project, tool, **given):
    return guard.check({"tool_name": tool, "tool_input": given, "cwd": str(project)})


DENIED = [
    f"cat {TEST}",
    "cat ./data/../data/benchmark/requests_test/tasks.jsonl",
    "cat data/benchmark/*/tasks.jsonl",
    "cat data/b*/r*/t*",
    "cat data/**/tasks.jsonl",
    "cat data/{validation,benchmark}/*/tasks.jsonl",
    "head -3 'data/benchmark/requests_test/tasks.jsonl'",
    'head -3 data/"benchmark"/requests_te""st/tasks.jsonl',
    r"cat data/benchmark/requests\_test/tasks.jsonl",
    "cd data/benchmark && head requests_test/tasks.jsonl",
    "cd data; cd benchmark; cd requests_test; less tasks.jsonl",
    "(cd data/benchmark/requests_test && cat tasks.jsonl)",
    "pushd data/benchmark/requests_test && cat tasks.jsonl",
    "d=data/benchmark; cat $d/requests_test/tasks.jsonl",
    "d=data; e=${d}/benchmark; cat ${e}/requests_test/tasks.jsonl",
    "cat $PWD/data/benchmark/requests_test/tasks.jsonl",
    f"python -c \"print(open('{TEST}').read())\"",
    f"python3 - <<'EOF'\nprint(open('{TEST}').read())\nEOF",
    "python -c \"import glob; print(open(glob.glob('data/benchmark/*/tasks.jsonl')[0]).read())\"",
    f"cat <{TEST}",
    f"echo $(<{TEST})",
    f"echo `cat {TEST}`",
    f"wc -l {TEST} && sed -n 1p {TEST}",
    f"jq . {TEST}",
    f"cp {TEST} /tmp/x",
    f"ln -s $PWD/{TEST} x",
    f"mv {TEST} x",
    f"tee x < {TEST}",
    f"git show HEAD:{TEST}",
    f"curl -d @{TEST} localhost",
    f"dd if={TEST}",
    f"base64 {TEST}",
    f"sed -i s/mail/maps/ {TEST}",
    f"rm {TEST}",
    "ls data/benchmark/*/tasks.jsonl | xargs cat",
    "find data -name '*.jsonl' | xargs head",
    "find data -name tasks.jsonl -exec cat {} +",
    "for f in data/*/*/tasks.jsonl; do cat $f; done",
    "grep -r mail data",
    "grep -rn mail .",
    "grep -r mail",
    "grep -R --include=*.jsonl mail data/",
    "rg mail",
    "rg mail data",
    "git grep mail",
    "tar c data | tar x -C /tmp",
    "cp -r data /tmp/x",
    "cp -r . ./copy",
    "cp -rt src data",
    "cp -r src . && tar c .",
    "rsync -a data/ /tmp/x",
    f"cat $(pwd)/{TEST}",
    f"cat $UNKNOWN/{TEST}",
    f"cat ~+/{TEST}",
    "evsys show requests_test/tasks.jsonl; cat data/b*/r*/t*",
    f"evsys run c.yaml --quiet && head {TEST}",
    "cat link.jsonl",
    "cat hard.jsonl",
    "cat shortcut/requests_test/tasks.jsonl",
    "cat data/datasets/requests/v1/test.jsonl",
    "cat held_out/rows.jsonl",
    "sqlite3 .evsys/outputs/x/x.journal.sqlite .dump",
    "cat .evsys/outputs/x/lora/logs/test/rollouts.jsonl",
    f"evsys data preview {TEST}",
    "cat .evsys/outputs/x/lora/regrades/1/rollouts.jsonl",
    "head -1 outputs/benchmarks/requests_test/x/rollouts.jsonl",
    "sqlite3 outputs/benchmarks/requests_test/x/journal.sqlite .dump",
    "evsys data preview trained.yaml",
    "cd experiments && evsys data preview ../trained.yaml",
    *[f"evsys run {name}" for name in MISUSES],
    "evsys run rel*.yaml --detach",
    "evsys validate trained.yaml",
    "evsys research trained.yaml --approve",
    f"evsys run experiments/20260102_first_sft/config.yaml --set run.data.path={TEST}",
    f"evsys run experiments/20260102_first_sft/config.yaml --set=run.data.path='{TEST}'",
    f"evsys eval model --dataset {TEST} --output-dir o --inference-kind mock --model-name x",
    "evsys rollouts first_sft --benchmark val/requests",
    "evsys rollouts first_sft --train",
    "python -m evsys_sdk.cli.main rollouts first_sft",
    ".venv/bin/python3.12 -m evsys_sdk.cli.main rollouts first_sft",
    "env FOO=1 evsys rollouts first_sft",
    "/usr/bin/env evsys rollouts first_sft",
    "timeout 60 evsys rollouts first_sft",
    "nice -n 5 .venv/bin/evsys rollouts first_sft",
    "bash -c 'evsys rollouts first_sft'",
    'sh -c "cd lab; evsys rollouts"',
    "echo first_sft | xargs evsys rollouts",
    "nice evsys run relabelled.yaml",
    "evsys rollouts first_sft --failed",
    "evsys rollouts first_sft --benchmark test/requests",
    "evsys rollouts first_sft --benchmark requests",
    "evsys rollouts first_sft --benchmark val/requests --benchmark test/requests",
    f"evsys validate config.yaml && cat {TEST}",
    f"evsys benchmark run --path data/benchmark/requests_test; cat {TEST}",
    "cat .env",
    "source .env; true",
    "cat .en''v",
    "env",
    "env | grep KEY",
    "printenv TINKER_API_KEY",
    "echo $TINKER_API_KEY",
    'python -c "import os; print(os.environ)"',
    "cat /proc/self/environ",
    "set",
    "export -p",
    "git log -p",
    "git show HEAD",
    "git show HEAD --format=fuller",
    "git -C data show HEAD",
    "git diff 4b825dc642cb6eb9a060e54bf8d69288fbee4904 HEAD",
    "git format-patch --root HEAD --stdout",
    "git rev-list --objects --all | cut -d' ' -f1 | git cat-file --batch",
    "git fast-export --all",
    "grep -d recurse mail data",
    "grep --directories=recurse mail .",
    "ugrep mail .",
    "ripgrep mail",
    "fd -e jsonl -x cat",
    "diff -r data /nowhere",
    "scp -r data host:/tmp",
    "python -c \"import shutil; shutil.copytree('data', '/tmp/d')\"",
    r"cat $'data/\x62enchmark/requests_test/tasks.jsonl'",
    "cat data/@(benchmark)/requests_test/tasks.jsonl",
    "cat data/!(validation)/*/tasks.jsonl",
    "ln -s ../benchmark/requests_test data/validation/y && cat data/validation/y/tasks.jsonl",
    f"cat /proc/self/cwd/{TEST}",
    "evsys rollouts first_sft # --no-test",
    "evsys rollouts first_sft --benchmark --no-test",
    "evsys rollouts first_sft -- --no-test",
    "evsys rollouts first_sft --arm --help",
    "evsys \\\n rollouts first_sft",
    "\\evsys rollouts first_sft",
    "e=evsys; $e rollouts first_sft",
    'evsys roll"outs" first_sft',
    "uvx evsys rollouts first_sft",
    "coproc evsys rollouts first_sft",
    "if true; then evsys rollouts first_sft; fi",
    "python3 -mevsys_sdk.cli.main rollouts first_sft",
    "python3 -c \"from evsys_sdk.cli.main import main; main(['rollouts', 'first_sft'])\"",
    "evsys query 'select completion from rollouts'",
    "sqlite3 .evsys/dashboard.sqlite .dump",
    "evsys run experiments/20260102_first_sft/config.yaml --set metadata.benchmark.1.split=val",
    "env -0",
    "/usr/bin/env",
    "export",
    "bash -c env",
    "bash -c 'printenv'",
    "x=TINKER_API_KEY; echo ${!x}",
    "python -c \"import os; print(os.getenv('TINKER_API_KEY'))\"",
    "node -e 'console.log(process.env)'",
    "awk 'BEGIN { print ENVIRON[\"HF_TOKEN\"] }'",
    "ps auxe",
    "git credential fill",
]
ALLOWED = [
    f"cat {VAL}",
    "ls -R data",
    "ls data/benchmark",
    f"wc -l {TEST}",
    "cat data/benchmark/README.md",
    "cat data/datasets/requests/v1/train.jsonl | head",
    "cat experiments/20260102_first_sft/config.yaml",
    "evsys run experiments/20260102_first_sft/config.yaml --detach",
    "evsys benchmark run --path data/benchmark/requests_test --model x",
    "evsys benchmark run --path data/benchmark/requests_test --model x | tail -5",
    "evsys verifier test data/benchmark/requests_test",
    "evsys rollouts first_sft --failed --no-test --benchmark val/requests",
    "evsys rollouts first_sft --train --no-test",
    "evsys rollouts first_sft --no-test --failed",
    "nice evsys rollouts first_sft --no-test",
    "cat .evsys/outputs/x/lora/logs/validation/rollouts.jsonl",
    "evsys data preview experiments/20260102_first_sft/config.yaml",
    "evsys run experiments/20260102_first_sft/config.yaml --set run.seed=7 --set run.name=data",
    "evsys run config.yaml",
    "git commit -m 'evsys rollouts shows rows'",
    "evsys conclude first_sft --text 'see evsys rollouts first_sft'",
    "timeout 600 evsys run experiments/20260102_first_sft/config.yaml",
    "cd experiments && evsys validate 20260102_first_sft/config.yaml",
    "grep -rn hypothesis experiments src",
    "rg hypothesis src",
    "python data/process/requests.py",
    "cat > new.yaml <<'EOF'\nmetadata: {benchmark: [{path: data/benchmark/requests_test}]}\nEOF",
    "git status && git add -A && git commit -m 'tests'",
    "cat .env.example",
    "python -m pytest -q",
    "TINKER_API_KEY=x evsys run c.yaml",
    "python -c \"import os; print(os.environ.get('HOME'))\"",
    "env FOO=1 make",
    "set -e; ls",
    "git log --oneline -5",
    "git log -p -- src",
    "git show HEAD --stat",
    "git show HEAD -- src experiments",
    "git show HEAD:src/metrics.py",
    "git diff HEAD",
    "fd -e jsonl",
    "diff -r src experiments",
    "cp -r src/ .",
    "rsync -a /nowhere/data .",
    "ps aux; ps -ef",
    "export FOO=1",
    "evsys query 'select * from evals'",
    "",
]


@pytest.mark.parametrize("command", DENIED)
def test_a_command_that_would_read_test_rows_or_keys_is_refused(project, command):
    reason = ask(project, "Bash", command=command)
    assert reason and ("closed to agents" in reason or "show test tasks" in reason or "keys" in reason)


@pytest.mark.parametrize("command", ALLOWED)
def test_an_ordinary_command_passes(project, command):
    assert ask(project, "Bash", command=command) is None


@pytest.mark.parametrize("tool", ["Read", "Edit", "Write", "MultiEdit", "NotebookEdit"])
@pytest.mark.parametrize(
    "path", [TEST, "./data/../" + TEST, "link.jsonl", "hard.jsonl", "shortcut/requests_test/tasks.jsonl", ".env"]
)
def test_a_file_tool_neither_reads_nor_changes_what_is_closed(project, tool, path):
    assert "closed to agents" in ask(project, tool, file_path=path)
    assert "closed to agents" in ask(project, tool, file_path=str(project / path))


def test_a_new_benchmark_may_be_written_and_is_then_closed(project):
    new = project / "data/benchmark/new/tasks.jsonl"
    assert ask(project, "Write", file_path=str(new)) is None
    new.parent.mkdir()
    new.write_text("{}\n")
    guard.protected_paths.cache_clear()
    assert ask(project, "Read", file_path=str(new)) and ask(project, "Write", file_path=str(new))


def test_a_session_above_the_project_finds_it_closed_too(project):
    above = project.parent
    assert "closed" in ask(above, "Read", file_path=str(project / TEST))
    assert "closed" in ask(above, "Read", file_path=f"lab/{TEST}")
    assert "closed" in ask(above, "Bash", command=f"cat lab/{TEST}")
    assert "closed" in ask(above, "Bash", command="cat lab/held_out/rows.jsonl")
    assert "closed" in ask(above, "Bash", command="cd lab && cat held_out/rows.jsonl")
    assert ask(above, "Read", file_path=f"lab/{VAL}") is None


def test_file_tools_of_other_servers_and_configs_of_our_own_are_checked(project):
    assert "closed" in ask(project, "mcp__filesystem__read_file", path=TEST)
    assert "closed" in ask(project, "mcp__plugin_evsys_evsys__validate", path=TEST)
    assert ask(project, "mcp__plugin_evsys_evsys__show", experiment="first_sft") is None
    config = "experiments/20260102_first_sft/config.yaml"
    launch = "mcp__plugin_evsys_evsys__launch"
    assert ask(project, launch, path=config, overrides=["run.seed=7"]) is None
    assert "relabelled.yaml uses data/benchmark/requests_test" in ask(project, launch, path="relabelled.yaml")
    assert "closed" in ask(project, launch, path=config, overrides=[f"run.data.path={TEST}"])
    assert ask(project, "mcp__filesystem__read_file", path=VAL) is None
    for tool, given in {
        "mcp__filesystem__read_multiple_files": {"paths": [VAL, TEST]},
        "mcp__filesystem__search_files": {"path": "data", "pattern": "mail"},
        "mcp__shell__run": {"command": f"cat {TEST}"},
        "ReadMcpResourceTool": {"server": "filesystem", "uri": f"file://{project / TEST}"},
    }.items():
        assert "closed" in ask(project, tool, **given), tool
    assert ask(project, "mcp__filesystem__write_file", path="notes.md", content=f"scored on {TEST}") is None


def test_keys_in_the_home_folder_are_closed(project, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/work").write_text("")
    assert "keys" in ask(project, "Bash", command="cat ~/.ssh/work")
    assert "keys" in ask(project, "Bash", command="cat $HOME/.ssh/*")
    assert "keys" in ask(project, "Read", file_path=str(tmp_path / ".ssh/work"))


def test_a_search_that_prints_rows_needs_a_filter(project):
    assert "closed" in ask(project, "Grep", pattern="mail", output_mode="content")
    assert "closed" in ask(project, "Grep", pattern="mail", output_mode="content", glob="*.jsonl")
    assert "closed" in ask(project, "Grep", pattern="mail", path="data/benchmark/requests_test")
    for several in ("*.{jsonl,py}", "*.py,*.jsonl", "*.py *.jsonl", "{src,data}/**/*.jsonl", "[t]asks.jsonl", "!*.py"):
        assert "closed" in ask(project, "Grep", pattern="mail", output_mode="content", glob=several), several
    assert "closed" in ask(project, "Grep", pattern="mail", output_mode="content", type="jsonl")
    assert "closed" in ask(project, "Grep", pattern="mail", output_mode="content", type="all")
    assert ask(project, "Grep", pattern="mail", output_mode="content", glob="*.{md,py}") is None
    assert ask(project, "Grep", pattern="mail", output_mode="content", glob="*.py") is None
    assert ask(project, "Grep", pattern="mail", output_mode="content", type="py") is None
    assert ask(project, "Grep", pattern="mail", output_mode="content", path="src") is None
    assert ask(project, "Grep", pattern="mail") is None


def test_a_reason_names_the_file_and_what_to_do_instead(project):
    reason = ask(project, "Read", file_path=TEST)
    assert reason.startswith(f"{TEST} is closed to agents.") and "--failed --no-test" in reason


def test_the_hook_as_a_process_blocks_with_exit_code_2(project):
    def run(text):
        return subprocess.run([sys.executable, "-I", "-S", GUARD], input=text, capture_output=True, text=True)

    event = {"tool_name": "Read", "tool_input": {"file_path": TEST}, "cwd": str(project)}
    denied = run(json.dumps(event))
    assert denied.returncode == 2 and denied.stdout == "" and "closed to agents" in denied.stderr
    event["tool_input"]["file_path"] = VAL
    assert run(json.dumps(event)).returncode == 0
    broken = run("no json")
    assert broken.returncode == 2 and "could not check" in broken.stderr


def test_a_command_that_takes_too_long_to_check_is_refused(project, monkeypatch):
    monkeypatch.setattr(guard, "SECONDS", -1)
    with pytest.raises(TimeoutError):
        ask(project, "Bash", command="cat x")


def test_the_hook_imports_only_the_standard_library():
    imported = {line.split()[1].split(".")[0] for line in GUARD.read_text().splitlines() if line.startswith("import ")}
    assert imported <= set(sys.stdlib_module_names)


LAYOUTS = {
    "flow items": "metadata:\n  benchmark:\n    - {path: d/t, split: test}\n    - {path: d/v, split: val}\n",
    "block items": "metadata:\n  benchmark:\n    - name: a\n      path: d/t\n      tags: [test]\n"
    "    - name: b\n      path: d/v\n      tags:\n        - val\n",
    "same indent": "metadata:\n  benchmark:\n  - path: d/t # test\n  - path: d/v\n    split: val\n  tags: [val]\n",
    "one entry": "metadata:\n  benchmark: {path: d/t}\nrun:\n  name: x\n",
    "one block entry": "metadata:\n  tags: [val]\n  benchmark:\n    path: d/t\n    metrics: [pass@1]\n",
    "flow list": "metadata:\n  benchmark: [ {path: d/t, name: a}, {path: d/v, name: b, split: val} ]\n",
    "flow list on lines": "metadata:\n  benchmark: [\n    {path: d/t},\n    {path: d/v, split: 'val'},\n  ]\n",
    "flow metadata": "metadata: {tags: [val], benchmark: [{path: d/t}, {path: d/v, tags: [val]}]}\n",
    "nested": "metadata:\n  benchmark:\n    - {path: d/t, agent_params: {a: 1}}\n    - {split: val, path: d/v}\n",
    "quoted": '"metadata":\n  "benchmark":\n    - "path": "d/t"\n    - {"path": "d/v", "split": "val"}\n',
}


@pytest.mark.parametrize("text", LAYOUTS.values(), ids=LAYOUTS)
def test_test_entries_are_told_from_validation_entries_however_the_yaml_is_laid_out(tmp_path, text):
    (tmp_path / "pyproject.toml").write_text("")
    for name in "tv":
        (tmp_path / "d" / name).mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(f"name: x\n{text}")
    assert guard.protected_paths(str(tmp_path)) == {os.path.realpath(tmp_path / "d/t")}


@pytest.mark.parametrize("folder", sorted(ROOT.glob("examples/[0-9]*/")), ids=lambda path: path.name)
def test_the_examples_are_read_as_the_sdk_reads_them(folder):
    entries = [entry for config in folder.glob("*.yaml") for entry in load_yaml(config).metadata.benchmark]
    expected = {os.path.realpath(folder / entry.path) for entry in entries if entry.role == "test"}
    root = guard.find_project(str(folder))
    protected = guard.protected_paths(root)
    assert expected <= protected, "also the tests of another example that it reads"
    own = {path for path in expected if path.startswith(f"{folder}/")}
    assert {path for path in protected if path.startswith(f"{folder}/")} == own
    for config in folder.glob("*.yaml"):
        assert ask(ROOT, "Bash", command=f"evsys run {config.relative_to(ROOT)}") is None


def test_benchmarks_of_the_workspace_are_closed_unless_they_validate(tmp_path):
    folder = tmp_path / ".evsys/benchmarks"
    folder.mkdir(parents=True)
    for name in ("tools-v1-0a1b2c3d", "goal-v1-0a1b2c3d"):
        (folder / f"{name}.jsonl").write_text("")
    (tmp_path / "config.yaml").write_text(
        "metadata:\n  benchmark:\n    - {name: tools, split: val}\n    - {name: goal}\n"
    )
    assert guard.protected_paths(str(tmp_path)) == {os.path.realpath(folder / "goal-v1-0a1b2c3d.jsonl")}
    (tmp_path / "mine.yaml").write_text("metadata: {benchmark: [{name: goal, split: val}]}\n")
    guard.protected_paths.cache_clear()
    assert "test tasks" in ask(tmp_path, "Bash", command="evsys data preview goal --benchmark")
    assert ask(tmp_path, "Bash", command="evsys data preview tools --benchmark") is None


def test_a_label_that_is_changed_after_a_run_opens_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init-project", ".", "--date", "20260102", "--json"]) == 0
    config = Path("experiments/20260102_first_sft/config.yaml")
    assert main(["run", str(config), "--set", "run.backend.kind=mock", "--quiet"]) == 0
    config.write_text(config.read_text().replace("split: test", "split: val"))
    assert "closed" in ask(tmp_path, "Bash", command=f"cat {TEST}")
    assert "closed" in ask(tmp_path, "Bash", command=f"evsys run {config}")


def test_an_object_of_git_is_known_by_its_name(project):
    listed = subprocess.run(
        ["git", "ls-files", "-s", TEST, VAL], cwd=project, capture_output=True, text=True, check=True
    )
    closed, opened = (line.split()[1] for line in listed.stdout.splitlines())
    for command in (f"git show {closed[:12]}", f"git cat-file blob {closed}"):
        assert "closed" in ask(project, "Bash", command=command)
    assert ask(project, "Bash", command=f"git show {opened}") is None


def run_cursor_hook(project, event, **given):
    """The command of Cursor's hook file, as Cursor runs it: what it decides."""
    hooks = json.loads((ROOT / "hooks" / "hooks-cursor.json").read_text())["hooks"]
    sent = {"hook_event_name": event, "workspace_roots": [str(project)], "conversation_id": "c", **given}
    environ = {**os.environ, "CURSOR_PLUGIN_ROOT": str(ROOT)}
    done = subprocess.run(
        hooks[event][0]["command"], shell=True, input=json.dumps(sent), capture_output=True, text=True, env=environ,
        timeout=300, check=True, cwd=project,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_cursor_s_hooks_refuse_test_rows_and_keys_and_say_why(project):
    denied = run_cursor_hook(project, "beforeShellExecution", command=f"cat {TEST}", cwd=str(project))
    assert denied["permission"] == "deny" and "test split" in denied["agent_message"] == denied["user_message"]
    assert run_cursor_hook(project, "beforeShellExecution", command=f"cat {VAL}", cwd="")["permission"] == "allow"
    read = run_cursor_hook(project, "beforeReadFile", file_path=str(project / TEST), content="")
    assert read["permission"] == "deny" and "test split" in read["agent_message"]
    assert run_cursor_hook(project, "beforeReadFile", file_path=str(project / ".env"))["permission"] == "deny"
    assert run_cursor_hook(project, "beforeReadFile", file_path=str(project / VAL))["permission"] == "allow"
    given = json.dumps({"path": TEST})
    call = {"tool_name": "read_file", "tool_input": given}
    assert run_cursor_hook(project, "beforeMCPExecution", command="files serve", **call)["permission"] == "deny"
    launch = {"tool_name": "launch", "tool_input": json.dumps({"path": "relabelled.yaml"})}
    assert run_cursor_hook(project, "beforeMCPExecution", command="evsys mcp", **launch)["permission"] == "deny"
    launch["tool_input"] = json.dumps({"path": "config.yaml"})
    assert run_cursor_hook(project, "beforeMCPExecution", command="evsys mcp", **launch)["permission"] == "allow"
    broken = {**call, "tool_input": "{half"}
    assert run_cursor_hook(project, "beforeMCPExecution", command="files serve", **broken)["permission"] == "deny"


def test_cursor_s_hooks_do_nothing_where_the_plugin_is_not_found(project):
    hooks = json.loads((ROOT / "hooks" / "hooks-cursor.json").read_text())["hooks"]
    environ = {key: value for key, value in os.environ.items() if not key.endswith("PLUGIN_ROOT")}
    command = hooks["beforeReadFile"][0]["command"]
    done = subprocess.run(command, shell=True, input="{}", capture_output=True, text=True, env=environ, cwd=project)
    assert (done.returncode, done.stdout) == (0, "")
