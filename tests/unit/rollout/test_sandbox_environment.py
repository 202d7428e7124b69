"""Tasks in the local sandbox, through harbor's Trial: terminal work, tests that grade it, forgeries that do not."""

from __future__ import annotations

import json
import re
import shutil

import pytest

pytest.importorskip("harbor", reason="needs the extra harbor")

from evsys_sandbox.errors import SandboxUnavailable
from evsys_sandbox.sandbox import why_unavailable
from evsys_sdk.backends.mock_tokenizer import ByteTokenizer
from evsys_sdk.data_types import E2BVerifier, HarborTask, InProcessVerifier
from evsys_sdk.errors import DataError
from evsys_sdk.protocols import AgentSpec, EnvironmentSpec
from evsys_sdk.rollout.engine import HarborRolloutEngine
from evsys_sdk.rollout.harbor_trial import environment_config
from evsys_sdk.rollout.requirements import environment_problem, files_problem, kind_problem
from evsys_sdk.rollout.task_dirs import read_task, write_task
from evsys_sdk.rollout.trial import TrialSettings
from evsys_sdk.testing import ScriptedModel
from evsys_sdk.training.rendering import ChatRenderer
from evsys_sdk.training_api import SamplingParams

needs_sandbox = pytest.mark.skipif(why_unavailable() is not None, reason=why_unavailable() or "")
SHELL = AgentSpec(kind="chat", params={"max_turns": 4, "tools": ["bash"]})
DOCKERFILE = "FROM debian\nWORKDIR /app\n"


def bash(command):
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


def task(test_sh, dockerfile=DOCKERFILE, **metadata):
    verifier = E2BVerifier(dockerfile=dockerfile, test_sh=test_sh)
    return HarborTask(task_id="t", instruction="Work", verifier=verifier, metadata={"environment": True, **metadata})


async def roll(task, *replies, agent=SHELL, **options):
    said = list(replies)
    model = ScriptedModel(lambda message: said.pop(0) if len(said) > 1 else said[0])
    engine = HarborRolloutEngine(retries=0, **options)
    sampling = SamplingParams(max_tokens=400)
    [[rollout]] = await engine.roll_out(
        [task], sampler=model, renderer=ChatRenderer(ByteTokenizer()), sampling=sampling, agent=agent
    )
    rollout.metadata["prompts"] = model.prompts
    return rollout


@needs_sandbox
async def test_what_the_agent_did_in_the_sandbox_is_graded_by_the_tests():
    check = 'test "$(cat /app/out.txt)" = hello\n'
    right = await roll(task(check), bash("echo hello > out.txt"), bash("cat out.txt"), "done")
    wrong = await roll(task(check), bash("echo hullo > out.txt"), "done")
    assert (right.status, right.reward) == ("ok", 1.0), right.error
    assert (wrong.status, wrong.reward) == ("ok", 0.0), wrong.error
    assert "tool\nhello" in right.metadata["prompts"][2], "files outlive a command"
    assert len(right.turns) == 3 and right.metadata["lane"] == "trial"


@needs_sandbox
async def test_tests_may_write_a_reward_of_their_own_and_see_the_answer():
    test_sh = "if grep -q 42 /logs/agent/answer.txt; then echo 0.75; else echo 0; fi > /logs/verifier/reward.txt\n"
    rollout = await roll(task(test_sh), "it is 42")
    assert rollout.reward == 0.75, rollout.error


@needs_sandbox
async def test_a_task_directory_runs_as_it_is(tmp_path):
    folder = write_task(task("test -e /app/data.txt && test -e /app/made\n"), tmp_path / "x")
    (folder / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /app\nCOPY data.txt .\nENV NAME=made\n")
    (folder / "environment" / "data.txt").write_text("1\n")
    (folder / "task.toml").write_text('schema_version = "1.0"\n')
    rollout = await roll(read_task(folder), bash('touch "$NAME"'), "done")
    assert (rollout.status, rollout.reward) == ("ok", 1.0), rollout.error


def _with_links(tmp_path, copy):
    """A task whose environment/ holds a file, a link to it, and links to a file and a folder of the machine."""
    (tmp_path / "machine").mkdir()
    (tmp_path / "machine" / "key").write_text("secret\n")
    folder = write_task(task("find /app | sort; ! grep -rq secret /app && cat /app/own.txt\n"), tmp_path / "x")
    place = folder / "environment"
    (place / "Dockerfile").write_text(f"FROM debian\nWORKDIR /app\n{copy}\n")
    (place / "own.txt").write_text("1\n")
    (place / "same.txt").symlink_to("own.txt")
    (place / "key.txt").symlink_to(tmp_path / "machine" / "key")
    (place / "folder").symlink_to(tmp_path / "machine")
    (folder / "task.toml").write_text('schema_version = "1.0"\n')
    return read_task(folder)


def test_an_environment_that_is_itself_a_link_out_of_the_task_is_refused(tmp_path):
    (tmp_path / "machine").mkdir()
    (tmp_path / "machine" / "Dockerfile").write_text("FROM debian\nWORKDIR /app\nCOPY . .\n")
    (tmp_path / "machine" / "key").write_text("secret\n")
    folder = write_task(task("true\n"), tmp_path / "x")
    shutil.rmtree(folder / "environment")
    (folder / "environment").symlink_to(tmp_path / "machine")
    with pytest.raises(DataError, match=r"environment is a link that leads out of the task's directory, to .*machine"):
        read_task(folder)
    assert "leads out of the task's directory" in (files_problem(folder, tested=False) or "")
    (folder / "environment").unlink()
    (folder / "environment").symlink_to("environment")
    assert read_task(folder).task_id, "a link to itself leads nowhere, and there is no environment"
    (folder / "environment").unlink()
    (folder / "kept").mkdir()
    (folder / "kept" / "Dockerfile").write_text("FROM debian\n")
    (folder / "environment").symlink_to("kept")
    assert read_task(folder).task_id and files_problem(folder, tested=False) is None


@needs_sandbox
@pytest.mark.parametrize("copy", ["COPY . .", "COPY / /app/", "COPY own.txt same.txt ./"])
async def test_links_in_an_environment_that_leave_it_are_not_copied(tmp_path, copy):
    rollout = await roll(_with_links(tmp_path, copy), bash("ls; cat same.txt key.txt folder/key"), "done")
    assert (rollout.status, rollout.reward) == ("ok", 1.0), rollout.error
    heard = rollout.metadata["prompts"][1]
    assert "secret" not in heard and "1" in heard, "a link within environment/ is a file like others"


@needs_sandbox
@pytest.mark.parametrize("copy", ["COPY key.txt .", "COPY folder ./f", "COPY * .", "COPY ../../machine/key ."])
async def test_a_dockerfile_that_asks_for_such_a_link_is_refused_with_the_place(tmp_path, copy):
    rollout = await roll(_with_links(tmp_path, copy), "done")
    assert rollout.status == "infra_error"
    assert "outside of the task's environment/" in rollout.error and "not copied" in rollout.error


@needs_sandbox
@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
async def test_harbors_own_agents_work_on_it_too(tmp_path, agent, reward):
    folder = write_task(task("test -e /app/made\n"), tmp_path / "x")
    (folder / "solution").mkdir()
    (folder / "solution" / "solve.sh").write_text("#!/bin/bash\ntouch /app/made\n")
    rollout = await roll(read_task(folder), "unused", agent=AgentSpec(kind=agent))
    assert (rollout.status, rollout.reward) == ("ok", reward), rollout.error
    assert rollout.turns == []


@needs_sandbox
async def test_a_task_of_several_steps_is_harbors_business_from_first_to_last(tmp_path):
    folder = write_task(task("unused"), tmp_path / "x")
    (folder / "task.toml").write_text('schema_version = "1.0"\n[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n')
    for step, file in (("one", "a"), ("two", "b")):
        place = folder / "steps" / step
        (place / "tests").mkdir(parents=True)
        (place / "instruction.md").write_text(f"Make {file}")
        reward = "/logs/verifier/reward.txt"
        (place / "tests" / "test.sh").write_text(f"echo 0 > {reward}; test -e /app/{file} && echo 1 > {reward}\n")
    rollout = await roll(read_task(folder), bash("touch a"), "done", bash("touch wrong"), "done")
    assert (rollout.status, rollout.reward) == ("ok", 0.5), rollout.error
    assert len(rollout.turns) == 4 and "Make b" in rollout.metadata["prompts"][2]


@needs_sandbox
async def test_an_answer_is_graded_in_process_where_the_task_says_so():
    verifier = InProcessVerifier(fn_name="exact_match", expected="7")
    count = HarborTask(task_id="t", instruction="?", verifier=verifier, metadata={"environment": True})
    rollout = await roll(count, bash("expr 3 + 4"), "7")
    assert (rollout.reward, rollout.metadata["lane"]) == (1.0, "trial"), rollout.error


@needs_sandbox
@pytest.mark.parametrize(
    "forgery",
    [
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "(while true; do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done) > /dev/null 2>&1 &",
    ],
    ids=["beforehand", "in the background"],
)
async def test_a_reward_that_the_agent_wrote_is_nobodys(forgery):
    rollout = await roll(task("exit 1  # writes nothing to /logs/verifier/reward.txt\n"), bash(forgery), "done")
    assert rollout.reward is None and rollout.status == "infra_error"
    assert "RewardFileNotFoundError" in rollout.error
    graded = await roll(task("false\n"), bash(forgery), "done")
    assert (graded.status, graded.reward) == ("ok", 0.0), graded.error


@needs_sandbox
async def test_there_is_no_network_and_no_host_file_inside():
    probe = bash("cat /etc/shadow; ls /work /root/.ssh; cat < /dev/tcp/127.0.0.1/22")
    rollout = await roll(task("true\n"), probe, "done")
    heard = rollout.metadata["prompts"][1]
    assert "root:" not in heard and "exit code" in heard and rollout.reward == 1.0


@needs_sandbox
async def test_a_dockerfile_that_cannot_be_followed_is_infrastructure_and_says_which_step():
    rollout = await roll(task("true\n", "FROM debian\nRUN touch /usr/bin/thing\n"), "done")
    assert (rollout.status, rollout.reward) == ("infra_error", None)
    assert "touch /usr/bin/thing" in rollout.error and "docker" in rollout.error


@needs_sandbox
async def test_packages_of_a_dockerfile_are_found_on_this_machine_or_named():
    here = await roll(task("true\n", "FROM x\nRUN apt-get update && apt-get install -y sh && echo hi > made\n"), "done")
    assert (here.status, here.reward) == ("ok", 1.0), here.error
    lacking = await roll(task("true\n", "FROM x\nRUN apt-get install -y no-such-package sh\n"), "done")
    assert (lacking.status, lacking.reward) == ("infra_error", None)
    assert "installs no-such-package, and" in lacking.error and "another environment" in lacking.error


@pytest.mark.parametrize(
    "line",
    [
        "apt-get install -y curl",
        "curl -LsSf https://example.org/install.sh | sh",
        "uvx --with pytest pytest /tests",
        "python3 -m pip install pytest",
    ],
)
async def test_tests_that_need_a_network_are_infrastructure_and_not_a_failure_of_the_model(line):
    rollout = await roll(task(f"set -e\n{line}\n"), "done")
    assert (rollout.status, rollout.reward) == ("infra_error", None)
    assert "no network" in rollout.error and line in rollout.error


async def test_without_a_sandbox_the_run_stops_with_the_sentence_that_says_why(monkeypatch):
    monkeypatch.setattr("evsys_sandbox.sandbox.why_unavailable", lambda: "bubblewrap is not installed")
    with pytest.raises(SandboxUnavailable, match="bubblewrap is not installed"):
        await roll(task("true\n"), "done")


@needs_sandbox
async def test_an_agent_that_lives_in_tmux_is_told_why_it_cannot_here():
    params = {"model_name": "openai/policy", "api_base": "http://127.0.0.1:9/v1", "record_terminal_session": False}
    rollout = await roll(task("exit 0\n"), "hi", agent=AgentSpec(kind="terminus-2", params=params))
    assert rollout.reward is None and "no tmux session can be kept" in rollout.error
    assert "the agent `chat` with the tool `bash`" in rollout.error and "docker" in rollout.error


@needs_sandbox
async def test_a_command_may_use_tmux_within_itself():
    command = "echo tmux new-session -d -s a; echo tmux kill-server"
    rollout = await roll(task("exit 0\n"), bash(command), "done")
    assert "tool\ntmux new-session -d -s a\ntmux kill-server" in rollout.metadata["prompts"][1]


@needs_sandbox
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("wrote", "said"), [("", "empty"), ("often", "parse")])
async def test_the_same_mistake_in_many_rollouts_is_told_in_the_same_words(tmp_path, kept, wrote, said):
    settings = TrialSettings(trials_dir=tmp_path if kept else None)
    broken = task(f"printf '{wrote}' > /logs/verifier/reward.txt\n")
    errors = {(await roll(broken, "done", settings=settings)).error for _ in range(2)}
    [error] = errors
    assert said in error and "verifier/reward.txt" in error and "/tmp" not in error and str(tmp_path) not in error


@needs_sandbox
async def test_what_broken_tests_printed_is_in_the_record_and_in_the_message():
    broken = await roll(task("echo looking for it; no-such-command --now\n# writes no /logs/verifier/reward\n"), "done")
    assert (broken.status, broken.reward) == ("infra_error", None)
    assert "the tests printed: looking for it" in broken.error and "no-such-command: command not found" in broken.error
    assert "exit code 127" in broken.error
    assert broken.metadata["verifier"]["printed"].startswith("looking for it\n")
    silent = await roll(task("exit 3  # writes nothing to /logs/verifier/reward.txt\n"), "done")
    assert "the tests ended with exit code 3" in silent.error
    fine = await roll(task("echo all well\n"), "done")
    assert fine.reward == 1.0 and fine.metadata["verifier"]["printed"] == "all well"


@needs_sandbox
async def test_tests_whose_command_is_not_there_say_nothing_about_the_model():
    rollout = await roll(task("no-such-command\n"), "done")
    assert (rollout.status, rollout.reward) == ("infra_error", None) and "no-such-command" in rollout.error


@needs_sandbox
async def test_a_dockerfiles_own_texts_and_further_names_of_programs_are_there(tmp_path):
    folder = write_task(task("true\n"), tmp_path / "x")
    (folder / "environment" / "Dockerfile").write_text(HEREDOC)
    (folder / "task.toml").write_text('schema_version = "1.0"\n')
    check = "python -V && python3.99 -V && test $(cat /app/made /app/said /app/more/B | tr -d '\\n') = onehello2\n"
    (folder / "tests" / "run_tests.sh").write_text(check)
    rollout = await roll(read_task(folder), "done")
    assert (rollout.status, rollout.reward) == ("ok", 1.0), rollout.error or rollout.metadata["verifier"]


HEREDOC = """FROM debian
WORKDIR /app
ENV WORD=hello PATH="/opt/x:$PATH"
RUN apt-get update && ln -s $(which python3) /usr/local/bin/other; ln -s /usr/bin/python3 /usr/bin/python3.99
RUN <<EOF
set -e
echo one > made
EOF
COPY <<EOF said
$WORD
EOF
COPY <<A <<B more/
1
A
2
B
"""


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (
            '[task]\nname = "my task!"\n',
            r"task.toml: task.name = 'my task!' must be <organisation>/<name>.*local/my-task",
        ),
        ('[task]\nversion = "1"\n', r"task.toml: \[task\] has no name: add name = \"<organisation>/x\""),
    ],
)
async def test_a_name_that_harbor_does_not_take_is_told_in_our_words(tmp_path, section, words):
    folder = write_task(task("true\n"), tmp_path / "x")
    (folder / "task.toml").write_text(f'schema_version = "1.0"\n{section}')
    rollout = await roll(read_task(folder), "done")
    assert rollout.status == "infra_error" and re.search(words, rollout.error), rollout.error
    assert re.search(words, environment_problem(read_task(folder)))


def test_an_environment_that_does_not_exist_or_cannot_be_had_is_told_by_name(monkeypatch, tmp_path):
    kind_problem.cache_clear()
    assert kind_problem("sandbox") is None
    assert "closest: docker" in kind_problem("dokcer")
    assert kind_problem("no.such.Environment") == (
        "environment 'no.such.Environment' cannot be used on this machine: "
        "Failed to import module 'no.such': No module named 'no'"
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kind_problem("docker") == (
        "environment 'docker' cannot be used on this machine: Docker is not installed or not on PATH. "
        "Please install Docker and try again."
    )
    kind_problem.cache_clear()


async def test_an_engine_makes_the_environment_that_it_is_told_to():
    engine = HarborRolloutEngine().in_environment(EnvironmentSpec(kind="docker", params={"keep_containers": True}))
    config = environment_config(engine.settings.environment)
    assert (config.type.value, config.kwargs, config.import_path) == ("docker", {"keep_containers": True}, None)
    ours = environment_config(HarborRolloutEngine().settings.environment)
    assert ours.import_path.endswith(":SandboxEnvironment")
    own = environment_config(EnvironmentSpec(kind="my.place.Environment"))
    assert own.import_path == "my.place:Environment"


@needs_sandbox
async def test_where_nobody_names_an_agent_the_model_is_told_of_a_shell_and_can_act():
    done = task("test -e /app/made\n")
    rollout = await roll(done, bash("touch made"), "done", agent=None)
    assert (rollout.status, rollout.reward) == ("ok", 1.0), rollout.error
    assert '"name": "bash"' in rollout.metadata["prompts"][0]
    named = await roll(done, bash("touch made"), "done", agent=AgentSpec(kind="chat"))
    assert (named.reward, len(named.turns)) == (0.0, 1), "an agent that is named is what it says it is"


@needs_sandbox
@pytest.mark.parametrize(
    "damage",
    [
        "chmod 000 /app",
        "chmod 000 /app /logs /tests",
        "cd /; rm -rf /app/deep",
        "rm -rf /logs/verifier; ln -s /etc/passwd /logs/verifier",
        "echo 1 > /logs/verifier/reward.txt; chmod 500 /logs/verifier /logs",
        "mkdir -p /tests/test.sh/x",
        "ln -s /etc/passwd /tests/test.sh",
    ],
)
async def test_whatever_the_agent_does_to_its_folders_it_is_graded(damage):
    work = task("test -e /app/deep/made\n", dockerfile="FROM debian\nWORKDIR /app/deep\n")
    rollout = await roll(work, bash(damage), "done")
    assert (rollout.status, rollout.reward) == ("ok", 0.0), rollout.error


@needs_sandbox
@pytest.mark.parametrize(("end", "reward"), [("kill -9 $$", 0.0), ("exit 1", 0.0), ("exit 0", 1.0)])
async def test_folders_in_the_place_of_what_tests_write_do_not_keep_an_exit_code_from_grading(end, reward):
    files = "test-stdout.txt reward.txt reward.json"
    rollout = await roll(task(f"cd /logs/verifier; rm -f {files}; mkdir {files}; touch reward.txt/1; {end}\n"), "done")
    assert (rollout.status, rollout.reward) == ("ok", reward), rollout.error


@needs_sandbox
async def test_a_folder_in_the_place_of_what_tests_printed_does_not_hide_how_they_ended():
    own = "cd /logs/verifier; rm -f test-stdout.txt; mkdir test-stdout.txt; exit 3  # no /logs/verifier/reward.txt\n"
    rollout = await roll(task(own), "done")
    assert rollout.status == "infra_error" and "the tests ended with exit code 3" in rollout.error


@needs_sandbox
async def test_an_answer_that_the_agent_leaves_no_place_for_is_its_own_failure():
    rollout = await roll(task("true\n"), bash("rm -rf /logs/agent; ln -s /etc /logs/agent"), "done")
    assert rollout.status == "agent_error" and "/logs/agent/answer.txt" in rollout.error


@needs_sandbox
async def test_of_what_a_command_prints_too_much_the_beginning_and_the_end_are_shown():
    params = {"max_turns": 2, "tools": ["bash"], "bash_output_chars": 100}
    said = bash("echo first; yes | head -c 5000; echo last")
    cut = await roll(task("true\n"), said, "done", agent=AgentSpec(kind="chat", params=params))
    prompt = cut.metadata["prompts"][1]
    assert "tool\nfirst" in prompt and "last" in prompt and "[... 4911 characters are left out here ...]" in prompt
    whole = await roll(task("true\n"), said, "done")
    assert "left out" not in whole.metadata["prompts"][1]
