from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from evsys_sdk.record.layout import hold


def test_json_on_stdout_is_only_json(project):
    done = project.evsys("run", project.config(), "--json", EVSYS_LOGGING_LEVEL="DEBUG")
    summary = json.loads(done.stdout)
    assert summary["runs"][0]["status"] == "completed"
    assert "r0" in done.stderr, "progress goes to stderr"


def test_the_summary_file_is_what_json_prints(project):
    done = project.evsys("run", project.config(), "--json", "-o", "out/summary.json", check=True)
    assert json.loads((project.root / "out/summary.json").read_text()) == json.loads(done.stdout)


def test_piped_progress_is_plain_lines(project):
    done = project.evsys("run", project.config(), check=True)
    assert "\x1b" not in done.stderr + done.stdout
    assert "r0: step 12 of 12  training  loss" in done.stderr


def test_a_terminal_gets_a_live_table(project):
    path = project.config()
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "evsys_sdk.cli.main", "run", str(path)],
        cwd=project.root, stdout=subprocess.PIPE, stderr=follower, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(follower)
    shown = b""
    while True:
        try:
            chunk = os.read(leader, 4096)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    out = process.communicate(timeout=300)[0].decode()
    assert process.returncode == 0
    text = shown.decode(errors="replace")
    assert "\x1b[" in text and "12 of 12" in text and "r0" in text
    assert "\x1b" not in out and "r0: completed" in out


def test_steps_limits_every_run(project):
    project.evsys("run", project.config(), "--steps", "3", check=True)
    assert project.record()["metrics"]["steps"] == 3


def test_set_overrides_the_file(project):
    project.evsys(
        "run", project.config(), "--set", "run.seed=7", "--set", "run.algorithm.params.max_steps=2", check=True
    )
    assert project.record()["seed"] == 7 and project.record()["metrics"]["steps"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "evsys run: Missing argument 'PATH'"),
        (["rum"], "evsys: 'rum' is not a command; closest: run"),
        (["run", "config.yaml", "--stps", "3"], "evsys run: '--stps' is not an option; closest: --steps"),
        (["run", "config.yaml", "--output", "--dry"], "--output needs a value"),
        (["data", "ad"], "evsys data: 'ad' is not a command; closest: add"),
        (["dashboard", "--port", "99999"], "--port is 99999; give a whole number of at least 0 and at most 65535"),
        (["run", "config.yaml", "--steps", "0"], "--steps is 0; give a whole number of at least 1"),
        (["run", "nowhere.yaml"], "no such file"),
        (["run", "config.yaml", "--set", "run.seed"], "--set takes key=value"),
        (["schema", "algorithm", "sfd"], "'sfd' is not an algorithm; closest: sft"),
        (["schema", "algoritm", "sft"], "closest: algorithm"),
        (["list", "--kind", "nonsense"], "'nonsense' is not a registry"),
    ],
)
def test_a_wrong_command_line_is_one_message_and_exit_1(project, arguments, message):
    project.config()
    done = project.evsys(*arguments)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_unknown_log_level_is_refused(project):
    done = project.evsys("run", project.config(), EVSYS_LOGGING_LEVEL="loud")
    assert done.returncode == 1 and "'loud' is not a log level" in done.stderr and "Traceback" not in done.stderr


def test_validate_lists_the_runs(project):
    done = project.evsys("validate", project.config(), "--deep", check=True)
    assert done.stdout.splitlines()[1:] == ["  r0"]
    as_json = json.loads(project.evsys("validate", project.config(), "--json", check=True).stdout)
    assert as_json["ok"] is True and as_json["runs"] == ["r0"]


def test_validate_json_tells_problems_as_data(project):
    done = project.evsys("validate", project.config(naem="x"), "--json")
    problem = json.loads(done.stdout)["problems"][0]
    assert done.returncode == 1 and problem["path"] == "naem" and "closest: name" in problem["message"]


def _refusal(done):
    told = json.loads(done.stdout)
    assert done.returncode == 1 and told["ok"] is False and told["error"] in done.stderr
    return told


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["status", "nope"], "there is no experiment 'nope'"),
        (["logs", "nope"], "there is no experiment 'nope'"),
        (["stop", "nope"], "there is no experiment 'nope'"),
        (["show", "nope"], "there is no experiment 'nope'"),
        (["data", "show", "nope"], "nope"),
        (["run", "config.yaml", "--set", "run.seed"], "--set takes key=value"),
        (["run", "config.yaml", "--steps", "0"], "--steps is 0; give a whole number of at least 1"),
        (["status", "--nonsense"], "--nonsense"),
    ],
)
def test_every_verb_tells_a_refusal_as_data(project, words, error):
    project.config()
    assert error in _refusal(project.evsys(*words, "--json"))["error"]


@pytest.mark.parametrize("flags", [[], ["--detach"]], ids=["here", "detached"])
def test_a_launch_that_is_refused_says_why_as_data(project, minimal_run, flags):
    project.evsys("run", project.config(), check=True)
    changed = project.config(run=minimal_run(seed=7, algorithm__params={"max_steps": 3}))
    told = _refusal(project.evsys("run", changed, "--json", *flags))
    assert {each["path"]: (each["before"], each["value"]) for each in told["problems"]} == {
        "arms.r0.seed": (None, 7),
        "arms.r0.algorithm.params.max_steps": (None, 3),
        "arms.r0.algorithm.params.learning_rate": (0.001, None),
        "arms.r0.algorithm.params.num_epochs": (4, None),
    }
    with hold(project.root / "outputs/.hello_sft.lock", "it"):
        told = _refusal(project.evsys("run", project.config(), "--json", *flags))
    assert "is in use by process" in told["error"] and told["problems"] == []
    (project.root / "outputs/hello_sft.journal.sqlite").write_bytes(b"not a journal, however long one looks at it" * 99)
    told = _refusal(project.evsys("run", project.config(), "--json", *flags))
    assert "journal" in told["error"] and "--fresh" in told["error"]


def test_strict_refuses_ignored_settings_before_anything_is_spent(project, minimal_run):
    run = minimal_run(data__hf_split="x")
    del run["model"]["renderer_name"]
    done = project.evsys("run", project.config(run=run), "--strict")
    assert done.returncode == 1
    assert "run.data.hf_split   unread setting: source_kind is jsonl" in done.stderr
    assert not (project.root / "outputs").exists()


def test_an_unread_setting_is_a_warning_in_the_record_otherwise(project, minimal_run):
    run = minimal_run(data__hf_split="x", eval__enabled=False)
    done = project.evsys("run", project.config(run=run), check=True)
    unread = project.record()["unread_settings"]
    assert {"run.data.hf_split", "run.eval.metrics", "run.model.renderer_name"} <= set(unread)
    assert "warning: unread setting: run.data.hf_split" in done.stdout


def test_a_setting_inside_a_phase_that_nothing_reads_is_reported_with_its_place(project, minimal_run):
    sdft = {"kind": "sdft", "params": {"max_steps": 1, "num_samples": 1, "ema_decay": 0.5}}  # read with teacher: ema
    phases = [{"algorithm": {"kind": "sft", "params": {"max_steps": 1}}}, {"algorithm": sdft}]
    run = minimal_run(algorithm={"kind": "combo", "params": {"phases": phases}})
    del run["model"]["renderer_name"]
    path = project.config(run=run)
    done = project.evsys("run", path, check=True)
    place = "run.algorithm.params.phases[1].algorithm.params.ema_decay"
    assert project.record()["unread_settings"] == [place]
    assert f"warning: unread setting: {place}" in done.stdout
    strict = project.evsys("run", path, "--strict", "--fresh")
    assert strict.returncode == 1 and place in strict.stderr


def test_nothing_is_unread_in_a_config_that_uses_all_it_says(project, minimal_run):
    project.write_tasks()
    entry = {
        "name": "c",
        "path": "bench",
        "tags": ["val"],
        "engine": "harbor",
        "max_tokens": 20,
        "limit": 2,
        "run_every": 6,
    }
    run = minimal_run()
    del run["model"]["renderer_name"]
    path = project.config(
        run=run,
        description="d",
        callbacks=[{"kind": "local_logger"}],
        metadata={"benchmark": entry, "hypothesis": "h", "success_metric": "val.pass@1", "tags": ["t"], "own": 1},
    )
    done = project.evsys("run", path, "--strict")
    assert done.returncode == 0, done.stderr


def test_list_and_schema_answer(project):
    listed = json.loads(project.evsys("list", "--json", check=True).stdout)
    assert "sft" in listed["algorithms"] and "mock" in listed["backends"] and len(listed) == 14
    for kind in (
        "algorithm",
        "backend",
        "verifier",
        "metric",
        "transform",
        "data_store",
        "log_store",
        "inference_client",
    ):
        schemas = json.loads(project.evsys("schema", kind, check=True).stdout)
        assert schemas and all(schema["type"] == "object" for schema in schemas.values())
    assert "matrix" in json.loads(project.evsys("schema", "config", check=True).stdout)["properties"]


def test_completion_scripts_and_words(project):
    for shell in ("bash", "zsh", "fish"):
        assert "evsys completion words" in project.evsys("completion", shell, check=True).stdout
    words = project.evsys("completion", "words", "ru", check=True).stdout.split()
    assert words == ["run"]
    assert "--steps" in project.evsys("completion", "words", "run", "--", check=True).stdout.split()
    assert project.evsys("completion", "words", "schema", "algorithm", "sf", check=True).stdout.split() == ["sft"]
    assert "list" in project.evsys("completion", "words", "data", "", check=True).stdout.split()


def test_bash_really_completes(project):
    script = project.evsys("completion", "bash", check=True).stdout
    shim = project.root / "evsys"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m evsys_sdk.cli.main "$@"\n')
    shim.chmod(0o755)
    probe = script + '\nCOMP_WORDS=(evsys va); COMP_CWORD=1; _evsys; echo "${COMPREPLY[@]}"\n'
    environment = {**os.environ, "PATH": f"{project.root}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", probe], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "validate"
