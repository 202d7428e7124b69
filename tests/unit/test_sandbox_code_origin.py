"""Whose code a program runs, by its command line: what only the tests may do, and what must stay possible for them."""

# ruff: noqa: E501  # a command stands on one line

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from evsys_sandbox.code_origin import Execution, is_agents, names_folder, runs_agents_code, takes_names_from_files

PROGRAMS = {
    "python3": "/usr/bin/python3.11",
    "sh": "/usr/bin/dash",
    "awk": "/usr/bin/mawk",
    "vim": "/usr/bin/vim.basic",
}


@pytest.fixture
def root(tmp_path):
    """A root directory with the machine's modules, the tests' and the agent's."""
    for place in (
        "usr/lib/python3/dist-packages/pytest/__init__.py", "usr/lib/python3.11/json/tool.py",
        "usr/lib/python3.11/lib-dynload/x.so", "usr/lib/python3.11/unittest/__init__.py", "tests/check.py", "app/solution.py", "app/main.c", "app/data.json",
        "app/pytest.py", "app/x.jar", "app/build/CMakeCache.txt",
    ):  # fmt: skip
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
    return str(tmp_path)


def is_of_agent(command: str, root: str, *, folder: str = "/app", stdin: str = "/dev/null") -> bool:
    words = shlex.split(command)
    program = os.path.join(folder, words[0]) if "/" in words[0] else PROGRAMS.get(words[0], f"/usr/bin/{words[0]}")
    file = words[0] if "/" in words[0] else f"/usr/bin/{words[0]}"
    return runs_agents_code(Execution(program, file, words, folder, {0: stdin, 3: "/app/f"}, root))


@pytest.mark.parametrize(
    "command",
    [
        "python3 /tests/check.py /app/answer.txt", "python3 -m pytest /tests/test_x.py --ctrf /logs/verifier/ctrf.json",
        "python3 -m pytest --junitxml=/logs/verifier/x.xml /app/tests", "python3 /usr/bin/pytest -rA /tests",
        "python3 -m json.tool /tests/x.json", "python3 -m check", "python3 -Im pytest /tests/check.py::test_it", "python3 -c 'import solution'",
        "python3 -uc 'print(1)' /app/f", "python3 -W ignore -X dev /tests/check.py", "python3 - /app/f", "python3",
        "bash /tests/test.sh", "bash -euo pipefail -c 'cat /app/f'", "bash -x /tests/../tests/a.sh", "sh -s /app/f",
        "bash --norc /tests/test.sh", "bash +x /tests/test.sh", "perl -lane 'print' /app/f", "perl -I /app/lib /tests/t.pl",
        "node -e '1' /app/f", "node --require /tests/a.js /tests/b.js", "ruby -rjson -e '1'", "tee /logs/verifier/reward.txt",
        "cp /app/out.txt /logs/verifier/", "awk '{ print }' /app/data.json", "sed -i s/0/1/ /app/data.json",
        "sed -f /tests/x.sed /app/data.json", "env A=1 python3 /app/solution.py", "timeout 20 ./f", "xargs bash",
        "make -C /tests", "make --directory=/tests grade", "git -C /tests status", "jq . /app/data.json",
        "curl -o /logs/verifier/x http://localhost", "find /app -exec bash {} +", "bash /dev/fd/63", "/tests/check",
    ],
)  # fmt: skip
def test_a_program_of_the_tests_is_one(command, root):
    assert not is_of_agent(command, root)


@pytest.mark.parametrize(
    "command",
    [
        "python3 /app/solution.py", "python3 solution.py", "python3 ./solution.py", "python3 -u -B solution.py",
        "python3 -m solution", "python3 -m app.solution", "python3 -msolution", "python3 -Wignore solution.py",
        "python3 -X dev -- solution.py", "python3 /tests/../app/x.py", "python3 .", "python3 //app/x.py",
        "bash run.sh", "bash -eo pipefail run.sh", "bash -x /app/run.sh", "bash --posix run.sh", "sh /tmp/x.sh",
        "bash /dev/shm/x", "bash /evsys/home/x", "bash /dev/fd/3", "python3 /proc/self/fd/3", "perl -w x.pl",
        "perl -I /tests x.pl", "node x.js", "node --require /tests/a.js x.js", "ruby x.rb", "awk -f x.awk", "awk -fx.awk",
        "sed -nf x.sed", "sed --file=x.sed", "make", "make -C /app", "make -C . REWARD=/logs/verifier/reward.txt",
        "make -f /tests/Makefile", "node /usr/bin/npm test", "cargo test", "go test ./...", "git commit", "java -jar x.jar",
        "java Main", "/lib64/ld-linux-x86-64.so.2 /app/g", "lua5.4 /app/x.lua", "php main.c", "ctest --test-dir build",
        "cmake --build=build", "tmux new-session -d", "gdb -x main.c", "python3 -m coverage run solution.py",
        "python3 /usr/bin/gunicorn solution:app", "vim -s main.c", "/app/g", "./g", "/app/.venv/bin/python /tests/check.py",
        "sqlite3 :memory:", "tclsh", "ed -s /tests/x", "python3 -m code", "python3 -m cProfile -m solution", "unknown-program",
        "python3 -m pdb /tests/check.py", "screen -d", "R --no-save", "lua5.4",
        "python3 /usr/bin/pytest -rA /app", "python3 -Im pytest", "python3 -m pytest solution.py::test_it", "python3 -m pytest -c /app/main.c /tests",
        "python3 -m pytest --rootdir=/app", "python3 -m pytest --pyargs solution", "python3 -m unittest", "python3 -m unittest discover",
        "python3 -m unittest discover -s /app", "python3 -m unittest -v solution", "python3 -m unittest discover -s/app /tests",
    ],
)  # fmt: skip
def test_a_program_of_the_agent_is_one(command, root):
    assert is_of_agent(command, root)


@pytest.mark.parametrize("folder", ["/app", "/tests"])
@pytest.mark.parametrize(
    "command",
    [
        "ruby -E UTF-8 /app/x.rb", "ruby -EUTF-8 /app/x.rb", "ruby -W:no-deprecated /app/x.rb", "ruby -W:no-xe. /app/x.rb",
        "ruby --encoding UTF-8 /app/x.rb", "ruby --enable=frozen-string-literal /app/x.rb", "ruby -ie /app/x.rb",
        "ruby -Ke /app/x.rb", "ruby -C /app x.rb", "ruby -C/app x.rb", "ruby -C.. app/x.rb", "ruby -x/app x.rb", "ruby --some-e /app/x.rb",
        "perl -i.save /app/x.pl", "perl -pie /app/x.pl", "perl -C /app/x.pl", "perl -x /app/x.pl", "perl -Fe /app/x.pl",
        "perl -CSDE /app/x.pl", "perl -wMre /app/x.pl", "perl -0xfe /app/x.pl", "perl -d:Trace /app/x.pl", "perl -De /app/x.pl",
        "bash -norc /app/x.sh", "bash -noprofile -norc /app/x.sh", "bash - /app/x.sh", "sh - /app/x.sh", "bash -rcfile /tests/rc /app/x.sh", "bash -restricted /app/x.sh",
        "bash -i --rcfile /app/rc", "zsh --emulate sh /app/x.sh", "zsh -opipefail /app/x.sh", "zsh -ofunctionargzero /app/x.sh",
        "ksh -T 1 /app/x.sh", "bash +c /app/x.sh", "bash +O extglob /app/x.sh",
        "python3 --some-option /app/solution.py", "pypy3 --jit off /app/solution.py", "python3 -Jc /app/solution.py",
        "node -p -r fs /app/x.js", "node -ep /app/x.js", "node --title x /app/x.js", "node --stack-size 500 /app/x.js",
        "node --max-old-space-size=64 /app/x.js", "node --no-warnings /app/x.js", "node --test /app", "node --some-option /app/x.js",
        "sed --fil /app/x.sed /tests/f", "sed -nEf /app/x.sed", "sed -n p /tests/f -f /app/x.sed", "sed --fil=/app/x.sed /tests/f",
        "gawk -i /app/x.awk 1", "gawk -l /app/x.so 1", "mawk -W exec /app/x.awk", "gawk --inc=/app/x.awk 1", "gawk -F: -f/app/x.awk",
    ],
)  # fmt: skip
def test_an_option_does_not_make_a_script_of_the_agent_the_tests_own(command, folder, root):
    assert is_of_agent(command, root, folder=folder)


@pytest.mark.parametrize("folder", ["/app", "/tests"])
@pytest.mark.parametrize(
    "command",
    [
        "ruby -E UTF-8 /tests/x.rb /app/f", "ruby -W:no-deprecated /tests/x.rb /app/f", "ruby -W0 -ne 'p' /app/f",
        "perl -i.save -pe 's/a/b/' /app/f", "perl -pi -e 's/a/b/' /app/f", "perl -0777 -ne 'print' /app/f", "perl -F: -lane 'print' /app/f",
        "perl -CSD -Mstrict -we '1' /app/f", "perl -l012 -0xfe -e '1' /app/f", "perl -MJSON::PP -E 'say 1' /app/f",
        "bash -lc 'cat /app/f'", "bash -ceuo pipefail 'cat /app/f'", "bash -O extglob -c 'cat /app/f'", "bash - /tests/x.sh /app/f",
        "bash +o posix /tests/x.sh /app/f", "zsh -f /tests/x.sh /app/f", "bash --noprofile --norc -e -o pipefail /tests/x.sh /app/f",
        "sh -ec 'cat /app/f'", "python3 -sSEc '1' /app/f", "python3 --version", "python3 -bb -X utf8 -Werror /tests/check.py /app/f",
        "node -p '1' /app/f", "node -pe '1' /app/f", "node --eval=1 /app/f", "node --max-old-space-size=64 --no-warnings /tests/x.js /app/f",
        "node --input-type module -e '1'", "node --some-option /tests/x.js", "sed -E s/0/1/ /app/f", "sed -n -i.bak -e s/0/1/ -- /app/f",
        "sed -Ei 's/a/b/;s/f/E/' /app/f", "awk -F f -vf=/app/x '{ print }' /app/f", "awk -v E=1 -f /tests/x.awk /app/f", "awk '{ print }' -f /app/f",
    ],
)  # fmt: skip
def test_options_leave_the_tests_their_own_programs(command, folder, root):
    assert not is_of_agent(command, root, folder=folder)


@pytest.mark.parametrize("command", ["sed -f - /tests/f", "awk -f /dev/stdin /tests/f", "ruby -E UTF-8", "perl --odd"])
def test_a_script_of_the_agent_as_input_after_options_is_the_agents(command, root):
    assert is_of_agent(command, root, folder="/tests", stdin="/app/f")
    assert not is_of_agent(command, root, folder="/tests", stdin="/tests/f")


@pytest.mark.parametrize(
    ("stdin", "is_agents_own"),
    [
        ("/app/f", True), ("/tests/f", False), ("pipe:[4]", False), ("/dev/null", False), ("socket:[1]", False),
        ("/tmp/sh-thd.a1B2c3 (deleted)", False), ("/tmp/f", True), ("/app/f (deleted)", True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["python3", "python3 -", "bash -s", "sh", "bash /dev/stdin", "node -", "perl"])
def test_code_that_a_program_reads_from_its_input(command, stdin, is_agents_own, root):
    assert is_of_agent(command, root, stdin=stdin) == is_agents_own


@pytest.mark.parametrize(
    "command",
    [
        "python3 -m unittest discover -s /tests", "python3 -m unittest check", "python3 -m unittest discover -s/tests",
        "python3 -m unittest /tests/check.py", "python3 -m pytest -k some /tests", "python3 -m pytest ../tests/check.py",
        "python3 -m pytest --tb short /tests/check.py --basetemp=/tmp/x",
    ],
)  # fmt: skip
def test_test_runners_with_tests_of_the_tests_are_the_tests_own(command, root):
    assert not is_of_agent(command, root)


@pytest.mark.parametrize("command", ["python3", "bash -s", "bash /dev/stdin"])
def test_a_file_is_no_here_document_by_its_name_alone(command, root):
    words, document = shlex.split(command), {0: "/tmp/sh-thd.a1B2c3 (deleted)"}
    program = PROGRAMS.get(words[0], f"/usr/bin/{words[0]}")
    run = Execution(program, f"/usr/bin/{words[0]}", words, "/tests", document, root)
    assert not runs_agents_code(run)
    assert runs_agents_code(replace(run, not_documents=frozenset({0})))


@pytest.mark.parametrize(
    ("files", "words", "is_agents_own"),
    [
        (["--checkpoint-action=exec=x"], ["tar", "cf", "x.tar", "--checkpoint-action=exec=x"], True),
        (["-cprint(1)"], ["python3", "-cprint(1)"], True),
        (["-c", "print(1)"], ["python3", "-c", "print(1)"], True),
        (["-c"], ["python3", "-c", "print(1)"], False),
        (["-lc"], ["bash", "-lc", "cat f"], False),
        ([], ["python3", "-cprint(1)"], False),
        (["-"], ["python3", "-"], False),
    ],
)
def test_an_option_that_is_the_name_of_a_file_of_the_agent_is_the_agents(files, words, is_agents_own, root):
    for name in files:
        (Path(root) / "app" / name).touch()
    program = PROGRAMS.get(words[0], f"/usr/bin/{words[0]}")
    for folder, expected in (("/app", is_agents_own), ("/tests", False)):
        assert runs_agents_code(Execution(program, f"/usr/bin/{words[0]}", words, folder, {}, root)) == expected


@pytest.mark.parametrize(
    ("command", "folder", "names_it"),
    [
        ("cp /app/x /logs/verifier/", "/app", True), ("tar xf a.tar -C/logs/verifier", "/app", True),
        ("cp --target-directory=/logs/verifier x", "/app", True), ("cp x verifier/", "/logs", True),
        ("tar xf /app/a.tar", "/logs/verifier", True), ("cp -r /app/logs/verifier/x /", "/app", False),
        ("tar xf a.tar -C /", "/app", False), ("unzip a.zip", "/", False), ("cp x /logs/verifier/../y", "/app", False),
    ],
)  # fmt: skip
def test_whether_a_command_line_names_the_folder_of_the_reward(command, folder, names_it, root):
    words = shlex.split(command)
    run = Execution(f"/usr/bin/{words[0]}", f"/usr/bin/{words[0]}", words, folder, {}, root)
    assert takes_names_from_files(run) and names_folder(run, "/logs/verifier") == names_it


def test_a_program_that_the_agent_linked_or_copied_is_the_agents(root):
    linked = Execution("/usr/bin/python3.11", "./python", ["./python", "-c", "1"], "/app", {}, root)
    copied = Execution("/app/python (deleted)", "/usr/bin/python3", ["python3", "-c", "1"], "/", {}, root)
    assert runs_agents_code(linked) and runs_agents_code(copied)


@pytest.mark.parametrize(
    "command", ["sqlite3 exp.db", "ed -s exp.txt", "vim -es -u NONE exp.txt", "make -f -", "tclsh"]
)
def test_commands_of_the_agent_as_input_are_the_agents_in_the_folder_of_the_tests_too(command, root):
    assert is_of_agent(command, root, folder="/tests", stdin="/app/keys")


def test_in_the_folder_of_the_tests_commands_need_no_path(root):
    for command in ("python3 check.py", "python3 -m check", "bash test.sh", "make", "./check"):
        assert not is_of_agent(command, root, folder="/tests")


@pytest.mark.parametrize(
    "path", ["/", "/app", "/home/x", "/tmp", "/logs", "/logs/agent", "/testsuite", "/usrx", "//app"]
)
def test_folders_that_an_agent_can_write_to(path):
    assert is_agents(path) and is_agents(f"/usr/..{path}") and is_agents(".", path)


@pytest.mark.parametrize(
    "path", ["/usr/bin/x", "/tests", "/tests/a/b", "/etc/x", "/logs/verifier/x", "/evsys/python", "//usr"]
)
def test_folders_that_it_cannot(path):
    assert not is_agents(path) and not is_agents(f"/app/..{path}")
